"""A Slurm cluster as a backend: a job is a batch job of Slurm, with one agent on each of its nodes.

Slurm's commands run on a login node, this machine or one that ssh reaches, where `node/host/slurm` answers. What is
true is in the job's folder on the disk that the nodes share, and in Slurm.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.backends import noted
from paceline.backends.base import Allocation, Backend, History, Listing, Shell
from paceline.contract.stands import NODE_SIDE
from paceline.job.errors import UserError
from paceline.job.job import Job, Node
from paceline.node.host.slurm.call import batch_environment

from . import options as target
from .flags import FLAGS
from .login import login_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paceline.backends.base import Installer, LogLines, LogQuery, Prepared, ProgressReporter
    from paceline.backends.check.report import Report
    from paceline.backends.foreground import RankStreams
    from paceline.contract import messages
    from paceline.contract.records import EventRecord, JobRecord
    from paceline.contract.stands import Stand
    from paceline.job.job import Contents, Usage, Volume
    from paceline.job.spec import JobSpec

    from .foreground import SlurmRun

_SLURMS_PART = 0.8  # of the time that a look may take: the rest is for the way to the login node
_STEP_SECONDS = 30.0  # for a step of Slurm to start beside the ranks, and to answer
_SHOWN = 4  # names of the jobs of an array


class Slurm(Backend):
    """Jobs of this user on a Slurm cluster."""

    Options: ClassVar = target.Options
    flags: ClassVar = FLAGS
    unsupported: ClassVar[Mapping[str, str]] = {
        "log_dir": "the logs stay in the target's root, which the nodes share",
        "priority": "Slurm computes the priority of a job; --slurm qos=… or nice=… change it",
        "share_devices": "Slurm gives devices to one job alone",
        "keep_warm": "no process of a job outlives its allocation",
        "rendezvous.main_address": "the nodes find each other by Slurm's variables",
        "rendezvous.main_port": "the nodes find each other by Slurm's variables",
        "rendezvous.node_rank": "Slurm numbers the nodes",
        "rendezvous.local_address": "the nodes find out their own names",
    }

    lacks: ClassVar[Mapping[str, str]] = {
        "Moves": "jobs do not move between a Slurm cluster and other machines; submit the script there, with"
        " --checkpoint-dir, and what is saved copied into that folder",
        "Elastic": "its jobs keep their nodes: Slurm adds none to a running job, and takes none away; stop it, and"
        " resubmit it with another --nnodes",
        "TensorBoards": "it starts no TensorBoard later; submit with --tensorboard, or type tensorboard --logdir FOLDER"
        " where the folder can be seen that paceline get shows",
    }

    def __init__(self, name: str, options: target.Options, where: str = "") -> None:
        """Make no connection yet."""
        super().__init__(name, options, where)
        self._given = options
        self._login = login_of(options)
        self._allocation: Allocation | None = None
        self._keeps_expired = False

    def within(self, allocation: Allocation) -> Slurm | None:
        """None for a login node that ssh reaches: it may be another cluster's."""
        if self._given.ssh is not None:
            return None
        found = Slurm(self.name, self._given, self.where)
        found._allocation = allocation
        return found

    # -- start ---------------------------------------------------------------------------------------------------------

    def replaced(self, job: JobSpec, changes: Mapping[str, Any]) -> JobSpec:
        """With --queue, the job's --slurm partition does not count, and the other way round."""
        return target.replaced(job, changes)

    def prepare(self, spec: JobSpec, *, detached: bool = True) -> Prepared:
        from .start import prepare, refuse_new

        self.refuse_unsupported(spec)
        spec, options = self.with_options(self.with_setup(spec))
        allocation = None if detached else self._allocation
        if allocation is not None:
            refuse_new(spec, allocation)
        typed = target.Options.validated({"slurm": spec.options.get("slurm", {})}).slurm
        options = options.changed({"slurm": target.asked(spec, options.slurm, typed)})
        return prepare(self._login, options, spec, detached=detached, target=self.name, allocation=allocation)

    def start(self, prepared: Prepared, progress: ProgressReporter) -> Job:
        from .start import SlurmPrepared, start

        assert isinstance(prepared, SlurmPrepared)
        opened, answer = start(prepared, progress)
        with opened:
            first, *others = [self._noted(self._job(record)) for record in (answer["record"], *answer["others"])]
            opened.keep(first.name)
        if others:
            names = [job.name for job in (first, *others)]
            shown = names if len(names) <= _SHOWN else [*names[:2], "…", names[-1]]
            progress.say(f"an array of {len(names)} jobs: {', '.join(shown)}")
        return first

    def run(self, prepared: Prepared, progress: ProgressReporter, rank_streams: RankStreams) -> SlurmRun:
        from .foreground import SlurmRun
        from .start import SlurmPrepared, start

        assert isinstance(prepared, SlurmPrepared)
        opened, answer = start(prepared, progress, rank_streams)
        job = self._noted(self._job(answer["record"]))
        return SlurmRun(job, opened, self.where_of(job.name), self._allocation)

    def _noted(self, job: Job) -> Job:
        if self.where == f" --on {shlex.quote(self.name)}":
            noted.note(self.name, job.name)
        return job

    def _job(self, record: JobRecord) -> Job:
        return Job.from_record({**record, "backend": self.name})

    def installer(self) -> Installer:
        from paceline.backends.environments.machines import Machines

        return Machines([self._login])

    # -- look ----------------------------------------------------------------------------------------------------------

    def describe(self, names: Sequence[str] | None = None, since: float | None = None) -> Listing:
        request: messages.Describe = {
            "do": "slurm_describe", "names": names, "since": since, "keeps": self._keeps_expired,
        }  # fmt: skip
        if names is None:  # a list of all targets waits no longer for one of them than `look`
            request["seconds"] = _SLURMS_PART * self._login.limits.look
        answer: messages.SlurmDescribed = self._login.ask(request)
        jobs = [self._job(record) for record in answer["jobs"]]
        warnings: tuple[str, ...] = ()
        if answer["problem"]:
            warnings = (f"{self._login.says}{answer['problem']}; the states are those that the nodes wrote last",)
        if names is None:
            jobs.sort(key=lambda job: job.created, reverse=True)
            return Listing(jobs, len(answer["names"]) - len(jobs), warnings)
        for name in set(names) - set(answer["names"]):
            noted.forget(self.name, name)
        return Listing(jobs, 0, warnings)

    def keep_expired(self) -> None:
        self._keeps_expired = True

    def contents(self, names: Sequence[str]) -> Mapping[str, Contents]:
        from paceline.job.job import Contents

        found = self._login.ask({"do": "contents", "names": list(names), "jobs": "slurm"})["contents"] if names else {}
        return {name: Contents(**it) for name, it in found.items()}

    def spec(self, name: str) -> JobSpec:
        from paceline.job.spec import JobSpec

        return JobSpec.from_stored(self._login.ask({"do": "spec", "name": name, "jobs": "slurm"})["spec"])

    def events(self, name: str) -> list[EventRecord]:
        found: messages.Events = self._login.ask({"do": "slurm_events", "name": name})
        return found["events"]

    def history(self, name: str, since: float = 0.0) -> History:
        return History(self._login.ask({"do": "slurm_history", "name": name, "since": since})["nodes"])

    def losses(self, names: Sequence[str]) -> dict[str, list[float]]:
        found: messages.Losses = self._login.ask({"do": "slurm_losses", "names": names})
        return found["losses"]

    def logs(self, name: str, query: LogQuery) -> Iterator[LogLines]:
        import dataclasses

        from paceline.backends.follow import lines
        from paceline.backends.remote.lines import RemoteLines

        request: messages.Logs = {"do": "slurm_logs", "name": name, "query": dataclasses.asdict(query)}
        return lines({name: RemoteLines(self._login, request)}, UserError)

    def nodes(self, warn: Callable[[str], None]) -> list[Node]:
        """The nodes of the cluster; what Slurm has allocated counts as used."""
        answer: messages.SlurmNodes = self._login.ask({"do": "slurm_nodes"})
        return [self._node(found) for found in answer["nodes"]]

    def _node(self, found: messages.SlurmNode) -> Node:
        state = f"{found['state']}: {found['reason']}" if found["reason"] else found["state"]
        return Node(
            found["name"], (), {}, found["cpus"], found["cpus_allocated"], found["memory"], found["memory_allocated"],
            disk=0, disk_used=0, state=state, partitions=tuple(found["partitions"]), address=found["address"],
            device_count=found["gpus"], allocated_count=found["gpus_allocated"], measured=False,
        )  # fmt: skip

    def check(self, progress: ProgressReporter) -> Report:
        """Try what a job needs on the cluster by a short job, of which nothing is left."""
        from .check import check

        return check(self._login, self._given, self.name, progress)

    def usage(self, names: Sequence[str], warn: Callable[[str], None]) -> dict[str, Usage]:
        from paceline.job.job import Usage

        found = self._login.ask({"do": "slurm_usage", "names": list(names)})["usage"] if names else {}
        return {name: Usage(**usage) for name, usage in found.items()}

    def volumes(self, warn: Callable[[str], None]) -> list[Volume]:
        """The volumes of the settings, as the login node sees them."""
        from paceline.job.job import Volume
        from paceline.job.settings import load

        settings = load()
        answer: messages.VolumeLooks = self._login.ask({"do": "volumes", "paths": settings.volumes})
        looks = answer["volumes"]
        found = []
        for name, path in sorted(settings.volumes.items()):
            look, file = looks[name], str(settings.file_of("volumes", name))
            found.append(Volume(name, path, look["problem"], file, look["size"], look["free"]))
        return found

    # -- act -----------------------------------------------------------------------------------------------------------

    def wait(
        self, names: Sequence[str], seconds: float | None = None, tick: Callable[[int], None] = lambda ended: None
    ) -> bool:
        from paceline.backends.follow import wait
        from paceline.node.readers import Readers

        readers: Readers[str, str] = Readers()
        with self._login.listen({"do": "slurm_wait", "names": list(names)}) as answers:
            readers.add("", (answer["ended"] for answer in itertools.takewhile(lambda it: "end" not in it, answers)))
            return wait(readers, len(names), seconds, tick)

    def shell(self, name: str, rank: int, command: Sequence[str], *, terminal: bool = False) -> Shell:
        """A command beside a rank, on its node: a step of Slurm that shares the job's resources."""
        found: messages.ShellPlace = self._login.ask({"do": "slurm_shell", "name": name, "rank": rank})
        if found["is_over"]:
            raise UserError(
                f"job {name} does not run any more, so it has no node; see paceline logs{self.where_of(name)} {name}"
            )
        step = [
            "srun", "--overlap", f"--jobid={found['id']}", f"--nodelist={found['node']}", "--nodes=1",
            "--ntasks=1", "--cpu-bind=none", "--chdir=/", "--quiet", *(["--pty"] if terminal else []),
        ]  # fmt: skip
        request: messages.Beside = {"run": found["run"], "rank": rank, "command": list(command)}
        line = self._login.beside(step, request)
        # Within an allocation srun would take its variables, such as SLURM_GPUS, for flags.
        env = batch_environment({}, None)
        return Shell(tuple(self._login.command(line, "-t" if terminal else "-T")), env, os.getcwd())

    def stands(self, name: str) -> list[Stand]:
        """Where the ranks of a job are that runs: a step on each node asks them; takes some seconds."""
        (job,) = self.describe([name]).jobs
        of_nodes = {it.node: it.rank for it in reversed(job.instances) if it.state == "RUNNING"}
        steps = [self.shell(name, rank, [NODE_SIDE, "stands"]) for rank in of_nodes.values()]
        started = [
            subprocess.Popen(it.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for it in steps
        ]
        found: list[Stand] = []
        why = "no rank of it runs"
        for process in started:
            try:
                out, errors = process.communicate(timeout=_STEP_SECONDS)
                found += json.loads(out)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                why = f"no step of Slurm has started within {_STEP_SECONDS:g} s"
            except ValueError:
                why = errors.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("paceline: ")
        if not found:
            raise UserError(f"job {name}: {why}")
        return found

    def stop(self, names: Sequence[str], now: bool = False) -> Mapping[str, str]:
        self._login.ask({"do": "slurm_stop", "names": list(names), "now": now})
        return {}

    def suspend(self, names: Sequence[str]) -> Mapping[str, str]:
        self._login.ask({"do": "slurm_suspend", "names": list(names), "resumes": False})
        return {}

    def resume(self, names: Sequence[str]) -> Mapping[str, str]:
        self._login.ask({"do": "slurm_suspend", "names": list(names), "resumes": True})
        return {}

    def delete(self, names: Sequence[str]) -> list[str]:
        if names:
            self._login.ask({"do": "slurm_delete", "names": list(names)})
        for name in names:
            noted.forget(self.name, name)
        return []
