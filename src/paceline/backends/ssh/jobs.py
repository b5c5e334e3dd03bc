"""The jobs on the hosts of a target: each host reports its parts, and this machine records what it has submitted."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from paceline.backends.base import Listing
from paceline.job.errors import UserError
from paceline.job.job import FINAL, Job
from paceline.job.paths import target_folder
from paceline.node.files import read_json, write_json
from paceline.node.journal.fold import Scheduler, fold, is_over, last_attempt, order

from .target import left_out

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from paceline.backends.remote.connection import Host
    from paceline.contract.messages import Describe, Described
    from paceline.contract.records import JobRecord, Report

    from .target import Hosts

    Reported = tuple[Host, Report]

_NEVER = -math.inf, Listing([])
_FRESH = 1.0  # seconds in which what was seen of jobs that are over need not be asked again


class Seen(NamedTuple):
    """Where a job was seen.

    Attributes:
        hosts: node 0 first.
        living: those of them where it had not ended.
        last: those of them that are in the last attempt.
        ranks: where its ranks were.
        unreachable: other hosts that have a part of it and did not answer, and why.
        job_id: of the job; None if no host has said it.
        others: what is said of each other job of this name, and whether neither of the two has ended.
    """

    hosts: list[Host]
    living: list[Host]
    last: list[Host]
    ranks: dict[int, Host]
    unreachable: dict[Host, str]
    job_id: str | None = None
    others: Mapping[str, bool] = MappingProxyType({})

    @property
    def all(self) -> list[Host]:
        """The hosts that have the job, and those that may have a part of it and did not answer."""
        return list(dict.fromkeys([*self.hosts, *self.unreachable]))


class RemoteJobs:
    """The jobs of a target. Methods for one job raise `UserError` if there is none of this name.

    Attributes:
        keeps_expired: whether `describe` leaves jobs whose time to live is over.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._submitted = SubmittedJobs(target_folder(hosts.name))
        self._seen: dict[str, Seen] = {}
        self._ended = _NEVER  # when `over` has seen that jobs are over, and what
        self.keeps_expired = False

    def describe(self, names: Sequence[str] | None = None, since: float | None = None) -> Listing:
        """See `Backend.describe`. A job on a host that does not answer is LOST, if it was submitted from here."""
        (when, found), self._ended = self._ended, _NEVER
        is_it = names is not None and {job.name for job in found.jobs} == set(names)
        return found if is_it and time.monotonic() - when < _FRESH else self._ask(names, since)

    def _ask(self, names: Sequence[str] | None, since: float | None) -> Listing:
        request: Describe = {"do": "describe", "names": names, "since": since, "keeps": self.keeps_expired}
        answers: dict[Host, Described]
        answers, failed = self._hosts.ask(self._hosts.all, lambda _: request)
        parts: dict[tuple[str, str | None], list[Reported]] = {}
        for host, answer in answers.items():
            for report in answer["jobs"]:
                parts.setdefault((report["job"]["name"], report["part"]["job_id"]), []).append((host, report))
        reasons = {host: str(error) for host, error in failed.items()}
        groups: dict[str, list[tuple[Job, Seen]]] = {}
        for (name, _), found in parts.items():
            groups.setdefault(name, []).append(self._merge(found, reasons))
        jobs = {name: self._choose(group) for name, group in groups.items()}
        by_name = {host.name: why for host, why in reasons.items()}
        known = self._submitted.on(by_name) if reasons else {}
        for name, (hosts, record) in known.items():
            if name not in jobs and (names is None or name in names):
                those = [host for host in self._hosts.all if host.name in hosts]
                self._seen[name] = Seen(those, [], those, {}, {})
                reason = next(by_name[host] for host in hosts if host in by_name)
                job = Job.from_record(cast("JobRecord", record))
                jobs[name] = job if job.is_over else dataclasses.replace(job, state="LOST", error=reason)
        if failed and names is not None and (unknown := [name for name in names if name not in jobs]):
            raise UserError(f"no job {unknown[0]} on the hosts that answer, and {next(iter(reasons.values()))}")
        if failed and not answers and not jobs:
            raise next(iter(failed.values()))
        if names is not None:
            found_jobs = [jobs[name] for name in dict.fromkeys(names) if name in jobs]
            for job in found_jobs:
                if job.is_over:
                    self._submitted.has_ended(job)
            for name in set(names) - jobs.keys():
                self._submitted.is_gone(name, {host.name for host in answers})
            unreachable = dict.fromkeys(why for job in found_jobs for why in self._seen[job.name].unreachable.values())
            missing = (f"{why}; what it has is not shown" for why in unreachable)
            return Listing(found_jobs, 0, (*missing, *self._hidden(found_jobs)))
        there = {name for answer in answers.values() for name in answer["names"]}
        newest_first = sorted(jobs.values(), key=lambda job: job.created, reverse=True)
        return Listing(newest_first, len(there - jobs.keys()), (*left_out(failed), *self._hidden(newest_first)))

    def _choose(self, group: list[tuple[Job, Seen]]) -> Job:
        """Of jobs of one name the one that is known: one that has not ended, the one known before, or the newest."""
        before = self._seen.get(group[0][0].name)
        group.sort(key=lambda it: (bool(it[1].living), before and it[1].job_id == before.job_id, it[0].created))
        *others, (job, seen) = group
        self._seen[job.name] = seen._replace(others={self._line(*it): bool(it[1].living) for it in others})
        return job

    def _line(self, job: Job, seen: Seen) -> str:
        """What is said of a job that another one of its name hides."""
        hosts, verb = ", ".join(host.name for host in seen.hosts), "stop" if seen.living else "delete"
        there = f"paceline {verb} {self._hosts.flags_of(seen.hosts)} {job.name}"
        return f"another job {job.name} ({job.state}) is on {hosts} and is not shown; {verb} it there with {there}"

    def _hidden(self, jobs: Sequence[Job]) -> Iterator[str]:
        """What is said of the other jobs of these names."""
        return (line for job in jobs for line in self._seen[job.name].others)

    def over(self, names: Sequence[str]) -> set[str]:
        """Those of these jobs that are over.

        If all are, and all hosts have answered, the next `describe` of them says how without asking again.
        """
        found = self.describe(names)
        over = {job.name for job in found.jobs if job.is_over}
        if over == set(names) and not found.warnings:
            self._ended = time.monotonic(), found
        return over

    def add(self, reports: list[Reported]) -> Job:
        """Note a job that was submitted, by the reports of its hosts."""
        hosts = [host.name for host, _ in reports]
        job, self._seen[job.name] = self._merge(reports, {})
        self._ended = _NEVER
        self._submitted.add(job, hosts, self._hosts.given)
        return job

    def replaces(self, name: str, hosts: Collection[str]) -> str:
        """What is said of a job of this name, noted on none of these hosts, whose note that of a new one replaces."""
        there, record = self._submitted.noted(name)
        if not there or not set(hosts).isdisjoint(there) or record.get("state") in FINAL:
            return ""
        those = ",".join(there)
        return f"another job {name} was started on {those} and not seen to end; from now on, name it with -H {those}"

    def join(self, name: str, hosts: Sequence[str]) -> None:
        """Note that hosts have joined a job."""
        self._submitted.join(name, hosts)

    def forget(self, name: str) -> None:
        """Know a job no more. A note of another job of its name, on other hosts, stays."""
        if self.submitted_to(name, {host.name for host in self.seen(name).all}):
            self._submitted.forget(name)
        self._ended = _NEVER
        self._seen.pop(name, None)

    def submitted_to(self, name: str, hosts: Collection[str]) -> list[str]:
        """Which of these hosts a job was submitted to from here."""
        found, _ = self._submitted.on(hosts).get(name, ([], {}))
        return sorted(set(hosts).intersection(found))

    def seen(self, name: str) -> Seen:
        """Where a job was seen last."""
        if name not in self._seen and not self.describe([name]).jobs:
            raise UserError(f"no job {name} on {self._hosts.name}")
        return self._seen[name]

    def to_change(self, name: str) -> Seen:
        """Where a job is that is to be changed; refuses if there are two of this name that have not ended."""
        seen = self.seen(name)
        for line, has_not_ended in seen.others.items():
            if has_not_ended:
                raise UserError(f"job {name} is not changed, since it is not clear which one: {line}")
        return seen

    def hosts_of(self, name: str) -> list[Host]:
        """The hosts that have a job, node 0 first."""
        return self.seen(name).hosts

    def living_hosts_of(self, name: str) -> list[Host]:
        """The hosts that take part in a job now."""
        found = self.describe([name]).jobs
        if not found or found[0].is_over or not self._seen[name].living:
            raise UserError(f"job {name} has ended" if found else f"no job {name} on {self._hosts.name}")
        return self.to_change(name).living

    def has_ended(self, name: str, host: Host) -> None:
        """Note that a job has ended on a host."""
        if host in self._seen[name].living:
            self._seen[name].living.remove(host)

    def _merge(self, reports: list[Reported], reasons: Mapping[Host, str]) -> tuple[Job, Seen]:
        """A job from the reports of its hosts, and where it is; `reasons` are why others did not answer."""
        reports.sort(key=lambda it: order(it[1]["part"]))
        parts = [(host, report["part"]) for host, report in reports]
        facts, first = reports[0][1]["job"], parts[0][1]
        named = {host for _, part in parts for host in part["hosts"]}
        is_elastic = any(part["is_elastic"] for _, part in parts)  # then others may have come
        unreachable = {host: why for host, why in reasons.items() if is_elastic or host.name in named}
        scheduler = None
        if len(last_attempt([part for _, part in parts])) < (first["nodes"] or facts["nodes"]):
            unreachable = unreachable or dict(reasons)
            missing = ", ".join(sorted(named - {host.name for host, _ in parts})) or "a host"
            scheduler = Scheduler("unreachable", (*unreachable.values(), f"its part on {missing} is gone")[0])
        created = min(report["job"]["created"] for _, report in reports)
        record = fold(
            {**facts, "backend": self._hosts.label, "created": created}, [part for _, part in parts], scheduler
        )
        return Job.from_record(record), Seen(
            [host for host, _ in parts],
            [host for host, part in parts if not is_over(part)],
            [host for host, part in parts if part["attempt"] == first["attempt"]],
            {rank["rank"]: host for host, part in reversed(parts) for rank in part["instances"]},
            unreachable,
            first["job_id"],
        )


