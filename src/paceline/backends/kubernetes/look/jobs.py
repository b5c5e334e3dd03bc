"""Jobs of a cluster: their objects, each with its pods."""

from __future__ import annotations

import json
import re
from functools import cached_property, partial
from typing import TYPE_CHECKING

from paceline.backends.kubernetes.api.errors import ApiError, with_run_as
from paceline.backends.kubernetes.api.times import moment
from paceline.backends.kubernetes.manifests import kept
from paceline.backends.kubernetes.manifests.kinds.job import BatchJob
from paceline.backends.kubernetes.manifests.kinds.served import served
from paceline.backends.kubernetes.manifests.names import INSTANCE, SELECTOR, SPEC, label_value
from paceline.backends.kubernetes.manifests.objects import PROGRAM
from paceline.contract.nodejob import NodeJob
from paceline.job.errors import UserError
from paceline.job.job import Job

from .machines import amount
from .pods import Pod, seen, time_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.api.object import Object
    from paceline.backends.kubernetes.manifests.kinds.base import Ending, Kind
    from paceline.job.spec import JobSpec

_MOST_NAMES = 50  # in a selector
_QUOTA = re.compile(r"exceeded quota: (?P<name>[^,\s]+), requested: (?P<asked>\S*),")


class Found:
    """A job's object and what is kept of its pods.

    Attributes:
        object: the Job, or an object of another kind.
    """

    def __init__(self, found: Object, kind: Kind) -> None:
        self.object = {"apiVersion": kind.api_version, "kind": kind.title, **found}
        self.kind = kind
        self.pods: list[Pod] = []  # its pods, by node rank; of several of a rank the newest comes last
        self.why: str | None = None  # what keeps it from having all its pods; None if nothing does

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def uid(self) -> str:
        """What tells it from another job of its name."""
        return str(self.object["metadata"]["uid"])

    @cached_property  # it is read many times for each pod
    def spec(self) -> NodeJob:
        """What the user asked for."""
        return NodeJob.from_json({"detached": True, **self.stored})

    @cached_property
    def stored(self) -> Object:
        """The same as far as it differs from the defaults, as it is stored."""
        try:
            found = json.loads(self.annotations.get(SPEC, ""))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.object["metadata"].get("annotations") or {}

    @property
    def nodes(self) -> int:
        """How many pods it has."""
        return self.kind.nodes(self.object)

    @property
    def least(self) -> int:
        """How many pods it needs."""
        low, _, high = str(self.spec.nodes).partition(":")
        return int(low) if high else self.nodes

    @property
    def numbers(self) -> Sequence[int]:
        """The node ranks that it has now: all, or of MIN:MAX those whose pods run or have ended, and MIN at least."""
        if self.least == self.nodes:
            return range(self.nodes)
        there = [index for index, pod in self.newest().items() if pod.has_log and not pod.is_leaving]
        others = [index for index in range(self.nodes) if index not in there]
        return sorted([*there, *others[: max(0, self.least - len(there))]])

    @property
    def ranks_per_pod(self) -> int:
        """How many ranks each pod has, as far as that is known."""
        ranks, devices = self.spec.ranks, self.spec.devices
        if isinstance(ranks, int):
            return ranks
        counted = max((len(pod.report.get("ranks") or ()) for pod in self.pods), default=0)
        return counted or (devices if isinstance(devices, int) and devices else 1)

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

    @property
    def running(self) -> list[Pod]:
        """Pods that run, and have an agent that can be asked."""
        return [] if self.is_plain else [pod for pod in self.pods if pod.runs and not pod.is_leaving]


def find(cluster: Cluster, names: Sequence[str] | None) -> dict[str, Found]:
    """The jobs of these names, or all, each with its pods; in a call for each kind, if there are not too many."""
    if names is not None and not names:
        return {}
    found = _objects(cluster, [BatchJob()], names)
    if names is None or len(found) < len(set(names)):
        found = _objects(cluster, [it for it in served(cluster) if not isinstance(it, BatchJob)], names, found)
    if not found:
        _refuse_missing(cluster)
        return found
    _add_pods(cluster, found, names, {})
    return found


def _add_pods(
    cluster: Cluster,
    jobs: Mapping[str, Found],
    names: Sequence[str] | None,
    about: Mapping[tuple[str, str], Sequence[Object]],
) -> None:
    """Give jobs their pods, with the events about them, in place of those that they have."""
    pods = [
        seen(item, about.get(("Pod", item["metadata"]["name"]), ()))
        for item in cluster.items(cluster.path("v1", "pods"), labelSelector=_selector(names))
    ]
    pods.sort(key=lambda pod: (pod.index, not pod.is_leaving, pod.created))
    for it in jobs.values():
        it.pods = []
    for pod in pods:
        job = jobs.get(pod.job)
        # A pod that is older is of a deleted job of this name: the cluster removes it later than its job, or never.
        if job is not None and pod.created >= (moment(job.object["metadata"]["creationTimestamp"]) or 0):
            job.pods.append(pod)


def taken(cluster: Cluster, names: Sequence[str] | None, but: Kind | None = None) -> Collection[str]:
    """Those of these names, or all, that jobs have, of whatever kind but this one."""
    kinds = [kind for kind in served(cluster) if but is None or kind.title != but.title]
    return _objects(cluster, kinds, names).keys()


