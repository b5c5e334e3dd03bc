"""Clusters for tests: each test gets one of its own, which takes less than a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fake_kubernetes.fixtures import cluster, kubectl, make_cluster, new_cluster, possible  # noqa: F401

from .user import User

if TYPE_CHECKING:
    from pathlib import Path

    from fake_kubernetes.cluster import Cluster


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:  # noqa: F811
    """A user of `cluster`."""
    return User(cluster, tmp_path, monkeypatch)
