"""What a user writes for a git repository: URL[@REF], USER@HOST:PATH[@REF] or a path, and what is refused of it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from paceline.job.errors import UserError, nearest

from .transfer import printable

_SCHEMES = ("https", "http", "ssh", "git", "file")
_HOST = re.compile(r"(?!-)[\w.-]+|\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]")
_SCP = re.compile(r"(?:(?P<user>[^@:/]*)@)?(?P<host>\[[^\]/]*\]|[^@:/]*):(?P<path>.*)", re.DOTALL)
_TOKEN = re.compile(r"(gh[a-z]_|github_pat_|glpat-|hf_).*|[A-Za-z0-9_-]{20,}")
_BAD_REF = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|^[./+-]|[./]$|\.lock(/|$)|^@$")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True)
class Source:
    """A repository and a ref."""

    url: str  # for git; it contains no password
    ref: str | None  # branch, tag or commit; None for the default branch
    origin: str | None = None  # scheme, host and port for which credentials are meant; None where git takes none
    user: str | None = None  # the user name in the URL
    is_local: bool = False  # whether it is a path on this machine


def check(source: str) -> None:
    """Refuse a source that is malformed, holds a password, or would be read as an option or a command by git."""
    _remote(source)


def resolve(source: str, folder: Path) -> Source:
    """Split a source into repository and ref; a local repository must exist. See `check`."""
    remote = _remote(source)
    path, is_url = os.path.expanduser(source), False
    if re.match(r"file://", source, re.IGNORECASE):
        path, is_url = source[7:].removeprefix("localhost"), True
    ends = [len(path), *(m.start() for m in reversed(list(re.finditer("@", path))))]
    for end in ends:
        candidate = folder / (unquote(path[:end]) if is_url else path[:end])
        if path[:end] and os.path.exists(candidate):
            ref = _valid_ref(path[end + 1 :], source) if end < len(path) else None
            return Source(str(candidate), ref, is_local=True)
    if remote is not None:
        return remote
    hint = "check the path"
    if re.match(r"[\w-]+(\.[\w-]+)+/", source):
        hint = f"for one on a host write https://{printable(source)}"
    raise UserError(f"no git repository at {printable(folder / path)}; {hint}")


def _remote(source: str) -> Source | None:
    """A repository on a host, or None where it is a path on this machine."""
    helper = re.match(r"([\w+.-]*)::", source)
    if helper or source.startswith("-"):
        what = f"the git transport {helper[0]}" if helper else "an option"
        raise UserError(f"--sync-source may not be {what}; write https://HOST/PATH[@REF], USER@HOST:PATH or a path")
    if "://" in source:
        return _of_url(source)
    colon, slash = source.find(":"), source.find("/")
    if colon < 0 or 0 <= slash < colon:
        return None
    match = _SCP.fullmatch(source)
    if match is None:
        raise UserError(
            f"--sync-source {printable(source)} is not the address of a repository; write USER@HOST:PATH[@REF]"
        )
    path, ref = _split_ref(match["path"], source)
    _valid_host(match["host"], match["user"], path, source)
    return Source(f"{match['user']}@{match['host']}:{path}" if match["user"] else f"{match['host']}:{path}", ref)


def _of_url(source: str) -> Source | None:
    scheme, _, rest = source.partition("://")
    if scheme.lower() not in _SCHEMES:
        known = scheme.lower().removeprefix("git+").removesuffix("+git")
        hint = f"did you mean {known}://?" if known in _SCHEMES else nearest(scheme, _SCHEMES)
        raise UserError(f"--sync-source has the unknown scheme {printable(scheme)}://; {hint}")
    scheme = scheme.lower()
    authority, slash, path = rest.partition("/")
    if scheme == "file":
        if authority not in ("", "localhost"):
            raise UserError(f"file:// names no host, but {printable(authority)} is there; write file:///PATH")
        return None
    user, at, host = authority.rpartition("@")
    if ":" in user or (scheme in ("http", "https") and _TOKEN.fullmatch(user)):
        raise UserError(
            "--sync-source holds a password, which would be kept with the job; take it out of the URL and set "
            "GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD"
        )
    host, _, port = host.rpartition(":") if re.search(r":\d*$", host) else (host, "", "")
    path, ref = _split_ref(path, source)
    _valid_host(host, unquote(user) if at else None, path, source)
    if scheme in ("http", "https") and re.search(r"[?#]", path):
        raise UserError("--sync-source has a '?' or '#' in its path; write URL@REF, with %3F or %23 for these")
    origin = f"{scheme}://{host}" + (f":{port}" if port else "")
    shown = f"{scheme}://{user}{at}{host}" + (f":{port}" if port else "") + slash + path
    web = scheme in ("http", "https")
    return Source(shown, ref, origin if web else None, unquote(user) or None)


def _split_ref(path: str, source: str) -> tuple[str, str | None]:
    """Split a path at the first '@' that does not begin a part of it, as in `/@group/project`."""
    match = re.search(r"(?<!/)(?<!^)@", path)
    if match is None:
        return path, None
    return path[: match.start()], _valid_ref(path[match.end() :], source)


def _valid_ref(ref: str, source: str) -> str:
    if not ref:
        raise UserError(f"--sync-source {printable(source)} ends in '@'; write a branch, tag or commit behind it")
    if _BAD_REF.search(ref):
        raise UserError(f"--sync-source: {ref!r} cannot be a branch, tag or commit; check what follows the '@'")
    return ref


def _valid_host(host: str, user: str | None, path: str, source: str) -> None:
    if not _HOST.fullmatch(host) or (user is not None and (not user or user.startswith("-") or CONTROL.search(user))):
        raise UserError(
            f"--sync-source {source!r} names no valid user and host; write https://HOST/PATH or USER@HOST:PATH"
        )
    if not path.strip("/") or path.startswith("-") or CONTROL.search(path):
        raise UserError(f"--sync-source {source!r} names no valid path on {host}; write it behind the host")
