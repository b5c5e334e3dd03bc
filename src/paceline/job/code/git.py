"""Code from git repositories, and what git knows of a folder.

Git is run without a shell, hooks or templates, and cannot prompt. It gets a password only through the environment, and
sends it only to the host that the user named.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.job.errors import UserError

from .git_source import CONTROL, Source, resolve
from .transfer import Result, printable, reason, require, run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.contract.records import CodeRecord

    from .transfer import OnProgress

_KEPT = re.compile(r"GIT_(SSH|SSL|PROXY|HTTP|CONFIG|EXEC_PATH|ASKPASS)")  # of the user's GIT_… variables
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_PROGRESS = re.compile(r"(?:remote: )?([A-Z][a-z]+ [a-z]+): +\d+% \((\d+)/(\d+)\)")
_ASK_SECONDS = 10.0  # for a host to say which commit a ref is
_FETCHED = "refs/paceline/code"
# A credential helper; git runs it in a shell, only for the host that it is set for.
_HELPER = (
    """!f() { test "$1" != get || """
    r"""printf 'username=%s\npassword=%s\n' "$GIT_SYNC_USERNAME" "$GIT_SYNC_PASSWORD"; }; f"""
)
_SAFE = (
    *("core.hooksPath=/dev/null", "core.fsmonitor=false", "advice.detachedHead=false", "gc.auto=0"),
    *("maintenance.auto=false", "fetch.recurseSubmodules=false", "submodule.recurse=false"),
    *("http.lowSpeedLimit=1", "http.lowSpeedTime=120"),
)


# -- fetching ----------------------------------------------------------------------------------------------------------


def fetch(
    source: str, folder: Path, destination: Path, progress: OnProgress, credentials: Mapping[str, str]
) -> CodeRecord:
    """Fetch a repository with its submodules into an empty folder, with as little history as the server allows.

    `credentials` are GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD, as far as there are some.
    """
    require("git")
    repository = _Repository(resolve(source, folder), destination, progress, credentials)
    repository.fetch()
    files, size = _count(destination)
    return {
        "source": repository.source.url,
        "ref": repository.source.ref,
        "commit": repository.commit,
        "files": files,
        "bytes": size,
    }


def commit_of(source: Source, credentials: Mapping[str, str]) -> str | None:
    """The commit of a source's ref, as its host says; None if that is not known here. See `fetch`.

    The host may not be reached from here, or not with the credentials that there are here; then that is found out where
    the code is fetched.
    """
    if shutil.which("git") is None:
        return None
    until = time.monotonic() + _ASK_SECONDS

    def patient(_line: str) -> bool:
        if time.monotonic() > until:
            raise TimeoutError
        return False

    env, options = _environment(source, credentials)
    ref = source.ref
    wanted = ("HEAD",) if ref is None else (f"refs/heads/{ref}", f"refs/tags/{ref}^{{}}", f"refs/tags/{ref}", ref)
    names = dict.fromkeys((*wanted, "HEAD"))
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = run(
                [*_command(*options), "ls-remote", "--", source.url, *names], Path(folder), env, on_line=patient
            )
        except TimeoutError:
            return None
    if result.code:
        return None
    found = {name: commit for commit, _, name in (line.partition("\t") for line in result.output.decode().splitlines())}
    commit = next((found[name] for name in wanted if name in found), None)
    if commit is None and not _COMMIT.fullmatch(ref or ""):
        shown = printable(source.url)
        what = "default branch" if ref is None else f"branch, tag or commit {ref!r}"
        raise UserError(f"{shown} has no {what}; check the part after '@'")
    return commit or (ref if ref is not None and len(ref) in (40, 64) else None)


class _Repository:
    """A repository that is fetched from a source into a folder."""

    def __init__(self, source: Source, folder: Path, progress: OnProgress, credentials: Mapping[str, str]) -> None:
        self.source = source
        self.commit = ""
        self._folder = folder
        self._progress = progress
        self._state: tuple[str, int, int | None] = ("connecting", 0, None)
        self._credentials = credentials
        self._env, self._options = _environment(source, credentials)

    def fetch(self) -> None:
        full, width = self._find()
        self._must(self._git("init", "--quiet", "--template=", *(("--object-format=sha256",) if width == 64 else ())))
        self._must(self._git("remote", "add", "--", "origin", self.source.url))
        self.commit = self._fetch_ref(full) if full else self._fetch_commit(self.source.ref or "")
        self._must(self._git("checkout", "--progress", "--detach", "--force", self.commit), "check out the files")
        if (self._folder / ".gitmodules").exists():
            self._fetch_submodules()

    def _find(self) -> tuple[str | None, int]:
        """The full name of the ref, None if it can only be a commit; and the length of the repository's ids."""
        ref = self.source.ref
        wanted = ("HEAD",) if ref is None else (f"refs/heads/{ref}", f"refs/tags/{ref}", ref)
        result = self._git("ls-remote", "--", self.source.url, *{*wanted, "HEAD"})
        if result.code:
            raise UserError(self._why(result, "read"))
        lines = [line.partition("\t") for line in os.fsdecode(result.output).split("\n") if line]
        names = {name for _, _, name in lines}
        width = len(lines[0][0]) if lines else len(ref or "")
        for name in wanted:
            if name in names:
                return name, width
        if ref is None:
            raise UserError(f"{self._shown} has no default branch; add a branch or commit: URL@REF")
        if not _COMMIT.fullmatch(ref):
            raise UserError(self._no_such_ref())
        return None, width

    def _fetch_ref(self, name: str) -> str:
        self._first_that_works(("--depth=1", f"+{name}:{_FETCHED}"), (f"+{name}:{_FETCHED}",))
        return self._parse(_FETCHED) or ""

    def _fetch_commit(self, commit: str) -> str:
        """Fetch a commit; if the server gives none by its id, or the id is abbreviated, fetch the whole history."""
        whole = ("+refs/heads/*:refs/remotes/origin/*", "+refs/tags/*:refs/tags/*")
        if len(commit) in (40, 64):
            self._first_that_works(("--depth=1", f"+{commit}:{_FETCHED}"), whole)
        else:
            self._first_that_works(whole)
        found = self._parse(commit)
        if found is None:
            raise UserError(self._no_such_ref())
        return found

    def _first_that_works(self, *ways: tuple[str, ...]) -> None:
        for way in ways:
            options, refspecs = [w for w in way if w.startswith("--")], [w for w in way if not w.startswith("--")]
            result = self._git("fetch", "--progress", "--no-tags", *options, "--", "origin", *refspecs)
            if result.code == 0:
                return
            if reason(result.text):
                break
        raise UserError(self._why(result, "fetch"))

    def _fetch_submodules(self) -> None:
        update = ("submodule", "update", "--init", "--recursive", "--checkout", "--progress")
        result = self._git(*update, "--depth=1")
        if result.code and not reason(result.text):  # some servers give no commit by its id
            self._git("submodule", "deinit", "--force", "--all")
            shutil.rmtree(self._folder / ".git" / "modules", ignore_errors=True)
            result = self._git(*update)
        if result.code:
            raise UserError(self._why(result, "fetch a submodule of"))

    def _parse(self, name: str) -> str | None:
        result = self._git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        return result.output.decode().strip() if result.code == 0 else None

    def _no_such_ref(self) -> str:
        result = self._git("ls-remote", "--heads", "--tags", "--refs", "--", self.source.url)
        names = [re.sub(r"^\S+\trefs/\w+/", "", line) for line in os.fsdecode(result.output).splitlines()]
        close = difflib.get_close_matches(self.source.ref or "", names, n=1, cutoff=0.5)
        hint = f"did you mean {printable(close[0])}?" if close else "check the part after '@'"
        return f"{self._shown} has no branch, tag or commit {self.source.ref!r}; {hint}"

    # -- running git ---------------------------------------------------------------------------------------------------

    @property
    def _shown(self) -> str:
        return printable(self.source.url)

    def _git(self, *args: str) -> Result:
        return run([*_command(*self._options), *args], self._folder, self._env, on_line=self._on_line)

    def _on_line(self, line: str) -> bool:
        match = _PROGRESS.match(line)
        if match is not None:
            self._state = (match[1].lower(), int(match[2]), int(match[3]))
        self._progress(*self._state)
        return match is not None

    def _must(self, result: Result, what: str = "begin") -> None:
        if result.code:
            raise UserError(self._why(result, what))

    def _why(self, result: Result, what: str) -> str:
        """Why git failed, in one line without secrets."""
        text = result.text.replace(self.source.url.lower(), "")
        return f"cannot {what} {self._shown}: " + (
            self._access_refused(text) or reason(text) or _missing(text) or self._redact(result.last)
        )

    def _access_refused(self, text: str) -> str | None:
        if re.search(r"dubious ownership", text):
            return f"it belongs to another user; run git config --global --add safe.directory {self._shown}"
        if re.search(r"permission denied \([a-z]|permission denied, please", text):
            return "its host refused the ssh key; add your key there, and to ssh-agent if it has a passphrase"
        if not re.search(r"authentication failed|could not read (username|password)|error: 40[13]|access denied", text):
            return None
        missing = [n for n in ("GIT_SYNC_USERNAME", "GIT_SYNC_PASSWORD") if not self._credentials.get(n)]
        if len(missing) == 2 or self.source.origin is None:
            return (
                "authentication failed; set GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD, or check the address: many hosts "
                "ask for a password where there is no such repository"
            )
        if "GIT_SYNC_PASSWORD" in missing:
            return "authentication failed; GIT_SYNC_USERNAME is set, set GIT_SYNC_PASSWORD too"
        return "authentication failed; check GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD, and the permissions of that user"

    def _redact(self, text: str) -> str:
        password = self._env.get("GIT_SYNC_PASSWORD")
        return text.replace(password, "…") if password else text


