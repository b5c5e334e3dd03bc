"""A TensorBoard beside a job: on a free port of this machine's own address, recorded in the job's run directory.

Every user of a machine can connect to that port, so all paths begin with a random token, which is only in the run
directory; TensorBoard answers no other paths.

If it is started with the job, it is the agent's child and ends with it. For a job that has ended, or was submitted
without one, it is a separate process until `stop`. `tensorboard.json` identifies it by pid and start time, so that
another process is never taken for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from paceline.node.files import read_json, write_json

from .errors import Refused
from .machine import processes

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Sequence

    from paceline.node.eventloop.loop import Loop
    from paceline.node.rundir.directory import RunDirectory

    class BoardRecord(TypedDict, total=False):
        """What tensorboard.json says of a TensorBoard; one that does not run has a problem alone."""

        pid: int
        start_time: int
        port: int
        url: str | None  # None while it does not answer
        logdir: str
        problem: str


PAUSE = 0.1  # seconds between two checks while it starts
PATIENCE = 120.0  # seconds for its start, if a user waits for it
STOP_SECONDS = 5.0  # between SIGTERM and SIGKILL
_TRIES = 3  # ports
_HOST = "127.0.0.1"
# The program of a TensorBoard, with its flags as arguments. Others can read the command line of a process, so the token
# is not there: the process makes it, and prints it as part of its address. TensorBoard's data server is left out, since
# it listens on another port, without a token.
PROGRAM = """
import runpy, secrets, sys
sys.argv += ["--path_prefix", "/" + secrets.token_hex(16), "--load_fast", "false"]
runpy.run_module("tensorboard.main", run_name="__main__", alter_sys=True)
"""


class TensorBoardError(Exception):
    """TensorBoard cannot be started; the message is one line."""


class TensorBoard:
    """A TensorBoard that this process starts.

    Attributes:
        url: its address; None while it does not answer.
        problem: why it does not run, in one line; "" while it may.
    """

    def __init__(self, python: Sequence[str], logdir: str, folder: Path, *, detached: bool) -> None:
        """Start it; `look` says whether that has worked."""
        from .machine.ports import Reservation  # not needed by those that only read records

        self.url: str | None = None
        self.problem = ""
        self._python, self._logdir, self._folder, self._detached = tuple(python), logdir, folder, detached
        self._tries = 0
        self._ports = Reservation()
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def look(self) -> bool:
        """Whether the start is complete or has failed; if another process has taken the port, another port is tried."""
        if self._process is None or self.url is not None:
            return True
        has_ended = self._process.poll() is not None
        output = _tail(log_file(self._folder))
        if has_ended:
            from .machine.ports import is_listening

            self._ports.release()
            if is_listening(self._port) and self._tries < _TRIES:
                self._start()
            else:
                self._give_up(output.strip().rpartition("\n")[2] or f"it ended with status {self._process.returncode}")
            return self._process is None
        found = re.search(rf"http://\S+:{self._port}(/\S*)", output)
        if found is None:
            return False
        self.url = f"http://{_HOST}:{self._port}{found[1]}"
        self._ports.release()
        self._record(self._process)
        return True

    def is_alive(self) -> bool:
        """Whether it runs or starts."""
        return self._process is not None and self._process.poll() is None

    def end(self) -> None:
        """End it at once, if it runs."""
        self._ports.release()
        if self._process is not None and self.is_alive():
            processes.signal_process(self._process.pid, signal.SIGKILL, group=True)
            self._process.wait()

    def _start(self) -> None:
        import subprocess  # not needed by those that only read records

        self._tries += 1
        parent = os.getpid()
        # The port is ours until it listens there. It needs no GPU, and the current folder may shadow what it imports.
        self._port = self._ports.take()
        command = [*self._python, "-c", PROGRAM, "--logdir", self._logdir, "--host", _HOST]
        try:
            with open(log_file(self._folder), "wb") as log:
                self._process = subprocess.Popen(
                    [*command, "--port", str(self._port)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
                    preexec_fn=None if self._detached else lambda: processes.die_with(parent),  # noqa: PLW1509 - one thread
                )  # fmt: skip
        except OSError as error:
            self._ports.release()
            self._give_up(f"{error.strerror or error}")
        else:
            self._record(self._process)

    def _record(self, process: subprocess.Popen[bytes]) -> None:
        began = processes.start_time(process.pid)
        if began is not None:
            self._write({"pid": process.pid, "start_time": began, "port": self._port, "url": self.url,
                         "logdir": self._logdir})  # fmt: skip

    def _give_up(self, problem: str) -> None:
        self._process = None
        self.problem = problem
        self._write({"problem": problem, "logdir": self._logdir})

    def _write(self, record: BoardRecord) -> None:
        with contextlib.suppress(OSError):  # the disk is full
            write_json(record_file(self._folder), record)


def record_file(folder: Path) -> Path:
    """The file that records the TensorBoard of a run directory."""
    return folder / "tensorboard.json"


def log_file(folder: Path) -> Path:
    """The file for its output."""
    return folder / "tensorboard.log"


def describe(folder: Path) -> str | None:
    """The address of a job's TensorBoard, or why it could not be started; None if there is none now."""
    record = _read(folder)
    if "problem" in record:
        return f"not running: {record['problem']}"
    return record["url"] if _runs(record) else None


