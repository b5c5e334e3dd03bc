"""Tries out a Slurm cluster for `paceline check`: its commands, and then a short job, of which nothing is left.

What the job runs on its nodes is in `node/host/check.py`. The nodes write into a folder in paceline's root. A node that
does not see that folder can say so nevertheless: the batch script, which Slurm itself carries, puts it into the job's
comment.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from paceline.node import ENTRY
from paceline.node.errors import Refused
from paceline.node.files import list_names, read_json
from paceline.node.host.check import FACTS, ROUTES
from paceline.node.host.protocol import next_order
from paceline.node.host.slurm.call import Away, Rejected, batch_environment, call, has, table
from paceline.node.host.slurm.job_folders import Jobs
from paceline.node.host.slurm.look import reasons
from paceline.node.host.slurm.look.partitions import nodes as all_nodes
from paceline.node.host.slurm.look.partitions import seconds_of

from . import batch_script

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.contract.facts import (
        AccountingFacts,
        ChosenPartition,
        ControllerFacts,
        MungeFacts,
        PartitionFacts,
        ShortJob,
        ShortJobGpus,
        SlurmFacts,
    )
    from paceline.contract.messages import Doing, SlurmCheck, SlurmChecked
    from paceline.node.host.slurm.job_folder import JobFolder
    from paceline.node.store.home import Home

_NEEDED = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "srun")
_CONFIGS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf")
_MUNGE = "/run/munge/munge.socket.2"
_COMMENT = "paceline-check:"  # not that of jobs, so that it is not listed
_LIMIT = 120.0  # seconds that Slurm gives the job, if this process cannot cancel it
_RUNNING = 100.0  # seconds that it may run
_LOOK = 0.2  # seconds between two looks into the folder
_ASK = (1.0, 2.0, 4.0, 8.0)  # seconds between two calls of squeue; the last one again and again
_SILENCES = 3  # of squeue; then Slurm counts as gone
_LATE = 5.0  # seconds until a file of a node is seen here
_OTHERS = 10  # seconds that nodes go on when one has ended early
_TRIES, _PAUSE = 5, 2.0  # of scancel, while Slurm does not answer
# The options of sbatch that choose where a job runs, and for whom; others ask for more than a short job needs.
_PLACES = (
    "account", "constraint", "exclude", "mcs-label", "nodelist", "partition",
    "prefer", "qos", "reservation", "wckey",
)  # fmt: skip

_ON_NODE = """\
say() { echo "paceline-check $SLURMD_NODENAME $1"; exit 0; }
command -v "$2" > /dev/null || say python
[ -d "$1" ] || say folder
output=$("$2" "$3" slurm-check "$1" 2>&1) || say "failed $(printf %s "$output" | tail -n 1)"
"""
_BODY = """
export SLURM_EXPORT_ENV=ALL
output=$(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \\
  --kill-on-bad-exit=0 --wait={wait} --input=none --quiet sh -c {task} sh {folder} {python} {entry} 2>&1)
