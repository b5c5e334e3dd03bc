"""What runs on a host first: whom it trusts there, and what it says of hosts that are not as they should be."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import all_end, eventually, processes_with

from paceline.backends.limits import Limits
from paceline.backends.remote import connection, login
from paceline.backends.remote.connection import Host, Silent
from paceline.backends.ssh import asking
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Ask = Callable[..., dict[str, object]]

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
OWNER = 4711  # nobody has this number


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for connections, with a short path; logins that go on in the end are ended."""
    with tempfile.TemporaryDirectory(prefix="ssh-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield
        while left := processes_with(f"XDG_RUNTIME_DIR={folder}"):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Asks this machine through an ssh that logs in nowhere; `startup` is what its shell runs first."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nfor last; do :; done\neval "$STARTUP"\neval "$last"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.0)  # what each login does is tested here

    def asks(root: Path, python: str = "python3", startup: str = "") -> dict[str, object]:
        monkeypatch.setenv("STARTUP", startup)
        limits = Limits(*[float(os.environ.get("LIMIT", "60"))] * 2)
        host = Host("h1", 1, None, None, python, str(root), limits)
        return host.ask({"do": "describe", "names": [], "since": None})

    return asks


def refusal(ask: Ask, root: Path, python: str = "python3", startup: str = "") -> str:
    with pytest.raises(UserError) as caught:
        ask(root, python, startup)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("h1")
    return said


def zombies() -> set[int]:
    """Children of this process that have ended, and that it has not waited for."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
            if state == "Z" and int(parent) == os.getpid():
                found.add(int(path.parent.name))
    return found


def test_requests_of_one_process_share_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logins = tmp_path / "logins"
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nfor last; do :; done\necho $$ >> {logins}\neval "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    host, here = (
        Host("h1", 1, None, None, "python3", str(tmp_path / "root")),
        {"do": "describe", "names": [], "since": None},
    )

    def count() -> int:
        return len(logins.read_text().splitlines())

    for _ in range(3):
        assert host.ask(dict(here)) == {"jobs": [], "names": []}
        with host.listen({"do": "wait", "names": []}) as answers:
            next(answers)
        assert host.ask({"do": "stop", "names": ["none"], "now": False}) == {"names": []}
    assert count() == 4, "the first one, and one after each that was listened to"
    with pytest.raises(UserError, match="no job"):
        host.ask({"do": "spec", "name": "none"})
    assert host.ask(dict(here)) == {"jobs": [], "names": []}
    assert count() == 5, "a refusal ends it"
    for pid in processes_with(f"PATH={ssh.parent}:"):
        os.kill(pid, signal.SIGKILL)
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.0)
    assert host.ask(dict(here)) == {"jobs": [], "names": []}, "and another one takes the place of one that was killed"


# -- the path of the archive -------------------------------------------------------------------------------------------


def test_a_root_that_is_ours_alone(ask: Ask, tmp_path: Path) -> None:
    for root in (tmp_path / "new" / "root", tmp_path / "link" / "root"):
        if root.parent.name == "link":
            (tmp_path / "link").symlink_to("new")
        assert ask(root) == {"jobs": [], "names": []}
        assert ask(root) == {"jobs": [], "names": []}, "once the archive is there, too"
        assert root.stat().st_mode & 0o777 == 0o700


def test_a_root_below_a_sticky_folder(ask: Ask, tmp_path: Path) -> None:
    tmp_path.joinpath("tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    assert ask(tmp_path / "tmp" / "root") == {"jobs": [], "names": []}
    said = refusal(ask, tmp_path / "tmp")
    assert re.search(r"/tmp \(owner \S+, mode 1777\) can be written to by others", said)


@pytest.mark.parametrize("mode", [0o777, 0o757])
@pytest.mark.parametrize("below", [0, 1, 2])
def test_a_folder_that_others_can_write_to(ask: Ask, tmp_path: Path, mode: int, below: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    root = folder.joinpath(*["deeper"] * below)
    said = refusal(ask, root)
    assert f"{folder} (owner " in said
    assert f"mode 0{mode:o}) can be written to by others" in said
    assert "chmod go-w" in said
    assert "--ssh-root" in said
    assert list(folder.iterdir()) == [], "nothing was written there"


@AS_ROOT
def test_a_group_that_can_write(ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "team"
    folder.mkdir()
    folder.chmod(0o775)
    os.chown(folder, 0, OWNER)
    assert f"{folder} (owner root, mode 0775) can be written to by others" in refusal(ask, folder / "root")


@AS_ROOT
@pytest.mark.parametrize("what", ["root", "parent", "below a sticky folder", "link", "archive", "link as archive"])
def test_a_path_that_somebody_else_has_made(ask: Ask, tmp_path: Path, what: str) -> None:
    root = foreign = tmp_path / "there"
    if what == "below a sticky folder":
        tmp_path.chmod(0o1777)
    if what == "link":
        (tmp_path / "target").mkdir()
        root.symlink_to("target")
    else:
        root.mkdir()
    if "archive" in what:
        assert ask(root) == {"jobs": [], "names": []}
        (foreign,) = root.glob("*.pyz")
        if what == "link as archive":
            foreign.rename(tmp_path / "archive")
            foreign.symlink_to(tmp_path / "archive")
    os.chown(foreign, OWNER, OWNER, follow_symlinks=False)
    said = refusal(ask, root / "deeper" if what == "parent" else root)
    assert f"{foreign} (owner user {OWNER}, mode " in said
    assert "belongs to somebody else" in said


def test_an_archive_that_is_no_file(ask: Ask, tmp_path: Path) -> None:
    ask(tmp_path / "root")
    (archive,) = (tmp_path / "root").glob("*.pyz")
    archive.unlink()
    archive.mkdir()
    assert "is no regular file" in refusal(ask, tmp_path / "root")


# -- interpreters and shells -------------------------------------------------------------------------------------------


def test_a_python_without_sys_stdin_buffer(ask: Ask, tmp_path: Path) -> None:
    """As Python 2 is, whose files have no `buffer`."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\nshift\n"
        'exec python3 -c "import sys; sys.stdin = sys.stdin.buffer; sys.version_info = (2, 7, 18); $1"\n'
    )
    python.chmod(0o755)
    said = refusal(ask, tmp_path / "root", str(python))
    assert "is Python 2.7.18, too old; name Python 3.9 or newer with --ssh-python" in said


