"""Bringing a job's code: git over every transport, rsync, snapshots, and what is refused of them."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import needs
from tests.job.code.git_server import PASSWORD, GitServer

from paceline.job.code.bring import check, fetch, parse
from paceline.job.code.ignore import Ignore
from paceline.job.code.snapshot import Listing, is_for_code
from paceline.job.errors import UserError
from paceline.job.spec import Code
from paceline.node.store.code_folder import building, claimed, discard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ODD_NAMES = [
    "with space.py",
    "quote'\".py",
    "$(touch x).py",
    "ünïcødé.py",
    "new\nline.py",
    "-rf",
    ";x",
    "#y",
    "back\\slash",
    "star*",
    " lead",
]


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings, credentials or jobs but the test's own."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "paceline-home"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in (
        "GIT_SYNC_USERNAME",
        "GIT_SYNC_PASSWORD",
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_ASKPASS",
        "http_proxy",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)


def git(folder: Path, *args: str) -> str:
    needs.need(needs.missing("git"))
    folder.mkdir(parents=True, exist_ok=True)
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main")
    allowed = ("-c", "protocol.file.allow=always")
    done = subprocess.run(["git", *identity, *allowed, *args], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def repository(folder: Path, files: dict[str, str] | None = None) -> str:
    """A repository with one commit; returns the commit's id."""
    git(folder, "init", "-q")
    return commit(folder, files or {"train.py": "print('first')\n"})


def commit(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a commit")
    return git(folder, "rev-parse", "HEAD")


def silent(what: str, done: int, total: int | None, now: str = "") -> None:
    pass


def bring(mode: str, source: str | None, folder: Path, destination: Path, **kwargs: object) -> dict[str, object]:
    with building(destination) as empty:
        return fetch(Code(mode=mode, source=source), folder, empty, silent, **kwargs)  # type: ignore[arg-type]


def bring_for_job(mode: str, source: str | None, folder: Path, destination: Path) -> dict[str, object]:
    """As a job does that keeps its code in a folder of the user's, and removes it with itself."""
    with claimed(destination, "a-job"):
        return bring(mode, source, folder, destination)


def refused(mode: str, source: str | None, folder: Path, destination: Path) -> str:
    """The one line with which it is refused; nothing may be left."""
    before = everything(destination.parent)
    with pytest.raises(UserError) as caught:
        bring(mode, source, folder, destination)
    assert not os.path.lexists(destination)
    assert everything(destination.parent) == before
    message = str(caught.value)
    assert "\n" not in message
    return message


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


def files_of(folder: Path) -> dict[str, bytes | str]:
    """Files and links below a folder, without git's own: path → content, or what a link points to."""
    found: dict[str, bytes | str] = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != ".git"]
        for name in [*names, *(n for n in folders if os.path.islink(os.path.join(parent, n)))]:
            path = os.path.join(parent, name)
            if name != ".git":
                content = os.readlink(path) if os.path.islink(path) else Path(path).read_bytes()
                found[os.path.relpath(path, folder)] = content
    return found


# -- flags -------------------------------------------------------------------------------------------------------------


def test_parse() -> None:
    assert parse(None, None) is None
    assert parse("git", "https://example.org/x@main") == Code(mode="git", source="https://example.org/x@main")
    assert parse("snapshot", None) == Code(mode="snapshot", source=None)
    assert parse("rsync", "lab:code") == Code(mode="rsync", source="lab:code")