def _missing(text: str) -> str | None:
    if re.search(
        r"not found|does not exist|does not appear to be a git repository|error: 404|not a git repository|"
        r"no such file or directory",
        text,
    ):
        return "no such repository, or it is private; check the address"
    return None


def _command(*options: str) -> list[str]:
    return ["git", *(part for option in (*_SAFE, *options) for part in ("-c", option))]


def clean_environment() -> dict[str, str]:
    """The user's environment without variables that redirect git, trace it, or contain a password."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or _KEPT.match(k)}
    return {**env, "LC_ALL": "C", "LANGUAGE": "", "GIT_TERMINAL_PROMPT": "0"}


def _environment(source: Source, credentials: Mapping[str, str]) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Environment and options with which git reaches a repository, by known transports only."""
    env = clean_environment()
    env["GIT_ALLOW_PROTOCOL"] = "https:http:ssh:git" + (":file" if source.is_local else "")
    user, password = (credentials.get(f"GIT_SYNC_{name}", "").rstrip("\r\n") for name in ("USERNAME", "PASSWORD"))
    if source.origin is None or not password:
        return env, ()
    if CONTROL.search(user + password):
        raise UserError("GIT_SYNC_USERNAME or GIT_SYNC_PASSWORD holds a line break or control character; set it again")
    env.update(GIT_SYNC_USERNAME=user or source.user or "git", GIT_SYNC_PASSWORD=password, GIT_ASKPASS="")
    # The first option removes the user's own helpers for this host: one of them might write the password to disk.
    return env, (f"credential.{source.origin}.helper=", f"credential.{source.origin}.helper={_HELPER}")


