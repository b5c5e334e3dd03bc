"""How long machines are waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.backends import limits
from paceline.backends.limits import Limits
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a project's settings; no variable is set."""
    for name in (limits.LOOK, limits.ACT, limits.RECONNECT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "paceline.toml"


def test_a_variable_goes_before_the_settings(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.load() == Limits(5.0, 15.0, 60.0)
    settings.write_text("[defaults]\nreconnect_timeout = '5m'\nact_timeout = '20s'\n")
    assert limits.load() == Limits(5.0, 20.0, 300.0)
    monkeypatch.setenv(limits.RECONNECT, "90s")
    monkeypatch.setenv(limits.LOOK, "2s")
    assert limits.load() == Limits(2.0, 20.0, 90.0)


@pytest.mark.parametrize("given", ["soon", "0s", "-1s", "inf"])
def test_what_is_no_time_is_refused(settings: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(limits.RECONNECT, given)
    with pytest.raises(UserError, match=limits.RECONNECT):
        limits.load()
    monkeypatch.delenv(limits.RECONNECT)
    settings.write_text(f"[defaults]\nreconnect_timeout = '{given}'\n")
    with pytest.raises(UserError, match=r"defaults\.reconnect_timeout"):
        limits.load()
