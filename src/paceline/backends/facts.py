"""What programs decide by: whether a job steps, whether its loss is finite, what is wrong, and what mends it."""

from __future__ import annotations

import math
import re
import shlex
import time
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from paceline.job.job import hangs
from paceline.job.quantities import show_time
from paceline.node.usual_messages import advice
from paceline.node.watching.typical import is_of_user

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.contract.records import EventRecord
    from paceline.contract.stands import Hang
    from paceline.job.job import Job

_PATIENCE, _MANY = 60.0, 10  # seconds, and steps, after which a job from which no step is heard does not step
_RANK = re.compile(r"\brank (\d+)\b")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_AT = re.compile(r" at (\S+\.py:\d+)")  # and no address with its port
_SETUP = re.compile(
    r"\bsetup failed on (\S+)(?: with exit code \d+| as [^:]+)?: (.+?)(?:: |$)"
)  # see node/ranks/setup.py


class Steps(TypedDict):
    """Whether a job takes steps of its training, as the library counts them; None is what is not known."""

    is_stepping: bool | None
    since: str | None  # when that began: its first step, or the last one before it stood still
    per_minute: float | None  # over the last half minute in which it stepped
    last: str | None  # when it was last heard of a step, within a second


class Loss(TypedDict):
    """The last loss that was logged: that of the name `loss`, or else the first whose name has that in it."""

    name: str
    value: float | None  # None if it is not finite
    is_finite: bool


class Diagnosis(TypedDict):
    """What is known of the cause of what is wrong with a job."""

    kind: str
    about: str | None  # the module, path, program, library or image
    evidence: str  # in one line
    rank: int | None
    node: str | None
    place: str | None  # FILE:LINE of the script


class Mend(TypedDict):
    """What mends it: `first`, then `do`, then `command`. What is None is left out."""

    action: str
    first: str | None  # a command line
    do: str | None  # what a command line of paceline cannot do, in a sentence
    command: str | None  # the command line that starts the job again, or waits for it; None if none is right as it is


class Facts(TypedDict):
    """The key `facts` of `paceline get -o json`."""

    steps: Steps
    loss: Loss | None
    diagnosis: Diagnosis | None
    mend: Mend | None


class _Way(NamedTuple):
    """How a kind of fault is mended: see `Mend`. Without `do` it is the advice of the message, or what is usual."""

    action: str
    do: str = ""
    flags: str = ""  # of `resubmit`


_EDIT = _Way("edit")
_AGAIN = _Way("resubmit")
WAYS = {
    "missing file": _Way("correct the path"),
    "missing module": _Way("install"),
    "missing program": _Way("install"),
    "missing library": _Way("install"),
    "wrong image": _Way("correct the image"),
    "out of memory": _Way("use less memory"),
    "GPU out of memory": _Way("use less memory"),
    "disk full": _Way(
        "free the disk",
        "make room on that disk (df -h, df -i), but not by removing the checkpoints of the job, or use another folder",
    ),
    "killed": _AGAIN,
    "node lost": _AGAIN,
    "agent": _AGAIN,
    "preempted": _AGAIN,
    "client gone": _AGAIN,
    "stopped": _Way(
        "none",
        "it was stopped, on purpose or with its machine: start it again only if your user wants that, with {resubmit}",
    ),
    "nodes missing": _Way(
        "resubmit", "see to it that the missing hosts can be reached, or ask for fewer with --nnodes"
    ),
    "time limit": _Way("resubmit", "give it a longer --time-limit"),
    "refused": _Way("correct the job", "correct what the evidence names"),
    "setup": _Way(
        "correct the job",
        "correct that command, or what it needs on that node, and start the job again with {resubmit}; --setup COMMAND "
        "there, once for each command, replaces the setup",
    ),
    "elsewhere": _Way("look there", "it runs on another machine: ask there"),
    "unreachable": _Way(
        "wait", "look again later: the job may go on there; start it again only if that host is gone for good"
    ),
    "waiting": _Way("wait"),
    "suspended": _Way("none", "it was suspended on purpose: let it go on only if your user wants that, with {resume}"),
    "loss not finite": _Way(
        "edit",
        "lower the learning rate, clip the gradients, or correct the data or the loss; the job begins anew, since any "
        "of its checkpoints may hold values that are not finite",
        "--fresh",
    ),
    "hang": _Way("edit", "correct the script at the place where the rank stands"),
    "slow": _Way("edit", "change the script as the evidence says; a job that is only slow may also go on as it is"),
}


def facts(job: Job, happened: Callable[[], Sequence[EventRecord]], where: str) -> Facts:
    """What is known of a job.

    Args:
        job: as it was described just now.
        happened: its events; asked for only if it hangs.
        where: the flags that select its backend, with a space before them.
    """
    hang = next((it for it in reversed(happened()) if it["event"] == "hang"), None) if hangs(job) else None
    loss = _loss(job)
    found = _diagnosis(job, hang["hang"] if hang else None, loss)
    mend = None if found is None else _mend(job, found, where)
    return {"steps": _steps(job, hang), "loss": loss, "diagnosis": found, "mend": mend}


