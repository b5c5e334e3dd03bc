"""How long a Job lives without its client."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from paceline.backends.kubernetes.api.errors import ApiError
from paceline.backends.kubernetes.start import holding

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.client import Cluster


class Moved:
    """A cluster that notes the deadlines."""

    def __init__(self) -> None:
        self.deadlines: list[int] = []
        self.came = threading.Event()

    def path(self, *parts: str) -> str:
        return "/".join(parts)

    def patch(self, path: str, change: dict[str, Any]) -> dict[str, Any]:
        self.deadlines.append(change["spec"]["activeDeadlineSeconds"])
        if len(self.deadlines) == 2:
            self.came.set()
        return {"status": {}}


@pytest.mark.parametrize("most", [None, 200, 100])
def test_the_deadline_is_moved_on_up_to_the_time_limit(monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    monkeypatch.setattr(holding, "_EVERY", 0.001)
    cluster = Moved()
    job = {"metadata": {"name": "it", "uid": "1"}, "spec": {"activeDeadlineSeconds": 150}}
    held = holding.Lease(cast("Cluster", cluster), job, most)
    held.hold()
    assert cluster.came.wait(60)
    held.release()
    if most == 100:
        assert {*cluster.deadlines} == {100}
    else:
        assert all(150 < deadline < 200 for deadline in cluster.deadlines[:2])


def test_time_while_this_machine_is_suspended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {time.CLOCK_MONOTONIC: 50.0, time.CLOCK_BOOTTIME: 1000.0}
    monkeypatch.setattr(holding.time, "clock_gettime", clocks.__getitem__)
    cluster = Moved()
    held = holding.Lease(cast("Cluster", cluster), {"metadata": {"name": "it", "uid": "1"}, "spec": {}})
    clocks[time.CLOCK_BOOTTIME] += 600
    held._move()
    assert cluster.deadlines == [holding.LEASE_SECONDS + 600]


def test_a_later_job_of_the_name_is_left_alone() -> None:
    class Later(Moved):
        def patch(self, path: str, change: dict[str, Any]) -> dict[str, Any]:
            assert change["metadata"] == {"uid": "1"}, "the server compares it"
            raise ApiError("metadata.uid: field is immutable", 422, "Invalid")

        def get(self, path: str) -> dict[str, Any]:
            return {"metadata": {"uid": self.uid}}

        uid = "1"

    cluster = Later()
    held = holding.Lease(cast("Cluster", cluster), {"metadata": {"name": "it", "uid": "1"}, "spec": {}})
    assert held._move() == holding._SOON
    cluster.uid = "2"
    assert held._move() is None