output=$(printf %s "$output" | tail -n 20 | tr '\\n"' ";'" | cut -c 1-1500)
[ -z "$output" ] || scontrol update "jobid=$SLURM_JOB_ID" "comment={comment} $output"
"""


def slurm_check(home: Home, request: SlurmCheck) -> Iterator[Doing | SlurmChecked]:
    """What is tried, one `doing` at a time; at last the `facts`.

    The request has the target's `slurm` options, and the `seconds` that the job may wait for its start. The end of
    stdin ends it, and the job.
    """
    is_client_gone = threading.Event()
    threading.Thread(target=_wait_for_client, args=(is_client_gone,), daemon=True).start()
    facts: SlurmFacts = {"root": str(home.root), "python": sys.executable}
    try:
        yield from _look(facts, request)
        yield from _try(home, facts, request, is_client_gone)
    except Refused as error:
        facts["untried"] = str(error)
    yield {"facts": facts}


def _wait_for_client(is_client_gone: threading.Event) -> None:
    while next_order():
        pass
    is_client_gone.set()


# -- without a job -----------------------------------------------------------------------------------------------------


def _look(facts: SlurmFacts, request: SlurmCheck) -> Iterator[Doing]:
    """What Slurm says."""
    yield {"doing": "looking for Slurm's commands"}
    facts["commands"] = {name: has(name) for name in _NEEDED}
    missing = [name for name, is_there in facts["commands"].items() if not is_there]
    if missing:
        raise Refused(f"no {' and no '.join(missing)} on PATH here")
    facts["version"] = call("sbatch", "--version").strip()
    yield {"doing": "asking munge"}
    facts["munge"] = _munge()
    if facts["munge"].get("problem"):
        raise Refused("munge does not answer")
    yield {"doing": "asking Slurm's controller"}
    facts["controller"] = _controller()
    if facts["controller"]["problem"]:
        raise Refused("Slurm's controller does not answer")
    config = _config(call("scontrol", "show", "config"))
    facts["config"] = {name: config.get(name) for name in ("AccountingStorageType", "MinJobAge", "AuthType")}
    facts["accounting"] = _accounting(config)
    facts["partitions"] = _partitions()
    facts["partition"] = _chosen(facts["partitions"], request["slurm"])


def _munge() -> MungeFacts:
    """Whether munged listens here: without it each command of Slurm waits for most of a minute."""
    path, config = _MUNGE, {}
    for file in (os.environ.get("SLURM_CONF"), *_CONFIGS):
        with contextlib.suppress(OSError):
            with open(file or "", errors="replace") as source:
                config = _config(source.read())
            break
    given = re.search(r"socket=([^,\s]+)", config.get("AuthInfo", ""))
    if config.get("AuthType", "auth/munge") != "auth/munge":
        return {"socket": None}
    if given is not None:
        path = given[1]
    elif not os.path.exists(path) and not config:
        return {"socket": None}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(5.0)
        try:
            sock.connect(path)
        except OSError as error:
            return {"socket": path, "problem": (error.strerror or str(error)).lower()}
    return {"socket": path}


def _config(text: str) -> dict[str, str]:
    """The lines `name = value` of Slurm's configuration, also of its file."""
    return {found[1]: found[2].strip() for found in re.finditer(r"^\s*(\w+)\s*=(.*)$", text, re.MULTILINE)}


def _controller() -> ControllerFacts:
    try:
        output = call("scontrol", "ping")
    except Rejected:  # it says that it is down on its standard output
        return {"up": "", "problem": "it is down, or cannot be reached from here"}
    except Away as error:
        return {"up": "", "problem": str(error)}
    up = [line.strip() for line in output.splitlines() if line.strip().endswith("is UP")]
    return {"up": "; ".join(up), "problem": None if up else output.strip().partition("\n")[0]}


def _accounting(config: Mapping[str, str]) -> AccountingFacts:
    """Whether ended jobs are kept, and can be asked for."""
    kind = config.get("AccountingStorageType", "")
    if kind in ("", "(null)", "accounting_storage/none"):
        return {"on": False, "problem": None}
    try:
        call("sacct", "--noheader", "--allocations", "--format=JobID", "--starttime=now-1minutes")
    except Refused as error:
        return {"on": True, "problem": str(error)}
    return {"on": True, "problem": None}


def _partitions() -> list[PartitionFacts]:
    found: list[PartitionFacts] = []
    for line in call("sinfo", "--noheader", "--format=%P|%a|%l|%F").splitlines():
        name, state, limit, counts = (*line.split("|"), "", "", "")[:4]
        allocated, idle, _, total = (int(part) if part.isdecimal() else 0 for part in f"{counts}///".split("/")[:4])
        found.append(
            {
                "name": name.rstrip("*"), "is_default": name.endswith("*"), "state": state, "limit": limit,
                "up": allocated + idle, "total": total,
            }
        )  # fmt: skip
    return found