@pytest.mark.parametrize(
    ("mode", "source", "words"),
    [
        ("gti", "x", "did you mean git?"),
        (None, "x", "add --sync-mode"),
        ("git", None, "without --sync-source"),
        ("rsync", "", "without --sync-source"),
        ("snapshot", "", "without --sync-source"),
        ("git", "a\0b", "zero byte"),
    ],
)
def test_parse_refuses(mode: str | None, source: str | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(mode, source)


@pytest.mark.parametrize(
    "source",
    [
        "--upload-pack=touch x",
        "-oProxyCommand=touch x",
        "ext::sh -c touch% x",
        "fd::17",
        "::x",
        "ssh://-oProxyCommand=touch x/path",
        "ssh://user@-oProxyCommand=x/path",
        "ssh://-oProxyCommand=x@host/path",
        "ssh://%2doProxyCommand=x@host/path",
        "-oProxyCommand=x:path",
        "user@-oProxyCommand=x:path",
        "-x@host:path",
        "host:--upload-pack=x",
        "https://host/path@--upload-pack=x",
        "https://host/path@a:b",
        "https://host/path@+a",
        "https://host/path@a b",
        "https://host/path@..",
        "https://host/path@",
        "https://host/path@x@{1}",
        "https://ho st/path",
        "https:///path",
        "https://host",
        "https://host/pa\nth",
        "https://host%0aevil/path",
        "git://host/pa\r\nth",
        "ftp://host/path",
        "git+https://host/path",
        "file://host/path",
        "https://host/path?x=--y",
    ],
)
def test_git_smuggling_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        parse("git", source)
    assert "\n" not in str(caught.value)
    refused("git", source, tmp_path, tmp_path / "code" / "x")


@pytest.mark.parametrize(
    "source", ["https://me:hunter22@host/x", "ssh://me:hunter22@host/x", "https://ghp_hunter22@host/x"]
)
def test_passwords_in_a_url_are_refused_unseen(source: str) -> None:
    with pytest.raises(UserError, match="GIT_SYNC_PASSWORD") as caught:
        check(Code(mode="git", source=source))
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("mode", [pytest.param("rsync", marks=pytest.mark.needs("rsync")), "snapshot"])
def test_passwords_in_a_url_are_not_shown_by_other_modes(mode: str, tmp_path: Path) -> None:
    message = refused(mode, "https://me:hunter22@host/x", tmp_path, tmp_path / "job")
    assert "hunter22" not in message and "me:…@host/x" in message


@pytest.mark.parametrize(
    "source",
    [
        "rsync://host/x",
        "host::module",
        "-e sh",
        "--rsh=sh",
        "-oProxyCommand=x:y",
        "u@-oProxyCommand=x:y",
        "-u@h:y",
        "h:a\nb",
    ],
)
def test_rsync_smuggling_is_refused(source: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        parse("rsync", source)
    assert "\n" not in str(caught.value)


@given(st.sampled_from(["git", "rsync", "snapshot"]), st.text(alphabet="-oPx=:@/. \n\0\"'$éa[]%0", max_size=20))
def test_no_source_breaks_the_check(mode: str, source: str) -> None:
    try:
        code = parse(mode, source)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert code is not None
        assert mode == "snapshot" or not source.startswith("-")


# -- git ---------------------------------------------------------------------------------------------------------------


def test_git_brings_branches_tags_and_commits(tmp_path: Path) -> None:
    origin = tmp_path / 'my repo\'s "origin" ü@home'
    first = repository(origin)
    git(origin, "tag", "-a", "v1@first", "-m", "a tag")
    git(origin, "checkout", "-q", "-b", "feature/über@2")
    second = commit(origin, {"train.py": "print('second')\n"})
    git(origin, "checkout", "-q", "main")
    third = commit(origin, {"train.py": "print('third')\n"})
    refs = {
        "": third,
        "@main": third,
        "@refs/heads/main": third,
        "@v1@first": first,
        "@feature/über@2": second,
        f"@{first}": first,
        f"@{second[:10]}": second,
    }
    for number, (ref, wanted) in enumerate(refs.items()):
        destination = tmp_path / "code" / f"job-{number}"
        fetched = bring("git", f"{origin.name}{ref}", tmp_path, destination)
        assert fetched["commit"] == wanted
        assert fetched["source"] == str(origin)
        assert fetched["files"] == 1
        assert fetched["ref"] == (ref[1:] or None)
        assert (destination / "train.py").read_text() == git(origin, "show", f"{wanted}:train.py") + "\n"
        assert git(destination, "status", "--porcelain") == ""
    assert git(tmp_path / "code" / "job-0", "rev-list", "--count", "HEAD") == "1"  # shallow


def test_git_takes_file_urls_and_escapes_in_them(tmp_path: Path) -> None:
    origin = tmp_path / "a repo@x"
    wanted = repository(origin)
    fetched = bring("git", f"file://{tmp_path}/a%20repo%40x@main", tmp_path, tmp_path / "job")
    assert fetched["commit"] == wanted


def test_git_runs_no_hooks_and_no_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin, template = tmp_path / "origin", tmp_path / "template"
    repository(origin)
    for hook in (template / "hooks" / "post-checkout", tmp_path / "hooks" / "post-checkout"):
        hook.parent.mkdir(parents=True)
        hook.write_text(f"#!/bin/sh\ntouch '{tmp_path}/ran'\n")
        hook.chmod(0o755)
    (tmp_path / "gitconfig").write_text(f"[init]\ntemplateDir={template}\n[core]\nhooksPath={tmp_path}/hooks\n")
    bring("git", str(origin), tmp_path, tmp_path / "job")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "job" / ".git" / "hooks").exists()


def test_git_brings_submodules_within_submodules(tmp_path: Path) -> None:
    for name, inner in (("inner", None), ("middle", "inner"), ("outer", "middle")):
        repository(tmp_path / name, {f"{name}.py": "pass\n"})
        if inner:
            git(tmp_path / name, "submodule", "add", "-q", f"../{inner}", inner)
            commit(tmp_path / name, {})
    pinned = git(tmp_path / "inner", "rev-parse", "HEAD")
    commit(tmp_path / "inner", {"inner.py": "later\n"})  # the submodule's branch has gone on since
    bring("git", "outer", tmp_path, tmp_path / "job")
    assert (tmp_path / "job" / "middle" / "inner" / "inner.py").read_text() == "pass\n"
    assert git(tmp_path / "job" / "middle" / "inner", "rev-parse", "HEAD") == pinned


def test_a_submodule_cannot_run_a_command(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    pinned = repository(origin)
    (origin / ".gitmodules").write_text(f'[submodule "sub"]\npath = sub\nurl = "ext::sh -c touch% {tmp_path}/ran"\n')
    git(origin, "add", ".gitmodules")
    git(origin, "update-index", "--add", "--cacheinfo", f"160000,{pinned},sub")
    git(origin, "commit", "-q", "-m", "evil")
    assert "submodule" in refused("git", str(origin), tmp_path, tmp_path / "job")
    assert not (tmp_path / "ran").exists()


def test_git_says_what_is_wrong(tmp_path: Path) -> None:
    repository(tmp_path / "origin")
    git(tmp_path / "empty", "init", "-q")
    (tmp_path / "folder").mkdir()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}/x"
        for source, words in {
            "nowhere": "no git repository at",
            "github.com/me/project": "write https://github.com/me/project",
            "folder": "no such repository",
            "origin@mian": "has no branch, tag or commit 'mian'; did you mean main?",
            "origin@0123456789": "has no branch, tag or commit",
            "origin@" + "0123456789" * 4: "has no branch, tag or commit",
            "empty": "has no default branch",
            closed: "its host cannot be reached",
        }.items():
            assert words in refused("git", source, tmp_path, tmp_path / "code" / "job"), source


def test_git_and_rsync_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git is not installed" in refused("git", ".", tmp_path, tmp_path / "job")
    assert "rsync is not installed" in refused("rsync", ".", tmp_path, tmp_path / "job")


def test_git_is_not_led_astray_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = repository(tmp_path / "origin")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_TRACE", str(tmp_path / "trace"))
    assert bring("git", "origin", tmp_path, tmp_path / "job")["commit"] == wanted
    assert not (tmp_path / "trace").exists()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    it = GitServer(tmp_path / "served")
    thread = threading.Thread(target=it.serve_forever)
    thread.start()
    yield it
    it.shutdown()
    thread.join()
    it.server_close()


def test_a_private_repository(
    tmp_path: Path, server: GitServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = repository(server.root / "private")
    (tmp_path / "gitconfig").write_text(f"[credential]\nhelper = store --file={tmp_path}/stored\n")
    monkeypatch.setenv("GIT_SYNC_USERNAME", "me")
    monkeypatch.setenv("GIT_SYNC_PASSWORD", PASSWORD + "\n")
    monkeypatch.setenv("GIT_TRACE_CURL", str(tmp_path / "trace"))
    monkeypatch.setenv("GIT_TRACE_REDACT", "0")
    destination = tmp_path / "code" / "job"
    fetched = bring("git", f"{server.url}/private/.git@main", tmp_path, destination)
    assert fetched["commit"] == wanted
    assert fetched["source"] == f"{server.url}/private/.git"
    assert f"me:{PASSWORD}" in server.asked
    assert server.seen_in_processes == []
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert PASSWORD.encode() not in path.read_bytes(), path
    assert PASSWORD not in json.dumps(fetched)
    assert PASSWORD not in "".join(capfd.readouterr())
    assert not (tmp_path / "stored").exists()


@pytest.mark.parametrize(
    ("user", "password", "words"),
    [
        ("me", "wrong-one", "check GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD"),
        (None, None, "set GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD"),
        ("me", None, "set GIT_SYNC_PASSWORD too"),
        ("me", "two\nlines", "holds a line break"),
    ],
)
def test_wrong_and_missing_passwords(
    user: str | None,
    password: str | None,
    words: str,
    tmp_path: Path,
    server: GitServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repository(server.root / "private")
    for name, value in (("GIT_SYNC_USERNAME", user), ("GIT_SYNC_PASSWORD", password)):
        if value is not None:
            monkeypatch.setenv(name, value)
    message = refused("git", f"{server.url}/private/.git", tmp_path, tmp_path / "code" / "job")
    assert words in message
    assert password is None or password not in message


@pytest.mark.needs("git")
def test_a_repository_that_a_host_does_not_have(tmp_path: Path, server: GitServer) -> None:
    message = refused("git", f"{server.url}/public/nothing", tmp_path, tmp_path / "job")
    assert "no such repository" in message


def test_the_password_goes_to_no_other_host(tmp_path: Path, server: GitServer, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = GitServer(tmp_path / "elsewhere")
    thread = threading.Thread(target=elsewhere.serve_forever)
    thread.start()
    try:
        repository(elsewhere.root / "private")
        pinned = repository(server.root / "outer")
        (server.root / "outer" / ".gitmodules").write_text(
            f'[submodule "sub"]\npath = sub\nurl = {elsewhere.url}/private/.git\n'
        )
        git(server.root / "outer", "add", ".gitmodules")
        git(server.root / "outer", "update-index", "--add", "--cacheinfo", f"160000,{pinned},sub")
        git(server.root / "outer", "commit", "-q", "-m", "with a submodule")
        monkeypatch.setenv("GIT_SYNC_USERNAME", "me")
        monkeypatch.setenv("GIT_SYNC_PASSWORD", PASSWORD)
        message = refused("git", f"{server.url}/outer/.git", tmp_path, tmp_path / "job")
        assert "submodule" in message
        assert server.asked
        assert elsewhere.asked == []
    finally:
        elsewhere.shutdown()
        thread.join()
        elsewhere.server_close()


def test_a_server_that_gives_no_commit_by_its_id(tmp_path: Path, server: GitServer) -> None:
    origin = server.root / "public" / "origin"
    first = repository(origin)
    commit(origin, {"train.py": "later\n"})
    (tmp_path / "gitconfig").write_text("[protocol]\nversion = 0\n")
    fetched = bring("git", f"{server.url}/public/origin/.git@{first}", tmp_path, tmp_path / "job")
    assert fetched["commit"] == first
    assert (tmp_path / "job" / "train.py").read_text() == "print('first')\n"


def test_git_over_ssh_gets_its_arguments_unharmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = tmp_path / "it's $(touch ran) ü"
    wanted = repository(origin)
    monkeypatch.setenv("GIT_SSH_COMMAND", str(fake_ssh(tmp_path)))
    for source in (f"me@lab:{origin}@main", f"ssh://me@lab{origin}@main"):
        assert bring_for_job("git", source, tmp_path, tmp_path / "job")["commit"] == wanted
        discard(tmp_path / "job", "a-job")
        assert not (tmp_path / "job").exists()
    assert not (tmp_path / "ran").exists()


def fake_ssh(folder: Path) -> Path:
    """Stands for ssh: runs, in a shell as the far side does, what it is given behind the host."""
    path = folder / "fake-ssh"
    path.write_text(
        '#!/bin/sh\nwhile :; do case "$1" in -l|-p|-o) shift 2;; -*) shift;; *) break;; esac; done\n'
        'shift\nexec sh -c "$*"\n'
    )
    path.chmod(0o755)
    return path


# -- rsync -------------------------------------------------------------------------------------------------------------


@pytest.mark.needs("rsync")
def test_rsync_from_a_folder(tmp_path: Path) -> None:
    origin = tmp_path / "it's $(touch ran) ü"
    repository(origin, {"src/a.py": "a", "data/big.bin": "b", "keep.bin": "k", ".pacelineignore": "*.bin\n!keep.bin\n"})
    for name in ODD_NAMES:
        (origin / name).write_text(name)
    (origin / "__pycache__").mkdir()
    (origin / "__pycache__" / "a.pyc").write_text("x")
    (origin / "link").symlink_to("src/a.py")
    os.mkfifo(origin / "fifo")
    fetched = bring("rsync", str(origin), tmp_path, tmp_path / "code" / "job")
    copied = files_of(tmp_path / "code" / "job")
    assert set(copied) == {"src/a.py", "keep.bin", ".pacelineignore", "link", *ODD_NAMES}
    assert copied["link"] == "src/a.py"
    assert fetched["files"] == len(copied)
    assert not (tmp_path / "ran").exists()


@pytest.mark.needs("rsync")
def test_rsync_from_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = tmp_path / "it's $(touch ran) ü"
    repository(origin, {"src/a.py": "a", "data/big.bin": "b", "keep.bin": "k", ".pacelineignore": "*.bin\n!keep.bin\n"})
    monkeypatch.setenv("RSYNC_RSH", str(fake_ssh(tmp_path)))
    fetched = bring("rsync", f"me@lab:{origin}", tmp_path, tmp_path / "job")
    assert set(files_of(tmp_path / "job")) == {"src/a.py", "keep.bin", ".pacelineignore"}
    assert fetched["source"] == f"me@lab:{origin}/"
    assert not (tmp_path / "ran").exists()
    message = refused("rsync", f"me@lab:{tmp_path}/nothing", tmp_path, tmp_path / "code" / "job")
    assert "No such file" in message


@pytest.mark.needs("rsync")
def test_rsync_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "does not exist" in refused("rsync", "nowhere", tmp_path, tmp_path / "code" / "job")
    assert "is a file" in refused("rsync", "file", tmp_path, tmp_path / "code" / "job")


PATHS = ("a/a/a", "a/b/ab", "a/b.c", "b/a/b", "b/b.c/a", "ab/a", "b.c", "!a", "c/a/b/b", "a b", "c/]", "c/a-")
PATTERNS = st.lists(
    st.builds(
        lambda start, parts, end: start + "/".join(parts) + end,
        st.sampled_from(["", "", "/", "!", "**/", "!/", "\\!", "#"]),
        st.lists(
            st.sampled_from(["a", "b", "*", "a*", "?", "[ab]", "[!a]", "[]a-]", "[[:alpha:]]", "**", "b.c", "\\a"]),
            min_size=1,
            max_size=3,
        ),
        st.sampled_from(["", "", "/", " ", "/**", "\\ b"]),
    ),
    max_size=4,
)


@pytest.mark.needs("git", "rsync")
@settings(max_examples=80, deadline=None)
@given(PATTERNS)
def test_patterns_mean_what_they_mean_to_git_and_to_rsync(patterns: list[str]) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        for path in PATHS:
            (folder / "from" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "from" / path).write_text("")
        (folder / ".pacelineignore").write_text("\n".join(patterns))
        rules = [f"--filter={rule}" for rule in Ignore.of_folder(folder).rsync_rules()]
        subprocess.run(["rsync", "-r", *rules, "--", f"{folder}/from/", f"{folder}/to/"], check=True)
        git(folder / "from", "init", "-q")
        (folder / "from" / ".git" / "info" / "exclude").write_text("\n".join(patterns))
        listed = git(folder / "from", "ls-files", "-z", "-o", "--exclude-standard").split("\0")
        (folder / ".pacelineignore").rename(folder / "from" / ".pacelineignore")
        listing = Listing(folder / "from", silent)
        listing.add_everything("")
        assert set(listing.files) - {".pacelineignore"} == set(listed) - {""}
        assert set(files_of(folder / "to")) == set(listed) - {""}


def test_fifos_in_place_of_ignore_files(tmp_path: Path) -> None:
    for name in (".pacelineignore", ".gitignore"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=f"^cannot read {tmp_path}/.pacelineignore: it is no regular file; put"):
        Ignore.of_folder(tmp_path)
    assert not is_for_code(str(tmp_path))


@pytest.mark.parametrize("line", ["[a", "a\\", "x[[:nothing:]]", "[z-a]"])
def test_a_malformed_pattern_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / ".pacelineignore").write_text(f"*.bin\n{line}\n")
    assert ".pacelineignore line 2" in refused("snapshot", None, tmp_path, tmp_path / "code" / "job")


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_what_git_would_list(tmp_path: Path) -> None:
    work = tmp_path / "work"
    repository(work, {"train.py": "t", "gone.py": "g", "run.sh": "r", "sub/deep/m.py": "m", ".gitignore": "*.log\n"})
    (work / "gone.py").unlink()
    (work / "run.sh").chmod(0o755)
    for name in ODD_NAMES:
        (work / name).write_text(name)
    (work / b"\xff.py".decode(errors="surrogateescape")).write_text("bytes")
    (work / "noise.log").write_text("n")
    (work / "big.bin").write_text("b")
    (work / ".pacelineignore").write_text("*.bin\n")
    (work / "link").symlink_to("train.py")
    (work / "dangling").symlink_to("nowhere")
    (work / "folder link").symlink_to("sub")
    (work / "outside").symlink_to("../data")
    (tmp_path / "data").mkdir()
    os.mkfifo(work / "fifo")
    repository(work / "vendored", {"v.py": "v", ".gitignore": "junk\n"})
    (work / "vendored" / "junk").write_text("j")
    destination = work / "code" / "job"
    fetched = bring_for_job("snapshot", None, work, destination)
    expected = {"train.py", "run.sh", "sub/deep/m.py", ".gitignore", ".pacelineignore", "link", "dangling", "outside"}
    expected |= {"folder link", "vendored/v.py", "vendored/.gitignore", "\udcff.py", *ODD_NAMES}
    copied = files_of(destination)
    assert set(copied) == expected
    assert copied["link"] == "train.py"
    assert copied["folder link"] == "sub"
    assert (destination / "outside").resolve() == tmp_path / "data"
    assert stat.S_IMODE((destination / "run.sh").stat().st_mode) == 0o755
    assert (destination / "train.py").stat().st_mtime_ns == (work / "train.py").stat().st_mtime_ns
    assert fetched == {
        "mode": "snapshot",
        "source": str(work),
        "files": len(expected),
        "bytes": sum(len(content) for content in copied.values() if isinstance(content, bytes)),
    }
    # Editing the folder later changes nothing, a later snapshot leaves the earlier one out, git sees neither.
    (work / "train.py").write_text("edited")
    assert (destination / "train.py").read_text() == "t"
    bring_for_job("snapshot", None, work, work / "code" / "next")
    assert set(files_of(work / "code" / "next")) == expected
    assert "code/" not in git(work, "status", "--porcelain")


def test_a_snapshot_of_a_folder_in_a_repository_and_of_submodules(tmp_path: Path) -> None:
    work = tmp_path / "work"
    repository(tmp_path / "library", {"lib.py": "l"})
    repository(work, {"top.py": "t", "part/train.py": "t", "part/skip.log": "s", "part/linked/x.py": "x"})
    git(work, "submodule", "add", "-q", str(tmp_path / "library"), "part/library")
    (work / "part" / "library" / "new.py").write_text("n")
    (work / ".gitignore").write_text("ignored/\n")
    (work / "part" / "ignored").mkdir()
    (work / "part" / "ignored" / "x.py").write_text("x")
    (work / "part" / "linked" / "x.py").rename(work / "x.py")  # a folder that has become a link
    (work / "part" / "linked").rmdir()
    (work / "part" / "linked").symlink_to("..")
    bring("snapshot", "part", work, tmp_path / "job")
    assert set(files_of(tmp_path / "job")) == {"train.py", "skip.log", "library/lib.py", "library/new.py", "linked"}
    bring("snapshot", None, work / "part" / "ignored", tmp_path / "other")
    assert set(files_of(tmp_path / "other")) == {"x.py"}


def test_a_snapshot_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    files = {"a.py": "a", "pkg/b.py": "b", "pkg/__pycache__/b.pyc": "c", ".git/config": "g", "sub/.git": "gitdir: x"}
    files |= {
        ".pacelineignore": "/data/\n*.tmp\n!keep.tmp\n",
        "data/x": "x",
        "pkg/data/y": "y",
        "q.tmp": "q",
        "keep.tmp": "k",
    }
    files |= {"home/jobs/one/job.json": "{}", "code/own.py": "o"}
    files |= {f"runs/one/{name}": "" for name in ("status.json", "spec.json", "journal.jsonl", "rank-0.log")}
    for name, text in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    (work / "empty").mkdir()
    monkeypatch.setenv("PACELINE_HOME", str(work / "home"))
    expected = {"a.py", "pkg/b.py", ".pacelineignore", "pkg/data/y", "keep.tmp", "code/own.py"}
    for name in ("one", "two"):
        bring_for_job("snapshot", None, work, work / "code" / name)
        assert set(files_of(work / "code" / name)) == expected
        assert (work / "code" / name / "empty").is_dir()
        assert not (work / "code" / name / "data").exists()
    discard(work / "code" / "one", "a-job")
    discard(work / "code" / "two", "a-job")
    assert everything(work / "code") == ["own.py"]


NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..", ".git", "__pycache__", ".pacelineignore", ".gitignore")
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=3), st.binary(max_size=40)), max_size=8), st.booleans())
def test_a_snapshot_of_any_tree_equals_it(tree: list[tuple[list[str], bytes]], in_git: bool) -> None:
    with TemporaryDirectory() as name:
        work = Path(name) / "work"
        work.mkdir()
        if in_git:
            git(work, "init", "-q")
        for parts, content in tree:
            path = work.joinpath(*parts)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                continue  # a file and a folder of one name
        before = files_of(work)
        fetched = bring("snapshot", None, work, work / "code" / "job" if "code" not in before else Path(name) / "job")
        destination = work / "code" / "job" if "code" not in before else Path(name) / "job"
        assert files_of(destination) == before
        assert fetched["files"] == len(before)


