"""Several machines by hand: agents that meet over TCP, here all on the loopback interface."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import GENEROUS, Paceline, all_end, eventually, free_port, takes_signals

if TYPE_CHECKING:
    from pathlib import Path


class Cluster:
    """The same command on several machines, each with a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.nodes: list[Paceline] = []
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, *args: str, nodes: int | str, rank: int | None = None, meet: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        node = Paceline(self.folder / f"node-{len(self.nodes)}")
        node.folder.mkdir()
        self.nodes.append(node)
        where = meet or ("--master-addr", "127.0.0.1", "--master-port", str(self.port))
        number = () if rank is None else ("--node-rank", str(rank))
        process = node.start("run", "--nnodes", str(nodes), *number, *where, *args, cwd=self.folder)
        self.started.append(process)
        return process

    def trains(self, *args: str, nodes: int | str, count: int) -> None:
        """Start it on so many machines, and wait until `STEPPING` runs on all."""
        for rank in range(count):
            self.start(*args, "script.py", nodes=nodes, rank=rank)
        eventually(lambda: all(_runs(node, count) for node in self.nodes), "all run")

    def finish(self) -> list[tuple[int, str, str]]:
        ends = [(process, *process.communicate(timeout=GENEROUS)) for process in self.started]
        return [(process.returncode, out, err) for process, out, err in ends]


@pytest.fixture
def cluster(paceline: Paceline) -> object:
    it = Cluster(paceline.folder)
    yield it
    for node in it.nodes:
        all_end(node.processes, "a node", node.home / "jobs")


SHOW = """
    import os
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"
    print(*(os.environ[name] for name in names))
"""


