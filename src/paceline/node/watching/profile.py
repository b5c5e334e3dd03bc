"""Beside a rank, started as `paceline attach` starts a command: has it profiled, and brings the trace."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import select
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.contract.stands import PROFILE, address

if TYPE_CHECKING:
    from paceline.contract.stands import Profiled, ProfileRequest

_ANSWER_SECONDS = 5.0  # that a rank has to say that it is there
_QUICK = 1  # of gzip's levels


def main(run: str, steps: str, seconds: str) -> None:
    """Write to stdout what the rank says whose variables this process has, as a line, and then its trace (gzip).

    It ends when stdin does: whoever asked is gone.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".profile-", dir=run) as folder:
            trace = Path(folder, "trace.json")
            answer = _ask({"steps": int(steps), "seconds": float(seconds), "path": str(trace)})
            if "error" not in answer:
                with trace.open("rb") as file:
                    _say(answer)
                    with gzip.GzipFile(fileobj=sys.stdout.buffer, mode="wb", compresslevel=_QUICK) as packed:
                        shutil.copyfileobj(file, packed)
                return
    except OSError as error:
        answer = {"error": f"{error.filename or run}: {error.strerror or error}"}
    _say(answer)


def _say(answer: Profiled) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _ask(request: ProfileRequest) -> Profiled:
    job_id, attempt, rank = (os.environ.get(f"PACELINE_{name}", "0") for name in ("JOB_ID", "ATTEMPT", "RANK"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(address(job_id, int(attempt), int(rank)))
        except OSError:
            why = "it has ended, the job was started with --hang off, or Python does not start it"
            return {"error": f"it cannot be asked: {why}"}
        connection.sendall(PROFILE + json.dumps(request).encode() + b"\n")
        if not select.select([connection], [], [], _ANSWER_SECONDS)[0]:
            why = "it is stopped, or C code holds its interpreter's lock"
            return {"error": f"it gives no answer: {why}; see paceline why --live"}
        data = b""
        while True:
            for ready in select.select([connection, sys.stdin], [], [])[0]:
                if ready is connection:
                    more = b""
                    with contextlib.suppress(ConnectionError):
                        more = connection.recv(1 << 16)
                    data += more
                    if not more:
                        return _read(data)
                elif not os.read(0, 1 << 12):
                    sys.exit()


def _read(data: bytes) -> Profiled:
    if data and not data.startswith(b"\n"):
        return {"error": "its job was submitted by another version of paceline; submit it again"}
    try:
        answer: Profiled = json.loads(data)
    except ValueError:
        return {"error": "it has ended meanwhile"}
    return answer
