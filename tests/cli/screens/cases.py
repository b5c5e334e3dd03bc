"""The jobs, nodes and volumes that the recorded screens show, each made as a backend makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests import inspected

from paceline.backends.base import Backend, Listing
from paceline.job.job import Job, Node, Usage, Volume
from paceline.node.journal.fold import fold, part_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.contract.records import JobFacts
    from paceline.node.journal.status import Status

NOW = 1_800_000_000.0
GIB = 1 << 30
LONG = "resnet50-imagenet-baseline-lr0.1-seed42-retry"


def job(
    name: str, state: str = "RUNNING", *, target: str = "local", hosts: Sequence[str] = ("vm",), **changes: Any
) -> Job:
    """A job whose agents have recorded this state.

    Args:
        name: of the job.
        state: of all its nodes.
        target: where it is.
        hosts: its nodes, of two ranks each.
        changes: of its facts, of its part, or of the fields that records lack.
    """
    age = changes.pop("age", 7500.0)
    kept = {key: changes.pop(key) for key in ("kind", "external_id", "allocated") if key in changes}
    of_part = {key: changes.pop(key) for key in ("waiting", "progress", "checkpoint") if key in changes}
    failure, devices = changes.pop("failure", None), changes.pop("devices", [])
    facts: JobFacts = {
        "name": name, "backend": target, "framework": "torch", "nodes": len(hosts), "ranks": 2 * len(hosts),
        "created": NOW - age, "max_restarts": 0, "devices_asked": len(devices) or None, "priority": 0, "queue": None,
        "labels": {}, "options": {}, "ttl": None, "grace": 30.0, "command": "train.py --epochs 10",
        "working_dir": "/home/ada/train", "folder": f"/home/ada/.local/state/paceline/jobs/{name}", "code": None,
        "data": [], "tensorboard": None, **changes,
    }  # type: ignore[typeddict-item]  # fmt: skip
    is_over, has_begun = state in ("SUCCEEDED", "FAILED", "STOPPED"), state != "PENDING"
    parts = []
    for number, host in enumerate(hosts):
        ranks = [
            {"name": f"{name}-{f'worker-{rank - 1}' if rank else 'master-0'}", "rank": rank, "state": state,
             "pid": 4000 + rank, "exit_code": {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 143}.get(state)}
            for rank in (2 * number, 2 * number + 1)
        ]  # fmt: skip
        status: Status = {  # type: ignore[typeddict-item]
            "state": state, "node_rank": number, "attempt": 0, "restarts": 0, "nodes": len(hosts),
            "world_size": 2 * len(hosts), "ranks": ranks if has_begun else [],
            "start": {"attempt": 0} if has_begun else None,
            "started": NOW - age + 60 if has_begun else None, "finished": NOW - age / 2 if is_over else None,
            "exit_code": {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 143}.get(state), "failure": failure,
            "devices": devices,
        }  # fmt: skip
        parts.append(part_of(status, alive=not is_over, host=host, **of_part))
    found = Job.from_record(fold(facts, parts))
    vars(found).update(kept)
    return found


class Recorded(Backend):
    """A backend that knows what is written here."""

    def __init__(
        self, name: str, jobs: Sequence[Job] = (), nodes: Sequence[Node] = (), usage: dict[str, Usage] | None = None,
        volumes: Sequence[Volume] = (), events: Sequence[dict[str, Any]] = (), checked: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(name)
        self._jobs, self._nodes, self._usage, self._volumes = jobs, nodes, usage or {}, volumes
        self._events, self._checked = events, checked

    def check(self, progress: Any) -> Any:
        return self._checked

    def describe(self, names: Sequence[str] | None = None, since: float | None = None) -> Listing:
        found = [job for job in self._jobs if names is None or job.name in names]
        recent = [job for job in found if since is None or not job.is_over or (job.finished or 0.0) >= since]
        return Listing(recent, len(found) - len(recent))

    def nodes(self, warn: Any) -> list[Node]:
        return list(self._nodes)

    def usage(self, names: Sequence[str], warn: Any) -> dict[str, Usage]:
        return {name: self._usage[name] for name in names if name in self._usage}

    def volumes(self, warn: Any) -> list[Volume]:
        return list(self._volumes)

    def events(self, name: str) -> list[dict[str, Any]]:
        return list(self._events)

    def _none(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("screens only look")

    prepare = start = spec = logs = wait = shell = stop = delete = _none


def progress(epoch: int, step: int, left: float | None = None, epochs: int | None = 10, steps: int | None = 500) -> Any:
    """How far a training is."""
    return {
        "time": NOW, "epoch": epoch, "epochs": epochs, "step": step, "steps": steps, "samples_per_second": 812.5,
        "epoch_seconds_left": None, "seconds_left": left, "metrics": {"loss": 0.25},
    }  # fmt: skip


SYNC = {"method": "powersgd(4)", "sent_bytes": 262144, "sync_seconds": 0.012, "step_seconds": 0.1}
FAILURE: Any = {
    "rank": 1, "node": 0, "host": "vm", "message": "RuntimeError: CUDA error: device-side assert triggered",
    "exit_code": 1, "cause": "exception", "has_traceback": True, "pid": 4001, "log": "logs/0/rank-1.log",
    "traceback": 'Traceback (most recent call last):\n  File "train.py", line 31, in <module>\n    step()\n'
    "RuntimeError: CUDA error: device-side assert triggered",
}  # fmt: skip

RUNS = job("resnet-x3k2a", progress={**progress(2, 250, 4500.0), "replicas": {"compared": 34, "step": 1216}},
           devices=["0", "1"])  # fmt: skip
WAITS = job("bert-q7w1b", "PENDING", age=42.0, waiting="waits for 4 devices; 1 job ahead; held by: resnet-x3k2a",
            devices_asked=4)  # fmt: skip
FAILS = job("gan-m2p9c", "FAILED", failure=FAILURE, age=86400.0, devices_asked=("0",))
PLAIN = job("notes-a1b2c", "SUCCEEDED", framework=None, age=4000.0, devices_asked=0)
ON_HOSTS = job(LONG, target="lab", hosts=("gpu-01", "gpu-02", "gpu-03"), age=190_000.0, devices=["0", "1"],
               progress={**progress(0, 12_000, 86_000.0, None, None), "sync": SYNC},
               labels={"team": "vision"})  # fmt: skip
IN_PODS = job("pytorch-git", target="k8s", hosts=("node-3/pytorch-git-master-0", "node-4/pytorch-git-worker-0"),
              kind="PyTorchJob", external_id="train/pytorch-git", devices_asked=1, allocated=2, age=1800.0)  # fmt: skip
IN_QUEUE = job("finetune-llama", "PENDING", target="slurm", hosts=("",), age=600.0, external_id="81236", nodes=8,
               waiting="Slurm: Resources; it may start in 2h05m", devices_asked=8)  # fmt: skip
STATES = ("RUNNING", "PENDING", "SUCCEEDED", "FAILED", "STOPPED")
MANY = [
    job(f"sweep-lr{number:02}-x{number * 7919 % 9973:04}", STATES[number % 5], age=300.0 * (number + 1),
        progress=progress(number % 10, 100, 60.0 * number) if number % 5 == 0 else None,
        failure=FAILURE if number % 5 == 3 else None,
        waiting=f"waits for 2 devices; {number + 1} jobs ahead" if number % 5 == 1 else None)
    for number in range(30)
]  # fmt: skip

HERE_NODE = Node("vm", ("0", "1"), {"0": ("resnet-x3k2a",), "1": ("resnet-x3k2a",)}, 16.0, 3.4, 64 * GIB, 21 * GIB,
                 500 * GIB, 180 * GIB, address="10.0.0.5",
                 gpus=({"index": 0, "uuid": "GPU-0", "name": "H100", "use": 97.0, "memory": 80 * GIB,
                        "memory_used": 61 * GIB, "temperature": 64.0, "power": 610.0},
                       {"index": 1, "uuid": "GPU-1", "name": "H100", "use": 95.0, "memory": 80 * GIB,
                        "memory_used": 60 * GIB, "temperature": 66.0, "power": 602.0}))  # fmt: skip
POD_NODES = [
    Node("control-1", (), {}, 4.0, 0.9, 16 * GIB, 3 * GIB, 100 * GIB, 0, state="ready", roles=("control-plane",),
         address="10.1.0.2"),
    Node("node-3", (), {}, 32.0, 12.5, 256 * GIB, 64 * GIB, 900 * GIB, 20 * GIB, state="ready", address="10.1.0.13",
         device_count=4, allocated_count=3, jobs={"pytorch-git": 1, "vision/segment-anything-7c9d8b-x2m4z": 2}),
    Node("node-4", (), {}, 32.0, 0.2, 256 * GIB, 1 * GIB, 900 * GIB, 0, state="not ready, cordoned",
         address="10.1.0.14", device_count=4, allocated_count=1, jobs={"pytorch-git": 1}),
]  # fmt: skip
SLURM_NODES = [
    Node(f"cn{number:03}", (), {}, 64.0, 48.0, 512 * GIB, 400 * GIB, 0, 0, partitions=("gpu", "long"),
         state="mixed" if number % 3 else "drained: fan failure, ticket 5512", address=f"10.2.0.{number}",
         device_count=8, allocated_count=number % 9)
    for number in range(1, 31)
]  # fmt: skip
USAGE = {
    "resnet-x3k2a": Usage(12, 7.5, 9 * GIB, ({"device": "0", "use": 97.0, "memory": 61 * GIB},
                                             {"device": "1", "use": 95.0, "memory": 60 * GIB})),
    LONG: Usage(36, 22.5, 120 * GIB),
    "pytorch-git": Usage(0, 3.2, 12 * GIB),
}  # fmt: skip
VOLUMES = [
    Volume("mnist", "/data/mnist", None, "/home/ada/train/paceline.toml", 900 * GIB, 412 * GIB),
    Volume("imagenet", "/mnt/share/datasets/imagenet-2012/prepared/webdataset", "no such file or directory",
           "/home/ada/.config/paceline/config.toml"),
]  # fmt: skip
CLAIMS = [
    Volume("training-data", "pvc-8c1d2e3f", None, None, 200 * GIB, access=("ReadWriteMany",), owner="ada",
           created=NOW - 3e6),
    Volume("scratch", "", "it is pending", None, 1024 * GIB, access=("ReadWriteOnce",), created=NOW - 60),
]  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    {"time": NOW - 7499, "event": "cold", "why": "no process is kept warm"},
    {"time": NOW - 7498, "event": "queued", "need": 2, "ahead": 1, "problem": ""},
    {"time": NOW - 7470, "event": "granted", "devices": ["0", "1"]},
    {"time": NOW - 7469, "event": "importing", "what": ["torch"]},
    {"time": NOW - 7440, "event": "started", "attempt": 0, "world_size": 2, "logs": []},
    {"time": NOW - 5000, "event": "checkpoint", "step": 500, "folder": "/home/ada/train/checkpoints/step-000500"},
    {"time": NOW - 4000, "event": "restarting", "attempt": 1, "restarts": 1, "why": "", "nodes": 1, "failure": FAILURE,
     "others": []},
    {"time": NOW - 3990, "event": "started", "attempt": 1, "world_size": 2, "logs": []},
    {"time": NOW - 9, "event": "stopping", "signal": 15, "grace": 30.0},
]  # fmt: skip

_LATE: Any = {
    "ranks": [1], "hosts": ["vm"], "pids": [4001], "devices": [], "where": "train.py:31 in load",
    "why": "it waits for a worker of a DataLoader; 2 of 4 have ended",
    "stack": [("/opt/venv/lib/python3.12/site-packages/torch/utils/data/dataloader.py", 1131, "_try_get_data"),
              ("/home/ada/train/train.py", 31, "load"), ("/home/ada/train/train.py", 58, "<module>")],
    "threads": [{"name": "pin memory", "frames": [("/usr/lib/python3.12/threading.py", 327, "wait")]}],
}  # fmt: skip
_WAITS_FOR_IT: Any = {
    "ranks": [0], "hosts": ["vm"], "pids": [4000], "devices": [], "where": "train.py:40 in step",
    "why": "it waits in a collective", "stack": [("/home/ada/train/train.py", 40, "step")], "threads": [],
}  # fmt: skip
HUNG: list[dict[str, Any]] = [*EVENTS[:5], {"time": NOW - 60, "event": "hang", "why": "for 60 s rank 1 …", "hang": {
    "kind": "late", "ranks": [1], "waiting": [0], "seconds": 60.0, "collective": None, "places": [_LATE, _WAITS_FOR_IT],
    "line": "rank 1 on vm (pid 4001) has not entered all_reduce 1720 (Float [25557032]), in which rank 0 waits; "
            "it is at train.py:31 in load: it waits for a worker of a DataLoader; 2 of 4 have ended",
}}]  # fmt: skip
HANGS = job("resnet-x3k2a", devices=["0", "1"], waiting=f"it hangs: {HUNG[-1]['hang']['line']}")
ENDED: list[dict[str, Any]] = [
    *EVENTS[:5], {"time": NOW - 43200, "event": "finished", "state": "FAILED", "exit_code": 1, "failure": FAILURE,
                  "others": [{"rank": 0, "node": 0, "message": "RuntimeError: Connection closed by peer",
                              "collectives": "all_reduce 1720 (Float [25557032]), which had not ended",
                              "traceback": '  File "train.py", line 40, in step\n    loss.backward()\n'
                                           "RuntimeError: Connection closed by peer"}]},
]  # fmt: skip

ONE = Recorded("local", [RUNS], [HERE_NODE], USAGE, VOLUMES)
NOTHING = Recorded("local")
HERE = Recorded("local", [WAITS, RUNS, PLAIN, FAILS], [HERE_NODE], USAGE, VOLUMES, EVENTS)
EVERYWHERE = [
    HERE, Recorded("lab", [ON_HOSTS], usage=USAGE), Recorded("slurm", [IN_QUEUE], SLURM_NODES),
    Recorded("k8s", [IN_PODS], POD_NODES, USAGE, CLAIMS),
]  # fmt: skip

# Name of the file → the targets, and what is typed; the first target is where verbs look that look at one.
SCREENS: dict[str, tuple[Sequence[Recorded], tuple[str, ...]]] = {
    "list-0": ([NOTHING], ("list",)),
    "list-1": ([ONE], ("list",)),
    "list-here": ([HERE], ("list",)),
    "list-everywhere": (EVERYWHERE, ("list",)),
    "list-everywhere-wide": (EVERYWHERE, ("list", "-o", "wide")),
    "list-30": ([Recorded("local", MANY)], ("list",)),
    "get-running": ([HERE], ("get", "resnet-x3k2a")),
    "get-failed": ([HERE], ("get", "gan-m2p9c")),
    "get-plain": ([HERE], ("get", "notes-a1b2c")),
    "get-pods": (EVERYWHERE[::-1], ("get", "pytorch-git")),
    "prune": ([HERE], ("prune", "-s", "1h", "--dry-run")),
    "events": ([HERE], ("events", "resnet-x3k2a")),
    "check-here": ([Recorded("local", checked=inspected.MACHINE)], ("check",)),
    "check-hosts": ([Recorded("lab", checked=inspected.HOSTS)], ("check",)),
    "check-cluster": ([Recorded("k8s", checked=inspected.CLUSTER)], ("check",)),
    "why-hang": ([Recorded("local", [HANGS], events=HUNG)], ("why", "resnet-x3k2a")),
    "why-hung": ([Recorded("local", [RUNS], events=HUNG)], ("why", "resnet-x3k2a")),
    "why-failed": ([Recorded("local", [FAILS], events=ENDED)], ("why", "gan-m2p9c")),
    "why-waits": ([Recorded("local", [WAITS])], ("why", "bert-q7w1b")),
    "top-job-0": ([NOTHING], ("top", "job")),
    "top-job-1": ([ONE], ("top", "job")),
    "top-job-30": ([Recorded("local", MANY)], ("top", "job", "-A")),
    "top-job-everywhere": (EVERYWHERE, ("top", "job")),
    "top-job-all": ([HERE], ("top", "job", "-A")),
    "top-node-here": ([HERE], ("top", "node")),
    "top-node-here-wide": ([HERE], ("top", "node", "-o", "wide")),
    "top-node-pods": (EVERYWHERE[::-1], ("top", "node")),
    "top-node-30": ([Recorded("slurm", (), SLURM_NODES)], ("top", "node")),
    "help": ([NOTHING], ("--help",)),
    "help-run": ([NOTHING], ("run", "--help")),
    "help-submit-kubernetes": ([NOTHING], ("submit", "--on", "kubernetes", "--help")),
    "help-torchrun": ([NOTHING], ("torchrun", "--help")),
    "data-0": ([NOTHING], ("data", "list")),
    "data-here": ([HERE], ("data", "list")),
    "data-everywhere": (EVERYWHERE, ("data", "list")),
}
