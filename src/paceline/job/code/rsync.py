"""Code from a folder by rsync, on this machine or on a host over ssh."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.job.errors import UserError

from .git import clean_environment
from .ignore import FILE, Ignore
from .snapshot import Listing, existing_folder
from .transfer import Result, printable, reason, require, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.contract.records import CodeRecord

    from .transfer import OnProgress

_REMOTE = re.compile(r"(?:(?P<user>[^@:/-][^@:/]*)@)?(?P<host>(?!-)[\w.-]+|\[[0-9A-Fa-f:.]+\]):(?P<path>.*)", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PERCENT = re.compile(r"[\d,.]+\s+(\d+)%")
# As -a, without devices and sockets; arguments go to the other side without a shell there reading them.
_OPTIONS = ("-rlptgo", "--secluded-args", "--no-inc-recursive", "--info=progress2")


def check(source: str) -> None:
    """Refuse a source that is malformed, or would be read as an option by rsync or ssh."""
    if re.match(r"[\w+.-]+://", source):
        raise UserError(f"--sync-source {printable(source)} is a URL; rsync goes by ssh: write USER@HOST:FOLDER")
    if re.match(r"[^/:]*::", source):
        raise UserError(f"--sync-source {printable(source)} names an rsync daemon; write USER@HOST:FOLDER, by ssh")
    if source.startswith("-"):
        raise UserError(f"--sync-source may not be an option; for a folder of this name write ./{printable(source)}")
    head = source.partition("/")[0]
    if ":" in head and (not _REMOTE.fullmatch(source) or _CONTROL.search(source)):
        raise UserError(f"--sync-source {source!r} names no valid user, host and folder; write USER@HOST:FOLDER")


def find(source: str, folder: Path) -> Path | None:
    """The folder on this machine that is to be copied, None for one on another machine."""
    check(source)
    if ":" in source.partition("/")[0] and not os.path.exists(folder / source):
        return None
    return existing_folder(source, folder)


def fetch(
    source: str, folder: Path, destination: Path, progress: OnProgress, warn: Callable[[str], None]
) -> CodeRecord:
    """Copy all of a folder but `.git`, `__pycache__`, what its .pacelineignore names and what paceline made there."""
    require("rsync")
    root = find(source, folder)
    if root is None:
        origin = source.rstrip("/") + ("" if source.endswith(":") else "/")
        _copy_remote(origin, destination, progress)
    else:
        origin = str(root)
        listing = Listing(root, progress)
        listing.add_everything("")
        listing.warn_if_huge(warn)
        names = [*listing.folders, *listing.files]
        given = b"".join(os.fsencode(f"./{name}\0") for name in names)
        options = ("--no-recursive", "--dirs", "--files-from=-", "--from0")
        _rsync(options, f"{origin}/", destination, progress, given)
        destination.chmod(stat.S_IMODE(root.stat().st_mode) & 0o777 | 0o700)
    sizes = [
        os.lstat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(destination) for name in names
    ]
    return {"source": origin, "files": len(sizes), "bytes": sum(sizes)}


def _copy_remote(origin: str, destination: Path, progress: OnProgress) -> None:
    """Ask for the folder's .pacelineignore first, so that what it names need not come here."""
    only_this = (f"--filter=+ /{FILE}", "--filter=- *")
    _rsync(only_this, origin, destination, progress)
    rules = ["- .git", "- __pycache__", *Ignore.of_folder(destination).rsync_rules()]
    _rsync(tuple(f"--filter={rule}" for rule in rules), origin, destination, progress)


def _rsync(options: tuple[str, ...], origin: str, destination: Path, progress: OnProgress, given: bytes = b"") -> None:
    percent = 0

    def on_output(line: str) -> bool:
        nonlocal percent
        match = _PERCENT.match(line)
        percent = int(match[1]) if match else percent
        progress("copying files", percent, 100)
        return True

    argv = ["rsync", *_OPTIONS, *options, "--", origin, f"{destination}/"]
    result = run(argv, destination, clean_environment(), on_output=on_output, given=given)
    if result.code:
        raise UserError(f"cannot copy {printable(origin)}: {_why(result)}")


def _why(result: Result) -> str:
    """Why rsync could not, in one line."""
    text = result.text
    messages = "\n".join(result.messages)
    unreadable = re.search(
        r'^rsync: .*?"(.+?)"(?: \(in .*\))?(?: failed)?: Permission denied \(\d', messages, re.MULTILINE
    )
    if unreadable:
        return f"{printable(unreadable[1])} cannot be read; check its permissions, or name it in .pacelineignore"
    if re.search(r"permission denied \([a-z]|permission denied, please", text):
        return "its host refused the ssh key; add yours there, and to ssh-agent if it has a passphrase"
    if re.search(r"vanished|no such file or directory", text):
        found = [line for line in result.messages if re.search("vanished|No such file", line)]
        return f"{printable(found[0].removeprefix('rsync: '))}; check the path, and stop what removes files there"
    if "command not found" in text:
        return "rsync is not installed on its host; install it there"
    return reason(text) or result.last