def test_numbers_over_uneven_nodes(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script(SHOW)
    for rank, ranks in ((1, 1), (0, 2), (2, 3)):
        cluster.start("-n", str(ranks), "--tee", "all", "script.py", nodes=3, rank=rank)
    ends = cluster.finish()
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    lines = sorted(line.rpartition("] ")[2] for _, out, _ in ends for line in out.splitlines())
    assert lines == [
        "0 6 0 0 3 127.0.0.1",
        "1 6 1 0 3 127.0.0.1",
        "2 6 0 1 3 127.0.0.1",
        "3 6 0 2 3 127.0.0.1",
        "4 6 1 2 3 127.0.0.1",
        "5 6 2 2 3 127.0.0.1",
    ]


def test_same_command_on_every_node_as_with_c10d(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script(SHOW)
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{cluster.port}", "--rdzv-id", "job7")
    for _ in range(3):
        cluster.start("script.py", nodes=3, meet=meet)
    ends = cluster.finish()
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    assert sorted(out.split()[0] for _, out, _ in ends) == ["0", "1", "2"]


@pytest.mark.torch
def test_all_reduce_over_nodes_with_a_restart(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script("""
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank())])
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 3:
            raise ValueError("first try")
        dist.all_reduce(total)
        print(total.item(), os.environ["TORCHELASTIC_RESTART_COUNT"])
        dist.destroy_process_group()
    """)
    for rank in (0, 1):
        cluster.start("-n", "2", "--max-restarts", "1", "script.py", nodes=2, rank=rank)
    for code, out, err in cluster.finish():
        assert (code, out) == (0, "6.0 1\n"), err
        assert "rank 3 failed first: ValueError: first try (node 1 on " in err


@pytest.mark.parametrize("killed", [False, True])
def test_a_stop_on_one_node_stops_all_even_if_node_0_is_killed_meanwhile(
    cluster: Cluster, paceline: Paceline, killed: bool
) -> None:
    paceline.script("""
        import os, signal, threading
        signal.signal(signal.SIGTERM, lambda *_: open("asked-" + os.environ["RANK"], "w").close())
        open("ready-" + os.environ["RANK"], "w").close()
        while not os.path.exists("end"):
            threading.Event().wait(0.1)
    """)
    for rank in (0, 1):
        cluster.start("--grace", "100s", "script.py", nodes=2, rank=rank)
    eventually(lambda: all((paceline.folder / f"ready-{r}").exists() for r in (0, 1)), "ranks run")
    asked = cluster.started[0 if killed else 1]
    takes_signals(asked)
    asked.send_signal(signal.SIGINT)
    eventually(lambda: all((paceline.folder / f"asked-{r}").exists() for r in (0, 1)), "ranks are stopped")
    if killed:
        os.kill(_status(cluster.nodes[0])["agent"]["pid"], signal.SIGKILL)
        assert cluster.started[0].wait(GENEROUS) == 137
    (paceline.folder / "end").touch()
    assert [code for code, _, _ in cluster.finish()] == [137 if killed else 130, 130]


STEPPING = """
    import os, pathlib, signal, sys, threading
    attempt, rank, ranks = (os.environ[name] for name in ("PACELINE_ATTEMPT", "RANK", "WORLD_SIZE"))
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
    print("attempt", attempt, "rank", rank, "of", ranks, flush=True)
    done = pathlib.Path("done")
    while not done.exists():
        signal.sigtimedwait([], 0.1)
"""


def _status(node: Paceline) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((node.job() / "status.json").read_text())
    return found


def _runs(node: Paceline, nodes: int) -> bool:
    """Whether `STEPPING` runs on it in an attempt of so many nodes."""
    if not any((node.home / "jobs").glob("*/status.json")):
        return False
    status = _status(node)
    logs = (node.job() / "logs" / str(status["attempt"])).glob("rank-*.log")
    says = any(f" of {nodes}\n" in log.read_text() for log in logs)  # RUNNING is a rank as soon as it is forked
    return status["state"] == "RUNNING" and status["world_size"] == nodes and says


def test_a_job_goes_on_without_a_killed_node_and_with_a_new_one(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script(STEPPING)
    cluster.trains(nodes="1:3", count=3)
    os.kill(_status(cluster.nodes[0])["agent"]["pid"], signal.SIGKILL)
    left = cluster.nodes[1:]
    eventually(lambda: all(_runs(node, 2) for node in left), "two go on")
    address, port = _status(left[0])["coordinator"]
    meet = ("--master-addr", address, "--master-port", str(port))
    cluster.start("script.py", nodes="1:3", rank=1, meet=meet)
    eventually(lambda: all(_runs(node, 3) for node in cluster.nodes[1:]), "three run again")
    (paceline.folder / "done").touch()
    ends = cluster.finish()
    assert [code for code, _, _ in ends] == [137, 0, 0, 0], ends
    assert [line.rpartition(" ")[2] for line in ends[1][1].splitlines()][-3:] == ["3", "2", "3"]
    assert "joins; starting again with 3 nodes, from the last checkpoint" in ends[1][2]


@pytest.mark.parametrize(("victim", "how"), [(0, signal.SIGTERM), (1, signal.SIGHUP), (1, signal.SIGKILL)])
def test_the_others_go_on_when_the_launcher_of_one_machine_ends(
    cluster: Cluster, paceline: Paceline, victim: int, how: signal.Signals
) -> None:
    paceline.script(STEPPING)
    cluster.trains(nodes="1:2", count=2)
    cluster.started[victim].send_signal(how)  # as when a machine of the spot market is shut down
    eventually(lambda: _runs(cluster.nodes[1 - victim], 1), "the other one goes on")
    (paceline.folder / "done").touch()
    ends = cluster.finish()
    codes = {signal.SIGTERM: 143, signal.SIGHUP: -signal.SIGHUP, signal.SIGKILL: -signal.SIGKILL}
    assert (ends[victim][0], ends[1 - victim][0]) == (codes[how], 0), ends
    told = "that coordinated the job has left it" if victim == 0 else "leaves; starting again with 1 node"
    assert told in ends[1 - victim][2]


def test_a_job_that_lacks_nodes_waits_for_others_and_gives_up(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script(STEPPING)
    cluster.start("script.py", nodes="2:3", rank=1)
    eventually(lambda: any((cluster.nodes[0].home / "jobs").glob("*/status.json")), "it looks for node 0")
    cluster.start("--rdzv-conf", "join_timeout=20,last_call_timeout=21", "script.py", nodes="2:3", rank=0)
    eventually(lambda: all(_runs(node, 2) for node in cluster.nodes), "two run, after a last call")
    os.kill(_status(cluster.nodes[0])["agent"]["pid"], signal.SIGKILL)
    ends = cluster.finish()
    assert [code for code, _, _ in ends] == [137, 1]
    assert "is gone, and the job needs 2 nodes" in ends[1][2]
    assert "1 of at least 2 nodes did not come within 20 s" in ends[1][2]


def test_nodes_that_do_not_come_are_counted(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script(SHOW)
    cluster.start("script.py", nodes=3, rank=1)
    eventually(lambda: any((cluster.nodes[0].home / "jobs").glob("*/status.json")), "it looks for node 0")
    cluster.start("--rdzv-conf", "join_timeout=20", "script.py", nodes=3, rank=0)
    ends = cluster.finish()
    assert [code for code, _, _ in ends] == [1, 1]
    assert all("1 of 3 nodes did not come within 20 s" in err for _, _, err in ends)
    assert all("; waiting for 3 nodes at 127.0.0.1:" in err.splitlines()[0] for _, _, err in ends)


def test_node_that_nobody_answers(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script(SHOW)
    cluster.start("--rdzv-conf", "join_timeout=1", "script.py", nodes=2, rank=1)
    ((code, _, err),) = cluster.finish()
    assert code == 1
    assert f"cannot reach node 0 at 127.0.0.1:{cluster.port} within 1 s" in err


def test_ctrl_c_while_node_0_is_waited_for(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script("")
    process = cluster.start("script.py", nodes=2, rank=1)
    eventually(lambda: any((cluster.nodes[0].home / "jobs").glob("*/status.json")), "it waits")
    takes_signals(process)
    process.send_signal(signal.SIGINT)
    assert [code for code, _, _ in cluster.finish()] == [130]


def test_node_with_another_token_is_kept_out(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script(SHOW)
    first = cluster.start("--rdzv-id", "a", "script.py", nodes=2, rank=0)
    eventually(lambda: _listens(cluster.port), "node 0 listens")
    second = cluster.start("--rdzv-id", "b", "script.py", nodes=2, rank=1)
    _, err = second.communicate(timeout=GENEROUS)
    assert second.returncode == 2
    assert "does not know this job's token" in err
    takes_signals(first)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=GENEROUS)
    assert first.returncode == 130


def test_strangers_do_not_hold_up_a_job(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script(SHOW)
    cluster.start("script.py", nodes=2, rank=0)
    eventually(lambda: _listens(cluster.port), "node 0 listens")
    strangers = []
    for number in range(100):
        stranger = socket.create_connection(("127.0.0.1", cluster.port))
        with contextlib.suppress(OSError):  # some are dropped already
            stranger.send((b"GET / HTTP/1.1\r\n\r\n", b"", b'{"proof": "\xc3\xa9"}\n', b"x" * 10000)[number % 4])
        strangers.append(stranger)
    cluster.start("script.py", nodes=2, rank=1)
    assert [code for code, _, _ in cluster.finish()] == [0, 0]
    for stranger in strangers:
        stranger.close()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def own_address() -> str:
    """An address of this machine that others can reach, as far as it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has no network")
        return str(sock.getsockname()[0])


@pytest.mark.parametrize(("is_local", "token"), [(True, ""), (False, ""), (False, "secret")])
def test_node_0_listens_at_its_address_alone_and_says_who_may_join(
    cluster: Cluster, paceline: Paceline, monkeypatch: pytest.MonkeyPatch, is_local: bool, token: str
) -> None:
    main, other = ("127.0.0.1", own_address()) if is_local else (own_address(), "127.0.0.1")
    assert main != other
    monkeypatch.setenv("PACELINE_TOKEN", token)  # an empty one is none
    paceline.script("")
    meet = ("--master-addr", main, "--master-port", str(cluster.port))
    cluster.start("script.py", nodes=2, rank=0, meet=meet)

    def connects(address: str) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((address, cluster.port), timeout=5):
            return True
        return False

    eventually(lambda: connects(main), "node 0 listens")
    assert not connects(other)
    assert not connects("::1")
    cluster.start("script.py", nodes=2, rank=1, meet=meet)
    (code_0, _, first), (code_1, _, second) = cluster.finish()
    assert (code_0, code_1) == (0, 0)
    said = [line for line in first.splitlines() if "may join" in line]
    assert len(said) == (not is_local and not token)  # nobody else can connect to loopback
    for line in said:
        assert f"anyone who can connect to {main}:{cluster.port} may join this job" in line
        assert "set PACELINE_TOKEN to a secret" in line
    assert "may join" not in second


def test_a_starved_agent_is_not_lost(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script(STEPPING)
    cluster.trains("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=4", nodes=2, count=2)
    for node in cluster.nodes:
        agent = _status(node)["agent"]["pid"]
        os.kill(agent, signal.SIGSTOP)
        time.sleep(6)  # longer than the limit of a machine that is silent; its kernel has six times as long
        os.kill(agent, signal.SIGCONT)
    (paceline.folder / "done").touch()
    assert [code for code, _, _ in cluster.finish()] == [0, 0]


def test_an_agent_that_is_suspended_for_long_is_lost(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script(STEPPING)
    cluster.trains("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3", nodes=2, count=2)
    agent = _status(cluster.nodes[0])["agent"]["pid"]
    os.kill(agent, signal.SIGSTOP)
    eventually(lambda: cluster.started[1].poll() is not None, "the other one ends")
    os.kill(agent, signal.SIGCONT)
    ends = cluster.finish()
    assert [code for code, _, _ in ends] == [1, 1]
    assert "which coordinates the job, is gone: it did not answer for 18 s" in ends[1][2]


def test_parameter_servers_are_stopped_when_the_first_rank_has_succeeded(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script("""
        import json, os, threading, time
        from pathlib import Path
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        print(task["type"], task["index"], flush=True)
        if task["type"] != "chief":
            Path("serves-" + os.environ["RANK"]).touch()
            threading.Event().wait()
        while len(list(Path().glob("serves-*"))) < 3:
            time.sleep(0.05)
    """)
    for rank in (0, 1):
        given = ("--framework", "tensorflow", "--env", "PACELINE_TF_ROLES=chief,ps=1", "--tee", "all")
        cluster.start(*given, "-n", "2", "--no-python", sys.executable, "script.py", nodes=2, rank=rank)
    ends = cluster.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    said = sorted(line.rpartition("] ")[2] for _, out, _ in ends for line in out.splitlines())
    assert said == ["chief 0", "ps 0", "worker 0", "worker 1"]


def test_ranks_that_hang_over_nodes_are_named_on_each_and_start_again(cluster: Cluster, paceline: Paceline) -> None:
    paceline.script("""
        import os, sys, time, types
        class Group:
            size = lambda self: 2
            _get_sequence_number_for_group = lambda self: 5 - int(os.environ["RANK"])
        group = Group()  # as torch.distributed has it
        world = types.SimpleNamespace(pg_map={group: ()}, pg_names={group: "0"})
        sys.modules["torch.distributed.distributed_c10d"] = types.SimpleNamespace(_world=world)
        def load():
            time.sleep(9999)
        if os.environ["PACELINE_ATTEMPT"] == "0":
            load()
    """)
    for rank in (0, 1):
        given = ("--hang", "restart", "--hang-after", "2s", "--max-restarts", "1", "--name", "it")
        cluster.start(*given, "script.py", nodes=2, rank=rank)
    ends = cluster.finish()
    assert [code for code, _, _ in ends] == [0, 0], ends
    line = (
        r"for \d s rank 1 on \S+ \(pid \d+\) has not entered a collective, in which rank 0 waits; it is at script.py:10"
    )
    for node, (_, _, err) in zip(cluster.nodes, ends, strict=True):
        assert re.search(f"{line} in load: it sleeps; see: paceline why it", err), err
        assert "starting again: attempt 1 of 1" in err
        why = node("why", "it").stdout
        assert re.search("it started again: node 1 on .*: the ranks hung: rank 1 on .* has not entered", why), why


def test_more_tasks_of_srun_than_nodes_are_refused(paceline: Paceline) -> None:
    paceline.env.update(SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="4", SLURM_JOB_ID="7")
    (paceline.folder / "script.py").touch()
    done = paceline("run", "--nnodes", "2", "--master-addr", "127.0.0.1", "script.py")
    assert done.returncode == 2
    assert "srun has started 4 tasks for --nnodes 2, which needs one on each node: give srun --ntasks-per-node=1" in (
        done.stderr
    )
