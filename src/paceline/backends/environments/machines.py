"""Environments of jobs on machines: found there, or built there on all at the same time, before anything starts.

A machine that has no index gets the wheels, which are collected here for its platform.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

from paceline.backends.base import EnvironmentLook, InstalledEnvironment
from paceline.backends.remote.crowd import at_once
from paceline.job.errors import UserError
from paceline.job.paths import jobs_folder
from paceline.job.quantities import show_size
from paceline.job.spec import JobSpec
from paceline.job.text import a_few, printable

from . import locks, pip
from .environment import variables
from .source import forget, kept, sources

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.backends.base import ProgressReporter
    from paceline.backends.remote.connection import Answer, Host
    from paceline.contract.facts import BuiltEnvironment, EnvironmentFacts
    from paceline.contract.messages import BuildEnvironment, WantedEnvironment
    from paceline.contract.messages import Environment as AskEnvironment

_SAID = 40  # letters of what each machine says
_CLOCK_SECONDS = 3600.0  # by which a clock may be wrong before certificates look invalid
_Host = TypeVar("_Host", bound="Host")
_KEPT = "sources/"  # what names of sources begin with, which are kept on this machine for resubmit
_PIECE = 1 << 18  # bytes of an archive that are sent at once


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
        self._found, self.digest = kept(spec.environment, spec.environment_digest, Path.cwd())
        self.source = self._found.source  # what `auto` has found
        self._pythons: dict[Host, _Python] = {}

    @property
    def request(self) -> WantedEnvironment:
        """What a machine is asked."""
        return {"digest": self.digest, "index": _index()}

    def ask(self, hosts: Sequence[Host], minor: str | None = None) -> dict[Host, EnvironmentFacts]:
        """Ask machines what they have; the first one that cannot have it, with this minor of Python, is an error."""
        request: AskEnvironment = {"do": "environment", **self.request}
        looks = _all(at_once(hosts, lambda host: host.answer(request)))
        self.choose(looks, minor)
        return looks

    def choose(self, looks: Mapping[Host, EnvironmentFacts], minor: str | None = None) -> None:
        """Choose the Python of each machine, the same minor on all; refuse those that cannot have this environment."""
        problems: dict[str, list[str]] = {}
        able: dict[Host, dict[str, _Python]] = {}
        for host, look in looks.items():
            found = self._choices(look)
            if isinstance(found, str):
                problems.setdefault(found, []).append(host.name)
            elif minor in (None, *(python.minor for python in found)):
                able[host] = {python.minor: python for python in found if minor in (None, python.minor)}
            else:
                there = ", ".join(python.minor for python in found)
                other = f"the job runs with Python {minor}, and there is {there}; install Python {minor} there"
                problems.setdefault(other, []).append(host.name)
        for problem, names in problems.items():
            raise UserError(f"{a_few(names)}: --environment {self.source}: {problem}")
        common = [minor for minor in next(iter(able.values()), {}) if all(minor in it for it in able.values())]
        if able and not common:
            there = "; ".join(f"{', '.join(it)} on {host.name}" for host, it in able.items())
            raise UserError(
                f"--environment {self.source}: no Python is on all machines: {there}; install the same version on all"
            )
        self._pythons.update({host: it[common[0]] for host, it in able.items()})

    def _choices(self, look: EnvironmentFacts) -> list[_Python] | str:
        """The interpreters of a machine that suit, the best first, or why none does."""
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        if look["is_noexec"]:
            return f"{look['place']} is mounted noexec: compiled packages cannot be loaded there; choose another root"
        if self._found.form == "conda":
            if look["conda"] is None:
                return "there is no micromamba, mamba or conda; install one there, or give a requirements file"
            minor = look["pythons"][0][1]
            return [_Python(look["conda"], minor, next(iter(look["built"].values()), None), look)]
        try:
            wanted = SpecifierSet(self._found.requires)
        except InvalidSpecifier:
            return f"requires-python = {self._found.requires!r} is no version; correct it"
        own = look["platform"]["version"]
        found = [
            _Python(path, minor, look["built"].get(path), look)
            for number, (path, minor) in enumerate(look["pythons"])
            # Of others than the first one only the minor version is known.
            if any(wanted.contains(it) for it in ([f"{minor}.0", f"{minor}.99"] if number else [own]))
        ]
        if found:
            return found
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

    def foreseen(self) -> str:
        """What will be installed on the machines that were asked, for users."""
        missing = self.missing(list(self._pythons))
        names = a_few([host.name for host in missing])
        return f"{self.source} is installed on {names} before it starts" if missing else ""

    def python(self, host: Host) -> str:
        """The Python of a machine: that of the environment, if it is there already."""
        chosen = self._pythons.get(host)
        return host.python if chosen is None or chosen.built is None else str(chosen.built["python"])

    def build(self, hosts: Sequence[_Host], progress: ProgressReporter) -> dict[_Host, _Host]:
        """Build it where it is not; returns for each machine the same one with the Python of the environment."""
        missing = self.missing(hosts)
        if missing:
            begin = time.monotonic()
            progress.say(f"installing {self.source} on {a_few([host.name for host in missing])}")
            loads: dict[tuple[Any, ...], _Load] = {}
            for host in missing:  # one archive for all machines of a kind
                kind = self._kind(host)
                if kind not in loads:
                    progress(f"collecting {self.source}", 0, None)
                    loads[kind] = self._load(host)
            said: dict[Host, str] = {}
            built = _all(at_once(missing, lambda host: self._build(host, loads[self._kind(host)], said, progress)))
            for load in loads.values():
                load.archive.close()
            self._pythons.update({host: self._pythons[host]._replace(built=it) for host, it in built.items()})
            size = max(it["bytes"] for it in built.values())
            progress.say(f"{self.source} is installed: {show_size(size)} on each, {time.monotonic() - begin:.0f} s")
        return {host: replace(host, python=self.python(host)) for host in hosts}

    def _kind(self, host: Host) -> tuple[Any, ...]:
        """What decides what a machine needs."""
        python = self._pythons[host]
        look = python.look
        return (python.minor, *python.platform.values(), look["has_index"], look["uv"] is None)

    def _load(self, host: Host) -> _Load:
        """What a machine, and others of its kind, get to install."""
        python, found = self._pythons[host], self._found
        look, is_conda = python.look, found.form == "conda"
        lines = locks.lines(found, python.platform)
        wheels = list(found.wheels)
        is_closed, is_complete = found.is_closed or not lines, found.is_complete
        archive = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed when all machines have it
        # No file stays behind if this process is killed while machines install.
        with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=archive, mode="w") as tar:
            if not look["has_index"] and not is_closed and not is_conda:
                own = next((wheel.parent for wheel in wheels), None)
                kind = f"Python {python.minor}, {python.platform['machine']}"
                where = f"--environment {self.source}, for {host.name} ({kind}), which reaches no index"
                to = Path(folder)
                pip.collect(lines, python.minor, python.platform, near=own, is_complete=is_complete, to=to, where=where)
                wheels = sorted(to.glob("*.whl"))
                # Exactly these, whose hashes pip has checked here.
                lines = ["{}=={}".format(*wheel.name.split("-")[:2]) for wheel in wheels]
                is_closed = is_complete = True
            for wheel in {wheel.name: wheel for wheel in wheels}.values():
                tar.add(wheel, f"wheels/{wheel.name}")
            if look["uv"] is None and not is_conda:
                uv = pip.uv_for(python.platform)
                builder = Path(folder, "pip.whl") if uv is None else uv
                if uv is None:
                    pip.archive(builder)
                tar.add(builder, "pip.whl" if uv is None else "uv")
        archive.flush()  # its size is asked of the file
        return _Load(lines, archive, is_closed, is_complete, variables("\n".join(lines)))

    async def _build(
        self, host: Host, load: _Load, said: dict[Host, str], progress: ProgressReporter
    ) -> BuiltEnvironment:
        python, size = self._pythons[host], os.fstat(load.archive.fileno()).st_size
        request: BuildEnvironment = {
            "do": "environment_build", "digest": self.digest, "source": self.source, "python": python.path,
            "minor": python.minor, "lines": load.lines, "is_closed": load.is_closed, "index": load.variables,
            "is_complete": load.is_complete, "conda": python.path if self._found.form == "conda" else None,
            "bytes": size,
        }  # fmt: skip

        def body() -> Iterator[bytes]:
            place = 0
            while place < size:  # all machines read the same file
                data = os.pread(load.archive.fileno(), _PIECE, place)
                yield data
                place += len(data)

        try:
            async with contextlib.aclosing(await host.connect(request, body())) as answers:
                async for answer in answers:
                    if "built" in answer:
                        built: BuiltEnvironment = answer["built"]
                        return built
                    said[host] = printable(answer["says"])
                    now = "; ".join(f"{it.name}: {said[it][:_SAID]}" for it in list(said))
                    progress(f"installing {self.source}", 0, None, now)
        except UserError as error:
            skew = abs(python.look["now"] - time.time())
            if skew > _CLOCK_SECONDS:
                raise UserError(f"{error}; its clock is {skew / 3600:.0f} hours off, set it first") from None
            raise
        raise UserError(f"{host.name}: the connection ended while {self.source} was installed; try again")


class _Load(NamedTuple):
    """What machines of one kind get to install: lines, and a file with an archive (tar) of wheels and a builder."""

    lines: list[str]
    archive: IO[bytes]
    is_closed: bool
    is_complete: bool
    variables: dict[str, str]  # indexes, and those that lines use


class _Python(NamedTuple):
    """An interpreter of a machine for the environment."""

    path: str
    minor: str
    built: BuiltEnvironment | None  # the record of the environment, if it is there
    look: EnvironmentFacts

    @property
    def platform(self) -> dict[str, str]:
        """What decides which wheels suit; of an interpreter that is not the machine's first only the minor is known."""
        own: dict[str, str] = self.look["platform"]
        is_first = self.path == self.look["pythons"][0][0]
        return own if is_first else {**own, "version": f"{self.minor}.0"}


