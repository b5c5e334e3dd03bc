"""Settings: where they are looked for, which wins, and what is wrong with them in one line."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.backends import registry
from paceline.job.errors import UserError
from paceline.job.settings import Settings, Target, load
from paceline.job.settings_files import place_of, project_file, user_file

if TYPE_CHECKING:
    from collections.abc import Callable

    Write = Callable[[str], Path]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "home" / "project"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    monkeypatch.setenv("HOME", str(project.parent))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


@pytest.fixture
def of_user(project: Path) -> Write:
    """Writes the user's file; returns its path."""

    def write(text: str) -> Path:
        path = project.parent / ".config" / "paceline" / "config.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def of_project(project: Path) -> Write:
    """Writes the project's file; returns its path."""

    def write(text: str) -> Path:
        path = project / "paceline.toml"
        path.write_text(text)
        return path

    return write


def test_none_at_all(project: Path) -> None:
    assert load(project) == Settings()


def test_project_wins_key_by_key(project: Path, of_user: Write, of_project: Write) -> None:
    mine = of_user("""
        volumes = {a = "/user/a", b = "/user/b"}
        local.devices = 4
        [targets.lab]
        backend = "slurm"
        partition = "small"
        account = "me"
    """)
    ours = of_project("""
        volumes = {b = "/project/b", c = "/project/c"}
        [targets.lab]
        partition = "large"
        [targets.cloud]
        backend = "kubernetes"
    """)
    found = load(project)
    assert found.volumes == {"a": "/user/a", "b": "/project/b", "c": "/project/c"}
    assert found.local.devices == 4
    assert found.targets["lab"].backend == "slurm"
    assert found.targets["lab"].options == {"partition": "large", "account": "me"}
    assert found.targets["cloud"] == Target(backend="kubernetes")
    assert [found.file_of("volumes", name) for name in "abcd"] == [mine, ours, ours, None]
    assert found.file_of("local", "devices") == mine


def test_where_relative_paths_start(project: Path, of_user: Write, of_project: Write) -> None:
    of_user('[volumes]\nmine = "~/data"\n')
    of_project('[volumes]\nours = "data/../mnist"\nup = "../data"\nhome = "~"\n')
    (project / "src").mkdir()
    home = str(project.parent)
    assert load(project / "src").volumes == {
        "mine": f"{home}/data",
        "ours": f"{project}/mnist",
        "up": f"{home}/data",
        "home": home,
    }


def test_the_nearest_project_file_is_taken(project: Path, of_project: Write) -> None:
    outer = of_project("")
    inner = project / "a" / "b" / "paceline.toml"
    inner.parent.mkdir(parents=True)
    assert project_file(inner.parent) == outer
    inner.write_text("")
    assert project_file(inner.parent) == inner
    assert project_file(project / "a") == outer


def test_the_search_ends_with_the_repository_and_the_home(project: Path) -> None:
    (project.parents[1] / "paceline.toml").write_text("")
    assert project_file(project) is None
    in_home = project.parent / "paceline.toml"
    in_home.write_text("")
    assert project_file(project) == in_home
    (project / ".git").mkdir()
    assert project_file(project) is None


def test_the_search_ends_with_the_file_system() -> None:
    if Path("/dev/shm").stat().st_dev == Path("/").stat().st_dev:
        pytest.skip("/dev/shm is no file system of its own here")
    assert project_file(Path("/dev/shm")) is None


def test_a_folder_that_is_gone_has_no_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = project / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert load() == Settings()


def test_xdg_config_home_is_respected(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(project / "config"))
    assert user_file() == project / "config" / "paceline" / "config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")  # to be ignored, as its specification has it
    assert user_file() == project.parent / ".config" / "paceline" / "config.toml"