def _chosen(partitions: Sequence[PartitionFacts], options: Mapping[str, object]) -> ChosenPartition:
    """The partition of the target, or that which Slurm chooses."""
    given, known = str(options.get("partition") or ""), {it["name"]: it for it in partitions}
    names = [name for name in given.split(",") if name] or [it["name"] for it in partitions if it["is_default"]]
    up = max((known[name]["up"] for name in names if name in known), default=0)
    return {"given": given, "names": names, "unknown": [name for name in names if name not in known], "up": up}


# -- with a job --------------------------------------------------------------------------------------------------------


def _try(home: Home, facts: SlurmFacts, request: SlurmCheck, is_client_gone: threading.Event) -> Iterator[Doing]:
    """Run the job, and remove all of it."""
    chosen = facts["partition"]
    if chosen["unknown"] or not chosen["names"]:
        raise Refused("there is no such partition" if chosen["unknown"] else "there is no partition to use")
    if not chosen["up"]:
        raise Refused("the partition has no node that is up")
    job: ShortJob = {"nodes": min(2, chosen["up"]), "partition": ",".join(chosen["names"])}
    facts["job"] = job
    limits = [seconds_of(it["limit"]) for it in facts["partitions"] if it["name"] in chosen["names"]]
    job["limit"] = min([_LIMIT, *(limit for limit in limits if limit is not None)])
    job["gpus"] = _gpus(chosen["names"], job["nodes"])
    jobs, name = Jobs(home.root), f"paceline-check-{secrets.token_hex(4)}"
    jobs.sweep()
    folder = jobs.new("check")
    trial = _Trial(folder, name, job)
    try:
        yield {"doing": f"running a short job on {job['nodes']} node{'s' * (job['nodes'] > 1)}"}
        trial.submit(request["slurm"])
        yield from trial.wait(request["seconds"], is_client_gone)
    except Refused as error:
        job["problem"] = str(error)
    finally:
        job["uncancelled"] = trial.remove()
        jobs.discard(folder)


def _gpus(partitions: Sequence[str], nodes: int) -> ShortJobGpus:
    """How many GPUs a node has at most, and how many to ask for: none while no node has a free one."""
    there = [node for node in all_nodes() if set(partitions) & set(node["partitions"])]
    free = [it for it in there if it["gpus"] > it["gpus_allocated"] and it["state"] in ("idle", "mixed")]
    return {"most": max((node["gpus"] for node in there), default=0), "asked": int(len(free) >= nodes)}


