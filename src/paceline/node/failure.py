"""Which rank failed first, and why."""

from __future__ import annotations

import errno
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.node.files import is_disk_full, regular
from paceline.node.rundir.directory import read_error
from paceline.node.usual_messages import advice

if TYPE_CHECKING:
    from paceline.contract.records import Cause, ErrorRecord, Failure, OtherFailure, Outcome

TIMED_OUT = 124  # the exit code of a job that reached its time limit, as timeout(1) has it
# What a rank prints if a peer is gone: such a failure is the consequence of another one.
SYMPTOM = re.compile(
    r"Connection (closed|reset|refused|aborted)|closed by peer|Broken pipe|Socket closed|socket has likely|"
    r"remote (peer|process|error)|DistBackendError|DistNetworkError|ncclRemoteError|ncclSystemError|"
    r"PeerLost|heartbeat|Timed out waiting|Timed out after|coordination service|UNAVAILABLE:|Network error|"
    r"DistStoreError|Gloo \w+ failed|preconditions? .*gloo|another rank of this machine is gone|rank \d+ is gone: ",
    re.IGNORECASE,
)
# Signals that the end of a peer does not cause. SIGABRT is not among them: that is how watchdogs end a rank.
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS}
_OWN_DEATH = {signal.SIGKILL, *CRASHES}
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
_STOPS = (signal.SIGTERM, signal.SIGKILL)  # of ranks that are stopped after they have failed
# How TensorFlow and Keras begin messages whose cause is in another line; what else is in them.
_OF_TENSORFLOW = ("Graph execution error:", "in user code:", "Exception encountered when calling ")
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_OF_TRACE = re.compile(r"File \"|Detected at node |\[\[\{\{|Arguments received by |[•<]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TAIL_BYTES = 4096
_MOST_TOLD, _MOST_LINES = 8, 6  # failures after the first one whose last lines are told, and how many of these
_MOST_MESSAGE = 1000  # letters of a message, which stands in every list of jobs
_SEARCHED = 60  # lines of a log in which a usual message is searched: a C++ exception has its frames behind it


def culprit(failures: list[Failure]) -> Failure:
    """The first failure; symptoms of other failures count only if there is nothing else."""
    return min(failures, key=lambda f: (f["symptom"], -f["age"]))


def outcome(failures: list[Failure]) -> Outcome:
    """The first failure in full, the others by rank and message, and of some of them the last lines."""
    if not failures:
        return {"failure": None, "others": []}
    first = culprit(failures)
    rest = sorted((f for f in failures if f is not first), key=lambda f: (f["rank"] is None, f["rank"] or 0))
    others: list[OtherFailure] = [{"rank": f["rank"], "node": f["node"], "message": f["message"]} for f in rest]
    for other, f in zip(others[:_MOST_TOLD], rest):
        other["traceback"] = "\n".join(f["traceback"].rstrip("\n").split("\n")[-_MOST_LINES:])
        other["collectives"] = f.get("collectives", "")
    return {"failure": first, "others": others}


def rank_failure(
    *,
    rank: int,
    node: int,
    host: str,
    pid: int,
    status: int,
    ended: float,
    log: Path,
    error: Path,
    oom: bool,
) -> Failure:
    """What is known about a rank that ended with wait status `status` at monotonic time `ended`."""
    record = read_error(error)
    if record is not None and record["type"] == "ExitCode":  # see `program`
        ended = min(ended, record["time"])
        if (not os.WIFSIGNALED(status) or os.WTERMSIG(status) in _STOPS) and record["message"].lstrip("-").isdecimal():
            status = (int(record["message"]) & 0xFF) << 8
        record = None
    code, name = exit_code(status), ""
    cause: Cause = "exit"
    text, is_traceback = _tail(log), False
    if record is not None:  # an exception ended it, whatever the exit status is
        ended = min(ended, record["time"])
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _STOPS:
            code = 1  # it was stopped after the exception
        is_traceback = record.get("log_start") is not None
        cause = "exception" if is_traceback else "exit"
        text = (_printed(log, record) or record["traceback"]) if is_traceback else text
        message = _headline(record["type"], record["message"]) if is_traceback else _first_line(record["message"])
        symptom = bool(SYMPTOM.search(record["type"] + record["message"] + record["traceback"]))
        advised = advice(f"{record['type']}: {record['message']}")
    elif os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        cause = "out of memory" if oom else "signal"
        message = f"killed: {cause}" if oom else f"killed by {name}"
        symptom = number not in _OWN_DEATH and bool(SYMPTOM.search(text))
        is_from_outside = oom or number in _FROM_OUTSIDE  # then what it printed is not why
        advised = advice("" if is_from_outside else _tail(log, _SEARCHED))
        advised = advised if advised.text else advice(message)
    else:
        message, symptom = f"exit code {code}", bool(SYMPTOM.search(text))
        advised = advice(_tail(log, _SEARCHED))
        if code and is_disk_full(log.parent):  # then the rank could neither print nor record what happened
            message = f"{message}; no space is left on {host} in {log.parent}"
            advised = advice(os.strerror(errno.ENOSPC))
        advised = advised if advised.text else advice(message)
    return {
        "cause": cause, "rank": rank, "node": node, "host": host, "pid": pid, "exit_code": code, "signal": name,
        "oom": oom, "message": message, "traceback": text, "has_traceback": is_traceback, "log": str(log),
        "symptom": symptom, "ended": ended, "age": 0.0, "advice": advised.text,
        "fault": {"kind": advised.kind, "about": advised.about} if advised.kind else None,
        "collectives": str(record.get("collectives", "")) if record else "",
    }  # fmt: skip


def node_failure(node: int, host: str, cause: Cause, message: str, exit_code: int = 1) -> Failure:
    """The failure of a node, or of paceline's own process there, and of no rank."""
    return {
        "cause": cause, "rank": None, "node": node, "host": host, "pid": 0, "exit_code": exit_code, "signal": "",
        "oom": False, "message": message, "traceback": "", "has_traceback": False, "log": "", "symptom": False,
        "ended": 0.0, "age": 0.0, "advice": "", "fault": None, "collectives": "",
    }  # fmt: skip


def exit_code(status: int) -> int:
    """The exit code for a wait status, as a shell gives it: 128 + N for signal N."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _headline(kind: str, message: str) -> str:
    """The exception in one line, with that of a traceback in its message: torch's mp.spawn and TensorFlow have one."""
    first = _first_line(message)
    _, found, trace = message.strip().rpartition("Traceback (most recent call last):")
    if found and not first.startswith("Traceback"):
        lines = trace.splitlines()  # TensorFlow adds its node, indented
        first = f"{first} {([line for line in lines if line[:1].strip()] or lines)[-1].strip()}"
    elif first.startswith(_OF_TENSORFLOW):
        first = _innermost(first, message)
    return f"{kind}: {first}" if first else f"{kind}:" if message else kind


def _innermost(first: str, message: str) -> str:
    """The first line of a message of TensorFlow with the cause in it, and the innermost line of the user's code."""
    rest = [line.strip() for line in _COLOUR.sub("", message).splitlines() if line.strip()][1:]
    places = [place for line in rest if (place := _PLACE.match(line)) and "site-packages" not in place[1]]
    causes = [line for line in rest if not _OF_TRACE.match(line)]
    behind = causes[-1:] if first.endswith(":") else causes[:1]
    at = f" ({os.path.basename(places[-1][1])}:{places[-1][2]})" if places and behind else ""
    return " ".join([first, *behind]) + at


def _first_line(text: str) -> str:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first if len(first) <= _MOST_MESSAGE else f"{first[:_MOST_MESSAGE]}…"


def _printed(log: Path, record: ErrorRecord) -> str:
    """The traceback as the rank printed it: a user's own sys.excepthook may have formatted it."""
    start, end = record.get("log_start"), record.get("log_end")
    if start is None or end is None:
        return ""
    try:
        with open(log, "rb", opener=regular) as file:
            file.seek(start)
            return file.read(end - start).decode(errors="replace")
    except OSError:
        return ""


def _tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log file."""
    most = _TAIL_BYTES * lines // 12
    try:
        with open(log, "rb", opener=regular) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - most))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


class OomWatch:
    """Finds out whether the kernel killed a process because memory ran out."""

    def __init__(self) -> None:
        self._seen = _oom_kills()

    def killed(self, pid: int) -> bool:
        """Whether the kernel's log names `pid`, or the control group's count has grown since the last call."""
        if f"Killed process {pid} (" in _kernel_log():
            return True
        now = _oom_kills()
        grew, self._seen = now > self._seen, now
        return grew


def _oom_kills() -> int:
    """How many processes of this control group the kernel has killed because memory ran out."""
    total = 0
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = [Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.events", Path("/sys/fs/cgroup/memory.events")]
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            files = [root / path.lstrip("/") / "memory.oom_control", root / "memory.oom_control"]
        else:
            continue
        for file in files:  # the second is the same group as seen from inside a container
            try:
                text = file.read_text()
            except OSError:
                continue
            total += sum(int(row.split()[1]) for row in text.splitlines() if row.startswith("oom_kill "))
            break
    return total


def _kernel_log() -> str:
    """The kernel's messages, if this user may read them."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    chunks = []
    try:
        while True:
            try:
                chunks.append(os.read(log, 8192))
            except BrokenPipeError:
                continue  # messages were overwritten while reading
            except OSError:
                break
    finally:
        os.close(log)
    return b"".join(chunks).decode(errors="replace")
