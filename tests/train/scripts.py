"""`python script.py` without the seconds that importing torch takes: its process is forked from one that has it.

The script has its own arguments, environment, folder, output, exit code and signals, and ends as Python ends.
"""

from __future__ import annotations

import array
import atexit
import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import leaks
from tests.conftest import LAUNCHER_VARIABLES, OTHERS

if TYPE_CHECKING:
    from tests.conftest import Paceline

_ROOM = 64 * 1024  # bytes for the variables of a script


class Script(subprocess.Popen[str]):
    """A running script. It is no child of this process, so how it ended comes over a socket."""

    def __init__(
        self, paceline: Paceline, *line: str, env: dict[str, str] | None = None, host: str = "", session: bool = False
    ) -> None:
        """Start it.

        Args:
            paceline: whose folder and environment it has.
            line: the script and its arguments.
            env: more variables.
            host: a name that its machine has for it alone.
            session: make it the leader of a session.
        """
        self._order = {
            "line": line, "folder": str(paceline.folder), "env": {**paceline.env, **(env or {})}, "host": host,
            "session": session,
        }  # fmt: skip
        super().__init__(["python", *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _execute_child(self, *args: Any) -> None:
        c2pwrite, errwrite = args[13], args[15]
        self._ended, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a message each
        with theirs:
            ends = array.array("i", [c2pwrite, errwrite, theirs.fileno()])
            _started().sendmsg([json.dumps(self._order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ends)])
        os.close(c2pwrite)
        os.close(errwrite)
        self.pid = int(self._ended.recv(32))
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        try:
            return self._wait(0)
        except subprocess.TimeoutExpired:
            return None

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            self._ended.settimeout(timeout and max(0.0, timeout))
            try:
                said = self._ended.recv(32)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._ended.close()
            self.returncode = os.waitstatus_to_exitcode(int(said))
        return self.returncode


def run(paceline: Paceline, *line: str, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    with Script(paceline, *line, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@functools.cache
@leaks.kept()
def _started() -> socket.socket:
    """The server of this process, which is started with its first script and ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES + OTHERS}
        env.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", ROOM=_ROOM * "-")
        command = [sys.executable, str(Path(__file__).with_name("script_server.py")), str(theirs.fileno())]
        null = subprocess.DEVNULL
        server = subprocess.Popen(command, env=env, stdin=null, stdout=null, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    ours.recv(1)  # it has imported torch, with what that makes for the process: torch 2.6 makes a temporary folder
    return ours
