"""The commands that a job runs once on each node, in a shell which then becomes the fork server.

So the ranks, which are its forks, have the variables that the commands set. Its folder is not passed on; its Python is
if they have put another one first on PATH.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

REPORT = "setup-failed"  # the file in the run directory that names the command that has failed
# `module` is a function, and only login shells define it. What these files print or fail at is not the job's.
_MODULES = """
if ! command -v module >/dev/null 2>&1; then
  for _paceline in "${MODULESHOME:-/usr/share/modules}/init/sh" /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh \
      /etc/profile.d/modules.sh; do
    if [ -r "$_paceline" ]; then . "$_paceline" >/dev/null 2>&1; break; fi
  done
fi
"""
_PLACE = re.compile(r"^\S+: (eval: )?line \d+: ")  # of the shell's messages; the lines are not those of the user
_PYTHON = "command -v python3 || command -v python || :"
# At the top alone: a file or function that a command reads may handle its own failures.
_TRAP = """_paceline_status=$?
if [ "${#BASH_SOURCE[@]}" -eq 0 ]; then
  printf '%s %s' "$_paceline_status" "$BASH_COMMAND" >"$_paceline_report"; exit 1
fi"""


def command_with(setup: Sequence[str], command: Sequence[str], folder: str, report: Path) -> list[str]:
    """A shell that runs the commands of a setup, and becomes a program of Python if none fails."""
    python, *rest = command
    shell = shutil.which("bash") or "sh"
    has_traps = os.path.basename(shell) == "bash"
    lines = [f"_paceline_report={shlex.quote(str(report))}", _MODULES, f"_paceline_python=$({_PYTHON})"]
    if has_traps:
        lines.append(f"trap {shlex.quote(_TRAP)} ERR")
    for text in setup:
        lines.append(f"printf '? %s' {shlex.quote(text)} >\"$_paceline_report\"")
        failed = f"printf '%s %s' $? {shlex.quote(text)} >\"$_paceline_report\"; exit 1"
        lines.append(f"eval {shlex.quote(text)}" + ("" if has_traps else f" || {{ {failed}; }}"))
    lines += [
        "trap - ERR" if has_traps else "",
        'rm -f "$_paceline_report"',
        f"cd {shlex.quote(folder)} || exit 1",
        f"_paceline_now=$({_PYTHON})",
        f'if [ "$_paceline_now" = "$_paceline_python" ]; then _paceline_now={shlex.quote(python)}; fi',
        "unset _paceline _paceline_python _paceline_report _paceline_status",
        f'exec "$_paceline_now" {shlex.join(rest)}',
    ]
    return [shell, "-c", "\n".join(lines)]


def failure(report: Path, host: str, log: Path, ended: int) -> str | None:
    """Why the setup has failed on a host, whose shell `ended` with this exit code, or -N; None if it has not."""
    try:
        status, _, command = report.read_text(errors="replace").partition(" ")
    except OSError:
        return None
    if command.startswith("eval "):  # the shell could not read it
        with contextlib.suppress(ValueError):
            command = " ".join(shlex.split(command)[1:])
    code = f" with exit code {status}"
    if not status.isdecimal():  # no command has failed, but one was the last that the shell ran
        ends = f"the command ended the shell with exit code {ended}"
        code = f" as {ends if ended >= 0 else f'signal {-ended} ended the shell'}"
    said = _PLACE.sub("", _last_line(log))
    return f"setup failed on {host}{code}: {' '.join(command.split())}" + (f": {said}" if said else "")


def _last_line(log: Path) -> str:
    """The last line of a log file that is not empty."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
