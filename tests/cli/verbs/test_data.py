"""`paceline data list`: the volumes of the settings, and whether they can be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml
from tests.typed import refusal

if TYPE_CHECKING:
    from tests.conftest import Paceline


def test_the_volumes_of_both_files(paceline: Paceline) -> None:
    user = paceline.folder / "config" / "paceline" / "config.toml"
    user.parent.mkdir(parents=True)
    user.write_text('[volumes]\nmnist = "/no/such/place"\n')
    project = paceline.folder / "paceline.toml"
    project.write_text('[volumes]\nhere = "."\n')
    table = paceline("data", "list")
    assert (table.returncode, table.stderr) == (0, "")
    heading, here, mnist = (line.split() for line in table.stdout.splitlines())
    assert heading == ["NAME", "PATH", "READABLE"]
    assert here == ["here", str(paceline.folder), "yes"]
    assert mnist == ["mnist", "/no/such/place", "no:", "no", "such", "file", "or", "directory"]
    wide = paceline("data", "list", "-o", "wide").stdout.splitlines()
    assert wide[0].split() == ["NAME", "PATH", "SIZE", "FREE", "READABLE", "DEFINED", "IN"]
    assert [line.split()[-1] for line in wide[1:]] == [str(project), str(user)]
    found = paceline.json("data", "list")
    keys = {"name", "path", "problem", "file", "size", "free", "access", "owner", "created", "target"}
    assert [set(volume) for volume in found] == [keys] * 2
    assert found[1] == {
        "name": "mnist",
        "path": "/no/such/place",
        "problem": "no such file or directory",
        "file": str(user),
        "size": None,
        "free": None,
        "access": [],
        "owner": None,
        "created": None,
        "target": "local",
    }
    names = [volume["name"] for volume in yaml.safe_load(paceline("data", "list", "-o", "yaml").stdout)]
    assert names == ["here", "mnist"]


def test_no_volumes_say_where_to_define_some(paceline: Paceline) -> None:
    done = paceline("data", "list")
    assert done.returncode == 0
    assert done.stdout.split() == ["NAME", "PATH", "READABLE"]
    assert done.stderr == (
        "paceline: no volumes; define them under [volumes] in paceline.toml or "
        f"{paceline.folder}/config/paceline/config.toml\n"
    )


def test_settings_that_are_wrong(paceline: Paceline) -> None:
    path = paceline.folder / "paceline.toml"
    path.write_text('[volume]\na = "/a"\n')
    assert refusal(paceline, "data", "list") == f"{path}:1: volume: unknown key; did you mean volumes?"
