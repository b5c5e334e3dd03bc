"""Environments of jobs on machines: found there, or built there on all at the same time, before anything starts.

A machine that has no index gets the wheels, which are collected here for its platform.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paceline.backends.base import EnvironmentLook, InstalledEnvironment
from paceline.backends.remote.crowd import at_once
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder
from paceline.job.quantities import show_size
from paceline.job.spec import JobSpec
from paceline.job.text import a_few, printable

from . import pip
from .source import kept

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backends.base import ProgressReporter
    from paceline.backends.remote.connection import Answer, Host, Input, Request

_INDEXES = (
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "UV_INDEX_URL",
    "UV_DEFAULT_INDEX",
    "UV_INDEX",
    "UV_EXTRA_INDEX_URL",
)
_SAID = 40  # letters of what each machine says
_CLOCK_SECONDS = 3600.0  # by which a clock may be wrong before certificates look invalid
_Host = TypeVar("_Host", bound="Host")
_COLLECTING = threading.Lock()  # wheels for one platform are collected once


class Silence:
    """Progress that nobody sees."""

    def __call__(self, what: str, done: int, total: int | None, now: str = "") -> None:
        pass

    def say(self, line: str) -> None:
        pass


def this_machine() -> Host:
    """This machine, as one among others."""
    from paceline.backends import limits
    from paceline.backends.remote.connection import Host

    return Host("localhost", 0, None, None, sys.executable, str(jobs_folder().parent), limits.load())


class Environments:
    """The environment of a job, on each of its machines."""

    def __init__(self, spec: JobSpec) -> None:
        """Read what the user names, and keep it under its digest."""
        assert spec.environment is not None
        self.source = spec.environment
        self._found, self.digest = kept(spec.environment, spec.environment_digest, Path.cwd())
        self._pythons: dict[Host, _Python] = {}
        self._collected: dict[tuple[str, ...], Path] = {}

    @property
    def request(self) -> Request:
        """What a machine is asked."""
        return {"digest": self.digest, "index": _index()}

    def ask(self, hosts: Sequence[Host]) -> dict[Host, Answer]:
        """Ask machines what they have; the first one that cannot have it is an error."""
        looks = _all(at_once(hosts, lambda host: host.ask({"do": "environment", **self.request})))
        self.choose(looks)
        return looks

    def choose(self, looks: Mapping[Host, Answer]) -> None:
        """Choose the Python of each machine, by what it has answered; refuse machines that cannot have this one."""
        problems: dict[str, list[str]] = {}
        for host, look in looks.items():
            found = self._choice(look)
            if isinstance(found, str):
                problems.setdefault(found, []).append(host.name)
            else:
                self._pythons[host] = found
        for problem, names in problems.items():
            raise UserError(f"{a_few(names)}: --environment {self.source}: {problem}")

    def _choice(self, look: Answer) -> _Python | str:
        """An interpreter of a machine, or why none can be used."""
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        if look["is_noexec"]:
            return f"{look['place']} is mounted noexec: compiled packages cannot be loaded there; choose another root"
        if self._found.form == "conda":
            if look["conda"] is None:
                return "there is no micromamba, mamba or conda; install one there, or give a requirements file"
            return _Python(look["conda"], look["pythons"][0][1], next(iter(look["built"].values()), None), look)
        try:
            wanted = SpecifierSet(self._found.requires)
        except InvalidSpecifier:
            return f"requires-python = {self._found.requires!r} is no version; correct it"
        own = look["platform"]["version"]
        for number, (path, minor) in enumerate(look["pythons"]):
            # Of others than the first one only the minor version is known.
            if wanted.contains(f"{minor}.99" if number else own) or wanted.contains(
                own if not number else f"{minor}.0"
            ):
                return _Python(path, minor, look["built"].get(path), look)
        there = ", ".join(minor for _, minor in look["pythons"])
        needed = f"it needs Python {self._found.requires}, and there is {there}"
        return f"{needed}; install one there, or name one with --ssh-python"

    def described(self, host: Host) -> EnvironmentLook:
        """What would happen on a machine that was asked."""
        python = self._pythons[host]
        built, look = python.built, python.look
        sends = sum(wheel.stat().st_size for wheel in self._found.wheels)
        origin = "" if built else "its index" if look["has_index"] and not self._found.is_closed else "wheels from here"
        builder = "conda" if self._found.form == "conda" else "uv" if look["uv"] else "pip"
        size = built["bytes"] if built else sends or None
        return EnvironmentLook(host.name, python.minor, builder, origin, size, built["seconds"] if built else None)

    def missing(self, hosts: Sequence[Host]) -> list[Host]:
        """Those of these machines that do not have it yet."""
        return [host for host in hosts if self._pythons[host].built is None]

    def build(self, hosts: Sequence[_Host], progress: ProgressReporter) -> dict[_Host, _Host]:
        """Build it where it is not; returns for each machine the same one with the Python of the environment."""
        missing = self.missing(hosts)
        if missing:
            begin = time.monotonic()
            progress.say(f"installing {self.source} on {a_few([host.name for host in missing])}")
            said: dict[Host, str] = {}
            with tempfile.TemporaryDirectory() as folder:
                built = _all(at_once(missing, lambda host: self._build(host, Path(folder), said, progress)))
                self._collected.clear()
            self._pythons.update({host: self._pythons[host]._replace(built=it) for host, it in built.items()})
            size = max(it["bytes"] for it in built.values())
            progress.say(f"{self.source} is installed: {show_size(size)} on each, {time.monotonic() - begin:.0f} s")
        return {host: replace(host, python=(self._pythons[host].built or {})["python"]) for host in hosts}

    def _build(self, host: Host, folder: Path, said: dict[Host, str], progress: ProgressReporter) -> dict[str, Any]:
        python = self._pythons[host]
        look = python.look
        platform = (
            look["platform"]
            if python.path == look["pythons"][0][0]
            else {**look["platform"], "version": f"{python.minor}.0"}
        )
        lines = self._found.lines(platform)
        wheels = list(self._found.wheels)
        is_closed, is_collected = self._found.is_closed or not lines, False
        if not look["has_index"] and not is_closed and self._found.form != "conda":
            lines, wheels = self._collect(lines, python.minor, platform, folder)
            is_closed = is_collected = True
        archive = folder / f"{len(said)}-{id(host):x}.tar"
        needs_pip = look["uv"] is None and self._found.form != "conda"
        _pack(archive, wheels, folder, needs_pip=needs_pip)
        request = {
            "do": "environment_build", "digest": self.digest, "source": self.source, "python": python.path,
            "minor": python.minor, "lines": lines, "is_closed": is_closed, "index": _variables(),
            "is_complete": self._found.is_complete or is_collected,
            "conda": python.path if self._found.form == "conda" else None, "bytes": archive.stat().st_size,
        }  # fmt: skip

        def body(stdin: Input) -> None:
            with open(archive, "rb") as file:
                shutil.copyfileobj(file, stdin)

        try:
            with host.listen(request, body) as answers:
                for answer in answers:
                    if "built" in answer:
                        return dict(answer["built"])
                    said[host] = printable(answer["says"])
                    now = "; ".join(f"{it.name}: {said[it][:_SAID]}" for it in said)
                    progress(f"installing {self.source}", 0, None, now)
        except UserError as error:
            skew = abs(look["now"] - time.time())
            if skew > _CLOCK_SECONDS:
                raise UserError(f"{error}; its clock is {skew / 3600:.0f} hours off, set it first") from None
            raise
        raise UserError(f"{host.name}: the connection ended while {self.source} was installed; try again")

    def _collect(
        self, lines: Sequence[str], minor: str, platform: Mapping[str, str], folder: Path
    ) -> tuple[list[str], list[Path]]:
        """The lines and wheels for machines of one kind that have no index."""
        kind = minor, platform["machine"], platform["libc"], platform["libc_version"]
        with _COLLECTING:
            if kind not in self._collected:
                to = folder / "-".join(("wheels", *kind))
                to.mkdir()
                own = next((wheel.parent for wheel in self._found.wheels), None)
                where = f"--environment {self.source} for a machine without an index"
                pip.collect(lines, minor, platform, near=own, to=to, where=where)
                self._collected[kind] = to
        wheels = sorted(self._collected[kind].glob("*.whl"))
        # Exactly these, whose hashes pip has checked here.
        return ["{}=={}".format(*wheel.name.split("-")[:2]) for wheel in wheels], wheels


class _Python(NamedTuple):
    """An interpreter of a machine for the environment."""

    path: str
    minor: str
    built: dict[str, Any] | None  # the record of the environment, if it is there
    look: Answer


def _all(results: Mapping[Host, Answer | UserError]) -> dict[Host, Answer]:
    """The results of all hosts; the first error is raised."""
    for result in results.values():
        if isinstance(result, UserError):
            raise result
    return results  # type: ignore[return-value]  # none of them is an error


def _index() -> str | None:
    """The index that the user has named in a variable."""
    return _variables().get("PIP_INDEX_URL") or _variables().get("UV_DEFAULT_INDEX")


def _variables() -> dict[str, str]:
    """The variables with which the user has named indexes; those of files are this machine's own."""
    return {name: os.environ[name] for name in _INDEXES if os.environ.get(name, "").startswith(("http:", "https:"))}


