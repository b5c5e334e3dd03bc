"""Environments of Python that are built on this machine for jobs: folders below paceline's own, named by their content.

`<root>/environments/<digest>-<python>-<platform>/` is a virtual environment. It is one as soon as it has the file
`environment.json`, which is written last; without that file it is half of one, and the next build removes it. Beside it
are `<name>.lock`, which a build holds, and `<name>.log`, which has all that the builder has printed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from paceline.node.errors import Refused
from paceline.node.files import is_disk_full, list_names, read_json, write_json

from .building import pause, said_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.contract.facts import BuiltEnvironment, EnvironmentEntry, EnvironmentFacts
    from paceline.contract.messages import BuildEnvironment, Built, Says

RECORD = "environment.json"  # in the folder of an environment
_INDEX = "https://pypi.org/simple"
_SECONDS = 4.0  # for an index to be reached
_MINORS = range(9, 30)  # of Python 3 that are looked for
_PIP_FILES = ("/etc/pip.conf", "/etc/xdg/pip/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")
_BUILD_SECONDS = 24 * 3600.0  # that a build takes at most
_SAID = re.compile(r"^(ERROR|error|Error|hint|cause|Caused by)?\W*")  # what pip and uv begin lines with
# Lines of pip, also those that name what the error before is about, and of uv.
_ERROR = re.compile(r"ERROR|error|Could not fetch|\S+ \(?from |hint|cause|Caused by|\xd7|\u2570")
PIP_LOG = "pip.log"
_NOT_FETCHED = re.compile(r"Could not fetch URL (\S+): ((\d+)?.*?)(?: for url: .*| - skipping)?$")
_CONSTRAINT = re.compile(r"-c (?!\S+://)")
# What would make builders install elsewhere, or find there what they then do not install; empty ones count as none,
# also where files of pip's set them.
_HERE = {"PIP_USER": "0", "PIP_TARGET": "", "PIP_PREFIX": "", "PIP_ROOT": "", "PIP_PYTHON": ""}
_ELSEWHERE = frozenset({"PYTHONPATH", "PYTHONHOME", "PIP_DRY_RUN", "UV_SYSTEM_PYTHON", "UV_PYTHON"})
# Settings of pip, with uv's variables for the same, and pip's.
_BOTH = (
    ("index-url", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"),
    ("extra-index-url", "UV_INDEX", "UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL"),
    ("find-links", "UV_FIND_LINKS", "PIP_FIND_LINKS"),
)
_TOLD = 3  # lines of the builder in a message
_CONDA = ("micromamba", "mamba", "conda")


def folder(root: Path) -> Path:
    """Where the environments of a machine are."""
    return root / "environments"


def look(root: Path, digest: str, index: str | None) -> EnvironmentFacts:
    """What this machine has for an environment: interpreters, builders, and the environment itself if it is there.

    `index` is where packages come from if the client says so; it is tried unless the environment is there already.
    """
    import platform

    pythons = _pythons()
    built = {path: record for path, minor in pythons if (record := _record(folder(root) / _name(digest, minor)))}
    if not built:
        pythons = [pythons[0], *(it for it in pythons[1:] if _runs(it[0]))]
    place = next(it for it in (folder(root), *folder(root).parents) if it.exists())
    space = os.statvfs(place)
    return {
        "pythons": pythons, "built": built, "platform": {**platform_here(), "version": platform.python_version()},
        "uv": _program("uv"), "conda": next(filter(None, map(_program, _CONDA)), None),
        "free": space.f_bavail * space.f_frsize, "is_noexec": bool(space.f_flag & os.ST_NOEXEC), "place": str(place),
        "has_index": None if built else _has_index(index), "now": time.time(),
    }  # fmt: skip


def build(root: Path, request: BuildEnvironment, files: Path) -> Iterator[Says | Built]:
    """Build an environment, unless it is there; yields what happens, and at last the record of it.

    Args:
        root: below which environments are.
        request: what it is made of.
        files: a folder with what came along: `wheels/`, `pip.whl`, perhaps `uv`.
    """
    path = folder(root) / _name(request["digest"], request["minor"])
    if record := _record(path):
        yield {"built": record}
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path.with_name(f"{path.name}.lock"), "a") as lock:
        yield from _locked(lock.fileno())
        if record := _record(path):
            yield {"built": record}
            return
        begin = time.monotonic()
        shutil.rmtree(path, ignore_errors=True)
        try:
            with open(path.with_name(f"{path.name}.log"), "wb+") as log:
                for command in _commands(path, request, files):
                    yield from _ran(command, log, request, files)
            record = {
                "digest": request["digest"], "source": request["source"], "minor": request["minor"],
                "seconds": round(time.monotonic() - begin, 1), "bytes": _size(path), "packages": _packages(path),
                "built": time.time(),
            }  # fmt: skip
            write_json(path / RECORD, record, durably=True)
            record["python"] = str(path / "bin/python")
        except BaseException as error:
            is_full = is_disk_full(path.parent) or os.strerror(errno.ENOSPC) in str(error)
            shutil.rmtree(path, ignore_errors=True)
            if is_full:
                raise Refused(
                    f"environment {request['source']}: no space is left in {path.parent}; make room there, for example "
                    f"with paceline prune --environments, or choose another root"
                ) from None
            raise
    yield {"built": record}


def hold(python: str) -> int | None:
    """Keep an environment from being pruned as long as this process lives; None if the interpreter is of none."""
    place = Path(python).parents[1] if python.endswith("/bin/python") else None
    if place is None or not (place / RECORD).exists():
        return None
    lock = os.open(place.with_name(f"{place.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # it is being pruned, or the file system has no locks
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return lock


def is_built(root: Path, python: str) -> bool:
    """Whether an interpreter is that of an environment of this machine."""
    with contextlib.suppress(OSError):
        return python.endswith("/bin/python") and os.path.samefile(Path(python).parents[2], folder(root))
    return False


def packages_of(python: str) -> dict[str, str]:
    """The distributions of the environment of an interpreter; empty if it is of none."""
    record = read_json(Path(python).parents[1] / RECORD) if python.endswith("/bin/python") else None
    packages: dict[str, str] = (record or {}).get("packages", {})
    return packages


def minor_of(python: str) -> str | None:
    """The version of Python of the environment of an interpreter; None if it is of none."""
    record = read_json(Path(python).parents[1] / RECORD) if python.endswith("/bin/python") else None
    return (record or {}).get("minor")


def activate(root: Path) -> None:
    """Have what this process starts find the programs of its environment, if it runs in one of these."""
    if is_built(root, sys.executable) and "VIRTUAL_ENV" not in os.environ:
        os.environ.update(variables(sys.executable, os.environ.get("PATH", os.defpath)))


def variables(python: str, path: str) -> dict[str, str]:
    """What `activate` of a virtual environment sets, for the interpreter of one."""
    place = os.path.dirname(python)
    return {"VIRTUAL_ENV": os.path.dirname(place), "PATH": os.pathsep.join([place, path])}


def listed(root: Path) -> list[EnvironmentEntry]:
    """The environments of this machine, half ones too: `name`, `source`, `bytes`, `used` (seconds since the epoch)."""
    found: list[EnvironmentEntry] = []
    for name in list_names(folder(root)):
        path = folder(root) / name
        # What came along for a build lies here as long as that runs; a killed one leaves it.
        is_new = name.startswith(".") and time.time() - path.stat().st_mtime < _BUILD_SECONDS
        if path.is_dir() and not is_new:
            record = read_json(path / RECORD) or {}
            size = record.get("bytes") or _size(path)
            found.append({"name": name, "source": record.get("source"), "bytes": size, "used": path.stat().st_mtime})
    return found


def prune(root: Path, names: Sequence[str]) -> list[str]:
    """Remove environments, but none that is being built or that a job uses; returns the names of those removed."""
    gone = []
    for name in names:
        path = folder(root) / os.path.basename(name)
        with open(path.with_name(f"{path.name}.lock"), "a") as lock:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            with contextlib.suppress(FileNotFoundError):
                (path / RECORD).unlink()  # from now on nobody takes it for a whole one
            shutil.rmtree(path, ignore_errors=True)
            # The lock stays, it is empty: another process may wait for it.
            path.with_name(f"{path.name}.log").unlink(missing_ok=True)
            gone.append(name)
    return gone


def _name(digest: str, minor: str) -> str:
    here = platform_here()
    return f"{digest}-py{minor}-{here['machine']}-{here['libc']}"


def _record(path: Path) -> BuiltEnvironment | None:
    """The record of an environment that is whole; it counts as used now."""
    record, python = read_json(path / RECORD), str(path / "bin/python")
    if record is None or not {"seconds", "bytes", "packages"} <= record.keys() or not os.access(python, os.X_OK):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return cast("BuiltEnvironment", {**record, "python": python})


def platform_here() -> dict[str, str]:
    """The machine as wheels name it."""
    import platform  # agents do not need it

    libc, version = platform.libc_ver()
    if libc != "glibc":
        return {"machine": platform.machine(), "libc": "musl", "libc_version": ""}
    return {"machine": platform.machine(), "libc": "glibc", "libc_version": version}


def _pythons() -> list[tuple[str, str]]:
    """The interpreters here with their versions, this one first."""
    found = {f"3.{sys.version_info[1]}": getattr(sys, "_base_executable", None) or sys.executable}
    for number in _MINORS:
        path = _program(f"python3.{number}")
        if path is not None:
            found.setdefault(f"3.{number}", path)
    return [(path, minor) for minor, path in found.items()]


def _runs(python: str) -> bool:
    """Whether an interpreter runs: pyenv has commands for versions that are not chosen, which fail."""
    try:
        return not subprocess.run(
            [python, "-I", "-S", "-c", ""], capture_output=True, stdin=subprocess.DEVNULL, timeout=_SECONDS, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def _program(name: str) -> str | None:
    places = (
        os.environ.get("PATH", os.defpath),
        os.path.expanduser("~/.local/bin"),
        os.path.expanduser("~/.cargo/bin"),
    )
    return shutil.which(name, path=os.pathsep.join(places))


def _has_index(index: str | None) -> bool:
    """Whether a connection to the index can be made; what it answers is the builder's concern."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    url = urlsplit(index or _configured("index-url") or _INDEX)
    if url.scheme not in ("http", "https") or getproxies().get(url.scheme):
        return True
    try:
        address = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection(address, _SECONDS).close()
    except OSError:
        return False
    return True


