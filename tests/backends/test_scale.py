"""`paceline.jobs.scale`: the number of machines that a running job is to have."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cli.screens.cases import job

from paceline import jobs
from paceline.backends.base import Listing


class Cluster:
    """Has one job, on machines that come and go."""

    def __init__(self) -> None:
        self.hosts = ["node1", "node2"]
        self.asked: list[Any] = []

    def describe(self, names: Any = None, since: float | None = None) -> Listing:
        return Listing([job("it", hosts=self.hosts)])

    def scaleout(self, name: str, more: Any) -> list[str]:
        self.asked.append(("scaleout", name, more))
        self.hosts += [f"node{len(self.hosts) + 1 + i}" for i in range(more)]
        return self.hosts[-more:]

    def scalein(self, name: str, fewer: Any) -> list[str]:
        self.asked.append(("scalein", name, fewer))
        self.hosts, gone = self.hosts[:-fewer], self.hosts[-fewer:]
        return gone


def test_scale_adds_or_removes_the_machines_that_differ() -> None:
    cluster = Cluster()
    handle = jobs.Job._of(job("it", hosts=cluster.hosts), cluster)  # type: ignore[arg-type]
    assert [jobs.scale(handle, count).nodes for count in (2, 4, 1)] == [2, 4, 1]
    assert cluster.asked == [("scaleout", "it", 2), ("scalein", "it", 3)]
    for wrong in (0, "2", True, None):
        with pytest.raises(jobs.UserError, match="is no number of machines"):
            jobs.scale(handle, wrong)  # type: ignore[arg-type]
    assert {"scale", "scaleout"} < set(dir(jobs)) == set(jobs.__all__)
