"""The timeline: what happened to each tensor, as a trace for chrome://tracing or Perfetto.

Format: the Trace Event Format of Chromium, an array of events with times in microseconds.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from .negotiation import Request


class Timeline:
    """A file with events, written as they come. Each tensor is shown as a process of its own, with its name."""

    def __init__(self, path: str, mark_cycles: bool) -> None:
        self.mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._negotiated: set[str] = set()
        self._file: TextIO | None = open(path, "w", encoding="utf-8")  # noqa: SIM115 - until `close`
        self._began = time.monotonic()
        self._is_first = True
        self._write(
            {
                "name": "process_name",
                "ph": "M",
                "pid": 0,
                "args": {"name": "cycles", "start_time_since_epoch_in_micros": int(time.time() * 1e6)},
            }
        )

    def received(self, rank: int, requests: list[Request]) -> None:
        """A rank has submitted operations; with the first rank, their negotiation begins."""
        self.cycle()
        for request in requests:
            if request.title not in self._negotiated:
                self._negotiated.add(request.title)
                self._event(request.title, f"NEGOTIATE_{request.kind.upper()}", ph="B")
            self._event(request.title, str(rank), ph="X", dur=0)

    def ready(self, requests: list[Request]) -> None:
        for request in requests:
            if request.title in self._negotiated:
                self._negotiated.discard(request.title)
                self._event(request.title, f"NEGOTIATE_{request.kind.upper()}", ph="E")

    def marker(self, requests: list[Request]) -> Callable[[str], None]:
        """Operations are begun as one; returns a function that takes their activities: "" ends one, "done" all."""
        stack: list[str] = []

        def mark(what: str) -> None:
            for request in requests:
                if what in ("", "done"):
                    self._event(request.title, stack[-1] if what == "" else request.kind.upper(), ph="E")
                else:
                    self._event(request.title, what, ph="B")
            if what == "":
                stack.pop()
            elif what != "done":
                stack.append(what)

        for request in requests:
            self._event(request.title, request.kind.upper(), ph="B")
        return mark

    def cycle(self) -> None:
        if self.mark_cycles:
            with self._lock:
                self._write({"name": "CYCLE_START", "ph": "i", "pid": 0, "s": "g", "ts": self._now()})

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def _event(self, tensor: str, what: str, **fields: object) -> None:
        """Write what begins (ph="B"), ends (ph="E") or happens (ph="X") to a tensor."""
        with self._lock:
            number = self._numbers.get(tensor)
            if number is None:
                number = self._numbers[tensor] = len(self._numbers) + 1
                self._write({"name": "process_name", "ph": "M", "pid": number, "args": {"name": tensor}})
                self._write({"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}})
            self._write({"name": what, **fields, "pid": number, "tid": 0, "ts": self._now()})

    def _now(self) -> int:
        return int((time.monotonic() - self._began) * 1e6)

    def _write(self, event: dict[str, object]) -> None:
        if self._file is None:
            return
        self._file.write(f"{'[' if self._is_first else ','}\n{json.dumps(event)}")
        self._file.flush()  # a rank that is killed leaves a trace that can be read
        self._is_first = False
