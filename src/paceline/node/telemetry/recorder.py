"""Writes telemetry.jsonl while the ranks of a node run: a line every `SECONDS`, or less often if a line costs much."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import threading
import time
import traceback
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from paceline.contract.records import Telemetry
    from paceline.contract.stands import MachineNow, Spent
    from paceline.node.eventloop.loop import Loop
    from paceline.node.machine.gpus import Gpu
    from paceline.node.rundir.directory import RunDirectory
    from paceline.node.spec import NodeSpec

    from .sampler import HostUse, RankNow, Sampler

SECONDS = 10.0  # between two lines
SHARE = 0.001  # of a core, at most: for processes, and for GPUs as well
_SOON = (1.0, 2.0)  # seconds before the first look, and the first line
_THIN_EACH = 256  # lines, after which older ones are merged


class Recorder:
    """Measures a job on this node, in a thread of its own, since a driver may not answer for long."""

    def __init__(self, loop: Loop, run: RunDirectory, spec: NodeSpec, ranks: Callable[[], Sequence[RankNow]]) -> None:
        """Measure nothing yet."""
        self._loop, self._run, self._spec, self._ranks = loop, run, spec, ranks
        self._file = _File(run.telemetry)
        self._is_first = self._has_origin = False
        self._sampler: Sampler | None = None
        self._host: HostUse | None = None
        self._last: tuple[float, Telemetry] | None = None  # when it was measured, by the monotonic clock
        self._thread: threading.Thread | None = None
        self._cost = 0.0  # seconds of a core that the last look took
        self._looks = 0
        self._gpus = GpuUse()

    def start(self, *, is_first: bool) -> None:
        """Measure from now on; does nothing if it does already."""
        if not self._looks:
            self._looks, self._is_first = 1, is_first
            self._loop.after(_SOON[0], self._look)

    def known(self, *, gpus: bool) -> Spent:
        """How much the machine was used so far, and with `gpus` those of the ranks."""
        host = self._host
        return {**(self._gpus.known() if gpus else {}), **(host.known() if host is not None else {})}

    def lately(self, seconds: float) -> MachineNow:
        """How the machine was used within these last seconds; nothing if no measurement lies within them."""
        last = self._last
        if last is None or time.monotonic() - last[0] + last[1]["seconds"] > seconds:
            return {}
        machine, use = last[1]["machine"], [it for it in last[1].get("gpus", {}).get("use", ()) if it is not None]
        found: MachineNow = {"network": machine["received"] + machine["sent"]}
        if use:
            found["gpu_use"] = sum(use) / len(use) / 100
        return found

    def _look(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._take, args=(self._ranks(),), daemon=True)
            self._thread.start()
        pause = _SOON[1] if self._looks == 1 else SECONDS
        self._looks += 1
        self._loop.after(max(pause, self._cost / SHARE), self._look)

    def _take(self, ranks: Sequence[RankNow]) -> None:
        begin = time.thread_time()
        try:
            if self._sampler is None:
                from paceline.node.machine.nvml import gpus  # jobs that are over at once need none of it

                from .sampler import HostUse, Sampler

                self._host = HostUse()
                self._sampler = Sampler(self._run.path, _Sparing(gpus))
                begin = time.thread_time()  # imports are no part of a look
            line, gpus_now = self._sampler.take(os.getpid(), ranks)
            self._gpus.add(gpus_now)
            if line is not None:
                self._last = time.monotonic(), line
            if line is not None and ranks:
                self._file.append(line)
                self._cost = time.thread_time() - begin
                self._look_at_origin()
        except Exception:
            traceback.print_exc()  # into the agent's log: an error in measuring must not end what is measured

    def _look_at_origin(self) -> None:
        if not self._has_origin:
            from .origin import write

            self._has_origin = True
            write(self._run, self._spec, is_first=self._is_first)


class _Sparing:
    """Asks for the GPUs as seldom as it must, by what the last question cost."""

    def __init__(self, ask: Callable[[], tuple[Gpu, ...]]) -> None:
        self._ask, self._due = ask, 0.0
        self._last: tuple[Gpu, ...] = ()

    def __call__(self) -> tuple[Gpu, ...]:
        if time.monotonic() >= self._due:
            begin = _spent()
            self._last = self._ask()
            self._due = time.monotonic() + (_spent() - begin) / SHARE
        return self._last


def _spent() -> float:
    """Seconds of a core of this thread, and of commands that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + children.ru_utime + children.ru_stime


class _File:
    """The file; a full disk, or a folder that is gone, is no error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._appended: int | None = None  # since the last thinning; None before the first line

    def append(self, line: Telemetry) -> None:
        """Write a line, and merge old ones from time to time."""
        with contextlib.suppress(OSError):
            if self._appended is None:
                self._appended = _THIN_EACH if self._path.exists() else 0
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, _text(line))
            finally:
                os.close(descriptor)
            self._appended += 1
            if self._appended >= _THIN_EACH:
                self._appended = 0
                self._thin()

    def _thin(self) -> None:
        from .history import telemetry, thinned

        temporary = self._path.with_name(f".{self._path.name}")
        temporary.write_bytes(b"".join(map(_text, thinned(telemetry(self._path), time.time()))))
        temporary.chmod(0o600)
        temporary.replace(self._path)


def _text(line: Telemetry) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


# -- how much the GPUs have been used so far ---------------------------------------------------------------------------

_LEAST = 5  # samples before it is said


class GpuUse:
    """Sums up samples of the GPUs of a node's ranks."""

    def __init__(self) -> None:
        self._use: list[float] = []
        self._memory: list[float] = []
        self._hottest: float | None = None

    def add(self, gpus: Iterable[Gpu]) -> None:
        """Take in a sample."""
        gpus = tuple(gpus)
        use = [gpu.use for gpu in gpus if gpu.use is not None]
        if use:
            self._use.append(sum(use) / len(use) / 100)
        memory = [gpu.memory_used / gpu.memory for gpu in gpus if gpu.memory and gpu.memory_used is not None]
        if memory:
            self._memory.append(max(memory))
        self._hottest = max((gpu.temperature for gpu in gpus if gpu.temperature is not None), default=None)

    def known(self) -> Spent:
        """Their mean use, the most memory of one, and how hot the hottest is now."""
        found: Spent = {} if self._hottest is None else {"hottest": self._hottest}
        if len(self._use) >= _LEAST and self._memory:
            found["gpu_use"] = round(sum(self._use) / len(self._use), 3)
            found["gpu_memory"] = round(max(self._memory), 3)
        return found
