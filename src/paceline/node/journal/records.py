"""The journal of a node's part of a job: one record a line, appended when something happens.

Readers skip what they do not know: events, keys, records of a newer version, and lines that are no records. A line
without its end is not read yet.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import Literal, TypedDict, Union

    from paceline.contract.records import EventRecord, Failure, FinalState, LogFiles, OtherFailure
    from paceline.contract.stands import Hang, Place, Spent

    from .status import RankRecord, Status

    class _Record(TypedDict, total=False):
        """What `append` adds to every record: the version, and seconds since the epoch."""

        v: int
        time: float

    class StateRecord(_Record):  # fields of the status that have changed; the first record of an agent has all of them
        event: Literal["state"]
        status: Status

    class RanksRecord(_Record):  # ranks that have changed; the others are as they were
        event: Literal["ranks"]
        ranks: list[RankRecord]

    class ReopenedRecord(_Record):  # the run directory gets another agent: what was before does not count for the state
        event: Literal["reopened"]

    class QueuedRecord(_Record):  # the job waits for devices
        event: Literal["queued"]
        need: int | tuple[str, ...]
        ahead: int
        problem: str

    class GrantedRecord(_Record):  # it has got them
        event: Literal["granted"]
        devices: Sequence[str]

    class StartedRecord(_Record):  # an attempt starts
        event: Literal["started"]
        attempt: int
        world_size: int
        logs: list[LogFiles]

    class HangRecord(_Record):  # no rank goes on; `hang` says which ones keep the others waiting, and where all are
        event: Literal["hang"]
        why: str
        hang: Hang

    class StacksRecord(_Record):  # where the ranks of a node were before they were stopped
        event: Literal["stacks"]
        places: list[Place]

    class SpentRecord(_Record):  # what the ranks of a node have spent their time on, and in words what makes them slow
        event: Literal["spent"]
        spent: Spent
        causes: list[str]

    class StoppingRecord(_Record):  # the ranks are being stopped with the job
        event: Literal["stopping"]
        signal: int
        grace: float

    class RestartingRecord(_Record):  # another attempt follows: after a failure, or because nodes have come or gone
        event: Literal["restarting"]
        attempt: int
        restarts: int
        why: str
        nodes: int
        failure: Failure | None
        others: list[OtherFailure]

    class SuspendedRecord(_Record):  # the job has given its devices back, and waits until it is resumed
        event: Literal["suspended"]
        attempt: int  # the next one
        restarts: int
        failure: Failure | None
        others: list[OtherFailure]

    class ResumingRecord(_Record):  # it is resumed
        event: Literal["resuming"]
        attempt: int  # the next one

    class FinishedRecord(_Record):  # the job has ended here; its last record
        event: Literal["finished"]
        state: FinalState
        exit_code: int
        failure: Failure | None
        others: list[OtherFailure]

    # A thing with its reason: the job waits for nodes, is not started warm, imports in each rank, ….
    class ReasonRecord(_Record):
        event: Literal["waiting", "cold", "exec", "unjoined"]
        why: str

    class ImportingRecord(_Record):  # the fork server imports these packages; the ranks start when it has
        event: Literal["importing"]
        what: list[str]

    class ImportedRecord(_Record):  # it has imported them, in so many seconds
        event: Literal["imported"]
        seconds: float

    class WarmRecord(_Record):  # a warm server has started the agent
        event: Literal["warm"]

    class ContinuedRecord(_Record):  # a suspended process was continued, so that the job can end
        event: Literal["continued"]
        what: str
        pid: int

    # The library has committed a checkpoint; it appends this itself, `train/checkpoint/history.py`.
    class SavedRecord(_Record):
        event: Literal["checkpoint"]
        step: int
        folder: str

    class ResumedRecord(_Record):  # the library has loaded a checkpoint; it appends this as `SavedRecord`
        event: Literal["resumed"]
        step: int
        path: str

    class TensorBoardRecord(_Record):  # tensorBoard runs beside the job, or cannot
        event: Literal["tensorboard"]
        url: str | None
        problem: str | None

    Record = Union[
        StateRecord, RanksRecord, ReopenedRecord, QueuedRecord, GrantedRecord, StartedRecord, HangRecord,
        SpentRecord, StacksRecord, StoppingRecord, RestartingRecord, SuspendedRecord, ResumingRecord,
        FinishedRecord, ReasonRecord, ImportingRecord, ImportedRecord, WarmRecord, ContinuedRecord, SavedRecord,
        ResumedRecord, TensorBoardRecord,
    ]  # fmt: skip


VERSION = 1
_LOG_FILES = {"rank": int, "local_rank": int, "out": str, "err": str, "error": str}
_OF_STATE = frozenset({"state", "ranks", "reopened"})  # events that only change the state: they are not shown
_MOST_BYTES = 64 * 1024 * 1024  # that one call reads


def until_resumed(name: str) -> str:
    """What a suspended job waits for."""
    return f"paceline resume {name} lets it go on"


def append(path: Path, spare: Path, records: Sequence[Record]) -> tuple[list[Record], int]:
    """Append records with one write, also if other processes append; returns them as written, and where they end.

    A full disk is no error: `spare` is removed to make space, and if that is not enough, the records are lost.
    """
    written = stamped(records)
    data = "".join(f"{json.dumps(record)}\n" for record in written).encode()
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.lseek(fd, 0, os.SEEK_END)
        if size and os.pread(fd, 1, size - 1) != b"\n":  # the disk was full, or the writer was killed
            data = b"\n" + data
        count = 0
        with contextlib.suppress(OSError):
            count = os.write(fd, data)
        if count < len(data):
            with contextlib.suppress(OSError):
                spare.unlink()
                os.write(fd, data[count:])
        return written, os.lseek(fd, 0, os.SEEK_CUR)
    finally:
        os.close(fd)


def stamped(records: Sequence[Record]) -> list[Record]:
    """Records as they are written now."""
    stamp = {"v": VERSION, "time": time.time()}
    return [cast("Record", {**stamp, **record}) for record in records]


def read(path: Path, offset: int = 0) -> tuple[list[Record], int]:
    """The records from a position on, and the end of the last complete line; none if the file is missing."""
    lines, end = _lines(path, offset)
    return parsed(lines), end


def _lines(path: Path, offset: int) -> tuple[list[bytes], int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return [], offset
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # a FIFO would never end
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        data = os.pread(fd, _MOST_BYTES, offset)
    finally:
        os.close(fd)
    end = data.rfind(b"\n") + 1
    return data[:end].split(b"\n"), offset + end


def parsed(lines: Iterable[bytes]) -> list[Record]:
    """The records in complete lines; lines that are none, or of a newer version, are skipped."""
    return [record for line in lines if (record := _parse(line)) is not None]


def has_newer(path: Path) -> bool:
    """Whether a newer version of paceline has written into a journal."""
    versions = (record.get("v") for line in _lines(path, 0)[0] if (record := _object(line)) is not None)
    return any(type(version) is int and version > VERSION for version in versions)


def for_people(records: Iterable[Record]) -> list[EventRecord]:
    """The records that people see, without their version."""
    shown = (it for it in records if it["event"] not in _OF_STATE)
    return [cast("EventRecord", {key: value for key, value in it.items() if key != "v"}) for it in shown]


def _object(line: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(line)
        return found if isinstance(found, dict) else None
    return None


def _parse(line: bytes) -> Record | None:
    record = _object(line)
    if record is None or not isinstance(record.get("event"), str):
        return None
    version, moment = record.get("v"), record.get("time")
    if type(version) is not int or version != VERSION or type(moment) not in (int, float):
        return None
    if record["event"] == "started" and not _names_logs(record):
        return None
    return cast("Record", record)


def _names_logs(record: Mapping[str, Any]) -> bool:
    """Whether a record of the start of an attempt has what readers of logs need."""
    attempt, logs = record.get("attempt"), record.get("logs")
    return type(attempt) is int and isinstance(logs, list) and all(
        isinstance(log, dict) and all(isinstance(log.get(key), kind) for key, kind in _LOG_FILES.items())
        for log in logs
    )  # fmt: skip
