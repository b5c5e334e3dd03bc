"""Answers a request of a client over a connection, such as one over ssh (`protocol.py`).

A request is a JSON object in a line; `do` names the verb, and for some verbs more follows on stdin. The answer is one
line, or several for verbs that take long; these end when stdin ends. A client that says "stays" sends more requests.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.node.errors import Refused
from paceline.node.machine.environments import activate
from paceline.node.store.home import Home

from .protocol import send

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from paceline.contract.messages import Beside

    Answer = Mapping[str, object]  # one of `contract.messages`
    Verb = Callable[[Home, Any], "Answer | Generator[Answer, None, None]"]

# The modules of the verbs. Only the requested one is imported, since imports take most of the time of a short answer.
_VERBS = {
    "queries": (
        "describe", "spec", "events", "logs", "nodes", "usage", "stands", "history", "losses", "contents",
        "volumes", "wait",
    ),
    "commands": ("stop", "suspend", "signal", "delete", "invite", "leave", "open_tensorboard", "close_tensorboard"),
    "plan": ("plan", "preflight"),
    "start": ("start",),
    "held": ("rejoin",),
    "moving": ("inventory", "carry"),
    "warming": ("warm_start", "warm_ask"),
    "containers": ("container", "container_prepare"),
    "environments": ("environment", "environment_build", "environment_list", "environment_prune"),
    "slurm.place.submit": ("slurm_submit",),
    "slurm.place.check_job": ("slurm_check",),
    "slurm.look.describe": (
        "slurm_describe", "slurm_events", "slurm_history", "slurm_losses", "slurm_usage", "slurm_wait",
        "slurm_shell",
    ),
    "slurm.look.logs": ("slurm_logs",),
    "slurm.look.partitions": ("slurm_nodes",),
    "slurm.end.stop": ("slurm_stop", "slurm_suspend", "slurm_delete"),
}  # fmt: skip
_MODULES = {verb: module for module, verbs in _VERBS.items() for verb in verbs}


def main(root: str, line: bytes) -> None:
    """Answer a request; if it says that the client stays, also those that follow."""
    while line:
        request = json.loads(line)
        _answer(Path(root), request)
        line = sys.stdin.buffer.readline() if request.get("stays") else b""


def _answer(root: Path, request: Mapping[str, Any]) -> None:
    name = request["do"]
    try:
        activate(root)
        verb: Verb = getattr(importlib.import_module(f"paceline.node.host.{_MODULES[name]}"), name)
        jobs = root / request["jobs"] if "jobs" in request else None  # a folder that machines share
        answer = verb(Home(root, jobs), request)
        if isinstance(answer, Mapping):
            send(answer)
            return
        with contextlib.closing(answer):
            for each in answer:
                send(each)
    except Refused as error:
        send({"error": str(error)})
    except BrokenPipeError:
        os._exit(0)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        send({"error": f"{where}{error.strerror or error}; choose another root in the target's settings, or make room"})


def shell(argument: str) -> None:
    """Replace this process by a user's command, in the folder and with the variables of a rank."""
    import base64

    from paceline.node import ENTRY
    from paceline.node.machine import containers
    from paceline.node.ranks.placement import container_of, shell_of
    from paceline.node.rundir.directory import RunDirectory

    request: Beside = json.loads(base64.urlsafe_b64decode(argument))
    try:
        if "run" in request:  # a path that all machines share
            run = RunDirectory(Path(request["run"]))
        else:
            run = Home(Path(os.path.expanduser(request["root"]))).run(request["name"])
        if (around := container_of(run)) is not None and not containers.is_inside():
            words = containers.command(around, has_terminal=os.isatty(0))
            os.execvp(words[0], [*words, "python3", ENTRY, "shell", argument])
        command, env, folder = shell_of(run, request["rank"], request["command"])
        os.chdir(folder)
        os.execvpe(command[0], command, env)
    except Refused as error:
        sys.exit(f"paceline: {error}")
    except OSError as error:
        sys.exit(f"paceline: cannot run that there: {error}")
