"""Inside a rank: torch.profiler for a few steps, for whom asks (`contract/stands.py`).

It is started and stopped in the thread that trains, after a step of an optimizer: no operator is at work then. Another
thread does so only where no optimizer steps. Whatever fails here, the training goes on.
"""

from __future__ import annotations

import _thread
import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.contract.stands import Profiled, ProfileRequest

_TICK = 0.2  # seconds between two looks at who asks, at the time and at the memory
_LAST = 2.0  # seconds for the next step to come, before the profiler is stopped without one
_BY_TIME = 2.0  # seconds that are recorded where no optimizer steps
_MOST_MEMORY = 512 << 20  # that a recording may take: 1.5 KB for an operator
_PAGE = os.sysconf("SC_PAGE_SIZE")
_one = _thread.allocate_lock()  # torch has one profiler in a process


def begin(connection: socket.socket) -> None:
    """Answer a request to profile this rank, in a thread of its own."""
    _thread.start_new_thread(_serve, (connection,))


def _serve(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.sendall(b"\n")  # somebody is here
        request = json.loads(connection.makefile("rb").readline())
        answer: Profiled = {"error": "it is profiled already; wait until that has ended"}
        if _one.acquire(blocking=False):
            try:
                answer = _profile(connection, request)
            except Exception as error:
                answer = {"error": f"torch.profiler fails: {type(error).__name__}: {error}"}
            finally:
                _one.release()
        connection.sendall(json.dumps(answer).encode())
        connection.shutdown(socket.SHUT_RDWR)  # children that were forked meanwhile have it too


def _profile(connection: socket.socket, request: ProfileRequest) -> Profiled:
    torch, optimizers = sys.modules.get("torch"), sys.modules.get("torch.optim.optimizer")
    if torch is None or not hasattr(optimizers, "register_optimizer_step_post_hook"):
        return {
            "error": "it has not imported torch, and torch.profiler records nothing else; "
            f"`py-spy record --pid {os.getpid()}` on {socket.gethostname()} samples any program in Python"
        }
    recording = _Recording(torch, request["steps"])
    hook: Any = optimizers.register_optimizer_step_post_hook(recording.step)  # type: ignore[union-attr]
    try:
        recording.wait(connection, request["seconds"])
        if recording.has_not_begun:
            recording.begin()
            recording.why = f"no optimizer has stepped, so {_BY_TIME:g} seconds were recorded"
            recording.wait(connection, _BY_TIME)
        recording.wait_for_last()
        recording.end()
    except BaseException:
        with contextlib.suppress(Exception):
            recording.end()  # else the profiler records for ever
        raise
    finally:
        hook.remove()
    if (failure := recording.export(request["path"])) is not None:
        return {"error": failure}
    return {
        "host": socket.gethostname(), "pid": os.getpid(), "thread": recording.thread, "times": recording.times,
        "why": recording.why,
    }  # fmt: skip


class _Recording:
    """A profiler, and the steps that it has seen.

    Attributes:
        thread: the one that trains; 0 if no optimizer has stepped.
        times: ends of steps, in nanoseconds since the epoch; the first is the beginning.
        why: why it has ended before all steps were there.
    """

    def __init__(self, torch: Any, steps: int) -> None:
        self._torch, self._steps = torch, steps
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._profiler: Any = None
        self._optimizer: Any = None
        self._is_last = False  # the next step is the last one
        self._error: str | None = None
        self.thread, self.why = 0, ""
        self.times: list[int] = []

    @property
    def has_not_begun(self) -> bool:
        """Whether there is no profiler yet, and no reason against one."""
        return self._profiler is None and not self._over.is_set()

    def step(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has stepped, in the thread that trains; called by torch."""
        try:
            with self._lock:
                if self.has_not_begun:
                    self._optimizer, self.thread = id(optimizer), threading.get_native_id()
                    self.begin()
                    self.times.append(time.time_ns())
                elif id(optimizer) == self._optimizer and not self._over.is_set():
                    self.times.append(time.time_ns())
                    if self._is_last or len(self.times) > self._steps:
                        self.end()
        except Exception as error:
            self._error = f"torch.profiler fails: {type(error).__name__}: {error}"
            self._over.set()

    def begin(self) -> None:
        """Start the profiler; what the script does with a profiler of its own goes first."""
        with self._lock:
            if self.has_not_begun:
                self._begin()

    def _begin(self) -> None:
        global _current  # noqa: PLW0603 - for children that are forked meanwhile
        profiler, torch = self._torch.autograd.profiler, self._torch
        if profiler._is_profiler_enabled or "ProfilerStep" in profiler.KinetoStepTracker._step_dict:
            self._error = "its script uses torch.profiler itself, and there can be only one; take that out"
            self._over.set()
            return
        kinds = torch.profiler.ProfilerActivity
        config = {"profile_all_threads": True, "trace_only": True}
        try:
            made = torch._C._profiler._ExperimentalConfig(**config)
        except TypeError:  # an older torch, which makes objects in Python of what it has recorded
            made = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profiler = torch.profiler._KinetoProfile(
            activities=[kinds.CPU, *([kinds.CUDA] if torch.cuda.is_initialized() else [])], experimental_config=made
        )
        if _current is None:
            os.register_at_fork(after_in_child=_forget)
        _current = self
        self._profiler.start()
        self._theirs = profiler.profile._prepare_trace

        def prepare(theirs: Any) -> Any:  # called when the script starts a profiler
            self.why = "its script has started a profiler of its own"
            with contextlib.suppress(Exception):
                self.end()
            return self._theirs(theirs)

        profiler.profile._prepare_trace = prepare

    def end(self) -> None:
        """Stop the profiler, unless that is done."""
        with self._lock:
            if self._over.is_set():
                return
            try:
                self._torch.autograd.profiler.profile._prepare_trace = self._theirs
                self._profiler.stop()
            finally:
                self._over.set()

    def wait(self, connection: socket.socket, seconds: float) -> None:
        """Wait until it has ended, at most so many seconds, while somebody is there who asks, and memory."""
        before, until = _memory(), time.monotonic() + seconds
        poll = select.poll()  # `select` knows no descriptor above 1023
        poll.register(connection, select.POLLIN)
        while time.monotonic() < until:
            if self._over.wait(_TICK):
                return
            if poll.poll(0):
                self._error = "nobody waits for it any more"
                if self._profiler is None:
                    self._over.set()
                return
            if _memory() - before > _MOST_MEMORY:
                self.why = f"the recording has taken {_MOST_MEMORY >> 20} MiB of memory"
                return
        self.why = self.why or "the time was over"

    def wait_for_last(self) -> None:
        """Wait for a last step, for a moment."""
        self._is_last = True
        self._over.wait(_LAST if self.times else 0)

    def export(self, path: str) -> str | None:
        """Write the trace; returns why there is none."""
        if self._error is not None:
            return self._error
        if not self._profiler.profiler.kineto_results.trace_start_ns():
            return "another profiler was started in it meanwhile, and there can be only one"
        self._profiler.export_chrome_trace(path)
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(-2, os.SEEK_END)
            if file.read().rstrip().endswith(b"}"):
                return None
        return f"the trace cannot be written to {os.path.dirname(path)}; is the disk full?"

    def forget(self) -> None:
        """Record nothing in this process, which was forked from the one that is recorded."""
        self._over.set()
        self._lock = threading.RLock()
        self._torch._C._autograd._clear_callbacks()


_current: _Recording | None = None


def _forget() -> None:
    if _current is not None and not _current._over.is_set():
        with contextlib.suppress(Exception):
            _current.forget()


def _memory() -> int:
    """Bytes that this process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE
