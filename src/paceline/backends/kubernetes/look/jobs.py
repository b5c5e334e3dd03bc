"""Jobs as the verbs show them, from the Job objects of a cluster and their pods."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from paceline.backends.kubernetes.api.errors import ApiError
from paceline.backends.kubernetes.api.times import moment
from paceline.backends.kubernetes.manifests import kept
from paceline.backends.kubernetes.manifests.kinds.job import BatchJob
from paceline.backends.kubernetes.manifests.kinds.served import served
from paceline.backends.kubernetes.manifests.names import CODE, INSTANCE, LABELS, SELECTOR, SPEC, STOPPED, role_of
from paceline.backends.kubernetes.manifests.objects import PROGRAM
from paceline.job.errors import UserError
from paceline.job.job import Instance, Job
from paceline.node.journal.fold import fold

from .pods import TAKEN_AWAY, Pod, seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from paceline.backends.kubernetes.api.client import Cluster, Object
    from paceline.backends.kubernetes.manifests.kinds.base import Ending, Kind
    from paceline.contract.records import CodeRecord
    from paceline.job.spec import JobSpec

STOP_CODE = 143  # of a job that was stopped: SIGTERM
TIMED_OUT = 124  # of a job that reached its time limit
_MOST_NAMES = 50  # in a selector


class Found:
    """A job's object and what is kept of its pods.

    Attributes:
        object: the Job, or an object of another kind.
        kind: its kind.
        pods: its pods, by node rank; of several of a rank the newest comes last.
        why: what keeps it from having all its pods; None if nothing does.
    """

    def __init__(self, found: Object, kind: Kind) -> None:
        self.object = {"apiVersion": kind.api_version, "kind": kind.title, **found}
        self.kind = kind
        self.pods: list[Pod] = []
        self.why: str | None = None

    @property
    def name(self) -> str:
        """Of the job."""
        return str(self.object["metadata"]["name"])

    @property
    def spec(self) -> dict[str, Any]:
        """What the user asked for, as far as it differs from the defaults."""
        try:
            found = json.loads(self.annotations.get(SPEC, ""))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def annotations(self) -> Mapping[str, str]:
        """Of the object."""
        return self.object["metadata"].get("annotations") or {}

    @property
    def nodes(self) -> int:
        """How many pods it has."""
        return self.kind.nodes(self.object)

    @property
    def least(self) -> int:
        """How many pods it needs."""
        low, _, high = str(self.spec.get("nodes", "")).partition(":")
        return int(low) if high else self.nodes

    @property
    def numbers(self) -> Sequence[int]:
        """The node ranks that it has now: all, or of MIN:MAX those whose pods run or have ended."""
        if self.least == self.nodes:
            return range(self.nodes)
        there = [index for index, pod in sorted(self.newest().items()) if pod.has_log and not pod.is_leaving]
        return there or range(self.least)

    @property
    def python(self) -> str:
        """The interpreter of its pods, if they have an agent."""
        return str(self._command[0])

    @property
    def is_plain(self) -> bool:
        """Whether it has no agent."""
        return PROGRAM not in self._command

    @property
    def _command(self) -> Sequence[str]:
        return self.kind.main_container(self.object).get("command") or ["python3"]

    @property
    def ending(self) -> Ending | None:
        """How it has ended; None if it has not."""
        return self.kind.ending(self.object)

    @property
    def is_suspended(self) -> bool:
        """Whether it is to have no pods."""
        return self.kind.is_suspended(self.object)

    def newest(self) -> dict[int, Pod]:
        """Node rank → the last pod of it."""
        return {pod.index: pod for pod in self.pods}


def find(cluster: Cluster, names: Sequence[str] | None) -> dict[str, Found]:
    """The jobs of these names, or all, each with its pods; in a call for each kind, if there are not too many.

    Raises:
        UserError: the server refuses to list them.
    """
    if names is not None and not names:
        return {}
    found: dict[str, Found] = {}
    selector = SELECTOR
    if names is not None and len(names) <= _MOST_NAMES:
        selector += f",{INSTANCE} in ({','.join(names)})" if all(map(_is_label, names)) else ""
    for kind in _kinds(cluster, lambda: names is not None and len(found) == len(set(names))):
        for item in _listed(cluster, kind, selector):
            if names is None or item["metadata"]["name"] in names:
                found[item["metadata"]["name"]] = Found(item, kind)
    if not found:
        return found
    for page in cluster.list(cluster.path("v1", "pods"), labelSelector=selector):
        for item in page["items"]:
            pod = seen(item)
            if pod.job in found:
                found[pod.job].pods.append(pod)
    for job in found.values():
        job.pods.sort(key=lambda pod: (pod.index, not pod.is_leaving, pod.created))
    return found


def _kinds(cluster: Cluster, has_all: Callable[[], bool]) -> Iterator[Kind]:
    """The kinds that jobs may be, until all are found: Jobs first, then what operators have brought."""
    yield BatchJob()
    if not has_all():
        for kind in served(cluster):
            if not isinstance(kind, BatchJob):
                yield kind


def _listed(cluster: Cluster, kind: Kind, selector: str) -> Iterator[Object]:
    try:
        for page in cluster.list(kind.path(cluster), labelSelector=selector):
            yield from page["items"]
    except ApiError as error:
        if isinstance(kind, BatchJob) or error.code not in (403, 404):
            raise  # other kinds: this user has none of them


def _is_label(name: str) -> bool:
    from paceline.backends.kubernetes.manifests.names import label_value

    return label_value(name) is not None


def explain(cluster: Cluster, job: Found) -> None:
    """Find out from events why a job does not have its pods, or they do not run."""
    if job.ending is not None or job.is_suspended:
        return
    newest = job.newest()
    if len(newest) >= job.nodes and all(pod.phase != "Pending" for pod in newest.values()):
        return
    try:
        pages = list(cluster.list(cluster.path("v1", "events"), fieldSelector="type=Warning"))
        events = [event for page in pages for event in page["items"]]
    except ApiError:
        return
    events.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    about: dict[tuple[str, str], list[Object]] = {}
    for event in events:
        target = event.get("involvedObject") or {}
        about.setdefault((target.get("kind", ""), target.get("name", "")), []).append(event)
    if len(newest) < job.nodes:
        for event in (event for part in job.kind.parts(job.name) for event in about.get(part, ())):
            job.why = " ".join(str(event.get("message") or "").split())
        if job.why and "exceeded quota" in job.why:
            job.why += "; ask for less, or have the quota of the namespace raised"
    if any(about.get(("Pod", pod.name)) for pod in job.pods):
        selector = f"{SELECTOR},{INSTANCE} in ({job.name})"  # as in `find`
        items = [
            item for page in cluster.list(cluster.path("v1", "pods"), labelSelector=selector) for item in page["items"]
        ]
        job.pods = [seen(item, about.get(("Pod", item["metadata"]["name"]), ())) for item in items]
        job.pods.sort(key=lambda pod: (pod.index, not pod.is_leaving, pod.created))


# -- what the verbs show -----------------------------------------------------------------------------------------------


def shown(job: Found, target: str, namespace: str) -> Job:
    """A job as the verbs show it."""
    spec, status = job.spec, job.object.get("status") or {}
    state, code, finished = _state(job)
    pods = job.newest()
    reports = [pod.report for pod in pods.values() if pod.report]
    nproc = _ranks(spec, reports)
    over = state in ("SUCCEEDED", "FAILED", "STOPPED")
    waiting = None if over else _waiting(job, pods)
    ttl = None if over and job.ending is None else job.kind.ttl(job.object)  # a suspended job is kept
    culprit = _culprit(pods.values())
    return Job(
        name=job.name, state=state, backend=target,
        framework=spec.get("framework") or next((it["framework"] for it in reports if "framework" in it), None),
        nodes=len(job.numbers), ranks=len(job.numbers) * nproc,
        attempt=max((int(it.get("attempt") or 0) for it in reports), default=0), exit_code=code,
        created=moment(job.object["metadata"]["creationTimestamp"]) or 0.0, started=_started(pods, status, state),
        finished=finished, instances=_instances(job, pods, nproc, state),
        error=_error(job, culprit) if state == "FAILED" else None, waiting=waiting,
        restarts=max((int(it.get("restarts") or 0) for it in reports), default=0),
        max_restarts=int(spec.get("max_restarts") or 0), devices=_devices(spec, pods),
        devices_asked=spec.get("devices"),
        priority=int(spec.get("priority") or 0), queue=spec.get("queue"), labels=_labels(job),
        options=spec.get("options") or {},
        ttl=None if ttl is None else float(ttl), kept_since=finished if over else None,
        grace=float(spec.get("grace", 30.0)), command=_command(spec), working_dir=str(spec.get("working_dir") or "."),
        folder="", code=_code(job, reports),
        data=tuple(
            {"volume": it["volume"], "path": it["path"], "wanted": it["path"], "visible": True, "variable": ""}
            for it in spec.get("data") or ()
        ),
        progress=next((it["progress"] for it in reports if it.get("progress")), None),
        checkpoint=next((it["checkpoint"] for it in reports if it.get("checkpoint")), None),
        external_id=f"{namespace}/{job.name}", logs=kept.shown(kept.of(job.annotations)),
    )  # fmt: skip


def detailed(job: Job, answers: Mapping[int, Mapping[str, Any]]) -> Job:
    """A job that runs, with what the programs in its pods say of their parts."""
    reports = {index: it["jobs"][0] for index, it in sorted(answers.items()) if it.get("jobs")}
    records = {index: fold(report["job"], [report["part"]]) for index, report in reports.items()}
    if not records:
        return job
    ranks = {rank["rank"]: rank for record in records.values() for rank in record["instances"]}
    instances = tuple(
        it if rank is None else replace(it, state=rank["state"], pid=rank["pid"], exit_code=rank["exit_code"])
        for it, rank in ((it, ranks.get(it.rank)) for it in job.instances)
    )
    first = next(iter(records.values()))
    going = [record["state"] for record in records.values()]
    state = next((state for state in ("RESTARTING", "STARTING") if state in going), job.state)
    if "RUNNING" in going and state == "STARTING":  # a pod that comes later
        state = "RUNNING"
    state = state if job.state == "RUNNING" or state == "RESTARTING" else job.state
    return replace(
        job, state=state, instances=instances, framework=first["framework"],
        attempt=max(it["attempt"] for it in records.values()), restarts=max(it["restarts"] for it in records.values()),
        started=min((it["started"] for it in records.values() if it["started"]), default=job.started),
        waiting=job.waiting or next((it["waiting"] for it in records.values() if it["waiting"]), None),
        tensorboard=first["tensorboard"], code=_with_commit(job.code, first.get("code")),
        progress=next((it["progress"] for it in records.values() if it["progress"]), None),
        checkpoint=next((it["checkpoint"] for it in records.values() if it["checkpoint"]), None),
    )  # fmt: skip


def _with_commit(code: CodeRecord | None, found: CodeRecord | None) -> CodeRecord | None:
    """The record of the code with the commit that a pod has, if only pods know it."""
    if code is None or code.get("commit") or not found or not found.get("commit"):
        return code
    return {**code, "commit": found["commit"]}


def lost_logs(job: Found, shown: Job) -> str | None:
    """A line that says whose logs are gone with their pods, for a job that has ended; None if all are there."""
    if not shown.is_over:
        return None
    there = {pod.index for pod in job.pods}
    if job.least < job.nodes:  # nobody knows which took part
        return None
    gone = [str(index) for index in range(job.nodes) if index not in there]
    if not gone:
        return None
    who = f"node{'s' if len(gone) > 1 else ''} {', '.join(gone[:8])}{' …' if len(gone) > 8 else ''}"
    if (where := kept.of(job.annotations)) is not None:
        return (
            f"the pods of job {job.name} on {who} are gone; paceline logs reads what they wrote on volume {where.claim}"
        )
    return f"the pods of job {job.name} on {who} are gone, and what they wrote with them"


def _state(job: Found) -> tuple[str, int | None, float | None]:
    """The state, the exit code and the time of the end."""
    stopped = moment(job.annotations.get(STOPPED)) if job.is_suspended else None  # otherwise it was resumed
    pods = job.newest()
    if (ended := job.ending) is not None and ended.is_success:
        return "SUCCEEDED", 0, ended.time
    if ended is not None:
        if stopped is not None:
            return "STOPPED", STOP_CODE, ended.time
        culprit = _culprit(pods.values())
        if ended.is_late:
            return "FAILED", STOP_CODE if _is_left(job) else TIMED_OUT, ended.time
        code = None if culprit is None else culprit.report.get("exit_code", culprit.exit_code)
        if culprit is None and len(pods) < job.least:  # see `_error`
            code = STOP_CODE
        return "FAILED", code if code is not None else 1, ended.time
    left = [pod for pod in job.pods if not pod.is_over]
    if job.is_suspended:
        if left or (job.object.get("status") or {}).get("active"):
            return "RUNNING", None, None
        return ("STOPPED", STOP_CODE, stopped) if stopped is not None else ("PENDING", None, None)
    running = [pod for pod in pods.values() if pod.phase == "Running" or pod.is_over]
    if not running:
        return "PENDING", None, None
    return ("RUNNING" if len(running) >= job.least else "STARTING"), None, None


def _is_left(job: Found) -> bool:
    """Whether a job that reached its deadline did so because nothing moved that on any more; see `lease`."""
    spec = job.spec
    limit = spec.get("time_limit") if job.is_plain else None
    if spec.get("detached", True) or not isinstance(job.kind, BatchJob):
        return False
    return limit is None or int(job.object["spec"].get("activeDeadlineSeconds") or 0) < max(1, int(limit))


def _culprit(pods: Iterable[Pod]) -> Pod | None:
    """The pod that says best why the job failed: one whose report names a rank, else the first that failed."""
    failed = [pod for pod in pods if pod.error or pod.exit_code]
    failed.sort(key=lambda pod: (_weight(pod), pod.finished or float("inf"), pod.index))
    return failed[0] if failed else None


def _weight(pod: Pod) -> int:
    failure = pod.report.get("failure") or {}
    if failure.get("rank") is not None:
        return 0
    if pod.report.get("refused"):
        return 1
    # A pod without a report was killed, and the others can only say that it is gone.
    return 2 if not pod.report and not pod.is_leaving else 3 if failure else 4


def _error(job: Found, culprit: Pod | None) -> str:
    ended = job.ending
    if ended is not None and ended.is_late and _is_left(job):
        return "paceline run, which it belongs to, was killed, or did not reach the cluster for 3 minutes"
    if culprit is not None and culprit.error:
        where = f"node {culprit.index} ({culprit.name}): "
        return culprit.error if (culprit.report.get("failure") or {}).get("rank") is not None else where + culprit.error
    why = "" if ended is None else ended.message or ended.reason
    if len(job.newest()) < job.least and not (ended and ended.is_late):  # none could say it
        return f"{TAKEN_AWAY} ({why})"
    return why or "its pods failed"


def _waiting(job: Found, pods: Mapping[int, Pod]) -> str | None:
    if job.is_suspended:
        if job.annotations.get(STOPPED):
            return "it is being stopped"
        queue = job.spec.get("queue")
        return f"queue {queue} has not admitted it yet" if queue else "it is suspended; resume it with kubectl"
    if job.why:
        return job.why
    for index in sorted(pods):
        if pods[index].waiting:
            return f"node {index} ({pods[index].name}): {pods[index].waiting}"
    missing = job.least - len(pods)
    return f"{missing} of {job.least} pods are not made yet" if missing > 0 else None


def _started(pods: Mapping[int, Pod], status: Mapping[str, Any], state: str) -> float | None:
    times = [pod.report.get("started") or pod.started for pod in pods.values()]
    known = [time for time in times if time]
    if known:
        return min(known)
    return None if state in ("PENDING", "STARTING") else moment(status.get("startTime"))


def _ranks(spec: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> int:
    """How many ranks a pod has, as far as that is known."""
    ranks = spec.get("ranks", 1)
    if isinstance(ranks, int):
        return ranks
    counted = max((len(it.get("ranks") or ()) for it in reports), default=0)
    devices = spec.get("devices")
    return counted or (devices if isinstance(devices, int) and devices else 1)


def _instances(job: Found, pods: Mapping[int, Pod], nproc: int, state: str) -> tuple[Instance, ...]:
    found = []
    for number, index in enumerate(job.numbers):
        pod = pods.get(index)
        codes = {} if pod is None else {rank: code for rank, code in pod.report.get("ranks") or ()}
        for local in range(nproc):
            rank = number * nproc + local
            code = codes.get(rank, None if pod is None else pod.exit_code)
            where = "" if pod is None else f"{pod.node}/{pod.name}" if pod.node else pod.name
            found.append(
                Instance(f"{job.name}-{role_of(rank)}", where, rank, _rank_state(pod, code, state), None, code)
            )
    return tuple(found)


def _rank_state(pod: Pod | None, code: int | None, state: str) -> str:
    if state in ("SUCCEEDED", "STOPPED"):
        return state
    if code is not None:
        return "FAILED" if code else "SUCCEEDED"
    if state == "FAILED":
        return "STOPPED" if pod is None else "FAILED"
    if pod is None or pod.phase == "Pending":
        return "PENDING"
    return "RUNNING"


def _devices(spec: Mapping[str, Any], pods: Mapping[int, Pod]) -> tuple[str, ...]:
    """The devices that its pods have now, as NODE RANK:NUMBER."""
    count = spec.get("devices")
    if not isinstance(count, int):
        return ()
    having = [index for index, pod in sorted(pods.items()) if pod.node and not pod.is_over]
    return tuple(f"{index}:{number}" for index in having for number in range(count))


def _labels(job: Found) -> dict[str, str]:
    try:
        return dict(json.loads(job.annotations.get(LABELS, "{}")))
    except (ValueError, TypeError):
        return {}


def _code(job: Found, reports: Sequence[Mapping[str, Any]]) -> CodeRecord | None:
    try:
        found = json.loads(job.annotations.get(CODE, "null"))
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    if found.get("mode") == "git" and not found.get("commit"):  # the client did not know it
        found["commit"] = next((it["commit"] for it in reports if it.get("commit")), None)
    return cast("CodeRecord", {"path": f"code/{job.name} of the pods", **found})


def _command(spec: Mapping[str, Any]) -> str:
    words = ["-m"] if spec.get("module") else []
    target = spec.get("script") or spec.get("module") or spec.get("command") or ""
    return " ".join(map(shlex.quote, [*words, target, *map(str, spec.get("args") or ())]))


def spec_of(job: Found) -> JobSpec:
    """The specification with which a job was submitted.

    Raises:
        UserError: it cannot be read.
    """
    from paceline.job.spec import JobSpec

    try:
        return JobSpec.from_stored(job.spec)
    except ValueError:
        raise UserError(f"what job {job.name} runs cannot be read from its annotation; submit it again") from None
