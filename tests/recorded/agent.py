"""An agent of the last version, as others see it: it holds the lock of its job, and records the end."""

import fcntl
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from paceline.node.machine.processes import boot_id, start_time


def main(folder: Path) -> None:
    """Run the recorded job in a folder until SIGTERM."""
    lock = open(folder / "lock")  # noqa: SIM115 - until this process ends
    fcntl.flock(lock, fcntl.LOCK_EX)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    status = json.loads((folder / "status.json").read_text())
    own = {"pid": os.getpid(), "start_time": start_time(os.getpid())}
    status["agent"] = {**own, "host": socket.gethostname(), "boot": boot_id(), "guard": own}
    write(folder, status, state="RUNNING", exit_code=None, finished=None)
    ranks(folder, status, "RUNNING", None)
    print("running", flush=True)
    signal.sigwait([signal.SIGTERM])
    event(folder, "stopping", signal="SIGTERM")
    with open(folder / "logs" / "0" / "rank-0.log", "a") as log:
        log.write("goodbye\n")
    ranks(folder, status, "STOPPED", 143)
    write(folder, status, state="STOPPED", exit_code=143, finished=time.time())
    event(folder, "finished", state="STOPPED", exit_code=143, failure=None, others=[])


def ranks(folder: Path, status: dict[str, object], state: str, exit_code: int | None) -> None:
    """Give all ranks this state."""
    found = status["ranks"]
    assert isinstance(found, list)
    write(folder, status, ranks=[{**rank, "state": state, "exit_code": exit_code} for rank in found])


def write(folder: Path, status: dict[str, object], **changes: object) -> None:
    """Replace status.json."""
    status.update(changes)
    (folder / ".status.json.new").write_text(json.dumps(status))
    (folder / ".status.json.new").replace(folder / "status.json")


def event(folder: Path, name: str, **details: object) -> None:
    """Append to events.jsonl."""
    with open(folder / "events.jsonl", "a") as events:
        events.write(json.dumps({"time": time.time(), "event": name, **details}) + "\n")


main(Path(sys.argv[1]))
