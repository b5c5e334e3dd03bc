"""What the batch script runs when the agents have ended: the job ends, is requeued, or goes on in another Slurm job."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract import TOKEN
from paceline.node.errors import Refused
from paceline.node.failure import TIMED_OUT
from paceline.node.files import write_json
from paceline.node.host.slurm.call import SECONDS, Away, batch_environment, batch_job, call
from paceline.node.host.slurm.job_folder import HELD, UNSEEN, JobFolder, current_start, own_number
from paceline.node.host.slurm.job_folders import disk_time
from paceline.node.host.slurm.look import job_record
from paceline.node.host.slurm.look.partitions import seconds_of
from paceline.node.host.slurm.look.queue import Queue
from paceline.node.host.slurm.look.scheduler import CHAIN, REQUEUE, again
from paceline.node.rundir.directory import SAVED

if TYPE_CHECKING:
    from paceline.contract.records import Failure, JobRecord, SlurmOutcome
    from paceline.node.host.slurm.job_folder import Start
    from paceline.node.rundir.directory import RunDirectory

_IDLE = 3  # jobs of a chain that may end in a row without having saved anything
_ASKED = re.compile(r"^#SBATCH --signal=\S*@(\d+)", re.MULTILINE)  # seconds before its limit that a job is warned
_EARLY = 120.0  # seconds that the warning may come before that: Slurm's own minute, and what a short job cannot tell
_MOST_LOSSES = 5  # requeues after the loss of a node: more are no accident
_TRIES, _PAUSE = 60, 5.0  # while Slurm does not answer; its controller may be restarted
_AT_ONCE = 10.0  # seconds that Slurm may take while a time limit comes near
_KILLED_WITHIN = 120.0  # seconds in which Slurm ends what it has requeued
# What the user has asked for the first job of a chain alone.
_ONCE = re.compile(r"^#SBATCH --(?:hold|begin|deadline|dependency)\b.*\n", re.MULTILINE)
_SUSPENDED = "it was suspended"


def main(path: str, code: str) -> int:
    """Decide what follows, whatever signals come."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it must decide, however the job ends
    return decide(path, code)


def decide(path: str, code: str) -> int:
    """Decide what follows; returns the exit code of the batch script."""
    folder, start = JobFolder(Path(path)), current_start()
    exit_code = int(code) if code.isdecimal() else 1
    if not folder.job.exists():  # it has succeeded, and was deleted
        return exit_code
    if not folder.has(start, own_number()):  # its agents have refused to work
        with contextlib.suppress(OSError):
            folder.of(start).rmdir()
        return exit_code
    folder.of(start).mkdir(parents=True, exist_ok=True)
    if folder.follower(start):  # its Slurm job is not its own any more
        write_json(folder.of(start) / "outcome.json", {"next": None, "time": time.time()})
        return 1
    found = job_record.ended(folder, start)
    state = found["state"] if found else "FAILED"
    if found is not None and found["exit_code"] is not None:
        exit_code = found["exit_code"]
    outcome = _outcome(folder, start, found, exit_code)
    if outcome is None:
        return exit_code or 1
    follows = outcome.get("next")
    if follows == CHAIN:
        with contextlib.suppress(OSError):
            outcome = _chain(folder, outcome)
    write_json(folder.of(start) / "outcome.json", {**outcome, "time": time.time()})
    if outcome.get("next") == REQUEUE:
        return _requeue(folder, start, outcome, exit_code)
    if (folder.is_stopped or outcome.get("state") == "STOPPED") and state != "SUCCEEDED":
        with contextlib.suppress(Refused):  # so that Slurm says CANCELLED, and not FAILED
            call("scancel", "--quiet", own_number())
    return 0 if state == "SUCCEEDED" else exit_code or 1


