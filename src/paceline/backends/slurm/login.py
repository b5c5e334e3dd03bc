"""The machine with Slurm's commands: this one, or a login node that ssh reaches."""

from __future__ import annotations

import base64
import json
import shlex
import sys
from typing import TYPE_CHECKING

from paceline.backends import limits
from paceline.backends.packing import archive
from paceline.backends.remote.connection import Host, quoted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.contract.messages import Beside

    from .options import Options


class Login(Host):
    """Answers the requests of `node/host/slurm`."""

    @property
    def says(self) -> str:
        """What its messages begin with."""
        return "" if self.is_here else super().says

    def beside(self, step: Sequence[str], request: Beside) -> str:
        """A line of its shell that runs a command beside a rank, in a step of Slurm."""
        argument = base64.urlsafe_b64encode(json.dumps(request).encode()).decode()
        path = f"{self.root.rstrip('/')}/{archive().name}"
        return f"exec {shlex.join(step)} {quoted(self.python)} {quoted(path)} shell {argument}"


def login_of(options: Options) -> Login:
    """The machine that a target names."""
    if options.ssh is None:
        python = options.python or sys.executable
        return Login("localhost", 0, None, None, python, options.root, limits.load())
    python = options.python or "python3"
    return Login(options.ssh, 0, options.port, options.identity_file, python, options.root, limits.load())