# -- what was submitted from here --------------------------------------------------------------------------------------


class SubmittedJobs:
    """The jobs of one target in a folder, a file each, so that they are listed while their hosts do not answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, job: Job, hosts: Sequence[str], options: Mapping[str, Any] | None = None) -> None:
        """Remember a job and its hosts. If the folder cannot be written to, it is not remembered."""
        note = {"hosts": list(hosts), "record": asdict(job), **({"options": dict(options)} if options else {})}
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(self._folder / job.name, note)

    def join(self, name: str, hosts: Sequence[str]) -> None:
        """Remember that these hosts have a part of a job now, too, if it was submitted from here."""
        stored = read_json(self._folder / name) or {}
        with contextlib.suppress(KeyError, TypeError, OSError):
            more = [host for host in hosts if host not in stored["hosts"]]
            write_json(self._folder / name, {**stored, "hosts": [*stored["hosts"], *more]})

    def has_ended(self, job: Job) -> None:
        """Remember how a job ended, so that its hosts are not asked for ever."""
        stored = read_json(self._folder / job.name) or {}
        with contextlib.suppress(KeyError, TypeError, OSError):
            if stored["record"]["created"] == job.created and stored["record"]["state"] != job.state:
                write_json(self._folder / job.name, {**stored, "record": asdict(job)})

    def is_gone(self, name: str, hosts: Collection[str]) -> None:
        """Drop a job that these hosts do not have, if it was on no others."""
        stored = read_json(self._folder / name) or {}
        if stored and set(stored.get("hosts", ("",))) <= set(hosts):
            self.forget(name)

    def forget(self, name: str) -> None:
        """Drop a job; a file that `add` did not write stays."""
        path = self._folder / name
        if (read_json(path) or {}).keys() - {"options"} == {"hosts", "record"}:
            with contextlib.suppress(OSError):
                path.unlink()

    def noted(self, name: str) -> tuple[list[str], dict[str, object]]:
        """The hosts and the record of a job; none if it is not known."""
        stored = read_json(self._folder / name)
        with contextlib.suppress(KeyError, TypeError):  # a damaged file is no job
            if stored is not None:
                return list(stored["hosts"]), dict(stored["record"])
        return [], {}

    def on(self, hosts: Collection[str]) -> dict[str, tuple[list[str], dict[str, object]]]:
        """Name → hosts and record of the jobs that have a part on one of these hosts."""
        try:
            names = [path.name for path in self._folder.iterdir() if not path.name.startswith(".")]
        except OSError:
            return {}
        found = {name: self.noted(name) for name in names}
        return {name: noted for name, noted in found.items() if not set(hosts).isdisjoint(noted[0])}