CASES = {
    "syntax": ("[volumes]\na = /mnt\n", ":2: not valid TOML: invalid value"),
    "unfinished": ("[volumes]\na = ", ":2: not valid TOML: "),
    "given twice": ('[volumes]\na = "/a"\na = "/b"\n', ":3: not valid TOML: cannot overwrite a value"),
    "unknown table": ("[volume]\n", ":1: volume: unknown key; did you mean volumes?"),
    "unknown key": ("[local]\ndevice = 1\n", ":2: local.device: unknown key; did you mean devices?"),
    "wrong type": ('[local]\ndevices = "4"\n', ":2: local.devices '4': should be a whole number"),
    "boolean": ("[local]\ndevices = true\n", ":2: local.devices True: should be a whole number"),
    "negative": ("[local]\ndevices = -1\n", ":2: local.devices -1: should be greater than or equal to 0"),
    "limit without a unit": (
        "[defaults]\nlook_timeout = 5\n",
        ":2: defaults.look_timeout: 5 has no unit; did you mean 5s?",
    ),
    "no table": ("volumes = 3\n", ":1: volumes 3: should be a mapping"),
    "no path": ("[volumes]\na = 3\n", ":2: volumes.a 3: should be text"),
    "empty path": ('[volumes]\na = ""\n', ":2: volumes.a '': not an absolute path"),
    "relative path of the user": ('[volumes]\na = "data"\n', ":2: volumes.a 'data': not an absolute path; write"),
    "home that is none": (
        '[volumes]\na = "~no-such-user/x"\n',
        ":2: volumes.a '~no-such-user/x': there is no such home",
    ),
    "name that is none": ('[volumes]\n"a:\\n" = "/a"\n', ":2: volumes.a:\\n: a volume's name has letters"),
    "target without backend": ("[targets.lab]\nhosts = []\n", ":1: targets.lab.backend: missing; add it"),
    "target that is none": ("[targets]\nlab = 'slurm'\n", ":2: targets.lab 'slurm': should be a mapping"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_with_file_and_key(project: Path, of_user: Write, of_project: Write, case: str) -> None:
    text, message = CASES[case]
    of_project("")
    path = of_user(text)
    with pytest.raises(UserError) as caught:
        load(project)
    assert str(caught.value).startswith(f"{path}{message}")
    assert str(caught.value).isprintable()


def test_the_file_is_the_one_with_the_mistake(project: Path, of_user: Write, of_project: Write) -> None:
    of_user("[local]\ndevices = 2\n")
    path = of_project("[local]\ndevices = 'two'\n")
    with pytest.raises(UserError, match=f"^{path}:2: local.devices 'two'"):
        load(project)


def test_a_default_target_that_is_not_defined_is_named_with_its_place(
    project: Path, of_project: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    path = of_project('[defaults]\non = "nosuch"\n')
    with pytest.raises(UserError, match=f"^{path}:2: defaults.on: no target 'nosuch'; define it as "):
        registry.load("nosuch")
    with pytest.raises(UserError, match="no target 'other'; "):
        registry.load("other")


def test_a_file_that_is_not_utf_8(project: Path, of_project: Write) -> None:
    path = of_project("")
    path.write_bytes(b"# \xff")
    with pytest.raises(UserError, match=f"^{path}: this is not UTF-8"):
        load(project)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(
        st.sampled_from(["volumes", "local", "devices", "targets", "backend", "[", "]", "=", "\n", "{", "}", '"', "."])
        | st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
        max_size=12,
    ).map("".join)
)  # fmt: skip
def test_any_text_is_settings_or_one_line(project: Path, of_project: Write, text: str) -> None:
    path = of_project(text)
    try:
        assert isinstance(load(project), Settings)
    except UserError as error:
        assert str(error).isprintable()
        assert os.fspath(path) in str(error)


def test_the_line_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text('x = 1\n\n[targets . "a.b"]  # one\nhosts = [\n  "h1",\n]\nssh.port = 1\n[defaults]\non = "x"\n')
    lines = {
        ("x",): 1, ("targets",): 3, ("targets", "a.b", "backend"): 3, ("targets", "a.b", "hosts", "0"): 4,
        ("targets", "a.b", "ssh", "port"): 7, ("defaults", "on"): 9,
    }  # fmt: skip
    assert {key: place_of(file, key) for key in lines} == {key: f"{file}:{line}" for key, line in lines.items()}
    assert place_of(file, ("volumes",)) == str(file)


def _of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


def _link(file: Path) -> None:
    file.rename(file.with_name("other.toml"))
    file.symlink_to("other.toml")


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


NOT_READ: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "of another user": (_of_another_user, "it belongs to user 12345; make a copy that is yours"),
    "folder of another user": (
        lambda file, patch: _of_another_user(file.parent, patch), "its folder belongs to user 12345; work in a"
    ),
    "writable by all": (lambda file, _: file.chmod(0o666), "others may write it; take that from them with chmod go-w"),
    "link": (lambda file, _: _link(file), "it is a symbolic link; put the file itself there"),
    "fifo": (lambda file, _: _fifo(file), "it is no regular file; put the file itself there"),
    "no file": (lambda file, _: _folder(file), "it is no regular file; put the file itself there"),
    "large": (lambda file, _: file.write_bytes(b"#" * (1 << 20) + b"\n"), "it is larger than 1 MiB; remove it"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_READ)
def test_a_project_file_that_another_user_may_have_written_is_not_read(
    project: Path, of_project: Write, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    change, why = NOT_READ[case]
    path = of_project("local.devices = 3\n")
    (project / "below").mkdir()
    change(path, monkeypatch)
    assert load(project / "below") == load(project / "below") == Settings()
    told = capfd.readouterr().err
    if os.geteuid() in (0, 12345):  # else both belong to the other user
        assert told.startswith(f"paceline: {path} is not read: {why}")
        assert told.count("\n") == 1


def test_the_search_goes_on_above_a_file_that_is_not_read(
    project: Path, of_project: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.parent / "paceline.toml").write_text("local.devices = 2\n")
    _fifo(of_project(""))
    assert load(project).local.devices == 2


def test_a_file_of_a_group_of_ones_own_may_be_writable_by_it(project: Path, of_project: Write) -> None:
    path = of_project("local.devices = 3\n")
    path.chmod(0o664)
    user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(path.stat().st_gid)
    is_own = user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
    assert load(project).local.devices == (3 if is_own else None)
    if os.geteuid() == 0:
        os.chown(path, -1, 54321)
        assert load(project).local.devices is None
