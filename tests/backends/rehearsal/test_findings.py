"""What differs between the records of ranks, and what is no difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.rehearsal.findings import findings
from paceline.backends.rehearsal.records import Course, named, read
from paceline.backends.rehearsal.summary import nothing, summary

JOINED = {"e": "joined", "at": "train.py:1"}
END = {"e": "end", "alone": False}


def collective(kind: str, line: int, **facts: Any) -> dict[str, Any]:
    return {"e": "collective", "kind": kind, "group": "0", "ranks": [0, 1], "at": f"train.py:{line}", **facts}


def step(number: int, weights: float = 1.0, **facts: Any) -> dict[str, Any]:
    held = {"sharded": False, "shapes": 1, "sums": [[weights, abs(weights)]], "state": [], "rate": [0.1], **facts}
    it = {"e": "step", "optimizer": 0, "number": number, "loader": 1, "memory": 1 << 20, "at": "train.py:9"}
    return {**it, "weights": held}


def use(kind: str, line: int, *, existed: bool = False) -> dict[str, Any]:
    return {"e": "file", "path": "/x/a.pt", "kind": kind, "at": f"train.py:{line}", "child": False, "existed": existed}


PARALLEL = {"e": "parallel", "kind": "DistributedDataParallel", "ranks": [0, 1], "at": "train.py:2"}
A_PASS: dict[str, Any] = {
    "e": "pass", "loader": 1, "at": "train.py:5", "length": 2, "samples": 8, "base": 8, "batch": 2, "drops": False,
    "sampler": "DistributedSampler", "replicas": 2, "rank": 0, "epoch": 0, "shuffles": True, "cut": False, "maps": True,
    "subset": None,
}  # fmt: skip


def batches(*those: list[int], row: int = 0, **other: Any) -> list[dict[str, Any]]:
    return [
        {**A_PASS, **other},
        *(
            {"e": "batch", "loader": 1, "number": number, "indices": it, "rows": [row + each for each in it]}
            for number, it in enumerate(those)
        ),
        {"e": "passed", "loader": 1, "batches": len(those)},
    ]


def found(tmp_path: Path, *ranks: list[dict[str, Any]], course: Course | None = None) -> list[tuple[str, str]]:
    for rank, events in enumerate(ranks):
        (tmp_path / f"0-{rank}.jsonl").write_text("".join(json.dumps(it) + "\n" for it in [JOINED, *events]))
    return [(it.at, it.what) for it in findings(read(tmp_path), course or Course())]


def test_ranks_are_named_in_spans() -> None:
    assert [named(it) for it in ([3], [0, 1, 2, 7], [2, 4])] == ["rank 3", "ranks 0-2, 7", "ranks 2, 4"]


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (collective("barrier", 3), collective("all_reduce", 4), "different collectives"),
        (collective("all_reduce", 3, shape=[2]), collective("all_reduce", 3, shape=[3]), "different shapes"),
        (collective("all_reduce", 3, dtype="int64"), collective("all_reduce", 3, dtype="float32"), "different types"),
        (collective("broadcast", 3, root=0), collective("broadcast", 3, root=1), "different roots"),
        (collective("new_group", 3, of=[0]), collective("new_group", 3, of=[1]), "groups of different ranks"),
    ],
)
def test_collectives_that_differ(tmp_path: Path, one: dict[str, Any], other: dict[str, Any], words: str) -> None:
    ((_, what),) = found(tmp_path, [one, END], [other, END])
    assert words in what and "rank 0" in what and "rank 1" in what


def test_what_follows_from_different_collectives_is_no_finding(tmp_path: Path) -> None:
    crash = {"rank": 1, "message": "killed by SIGABRT", "traceback": ""}
    course = Course({0: [crash]})
    assert len(found(tmp_path, [collective("barrier", 3)], [collective("all_reduce", 4)], course=course)) == 1


def test_the_same_collective_at_other_lines_is_no_difference(tmp_path: Path) -> None:
    assert not found(tmp_path, [collective("barrier", 3), END], [collective("barrier", 7), END])


def test_a_collective_more_is_one_only_if_all_have_ended(tmp_path: Path) -> None:
    more = [collective("barrier", 3), collective("broadcast", 4)]
    ((at, what),) = found(tmp_path, [*more, END], [more[0], END])
    assert (at, what) == ("train.py:4", "rank 0 enters broadcast, and rank 1 never does")
    assert not found(tmp_path, more, [more[0]])


def test_weights_differ_by_more_than_rounding(tmp_path: Path) -> None:
    assert not found(tmp_path, [PARALLEL, step(1)], [PARALLEL, step(1, 1.0000001)])
    ((_, what),) = found(tmp_path, [PARALLEL, step(1), step(2)], [PARALLEL, step(1), step(2, 1.1)])
    assert what == "weights differ between rank 0 and rank 1 after step 2"
    assert not found(tmp_path, [PARALLEL, step(1, shapes=1)], [PARALLEL, step(1, 1.1, shapes=2)])


def test_ranks_that_exchange_nothing(tmp_path: Path) -> None:
    ((_, what),) = found(tmp_path, [step(1), step(2)], [step(1), step(2, 1.1)])
    assert "exchange no gradients" in what
    assert not found(tmp_path, [{"e": "message", "kind": "send"}, step(1), step(2)], [step(1), step(2, 1.1)])


def test_samples_of_ranks(tmp_path: Path) -> None:
    def both(*one: list[int], other: list[list[int]]) -> list[tuple[str, str]]:
        return found(tmp_path, [PARALLEL, *batches(*one), step(1)], [PARALLEL, *batches(*other), step(1)])

    assert not both([0, 2], [4, 6], other=[[1, 3], [5, 7]])
    ((at, what),) = both([0, 2], [4, 6], other=[[0, 2], [4, 6]])
    assert (at, what) == ("train.py:5", "ranks train on the same samples: ranks 0-1")
    ((_, what),) = both([0, 1], [2], other=[[3, 4], [5, 6]])
    assert what == "the last 1 of 8 samples are never used: 2 ranks have 4 each"


def test_ranks_with_data_sets_of_their_own(tmp_path: Path) -> None:
    own: dict[str, Any] = {"sampler": "SequentialSampler", "replicas": None, "length": 4}
    ranks = [[PARALLEL, *batches([0, 1], [2, 3], row=row, **own), step(1)] for row in (0, 100)]
    assert not found(tmp_path, *ranks)
    ((_, what),) = found(tmp_path, ranks[0], ranks[0])
    assert what == "ranks train on the same samples: ranks 0-1"
    others = [PARALLEL, *batches([6, 3], [2, 7], **own), step(1)]
    ((_, what),) = found(tmp_path, ranks[0], others)
    assert what == "each of 2 ranks goes through all 8 samples, so each is used 2 times in an epoch"


def test_ranks_that_divide_other_data(tmp_path: Path) -> None:
    ranks = [[PARALLEL, *batches([rank, 2], subset=subset), step(1)] for rank, subset in enumerate((5, 7))]
    ((_, what),) = found(tmp_path, *ranks)
    assert what == "ranks divide different data: what DistributedSampler divides differs between all 2 ranks"


def test_other_numbers_of_batches_matter_only_if_ranks_wait(tmp_path: Path) -> None:
    ranks = [[PARALLEL, *batches([rank], length=2 + rank), step(1)] for rank in range(2)]
    assert not found(tmp_path, *([*it, END] for it in ranks))
    ((_, what),) = found(tmp_path, *ranks)
    assert what == "ranks have different numbers of batches: rank 0 2, rank 1 3"


@pytest.mark.parametrize("kind", ["barrier", "all_reduce"])
def test_files_are_in_order_if_a_collective_is_between(tmp_path: Path, kind: str) -> None:
    meets = collective(kind, 4)
    assert not found(tmp_path, [use("write", 3), meets], [meets, use("read", 5, existed=True)])
    ((at, what),) = found(tmp_path, [use("write", 3), meets], [use("read", 5, existed=True), meets])
    assert at == "train.py:5" and "rank 1 may read a.pt before rank 0" in what
    ((at, what),) = found(tmp_path, [use("write", 3), meets], [use("write", 3), meets])
    assert (at, what) == ("train.py:3", "at the same time ranks 0-1 write a.pt")
    assert not found(tmp_path, [use("write", 3), meets], [meets, use("write", 6, existed=True)])
    assert not found(tmp_path, [use("append", 3), meets], [use("append", 3), meets])


def test_gradients_divided_by_another_number(tmp_path: Path) -> None:
    def by(number: float) -> list[dict[str, Any]]:
        return [{"e": "divided", "by": number, "ranks": 8, "at": "train.py:8"}]

    assert found(tmp_path, by(4.0)) == [("train.py:8", "gradients are summed over 8 ranks and divided by 4 (rank 0)")]
    assert not any(found(tmp_path, by(number)) for number in (1.0, 8.0, 16.0, 3.7))


def test_ranks_that_have_ended_while_others_wait(tmp_path: Path) -> None:
    lost = {"rank": 0, "message": "RuntimeError: Connection closed by peer", "traceback": ""}
    meets = collective("barrier", 4)
    ((at, what),) = found(tmp_path, [meets], [END], course=Course({0: [lost]}))
    assert (at, what) == ("train.py:4", "rank 0 enters barrier, but rank 1 had ended by then")


def test_how_far_ranks_agree_is_said(tmp_path: Path) -> None:
    ranks = [[PARALLEL, *batches([0, 2]), step(1), step(2)], [PARALLEL, *batches([1, 3]), step(1), step(2)]]
    course = Course(stopped="stopped at its time limit of 10m00s")
    assert not found(tmp_path, *ranks, course=course)
    line = summary(read(tmp_path), course, 2)
    assert line.startswith(
        "2 ranks agree as far as they came (stopped at its time limit of 10m00s): 2 steps, 4 samples"
    )


def test_ranks_in_which_nothing_was_seen_do_not_agree(tmp_path: Path) -> None:
    """As those of a script whose processes train, or that has not come to its training."""
    course = Course({}, None, "stopped at its time limit of 6 s")
    assert found(tmp_path, [use("read", 1)], [use("read", 1)], course=course) == []
    line = nothing(read(tmp_path), course)
    assert line.startswith("nothing was compared but files: no rank has made a step") and "limit of 6 s" in line
    assert found(tmp_path, [collective("barrier", 1)], [collective("barrier", 1)], course=course) == []
    assert nothing(read(tmp_path), course) == ""