def _configured(setting: str) -> str | None:
    """A setting of pip here, as its variables and files have it."""
    import configparser

    given = os.environ.get(f"PIP_{setting.upper().replace('-', '_')}")
    files = [*map(os.path.expanduser, _PIP_FILES), os.environ.get("PIP_CONFIG_FILE", "")]
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    with contextlib.suppress(configparser.Error, UnicodeDecodeError):
        parser.read(files)
    for section in ("install", "global"):
        given = given or parser.get(section, setting, fallback=None)
    return given


def _variables(given: Mapping[str, str], *, is_uv: bool) -> dict[str, str]:
    """The variables of a builder: indexes as the client names them, else as this machine's pip or uv is set up."""
    found = {name: value for name, value in {**os.environ, **given}.items() if name not in _ELSEWHERE}
    found.update(_HERE)
    for setting, own, *others in _BOTH:
        names = (own, *others) if is_uv else (*reversed(others), own)
        told = (source[name] for source in (given, os.environ) for name in names if source.get(name))
        value = next(told, None) or _configured(setting)
        if value and is_uv:
            found[own] = ",".join(value.split()) if setting == "find-links" else " ".join(value.split())
        elif value:
            found[others[-1]] = re.sub(r"(^|\s)\w+=", r"\1", value)
    if is_uv:
        found.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")  # all indexes are one, as for pip
        if certificates := _configured("cert"):
            found.setdefault("SSL_CERT_FILE", certificates)
    return found


