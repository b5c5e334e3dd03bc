"""The cluster for a whole run of the tests, and a client in it for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.conftest import all_end
from tests.needs import need

from .client import Client
from .cluster import Cluster, missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three nodes; where that is impossible tests are skipped, in CI they fail."""
    need(missing())
    it = Cluster(3)
    try:
        it.start()
        yield it
    finally:
        it.stop()


@pytest.fixture
def client(cluster: Cluster, tmp_path: Path) -> Iterator[Client]:
    """A client; after the test nothing that it started may be left, here or on any node."""
    it = Client(tmp_path, cluster)
    yield it
    cluster.repair()

    def left() -> list[int]:
        return [*it.processes(), *(pid for node in cluster.nodes for pid in cluster.processes(node))]

    all_end(left, "the client and of its jobs", tmp_path)


@pytest.fixture
def user(client: Client) -> Client:
    """A client with the cluster as its target `lab`."""
    (client.folder / "paceline.toml").write_text('[targets.lab]\nbackend = "slurm"\n')
    return client