def _old(version: str) -> str | None:
    """A Python of this version, if there is one."""
    managed = Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")
    for program in filter(None, (shutil.which(f"python{version}"), *map(str, managed))):
        done = subprocess.run([program, "-c", "print('runs')"], capture_output=True, check=False)
        if done.stdout == b"runs\n":
            return program
    return None


@pytest.mark.parametrize("version", ["2.7", "3.8"])
def test_a_real_old_python(ask: Ask, tmp_path: Path, version: str) -> None:
    python = _old(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    assert f"is Python {version}." in (said := refusal(ask, tmp_path / "root", python))
    assert "too old; name Python 3.9 or newer with --ssh-python" in said


def test_a_program_that_is_no_python(ask: Ask, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'SyntaxError: what is that' >&2\nexit 1\n")
    python.chmod(0o755)
    said = refusal(ask, tmp_path / "root", str(python))
    assert f"h1: {python} there does not behave like Python (SyntaxError: what is that); name Python" in said


@pytest.mark.parametrize("line", ["Loading modules", "1", "[]", "null", '{"level": "info"}'])
def test_a_python_that_prints_when_it_begins(ask: Ask, tmp_path: Path, line: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{line}'\nexec python3 \"$@\"\n")
    python.chmod(0o755)
    said = refusal(ask, tmp_path / "root", str(python))
    assert said == f"h1: {python} there prints '{line}' when it begins; let it print nothing"


@pytest.mark.parametrize(
    "startup", ["echo Welcome; echo '{}'", "printf 'no end of a line'", "head -c 200000 /dev/zero"]
)
def test_a_startup_file_that_prints(ask: Ask, tmp_path: Path, startup: str) -> None:
    assert ask(tmp_path / "root", startup=startup) == ask(tmp_path / "root")


@pytest.mark.parametrize("startup", ["exit 0", "echo Bye; exit 3", "exec sh -c 'exit 127'"])
def test_a_startup_file_that_ends_the_shell(ask: Ask, tmp_path: Path, startup: str) -> None:
    said = refusal(ask, tmp_path / "root", startup=startup)
    assert "h1: a start-up file of its shell, such as ~/.bashrc, ends it before the command (exit status" in said


@pytest.mark.parametrize("startup", ["read a", "read a; read b", "head -c 100 > /dev/null"])
def test_a_startup_file_that_reads(ask: Ask, tmp_path: Path, startup: str) -> None:
    said = refusal(ask, tmp_path / "root", startup=startup)
    assert "a start-up file of its shell, such as ~/.bashrc, reads stdin" in said
    assert "[ -t 0 ]" in said


def test_a_startup_file_that_waits_for_more(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMIT", "1")
    with pytest.raises(UserError) as caught:
        ask(tmp_path / "root", startup="cat > /dev/null")
    said = str(caught.value)
    assert said.startswith("cannot reach h1: no answer within 1 s; it may be busy or hang, or a start-up file of its ")


SLOW = """#!/bin/sh
printf '{"need": false}\\n{"jobs": [], '
%s
printf '"names": []}\\n'
cat > /dev/null
"""


@pytest.mark.parametrize(
    ("then", "within"),
    [("cat > /dev/null", r"\d(\.\d)?"), ("while :; do printf ' '; sleep 0.2; done", "4")],
    ids=["stops", "never ends"],
)
def test_an_answer_that_does_not_come_completely(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, within: str
) -> None:
    monkeypatch.setenv("LIMIT", "1")
    python = tmp_path / "python"
    python.write_text(SLOW % then)
    python.chmod(0o755)
    what = f"its answer did not arrive completely within {within} s; it or its network may be slow: ssh h1; if it is"
    with pytest.raises(Silent, match=f"^cannot reach h1: {what} only slow, set look_timeout below "):
        ask(tmp_path / "root", str(python))


def test_an_answer_that_keeps_coming_may_take_longer(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMIT", "2")
    python = tmp_path / "python"
    python.write_text(SLOW % "for _ in 1 2 3 4 5 6; do sleep 0.5; printf ' '; done")
    python.chmod(0o755)
    assert ask(tmp_path / "root", str(python)) == {"jobs": [], "names": []}


def test_a_login_that_takes_longer_than_a_command_waits_serves_the_next_one(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as long for each command; and it ends by itself."""
    go = tmp_path / "go"
    slow = f"until [ -e {go} ]; do sleep 0.05; done"
    host = Host("h1", 1, None, None, "python3", str(tmp_path / "root"))

    def goes_on() -> None:
        go.touch()
        eventually(lambda: host.has_login, "the login goes on")
        go.unlink()

    monkeypatch.setenv("LIMIT", "0.2")
    with pytest.raises(UserError, match=r"set look_timeout below .defaults.; the login goes on for the next command"):
        ask(tmp_path / "root", startup=slow)
    monkeypatch.setenv("LIMIT", "60")
    for _ in range(2):  # the first one takes the login, and has another one begin
        goes_on()
        assert ask(tmp_path / "root", startup=slow) == {"jobs": [], "names": []}
    goes_on()
    monkeypatch.setattr(login, "go_on", lambda *_: None)
    ask(tmp_path / "root", startup=slow)
    all_end(lambda: processes_with(f"STARTUP={slow}"), "the logins")
    assert not list(Path(os.environ["XDG_RUNTIME_DIR"], "paceline").iterdir())


def test_a_login_that_nobody_needs_ends(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it has come to its end or not."""
    sitting = Path(login.__file__).read_text().replace("_SECONDS = 120.0", "_SECONDS = 2.0").replace("60.0", "0.1")
    monkeypatch.setattr(login, "__file__", str(tmp_path / "login.py"))
    (tmp_path / "login.py").write_text(sitting)
    for startup in ("true", "cat > /dev/null"):
        monkeypatch.setenv("STARTUP", startup)
        Host("h1", 1, None, None, "python3", str(tmp_path / "root")).log_in()
        all_end(lambda: processes_with(f"STARTUP={startup}"), "the login")  # noqa: B023 - called at once


def test_logins_that_have_ended_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that lives long, such as that of `paceline web`."""
    (tmp_path / "login.py").touch()  # it ends at once
    monkeypatch.setattr(login, "__file__", str(tmp_path / "login.py"))
    host, before = Host("h1", 1, None, None, "python3", str(tmp_path / "root")), zombies()
    host.log_in()
    eventually(lambda: zombies() - before, "it has ended")
    first = zombies() - before
    host.log_in()
    assert not first & zombies()


def test_a_wrapper_of_ssh_that_leaves_a_child_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text("#!/bin/sh\nsleep 3600 &\nwait\n")  # the child holds the output open
    monkeypatch.setenv("LEFT_BY", str(tmp_path))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    host = Host("h1", 1, None, None, "python3", "~/state", Limits(0.5, 0.5))
    request = {"do": "describe", "names": [], "since": None}
    try:
        found = asking.ask_all({host: (request, host.patience(request))}, frozenset())
        assert isinstance(found[host].answer, Silent)
    finally:
        for pid in processes_with(f"LEFT_BY={tmp_path}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