def _pack(archive: Path, wheels: Sequence[Path], folder: Path, *, needs_pip: bool) -> None:
    with tarfile.open(archive, "w") as tar:
        for wheel in {wheel.name: wheel for wheel in wheels}.values():
            tar.add(wheel, f"wheels/{wheel.name}")
        if needs_pip:
            with _COLLECTING:
                packed = folder / "pip.whl"
                if not packed.exists():
                    pip.archive(packed)
            tar.add(packed, "pip.whl")


# -- without a job -----------------------------------------------------------------------------------------------------


class Machines:
    """See `base.Installer`."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = {host.name: host for host in hosts}

    def look(self, source: str) -> list[EnvironmentLook]:
        found = Environments(JobSpec(script="x", environment=source))
        found.ask(list(self._hosts.values()))
        return [found.described(host) for host in self._hosts.values()]

    def installed(self) -> list[InstalledEnvironment]:
        found = _all(at_once(self._hosts.values(), lambda host: host.ask({"do": "environment_list"})))
        listed = [
            InstalledEnvironment(host.name, **it) for host, answer in found.items() for it in answer["environments"]
        ]
        return sorted(listed, key=lambda it: it.used)

    def remove(self, going: Sequence[InstalledEnvironment]) -> list[InstalledEnvironment]:
        names: dict[Host, list[str]] = {}
        for one in going:
            names.setdefault(self._hosts[one.host], []).append(one.name)
        gone = _all(at_once(names, lambda host: host.ask({"do": "environment_prune", "names": names[host]})))
        return [one for one in going if one.name in gone[self._hosts[one.host]]["removed"]]
