"""Requirements files and what is read like one; each file that they name comes along."""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING

from paceline.job.errors import UserError

from . import pip
from .environment import Environment, decoded
from .locks import toml

if TYPE_CHECKING:
    from pathlib import Path

_INCLUDES = re.compile(r"(?:(?:-r|--requirement)|(?P<constraint>-c|--constraint))[ =]?\s*(?P<file>\S.*)")
_FOUND_AT = re.compile(r"(?:-f|--find-links)[ =]?\s*(?P<place>\S.*)")
_EDITABLE = re.compile(r"(?:-e|--editable)[ =]?\s*(?P<path>\S.*)")
_MOST_DEEP = 20


def of_file(source: str, path: Path, made: Path) -> Environment:
    """A requirements file with those that it includes; local projects become wheels."""
    reader = _Reader(source, made)
    reader.read(path, ())
    has_hashes = any("--hash" in line for line in reader.lines)
    lines = [line + _hashes(wheel) * has_hashes for line, wheel in reader.lines.items()]
    return Environment(
        source, "requirements", "\n".join(lines), "", tuple({wheel.name: wheel for wheel in reader.wheels}.values())
    )


def of_project(source: str, text: str) -> Environment:
    """The dependencies of a pyproject.toml."""
    project = toml(text, source).get("project")
    if not isinstance(project, dict) or "dependencies" in project.get("dynamic", ()):
        raise UserError(
            f"--environment {source}: it lists no dependencies below [project]; write a requirements file, or use "
            "--environment here"
        )
    lines = [_checked(str(line), source) for line in project.get("dependencies", [])]
    return Environment(source, "requirements", "\n".join(lines), str(project.get("requires-python", "")))


def of_wheels(source: str, wheels: tuple[Path, ...]) -> Environment:
    """A folder of wheels: one of each distribution is installed, that which suits a machine best."""
    names = sorted({wheel.name.partition("-")[0].replace("_", "-").lower() for wheel in wheels})
    return Environment(source, "requirements", "\n".join(names), "", wheels, is_closed=True)


class _Reader:
    """Reads requirements files.

    Attributes:
        lines: each with the wheel that it is about, if that comes along; those of constraints begin with `-c`.
        wheels: those that come along.
    """

    def __init__(self, source: str, made: Path) -> None:
        self.lines: dict[str, Path | None] = {}
        self.wheels: list[Path] = []
        self._source, self._made = source, made

    def read(self, path: Path, within: tuple[Path, ...], kind: str = "") -> None:
        """Read a file, and those that it includes; `kind` is what each of its lines begins with."""
        if path in within or len(within) > _MOST_DEEP:
            raise UserError(f"--environment {self._source}: {path} includes itself; remove that line")
        try:
            text = decoded(path.read_bytes())
        except (OSError, UnicodeDecodeError):
            raise UserError(f"--environment {self._source}: cannot read {path}; correct the path") from None
        joined = re.sub(r"\\\n", " ", text)
        for line in joined.splitlines():
            wanted = re.sub(r"(^|\s)#.*$", "", line).strip()
            if wanted:
                self._line(wanted, path, (*within, path), kind)

    def _line(self, line: str, path: Path, within: tuple[Path, ...], kind: str) -> None:
        at = path.parent
        if (found := _INCLUDES.fullmatch(line)) and "://" not in found["file"]:
            self.read(at / found["file"].strip("\"' "), within, "-c " if found["constraint"] else kind)
        elif (found := _FOUND_AT.fullmatch(line)) and (at / found["place"]).is_dir():
            self.wheels += sorted((at / found["place"]).glob("*.whl"))
        elif found := _EDITABLE.fullmatch(line):
            self._local(found["path"], at, line, kind)
        elif line.startswith("-"):
            self.lines[line] = None  # an option of pip, such as --index-url
        elif _is_local(line, at):
            self._local(line, at, line, kind)
        else:
            self.lines[kind + _checked(line, str(path))] = None

    def _local(self, text: str, at: Path, line: str, kind: str) -> None:
        """A project or a wheel of this machine."""
        if "://" in text and not text.startswith("file://"):
            self.lines[text] = None  # a repository, which needs not be editable there
            return
        text, bracket, extras = text.removeprefix("file://").partition("[")
        path = at / os.path.expanduser(text.strip())
        if not path.exists():
            raise UserError(f"--environment {self._source}: {line!r}: no such file or folder; correct the path")
        wheel = path if path.suffix == ".whl" else pip.wheel_of(path, self._made, f"--environment {self._source}")
        name, version = wheel.name.split("-")[:2]
        self.wheels.append(wheel)
        self.lines[f"{kind}{name}{bracket}{extras}=={version}"] = wheel


def _is_local(line: str, at: Path) -> bool:
    return line.startswith((".", "/", "~", "file:")) or (os.sep in line and "://" not in line and (at / line).exists())


def _hashes(wheel: Path | None) -> str:
    return "" if wheel is None else f" --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"


def _checked(line: str, where: str) -> str:
    """A requirement, if it is one."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(re.sub(r"\s--[a-z-]+[= ]\S+", "", line).strip())  # without the options of a line: hashes
    except InvalidRequirement as error:
        raise UserError(
            f"{where}: {line!r} is no requirement: {str(error).splitlines()[0]}; correct the line"
        ) from None
    return line
