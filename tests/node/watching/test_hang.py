"""Who keeps whom waiting: a pure function of where the ranks are."""

from __future__ import annotations

import json
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import eventually

from paceline.node.ranks.answering import last_collectives
from paceline.node.watching.hang import find, grouped
from paceline.node.watching.outside import Activity, Family, Moment, Process


def stand(rank: int, numbers: dict[str, int] | None, **changes: Any) -> Any:
    """A rank that has stood still and idle for 100 s at line 5 of train.py, in the last collective of each group."""
    sizes = dict.fromkeys(numbers or (), 4)
    frames = [["/home/ada/train.py", changes.pop("line", 5), "main"]]
    collectives = [
        {"group": group, "number": number, "kind": changes.pop("kind", "all_reduce"), "shapes": [[8]],
         "dtypes": ["Float"], "over": False} for group, number in (numbers or {}).items()
    ]  # fmt: skip
    answer = {
        "numbers": numbers, "sizes": sizes, "framework": True, "collectives": collectives,
        "threads": [{"name": "MainThread", "frames": frames}],
    }  # fmt: skip
    return {
        "rank": rank, "node": 0, "host": "a", "pid": 100 + rank, "answer": None if numbers is None else answer,
        "still": 100.0, "idle": 100.0, "state": "S", "call": "", "file": "", "children": [],
        "seen": [], "unseen": "", "machine": {}, "device": "", **changes,
    }  # fmt: skip


def test_ranks_at_one_line_are_one_place() -> None:
    found = find(
        [stand(rank, {"0": 7}) for rank in range(63)] + [stand(63, {"0": 6}, line=9, call="futex", device="3")], 60.0
    )
    assert found is not None
    assert found["line"] == (
        "rank 63 on a (GPU 3, pid 163) has not entered all_reduce 7 (Float [8]), in which ranks 0 to 62 wait; "
        "it is at train.py:9 in main: it waits for a lock"
    )
    assert [place["ranks"] for place in found["places"]] == [[63], list(range(63))]


def test_all_in_the_same_collective_is_said() -> None:
    found = find([stand(rank, {"0": 7}) for rank in range(2)], 60.0)
    assert found is not None
    assert (found["kind"], found["ranks"]) == ("together", [])
    assert "all ranks are in all_reduce 7 (Float [8]), and none goes on" in found["line"]


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        ([{}, {}], ""),
        ([{"network": 0.0}, {}], ""),
        ([{"network": 0.0}, {"network": 2300.0}], "; the network of each machine carries 0 B to 2.3 kB/s"),
        ([{"network": 5e6, "gpu_use": 1.0}, {"network": 5e6, "gpu_use": 1.0}],
         "; the network of each machine carries 5 MB/s; their GPUs compute 100 % of the time"),
        ([{"gpu_use": 0.0}, {"gpu_use": 1.0}], "; their GPUs compute 0 to 100 % of the time"),
    ],
)  # fmt: skip
def test_what_machines_do_while_all_wait_is_said(machines: list[Any], said: str) -> None:
    stands = [
        stand(rank, {"0": 7}, host="ab"[rank % 2], node=rank % 2, machine=machines[rank % 2]) for rank in range(4)
    ]
    found = find(stands, 60.0)
    assert found is not None
    assert found["line"].endswith(f"they are at train.py:5 in main{said}")
    late = find([*stands[1:], stand(0, {"0": 6}, machine=machines[0])], 60.0)
    assert late is not None
    assert "network" not in late["line"], "a rank is to blame"


def test_the_rank_behind_in_one_group_and_ahead_in_none_is_to_blame() -> None:
    ranks = [stand(0, {"0": 4}), stand(1, {"0": 4}), stand(2, {"0": 3, "1": 9}), stand(3, {"0": 3, "1": 8})]
    found = find(ranks, 60.0)
    assert found is not None
    assert found["ranks"] == [3]


def test_the_last_collective_of_a_rank_that_an_exception_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"is_p2p": False, "profiling_name": "gloo:all_reduce", "input_sizes": [[5]], "input_dtypes": ["Float"]}
    entries = [
        {"process_group": [group, ""], "collective_seq_id": number, "pg_id": group, **common}
        for group, number in (("0", 6), ("0", 7), ("1", 2))
    ]
    status = {group: {"last_completed_collective": number} for group, number in (("0", "7"), ("1", "1"))}
    recorded = json.dumps({"entries": entries, "pg_status": status}).encode()
    c10d = SimpleNamespace(_dump_fr_trace_json=lambda: recorded)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=SimpleNamespace(_distributed_c10d=c10d)))
    assert last_collectives() == "all_reduce 7 (Float [5]), all_reduce 2 (Float [5]), which had not ended"


