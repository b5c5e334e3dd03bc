"""The lab for a whole run of the tests, and a client in it for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.conftest import all_end
from tests.needs import need

from .lab import Client, Lab, missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
    it = Client(tmp_path, lab)
    yield it
    lab.repair()
    it.hang_up()

    def left() -> list[int]:
        return [*it.processes(), *(pid for host in lab.hosts for pid in host.processes())]

    all_end(left, "the client, here and on the hosts", tmp_path)
