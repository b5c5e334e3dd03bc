"""This machine as a backend: every job has an agent that outlives the terminal, and a run directory."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError
from paceline.job.home import jobs_folder
from paceline.job.job import FINAL, Job
from paceline.node import launching, placing, records, tensorboard
from paceline.node.run_directory import RunDirectory, read_json

from .base import Backend, Shell
from .refusals import refusals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.job.job import Node, Usage, Volume
    from paceline.job.spec import JobSpec
    from paceline.node.gauge import Gauge

    from .base import LogLines, LogQuery, Progress

_TICK = 0.2  # seconds between two looks at the clock while nothing happens


def _warn(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr)


class Local(Backend):
    """Jobs of this user on this machine."""

    def __init__(self) -> None:
        self._jobs = jobs_folder()
        self._measures: Gauge | None = None

    # -- submit --------------------------------------------------------------------------------------------------------

    def plan(self, spec: JobSpec) -> dict[str, Any]:
        """What `submit` would do: the complete job, and the variables of its ranks. Starts nothing."""
        from . import prepare
        from .submitting import named

        spec = named(spec).model_copy(update={"detached": True})
        snapshot = spec.code is not None and spec.code.mode == "snapshot"
        spec = prepare.complete(spec, Path.cwd() if snapshot else None)
        return {"job": spec.model_dump(mode="json"), "ranks": prepare.describe_ranks(prepare.place(spec))}

    def submit(self, spec: JobSpec, progress: Progress) -> Job:
        """Start a job that goes on by itself.

        Raises:
            UserError: it cannot run here, or its name is taken.
        """
        from .starting import NameTaken

        if not spec.name.endswith("-"):
            return self._launch(spec, progress)
        first = 2 if spec.resume_from else 1
        for number in itertools.count(first):
            name = f"{spec.name}{number}"
            if not os.path.lexists(self._jobs / name):
                try:
                    return self._launch(spec.model_copy(update={"name": name}), progress)
                except NameTaken:  # by another one, just now
                    continue
        raise AssertionError("unreachable")

    def _launch(self, spec: JobSpec, progress: Progress) -> Job:
        from .submitting import launch

        (job,) = self.describe([launch(spec, progress).spec.name])
        return job

    # -- look ----------------------------------------------------------------------------------------------------------

    def count(self) -> int:
        """How many jobs there are."""
        return len(records.names(self._jobs))

    def describe(self, names: Sequence[str] | None = None, since: float | None = None) -> list[Job]:
        """These jobs, or all, the newest first; those that are unknown are left out."""
        if names is not None:
            line = records.line_of(self._jobs.parent)
            found = (records.record(self._jobs / name, line) for name in names if _is_name(name))
            return [Job.from_record(record) for record in found if record is not None]
        now = time.time()
        jobs = [Job.from_record(record) for record in self._all(since or 0.0)]
        expired = [job.name for job in jobs if job.has_expired(now)]
        if expired:
            self.delete(expired)
        return sorted((job for job in jobs if job.name not in expired), key=lambda job: job.created, reverse=True)

    def _all(self, since: float) -> list[dict[str, Any]]:
        """The records of all jobs but those that ended before `since`.

        Those of jobs that have ended come from the index, as far as it knows them, the others from their folders.
        """
        from paceline.job.index import Index

        present = records.names(self._jobs)
        if not present:
            return []
        index = Index(self._jobs.parent / "jobs.db", _warn)
        known = index.names()
        changed = dict(present.items() - known.items())
        ended = [row for name, row in index.load(since).items() if present.get(name) == known.get(name)]
        line = records.line_of(self._jobs.parent)
        read = {name: records.record(self._jobs / name, line) for name in changed}
        new = {name: (present[name], record) for name, record in read.items() if record and record["state"] in FINAL}
        index.update(new, known.keys() - present.keys())
        index.close()
        old: list[dict[str, Any]] = json.loads(f"[{','.join(ended)}]")
        return old + [r for r in read.values() if r is not None and (r["finished"] is None or r["finished"] >= since)]

    def spec(self, name: str) -> JobSpec:
        """What a job's user asked for."""
        from paceline.job.spec import JobSpec

        stored = read_json(self._run(name).job)
        if stored is None:
            raise UserError(f"job {name} was not stored with what it runs; submit it anew")
        return JobSpec.model_validate(stored["spec"])

    def events(self, name: str) -> list[dict[str, Any]]:
        """What happened to a job."""
        lines = self._run(name).events.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines[:-1]]

    def logs(self, name: str, query: LogQuery) -> Iterator[LogLines]:
        """Lines of a job in the order in which they were written."""
        from .local_logs import read_logs

        return read_logs(self._run(name).path, query)

    def nodes(self) -> list[Node]:
        """This machine."""
        from paceline.job.job import Node

        return [Node(**self._gauge.machine())]

    def usage(self, names: Sequence[str]) -> dict[str, Usage]:
        """What these jobs use now, over a moment or since the last call; those that do not run are left out."""
        from paceline.job.job import Usage

        return {name: Usage(**usage) for name, usage in self._gauge.of_jobs(names).items()}

    @property
    def _gauge(self) -> Gauge:
        """What measures from call to call."""
        if self._measures is None:
            from paceline.node.gauge import Gauge

            from .nvml import reader
            from .prepare import here

            present, slots = here().devices
            self._measures = Gauge(self._jobs, present, reader(), slots=slots)
        return self._measures

    def volumes(self) -> list[Volume]:
        """The volumes that the settings name."""
        from paceline.job.settings import load

        from .volumes import volumes

        return volumes(load())

    # -- act -----------------------------------------------------------------------------------------------------------

    def wait(
        self, names: Sequence[str], seconds: float | None = None, tick: Callable[[int], None] = lambda ended: None
    ) -> bool:
        """Come back when these jobs have ended or the time is over; returns whether they have."""
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        for ended, run in enumerate(map(self._run, names)):
            thread = threading.Thread(target=run.wait_until_free, daemon=True)  # the kernel wakes it, and nobody else
            thread.start()
            while thread.is_alive():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                thread.join(min(_TICK, left))
                tick(ended)
        return True

    def stop(self, names: Sequence[str], now: bool = False) -> None:
        """Ask jobs to stop: cleanly, with their grace, or at once. Jobs that have ended are left as they are."""
        with refusals():
            for run in map(self._run, names):
                launching.stop(run, now)

    def delete(self, names: Sequence[str]) -> None:
        """Remove jobs that have ended, with all that was written for them.

        Raises:
            UserError: one has not ended.
        """
        from paceline.job.code import discard

        runs = [self._run(name) for name in names]
        with refusals():
            for run in runs:
                launching.check_over(run)
        for run in runs:
            code = (read_json(run.job) or {}).get("code")
            if code is not None:
                discard(Path(code["path"]))
            launching.remove(run)

    def shell(self, name: str, rank: int, command: Sequence[str]) -> Shell:
        """How to run a command where a rank runs, and as it does."""
        with refusals():
            env, folder = placing.shell_of(self._run(name), rank)
        return Shell(tuple(command) or (os.environ.get("SHELL", "/bin/sh"),), {**os.environ, **env}, folder)

    def open_tensorboard(self, name: str, logdir: str | None = None) -> str:
        """The address of a job's TensorBoard, which is started if there is none; it shows `logdir`, or its default."""
        from .prepare import python_command

        with refusals():
            return tensorboard.open_for_job(python_command(), self._run(name).path, logdir)

    def close_tensorboard(self, name: str) -> bool:
        """End it; returns whether there was one."""
        return tensorboard.stop(self._run(name).path)

    def _run(self, name: str) -> RunDirectory:
        run = RunDirectory(self._jobs / name)
        if not _is_name(name) or not run.spec.exists():
            raise UserError(f"no job {name}")
        return run


def _is_name(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) is not None