class _Trial:
    """The job. `job` gets what is found out about it."""

    def __init__(self, folder: JobFolder, name: str, job: ShortJob) -> None:
        self._folder, self._name, self._job = folder.path, name, job
        job.update({"facts": [], "routes": [], "comment": ""})
        self._is_submitted = False
        self._submitted = 0.0
        self._silences = 0  # of squeue, one after another

    def submit(self, options: Mapping[str, object]) -> None:
        """Hand it to Slurm."""
        self._is_submitted, self._submitted = True, time.monotonic()
        env = batch_environment({}, secrets.token_hex(16))
        try:
            output = call("sbatch", "--parsable", "--export=ALL", env=env, text=self._script(options))
        except Rejected as error:
            self._is_submitted = False
            raise Refused(f"Slurm refuses it: {error.output}") from None
        self._job["id"] = output.strip().partition(";")[0]

    def _script(self, options: Mapping[str, object]) -> str:
        given = {
            "job-name": self._name, "comment": f"{_COMMENT}{self._name}", "nodes": str(self._job["nodes"]),
            "ntasks-per-node": "1", "time": batch_script.duration(self._job["limit"]), "mem": "512M",
            "output": "/dev/null", "error": "/dev/null", "chdir": "/", "no-requeue": "",
        }  # fmt: skip
        if self._job["gpus"]["asked"]:
            given["gres"] = "gpu:1"
        places = {name: str(value) for name, value in options.items() if name in _PLACES}
        body = _BODY.format(
            task=shlex.quote(_ON_NODE), folder=shlex.quote(str(self._folder)), python=shlex.quote(sys.executable),
            entry=shlex.quote(ENTRY), comment=f"{_COMMENT}{self._name}", wait=_OTHERS,
        )  # fmt: skip
        return "#!/bin/sh\n" + "".join(batch_script.lines({**given, **places})) + body

    def wait(self, seconds: float, is_client_gone: threading.Event) -> Iterator[Doing]:
        """Until its nodes have written all, it has ended, or takes too long."""
        asked, pauses, is_started = time.monotonic(), list(_ASK), False
        while True:
            if is_client_gone.wait(_LOOK):
                raise Refused("it was interrupted")
            now = time.monotonic()
            if self._read() == self._job["nodes"]:
                return
            if self._job["facts"] and not is_started:
                is_started = True
                yield {"doing": "trying the route between the nodes" if self._job["nodes"] > 1 else "waiting for it"}
            if now - asked > pauses[0]:
                asked, state = now, self._ask()
                pauses = pauses[1:] or pauses
                if state == "over":
                    self._read_late()
                    return
                is_started = is_started or state == "running"
                if state == "waiting" and not is_started:
                    yield {"doing": f"waiting for the short job: {self._job['waiting']}"}
            if not is_started and now - self._submitted > seconds:
                self._job["late"] = seconds
                return
            if now - self._submitted > seconds + _RUNNING:
                self._job["endless"] = _RUNNING
                return

    def _read(self) -> int:
        """Read what nodes have written; returns how many have written all."""
        self._job["facts"], self._job["routes"] = self._written(FACTS), self._written(ROUTES)
        if self._job["facts"] and "took" not in self._job:
            self._job["took"] = time.monotonic() - self._submitted
        return len(self._job["routes"])

    def _written(self, kind: str) -> list[Any]:
        there = list_names(self._folder)
        files = [(rank, f"{kind}-{rank}.json") for rank in range(self._job["nodes"])]
        pairs = ((rank, read_json(self._folder / file)) for rank, file in files if file in there)
        return [{**read, "rank": rank} for rank, read in pairs if read is not None]

    def _read_late(self) -> None:
        """What was written at the end may be seen late, on a network's disk."""
        until = time.monotonic() + _LATE
        while self._read() + self._job["comment"].count("paceline-check ") < self._job["nodes"]:
            if time.monotonic() > until:
                return
            time.sleep(_LOOK)

    def _ask(self) -> str:
        """Ask Slurm how it is: waiting, running, over, or silent if Slurm does not answer."""
        widths = {"State": 24, "Reason": 80, "StartTime": 24, "NodeList": 256, "Comment": 2048}
        number = f"--job={self._job['id']}"
        try:
            rows = table("squeue", number, "--states=all", columns=widths)
        except Rejected:  # Slurm has forgotten it
            rows = []
        except Away:
            self._silences += 1
            if self._silences == _SILENCES:
                raise
            return "silent"
        self._silences, column = 0, rows[-1] if rows else dict.fromkeys(widths, "")
        state, start = column["State"], column["StartTime"]
        self._job["state"] = state
        self._job["nodelist"] = column["NodeList"]
        self._job["comment"] = column["Comment"].partition(self._name)[2].strip()
        if state in reasons.RUNNING:
            return "over" if state == "COMPLETING" else "running"
        if state in (*reasons.PENDING, "CONFIGURING"):
            moment = float(start) if start.isdecimal() else None
            self._job["waiting"] = reasons.waiting(column["Reason"], self._job["id"], moment)
            return "waiting"
        self._job["ended"] = reasons.ENDED.get(state, f"Slurm says {state or 'nothing of it'}")
        return "over"

    def remove(self) -> str | None:
        """Cancel it in Slurm; returns why that is not possible."""
        if not self._is_submitted:
            return None
        for remaining in range(_TRIES - 1, -1, -1):
            try:
                call("scancel", "--quiet", f"--user={os.getuid()}", f"--name={self._name}")
                return None
            except Away as error:
                if not remaining:
                    return str(error)
                time.sleep(_PAUSE)  # nothing says when the controller is back
            except Refused as error:
                return str(error)
        raise AssertionError
