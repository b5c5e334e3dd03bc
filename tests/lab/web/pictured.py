"""A backend of jobs that never ran, for pictures of the page: any number of them, in all states, the same each time."""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tests.web.long_job import START, histories

from paceline.backends.base import Backend, History, Listing, LogLines
from paceline.job.errors import UserError
from paceline.job.job import Instance, Job, Node
from paceline.job.model import Model
from paceline.job.spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.backends.base import LogQuery

HOURS = 1.0  # that the jobs with curves have run
HOST = "gpu-{:02}.lab.example"
LONGEST = "pretrain-llama-7b-on-common-crawl-2026-with-rotary-embedding-64"
TRACEBACK = """Traceback (most recent call last):
  File "/home/ada/vision/train.py", line 84, in <module>
    main()
  File "/home/ada/vision/train.py", line 71, in main
    loss = loss_of(model(images), labels)
  File "/usr/lib/python3/dist-packages/torch/nn/modules/module.py", line 1775, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "/usr/lib/python3/dist-packages/torch/nn/modules/module.py", line 1786, in _call_impl
    return forward_call(*args, **kwargs)
  File "/home/ada/vision/model.py", line 33, in forward
    return self.head(self.encoder(images))
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.11 GiB"""
ADVICE = (
    "the GPU's memory is full: use a smaller batch, activation checkpointing or sharding; "
    "nvidia-smi shows whether another process has it"
)
FAULTS = (
    ("out of memory", "rank 3 on gpu-02.lab.example: torch.OutOfMemoryError: CUDA out of memory", ADVICE),
    ("exception", "rank 0 on gpu-01.lab.example: FileNotFoundError: [Errno 2] No such file or directory: "
     "'/data/train/labels.json'", None),
    ("node lost", "node 1 on gpu-07.lab.example: it does not answer", None),
    ("time limit", "node 0 on gpu-01.lab.example: stopped at its time limit of 14400 s", None),
)  # fmt: skip
WAITS = (
    "it waits for 8 devices; 2 jobs ahead",
    "the resources that it asks for are in use (Slurm: Resources)",
    "0/12 nodes are available: 12 Insufficient nvidia.com/gpu",
)
SLOW = "41 % of the time waits for data at train.py:68: 2 workers are too few"
HANG = "it hangs: rank 3 has not entered all_reduce 4211, in which ranks 0 to 2, 4 to 7 wait; it is at train.py:84"
SCRIPTS = (
    ("resnet50", "train.py --model resnet50 --lr 0.1", "vision"), ("llama-7b", "pretrain.py --config 7b.yaml", "text"),
    ("sweep-lr", "tune.py --lr 0.0003 --seed 17", "vision"), ("whisper", "finetune.py --data /data/speech", "speech"),
    ("digits", "examples/digits_library.py", "vision"), ("evaluate", "evaluate.py --checkpoint last", "text"),
)  # fmt: skip
STATES = (*["SUCCEEDED"] * 10, *["FAILED"] * 4, "STOPPED", "STOPPED", "RUNNING", "PENDING", "LOST")
FIRST = ("RUNNING", "FAILED", "PENDING", "RUNNING", "RUNNING", "RESTARTING", "STARTING", "SUSPENDED", "SUCCEEDED")


class Options(Model, frozen=True, kw_only=True):
    """How many jobs there are."""

    count: int


@functools.cache
def _begun() -> float:
    return time.time()


