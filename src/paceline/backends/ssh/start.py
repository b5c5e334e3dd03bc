"""Starts a job on hosts: everything that can be wrong is found before anything is started."""

from __future__ import annotations

import dataclasses
import itertools
import os
import secrets
import shutil
import tarfile
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.backends.foreground import terminal_size
from paceline.backends.submission import check_secrets, fetched, in_copy, named
from paceline.job.errors import UserError

from .parts import Parts
from .preflight import Preflight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import IO

    from paceline.backends.base import Progress
    from paceline.backends.foreground import Shown
    from paceline.job.spec import JobSpec

    from .connection import Answer, Host, Request
    from .jobs import RemoteJobs
    from .target import Hosts


class RemoteStart:
    """A job that is to start on hosts of a target."""

    def __init__(self, spec: JobSpec, hosts: Hosts, jobs: RemoteJobs, detached: bool) -> None:
        """Start nothing yet.

        Args:
            spec: what the user asked for.
            hosts: of the target.
            jobs: that are there.
            detached: whether it goes on by itself.

        Raises:
            UserError: it is nothing for hosts.
        """
        self._hosts, self._jobs = hosts, jobs
        self.spec = self._asked(spec, detached)

    def _asked(self, spec: JobSpec, detached: bool) -> JobSpec:
        """What the user asked for, as a host understands it.

        Raises:
            UserError: it is nothing for hosts.
        """
        target, there = self._hosts.name, len(self._hosts.all)
        least, _ = spec.node_range
        if least > there:
            raise UserError(f"--nnodes {least}, but {target} has {there} hosts; ask for fewer")
        folder = spec.working_dir
        if not folder.startswith("~") and (spec.code is None or folder != "."):
            folder = os.path.normpath(Path.cwd() / folder)
        spec = in_copy(spec) if spec.code is not None else spec
        return named(spec).model_copy(update={"detached": detached, "backend": target, "working_dir": folder})

    def plan(self) -> dict[str, Any]:
        """The complete job, and the variables of its ranks."""
        spec = self.spec
        hosts = self._hosts.all[: spec.node_range[1]]
        job = {**spec.for_node(), "nodes": 1}

        def ask(start: dict[str, Any] | None) -> list[Answer]:
            starts = {host: start and {**start, "node_rank": number} for number, host in enumerate(hosts)}
            answers = self._hosts.answers(
                hosts, lambda host: {"do": "plan", "job": job, "slots": host.slots, "start": starts[host]}
            )
            return list(answers.values())

        nodes = [answer["node"] for answer in ask(None)]
        main = {"main_address": nodes[0]["address"], "main_port": spec.rendezvous.main_port or 0}
        answers = ask({**main, "nodes": nodes, "attempt": 0, "job": spec.name})
        return {
            "job": type(spec)
            .model_validate({**answers[0]["job"], "nodes": spec.nodes, "ranks": spec.ranks})
            .model_dump(mode="json"),
            "ranks": [rank for answer in answers for rank in answer["ranks"]],
        }

    def start(self, progress: Progress, shown: Shown | None = None) -> Parts:
        """The job with all its parts there; without further words they go again.

        Args:
            progress: is called with how far it is.
            shown: what of its output somebody watches; None for a job that goes on by itself.

        Raises:
            UserError: it cannot run there, or its name is taken.
        """
        spec = self.spec
        check_secrets(spec)
        data = self._sources()
        looks, chosen = self._preflight(data, progress)
        taken = {name: host for host, look in looks.items() for name in look["names"]}
        with tempfile.TemporaryDirectory() as folder:
            code, archive, record = Path(folder, "code"), Path(folder, "code.tar"), None
            if spec.code is not None and spec.resume_from is None:
                record = fetched(spec, code, progress)
                with tarfile.open(archive, "w") as tar:
                    tar.add(code, arcname=".")
            for number in itertools.count(2 if spec.resume_from else 1):
                name = f"{spec.name}{number}" if spec.name.endswith("-") else spec.name
                if name not in taken:
                    order = {
                        "job": spec.model_copy(update={"name": name}),
                        "data": data,
                        "code": record,
                        "bytes": _size(archive),
                        "shown": shown and dataclasses.asdict(shown),
                        "terminal": terminal_size() if shown else {},
                    }
                    progress(f"starting {name}", 0, None)
                    found = _start(order, chosen, looks[chosen[0]], archive)
                    if isinstance(found, Parts):
                        return found
                    taken[name] = found
                if name == spec.name:
                    raise UserError(
                        f"a job named {name} is on {taken[name].name}; choose another --name, or delete that job"
                    )
        raise AssertionError  # there is always another number

    def _sources(self) -> list[dict[str, Any]]:
        """Where the job's volumes are on the hosts, by the settings."""
        data = self.spec.data
        if not data:
            return []
        from paceline.backends.volumes import check
        from paceline.job.settings import load

        paths = check(data, load())
        return [{"volume": m.volume, "path": paths[m.volume], "wanted": m.path, "variable": m.variable} for m in data]

    def _preflight(self, data: list[dict[str, Any]], progress: Progress) -> tuple[dict[Host, Answer], list[Host]]:
        """What the hosts say that answer, and those that the job goes to.

        Raises:
            UserError: too few of them can take it.
        """
        job = self.spec.for_node()
        with Preflight(self._hosts.all, lambda host: {"slots": host.slots, "job": job, "data": data}) as preflight:
            self._hosts.note(preflight.failed)
            chosen = preflight.choose(*self.spec.node_range, lambda fit: self._preferred(fit, progress), progress.say)
            return dict(preflight.answers), chosen

    def _preferred(self, looks: Mapping[Host, Answer], progress: Progress) -> list[Host]:
        """The hosts for the job, the best first: those with enough free devices, then as the settings have them.

        Raises:
            UserError: it goes on with another one's checkpoints, and hosts with these cannot take it.
        """
        if self.spec.resume_from is not None:
            return self._resuming(self.spec.resume_from, looks, progress)
        if self._hosts.is_exact:
            return list(looks)
        devices = self.spec.devices
        need = devices if isinstance(devices, int) else len(devices or "1")
        return sorted(looks, key=lambda host: looks[host]["free"] < need)

    def _resuming(self, name: str, looks: Mapping[Host, Answer], progress: Progress) -> list[Host]:
        """The hosts for a job that goes on with another one's checkpoints: each that took part has copies.

        Others get them from these, but not the code, if the job has code of its own.

        Raises:
            UserError: too few can take it.
        """
        old = self._jobs.hosts_of(name)
        hosts = [host for host in old if host in looks]
        gone = ", ".join(host.name for host in old if host not in looks)
        if hosts and self.spec.code is None:
            hosts += [host for host in looks if host not in hosts]
        if len(hosts) < self.spec.node_range[0]:
            raise UserError(f"{gone} has the checkpoints of {name} and cannot take the job now; try later")
        if gone:
            progress.say(f"{gone} took part in {name} and cannot go on; its checkpoints are not looked at")
        return hosts