def _all(results: Mapping[Host, Answer | UserError]) -> dict[Host, Answer]:
    """The results of all hosts; the first error is raised."""
    for result in results.values():
        if isinstance(result, UserError):
            raise result
    return results  # type: ignore[return-value]  # none of them is an error


def _index() -> str | None:
    """The index that the user has named in a variable."""
    named = variables("")
    return named.get("PIP_INDEX_URL") or named.get("UV_DEFAULT_INDEX")


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
        found = _all(at_once(self._hosts.values(), lambda host: host.answer({"do": "environment_list"})))
        listed = [
            InstalledEnvironment(host.name, **it) for host, answer in found.items() for it in answer["environments"]
        ]
        for host in filter(lambda host: host.is_here, self._hosts.values()):
            listed += [
                InstalledEnvironment(host.name, _KEPT + digest, f"{source}, kept for resubmit", size, used)
                for digest, source, size, used in sources()
            ]
        return sorted(listed, key=lambda it: it.used)

    def remove(self, going: Sequence[InstalledEnvironment]) -> list[InstalledEnvironment]:
        names: dict[Host, list[str]] = {}
        copies = {one for one in going if one.name.startswith(_KEPT) and forget(one.name.removeprefix(_KEPT))}
        for one in going:
            if not one.name.startswith(_KEPT):
                names.setdefault(self._hosts[one.host], []).append(one.name)
        gone = _all(at_once(names, lambda host: host.answer({"do": "environment_prune", "names": names[host]})))
        removed = {(host.name, name) for host, answer in gone.items() for name in answer["removed"]}
        return [one for one in going if one in copies or (one.host, one.name) in removed]
