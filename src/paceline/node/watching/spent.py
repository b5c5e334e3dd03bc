"""What a rank spends its time on, from samples of its main thread's stack. Pure state.

A sample says in which part of a step the thread is, and at which line of the script. It is taken by the rank's own
thread, so a moment in which C code holds the interpreter's lock counts for the line that follows.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from paceline.node.journal.pace import LEAST_DIFFERENCE

from .outside import Process
from .typical import is_of_user

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline.contract.stands import Answer, Busiest, Spent

    from .asking import Asked

_LEAST_SAMPLES = 10  # of a rank that is compared with the others

# The part of a step, from the file and the function of a frame, the innermost first. The first that fits counts.
_OF_FRAMES = tuple(
    (re.compile(file), re.compile(function), part)
    for file, function, part in (
        (r"torch/utils/data/dataloader\.py", r"_(try_)?get_data", "workers"),
        (r"torch/utils/data/", "", "loading"),
        (r"paceline/train/data/workers\.py", "", "loading"),
        (r"paceline/train/data/", "", "workers"),
        (r"torch/(serialization\.py|distributed/checkpoint/)|paceline/train/checkpoint/", "", "checkpoint"),
        (r"torch/_(dynamo|inductor|functorch)/", "", "forward"),  # what is compiled
        (r"torch/autograd/", "", "backward"),
        (r"torch/optim/", "", "optimizer"),
        (r"torch/distributed/|paceline/train/group/", "", "exchange"),
        (r"/(tensorboard|tensorboardX|wandb|mlflow)/|/logging/__init__\.py|/tqdm/", "", "logging"),
        (r"torch/nn/modules/", "", "forward"),
        (r"torch/_tensor_str\.py", "", "logging"),
        (r"torch/_tensor\.py", r"^__iter__$", "item"),
    )
)
# What happens once, and is no part of a step, wherever in the stack it is.
_ONCE = tuple(
    (re.compile(file), re.compile(function), part)
    for file, function, part in (
        (r"^<frozen importlib", "", "import"),
        (r"torch/utils/data/dataloader\.py", r"^__iter__$|_shutdown_workers", "start of workers"),
        (r"torch/(_dynamo/convert_frame|_inductor/(compile_fx|async_compile))\.py", "", "compile"),
        (r"torch/distributed/distributed_c10d\.py", r"init_process_group|new_group|destroy_process_group", "joining"),
        (r"torch/(serialization|distributed/checkpoint/state_dict_loader)\.py", r"^load", "restore"),
    )
)
_PACKAGES = re.compile(r"[\\/](site|dist)-packages[\\/]")  # one that waits may compute in other threads, or on a device
_EVALUATES = re.compile(r"^_*(eval|valid|test)|_(eval|valid|test)")  # functions of the script
_TRAINS = re.compile(r"train|^_*(fit|main)")
_FETCH = re.compile(r"torch/utils/data/_utils/fetch\.py")
_C10D = re.compile(r"torch/distributed/(c10d_logger|distributed_c10d)\.py")
_OBJECTS = re.compile(r"^(all_gather|gather|broadcast|scatter|send|recv)_object")
_SETS_THREADS = re.compile(r"^[^#]*\bset_num_threads\(")
_BLOCKS = 64  # of samples, that are kept for what comes lately
_OF_CALLS = {
    "item": "item", "cpu": "item", "tolist": "item", "numpy": "item", "cuda": "copy", "to": "copy", "print": "logging",
}  # fmt: skip
_CALL = re.compile(r"\b(\w+)\(")


class Samples:
    """The samples of the ranks of a node."""

    def __init__(self) -> None:
        self._ranks: dict[int, _OfRank] = {}
        self._known: Spent = {}  # what each answer says anew
        self._given = 0  # OMP_NUM_THREADS of ranks; 0 if that is not known

    def add(self, rank: Asked, answer: Answer, process: Process, now: float) -> None:
        """Take in what a rank has answered, and how its process was just before."""
        self._ranks.setdefault(rank.rank, _OfRank()).add(rank.pid, answer, process, now)
        for key in ("loader", "computing", "gpu", "ddp"):
            if key in answer:
                self._known[key] = answer[key]
        self._given = answer.get("given", self._given)
        if sizes := answer.get("sizes"):
            self._known["world"] = max(sizes.values())
        if "single" in answer:  # one that does not is enough: the first layer gets what was not converted yet
            self._known["single"] = answer["single"] and self._known.get("single", True)

    @property
    def uses_gpu(self) -> bool:
        """Whether torch uses a GPU in a rank."""
        return self._known.get("gpu", False)

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks, as they have answered last."""
        return [one.pid for one in self._ranks.values()]

    def of_ranks(self) -> dict[int, tuple[dict[str, int], dict[str, float]]]:
        """Of each rank: in which parts it was seen how often, and the seconds of each part as the library has them.

        What a script does while its main thread sleeps or waits is "idle" here, and no "script".
        """
        return {
            rank: ({**one.parts, "script": one.parts["script"] - one.idle, "idle": one.idle}, one.times())
            for rank, one in self._ranks.items()
        }

    def spent(self) -> Spent:
        """The shares of the time until now."""
        ranks = self._ranks.values()
        count = max(sum(one.count for one in ranks), 1)
        parts, still, sums = (_total(getattr(one, name) for one in ranks) for name in ("parts", "still", "sums"))
        lines: dict[str, Counter[str]] = {}
        for one in ranks:
            for part, found in one.lines.items():
                lines.setdefault(part, Counter()).update(found)
        spent: Spent = {
            "samples": sum(one.count for one in ranks),
            "parts": {part: round(parts[part] / count, 3) for part in sorted(parts, key=lambda it: -parts[it])},
            "lines": {part: found.most_common(1)[0][0] for part, found in lines.items()},
            "still": {part: round(still.get(part, 0) / number, 2) for part, number in parts.items()},
            "ranks": len(ranks), **self._known,
        }  # fmt: skip
        if sums.get("seconds"):
            spent["queued"] = round(sums["queued"] / sums["seconds"], 3)
            spent["collectives"] = round(sums["entered"] / sums["seconds"], 1)
        if sums.get("batches"):
            spent["step"] = sums["batch_seconds"] / sums["batches"]
            for key in ("read", "reads"):
                spent[key] = sums[key] / sums["batches"]
        if sums.get("waits"):
            spent["busy"] = round(sums["busy"] / sums["waits"], 3)
        spent["by_hand"] = round(sums.get("by_hand", 0) / count, 3)
        spent["objects"] = round(sums.get("objects", 0) / count, 3)
        lately = _total(one.lately.last() for one in ranks)
        if lately.get("samples", 0) >= _LEAST_SAMPLES:
            spent["late"] = round(lately["waits"] / lately["samples"], 3)
        if self._given and spent.get("computing") != self._given:
            files = {file for one in ranks for file in one.files}
            if line := next(filter(None, map(_sets_threads, sorted(files))), ""):
                spent["threads_at"] = line
        spent["iterations"] = int(sums.get("iterations", 0))
        times = _total(one.times() for one in ranks)
        if steps := times.pop("steps", 0.0):
            spent["seconds"] = {part: round(seconds / steps, 6) for part, seconds in times.items()}
        if (pace := self._pace()) is not None:
            spent["pace"] = {**pace, "others": round(sum(one.share("exchange") for one in ranks) / len(ranks), 3)}
            if pace["others"] - pace["exchange"] >= LEAST_DIFFERENCE:
                spent["busiest"] = pace
        return spent

    def _pace(self) -> Busiest | None:
        """The rank that waits least for others."""
        shares = {rank: one.share("exchange") for rank, one in self._ranks.items() if one.count >= _LEAST_SAMPLES}
        if not shares:
            return None
        rank = min(shares, key=lambda it: shares[it])
        mine, others = self._ranks[rank], [self._ranks[it] for it in shares if it != rank] or [_OfRank()]
        waits = sum(one.share("exchange") for one in others) / len(others)
        more = {
            part: mine.share(part) - sum(one.share(part) for one in others) / len(others)
            for part in mine.parts if part != "exchange"
        }  # fmt: skip
        part = max(more, key=lambda it: more[it], default="exchange")
        return {
            "rank": rank, "exchange": round(shares[rank], 3), "others": round(waits, 3), "part": part,
            "line": mine.lines[part].most_common(1)[0][0] if part in mine.lines else "",
        }  # fmt: skip