def _start(order: dict[str, Any], hosts: list[Host], main: Answer, archive: Path) -> Parts | Host:
    """Start a job's agents, which meet at what the first host told; or return a host that has a job of the name.

    Raises:
        UserError: one cannot be started; nothing is left of the others.
    """
    spec: JobSpec = order["job"]
    common = {
        **order,
        "do": "start",
        "joins": False,
        "job_id": uuid.uuid4().hex,
        "hosts": [host.name for host in hosts],
        "token": secrets.token_hex(16) if spec.node_range[1] > 1 else None,
        "secrets": {name: os.environ[name] for name in spec.secrets},
    }
    meeting = {"main_address": main["address"], "main_port": spec.rendezvous.main_port or main["port"]}

    def request(host: Host) -> Request:
        here = {**meeting, "node_rank": hosts.index(host)} if spec.node_range[1] > 1 else {}
        return {**common, "job": {**spec.for_node(), **here}, "slots": host.slots}

    parts = Parts(spec.name, hosts, request, _sender(archive) if archive.exists() else None)
    try:
        taken = parts.start()
    except BaseException:
        parts.streams.close()
        raise
    if taken is not None:
        parts.streams.close()
    return taken or parts


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _sender(file: Path) -> Callable[[IO[bytes]], None]:
    """What sends a file."""

    def send(stdin: IO[bytes]) -> None:
        with open(file, "rb") as source:
            shutil.copyfileobj(source, stdin)

    return send
