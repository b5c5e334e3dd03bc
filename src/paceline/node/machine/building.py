"""Runs what takes long for a client elsewhere: builders of environments, and what gets images of containers."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from typing import IO, TYPE_CHECKING

from paceline.node.errors import Refused

from . import processes

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from paceline.contract.messages import Says

_SAYS_SECONDS = 1.0  # between two lines about it
_KEPT = 4096  # bytes of what it has printed that are kept


def said_by(
    command: list[str], env: Mapping[str, str], log: IO[bytes] | None = None
) -> Generator[Says, None, tuple[int, str]]:
    """Run a command; yields what it says, and returns its exit code and the last of it. It ends with the client."""
    parent = os.getpid()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env,
        start_new_session=True,
        preexec_fn=lambda: processes.die_with(parent),  # noqa: PLW1509 - this process has one thread
    )  # fmt: skip
    assert process.stdout is not None
    output, said, last, when = process.stdout.fileno(), b"", "", 0.0
    try:
        while True:
            data = b""
            if pause(output):
                data = os.read(output, 1 << 16)
                if not data:
                    break
            if log is not None:
                log.write(data)
            said = (said + data)[-_KEPT:]
            line = next((it for it in reversed(said.decode(errors="replace").splitlines()) if it.strip()), "").strip()
            if line != last and time.monotonic() - when >= _SAYS_SECONDS:
                last, when = line, time.monotonic()
                yield {"says": line}
        return process.wait(), said.decode(errors="replace")
    except BaseException:
        while processes.kill_descendants(process.pid):
            pass
        processes.signal_process(process.pid, signal.SIGKILL, group=True)
        process.wait()
        raise
    finally:
        process.stdout.close()


def pause(output: int | None) -> bool:
    """Wait a moment, or until there is output; returns whether there is. Ends this process if its client is gone."""
    watched = [0] if output is None else [0, output]
    ready = select.select(watched, [], [], _SAYS_SECONDS)[0]
    if 0 in ready and not os.read(0, 4096):
        raise Refused("the client is gone")
    return output in ready
