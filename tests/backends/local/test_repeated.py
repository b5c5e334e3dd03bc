"""Looks that are repeated read jobs that have ended once, and see all that changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends import registry

if TYPE_CHECKING:
    import pytest
    from tests.conftest import Paceline


def test_what_changes_between_looks_is_seen(paceline: Paceline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(paceline.home))
    paceline.script("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\n")
    paceline.succeeds("run", "-n", "1", "--name", "old", "--no-python", "true")
    here = registry.load()
    here.look_repeatedly()
    here.keep_expired()
    (old,) = here.describe().jobs
    paceline.succeeds("submit", "-n", "1", "--name", "new", "script.py")
    new, same = here.describe().jobs
    assert same is old and new.name == "new" and not new.is_over
    paceline.script("", "go")
    paceline.succeeds("wait", "new")
    paceline.succeeds("delete", "--yes", "old")
    (new,) = here.describe().jobs
    assert (new.name, new.state) == ("new", "SUCCEEDED")
    paceline.succeeds("delete", "--yes", "new")
    paceline("run", "-n", "1", "--name", "new", "--no-python", "false")
    assert [job.state for job in here.describe().jobs] == ["FAILED"]
