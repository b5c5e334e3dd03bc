"""The lab for a whole run of the tests, and a client in it for each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.needs import need

from .lab import Lab, client_of, missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .lab import Client

# The files that take longest, the longest first.
LONG = [
    Path(__file__).parent / name
    for name in (
        "slurm/test_faults.py", "test_silent.py", "test_faults.py", "test_joining.py", "test_ssh.py",
        "test_contract.py", "test_checkpoints.py", "slurm/test_contract.py", "test_elastic.py",
        "slurm/test_identity.py", "kubernetes/test_replacing.py", "web/test_page.py",
    )
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No process is to begin a long file when the others are about to end: these first, then those with many tests."""
    tests = Counter(item.path for item in items)
    order = {path: place for place, path in enumerate(LONG)}
    items.sort(key=lambda item: (order.get(item.path, len(LONG)), -tests[item.path], item.path))


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
