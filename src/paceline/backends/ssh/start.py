"""Starts a job on hosts; all checks come before anything is started."""

from __future__ import annotations

import os
import secrets
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.backends import moving
from paceline.backends.environments.jobs import containers_of, environments_of
from paceline.backends.foreground import terminal_size
from paceline.backends.remote.connection import pieces_of
from paceline.backends.submission import NameTaken, check_script, checked, kept_warm, names, packed, volumes_of
from paceline.contract.nodejob import NodeJob, Order
from paceline.job.errors import UserError
from paceline.job.spec import JobSpec
from paceline.node.planning.script import imports_of
from paceline.node.ranks.placement import CHOSEN, PORT

from .parts import Parts
from .preflight import Preflight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backends.base import JobExport, ProgressReporter
    from paceline.backends.foreground import RankStreams
    from paceline.backends.remote.connection import Body, Host
    from paceline.contract.facts import PreflightFacts
    from paceline.contract.messages import Json, Plan, Planned, Start

    from .jobs import RemoteJobs
    from .target import Hosts


class RemoteStart:
    """A checked job that can be started on hosts of a target."""

    def __init__(
        self, spec: JobSpec, hosts: Hosts, jobs: RemoteJobs, *, detached: bool, export: JobExport | None = None
    ) -> None:
        """Check the job on the hosts; start nothing."""
        self._hosts, self._jobs, self._export = hosts, jobs, export
        self.notes: list[str] = [] if export is None else moving.notes(spec, export)
        self._brought = None if export is None else moving.brought(spec, export)
        self.spec = self._asked(spec, detached)
        self._terminal = {} if detached else terminal_size()
        self._data = volumes_of(self.spec)
        containers = containers_of(self.spec, hosts.containers, self._data, self._imported)
        environments, self.spec = environments_of(self.spec)
        self._packages = containers or environments
        self._chosen: list[Host] = []
        looks = self._preflight()
        self._taken = {name: host for host, look in looks.items() for name in look["names"]}
        self._check_name(self.spec.name)
        replaced = jobs.replaces(self.spec.name, [host.name for host in self._chosen])
        self.notes += [replaced] if replaced else []
        self._main = looks[self._chosen[0]]
        is_there = any(looks[host]["has_checkpoint"] for host in self._chosen)
        self._sends_checkpoint = bool(self._brought and self._brought.into) and not is_there

    def _asked(self, spec: JobSpec, detached: bool) -> JobSpec:
        """What the user asked for, in the form that hosts get."""
        target, there = self._hosts.name, len(self._hosts.all)
        least, _ = spec.node_range
        if least > there:
            raise UserError(f"--nnodes {least}, but {target} has {there} hosts; ask for fewer")
        folder = spec.working_dir
        if not folder.startswith("~") and (spec.code is None or folder != "."):
            folder = os.path.normpath(Path.cwd() / folder)
        spec = kept_warm(spec)
        spec, self._shown_name, source = checked(spec, detached=detached)
        check_script(spec, source)
        job = spec.for_node()
        self._imported = [] if source is None else imports_of(*job.program, job.args, source).packages
        return spec.changed({"backend": target, "working_dir": folder})

    def plan(self) -> Mapping[str, object]:
        """The complete job, and the variables of its ranks on the hosts."""
        spec, hosts = self.spec, self._chosen
        order = self._order(self._shown_name, token=None if spec.node_range[1] == 1 else CHOSEN)

        def ask(start: Json | None) -> list[Planned]:
            def request(host: Host) -> Plan:
                attempt = start and {**start, "node_rank": hosts.index(host)}
                return {"do": "plan", "order": self._of(order, host).to_json(), "start": attempt}

            return list(self._hosts.answers(hosts, request).values())

        nodes = [answer["node"] for answer in ask(None)]
        port = spec.rendezvous.main_port
        if spec.node_range[1] > 1 or port is None:  # where nodes meet, the ranks do not
            port = PORT
        main = {"main_address": nodes[0]["address"], "main_port": port, "attempt": 0}
        if spec.node_range[1] == 1:
            main["main_address"] = nodes[0]["address"] = "127.0.0.1"
        answers = ask({**main, "nodes": nodes, "job": spec.rendezvous.run_id or order.job.name})
        asked, planned = spec.for_node(), NodeJob.from_json(answers[0]["job"])
        planned = replace(
            planned, nodes=asked.nodes, ranks=asked.ranks, node_rank=asked.node_rank,
            main_address=asked.main_address, main_port=asked.main_port,
        )  # fmt: skip
        return {
            "job": JobSpec.planned(planned).dumped(),
            "python": [] if spec.command else [self._python(host) for host in hosts],
            "ranks": [rank for answer in answers for rank in answer["ranks"]],
        }

    @property
    def installs(self) -> str:
        """What is installed first, for users."""
        return "" if self._packages is None else self._packages.foreseen()

    def _python(self, host: Host) -> str:
        return host.python if self._packages is None else self._packages.python(host)

    def start(self, progress: ProgressReporter, rank_streams: RankStreams | None = None) -> Parts:
        """Start all parts of the job; they end unless the result is kept or held."""
        if self._packages is not None:
            found = self._packages.build(self._chosen, progress)
            self._chosen = [found[host] for host in self._chosen]
        spec = self.spec
        for line in self.notes:
            progress.say(line)
        with tempfile.TemporaryDirectory() as folder:
            archive, checkpoint, record = Path(folder, "code.tar"), Path(folder, "checkpoint.tar"), None
            if self._export is not None:
                record = moving.fetched_code(self._export, archive, progress)
                if self._sends_checkpoint:
                    moving.fetched_checkpoint(self._export, checkpoint, progress)
            elif spec.code is not None and spec.resume_from is None:
                with archive.open("wb") as file:
                    record = packed(spec, file, progress)
            for name in names(spec):
                try:
                    self._check_name(name)
                    progress(f"starting {name}", 0, None)
                    order = self._order(
                        name,
                        code=record,
                        bytes=_size(archive),
                        rank_streams=rank_streams,
                        job_id=os.urandom(16).hex(),
                        token=secrets.token_hex(16) if spec.node_range[1] > 1 else None,
                        secrets={name: os.environ[name] for name in spec.secrets},
                        brought=self._brought and replace(self._brought, bytes=_size(checkpoint)),
                    )
                    return self._start(order, archive, checkpoint)
                except NameTaken as error:
                    taken = error
            raise taken

    def _check_name(self, name: str) -> None:
        """Check that no host has a job of this name."""
        if name in self._taken:
            where = self._taken[name].name
            raise NameTaken(f"a job named {name} is on {where}; choose another --name, or delete that job")

    def _start(self, order: Order, archive: Path, checkpoint: Path) -> Parts:
        """Start a job's agents, which connect at the address of the first host."""
        first = self._chosen[0]

        def body(host: Host) -> Body:
            return pieces_of(*(file for file in (archive, *([checkpoint] if host == first else [])) if file.exists()))

        def request(host: Host) -> Start:
            return {"do": "start", "order": self._of(order, host).to_json()}

        name = order.job.name
        parts = Parts(name, self._chosen, request, body)
        try:
            taken = parts.start()
            if taken is not None:
                self._taken[name] = taken
                self._check_name(name)
        except BaseException:
            parts.streams.close()
            raise
        return parts

    def _order(self, name: str, **fields: Any) -> Order:
        """What all hosts are asked to make."""
        hosts = tuple(host.name for host in self._chosen)
        job = self.spec.for_node(name)
        return Order(
            job=job, data=self._data, hosts=hosts, terminal=self._terminal, **{"brought": self._brought, **fields}
        )

    def _of(self, order: Order, host: Host) -> Order:
        """The same for one host."""
        brought = order.brought
        if self.spec.node_range[1] > 1:
            port = self.spec.rendezvous.main_port or self._main["port"]
            number = self._chosen.index(host)
            order = order.with_job(main_address=self._main["address"], main_port=port, node_rank=number)
        if brought is not None and host != self._chosen[0]:  # the ranks give it to the other hosts
            brought = replace(brought, bytes=0)
        return replace(order, slots=host.slots, reconnect=host.reconnect, brought=brought)

    def _preflight(self) -> dict[Host, PreflightFacts]:
        """Check all hosts and choose those for the job; returns the answers."""
        wanted = None if self._packages is None else self._packages.request
        order = Order(job=self.spec.for_node(), data=self._data, brought=self._brought)
        with Preflight(self._hosts, order, wanted, self._imported) as preflight:
            self._chosen = preflight.choose(*self.spec.node_range, self._preferred, self.notes.append)
            answers = dict(preflight.answers)
        if self._packages is not None:
            found: dict[Host, Any] = {host: answers[host]["environment"] for host in self._chosen}  # or its image
            self._packages.choose(found)
        self.notes += [f"{host.name}: {line}" for host in self._chosen for line in answers[host]["notes"]]
        return answers

    def _preferred(self, looks: Mapping[Host, PreflightFacts]) -> list[Host]:
        """The hosts for the job, best first: those with enough free devices, then in the order of the settings."""
        if self.spec.resume_from is not None and self._export is None:
            return self._resuming(self.spec.resume_from, looks)
        if self._hosts.is_exact:
            return list(looks)
        devices = self.spec.devices
        need = devices if isinstance(devices, int) else len(devices or "1")
        return sorted(looks, key=lambda host: looks[host]["free"] < need)

    def _resuming(self, name: str, looks: Mapping[Host, PreflightFacts]) -> list[Host]:
        """The hosts for a job that goes on with another one's checkpoints: each that took part has copies.

        Others get them from these, but not the code, if the job has code of its own.
        """
        old = self._jobs.seen(name).all
        hosts = [host for host in old if host in looks]
        gone = ", ".join(host.name for host in old if host not in looks)
        if hosts and self.spec.code is None:
            hosts += [host for host in looks if host not in hosts]
        least = self.spec.node_range[0]
        if len(hosts) < least and gone:
            raise UserError(f"{gone} may have checkpoints of {name} and cannot take the job now; try later")
        if len(hosts) < least:
            there = ", ".join(host.name for host in hosts)
            raise UserError(f"--nnodes {least}, but the code of {name} is on {there} alone; ask for fewer")
        if gone:
            self.notes.append(f"{gone} cannot take the job now; what it has of {name} is not looked at")
        return hosts


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
