"""What the variables of Paddle's launcher ask for: log files under its names, and ports from one on.

Source: paddlepaddle 3.3, `paddle/distributed/launch/context/args_envs.py` and `controllers/collective.py`.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


def first_port(env: Mapping[str, str]) -> int | None:
    """The port of the first rank of a node, of PADDLE_START_PORT or FLAGS_START_PORT; None for any free ones."""
    given = env.get("PADDLE_START_PORT") or env.get("FLAGS_START_PORT") or ""
    return int(given) if given.isdecimal() else None


def link_logs(env: Mapping[str, str], working_dir: str, logs: Iterable[Path]) -> None:
    """Name the log files of a node's ranks workerlog.0, workerlog.1 … in PADDLE_LOG_DIR, if that is set.

    A file of that name that is no link becomes `workerlog.N.old`. There are none where the folder cannot be
    written: the logs are in the job's folder in any case.
    """
    folder = env.get("PADDLE_LOG_DIR")
    if not folder:
        return
    folder = os.path.join(working_dir, folder)
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        for number, log in enumerate(logs):
            name = os.path.join(folder, f"workerlog.{number}")
            if os.path.islink(name):
                os.unlink(name)
            elif os.path.exists(name):
                os.replace(name, f"{name}.old")
            os.symlink(log, name)
