"""What a job leaves for one elsewhere, and how it is put in place there: completely, or not at all."""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from typing import TYPE_CHECKING

import pytest

from paceline.contract import checkpoint
from paceline.node.errors import Refused
from paceline.node.rundir.directory import RunDirectory
from paceline.node.store import lifecycle, moving

if TYPE_CHECKING:
    from pathlib import Path


def save(folder: Path, step: int, serial: int, content: bytes = b"weights") -> None:
    path = folder / f"step-{step:06d}"
    path.mkdir(parents=True)
    (path / "model.pt").write_bytes(content)
    record = {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    said = {"id": f"{step:032x}", "serial": serial, "step": step, "world_size": 1, "files": {"model.pt": record}}
    whole = {"format": "paceline-checkpoint", "version": 1, "checkpoint": said}
    (path / "manifest.json").write_text(json.dumps({**whole, "crc32": checkpoint.crc_of_json(whole)}))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A job that has ended."""
    it = RunDirectory(tmp_path / "it")
    it.path.mkdir()
    it.job.write_text(json.dumps({"spec": {"checkpoint_dir": None}, "code": None, "data": []}))
    it.spec.write_text(json.dumps({"working_dir": str(tmp_path), "env": {}}))
    return it


def archive(run: RunDirectory) -> bytes:
    out = io.BytesIO()
    moving.write_checkpoint(run, moving.inventory(run)["checkpoint"]["ids"], out)
    return out.getvalue()


def test_the_newest_of_each_run_of_a_script_goes_and_nothing_hidden(run: RunDirectory, tmp_path: Path) -> None:
    first, second = run.path / "checkpoints", run.path / "checkpoints-2"
    save(first, 10, 1)
    save(first, 4, 2)  # saved later, after a resume from an older one
    save(second, 6, 1)
    (first / ".paceline-holder").write_text("")
    (first / "notes").mkdir()
    (first / "notes" / "best.txt").write_text("0.5")
    (run.path / "saved.json").write_text(json.dumps({"step": 6, "folder": str(second)}))
    found = moving.inventory(run)
    assert (found["place"], found["path"], found["checkpoint"]["step"]) == ("run", "checkpoints", 6)
    moving.place(io.BytesIO(archive(run)), tmp_path / "new" / "ck")
    there = sorted(str(p.relative_to(tmp_path / "new")) for p in (tmp_path / "new").rglob("*") if p.is_file())
    assert there == [
        "ck-2/step-000006/manifest.json",
        "ck-2/step-000006/model.pt",
        "ck/notes/best.txt",
        "ck/step-000004/manifest.json",
        "ck/step-000004/model.pt",
    ]


def test_a_job_that_is_run_again_gets_the_checkpoints_of_each_run_of_its_script(
    run: RunDirectory, tmp_path: Path
) -> None:
    for name in ("checkpoints", "checkpoints-2"):
        save(run.path / name, 10, 1)
        (run.path / name / ".paceline-holder").write_text("")
    best = run.path / "checkpoints" / "best.txt"
    best.write_text("0.5")
    (run.path / "saved.json").write_text("{}")
    (tmp_path / "new").mkdir()
    lifecycle.take_checkpoints(run.path, tmp_path / "new")
    there = sorted(str(p.relative_to(tmp_path / "new")) for p in (tmp_path / "new").rglob("*") if p.is_file())
    assert there == [
        "checkpoints-2/step-000010/manifest.json",
        "checkpoints-2/step-000010/model.pt",
        "checkpoints/best.txt",
        "checkpoints/step-000010/manifest.json",
        "checkpoints/step-000010/model.pt",
        "saved.json",
    ]
    (tmp_path / "new" / "checkpoints" / "best.txt").write_text("0.9")  # what the script keeps there is its own
    assert best.read_text() == "0.5"
    model = "checkpoints/step-000010/model.pt"
    assert (tmp_path / "new" / model).samefile(run.path / model), "a checkpoint never changes"


@pytest.mark.parametrize("harm", ["cut", "damaged", "outside"])
def test_what_does_not_arrive_whole_leaves_nothing(run: RunDirectory, tmp_path: Path, harm: str) -> None:
    save(run.path / "checkpoints", 10, 1, b"w" * 100_000)
    data = archive(run)
    if harm == "cut":
        data = data[:50_000]
    elif harm == "damaged":
        data = data.replace(b"w" * 100, b"v" * 100, 1)
    else:
        out = io.BytesIO(data)
        with tarfile.open(fileobj=out, mode="a") as tar:
            tar.addfile(tarfile.TarInfo("1/../../evil"))
        data = out.getvalue()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((Refused, tarfile.TarError)):
        moving.place(io.BytesIO(data), tmp_path / "deep" / "er" / "ck")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_of_the_user_stays_where_a_checkpoint_cannot_be_put(run: RunDirectory, tmp_path: Path) -> None:
    save(run.path / "checkpoints", 10, 1)
    (run.path / "checkpoints" / "best.pt").write_text("of the job")
    mine = tmp_path / "mine" / "best.pt"
    mine.parent.mkdir()
    mine.write_text("of the user")
    with pytest.raises(Refused, match=r"best\.pt is there already; name another folder with --checkpoint-dir"):
        moving.place(io.BytesIO(archive(run)), mine.parent)
    assert [(path.name, path.read_text()) for path in mine.parent.iterdir()] == [("best.pt", "of the user")]


def test_a_folder_of_the_user_is_used_as_it_is_or_refused(run: RunDirectory, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save(ours, 10, 1)
    save(theirs, 9, 1)
    run.spec.write_text(json.dumps({"working_dir": str(tmp_path), "env": {"PACELINE_CHECKPOINT_DIR": "ours"}}))
    found = moving.inventory(run)
    assert (found["place"], found["path"]) == ("folder", str(ours))
    assert moving.holds(ours, found["checkpoint"]["ids"])
    assert not moving.holds(tmp_path / "none", found["checkpoint"]["ids"])
    with pytest.raises(Refused, match="has checkpoints of something else"):
        moving.holds(theirs, found["checkpoint"]["ids"])


def test_a_folder_on_a_volume_is_found_through_the_mount(run: RunDirectory, tmp_path: Path) -> None:
    save(tmp_path / "disk" / "a", 3, 1)
    volume = {"volume": "big", "path": str(tmp_path / "disk"), "wanted": "/big", "mount": True}
    run.job.write_text(json.dumps({"spec": {"checkpoint_dir": None}, "code": None, "data": [volume]}))
    (run.path / "saved.json").write_text(json.dumps({"step": 3, "folder": "/big/a"}))
    found = moving.inventory(run)
    assert (found["path"], found["volume"]) == (str(tmp_path / "disk" / "a"), ["big", "a"])