def _count(folder: Path) -> tuple[int, int]:
    """The number of files in a folder and their total size, without git's own files."""
    files = size = 0
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != ".git"]
        for name in names:
            if name != ".git":
                files += 1
                size += os.lstat(os.path.join(parent, name)).st_size
    return files, size


# -- what git knows of a folder ----------------------------------------------------------------------------------------


def list_files(folder: str, matters: Callable[[str], bool]) -> list[str] | None:
    """Files in a folder that git tracks, or would track if they were added; None outside a repository or without git.

    A path that is a folder is a repository in it. A folder that cannot be read is refused if it matters.
    """
    if shutil.which("git") is None:
        return None
    command = [*_command(), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(
        command, check=False, cwd=folder, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True
    )
    text = os.fsdecode(result.stderr)
    if "not a git repository" in text or "must be run in a work tree" in text:
        return None
    if "dubious ownership" in text:
        raise UserError(
            f"git does not read {printable(folder)}, which belongs to another user; run "
            f"git config --global --add safe.directory with the repository's folder"
        )
    for name in re.findall(r"^warning: could not open directory '(.*)/': ", text, re.MULTILINE):
        if matters(name):
            raise UserError(
                f"cannot read {printable(os.path.join(folder, name))}; check its permissions, "
                "or name it in .pacelineignore"
            )
    if result.returncode:
        last = (text.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        raise UserError(f"git cannot list {printable(folder)}: {printable(last)}; see git status there")
    # One with conflicts comes several times: git can leave these out from 2.31 on.
    return list(dict.fromkeys(os.fsdecode(name) for name in result.stdout.split(b"\0") if name))
