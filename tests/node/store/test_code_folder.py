"""A folder of code that several machines share: whoever is first, it is whole, and goes with the last one."""

from __future__ import annotations

import io
import os
import shutil
import socket
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from paceline.node.errors import Refused
from paceline.node.store import code_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILES = 20


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """What tells threads apart, as machines are: the host name."""
    it = threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: it.name)
    return it


def bring(place: Path, job_id: str) -> bool:
    """Have a job's code there; returns whether the place is its own."""
    try:
        lock = code_folder.claim(place, job_id)
    except Refused:
        return False
    with code_folder.building(place) as building:
        for number in range(FILES):
            (building / f"{number}.py").write_text(job_id)
    os.close(lock)
    assert [path.read_text() for path in place.iterdir()] == [job_id] * FILES
    return True


@pytest.mark.parametrize("round_", range(20))
def test_machines_of_two_jobs_want_one_folder(tmp_path: Path, machine: threading.local, round_: int) -> None:
    place, jobs = tmp_path / "code" / "mine", ("one", "other")
    met = threading.Barrier(8)

    def take_part(number: int) -> tuple[str, bool]:
        machine.name, job_id = f"h{number}", jobs[number % 2]
        met.wait()
        has_code = bring(place, job_id)
        met.wait()
        if has_code:
            assert len(list(place.iterdir())) == FILES
            if number < 6:
                code_folder.discard(place, job_id)
                assert place.exists()
            met.wait()
            code_folder.discard(place, job_id)
        else:
            met.wait()
        return job_id, has_code

    with ThreadPoolExecutor(8) as pool:
        found = dict(pool.map(take_part, range(8)))
    assert sorted(found.values()) == [False, True]
    assert not list((tmp_path / "code").iterdir())


def test_a_claim_of_a_killed_client_keeps_nobody_out(tmp_path: Path) -> None:
    place = tmp_path / "code" / "mine"
    lock = code_folder.claim(place, "one")
    with pytest.raises(Refused):
        code_folder.claim(place, "other")
    os.close(lock)  # as the kernel does
    code_folder.check_free(place, "other")
    assert bring(place, "other")
    with pytest.raises(Refused):
        code_folder.claim(place, "third")
    code_folder.discard(place, "one")
    assert place.exists()
    code_folder.discard(place, "other")
    assert not os.listdir(place.parent)


def test_what_a_killed_process_was_building_goes_with_the_claim(tmp_path: Path) -> None:
    place = tmp_path / "code" / "mine"
    users = [tmp_path / "code" / name / "part" for name in (".a.paceline.0123abcd", ".mine.paceline.0123abcd")]
    for folder in users:
        folder.mkdir(parents=True)
        os.utime(folder.parent, (0, 0))

    def killed(job_id: str) -> None:
        os.close(code_folder.claim(place, job_id))
        with code_folder.building(place) as building:
            shutil.copytree(building, building.with_name("building.killed"))
            (building.with_name("building.killed") / "part").touch()
            place.mkdir()  # so that this one leaves nothing
        place.rmdir()

    killed("one")
    assert bring(place, "other")  # which nobody keeps out
    killed_too = place.with_name(".mine.paceline") / "building.killed"
    killed_too.mkdir()
    code_folder.discard(place, "other")
    assert sorted(os.listdir(place.parent)) == sorted(folder.parent.name for folder in users)
    assert all(folder.exists() for folder in users)


@pytest.mark.parametrize("has_attributes", [True, False])
def test_a_folder_of_the_user_where_the_code_was_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_attributes: bool
) -> None:
    if not has_attributes:
        for name in ("setxattr", "getxattr"):
            monkeypatch.setattr(os, name, lambda *args, **kwargs: os.stat("/none"))
    place = tmp_path / "code" / "mine"
    for is_mine in (False, True):
        os.close(code_folder.claim(place, "one"))
        with code_folder.building(place) as building:
            (building / "train.py").touch()
        if is_mine:
            shutil.rmtree(place)
            place.mkdir()  # it often has the number of the one before
            (place / "notes.txt").touch()
        code_folder.discard(place, "one")
        assert [path.name for path in place.parent.rglob("*")] == (["mine", "notes.txt"] if is_mine else [])


def test_code_is_packed_while_ranks_write_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "code"
    (code / "package").mkdir(parents=True)
    (code / "package" / "model.py").write_text("model")
    (code / "link").symlink_to("package")
    (code / "shrinks.log").write_text("five lines")
    (code / "saved" / "step-000001").mkdir(parents=True)
    for name in ("gone.tmp", "goes.tmp", "saved/notes.txt"):
        (code / name).write_text("")
    walk, look = os.walk, tarfile.TarFile.gettarinfo

    def walked(folder: Path) -> Iterator[Any]:
        for found in walk(folder):
            (code / "gone.tmp").unlink(missing_ok=True)
            yield found

    def looked(*args: Any) -> tarfile.TarInfo:
        info = look(*args)
        (code / "goes.tmp").unlink(missing_ok=True)
        (code / "shrinks.log").write_text("one")
        return info

    monkeypatch.setattr(os, "walk", walked)
    monkeypatch.setattr(tarfile.TarFile, "gettarinfo", looked)
    archive = code_folder.pack(code, lambda _, names: [name for name in names if name.startswith("step-")])
    code_folder.unpack(io.BytesIO(archive), tmp_path / "there")
    assert not (tmp_path / "there" / "gone.tmp").exists()
    assert [path.name for path in (tmp_path / "there" / "saved").iterdir()] == ["notes.txt"]
    assert (tmp_path / "there" / "link" / "model.py").read_text() == "model"
    assert (tmp_path / "there" / "shrinks.log").read_text() in ("five lines", "one")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_code_is_of_the_user_who_unpacks_it(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("train.py")
        member.uid, member.uname, member.mode = 12345, "nobody", 0o4755
        tar.addfile(member)
    archive.seek(0)
    code_folder.unpack(archive, tmp_path / "code")
    found = (tmp_path / "code" / "train.py").stat()
    assert (found.st_uid, oct(found.st_mode & 0o7777)) == (os.geteuid(), "0o755")
