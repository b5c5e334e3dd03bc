"""kubectl, for what needs a terminal or a port of this machine."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from paceline.backends.base import Shell
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from paceline.backends.kubernetes.options import Options


def kubectl(verb: str, options: Options, namespace: str, *words: str) -> Shell:
    """A command line of kubectl, with the cluster and the user of a target."""
    program = shutil.which("kubectl")
    if program is None:
        raise UserError(f"paceline {verb} needs kubectl on Kubernetes, which is not on PATH; install it")
    env = {**os.environ, **({"KUBECONFIG": options.kubeconfig} if options.kubeconfig else {})}
    context = ("--context", options.context) if options.context else ()
    return Shell((program, *context, "--namespace", namespace, *words), env, os.getcwd())
