"""A Kubernetes cluster as a backend: a job is an Indexed Job, its nodes are pods.

Everything goes through the API server, with the user's own permissions. Nothing is installed in the cluster, and pods
need no permission there.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.backends.base import Backend, History, Listing, Shell
from paceline.contract.stands import NODE_SIDE
from paceline.job.errors import UserError

from . import options as target
from .api.client import Cluster
from .api.errors import ApiError, Expired, Gone
from .api.times import text
from .change import queues
from .flags import FLAGS
from .manifests.kinds.job import BatchJob
from .manifests.names import SELECTOR, STARTED, STOPPED, SUSPENDED
from .manifests.objects import PACKAGE, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paceline.backends.base import LogLines, LogQuery, Prepared, ProgressReporter
    from paceline.backends.check.report import Report
    from paceline.backends.foreground import RankStreams
    from paceline.backends.kubernetes.api.object import Object
    from paceline.contract import messages
    from paceline.contract.messages import Describe, OfJob, OpenTensorboard, Request
    from paceline.contract.records import EventRecord
    from paceline.contract.stands import Stand
    from paceline.job.job import Job, Node, Usage, Volume
    from paceline.job.spec import JobSpec

    from .change.forwarding import Forward
    from .look.jobs import Found
    from .look.pods import Pod
    from .start.foreground import KubeRun

_TICK = 5.0  # seconds after which a wait looks again, whatever it was told
_BOARD_SECONDS = 60.0  # for a TensorBoard to start
_ASKED_SECONDS = 10.0  # for which the answer of a job's pods counts for who looks again and again
_GONE_SECONDS = 30.0  # to wait until what was deleted is gone


class Kubernetes(Backend):
    """Jobs in a namespace of a cluster."""

    Options: ClassVar = target.Options
    flags: ClassVar = FLAGS
    unsupported: ClassVar[Mapping[str, str]] = {
        "priority": "pods have a --priority-class",
        "share_devices": "a cluster gives devices to one pod alone",
        "environment": "the packages of a pod are those of its image",
        "keep_warm": "no process of a job outlives its pod",
        "rendezvous.main_address": "pods find each other by themselves",
        "rendezvous.node_rank": "pods are numbered by themselves",
        "rendezvous.local_address": "pods find out their own names",
    }

    def __init__(self, name: str, options: target.Options, where: str = "") -> None:
        super().__init__(name, options, where)
        self._given = options
        self._cluster = Cluster(name, options, where)
        self._answers: dict[str, tuple[float, dict[int, messages.Described]]] = {}  # of the pods of a job, and when

    # -- start ---------------------------------------------------------------------------------------------------------

    def prepare(self, spec: JobSpec, *, detached: bool = True) -> Prepared:
        from .start.submit import prepare

        self.refuse_unsupported(spec)
        spec, options = self.with_options(self.with_setup(spec))
        return prepare(self._cluster, options, spec, detached=detached, target=self.name)

    def start(self, prepared: Prepared, progress: ProgressReporter) -> Job:
        from .look.describe import described

        return described(self._start(prepared, progress), self.name)

    def _start(self, prepared: Prepared, progress: ProgressReporter) -> Found:
        """Start a job; returns it as it was made."""
        from paceline.backends.noted import note

        from .look.jobs import Found
        from .start.submit import KubePrepared, start

        assert isinstance(prepared, KubePrepared)
        made = Found(*start(self._cluster, prepared, progress))
        if self.where == f" --on {self.name}":  # other flags, such as --namespace, would be needed too
            note(self.name, made.name)
        return made

    def run(self, prepared: Prepared, progress: ProgressReporter, wanted: RankStreams) -> KubeRun:
        from .look.describe import described
        from .look.jobs import find
        from .start import holding, submit
        from .start.foreground import KubeRun
        from .start.holding import Lease

        made = self._start(prepared, progress)
        job, uid = described(made, self.name), made.uid
        assert isinstance(prepared, submit.KubePrepared) and prepared.order is not None
        kind, is_held = prepared.order.kind, holding.is_held(prepared.order)
        held = holding.name_of(replace(prepared.order, name=job.name)) if is_held else job.name
        is_plain = prepared.order.options.plain
        limit = None if is_held or not is_plain else prepared.spec.time_limit
        lease = Lease(
            self._cluster, self._cluster.get(self._cluster.path("batch/v1", "jobs", held)),
            None if limit is None else max(1, int(limit)),
        )  # fmt: skip

        self._cluster.ask_on(progress.say, lambda: lease.ends)

        def own() -> Found | None:
            """This job, if it is there; a later one of its name is somebody else's."""
            found = find(self._cluster, [job.name]).get(job.name)
            return found if found is not None and found.uid == uid else None

        def look() -> Job | None:
            return None if own() is None else next(iter(self.describe([job.name]).jobs), None)

        def stop(now: bool) -> None:
            if (found := own()) is not None:
                self._stop(found, now)

        def pass_on(number: int) -> None:
            if (found := own()) is not None:
                self._ask_pods(found, {"do": "signal", "name": job.name, "signal": number})

        def let_go() -> None:
            if is_held:
                with contextlib.suppress(UserError):  # it was deleted
                    holding.let_go(self._cluster, kind, job.name, held, {"metadata": {"uid": uid}})

        return KubeRun(
            self._cluster, job, look, lease, stop=stop, pass_on=pass_on,
            let_go=let_go, is_plain=is_plain,
        )  # fmt: skip

    # -- look ----------------------------------------------------------------------------------------------------------

    def look_until(self, deadline: float) -> None:
        self._cluster.look_until(deadline)

    def ask_on(self, say: Callable[[str], None]) -> None:
        self._cluster.ask_on(say)

    def look_repeatedly(self) -> None:
        self._cluster.mirror()

    def describe(self, names: Sequence[str] | None = None, since: float | None = None) -> Listing:
        from .look.describe import described
        from .look.jobs import explain, find, lost_logs

        found = find(self._cluster, names)
        problem = self._cluster.problem
        old = () if problem is None else (f"{problem}; what is shown is as it was before",)
        is_one = names is not None and len(names) == 1
        for job in found.values() if is_one else ():
            explain(self._cluster, job)
        jobs = {name: described(job, self.name) for name, job in found.items()}
        if is_one and found:
            ((name, job),) = found.items()
            gone = lost_logs(job, jobs[name])
            return Listing([self._asked(job, jobs[name])], 0, (*old, *(() if gone is None else (gone,))))
        if names is not None:
            return Listing([jobs[name] for name in dict.fromkeys(names) if name in jobs], 0, old)
        recent = [job for job in jobs.values() if job.is_recent(since)]
        recent.sort(key=lambda job: job.created, reverse=True)
        return Listing(recent, len(jobs) - len(recent), old)

    def _asked(self, job: Found, found: Job, silent: dict[int, UserError] | None = None) -> Job:
        """A job with what its pods say, if it runs; they are asked now if why some do not answer is put in `silent`."""
        from .look.describe import described
        from .look.inside import asked

        running = [pod for pod in job.newest().values() if pod.runs]
        if found.is_over or not running or job.is_plain:
            return found
        when, answers = self._answers.get(job.name, (0.0, {}))
        if silent is not None or not self._cluster.is_mirrored or time.monotonic() > when + _ASKED_SECONDS:
            request: Describe = {"do": "describe", "names": [job.name], "since": None}
            answers = asked(self._cluster, running, request, job.python, silent)
            self._answers[job.name] = time.monotonic(), answers
        reports = {index: answer["jobs"][0] for index, answer in sorted(answers.items()) if answer.get("jobs")}
        return described(job, self.name, reports)

    def spec(self, name: str) -> JobSpec:
        from .look.jobs import spec_of

        return spec_of(self._find(name))

    def events(self, name: str) -> list[EventRecord]:
        from .look.events import events

        return events(self._cluster, self._find(name))

    def stands(self, name: str) -> list[Stand]:
        answers: dict[int, messages.StandsAnswer]
        answers = self._ask_pods(self._find(name), {"do": "stands", "name": name})
        if not answers:
            raise UserError(f"no pod of job {name} answers")
        return [stand for answer in answers.values() for stand in answer["stands"]]

    def _ask_pods(self, job: Found, request: Request) -> dict[int, Any]:
        """Node rank → the answer of the program in its pod, of those that run and answer."""
        from .look.inside import asked

        return asked(self._cluster, job.running, request, job.python)

    def history(self, name: str, since: float = 0.0) -> History:
        from .look.events import history

        return history(self._cluster, self._find(name), since)

    def logs(self, name: str, query: LogQuery) -> Iterator[LogLines]:
        from .look.logs import lines

        return lines(self._cluster, self._find(name), query)

    def check(self, progress: ProgressReporter) -> Report:
        from .api.errors import ApiError, advice_to_check
        from .check import check

        try:
            return check(self._cluster, self._given)
        except ApiError as error:
            advice = advice_to_check(self._cluster.where)  # it has just failed
            raise UserError(str(error).replace(advice, "ask who runs the cluster for access")) from None

    def nodes(self, warn: Callable[[str], None]) -> list[Node]:
        from .look.machines import nodes

        return nodes(self._cluster, warn)

    def usage(self, names: Sequence[str], warn: Callable[[str], None]) -> dict[str, Usage]:
        from .look.machines import usage

        return usage(self._cluster, names, warn) if names else {}

    def volumes(self, warn: Callable[[str], None]) -> list[Volume]:
        """The PersistentVolumeClaims of the namespace."""
        from .look.machines import volumes

        return volumes(self._cluster)

    def scaleout(self, name: str, more: Sequence[str] | int | None) -> list[str]:
        """Give a job of MIN:MAX pods more of them: a number, or None for MAX; returns what the cluster makes now."""
        from .change.scaling import scale_out

        return scale_out(self._cluster, self._find(name), more)

    def scalein(self, name: str, fewer: Sequence[str] | int) -> list[str]:
        """Take pods from a job of MIN:MAX pods, which goes on without them; returns those that leave."""
        from .change.scaling import scale_in

        return scale_in(self._cluster, self._find(name), fewer)

    def _find(self, name: str) -> Found:
        """A job."""
        from .look.jobs import find

        found = find(self._cluster, [name]).get(name)
        if found is None:
            raise self._no_job(name)
        return found

    def _no_job(self, name: str) -> UserError:
        return UserError(f"no job {name} in namespace {self._cluster.namespace}")

    # -- act -----------------------------------------------------------------------------------------------------------

    def wait(
        self, names: Sequence[str], seconds: float | None = None, tick: Callable[[int], None] = lambda ended: None
    ) -> bool:
        from .look.describe import is_over
        from .look.jobs import find

        deadline = None if seconds is None else time.monotonic() + seconds
        path, known = BatchJob().path(self._cluster), set[str]()
        while True:
            version = str(self._cluster.get(path, limit=1, labelSelector=SELECTOR)["metadata"]["resourceVersion"])
            there = find(self._cluster, names)
            if missing := [name for name in names if name not in there and name not in known]:
                raise self._no_job(missing[0])
            known.update(there)  # one that is gone later has ended
            going = [job for job in there.values() if not is_over(job)]
            tick(len(there) - len(going))
            if not going:
                return True
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            if path not in (paths := [job.kind.path(self._cluster) for job in going]):
                path = paths[0]  # from now on
                continue
            self._wait_for_change(path, version, names, min(_TICK, remaining or _TICK))

    def _wait_for_change(self, path: str, version: str, names: Sequence[str], seconds: float) -> None:
        """Wait until one of these jobs changes, or the time is over."""
        until = time.monotonic() + seconds
        try:
            for kind, item in self._cluster.watch(path, version, seconds, labelSelector=SELECTOR):
                if kind != "BOOKMARK" and item["metadata"]["name"] in names:
                    return
                if time.monotonic() > until:
                    return
        except Expired:
            return

    def shell(self, name: str, rank: int, command: Sequence[str], *, terminal: bool = False) -> Shell:
        """A command (a shell if it is empty) in the pod of a rank, with its variables; kubectl connects to it."""
        from .api.credentials import kubectl

        job = self._find(name)
        number = rank // max(1, job.ranks_per_pod)
        pod = job.newest().get(job.numbers[number]) if number < len(job.numbers) else None
        if pod is None or pod.is_over or not pod.has_log:
            raise UserError(f"the pod of rank {rank} of job {name} does not run, so no command can run there")
        if job.is_plain and command[:1] == [NODE_SIDE]:
            raise UserError(f"job {name} is a plain one: its pods have nothing of paceline beside the command")
        has_terminal = terminal and sys.stdout.isatty()
        words = ["exec", "-i", *(["-t"] if has_terminal else []), pod.name, "-c", pod.container, "--"]
        if job.is_plain:
            words += command or ["/bin/sh"]
        else:
            request = {"root": ROOT, "name": name, "rank": rank, "command": list(command)}
            text = base64.urlsafe_b64encode(json.dumps(request).encode()).decode()
            words += [job.python, PACKAGE, "shell", text]
        return kubectl("attach or profile", self._given, self._cluster.namespace, *words)

    def open_tensorboard(self, name: str, logdir: str | None, warn: Callable[[str], None]) -> str:
        from .look.inside import answer_of

        job, pod = self._with_board(name)
        request: OpenTensorboard = {"do": "open_tensorboard", "name": name, "logdir": logdir}
        answer: messages.Url = answer_of(self._cluster, pod, request, job.python, _BOARD_SECONDS)
        return answer["url"]

    def forward_tensorboard(
        self, name: str, url: str, warn: Callable[[str], None], *, port: int | None = None
    ) -> Forward:
        """Lead a port of this machine to the TensorBoard in its pod; see `Forwards`."""
        from .change.forwarding import Forward

        _, pod = self._with_board(name)
        return Forward(self._cluster, self._given, pod.name, url, warn=warn, port=port)

    def reach_tensorboard(self, name: str, url: str) -> str | None:
        _, pod = self._first(name)
        return None if pod is None else f"reach it with: paceline tensorboard{self.where_of(name)} {name}"

    def close_tensorboard(self, name: str) -> bool:
        from .look.inside import answer_of

        job, pod = self._first(name)
        if pod is None:  # it has ended with its pod
            return False
        request: OfJob = {"do": "close_tensorboard", "name": name}
        answer: messages.Ran = answer_of(self._cluster, pod, request, job.python, _BOARD_SECONDS)
        return answer["ran"]

    def _with_board(self, name: str) -> tuple[Found, Pod]:
        """A job and the pod of rank 0, in which its TensorBoard runs or can be started."""
        job, pod = self._first(name)
        if pod is None:
            raise UserError(
                f"the pod of rank 0 of job {name} does not run, and so no TensorBoard; another job with its volume "
                "(--data), --tensorboard and --logdir shows what is there"
            )
        return job, pod

    def _first(self, name: str) -> tuple[Found, Pod | None]:
        """A job with an agent, and the pod of rank 0 if it runs."""
        job = self._find(name)
        pod = job.newest().get(0)
        return job, pod if pod is not None and pod.runs and not job.is_plain else None

    def stop(self, names: Sequence[str], now: bool = False) -> Mapping[str, str]:
        """Stop jobs: they are suspended, so their pods get SIGTERM and their grace."""
        from .look.describe import is_over
        from .look.jobs import find

        for job in find(self._cluster, names).values():
            if not is_over(job):
                self._stop(job, now)
        return {}

    def suspend(self, names: Sequence[str]) -> Mapping[str, str]:
        """Suspend jobs as `stop` does, but not those that would lose what they have saved."""
        from .look.describe import described, is_over, outlasts
        from .look.jobs import find

        found = {name: job for name, job in find(self._cluster, names).items() if not is_over(job)}
        for name, job in found.items():
            if not job.kind.can_suspend(job.object):
                raise job.kind.refusal("suspend", f"of {job.kind.api_version} here cannot be suspended; stop it")
            if not job.spec.detached:
                raise UserError(f"job {name} belongs to the paceline run that started it; stop it with Ctrl-C there")
            silent: dict[int, UserError] = {}
            it, asked = self._asked(job, described(job, self.name), silent), job.spec.checkpoint_dir or "a folder"
            folder = it.checkpoint["folder"] if it.checkpoint is not None else asked
            if silent and not outlasts(job, folder):
                raise UserError(
                    f"whether job {name} has saved something in its pods, which go when it is suspended, is not known: "
                    f"{next(iter(silent.values()))}; end it with paceline stop{self.where_of(name)} {name}"
                )
            if (it.checkpoint or it.progress) is not None and not outlasts(job, folder):
                raise UserError(
                    f"job {name} saves in {folder} of its pods, which go when it is suspended, and with them all that "
                    f"it has saved; submit it with --checkpoint-dir on a volume, or end it with "
                    f"paceline stop{self.where_of(name)} {name}"
                )
        for job in found.values():
            if not job.is_suspended or SUSPENDED not in job.annotations:
                self._stop(job, now=False, mark=SUSPENDED)
        return {}

    def resume(self, names: Sequence[str]) -> Mapping[str, str]:
        """Let suspended jobs have pods again; one with a queue once that admits it."""
        from .look.jobs import find

        for job in find(self._cluster, names).values():
            if job.is_suspended and STOPPED not in job.annotations:
                changes: Object = {"metadata": {"annotations": {SUSPENDED: None}}}
                queue = job.spec.queue
                if queue and queues.version(self._cluster) is not None:
                    changes["metadata"]["labels"] = queues.activate(self._cluster, job.object, queue)
                else:
                    changes["spec"] = job.kind.suspension(job.object, False)
                self._cluster.patch(job.kind.path(self._cluster, job.name), changes)
        return {}

    def _stop(self, job: Found, now: bool, mark: str = STOPPED) -> None:
        from .look.describe import described

        started = described(job, "").started
        # Its pods go, and its object forgets when it started. Since the other mark kubectl may have resumed it.
        times = {STOPPED: None, SUSPENDED: None, mark: time.time(), STARTED: started}
        marks: Object = {"annotations": {key: None if it is None else text(it) for key, it in times.items()}}
        changes = {"metadata": marks, "spec": job.kind.suspension(job.object, True)}
        if labels := queues.deactivate(self._cluster, job.object):
            marks["labels"] = labels
        self._cluster.patch(job.kind.path(self._cluster, job.name), changes)
        for pod in self._find(job.name).pods if now else ():
            if not pod.is_over:
                with contextlib.suppress(Gone):
                    self._cluster.delete(self._cluster.path("v1", "pods", pod.name), gracePeriodSeconds=0)

    def delete(self, names: Sequence[str]) -> list[str]:
        """Remove jobs that have ended, and in the background all that they own."""
        from paceline.backends.noted import forget

        from .look.describe import is_over
        from .look.jobs import find

        notes = []
        there = find(self._cluster, names)
        for name, it in there.items():
            if not is_over(it):
                stop = f"paceline stop{self.where_of(name)} {name}"
                raise UserError(f"job {name} has not ended; stop it first with {stop}")
        for name in names:
            if name in there and not self._is_removed(there[name]):
                see = f"kubectl get {there[name].kind.plural} {name}"
                notes.append(f"the cluster still removes job {name}; a finalizer may keep it: see {see}")
            else:
                forget(self.name, name)
        return notes

    def _is_removed(self, job: Found) -> bool:
        """Delete the object of a job; returns whether it is gone. Another one of its name, which is newer, stays."""
        path, uid = job.kind.path(self._cluster, job.name), job.object["metadata"]["uid"]
        until = time.monotonic() + _GONE_SECONDS
        try:
            try:
                self._cluster.delete(path, preconditions={"uid": uid})
            except ApiError as error:
                if error.code != 409 or self._cluster.get(path)["metadata"]["uid"] == uid:
                    raise
            while time.monotonic() < until:
                if self._cluster.get(path)["metadata"]["uid"] != uid:
                    return True
                time.sleep(0.1)
        except Gone:
            return True
        return False
