"""Fixtures for pytest: a conftest.py imports those that its tests use."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from .cluster import Cluster
from .machine import missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def possible() -> None:
    """Where there can be no cluster tests are skipped, in CI they fail."""
    if why := missing():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)


@pytest.fixture
def make_cluster(possible: None) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters, which are removed after the test; see Cluster."""
    made: list[Cluster] = []

    def make(nodes: int = 2, **options: object) -> Cluster:
        one = Cluster(nodes, **options)  # type: ignore[arg-type]
        made.append(one)
        one.start()
        return one

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    """A cluster of version 1.24 with two nodes."""
    return make_cluster()


@pytest.fixture
def new_cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    """A cluster of version 1.31, whose jobs count their pods with finalizers."""
    return make_cluster(minor=31)


@pytest.fixture
def kubectl() -> None:
    """The real kubectl; where it is not installed tests are skipped, in CI too: Debian has only one of version 1.20."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