def test_different_collectives_under_one_number_are_a_mismatch() -> None:
    found = find([stand(0, {"0": 7}), stand(1, {"0": 7}), stand(2, {"0": 7}, kind="barrier")], 60.0)
    assert found is not None
    assert (found["kind"], found["ranks"]) == ("mismatch", [2])


def test_collectives_of_groups_in_different_orders_are_said() -> None:
    ranks = [stand(0, {"1": 1, "2": 0}), stand(1, {"1": 0, "2": 1})]
    for one, group in zip(ranks, "12", strict=True):
        one["answer"]["collectives"] = [it for it in one["answer"]["collectives"] if it["group"] == group]
    found = find(ranks, 60.0)
    assert found is not None
    assert (found["kind"], found["ranks"], found["waiting"]) == ("mismatch", [1], [0])
    assert found["line"].startswith(
        "rank 1 is in all_reduce 1 (Float [8]) of process group 2, and rank 0 in all_reduce 1 (Float [8]) of process "
        "group 1: they enter collectives of several groups in different orders; rank"
    )


def test_of_two_ranks_the_one_in_a_checkpoint_is_named_first_and_both_places_are_said() -> None:
    one, other = stand(0, {"0": 7}, kind="all_gather"), stand(1, {"0": 7}, line=6)
    save = ["/opt/venv/lib/python3.12/site-packages/torch/distributed/checkpoint/state_dict_saver.py", 9, "save"]
    one["answer"]["threads"][0]["frames"].insert(0, save)
    one["answer"]["threads"][0]["frames"].insert(0, [save[0].replace("checkpoint/state_dict_saver", "c10d"), 1, "f"])
    found = find([one, other], 60.0)
    assert found is not None
    assert found["ranks"] == [0]
    assert "within a distributed checkpoint, which all ranks have to call, and rank 1 on a (pid 101)" in found["line"]


def test_a_pool_that_waits_for_its_workers() -> None:
    one = stand(0, {}, call="futex")
    frames = [
        ["/usr/lib/python3.12/threading.py", 5, "wait"],
        ["/usr/lib/python3.12/multiprocessing/pool.py", 9, "get"],
    ]
    one["answer"]["threads"][0]["frames"][:0] = frames
    assert grouped([one])[0]["why"].startswith("it waits for the workers of a multiprocessing.Pool; what one had to do")


def test_a_rank_that_does_not_answer_is_to_blame_unless_it_works() -> None:
    silent = stand(1, None, state="S")
    found = find([stand(0, {"0": 7}), silent], 60.0)
    assert found is not None
    assert found["ranks"] == [1]
    assert "C code may hold the interpreter's lock" in found["line"]
    assert find([stand(0, {"0": 7}), {**silent, "idle": 1.0}], 60.0) is None


def test_a_process_without_a_framework_may_wait() -> None:
    one = stand(0, {})
    assert find([one], 60.0) is not None
    one["answer"]["framework"] = False
    assert find([one], 60.0) is None


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([5, 9, 5, 5], "no rank works; rank 1 on a (pid 101) is at train.py:9 in main, "
                       "while ranks 0, 2, 3 on a are at train.py:5 in main"),
        ([9, 5, 5, 8, 5], "no rank works; rank 0 on a (pid 100) is at train.py:9 in main, "
                          "while ranks 1, 2, 4 on a are at train.py:5 in main"),
        ([5, 9], "no rank works; rank 0 on a (pid 100) is at train.py:5 in main, "
                 "and rank 1 on a (pid 101) is at train.py:9 in main"),
        ([5, 6, 7], "no rank works; rank 0 on a (pid 100) is at train.py:5 in main"),
        ([5, 5, 5], "no rank works; ranks 0 to 2 on a are at train.py:5 in main"),
    ],
)  # fmt: skip
def test_of_ranks_whose_collectives_nobody_numbers_those_elsewhere_than_most_come_first(
    lines: list[int], said: str
) -> None:
    found = find([stand(rank, {}, line=line) for rank, line in enumerate(lines)], 60.0)
    assert found is not None
    assert (found["kind"], found["ranks"], found["line"]) == ("idle", [], said), "it is known of none that others wait"