class _Mark(NamedTuple):
    """A rank at one moment: its process, and how many batches of an iteration it has got."""

    time: float = 0.0
    process: Process = Process()
    of: int | None = None
    done: float = 0
    entered: int = 0  # collectives, of all groups


class _Lately:
    """How many of the last samples wait for data: they are counted in blocks, which grow with the number of samples."""

    def __init__(self) -> None:
        self._size = 1
        self._blocks: list[tuple[int, int]] = []  # samples, and those of them that wait

    def add(self, waits: bool) -> None:
        """Count another one."""
        if self._blocks and self._blocks[-1][0] < self._size:
            samples, waiting = self._blocks.pop()
        else:
            samples = waiting = 0
            if len(self._blocks) == _BLOCKS:
                self._size *= 2
                pairs = zip(self._blocks[::2], self._blocks[1::2])
                self._blocks = [(one + two, some + more) for (one, some), (two, more) in pairs]
        self._blocks.append((samples + 1, waiting + waits))

    def last(self) -> dict[str, float]:
        """Of the last quarter."""
        blocks = self._blocks[-(len(self._blocks) // 4) :] if len(self._blocks) >= 4 else []
        return {"samples": sum(it[0] for it in blocks), "waits": sum(it[1] for it in blocks)}


class _OfRank:
    """The samples of a rank."""

    def __init__(self) -> None:
        self.pid = self.count = 0
        self.idle = 0  # samples of "script" in which it slept, or waited in no library's call
        self.parts: Counter[str] = Counter()
        self.still: Counter[str] = Counter()  # samples in which the main thread waited in the kernel
        self.lines: dict[str, Counter[str]] = {}
        self.files: set[str] = set()  # of the script
        self.lately = _Lately()
        self.sums: dict[str, float] = {}  # of what has passed between two answers
        self._before = _Mark()
        self._batch = _Mark()  # when the number of batches was seen to change
        self._times: dict[str, float] = {}  # of this attempt
        self._times_before: dict[str, float] = {}

    def add(self, pid: int, answer: Answer, process: Process, now: float) -> None:
        """Take in an answer."""
        mark = _Mark(now, process, *_batches(answer), sum(answer.get("numbers", {}).values()))
        before, self._before = self._before, mark
        if pid != self.pid:  # another attempt
            self.pid, self._times_before, self._times = pid, self.times(), {}
            self._batch = _Mark()
        elif before.time:
            passed = {
                "seconds": now - before.time, "queued": process.queued - before.process.queued,
                "entered": max(0, mark.entered - before.entered),
            }  # fmt: skip
            self.sums = _total((self.sums, passed, self._batches(mark)))
        self._times = answer.get("times", {})
        frames = answer["threads"][0]["frames"] if answer["threads"] else []
        own = next((frame for frame in frames if is_of_user(frame[0])), None)
        if own is None:  # it has not come to the script, or has left it
            return
        part = _part(frames, tuple(answer["runs"]) if "runs" in answer else None)
        if part == "backward" and process.state == "S" and not answer.get("gpu") and _has_others(answer):
            part = "exchange"  # on a CPU the main thread computes the gradients itself, or waits for the others'
        if part == "workers" and (loader := answer.get("loader")) and loader["workers"]:
            if not loader["done"]:
                part = "start of workers"
            elif process.state != "R":
                self.sums = _total((self.sums, {"waits": 1, "busy": loader["busy"] / loader["workers"]}))
        if part == "exchange" and own is not frames[0] and _C10D.search(frames[frames.index(own) - 1][0]):
            self.sums = _total((self.sums, {"by_hand": 1}))
        line = f"{os.path.basename(own[0])}:{own[1]}"
        if part == "exchange" and any(_C10D.search(file) and _OBJECTS.search(name) for file, _, name in frames):
            self.sums = _total((self.sums, {"objects": 1}))
            self.lines.setdefault("objects", Counter())[line] += 1
        if part != "evaluation":
            self.lately.add(part in ("loading", "workers"))
        self.files.update(frame[0] for frame in frames if is_of_user(frame[0]))
        self.count += 1
        self.parts[part] += 1
        self.still[part] += process.state != "R"
        self.idle += part == "script" and process.state == "S" and not _PACKAGES.search(frames[0][0])
        self.lines.setdefault(part, Counter())[line] += 1

    def _batches(self, now: _Mark) -> dict[str, float]:
        """What was done for the batches that have come since another number of them was seen."""
        before = self._batch
        if now.of is None or (now.of == before.of and now.done == before.done):
            return {}
        self._batch = now
        if now.of != before.of or now.done < before.done:
            return {"iterations": 1}
        return {
            "batches": now.done - before.done, "batch_seconds": now.time - before.time,
            "read": now.process.read - before.process.read, "reads": now.process.reads - before.process.reads,
        }  # fmt: skip

    def times(self) -> dict[str, float]:
        """Seconds of each part of a step, over all attempts, as the library has measured them."""
        return _total((self._times_before, self._times))

    def share(self, part: str) -> float:
        """Of a part; what the library has measured of exchanges counts for more than samples."""
        times = self.times() if part == "exchange" else {}
        if times.get("sync"):
            return times["sync"] / times["total"]
        return self.parts[part] / max(self.count, 1)


def _total(many: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in many:
        for key, value in one.items():
            found[key] = found.get(key, 0) + value
    return found


@functools.lru_cache(maxsize=1024)
def _sets_threads(file: str) -> str:
    """The line of a file of the script that sets torch's threads; "" if none does."""
    import linecache

    lines = enumerate(linecache.getlines(file), 1)
    return next((f"{os.path.basename(file)}:{number}" for number, line in lines if _SETS_THREADS.search(line)), "")


def _batches(answer: Answer) -> tuple[int | None, float]:
    """An iteration over batches, and how many of them there were; the library counts those of all iterations."""
    if steps := answer.get("times", {}).get("steps"):
        return 0, steps
    return (answer["loader"]["id"], answer["loader"]["done"]) if "loader" in answer else (None, 0)


def _has_others(answer: Answer) -> bool:
    return any(size > 1 for size in answer["sizes"].values())


def _part(frames: Sequence[tuple[str, int, str]], runs: tuple[int, ...] | None) -> str:
    found = next((
        part for file, _, function in frames for path, name, part in _OF_FRAMES
        if path.search(file) and name.search(function)
    ), "")  # fmt: skip
    own = [frame for frame in frames if is_of_user(frame[0])]
    is_fetching = any(_FETCH.search(file) for file, _, _ in frames)
    if is_fetching:
        found = "loading"  # whatever the data set calls for it
    for path, name, part in () if is_fetching else _ONCE:
        if any(path.search(file) and name.search(function) for file, _, function in frames):
            return part
    # The innermost one counts: the loop may be in train_and_evaluate(), which calls evaluate().
    caller = next((function for _, _, function in own if _TRAINS.search(function) or _EVALUATES.search(function)), "")
    if found != "exchange" and caller and not _TRAINS.search(caller):
        return "evaluation"
    return found or (_of_line(own[0][0], own[0][1], runs if own[0] == frames[0] else None) if own else "script")


@functools.lru_cache(maxsize=1024)
def _of_line(file: str, line: int, runs: tuple[int, ...] | None) -> str:
    """What a line of the script does itself: the call of it that runs, or if that is not known, all of its calls."""
    import ast  # not before jobs have run for a while
    import linecache

    if runs is None:
        parts = {_OF_CALLS.get(name, "script") for name in _CALL.findall(linecache.getline(file, line))}
        return parts.pop() if len(parts) == 1 else "script"
    first, last, start, end = runs
    lines = [linecache.getline(file, number).encode() for number in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    text = b"".join(lines)[start:].decode(errors="replace")
    try:
        called = getattr(ast.parse(f"({text})", mode="eval").body, "func", None)
    except (SyntaxError, ValueError):  # the file was changed meanwhile
        return "script"
    return _OF_CALLS.get(str(getattr(called, "attr", getattr(called, "id", ""))), "script")
