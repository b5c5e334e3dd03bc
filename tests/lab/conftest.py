"""The lab for a whole run of the tests, and a client in it for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.needs import need

from .lab import Lab, client_of, missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .lab import Client


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Three hosts; where that is impossible tests are skipped, in CI they fail."""
    need(missing())
    it = Lab(3)
    try:
        it.start()
        yield it
    finally:
        it.stop()


@pytest.fixture
def client(lab: Lab, tmp_path: Path) -> Iterator[Client]:
    """A client; after the test nothing that it started may be left, here or on any host."""
    with client_of(lab, tmp_path) as it:
        yield it
