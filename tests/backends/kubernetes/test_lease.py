"""How long a Job lives without its client."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

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
    job = {"metadata": {"name": "it"}, "spec": {"activeDeadlineSeconds": 150}}
    held = holding.Lease(cast("Cluster", cluster), job, most)
    held.hold()
    assert cluster.came.wait(60)
    held.release()
    if most == 100:
        assert {*cluster.deadlines} == {100}
    else:
        assert all(150 < deadline < 200 for deadline in cluster.deadlines[:2])