def test_a_snapshot_names_the_file_that_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("t")
    really = os.open

    def failing(error: type[OSError], number: int) -> Callable[..., int]:
        def opens(path: object, *args: object, **kwargs: object) -> int:
            if str(path) == str(work / "train.py"):
                raise error(number, os.strerror(number))
            return really(path, *args, **kwargs)  # type: ignore[arg-type]

        return opens

    for error, number, words in ((PermissionError, 13, "cannot read"), (FileNotFoundError, 2, "disappeared")):
        monkeypatch.setattr(os, "open", failing(error, number))
        message = refused("snapshot", None, work, tmp_path / "code" / "job")
        assert words in message
        assert str(work / "train.py") in message


def test_a_file_that_changes_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.log").write_text("t")
    really = os.copy_file_range

    def slowly(source: int, target: int, count: int) -> int:
        with open(work / "train.log", "a") as file:
            file.write("more")
        return really(source, target, count)

    monkeypatch.setattr(os, "copy_file_range", slowly)
    assert f"{work}/train.log changes while" in refused("snapshot", None, work, tmp_path / "code" / "job")


def test_a_copy_where_the_kernel_does_not_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "data").write_bytes(os.urandom(100_000))

    def refuses(*args: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuses)
    bring("snapshot", None, work, tmp_path / "job")
    assert files_of(tmp_path / "job") == files_of(work)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a").write_text("a")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "utime", full)
    assert "No space left" in refused("snapshot", None, work, tmp_path / "code" / "deep" / "job")


