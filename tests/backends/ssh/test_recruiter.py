"""How often hosts are asked for what another one needs to join a job in the foreground."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from paceline.backends.ssh import scaling
from paceline.job.errors import UserError


def test_an_invitation_that_fails_is_not_asked_for_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_PERIOD", 0.0)
    asked, looks, has_looked = [], 0, threading.Event()

    class Refusing:
        name = "h1"

        def ask(self, request: Any) -> Any:
            asked.append(request["do"])
            raise UserError("cannot read its code")

    class Other:
        name = "h2"

    hosts: Any = [Refusing(), Other()]

    def wanted() -> Any:
        nonlocal looks
        looks += 1
        if looks == 5:
            has_looked.set()
        return hosts

    recruiter = scaling.Recruiter(
        "it", wanted, lambda: hosts[:1], pytest.fail, pytest.fail, least=1, cooldown=None, on_problem=pytest.fail
    )
    assert has_looked.wait(60)
    recruiter.stop()
    assert asked == ["invite"]
