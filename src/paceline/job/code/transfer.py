"""Runs programs that copy files, and turns their errors into one line."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.job.errors import UserError
from paceline.job.secret_values import without_passwords

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

OnProgress = Callable[[str, int, "int | None"], None]

_MANY = 200  # lines of a program's messages that are kept

# What programs say (in English, in lower case) → what is wrong, and what to do.
_REASONS: tuple[tuple[str, str], ...] = (
    (r"no space left on device|disk quota exceeded", "no space is left; free some, or choose another working dir"),
    (
        r"could not resolve|name or service not known|couldn't connect|failed to connect|connection refused|"
        r"timed out|no route to host|network is unreachable|unable to look up|connection reset|"
        r"temporary failure in name resolution",
        "its host cannot be reached; check the name and the network",
    ),
    (r"host key verification failed", "its host's key is not known; connect once by hand with ssh and confirm it"),
    (r"cannot run ssh|failed to exec ssh", "ssh is not installed; install it (Debian: apt install openssh-client)"),
    (
        r"certificate|ssl[_ ]|gnutls",
        "its host's certificate is not trusted; install its authority, or see http.sslCAInfo",
    ),
)


@dataclass(frozen=True)
class Result:
    """A program's exit code, its output, and its error messages, line by line."""

    code: int
    output: bytes
    messages: tuple[str, ...]

    @property
    def text(self) -> str:
        """The error messages in lower case, for searching."""
        return "\n".join(self.messages).lower()

    @property
    def last(self) -> str:
        """The most useful error message: the last fatal one, or else the last."""
        fatal = [line for line in self.messages if re.match(r"(fatal|error|rsync):", line, re.IGNORECASE)]
        line = (fatal or [*self.messages] or [f"exit code {self.code}"])[-1]
        return printable(re.sub(r"^(fatal|error|rsync):\s*", "", line, flags=re.IGNORECASE).rstrip("."))


def printable(name: object) -> str:
    """A name as it is, but for the passwords of URLs, or quoted where it would break the line."""
    text = without_passwords(str(name))
    return text if text.isprintable() else ascii(text)


def require(program: str) -> str:
    """The path of a program."""
    path = shutil.which(program)
    if path is None:
        raise UserError(f"{program} is not installed here; install it (Debian: apt install {program})")
    return path


def run(
    argv: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    *,
    on_line: Callable[[str], bool] = lambda line: False,  # gets lines of stderr; True for those about progress
    on_output: Callable[[str], bool] | None = None,  # likewise of stdout, which is not kept then
    given: bytes = b"",
) -> Result:
    """Run a program in a session of its own, so that it cannot ask on the terminal, and everything it starts."""
    messages: list[str] = []
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as output:
        stdin.write(given)
        stdin.seek(0)
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=dict(env),
            stdin=stdin,
            stdout=output if on_output is None else subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            handlers = {process.stderr.fileno(): on_line}  # type: ignore[union-attr]
            if on_output is not None:
                handlers[process.stdout.fileno()] = on_output  # type: ignore[union-attr]
            _read_lines(process, handlers, messages)
            code = process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        output.seek(0)
        return Result(code, output.read(), tuple(messages[-_MANY:]))


def _read_lines(
    process: subprocess.Popen[bytes], handlers: dict[int, Callable[[str], bool]], messages: list[str]
) -> None:
    """Pass lines to the handlers until the program ends; processes that it left running may keep the pipes open."""
    rests = dict.fromkeys(handlers, b"")
    while rests:
        is_over = process.poll() is not None
        ready = select.select(list(rests), [], [], 0 if is_over else 0.2)[0]
        for descriptor in ready:
            data = os.read(descriptor, 65536)
            *lines, rests[descriptor] = re.split(rb"[\r\n]", rests[descriptor] + data)
            if not data:
                lines.append(rests.pop(descriptor))
            for line in lines:
                text = os.fsdecode(line).strip()
                if text and not handlers[descriptor](text):
                    messages.append(text)
                    del messages[: -2 * _MANY]
        if not ready:
            if is_over:
                return
            for handler in handlers.values():
                handler("")


def reason(text: str) -> str | None:
    """The reason for a failure that any program may report, such as a host that cannot be reached."""
    return next((why for pattern, why in _REASONS if re.search(pattern, text)), None)
