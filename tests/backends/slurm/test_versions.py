"""What `paceline check` says of the version of Slurm."""

from __future__ import annotations

import pytest

from paceline.backends.slurm.check import _Found


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("slurm 20.11.9", True), ("slurm-wlm 22.05.8", False), ("slurm 21.08.8-2", True), ("slurm 26.05.0", False)],
)
def test_a_version_that_was_not_tried_is_named(version: str, is_old: bool) -> None:
    it = _Found({"version": version}, "lab")
    assert it._version() == version
    assert [f"{one.level}: {one.where} {one.what}" for one in it.findings] == [
        f"warning: Slurm is {version}, and paceline is tried from 22.05 on"
    ] * is_old
