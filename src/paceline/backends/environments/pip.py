"""What pip does on this machine for others: make wheels of local projects, and collect wheels for a platform."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.job.errors import UserError

from .environment import sources_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_QUIET = ("--disable-pip-version-check", "--no-input", "--quiet")
_MANYLINUX = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # glibc 2.N → the older name
_EPOCH = "315532800"  # 1980, the first date of zip files: of one project, the same wheel each time
# Folders that hold no source wherever they are, and those of a build at the top alone: a package may be called so.
_NO_SOURCE = re.compile(r"__pycache__|.*\.egg-info|\..*|node_modules")
_BUILT = ("build", "dist")
_TOLD = 3  # lines of pip in a message


def archive(to: Path) -> None:
    """Write pip as one file, which a Python without pip can run: `python FILE/pip`."""
    package = importlib.util.find_spec("pip")
    if package is None or package.origin is None:
        bundled = _bundled()
        if bundled is None:
            raise UserError(f"pip is not installed for {sys.executable}; install it, or uv on the hosts")
        shutil.copyfile(bundled, to)
        return
    root = Path(package.origin).parent
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.suffix not in (".pyc", ".exe"):
                file.write(path, Path("pip", path.relative_to(root)))


def uv_for(platform: Mapping[str, str]) -> Path | None:
    """The uv of this machine, if it runs on that one too: it is one file."""
    from paceline.node.machine.environments import platform_here

    here = platform_here()
    if here["machine"] != platform["machine"] or "musl" in (here["libc"], platform["libc"]):
        return None
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    return None if found is None else Path(found)


def wheel_of(project: Path, to: Path, where: str) -> Path:
    """Make a wheel of a project of this machine, or take the one of its last state if no file has changed since."""
    own = sources_folder() / ".projects" / _digest(os.path.realpath(project))
    kept = own / _digest("\n".join(_state(project)))
    if (made := next(kept.glob("*.whl"), None)) is not None:
        return made
    folder = to / f"project-{len(list(to.iterdir()))}"
    _run(["wheel", "--no-deps", "--wheel-dir", str(folder), str(project)], where)
    made = next(folder.glob("*.whl"))
    # What a build leaves in the project is not part of its state; a change while it was built is seen the next time.
    with contextlib.suppress(OSError):  # it can be made again
        shutil.rmtree(own, ignore_errors=True)
        kept.mkdir(mode=0o700, parents=True)
        shutil.copyfile(made, kept / f".{made.name}")
        (kept / f".{made.name}").rename(kept / made.name)
    return made


def _state(project: Path) -> Iterator[str]:
    """What tells whether a project or an archive of one has changed: the Python, and each file that is not built."""
    yield f"{sys.version_info[:2]}"
    paths = [str(project)]
    for parent, folders, names in os.walk(project):
        left_out = _BUILT if parent == str(project) else ()
        folders[:] = sorted(it for it in folders if not _NO_SOURCE.fullmatch(it) and it not in left_out)
        paths += (os.path.join(parent, name) for name in sorted(names))
    for path in paths:
        with contextlib.suppress(OSError):
            found = os.stat(path)
            if not stat.S_ISDIR(found.st_mode):
                yield f"{path} {found.st_size} {found.st_mtime_ns}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def collect(
    lines: Sequence[str], minor: str, platform: Mapping[str, str], *, near: Path | None, is_complete: bool, to: Path,
    where: str,
) -> None:  # fmt: skip
    """Collect the wheels of requirements for a machine, also of what they need, from the indexes of this one."""
    from paceline.node.machine.environments import batches, write_requirements

    if _suits(minor, platform):
        words = ["wheel", "--wheel-dir", str(to)]
    else:
        platforms = [word for tag in tags(platform) for word in ("--platform", tag)]
        words = ["download", "--dest", str(to), *platforms, "--only-binary", ":all:", "--python-version", minor]
        words += ["--implementation", "cp"]
    words += ["--no-deps"] if is_complete else []
    words += [] if near is None else ["--find-links", str(near)]
    for batch in batches(lines):
        _run([*words, *write_requirements(batch, Path(tempfile.mkdtemp(dir=to)))], where)


def _suits(minor: str, platform: Mapping[str, str]) -> bool:
    """Whether what is built here runs there."""
    from paceline.node.machine.environments import platform_here

    here = platform_here()
    is_same = minor == f"3.{sys.version_info[1]}" and all(here[key] == platform[key] for key in ("machine", "libc"))
    return is_same and _glibc(here) <= _glibc(platform)


def _glibc(platform: Mapping[str, str]) -> int:
    return int(platform["libc_version"].partition(".")[2] or 0)


def tags(platform: Mapping[str, str]) -> list[str]:
    """The platform tags of a machine, the newest first. Source: PEP 600 and PEP 656."""
    machine = platform["machine"]
    if platform["libc"] == "musl":
        return [f"musllinux_1_{number}_{machine}" for number in (2, 1, 0)]
    found = []
    for number in range(_glibc(platform), 4, -1):
        found.append(f"manylinux_2_{number}_{machine}")
        if number in _MANYLINUX:
            found.append(f"{_MANYLINUX[number]}_{machine}")
    return found


def _run(words: Sequence[str], where: str) -> None:
    from paceline.node.machine.environments import PIP_LOG, refused_by_index

    with tempfile.TemporaryDirectory() as folder:
        log, extra = Path(folder, PIP_LOG), Path(folder, "extra.cfg")
        # In a project's own build folder setuptools would leave files, and take those of earlier builds into the wheel.
        extra.write_text(f"[build]\nbuild_base={folder}/build\n")
        command = [*_command(), words[0], *_QUIET, "--log", str(log), *words[1:]]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
                env={"SOURCE_DATE_EPOCH": _EPOCH, "DIST_EXTRA_CONFIG": str(extra), **os.environ},
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"{where}: cannot run pip: {error.strerror}") from None
        refused = refused_by_index(log)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        told = "; ".join([*refused[:2], *(line.removeprefix("ERROR: ").strip() for line in lines[-_TOLD:])])
        raise UserError(f"{where}: pip failed on this machine: {told or f'exit code {done.returncode}'}")


def _command() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    bundled = _bundled()
    if bundled is None:
        raise UserError(f"pip is not installed for {sys.executable}; install it")
    return [sys.executable, os.path.join(bundled, "pip")]


def _bundled() -> Path | None:
    """The pip that comes with Python."""
    found = importlib.util.find_spec("ensurepip")
    if found is None or found.origin is None:
        return None
    return next(Path(found.origin).parent.glob("_bundled/pip-*.whl"), None)