def _steps(job: Job, hang: EventRecord | None) -> Steps:
    progress = job.progress or {}
    last, rate = progress.get("time"), progress.get("steps_per_minute")
    if not (progress.get("began") or progress.get("step")):  # what is known is a loss, and no step
        last = None
    is_stepping: bool | None = False
    if job.state == "LOST":
        is_stepping = None
    elif job.state == "RUNNING" and hang is None:
        patience = max(_PATIENCE, _MANY * 60 / rate if rate else 0.0)
        is_stepping = None if last is None else time.time() - last <= patience
    since = progress.get("began") if is_stepping else hang["time"] - hang["hang"]["seconds"] if hang else last
    return {"is_stepping": is_stepping, "since": show_time(since), "per_minute": rate, "last": show_time(last)}


def _loss(job: Job) -> Loss | None:
    metrics = (job.progress or {}).get("metrics") or {}
    name = next((it for it in sorted(metrics, key="loss".__ne__) if "loss" in it.lower()), None)
    if name is None:
        return None
    value = metrics[name]
    return {"name": name, "value": value, "is_finite": value is not None and math.isfinite(value)}


def _diagnosis(job: Job, hang: Hang | None, loss: Loss | None) -> Diagnosis | None:
    evidence, fault, kind = job.error or job.waiting or "", job.fault, ""
    place: str | None = None
    at = job.progress or {}
    if job.state == "FAILED":
        kind = job.cause or ("exception" if job.traceback else "unknown")
    elif job.state == "LOST":
        kind = "unreachable"
    elif loss is not None and not loss["is_finite"]:
        kind, evidence = (
            "loss not finite",
            f"{loss['name']} is not finite in epoch {at.get('epoch', 0) + 1}, at step {at.get('step')} or before",
        )
    elif job.state == "STOPPED":
        kind, evidence = job.cause or "stopped", evidence or f"it was stopped (exit code {job.exit_code})"
    elif hang is not None:
        kind, evidence = "hang", hang["line"]
        stack = hang["places"][0]["stack"] if hang["places"] else ()
        place = next((f"{file}:{line}" for file, line, _ in stack if is_of_user(file)), None)
    elif job.waiting:
        kind = "suspended" if job.state == "SUSPENDED" else "waiting"
    elif job.slow and job.state == "RUNNING":
        kind, evidence = "slow", job.slow[0]
    if not kind:
        return None
    if fault is None and kind in ("waiting", "agent", "unknown", "refused"):  # what a scheduler says
        usual = advice(evidence)
        fault = {"kind": usual.kind, "about": usual.about} if usual.kind else None
    if job.state not in ("FAILED", "PENDING", "RESTARTING"):
        fault = None
    found = _RANK.search(evidence)
    rank = job.traceback["rank"] if job.traceback else hang["ranks"][0] if hang and hang["ranks"] else None
    rank = int(found[1]) if rank is None and found else rank
    node = next((it.node for it in job.instances if it.rank == rank and it.node), None)
    said = _SETUP.search(evidence) if kind == "setup" else None
    node, about = (said[1], said[2]) if said else (node, None)
    if job.traceback and (own := [it for it in _FRAME.findall(job.traceback["text"]) if is_of_user(it[0])]):
        place = ":".join(own[-1])
    elif place is None and (named := _AT.search(evidence)):
        place = named[1]
    return {
        "kind": fault["kind"] if fault else kind, "about": (fault["about"] if fault else about) or None,
        "evidence": evidence,
        "rank": rank, "node": node, "place": place,
    }  # fmt: skip


def _mend(job: Job, found: Diagnosis, where: str) -> Mend:
    kind = found["kind"]
    way = WAYS.get(kind, _EDIT)
    do: str | None = way.do or job.advice or advice(found["evidence"]).text
    if way is _AGAIN:
        do = None
    elif not do and way.action == "edit":
        place = f" at {found['place']}" if found["place"] else ""
        do = f"read what paceline why{where} {shlex.quote(job.name)} says, and correct the script{place}"
    elif not do and kind != "waiting":
        do = "correct what the evidence names"
    words = [job.name]
    if way.flags:
        words.insert(0, way.flags)
    fewer = job.ranks // max(1, job.nodes) // 2
    if kind == "out of memory" and fewer:
        words, do = ["-n", str(fewer), job.name], None
    command: str | None = f"paceline resubmit{where} {shlex.join(words)}"
    if way.action == "edit" and job.code is not None:  # `resubmit` keeps the copy
        command, do = None, f"{do}; the job has a copy of the code: submit it anew with the line that started it"
    if kind == "waiting":
        command = f"paceline wait{where} {shlex.quote(job.name)}"
    elif kind in ("stopped", "setup", "suspended"):
        resume = f"paceline resume{where} {shlex.quote(job.name)}"
        command, do = None, way.do.format(resubmit=command, resume=resume)
    elif kind == "elsewhere":
        command = None
    runs = not job.is_over and job.state != "LOST" and kind not in ("waiting", "suspended")
    first = f"paceline stop{where} {shlex.quote(job.name)}" if runs else None
    return {"action": way.action, "first": first, "do": do or None, "command": command}