def _outcome(folder: JobFolder, start: Start, found: JobRecord | None, exit_code: int) -> SlurmOutcome | None:
    """What follows, and why; None if Slurm is ending the job, and so knows it better."""
    state = found["state"] if found else None
    if state == "SUCCEEDED":
        return {"next": None, "state": "SUCCEEDED", "exit_code": 0}
    was_suspended = state in ("STOPPED", None) and folder.suspended.exists()  # and perhaps resumed meanwhile
    if folder.is_stopped or was_suspended:
        return {"next": None, "state": "STOPPED"} if folder.is_stopped else {"next": REQUEUE, "why": _SUSPENDED}
    if folder.refusals(start):
        return {"next": None}
    if state in ("STOPPED", None) and folder.warned(start) == "limit":
        if _is_near_limit(folder, start):
            return _at_limit(folder, start)
        why = f"stopped by a signal, USR2, that was not Slurm's warning before its time limit; {again(folder)}"
        return {"next": None, "state": "STOPPED", "why": why}
    if state == "FAILED" and found is not None and (lost := _loss(folder, start)) is not None:
        outcomes = [folder.outcome(other) or {} for other in folder.starts if other != start]
        losses = sum(outcome.get("cause") == "node lost" for outcome in outcomes)
        if losses < _MOST_LOSSES:
            return {"next": REQUEUE, "why": lost["message"], "cause": lost["cause"]}
        return {"next": None, "why": f"{lost['message']}; this has happened {losses + 1} times", "cause": lost["cause"]}
    if state in ("STOPPED", None) or not folder.is_over(start):  # agents that did not say so were killed
        job_line = scontrol_job()
        if _is_ended(job_line):
            return None
        if (preempted := _preempted(job_line)) is not None:
            return preempted
        if unseen := _unseen(folder):
            return {"next": None, "state": "FAILED", "exit_code": 2, "why": unseen, "cause": "refused"}
    if state is None:
        return {"next": None, "state": "FAILED", "exit_code": exit_code or 1, "why": why_unheard(folder)}
    return {"next": None}


def _loss(folder: JobFolder, start: Start) -> Failure | None:
    """The failure of a start, if that is the loss of a node."""
    failures = [(run.read_status() or {}).get("failure") for run in folder.runs(start)]
    first = next((failure for failure in failures if failure is not None), None)
    return first if first is not None and first["cause"] == "node lost" else None


def _is_near_limit(folder: JobFolder, start: Start) -> bool:
    """Whether the job was warned as shortly before its time limit as its script asks for; also if that is not known."""
    left = seconds_left()
    asked = _ASKED.search(folder.script.read_text(errors="replace")) if folder.script.exists() else None
    if left is None or asked is None:
        return True
    since = disk_time(folder.root) - (folder.of(start) / "warned").stat().st_mtime
    return left + since <= float(asked[1]) + _EARLY


def _at_limit(folder: JobFolder, start: Start) -> SlurmOutcome:
    """What follows when Slurm has warned the job of its time limit."""
    if not folder.read().options.get("chain"):
        why = f"stopped at its time limit in Slurm; {again(folder)}"
    elif not any((run.read_status() or {}).get("start") is not None for run in folder.runs(start)):
        why = "its time limit ended before its ranks had started; give it a longer --time-limit"
    elif _gets_nowhere(folder):
        why = (
            f"its last {_IDLE} jobs of Slurm saved nothing, neither with paceline's library nor in {_saves_to(folder)};"
            " give it a longer --time-limit, or its script's own folder with --checkpoint-dir"
        )
    else:
        why = "its time limit ended, and it goes on in a new job of Slurm"
        return {"next": CHAIN, "why": why, "cause": "time limit"}
    return {"next": None, "state": "FAILED", "exit_code": TIMED_OUT, "why": why, "cause": "time limit"}


def _gets_nowhere(folder: JobFolder) -> bool:
    """Whether its last Slurm jobs have saved nothing: it would go on for ever."""
    jobs: dict[str, list[RunDirectory]] = {}
    for start, runs in job_record.runs_of(folder):
        jobs.setdefault(start.id, []).extend(runs)
    last = [run for runs in list(jobs.values())[-_IDLE:] for run in runs]
    if len(jobs) < _IDLE or any((run.path / SAVED).exists() for run in last):
        return False
    return not _has_written(_saves_to(folder), min(run.spec.stat().st_mtime for run in last))


def _saves_to(folder: JobFolder) -> Path:
    """The folder for checkpoints, in which scripts may also save by themselves."""
    node = folder.read().node
    return Path(node.working_dir, str(node.checkpoint_dir))


def _has_written(folder: Path, since: float) -> bool:
    """Whether a file in a folder was written after this time; hidden ones are the library's, of saves that failed."""
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            with contextlib.suppress(OSError):
                if not name.startswith(".") and os.stat(os.path.join(path, name)).st_mtime > since:
                    return True
    return False


def _is_ended(job_line: str) -> bool:
    """Whether Slurm has ended the job: it was cancelled, has come to its end, or was requeued by somebody else."""
    return re.search(r"\bJobState=(?!RUNNING)\w", job_line) is not None


