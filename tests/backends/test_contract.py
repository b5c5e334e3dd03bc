"""This machine, and a backend that a test brings along, do what every backend does."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .contract import USUAL, Contract, Place

if TYPE_CHECKING:
    from tests.conftest import Paceline


class TestLocal(Contract):
    @pytest.fixture
    def place(self, paceline: Paceline) -> Place:
        return Place(paceline, can=USUAL | {"held", "tensorboards", "sizes"})


def install(paceline: Paceline, entry: str = "shelf:Shelf") -> None:
    """Put `shelf.py` where an installed package would be, with its entry point."""
    site = paceline.folder / "site"
    info = site / "shelf-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("shelf.py"), site)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[paceline.backends]\nshelf = {entry}\n")
    paceline.env["PYTHONPATH"] = str(site)
    settings(paceline)


def settings(paceline: Paceline, more: str = "") -> None:
    text = f'[targets.oak]\nbackend = "shelf"\nfolder = "{paceline.folder / "jobs of oak"}"\n{more}'
    (paceline.folder / "paceline.toml").write_text(text)


class TestForeign(Contract):
    @pytest.fixture
    def place(self, paceline: Paceline) -> Place:
        install(paceline)
        return Place(paceline, ("--on", "oak"), "oak")

    def test_its_options_are_checked(self, place: Place) -> None:
        settings(place.paceline, 'fodler = "x"\n')
        assert place.refuses("list").endswith(": targets.oak.fodler: unknown key; did you mean folder?")
        settings(place.paceline)
        assert place.refuses("list", "--ssh-port", "22") == (
            "--ssh-port means nothing to oak, whose backend is shelf; leave it out"
        )
        (place.paceline.folder / "paceline.toml").write_text('[targets.oak]\nbackend = "shelve"\n')
        where = f"{place.paceline.folder / 'paceline.toml'}:2: targets.oak.backend"
        assert place.refuses("list") == f"{where}: no backend 'shelve'; did you mean shelf?"

    def test_a_job_file_may_name_it(self, place: Place) -> None:
        (place.paceline.folder / "job.yaml").write_text(f"script: {place.paceline.script('pass')}\nbackend: oak\n")
        done = place.paceline("submit", "--name", "filed", "job.yaml")
        assert (done.returncode, done.stdout) == (0, "filed\n"), done.stderr
        assert "paceline get --on oak filed" in done.stderr
        place.works("wait", "filed")
        code = "from paceline import jobs; print([job.name for job in jobs.list_jobs('oak')])"
        done = place.paceline.start(python=(sys.executable, "-c", code, "#")).communicate()
        assert done[0] == "['filed']\n", done[1]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("shelves:Shelf", "backend 'shelf' cannot be loaded from shelves:Shelf: No module named 'shelves'"),
        ("shelf:Shelves", "backend 'shelf' cannot be loaded from shelf:Shelves: module 'shelf' has no attribute"),
        ("shelf:Options", "backend 'shelf': shelf:Options is not a subclass of paceline.backends.base.Backend"),
    ],
)
def test_a_backend_that_cannot_be_loaded(paceline: Paceline, entry: str, said: str) -> None:
    install(paceline, entry)
    assert said in Place(paceline, ("--on", "oak")).refuses("list")
