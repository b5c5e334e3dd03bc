"""Slurm's commands: what they print, or why they fail, in one line."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from paceline.contract import GIT_CREDENTIALS, TOKEN
from paceline.node.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

SECONDS = 55.0  # that a command may take; the longest of its own tries, to reach munge, take 49
_NUMBER = re.compile(r"^(\d+)", re.MULTILINE)
_SENTENCE = re.compile(r"^(?:[a-z]+: )?(?:error: |fatal: )*")
_AWAY = (
    "unable to contact slurm controller", "connection refused", "socket timed out", "communication connection failure",
    "zero bytes were transmitted", "no route to host", "transport endpoint is not connected", "network is unreachable",
    "message receive failure", "message send failure", "backup controller", "temporarily unable to accept job",
)  # fmt: skip
_FILTERS = re.compile(r"(SQUEUE|SCANCEL|SINFO|SACCT|SCONTROL)_|SLURM_CLUSTERS$")  # would hide jobs, or ask elsewhere
# Variables of a job that this process is in, or of the user for sbatch, and those that are for git alone.
_FOREIGN = re.compile(rf"(SLURM|SBATCH|SRUN|SALLOC)_|({'|'.join(GIT_CREDENTIALS)})$")
_ELSEWHERE = 'name a login node of the cluster with ssh = "HOST" in [targets.NAME] of paceline.toml, and --on NAME'
_MUNGE = (
    "munge encode", "munge decode", "munge", "authentication", "protocol authentication error",
    "invalid authentication credential",
)  # fmt: skip


class Away(Refused):
    """Slurm does not answer: its controller or munge is down, or too slow."""


class Rejected(Refused):
    """Slurm has answered, and does not do it."""

    def __init__(self, command: str, output: str) -> None:
        super().__init__(f"{command}: {output or 'it failed without a word'}")
        self.output = output  # what Slurm printed


class NoSuchJob(Rejected):
    """Slurm has no job of the number that it was asked for: none of its commands says this in another way."""


def call(
    command: str, *args: str, env: Mapping[str, str] | None = None, text: str | None = None, seconds: float = SECONDS
) -> str:
    """What a command prints."""
    return _printed(command, args, env, text, seconds)[0].decode(errors="replace")


def _printed(
    command: str, args: Sequence[str], env: Mapping[str, str] | None, text: str | None, seconds: float
) -> tuple[bytes, str]:
    """What a command that succeeds prints, and what it complains of."""
    path = found(command)
    base = {name: value for name, value in (os.environ if env is None else env).items() if not _FILTERS.match(name)}
    # What is read has one form; but the variables of sbatch are those of the job.
    given = base if command == "sbatch" else {**base, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
    stdin = subprocess.DEVNULL if text is None else subprocess.PIPE
    try:
        process = subprocess.Popen(
            [path, *args], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=given,
            start_new_session=True,
        )  # fmt: skip
    except OSError as reason:  # no process can be started, or no descriptor is left
        raise Away(f"{command} cannot be started here: {reason.strerror}") from None
    try:
        out, err = process.communicate(None if text is None else os.fsencode(text), timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[1].decode(errors="replace")
        if isinstance(error := _failure(command, output), Away):  # it has printed why, and went on trying
            raise error from None
        raise Away(
            f"{command} does not answer within {max(1, round(seconds))} s; Slurm's controller may be down or busy"
        ) from None
    if process.returncode:
        raise _failure(command, err.decode(errors="replace"))
    return out, err.decode(errors="replace")


def table(command: str, *args: str, columns: Mapping[str, int], seconds: float = SECONDS) -> list[dict[str, str]]:
    """The rows that `squeue` or `sinfo` print: the text of each column, by its name.

    All versions of Slurm from 22.05 to 25 have these texts of fixed columns, while their JSON differs. No row and a
    complaint is no answer: squeue ends with 0 when this machine cannot resolve the user for a moment.
    """
    form = ",".join(f"{name}:{width}" for name, width in columns.items())
    rows = []
    output, complaint = _printed(command, ("--noheader", *args, "-O", form), None, None, seconds)
    if complaint.strip() and not output.strip():
        raise Away(f"{command}: {_lines(complaint)[-1]}")
    for line in filter(None, output.split(b"\n")):
        row, rest = {}, line
        for name, width in columns.items():  # in bytes, as Slurm counts them: a path may have letters of several
            row[name], rest = rest[:width].decode(errors="replace").strip(), rest[width:]
        rows.append(row)
    return rows


def found(command: str) -> str:
    """The path of a command."""
    path = shutil.which(command)
    if path is None:
        raise Refused(f"no {command} on PATH here; {_ELSEWHERE}")
    return path


def has(command: str) -> bool:
    """Whether a command is installed here."""
    return shutil.which(command) is not None


def _failure(command: str, output: str) -> Refused:
    lines, lower = _lines(output), output.lower()
    if "configuration source" in lower:  # its commands are installed on a machine that is in no cluster
        return Refused(f"{command}: this machine is in no Slurm cluster; {_ELSEWHERE}")
    if any(text in lower for text in _MUNGE):
        return Away(
            f"{command}: {_telling(lines, _MUNGE)}; munge must run here and on the controller: systemctl status munge"
        )
    if any(text in lower for text in _AWAY):
        return Away(f"{command}: {_telling(lines, _AWAY)}; Slurm's controller (slurmctld) is down or cannot be reached")
    kind = NoSuchJob if "invalid job id" in lower else Rejected
    return kind(command, lines[-1] if lines else "")


def _lines(output: str) -> list[str]:
    """The sentences of an output."""
    return [_SENTENCE.sub("", line.strip()).rstrip(".") for line in output.splitlines() if line.strip()]


def _telling(lines: Sequence[str], texts: Sequence[str]) -> str:
    """The line that has the first of these texts that there is."""
    return next(line for text in texts for line in lines if text in line.lower())


class Unknown(Refused):
    """Slurm may have taken the job: it did not say so, and does not answer."""


def batch_job(
    script: Path, env: Mapping[str, str], taken: Callable[[], str | None], *, text: str | None = None,
    tries: int, pause: float, seconds: float, gives_up: Callable[[], bool] = lambda: False,
) -> str:  # fmt: skip
    """Have sbatch submit a script, or this text in its place, once; returns the number of the Slurm job.

    If sbatch is not heard of, Slurm may have taken the job all the same. `taken` returns the number that it has then,
    None if it has none, and raises `Away` if Slurm does not answer. So sbatch is called again only behind an answer to
    `taken` that came some seconds later: what Slurm was about to take is in its list by then.
    """
    args = ("--parsable", "--export=ALL", *(() if text is not None else (str(script),)))
    why: Away | None = None
    while True:
        has_none = why is None
        if why is not None:
            with contextlib.suppress(Away):
                if (number := taken()) is not None:
                    return number
                has_none = True
            if has_none and (tries <= 0 or gives_up()):
                raise Refused(f"{why}; nothing was submitted")
            if tries <= 0:
                raise Unknown(f"{why}; Slurm may have taken it")
        if has_none:
            try:
                output = call("sbatch", *args, env=env, text=text, seconds=seconds)
            except Away as error:
                why = error
            else:
                found = _NUMBER.search(output)
                if found is None:
                    raise Refused(f"sbatch says {output.strip()!r}, and no job number")
                return found[1]
        tries -= 1
        time.sleep(pause)  # nothing says when the controller is back


def batch_environment(secrets: Mapping[str, str], token: str | None) -> dict[str, str]:
    """The variables of a Slurm job: those of this process, secrets and the token.

    They travel as sbatch's own, which Slurm hands to the nodes, and are in no file of paceline's.
    """
    kept = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name) or name == "SLURM_CONF"}
    return {**kept, **secrets, **({TOKEN: token} if token else {})}