@pytest.mark.parametrize("mode", ["snapshot", "git", pytest.param("rsync", marks=pytest.mark.needs("rsync"))])
def test_an_interrupt_leaves_nothing(mode: str, tmp_path: Path) -> None:
    repository(tmp_path / "work")

    def interrupt(what: str, done: int, total: int | None, now: str = "") -> None:
        if what != "listing files":
            raise KeyboardInterrupt

    before = everything(tmp_path)
    code = Code(mode=mode, source=str(tmp_path / "work"))  # type: ignore[arg-type]
    place = tmp_path / "code" / "job"
    with pytest.raises(KeyboardInterrupt), claimed(place, "a-job"), building(place) as empty:
        fetch(code, tmp_path, empty, interrupt)
    assert everything(tmp_path) == before


def test_a_huge_folder_is_named(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "data" / "raw").mkdir(parents=True)
    with open(work / "data" / "raw" / "big", "wb") as file:
        file.truncate(1_100_000_000)
    (work / "train.py").write_text("t")
    listing = Listing(work, silent)
    listing.add_what_git_lists("")
    said: list[str] = []
    listing.warn_if_huge(said.append)
    assert len(said) == 1
    assert "2 files, 1.0 GiB" in said[0]
    assert "data/raw" in said[0]


def test_snapshots_at_the_same_time_do_not_see_each_other(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for number in range(50):
        (work / f"{number}.py").write_text("x")
    failed: list[BaseException] = []

    def one(number: int) -> None:
        try:
            bring_for_job("snapshot", None, work, work / "code" / f"job-{number}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for number in range(12):
        assert len(files_of(work / "code" / f"job-{number}")) == 50


# -- progress ----------------------------------------------------------------------------------------------------------


class Terminal:
    """Text that is written to a terminal, or to a pipe."""

    def __init__(self, is_terminal: bool) -> None:
        self.text = ""
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_silent_for_a_second(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.cli.terminal.progress_bar import ProgressLine

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    terminal = Terminal(is_terminal)
    with ProgressLine(terminal) as progress:  # type: ignore[arg-type]
        progress("copying files", 1, 4_000)
        assert terminal.text == ""
        now[0] += 1.5
        progress("copying files", 2_000, 4_000)
        shown = terminal.text
        progress("copying files", 2_001, 4_000)  # too soon
        assert terminal.text == shown
        now[0] += 1
        progress("waiting", 5, None)
        progress.say("a word")
    if is_terminal:
        assert " 50%  2,000/4,000" in shown
        assert "waiting: 5" in terminal.text
        assert terminal.text.endswith("\r\x1b[Kpaceline: a word\n")
    else:
        assert terminal.text == "paceline: copying files (4,000)…\npaceline: waiting…\npaceline: a word\n"
