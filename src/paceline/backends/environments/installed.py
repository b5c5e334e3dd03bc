"""Exactly the distributions of an interpreter: by name and version, or as a wheel of its files where it has no name.

A distribution has no name if it was installed from a folder, a file or a repository, or has a local version (`+cpu`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from paceline.job.errors import UserError

from . import pip
from .environment import Environment, sources_folder

_OF_INSTALLERS = frozenset({"pip", "setuptools", "wheel", "paceline"})  # paceline comes along with each job
_ASK = "import json, sys; print(json.dumps([list(sys.version_info[:2]), [it for it in sys.path if it]]))"


def of(python: str, source: str, made: Path) -> Environment:
    """The distributions of an interpreter; their wheels go into the folder `made`."""
    minor, path = _asked(python, source)
    lines, wheels = [], []
    for name, found in sorted(_distributions(path).items()):
        wheel = None if _has_name(found) else _wheel(found, made, source)
        wheels += [] if wheel is None else [wheel]
        lines.append(f"{name}=={found.version}")
    requires = f"=={minor[0]}.{minor[1]}.*"
    return Environment(source, "requirements", "\n".join(lines), requires, tuple(wheels), is_complete=True)


def _asked(python: str, source: str) -> tuple[list[int], list[str]]:
    if python == sys.executable:
        return list(sys.version_info[:2]), [it for it in sys.path if it]
    try:
        said = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, check=True, stdin=subprocess.DEVNULL)
        minor, path = json.loads(said.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        raise UserError(f"--environment {source}: {python} does not run; make the virtual environment anew") from None
    return minor, path


def _distributions(path: list[str]) -> dict[str, metadata.Distribution]:
    """Name → distribution; of one name, the first on the path is the one that is imported."""
    found: dict[str, metadata.Distribution] = {}
    for each in metadata.distributions(path=path):
        name = str(each.metadata["Name"] or "").lower().replace("_", "-")
        if name and name not in _OF_INSTALLERS:
            found.setdefault(name, each)
    return found


def _direct_url(found: metadata.Distribution) -> dict[str, object]:
    try:
        read = json.loads(found.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def _has_name(found: metadata.Distribution) -> bool:
    return "+" not in found.version and not _direct_url(found)


def _wheel(found: metadata.Distribution, made: Path, source: str) -> Path:
    """A wheel of the files of a distribution."""
    url = _direct_url(found)
    info = url.get("dir_info")
    if isinstance(info, dict) and info.get("editable"):
        return pip.wheel_of(Path(unquote(str(url["url"]).removeprefix("file://"))), made, f"--environment {source}")
    own = [(path, at) for each in found.files or () if (path := PurePosixPath(str(each))) and _is_own(path)
           and (at := Path(os.fspath(each.locate()))).is_file()]  # fmt: skip
    name = found.metadata["Name"]
    file_name = f"{name.replace('-', '_')}-{found.version}-{_tag(found)}.whl"
    stats = [f"{path} {at} {(it := at.stat()).st_size} {it.st_mtime_ns}" for path, at in own]
    key = hashlib.sha256("\0".join([file_name, *stats]).encode()).hexdigest()[:16]
    kept = sources_folder() / "wheels" / key / file_name
    if not kept.exists():  # it takes seconds for large ones
        if not any(path.name == "RECORD" for path, _ in own):
            raise UserError(
                f"--environment {source}: {name} {found.version} has no list of its files; install it anew with pip"
            )
        new = made / file_name
        _write(new, own)
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = kept.with_name(f".{os.getpid()}.part")
        shutil.copyfile(new, part)
        part.replace(kept)
    return kept


def _is_own(path: PurePosixPath) -> bool:
    """Whether a file goes into a wheel; scripts are made anew from the entry points."""
    is_made = path.suffix == ".pyc" or path.name in ("INSTALLER", "REQUESTED", "direct_url.json")
    return path.parts[0] != ".." and not is_made


def _write(wheel: Path, own: list[tuple[PurePosixPath, Path]]) -> None:
    record, rows = "", []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for path, at in own:
            if path.name == "RECORD":
                record = str(path)
                continue
            file.write(at, str(path))
            rows.append(f"{path},sha256={_hash(at)},{at.stat().st_size}")
        file.writestr(record, "\n".join([*rows, f"{record},,", ""]))


def _tag(found: metadata.Distribution) -> str:
    """The tags of a distribution, as the name of its wheel has them."""
    lines = (found.read_text("WHEEL") or "").splitlines()
    tags = [line.partition(":")[2].strip().split("-") for line in lines if line.startswith("Tag:")]
    return "-".join(".".join(sorted(set(each))) for each in zip(*tags or [["py3", "none", "any"]], strict=True))


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while data := file.read(1 << 20):
            digest.update(data)
    return base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