def _preempted(job_line: str) -> SlurmOutcome | None:
    """What follows if Slurm has told the job to give way to another one; None if it has not."""
    preempted = re.search(r"\bPreemptTime=(\S+)", job_line)
    if preempted is None or preempted[1] in ("None", "Unknown"):
        return None
    if "Requeue=0" in job_line:
        why = "Slurm preempted it, and it may not be requeued"
        return {"next": None, "state": "FAILED", "why": why, "cause": "preempted"}
    return {"next": REQUEUE, "why": "Slurm preempted it for a job with a higher priority", "cause": "preempted"}


def _unseen(folder: JobFolder) -> str:
    """The line for the nodes that do not see the job's folder; "" if all do."""
    with contextlib.suppress(OSError):
        nodes = re.findall(rf"^{UNSEEN} (\S+)", folder.output.read_text(errors="replace"), re.MULTILINE)
        return folder.unseen_by(sorted(set(nodes))) if nodes else ""
    return ""


def why_unheard(folder: JobFolder) -> str:
    """Why no node has written anything."""
    return _unseen(folder) or folder.last_words or f"srun started nothing; see {folder.output}"


def _requeue(folder: JobFolder, start: Start, outcome: SlurmOutcome, exit_code: int) -> int:
    """Let Slurm start the job again; it ends this process."""
    why = "Slurm does not answer"
    for _ in range(_TRIES):
        try:
            is_held = folder.is_suspended
            if is_held:
                folder.suspended.write_text(HELD)
            else:
                folder.suspended.unlink(missing_ok=True)
            call("scontrol", "requeuehold" if is_held else "requeue", own_number())
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(_KILLED_WITHIN)  # a signal ends it
            return exit_code or 1
        except Away as error:
            why = str(error)
            time.sleep(_PAUSE)  # nothing says when the controller is back
        except Refused as error:
            if _is_ended(scontrol_job()):
                return exit_code or 1  # perhaps Slurm requeues it itself
            why = str(error)
            break
    failed = {**outcome, "next": None, "state": "FAILED", "why": f"{outcome['why']}, and cannot be requeued: {why}"}
    write_json(folder.of(start) / "outcome.json", {**failed, "time": time.time()})
    return exit_code or 1


def _chain(folder: JobFolder, outcome: SlurmOutcome) -> SlurmOutcome:
    """Submit the job again, in its folder."""
    stored = folder.read()
    secrets = {name: os.environ[name] for name in stored.spec.secrets if name in os.environ}
    env = batch_environment(secrets, os.environ.get(TOKEN))

    def taken() -> str | None:
        queue = Queue(folder.root, 0.0, SECONDS)
        others = queue.of(folder.identity(stored))
        if queue.problem is not None:
            raise Away(str(queue.problem))
        return next((entry.id for entry in others if entry.id not in folder.ids), None)

    script = ""
    with contextlib.suppress(OSError):  # sbatch says why it cannot be read
        script = os.fsdecode(folder.script.read_bytes())
    later = _ONCE.sub("", script)
    try:
        number = batch_job(
            folder.script, env, taken, text=None if later == script else later, tries=_TRIES, pause=_PAUSE,
            seconds=_TRIES * _PAUSE,
        )  # fmt: skip
    except Refused as error:
        why = f"its time limit ended, and: {error}"
        return {**outcome, "next": None, "state": "FAILED", "exit_code": TIMED_OUT, "why": why}
    folder.add_id(number)
    if folder.is_stopped:  # it came meanwhile
        with contextlib.suppress(Refused):
            call("scancel", "--quiet", number)
        return {"next": None, "state": "STOPPED"}
    return outcome


# -- what Slurm says of the job that this process is part of -----------------------------------------------------------


def scontrol_job() -> str:
    """What `scontrol show job` prints of it; "" if Slurm says nothing for long."""
    for _ in range(_TRIES):
        try:
            return call("scontrol", "show", "job", own_number())
        except Away:
            time.sleep(_PAUSE)  # nothing says when the controller is back
        except Refused:
            break
    return ""


def seconds_left() -> float | None:
    """Seconds until its time limit, `math.inf` if it has none; None if Slurm does not say it at once."""
    try:
        shown = call("scontrol", "show", "job", own_number(), seconds=_AT_ONCE)
    except Refused:
        return None
    fields = dict(re.findall(r"(\w+)=(\S*)", shown))
    limit, run = fields.get("TimeLimit", ""), seconds_of(fields.get("RunTime", ""))
    if limit == "UNLIMITED":
        return math.inf
    whole = seconds_of(limit)
    return None if whole is None or run is None else whole - run
