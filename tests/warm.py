"""Processes that are kept warm for all tests of a run: the jobs of tests start from them, as those of users may."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.node.errors import Refused
from paceline.node.planning.packages import PRELOAD, WITH_OPTIMIZERS
from paceline.node.warm import start
from paceline.node.warm.leave import start_server
from tests import leaks

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

_FOLDER = "PACELINE_TESTS_WARM_DIR"  # one for all workers of a run
_SECONDS = 120.0  # without a job: whoever should end them may have been killed
_TORCH = (*PRELOAD["torch"], *WITH_OPTIMIZERS)
_started: set[tuple[str, ...]] = set()


def pytest_configure(config: pytest.Config) -> None:
    """Before the workers start: make the folder that they share."""
    os.environ["PACELINE_WARM_DIR"] = "/nowhere/warm"  # what starts without `keep` starts cold
    if _FOLDER not in os.environ:
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix="paceline-tests-warm-")
        config.add_cleanup(_end)


def _end() -> None:
    """End all servers, when all workers have ended."""
    where = Path(os.environ.pop(_FOLDER))
    start.ask("stop", where)
    shutil.rmtree(where, ignore_errors=True)


def keep(env: Mapping[str, str]) -> str:
    """See to it that servers are kept for jobs with torch and without it; returns their folder.

    Nobody waits for those that import torch: a job that comes before starts cold.
    """
    where = Path(os.environ[_FOLDER])
    for preload in (), _TORCH:
        if preload not in _started:
            _started.add(preload)
            with leaks.kept(), contextlib.suppress(Refused):  # another worker has started it
                start_server((sys.executable,), preload, env, os.getcwd(), _SECONDS, wait=not preload, where=where)
    return str(where)
