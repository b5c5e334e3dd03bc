"""Starts a warm server: for `paceline warm`, or when a job has ended, for the next one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.node import ENTRY
from paceline.node.errors import Refused
from paceline.node.files import read_json
from paceline.node.machine import devices, processes
from paceline.node.rundir.directory import RunDirectory
from paceline.node.spec import NodeSpec

from . import folder
from .imports import THREADS, deciding, serves_fewer_threads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

    from paceline.contract.messages import WarmRecord

    from .messages import Asked

_TITLE = "-" * 2048  # room for the command lines that the processes of jobs show
_IMPORT_SECONDS = 300.0  # for the server to import its modules


def start_server(
    python: Sequence[str],
    preload: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    seconds: float,
    *,
    wait: bool,
    where: Path | None = None,
) -> WarmRecord | None:
    """Start a warm server, and return what it says of itself; None if nobody waits for it."""
    where = folder.folder() if where is None else where
    folder.make(where)
    kept = {name: value for name, value in env.items() if not name.startswith("PACELINE_")}
    if serves_fewer_threads(preload, kept) and (threads := kept.get(THREADS, "1")).isdecimal():
        kept[THREADS] = str(max(int(threads), devices.cores()))  # for jobs of any number of ranks
    asked: Asked = {
        "python": list(python), "preload": list(preload), "seconds": seconds, "cwd": cwd, "folder": str(where),
        "key": folder.key_of(python, preload, deciding(kept, preload)), "ready": None,
    }  # fmt: skip
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        descriptors = [theirs.fileno()] if wait else []
        asked["ready"] = theirs.fileno() if wait else None
        command = [*python, ENTRY, "warm", json.dumps(asked), _TITLE]
        try:
            log = open(where / f"{asked['key']}{folder.LOG}", "wb")  # noqa: SIM115 - closed below
        except OSError as error:
            raise Refused(f"cannot write to {where}: {error.strerror}; make room, or set {folder.VARIABLE}") from None
        with log:
            process = subprocess.Popen(
                command, env=processes.with_room(kept), cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=descriptors, start_new_session=True,
            )  # fmt: skip
        if not wait:
            process.returncode = 0  # it outlives this process
            return None
        theirs.close()
        ours.settimeout(_IMPORT_SECONDS)
        answer = folder.receive(ours)
    if not answer:
        raise Refused(f"the process that was to be kept warm ended ({process.wait()}); see {log.name}")
    if why := answer.pop("why"):
        process.wait()
        raise Refused(why)
    return cast("WarmRecord", answer)


def leave_behind(run: str) -> None:
    """When a job has ended: leave a warm server for the next one, if the job was asked to, and there is none."""
    with contextlib.suppress(Exception):  # the job has ended as it has
        directory = RunDirectory(Path(run))
        spec = NodeSpec.load(directory.spec)
        if spec.keep_warm is not None and spec.start_method == "fork" and not spec.setup and os.fork() == 0:
            _leave(directory, spec, spec.keep_warm)


def _leave(directory: RunDirectory, spec: NodeSpec, seconds: float) -> NoReturn:
    """In a process for which nobody waits: start the server."""
    try:
        processes.close_descriptors()  # the job's lock is among them
        from paceline.node.ranks.launcher import fork_server_environment

        secrets = (read_json(directory.job) or {}).get("spec", {}).get("secrets", ())
        env = {name: value for name, value in os.environ.items() if name not in secrets}
        env = fork_server_environment(spec, env)
        start_server(spec.python, spec.preload, env, spec.working_dir, seconds, wait=False)
    finally:
        os._exit(0)
