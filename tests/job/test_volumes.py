"""Volumes: where they are, where a job finds them, and why they cannot be read or mounted."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.backends import volumes as room
from paceline.backends.volumes import find, volumes
from paceline.job.errors import UserError
from paceline.job.settings import load
from paceline.job.spec import Mount

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.job.settings import Settings


@pytest.fixture
def defined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """The settings of a project with these volumes, given as name = path."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def define(**paths: Path | str) -> Settings:
        lines = [f'{name.replace("__", "-")} = "{path}"' for name, path in paths.items()]
        (tmp_path / "paceline.toml").write_text("\n".join(["[volumes]", *lines]))
        return load(tmp_path)

    return define


def mounts(*texts: str) -> tuple[Mount, ...]:
    return tuple(Mount.validated(text) for text in texts)


def resolve(wanted: tuple[Mount, ...], settings: Settings, working_dir: str = "/work") -> list[dict[str, Any]]:
    return list(find(wanted, settings, "/home/user/.local/share/paceline", working_dir))


def test_where_a_job_finds_its_volumes(tmp_path: Path, defined: Callable[..., Settings]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "link").symlink_to(data)
    found = resolve(
        mounts(f"training-data:{data}", f"training-data:{tmp_path}/link"),
        defined(training__data=data),
    )
    same = {"volume": "training-data", "path": str(data), "variable": "PACELINE_DATA_TRAINING_DATA"}
    seen = {"visible": True, "mount": False, "problem": None}
    assert found == [{**same, "wanted": str(data), **seen}, {**same, "wanted": f"{tmp_path}/link", **seen}]


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("/", "it would hide /home/user/.local/share/paceline"),
        ("/work", "it would hide /work/code"),
        (os.path.dirname(sys.prefix), f"it would hide {sys.prefix}"),
        ("/etc/passwd", "/etc/passwd is a file, and the volume is not"),
    ],
)
def test_where_a_volume_cannot_be_mounted(
    tmp_path: Path, defined: Callable[..., Settings], wanted: str, why: str
) -> None:
    (found,) = resolve(mounts(f"a:{wanted}"), defined(a=tmp_path), "/work/code")
    assert (found["visible"], found["mount"], found["problem"]) == (False, False, why)


def test_only_root_makes_the_folder(
    tmp_path: Path, defined: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (found,) = resolve(mounts("a:/no/such/place"), defined(a=tmp_path))
    assert found["problem"] == "/no/such/place does not exist"


def test_a_volume_may_be_a_file(tmp_path: Path, defined: Callable[..., Settings]) -> None:
    (tmp_path / "data.bin").write_bytes(b"1")
    assert resolve(mounts("a:/b"), defined(a=tmp_path / "data.bin"))[0]["path"] == f"{tmp_path}/data.bin"


def test_unknown_volume(tmp_path: Path, defined: Callable[..., Settings]) -> None:
    where = f"volumes are defined under [volumes] in paceline.toml or {tmp_path}/config/paceline/config.toml"
    with pytest.raises(UserError) as caught:
        resolve(mounts("trainig:/b"), defined(training="/a", other="/b"))
    assert str(caught.value) == f"no volume 'trainig'; did you mean training? {where}"
    with pytest.raises(UserError) as caught:
        resolve(mounts("training:/b"), defined())
    assert str(caught.value) == f"no volume 'training'; {where}"


def test_volumes_that_cannot_be_told_apart(tmp_path: Path, defined: Callable[..., Settings]) -> None:
    both = defined(a__b=tmp_path, a_b=tmp_path)
    with pytest.raises(
        UserError, match=r"^volumes a-b and a_b would share PACELINE_DATA_A_B; rename or leave out one$"
    ):
        resolve(mounts("a-b:/1", "a_b:/2"), both)
    with pytest.raises(UserError, match=r"^volumes a-b and other would share /1; rename or leave out one$"):
        resolve(mounts("a-b:/1", "other:/1/"), defined(a__b=tmp_path, other=tmp_path))
    assert len(resolve(mounts("a-b:/1", "a-b:/2"), both)) == 2


def test_why_a_volume_cannot_be_read(tmp_path: Path, defined: Callable[..., Settings]) -> None:
    with pytest.raises(UserError) as caught:
        resolve(mounts("a:/b"), defined(a=tmp_path / "missing"))
    reason = "no such file or directory; correct it in"
    assert str(caught.value) == f"volume a, {tmp_path}/missing: {reason} {tmp_path}/paceline.toml"


def test_a_volume_that_does_not_answer(
    tmp_path: Path, defined: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PATIENCE", 0.01)
    os.mkfifo(tmp_path / "dead")  # whoever opens it waits, as for a file server that is down
    found = volumes(defined(dead=tmp_path / "dead"))
    assert found[0].problem == "no answer within 0.01 s"


def test_all_volumes(tmp_path: Path, defined: Callable[..., Settings]) -> None:
    good, bad = volumes(defined(good=tmp_path, bad=tmp_path / "missing"))[::-1]
    file = f"{tmp_path}/paceline.toml"
    assert (good.name, good.path, good.problem, good.file) == ("good", str(tmp_path), None, file)
    assert good.size is not None
    assert good.free is not None
    assert 0 <= good.free <= good.size
    assert (bad.name, bad.problem, bad.size, bad.free) == ("bad", "no such file or directory", None, None)
