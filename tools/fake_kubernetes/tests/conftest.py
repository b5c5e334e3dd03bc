"""Clusters for the tests of the fake itself."""

from __future__ import annotations

from fake_kubernetes.fixtures import cluster, kubectl, make_cluster, new_cluster, possible  # noqa: F401