def _locked(lock: int) -> Iterator[Says]:
    """Wait for another build of the same environment to end."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            yield {"says": "waits for another build of it"}
            pause(None)


def _commands(path: Path, request: BuildEnvironment, files: Path) -> Iterator[list[str]]:
    """The commands that build an environment, one after the other."""
    text = "".join(f"{line}\n" for line in request["lines"])
    if request["conda"]:
        wanted = files / "environment.yml"
        wanted.write_text(text)
        is_micro = os.path.basename(request["conda"]) == "micromamba"
        verb = ["create"] if is_micro else ["env", "create"]
        yield [request["conda"], *verb, "--yes", "--quiet", "--prefix", str(path), "--file", str(wanted)]
        return
    yield [request["python"], "-m", "venv", "--without-pip", str(path)]
    lines = request["lines"]
    python, uv, wheels = str(path / "bin/python"), files / "uv", files / "wheels"
    found = str(uv) if uv.exists() else _program("uv")
    options = ["--no-index"] if request["is_closed"] else []
    options += ["--no-deps"] if request["is_complete"] else []
    options += ["--find-links", str(wheels)] if wheels.is_dir() else []
    if not text:
        return
    if found is not None:
        if uv.exists():
            uv.chmod(0o700)
        options += ["--no-index"] if _configured("no-index") not in (None, "", "0", "false", "no", "off") else []
        yield [found, "pip", "install", "--python", python, *options, *write_requirements(lines, files)]
    else:
        quiet = ["--disable-pip-version-check", "--no-input", "--no-warn-script-location", "--progress-bar", "off"]
        for batch in batches(lines):
            asked = write_requirements(batch, files)
            log = ["--log", str(files / PIP_LOG)]
            yield [python, str(files / "pip.whl" / "pip"), "install", *quiet, *log, *options, *asked]


def batches(lines: Sequence[str]) -> list[list[str]]:
    """Lines that pip can have at once: repositories have no hashes, and if one line has some pip wants them of all."""
    options = [line for line in lines if line.startswith("-")]
    hashed = [line for line in lines if "--hash" in line and line not in options]
    others = [line for line in lines if line not in hashed and line not in options]
    if not hashed or not all("@ git+" in line for line in others):
        return [list(lines)]
    return [[*options, *batch] for batch in (hashed, others) if batch]


def write_requirements(lines: Sequence[str], folder: Path) -> list[str]:
    """Write the files that pip and uv read; returns their options. Lines `-c first==1.0` become constraints."""
    words = []
    for name, option in (("requirements", "-r"), ("constraints", "-c")):
        own = [line for line in lines if bool(_CONSTRAINT.match(line)) == (option == "-c")]
        if own:
            path = folder / f"{name}.txt"
            path.write_text("".join(f"{_CONSTRAINT.sub('', line)}\n" for line in own))
            words += [option, str(path)]
    return words


def _ran(command: list[str], log: IO[bytes], request: BuildEnvironment, files: Path) -> Iterator[Says]:
    """Run a command of a build; yields what it says."""
    # A pip that is killed leaves temporary files; they go with the others.
    env = {**_variables(request["index"], is_uv=command[1] == "pip"), "TMPDIR": str(files)}
    code, said = yield from said_by(command, env, log)
    if code:
        why = _why(command, code, said, refused_by_index(files / PIP_LOG))
        raise Refused(f"environment {request['source']}: {why}; all of it is in {log.name}")


def refused_by_index(log: Path) -> list[str]:
    """What indexes have answered instead of a list, as pip writes it to its log; on a terminal pip does not say it."""
    with contextlib.suppress(OSError):
        found = map(_NOT_FETCHED.search, log.read_text(errors="replace").splitlines())
        return list(dict.fromkeys(f"{it[1]} answers: {it[2]}" for it in found if it is not None and it[3] != "404"))
    return []


def _why(command: Sequence[str], code: int, said: str, refused: Sequence[str] = ()) -> str:
    """The last lines of a builder that has failed, in one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("WARNING")]
    errors = [line for line in lines if _ERROR.match(line)] or lines
    told = "; ".join([*refused[:2], *(_SAID.sub("", line) for line in errors[-_TOLD:])]) or f"exit code {code}"
    builder = "pip" if command[1].endswith("/pip") else os.path.basename(command[0])
    if code < 0:
        return f"{builder} was killed by signal {-code}{', perhaps for want of memory' * (code == -signal.SIGKILL)}"
    return f"{builder} failed: {told}"


def _size(path: Path) -> int:
    """The bytes below a folder."""
    total = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _packages(path: Path) -> dict[str, str]:
    """The distributions of an environment."""
    from importlib import metadata

    places = [str(it) for it in path.glob("lib/python*/site-packages")]
    found = metadata.distributions(path=places)
    return dict(sorted((it.metadata["Name"], it.version) for it in found))
