"""This machine as a backend: every job has an agent that outlives the terminal, and a run directory."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from dataclasses import fields
from typing import TYPE_CHECKING, ClassVar, Literal

from paceline.backends.base import Backend, History, Listing, Shell
from paceline.backends.refusals import refusals
from paceline.job import settings_files
from paceline.job.errors import UserError
from paceline.job.job import ELSEWHERE, Job
from paceline.job.paths import jobs_folder, make_private
from paceline.node import tensorboard
from paceline.node.files import read_json
from paceline.node.journal.fold import fold, is_recent
from paceline.node.journal.state import FINAL
from paceline.node.rundir.directory import RunDirectory
from paceline.node.store import records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paceline.backends.base import Installer, JobExport, LogLines, LogQuery, Prepared, ProgressReporter
    from paceline.backends.check.inspect import Inspected
    from paceline.backends.foreground import RankStreams
    from paceline.contract.messages import WarmWanted
    from paceline.contract.records import EventRecord, JobRecord
    from paceline.contract.stands import Stand
    from paceline.job.job import Contents, Node, Usage, Volume, WarmServer
    from paceline.job.spec import JobSpec

    from .foreground import LocalRun

_KEYS = len(fields(Job)) - len(ELSEWHERE)  # of a record
_SAME_TIME = 1.0  # seconds in which two changes of a folder may have the same time
_REREAD = 30.0  # seconds after which a folder that has not changed is read again


class Local(Backend):
    """Jobs of this user on this machine."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "image": "this machine runs images as one of the hosts; add -H localhost",
        "queue": "this machine has no queues of that kind",
    }

    def __init__(self, name: str, options: None = None, where: str = "") -> None:
        """Read nothing yet."""
        super().__init__(name, options, where)
        self._jobs = jobs_folder()
        self._keeps_expired = False
        self._ended: dict[str, tuple[int, Job]] | None = None  # with their identities; None: not remembered
        self._over: tuple[dict[str, int], list[Job]] | None = None  # what there is, as long as all of it has ended
        self._read: tuple[dict[str, int], float, float | None] = {}, 0.0, None  # the names, when, the folder's time

    # -- start ---------------------------------------------------------------------------------------------------------

    def prepare(self, spec: JobSpec, *, detached: bool = True) -> Prepared:
        from .prepare import prepared

        self.refuse_unsupported(spec)
        return prepared(self.with_setup(spec), detached=detached)

    def prepare_moved(self, spec: JobSpec, export: JobExport) -> Prepared:
        from .prepare import prepared

        self.refuse_unsupported(spec)
        return prepared(self.with_setup(spec), detached=True, export=export)

    def with_setup(self, spec: JobSpec) -> JobSpec:
        if settings_files.exist():
            from paceline.job.settings import load  # takes long to import, and few jobs need it

            local = load().local
            self.setup, self.environment = local.setup, local.environment
        return super().with_setup(spec)

    def installer(self) -> Installer:
        from paceline.backends.environments.machines import Machines, this_machine

        return Machines([this_machine()])

    def export(self, name: str, *, fresh: bool) -> JobExport:
        from paceline.backends.moving import export_of
        from paceline.node.store import moving

        run = self._run(name)
        write = refusals()(functools.partial(moving.write, run, fresh=fresh))
        return export_of(name, "this machine", moving.inventory(run), write)

    def start(self, prepared: Prepared, progress: ProgressReporter) -> Job:
        from .start import start

        report = start(prepared, progress).report
        record = fold(report["job"], [report["part"]])
        return Job.from_record(record)

    def run(self, prepared: Prepared, progress: ProgressReporter, rank_streams: RankStreams) -> LocalRun:
        from .foreground import LocalRun

        return LocalRun(prepared, progress, rank_streams)

    # -- look ----------------------------------------------------------------------------------------------------------

    def describe(self, names: Sequence[str] | None = None, since: float | None = None) -> Listing:
        if names is not None:
            queue = records.queue_of(self._jobs.parent)
            runs = [run for name in names if (run := records.find(self._jobs, name)) is not None]
            found = (records.record(run.path, queue) for run in runs)
            return Listing([Job.from_record(record) for record in found if record is not None])
        if self._ended and since is None:
            return Listing(self._again(self._ended))
        warnings: list[str] = []
        all_records, count = self._all(since or 0.0, warnings.append)
        jobs = sorted(map(Job.from_record, all_records), key=lambda job: job.created, reverse=True)
        if self._ended is not None and since is None and self._keeps_expired:
            present = self._names()
            self._ended = {it.name: (present[it.name], it) for it in jobs if it.is_over and it.name in present}
        return Listing(jobs, count - len(jobs), tuple(warnings))

    def _names(self) -> dict[str, int]:
        """The names of all jobs, with their identities."""
        try:
            return records.names(self._jobs)
        except OSError as error:
            raise UserError(f"cannot read {self._jobs}: {error.strerror}; is PACELINE_HOME right, and yours?") from None

    def _names_again(self) -> dict[str, int]:
        """As `_names`, but the folder is read only if it has changed, and now and then for what it links to."""
        now = time.time()
        try:
            changed = self._jobs.stat().st_mtime
        except OSError:
            return self._names()
        names, read, was_changed = self._read
        if changed != was_changed or not 0 <= now - read < _REREAD:
            names = self._names()
            self._read = names, now, changed if now - changed > _SAME_TIME else None
        return names

    def look_repeatedly(self) -> None:
        """See `Backend`: jobs that have ended are remembered, if those whose time to live is over are kept."""
        self._ended = {} if self._ended is None else self._ended

    def _again(self, ended: dict[str, tuple[int, Job]]) -> list[Job]:
        """All jobs, the newest first; those that have not changed since the last look are the same objects.

        If all have ended, it is the same list.
        """
        present = self._names_again()
        if self._over is not None and self._over[0] is present:
            return self._over[1]
        queue = records.queue_of(self._jobs.parent)
        for name in ended.keys() - present.keys():
            del ended[name]
        going = []
        for name, identity in present.items():
            if name in ended and ended[name][0] == identity:
                continue
            record = records.record(self._jobs / name, queue)
            job = None if record is None else Job.from_record({**record, "traceback": None})
            if job is not None and job.is_over:
                ended[name] = identity, job
            elif job is not None:
                going.append(job)
        found = sorted([*going, *(job for _, job in ended.values())], key=lambda job: job.created, reverse=True)
        self._over = (present, found) if len(ended) == len(present) else None
        return found

    def _all(self, since: float, warn: Callable[[str], None]) -> tuple[list[JobRecord], int]:
        """The records of all jobs but those that ended before `since`, and how many jobs there are.

        Jobs whose time to live is over are removed, unless they are to be kept. Records of jobs that have ended come
        from the index, if it has them; the others are read from their folders.
        """
        from paceline.job.index import Index

        now = time.time()
        present = self._names()
        if not present:
            return [], 0
        make_private(self._jobs.parent)
        index = Index(self._jobs.parent / "jobs.db", _KEYS, warn)
        known = index.names()
        changed = dict(present.items() - known.items())
        try:
            rows = [row for name, row in index.load(since).items() if name in present and name not in changed]
            old: list[JobRecord] = json.loads(f"[{','.join(rows)}]")
            if not all(len(record) == _KEYS for record in old):
                raise ValueError("its records lack something")
        except (ValueError, TypeError) as error:
            index.discard(error)
            index.close()
            return self._all(since, warn)
        queue = records.queue_of(self._jobs.parent)
        read = {name: record for name in changed if (record := records.record(self._jobs / name, queue)) is not None}
        ended = {name: record for name, record in read.items() if record["state"] in FINAL}
        for record in read.values():
            record["traceback"] = None  # `get` reads it from the folder
        for record in ended.values():
            record["kept_since"] = record["kept_since"] or now  # when it was seen first that it is over
        index.update({name: (present[name], record) for name, record in ended.items()}, known.keys() - present.keys())
        expired = [] if self._keeps_expired else index.expired(now)
        for name in expired:
            with contextlib.suppress(UserError):  # what cannot be removed now can be later
                self._remove(name)
        index.close()
        count = len(present) - len(changed) + len(read) - len(expired)
        new = (record for record in read.values() if is_recent(record, since))
        return [record for record in (*old, *new) if record["name"] not in expired], count

    def keep_expired(self) -> None:
        self._keeps_expired = True

    def contents(self, names: Sequence[str]) -> Mapping[str, Contents]:
        from paceline.job.job import Contents
        from paceline.node.store.usage import contents

        runs = [run for name in names if (run := records.find(self._jobs, name)) is not None]
        return {run.path.name: Contents(**contents(run)) for run in runs}

    def spec(self, name: str) -> JobSpec:
        from paceline.job.spec import JobSpec

        stored = read_json(self._run(name).job) or {}
        try:
            return JobSpec.from_stored(stored.get("spec"))
        except ValueError:  # a damaged file
            raise UserError(f"what job {name} runs cannot be read from its folder; submit it again") from None

    def events(self, name: str) -> list[EventRecord]:
        with refusals():
            return records.events(self._run(name))

    def history(self, name: str, since: float = 0.0) -> History:
        from paceline.node.telemetry.history import history

        return History([history(self._run(name), since)])

    def losses(self, names: Sequence[str]) -> dict[str, list[float]]:
        from paceline.node.telemetry.history import losses

        runs = [run for name in names if (run := records.find(self._jobs, name)) is not None]
        return {run.path.name: found for run in runs if (found := losses(run))}

    def stands(self, name: str) -> list[Stand]:
        from paceline.node.watching import live

        with refusals():
            return live.stands(self._run(name))

    def logs(self, name: str, query: LogQuery) -> Iterator[LogLines]:
        from paceline.node.logs.reader import check, read

        run = self._run(name)
        with refusals():
            check(run.path, query)
        return read(run.path, query)

    def check(self, progress: ProgressReporter) -> Inspected:
        from paceline.backends.check.findings import findings
        from paceline.backends.check.inspect import Inspected, inspect_local

        seen = inspect_local()
        return Inspected(seen, findings(seen, os.environ))

    def nodes(self, warn: Callable[[str], None]) -> list[Node]:
        from paceline.job.job import Node
        from paceline.node.machine.nvml import gpus
        from paceline.node.store.usage import node

        from .prepare import here

        devices, slots = here().devices
        return [Node(**node(self._jobs.parent, self._jobs, devices, gpus, slots=slots))]

    def usage(self, names: Sequence[str], warn: Callable[[str], None]) -> dict[str, Usage]:
        from paceline.job.job import Usage
        from paceline.node.store.usage import of_jobs

        runs = [run for name in names if (run := records.find(self._jobs, name)) is not None]
        return {name: Usage(**usage) for name, usage in of_jobs(runs).items()}

    def start_warm(self, wanted: WarmWanted, warn: Callable[[str], None]) -> list[WarmServer]:
        from paceline.job.job import WarmServer
        from paceline.node.store import warming

        from .prepare import here, home

        with refusals():
            return [WarmServer(self.name, **warming.start(home(), here(), wanted))]

    def ask_warm(self, what: Literal["describe", "stop"], warn: Callable[[str], None]) -> list[WarmServer]:
        from paceline.job.job import WarmServer
        from paceline.node.store import warming

        from .prepare import home

        return [WarmServer(self.name, **answer) for answer in warming.ask(home(), what)]

    def volumes(self, warn: Callable[[str], None]) -> list[Volume]:
        from paceline.backends.volumes import volumes
        from paceline.job.settings import load

        return volumes(load())

    # -- act -----------------------------------------------------------------------------------------------------------

    def wait(
        self, names: Sequence[str], seconds: float | None = None, tick: Callable[[int], None] = lambda ended: None
    ) -> bool:
        from paceline.backends.follow import wait
        from paceline.node.readers import Readers

        readers: Readers[str, str] = Readers()
        readers.add("", _ended([self._run(name) for name in names]))
        return wait(readers, len(names), seconds, tick)

    def stop(self, names: Sequence[str], now: bool = False) -> Mapping[str, str]:
        from paceline.node.store import lifecycle

        with refusals():
            lifecycle.stop([self._run(name) for name in dict.fromkeys(names)], now)
        return {}

    def suspend(self, names: Sequence[str]) -> Mapping[str, str]:
        return self._suspend(names, resumes=False)

    def resume(self, names: Sequence[str]) -> Mapping[str, str]:
        return self._suspend(names, resumes=True)

    def _suspend(self, names: Sequence[str], *, resumes: bool) -> Mapping[str, str]:
        from paceline.node.store import lifecycle

        with refusals():
            lifecycle.suspend([self._run(name) for name in dict.fromkeys(names)], resumes)
        return {}

    def delete(self, names: Sequence[str]) -> list[str]:
        """Remove jobs that have ended, with all their files; a job that does not exist is no error."""
        for job in self.describe(names).jobs:
            if job.state == "LOST":
                raise UserError(f"job {job.name} belongs to another machine: {job.error}; delete it there")
            if not job.is_over:
                raise UserError(f"job {job.name} has not ended; stop it first: paceline stop {job.name}")
        for name in names:
            self._remove(name)
        return []

    def _remove(self, name: str) -> None:
        """Rename a job's folder to a hidden name, then remove it."""
        from .prepare import home

        with refusals():
            home().remove(RunDirectory(self._jobs / name))

    def shell(self, name: str, rank: int, command: Sequence[str], *, terminal: bool = False) -> Shell:
        from paceline.node.ranks.placement import shell_of

        with refusals():
            words, env, folder = shell_of(self._run(name), rank, command)
        return Shell(tuple(words), env, folder)

    def open_tensorboard(self, name: str, logdir: str | None, warn: Callable[[str], None]) -> str:
        from .prepare import python_command

        with refusals():
            return tensorboard.open_for_job(python_command(), self._run(name).path, logdir)

    def reach_tensorboard(self, name: str, url: str) -> None:
        """See `TensorBoards`."""

    def close_tensorboard(self, name: str) -> bool:
        return tensorboard.stop(self._run(name).path)

    def _run(self, name: str) -> RunDirectory:
        run = records.find(self._jobs, name)
        if run is None:
            raise UserError(f"no job {name}")
        return run


def _ended(runs: Sequence[RunDirectory]) -> Iterator[str]:
    """The names of jobs, each when it has ended."""
    for run in runs:
        run.wait_until_free()
        yield run.path.name
