"""What the tests of the library share."""

from __future__ import annotations

import contextlib

import pytest


@pytest.fixture(scope="session", autouse=True)
def _loaders_share_a_pipe() -> None:
    """Make what all loaders of a process share, so that it is no test's: how their workers learn that it ends."""
    with contextlib.suppress(ImportError):  # there is no torch
        from paceline.train.data.keep_working import _Exit

        _Exit.of_this_process()