def _job(number: int, name: str) -> Job:
    """The job of a number, 0 for the newest."""
    draw, now = random.Random(number), _begun()
    script, command, team = SCRIPTS[number % len(SCRIPTS)]
    state = FIRST[number] if number < len(FIRST) else draw.choice(STATES)
    created = now - (3600 * HOURS + 240 if number < 2 else 40.0 * (number + 1) ** 1.3 + draw.random() * 900)
    ranks, is_live = (16 if number < 2 else draw.choice((1, 2, 8, 8, 16))), state in ("RUNNING", "RESTARTING")
    nodes = max(1, ranks // 8)
    started = None if state in ("PENDING", "STARTING") else created + (120 if number < 2 else draw.random() * 120)
    passed = min(now - 5 - created, 60 + draw.random() ** 3 * 20000)
    finished = (now - 60 if number < 2 else created + passed) if state in ("SUCCEEDED", "FAILED", "STOPPED") else None
    cause, error, advice = FAULTS[0 if number < 2 else draw.randrange(len(FAULTS))] if state == "FAILED" else [None] * 3
    epoch, loss = draw.randrange(1, 90), round(0.05 + 3 * draw.random() ** 2, 4)
    progress: Any = {"time": now, "epoch": epoch, "epochs": 90, "step": draw.randrange(512), "steps": 512,
                     "samples_per_second": 300 * ranks * (0.5 + draw.random()),
                     "seconds_left": (90 - epoch) * 61.0 if is_live else None, "metrics": {"loss": loss}}  # fmt: skip
    waiting = {"PENDING": WAITS[number % len(WAITS)], "SUSPENDED": "it was suspended"}.get(state)
    hosts = [HOST.format(1 + (number + node) % 8) for node in range(nodes)]
    roles = ["master-0", *(f"worker-{it}" for it in range(ranks - 1))]
    return Job(
        name=name or f"{script}-{number}", state=state, backend="gpu-cluster", framework="torch", nodes=nodes,
        ranks=ranks, attempt=1 if number < 2 else 0, exit_code={"FAILED": 1, "SUCCEEDED": 0, "STOPPED": 143}.get(state),
        created=created, started=started, finished=finished, command=command, working_dir="/home/ada/vision",
        instances=tuple(Instance(f"{script}-{number}-{role}", hosts[it * nodes // ranks], it, state)
                        for it, role in enumerate(roles)) if started else (),
        error=error, cause=cause, advice=advice, waiting=HANG if number == 3 else waiting,  # type: ignore[arg-type]
        restarts=1 if number < 2 else int(draw.random() < 0.1), max_restarts=3,
        labels={"team": team, **({"sweep": "lr"} if script == "sweep-lr" else {})},
        progress=progress if started and script != "evaluate" else None, allocated=ranks if is_live else None,
        checkpoint={"step": 512 * epoch, "folder": "/data/ckpt"} if started else None,
        slow=(SLOW,) if state == "RUNNING" and number % 3 == 0 else (),
    )  # fmt: skip


def _events(job: Job) -> list[dict[str, Any]]:
    """What happened to a job: with a restart, if it had one."""
    if job.started is None:
        return [{"time": job.created + 1, "event": "queued", "need": job.ranks, "ahead": 2}]
    begun: dict[str, Any] = {"event": "started", "world_size": job.ranks, "host": HOST.format(1)}
    found: list[dict[str, Any]] = [
        {"time": job.created + 1, "event": "queued", "need": job.ranks, "ahead": 2},
        {"time": job.started - 5, "event": "importing", "what": ["torch", "numpy"]},
        {"time": job.started - 1, "event": "imported", "seconds": 4.1},
        {"time": job.started, **begun, "attempt": 0},
    ]
    end = job.finished or _begun()
    failure = {"rank": 3, "node": 0, "host": HOST.format(2), "message": "torch.OutOfMemoryError: CUDA out of memory",
               "traceback": TRACEBACK, "advice": ADVICE}  # fmt: skip
    if job.restarts:
        lost = {
            **failure,
            "rank": None,
            "message": "it does not answer",
            "traceback": None,
            "advice": None,
        }
        again = job.started + (end - job.started) / 3
        found.append({"time": again, "event": "restarting", "restarts": 1, "failure": lost})
        found.append({"time": again + 40, **begun, "attempt": 1})
    every = (end - job.started) / 8
    found += [{"time": job.started + every * it, "event": "checkpoint", "step": 512 * it} for it in range(1, 8)]
    if job.finished:
        last = {"failure": failure, "others": [{**failure, "rank": 4}]} if job.cause == "out of memory" else {}
        found.append(
            {"time": job.finished, "event": "finished", "state": job.state, "exit_code": job.exit_code, **last}
        )
    return sorted(found, key=lambda it: float(it["time"]))


@functools.cache
def _histories() -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return histories(2, 8, HOURS, Path(folder))


def _moved(history: Any, by: float) -> Any:
    logged = history["metrics"]
    lines = [{**line, "time": line["time"] + by} for line in history["telemetry"]]
    moved = logged and {**logged, "time": [it + by for it in logged["time"]]}
    return {**history, "host": HOST.format(history["node_rank"] + 1), "telemetry": lines, "metrics": moved}


def _node(number: int, jobs: dict[str, list[str]]) -> Node:
    draw, name = random.Random(number), HOST.format(number)
    held = jobs.get(name, [])[:8]
    gpus: Any = [
        {"index": it, "uuid": f"GPU-{number}-{it}", "name": "NVIDIA H100 80GB HBM3", "memory": 80 << 30,
         "use": round(60 + 39 * draw.random()) if it < len(held) else 0.0,
         "memory_used": int((50 + 25 * draw.random()) * 2**30) if it < len(held) else 500 << 20,
         "temperature": 40.0 + 3 * it, "power": 600.0 if it < len(held) else 70.0}
        for it in range(8)
    ]  # fmt: skip
    is_down = number == 8
    return Node(
        name=name, devices=tuple(f"{it}" for it in range(8)), cores=96.0, load=0.0 if is_down else 9.0 * len(held),
        allocated={f"{it}": (job,) for it, job in enumerate(held)}, memory=1 << 40,
        memory_used=0 if is_down else int((0.1 + 0.08 * len(held)) * 2**40), disk=7 << 40, disk_used=3 << 40,
        gpus=() if is_down else tuple(gpus), state="drained: bad NVLink" if is_down else "ready",
    )  # fmt: skip


class Pictured(Backend):
    """The backend; nothing can be started on it."""

    Options = Options

    @functools.cached_property
    def _jobs(self) -> dict[str, Job]:
        count = self.options.count
        found = [_job(it, LONGEST if it == 4 else "") for it in range(count)]
        return {job.name: job for job in found}

    def describe(self, names: Sequence[str] | None = None, since: float | None = None) -> Listing:
        if names is not None:
            return Listing([self._jobs[name] for name in names if name in self._jobs])
        found = sorted(self._jobs.values(), key=lambda job: -job.created)
        return Listing([job for job in found if job.is_recent(since)])

    def spec(self, name: str) -> JobSpec:
        script, *args = self._jobs[name].command.split()
        job = self._jobs[name]
        return JobSpec(script=script, args=tuple(args), ranks=job.ranks, labels=dict(job.labels), name=name)

    def events(self, name: str) -> list[dict[str, Any]]:
        return _events(self._jobs[name])

    def history(self, name: str, since: float = 0.0) -> History:
        job = self._jobs[name]
        if job.started is None or list(self._jobs).index(name) > 1:
            return History([])
        return History([_moved(it, (job.finished or _begun()) - START - 3600 * HOURS) for it in _histories()])

    def losses(self, names: Sequence[str]) -> dict[str, list[float]]:
        draw = random.Random(7)
        return {
            name: [2.5 / (1 + it / 6) + 0.15 * draw.random() for it in range(40)]
            for name in names
            if self._jobs[name].progress
        }

    def nodes(self, warn: Callable[[str], None]) -> list[Node]:
        jobs: dict[str, list[str]] = {}
        for job in self._jobs.values():
            for it in job.instances if job.allocated else ():
                jobs.setdefault(it.node, []).append(job.name)
        warn(f"{HOST.format(9)}: it does not answer: Connection timed out")
        return [_node(number, jobs) for number in range(1, 9)]

    def usage(self, names: Sequence[str], warn: Callable[[str], None]) -> dict[str, Any]:
        return {}

    def logs(self, name: str, query: LogQuery) -> Iterator[LogLines]:
        job = self._jobs[name]
        lines = [
            f"\x1b[32mepoch 3\x1b[0m step {it}: loss {2.3 / (1 + it / 90):.4f}, 2311 samples/s\n" for it in range(400)
        ]
        if job.cause == "out of memory":
            lines += [f"\x1b[31m{line}\x1b[0m\n" for line in TRACEBACK.split("\n")]
        for number, line in enumerate(itertools.islice(lines, max(0, len(lines) - (query.tail or len(lines))), None)):
            yield LogLines(job.created + 130 + number, 0, 0, "out", line.encode())

    def _nothing(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError("jobs of pictures cannot be changed; start jobs on another target")

    prepare = start = wait = shell = stop = delete = _nothing