def start_with_job(python: Sequence[str], logdir: str, folder: Path) -> TensorBoard | None:
    """Start one that ends with this process; None if another process has started one, or is starting it."""
    with _alone(folder, wait=False) as is_alone:
        if not is_alone or _runs(_read(folder)):
            return None
        return TensorBoard(python, logdir, folder, detached=False)


def check_installed() -> None:
    """Check that this Python, on which ranks run too, has TensorBoard."""
    import importlib.util

    found = importlib.util.find_spec("tensorboard")
    if found is None or found.origin is None:  # a folder of event files may have the same name
        raise Refused(f"tensorboard is not installed for {sys.executable}; pip install tensorboard")


def logdir_of(working_dir: str, logdir: str) -> str:
    """A log folder as an absolute path; an address such as s3://… is not changed."""
    return logdir if "://" in logdir else str(Path(working_dir, logdir).absolute())


def open_for_job(python: Sequence[str], folder: Path, logdir: str | None) -> str:
    """The address of the TensorBoard of a run directory, which is started if there is none."""
    check_installed()
    try:
        default = (read_json(folder / "spec.json") or {}).get("tensorboard") or str(folder)
        return open_for(python, None if logdir is None else logdir_of(".", logdir), default, folder)
    except (OSError, ValueError, TensorBoardError) as error:
        raise Refused(f"no TensorBoard for {folder.name}: {error}") from None


def open_for(python: Sequence[str], logdir: str | None, default: str, folder: Path) -> str:
    """The address of the TensorBoard of a run directory, which is started, detached, if there is none."""
    enough = time.monotonic() + PATIENCE
    with _alone(folder):
        while _runs(record := _read(folder)):  # maybe it is starting with its job
            if logdir is not None and record["logdir"] != logdir:
                raise TensorBoardError(f"a running one shows {record['logdir']}; end it first with --stop")
            if record["url"] is not None:
                return record["url"]
            if time.monotonic() > enough:
                raise TensorBoardError(f"it did not start within {PATIENCE:g} s; see {log_file(folder)}")
            time.sleep(PAUSE)
        board = TensorBoard(python, default if logdir is None else logdir, folder, detached=True)
        try:
            while not board.look() and time.monotonic() < enough:
                time.sleep(PAUSE)
        finally:
            if board.url is None:
                board.end()
    if board.url is None:
        why = board.problem or f"it did not start within {PATIENCE:g} s"
        raise TensorBoardError(f"{why}; see {log_file(folder)}")
    return board.url


def stop(folder: Path) -> bool:
    """End the TensorBoard of a run directory; returns whether one ran."""
    record = _read(folder)
    ran = _runs(record)
    if ran:
        processes.signal_process(record["pid"], signal.SIGTERM)
        enough = time.monotonic() + STOP_SECONDS
        while _runs(record) and time.monotonic() < enough + STOP_SECONDS:
            if time.monotonic() > enough:
                processes.signal_process(record["pid"], signal.SIGKILL, group=True)
            time.sleep(0.01)
    with contextlib.suppress(OSError):
        record_file(folder).unlink()
    return ran


def _read(folder: Path) -> BoardRecord:
    try:
        return cast("BoardRecord", read_json(record_file(folder)) or {})
    except (OSError, ValueError):
        return {}


def _runs(record: BoardRecord) -> bool:
    began = record.get("start_time")
    return began is not None and processes.start_time(record["pid"]) == began


@contextlib.contextmanager
def _alone(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Lock out other processes that start one for this folder; yields False if one does, and `wait` is False."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        except BlockingIOError:
            is_alone = False
        yield is_alone
    finally:
        os.close(descriptor)


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


# -- the TensorBoard that an agent runs beside its job -----------------------------------------------------------------


class JobBoard:
    """The TensorBoard of a running job; it ends with this process."""

    def __init__(self, loop: Loop, run: RunDirectory) -> None:
        self._loop, self._run = loop, run
        self._board: TensorBoard | None = None

    def start(self, python: Sequence[str], logdir: str) -> None:
        """Start it, unless it runs; its address or its problem becomes an event of the job."""
        if self._board is None or not self._board.is_alive():
            self._board = start_with_job(python, logdir, self._run.path)
            self._check(self._board)

    def _check(self, board: TensorBoard | None) -> None:
        """Check until it is known whether it runs, or it has been replaced."""
        if board is None or board is not self._board:
            return
        if board.look():
            self._run.append({"event": "tensorboard", "url": board.url, "problem": board.problem})
        else:
            self._loop.after(PAUSE, lambda: self._check(board))
