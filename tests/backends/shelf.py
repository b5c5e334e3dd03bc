"""A backend that is no part of paceline: jobs in a folder, a process for each rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from paceline.backends.base import Backend, Listing, LogLines, Prepared, Shell
from paceline.job.errors import UserError
from paceline.job.job import Instance, Job
from paceline.job.model import Model
from paceline.job.spec import JobSpec


class Options(Model, frozen=True, kw_only=True):
    folder: str


class Shelf(Backend):
    Options = Options
    unsupported = {  # noqa: RUF012
        "image": "a shelf runs no containers",
        "queue": "a shelf has no queues",
        "setup": "a shelf has no shell",
    }

    def prepare(self, spec, *, detached=True):
        self.refuse_unsupported(spec)
        spec = spec.changed({"detached": detached, "name": spec.name or spec.new_name()})
        if spec.ranks in ("auto", "gpu", "cpu", "slots") or spec.nodes != 1:
            raise UserError("-n: a shelf starts as many ranks as you say, on one node; give a number")
        if missing := [name for name in spec.secrets if name not in os.environ]:
            raise UserError(f"secret {missing[0]} is not set in your environment; export it, then submit again")
        if self._path(spec.name).exists():
            raise UserError(f"a job named {spec.name} is on {self.name}; choose another --name, or delete that job")
        return Prepared(spec, [{"rank": rank, "RANK": str(rank)} for rank in range(spec.ranks)], spec.ranks)

    def start(self, prepared, progress):
        spec, number = prepared.spec, 2 if prepared.spec.resume_from else 1
        while spec.name.endswith("-") and self._path(f"{spec.name}{number}").exists():
            number += 1
        spec = spec.changed({"name": f"{spec.name}{number}" if spec.name.endswith("-") else spec.name})
        path = self._path(spec.name)
        path.mkdir(parents=True)
        (path / "spec.json").write_text(json.dumps(spec.dumped()))
        command = (
            [spec.command] if spec.command else [sys.executable, *(["-m"] if spec.module else []), self._target(spec)]
        )
        pids = []
        for rank in range(spec.ranks):
            env = {**os.environ, **spec.env, "RANK": str(rank), "WORLD_SIZE": str(spec.ranks)}
            line = f'cd "$0"; "$@" >{rank}.log 2>&1; echo $? >{rank}.part; mv {rank}.part {rank}.exit'
            words, none = ["sh", "-c", line, str(path), *command, *spec.args], subprocess.DEVNULL
            rank_process = subprocess.Popen(
                words, env=env, stdin=none, stdout=none, stderr=none, start_new_session=True
            )
            pids.append(rank_process.pid)
        (path / "pids.json").write_text(json.dumps(pids))
        return self._job(path)

    def _target(self, spec):
        return os.path.abspath(spec.script) if spec.script else spec.target

    def describe(self, names=None, since=None):
        root = self._path("")
        paths = (
            sorted(root.iterdir()) if names is None and root.exists() else [self._path(name) for name in names or ()]
        )
        jobs = [self._job(path) for path in paths if (path / "pids.json").exists()]
        shown = [job for job in jobs if since is None or not job.finished or job.finished >= since]
        return Listing(sorted(shown, key=lambda job: -job.created) if names is None else shown, len(jobs) - len(shown))

    def spec(self, name):
        return JobSpec.validated(json.loads((self._path(name) / "spec.json").read_text()))

    def events(self, name):
        job = self._job(self._path(name))
        times = {"started": job.started, "finished": job.finished}
        return [{"time": moment, "event": event} for event, moment in times.items() if moment]

    def logs(self, name, query):
        path, place = self._path(name), {}
        ranks = query.ranks if query.ranks is not None else range(self.spec(name).ranks)
        while True:
            is_over = self._job(path).is_over
            for rank in ranks:
                log = path / f"{rank}.log"
                lines = log.read_bytes().splitlines(True) if log.exists() else []
                begin = place.get(rank, 0 if query.tail is None else max(0, len(lines) - query.tail))
                yield from (LogLines(time.time(), 0, rank, "out", line) for line in lines[begin:])
                place[rank] = len(lines)
            if is_over or not query.follow:
                return
            time.sleep(0.05)

    def wait(self, names, seconds=None, tick=lambda ended: None):
        deadline = time.monotonic() + (seconds if seconds is not None else float("inf"))
        while (ended := sum(self._job(self._path(name)).is_over for name in names)) < len(names):
            if time.monotonic() > deadline:
                return False
            tick(ended)
            time.sleep(0.05)
        return True

    def shell(self, name, rank, command, *, terminal=False):
        return Shell(tuple(command) or ("/bin/sh",), {**os.environ, "RANK": str(rank)}, os.getcwd())

    def stop(self, names, now=False):
        for path in map(self._path, names):
            if not self._job(path).is_over:
                (path / "stopped").touch()
                for rank, pid in enumerate(json.loads((path / "pids.json").read_text())):
                    os.killpg(pid, signal.SIGKILL)
                    (path / f"{rank}.exit").write_text("137")
        return {}

    def delete(self, names):
        for path in map(self._path, names):
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        return []

    def _path(self, name):
        return Path(self.options.folder) / name

    def _job(self, path):
        spec, exits = self.spec(path.name), [path / f"{rank}.exit" for rank in range(self.spec(path.name).ranks)]
        begun = (path / "spec.json").stat().st_mtime
        codes = [int(file.read_text()) if file.exists() else None for file in exits]
        is_over, is_stopped = None not in codes, (path / "stopped").exists()
        code = next((code for code in codes if code), 0) if is_over else None
        state = "RUNNING" if not is_over else "STOPPED" if is_stopped else "FAILED" if code else "SUCCEEDED"
        end = max(file.stat().st_mtime for file in exits) if is_over else None
        roles = ["master-0", *(f"worker-{number}" for number in range(spec.ranks - 1))]
        failed = next((rank for rank, code in enumerate(codes) if code), 0)
        trace = (path / f"{failed}.log").read_text().partition("Traceback (")[2] if state == "FAILED" else ""
        return Job(
            name=path.name, state=state, backend=self.name, framework=spec.framework, nodes=1, ranks=spec.ranks,
            attempt=0, exit_code=code, created=begun, started=begun, finished=end, error=None, command=spec.target,
            instances=tuple(Instance(f"{path.name}-{role}", "shelf", i, state) for i, role in enumerate(roles)),
            labels=spec.labels, ttl=spec.ttl, kept_since=end, external_id=f"shelf-{path.stat().st_ino}",
            url=f"https://shelf.example/{path.name}",
            traceback={"rank": failed, "text": "\n".join(trace.splitlines()[-8:])} if trace else None,
        )  # fmt: skip