@given(
    numbers=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    still=st.floats(0, 200),
    working=st.sets(st.integers(0, 5)),
)
def test_who_works_is_never_blamed_and_who_is_ahead_neither(
    numbers: list[int], still: float, working: set[int]
) -> None:
    ranks = [
        stand(rank, {"0": number}, still=still, idle=0.0 if rank in working else still)
        for rank, number in enumerate(numbers)
    ]
    found = find(ranks, 60.0)
    if found is None:
        behind = {rank for rank, number in enumerate(numbers) if number < max(numbers)} or set(range(len(numbers)))
        assert still < 60.0 or behind & working
        return
    assert still >= 60.0
    assert not working & set(found["ranks"])
    assert all(numbers[rank] < max(numbers) for rank in found["ranks"])
    assert sorted(rank for place in found["places"] for rank in place["ranks"]) == list(range(len(numbers)))


def test_places_of_ranks_that_go_on() -> None:
    assert [place["where"] for place in grouped([stand(0, {"0": 1}), stand(1, {"0": 1}, line=6)])] == [
        "train.py:5 in main", "train.py:6 in main"
    ]  # fmt: skip


def test_a_rank_without_workers_loads_itself() -> None:
    one = stand(0, {})
    fetch = ["/opt/venv/lib/python3.12/site-packages/torch/utils/data/_utils/fetch.py", 54, "fetch"]
    one["answer"]["threads"][0]["frames"].append(fetch)
    assert grouped([one])[0]["why"] == "it loads the next batch itself"


def test_what_a_waiting_process_does_is_no_work() -> None:
    one, family = Activity(0.0), Family(1.0, [("S", "python3")])
    for cpu, all_cpu, state, children, now, idle in (
        (1.0, 1.0, "S", family, 0.0, 0.0),
        (1.0, 1.0, "S", family, 5.0, 0.0),  # the first look at its children
        (1.0001, 1.01, "S", family, 10.0, 5.0),  # a loader that looks for its workers
        (1.0201, 1.02, "S", family, 15.0, 0.0),
        (1.0201, 1.02, "S", family, 20.0, 0.0),
        (1.0201, 1.02, "S", Family(1.9, family.children), 25.0, 0.0),
        (9.0, 9.0, "T", family, 30.0, 5.0),  # it was stopped
    ):
        one.see(Process(state, cpu=cpu, all_cpu=all_cpu), now, lambda it=children: it)
        assert one.idle(now) == idle, now


def test_connections_count_as_work_while_they_carry_something() -> None:
    one = Activity(0.0)
    for carried, now, idle in (
        ({7: 0}, 0.0, 0.0),
        ({7: 0}, 5.0, 0.0),  # the first look at them
        ({7: 0}, 10.0, 5.0),
        ({7: 90_000}, 15.0, 10.0),  # metrics that a library sends every 15 s
        ({7: 90_000}, 20.0, 15.0),
        ({7: 190_000}, 25.0, 20.0),
        ({7: 190_000, 8: 100_000}, 30.0, 0.0),
        ({8: 200_000}, 35.0, 0.0),
        ({8: 200_001}, 40.0, 5.0),
    ):
        one.see(Process("S"), now, lambda it=carried: Family(carried=it))
        assert one.idle(now) == idle, now


def test_a_slow_transfer_is_work_however_often_it_is_looked_at() -> None:
    one = Activity(0.0)
    for number in range(40):
        carried = {7: 20_000 * (number // 3)}  # in bursts of 1.5 s, and nothing else moves
        one.see(Process("S"), number / 2, lambda it=carried: Family(carried=it))
        assert one.idle(number / 2) <= 1.5, number


@pytest.mark.parametrize(("file", "idle"), [("socket:[7]", 0.0), ("pipe:[7]", 10.0)])
def test_without_counts_of_connections_a_main_thread_that_wakes_on_a_socket_works(file: str, idle: float) -> None:
    one = Activity(0.0)
    for now in (0.0, 10.0, 20.0):  # the second is the first look at its connections
        one.see(Process("S", switches=int(20 * now), call="recvfrom", file=file), now, Family)
    assert one.idle(20.0) == idle


def test_connections_between_ranks_and_from_others_do_not_count() -> None:
    def carried(*ranks: int, nodes: tuple[str, ...] = ()) -> int:
        found = Moment(ranks, nodes).carried([os.getpid()])
        return 0 if found is None else sum(found[inode] for inode in found if inode in own)

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        own = {os.stat(f"/proc/self/fd/{it.fileno()}").st_ino for it in (near, far)}
        with far:
            near.sendall(bytes(5000))
            eventually(lambda: carried() >= 5000, "the other end is no rank's, and what is sent counts")
            assert carried() < 10_000, "the end that the server has does not count"
            assert carried(os.getpid()) == 0, "both ends are of ranks"
            assert carried(nodes=("127.0.0.1",)) == 0, "the other end is on another node"