def _objects(
    cluster: Cluster, kinds: Sequence[Kind], names: Sequence[str] | None, known: Mapping[str, Found] | None = None
) -> dict[str, Found]:
    """The jobs of these names, or all, of these kinds, without their pods; the kinds are asked at once."""
    found, refusals = dict(known or {}), list[ApiError]()
    lists = cluster.at_once(*(partial(_listed, cluster, kind, _selector(names), refusals) for kind in kinds))
    for kind, items in zip(kinds, lists, strict=True):
        for item in items:
            if names is None or item["metadata"]["name"] in names:
                found[item["metadata"]["name"]] = Found(item, kind)
    if refusals and (missing := [name for name in names or () if name not in found]):
        raise UserError(f"whether there is a job {missing[0]} is not known: {refusals[0]}")
    return found


def _selector(names: Sequence[str] | None) -> str:
    """What selects the objects of these jobs, or of all, and perhaps of others."""
    if names is None or len(names) > _MOST_NAMES or not all(map(label_value, names)):
        return SELECTOR
    return f"{SELECTOR},{INSTANCE} in ({','.join(names)})"


def _listed(cluster: Cluster, kind: Kind, selector: str, refusals: list[ApiError]) -> list[Object]:
    """The objects of a kind; one that an operator has brought, and that the server has not now, is noted."""
    try:
        return list(cluster.items(kind.path(cluster), labelSelector=selector))
    except ApiError as error:
        if isinstance(kind, BatchJob) or error.code not in (403, 404):
            raise
        if error.code == 404:  # 403: who may not list a kind has made no job of it
            refusals.append(error)
        return []


def _refuse_missing(cluster: Cluster) -> None:
    """Refuse a namespace that does not exist: the server lists no jobs of it, as if there were none."""
    try:
        cluster.get(f"/api/v1/namespaces/{cluster.namespace}")
    except ApiError as error:
        if error.code == 404:
            raise


def explain(cluster: Cluster, job: Found) -> None:
    """Find out from events why a job does not have its pods, or they do not run."""
    if job.ending is not None or job.is_suspended:
        return
    newest = job.newest()
    is_short = len(newest) < min(job.nodes, int(job.object["spec"].get("parallelism", job.nodes)))
    if not is_short and all(pod.phase != "Pending" for pod in newest.values()):
        return
    try:
        about = _events(cluster, job)
    except ApiError:
        return
    made = max((pod.created for pod in job.pods), default=0.0)
    for part in job.kind.parts(job.name) if is_short else ():
        # A later event of another type says that this is over, as does a pod: of many events servers drop some.
        if (events := about.get(part)) and events[-1]["type"] == "Warning" and time_of(events[-1]) >= made:
            job.why = _explained(cluster, " ".join(str(events[-1].get("message") or "").split()))
    if any(about.get(("Pod", pod.name)) for pod in job.pods):
        _add_pods(cluster, {job.name: job}, [job.name], about)


def _events(cluster: Cluster, job: Found) -> dict[tuple[str, str], list[Object]]:
    """Kind and name → the events about an object of a job, the last one last; none that an older object of it had."""
    born = dict.fromkeys(job.kind.parts(job.name), int(moment(job.object["metadata"]["creationTimestamp"]) or 0))
    born.update((("Pod", pod.name), int(pod.created)) for pod in job.pods)
    found: dict[tuple[str, str], list[Object]] = {}
    for kind in ("Warning", "Normal"):
        for event in cluster.items(cluster.path("v1", "events"), fieldSelector=f"type={kind}"):
            target = event.get("involvedObject") or {}
            key = target.get("kind", ""), target.get("name", "")
            if key in born and time_of(event) >= born[key]:
                found.setdefault(key, []).append(event)
        if not found:
            break  # there is no warning that others could contradict
    for events in found.values():
        events.sort(key=lambda event: (time_of(event), event["type"] == "Warning"))  # servers write whole seconds
    return found


def _explained(cluster: Cluster, message: str) -> str:
    """A warning about the Job, with what to do; a quota is looked at, as its controller tries again after minutes."""
    message = message.removeprefix("(combined from similar events): ")
    if "must specify" in message:
        return f"{message}; ask for it with --cpus and --memory"
    quota = _QUOTA.search(message)
    if quota is None:
        return with_run_as(message)
    try:
        found = [*cluster.items(cluster.path("v1", "resourcequotas"), fieldSelector=f"metadata.name={quota['name']}")]
    except ApiError:
        found = [{}]  # whoever may not see it knows only what the warning says
    asked = dict(it.split("=", 1) for it in quota["asked"].split(",") if "=" in it)
    status = next((it.get("status") or {} for it in found), None)
    if status is None or (status and _has_room(status, asked)):
        return f"quota {quota['name']} has room again; the cluster makes the pods when it tries next, within minutes"
    return f"{message}; ask for less, or have the quota of the namespace raised"


def _has_room(status: Object, asked: Mapping[str, str]) -> bool:
    """Whether a quota allows what was asked for, by its status."""
    hard, used = status.get("hard") or {}, status.get("used") or {}
    return all(amount(used.get(it)) + amount(asked[it]) <= amount(hard[it]) for it in asked if it in hard)


def lost_logs(job: Found, record: Job) -> str | None:
    """A line that says whose logs are gone with their pods, for a job that has ended; None if all are there."""
    if not record.is_over:
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


def spec_of(job: Found) -> JobSpec:
    """The specification with which a job was submitted."""
    from paceline.job.spec import JobSpec

    try:
        return JobSpec.from_stored(job.stored)
    except ValueError:
        raise UserError(f"what job {job.name} runs cannot be read from its annotation; submit it again") from None
