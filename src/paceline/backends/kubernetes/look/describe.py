"""A job as the verbs show it: its pods are the parts and its object is the scheduler of `node/journal/fold.py`.

A pod that runs can be asked for what its agent recorded. Of a pod that has ended, the termination message has it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.backends.kubernetes.api.times import moment
from paceline.backends.kubernetes.manifests import kept
from paceline.backends.kubernetes.manifests.kinds.job import BatchJob
from paceline.backends.kubernetes.manifests.names import CODE, LABELS, STARTED, STOPPED, SUSPENDED, role_of
from paceline.backends.kubernetes.manifests.objects import VOLUMES
from paceline.job.job import FINAL, Job
from paceline.node.journal.fold import Scheduler, facts_of, fold, part_of
from paceline.node.journal.records import until_resumed

from .pods import TAKEN_AWAY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline.contract.records import Cause, CodeRecord, InstanceRecord, JobFacts, JobRecord, Part, Report
    from paceline.node.host.pod_format import PodReport
    from paceline.node.journal.status import Status

    from .jobs import Found
    from .pods import Pod

_STOP_CODE = 143  # of a job that was stopped: SIGTERM
_TIMED_OUT = 124  # of a job that reached its time limit
_CLIENT_GONE = "paceline run, which it belongs to, was killed, or did not reach the cluster for 3 minutes"


def described(job: Found, target: str, reports: Mapping[int, Report] | None = None) -> Job:
    """A job as the verbs show it, with what the agents in the pods of some node ranks report."""
    reports = reports or {}
    parts = _parts(job, reports)
    record = fold(_facts(job, target, reports.values()), parts, _scheduler(job, parts))
    found = Job.from_record(_with_cluster(job, record))
    return replace(
        found, external_id=f"{job.object['metadata']['namespace']}/{job.name}", kind=job.kind.title,
        logs=kept.shown(kept.of(job.annotations)), allocated=_allocated(job),
    )  # fmt: skip


def is_over(job: Found) -> bool:
    """Whether a job has ended, as the verbs show it."""
    return described(job, "").is_over


# -- parts -------------------------------------------------------------------------------------------------------------


def _parts(job: Found, reports: Mapping[int, Report]) -> list[Part]:
    """The parts of the job's nodes; of nodes that have no pod any more, or are to have none, there is none."""
    found, pods, ended = [], job.newest(), job.ending
    # An agent records success only of the whole job: pods of MIN:MAX that come later do not undo it.
    is_elastic = job.least < job.nodes
    has_succeeded = {index for index, pod in pods.items() if is_elastic and pod.report.get("state") == "SUCCEEDED"}
    for number, index in enumerate(job.numbers):
        pod = pods.get(index)
        if has_succeeded and index not in has_succeeded:
            continue
        if pod is None or (pod.phase == "Pending" and not pod.is_over):
            if ended is not None or job.is_suspended:
                continue
            part = part_of({"node_rank": index}, alive=True, host="")
        else:
            part = _part(job, pod, number, reports.get(index))
            if ended is not None and not ended.is_success:
                part["alive"] = False
        part["nodes"], part["ranks"] = len(job.numbers), len(job.numbers) * job.ranks_per_pod
        part["is_elastic"] = job.least < job.nodes or job.is_plain  # one node does not decide for all
        found.append(part)
    return found


def _part(job: Found, pod: Pod, number: int, report: Report | None) -> Part:
    """The part of a node whose pod has begun."""
    where = f"{pod.node}/{pod.name}" if pod.node else pod.name
    if report is not None and not pod.is_over:
        part = report["part"]
        instances: list[InstanceRecord] = [{**rank, "node": where} for rank in part["instances"]]
        return {**part, "alive": True, "instances": instances}
    status = cast("Status", {"state": "RUNNING", "start": {}, "started": pod.started, "node_rank": pod.index})
    has_ended = pod.is_over and not (job.is_plain and job.ending is None)  # plain pods do not know of each other
    if has_ended:
        status["state"] = "SUCCEEDED" if pod.phase == "Succeeded" or pod.exit_code == 0 else "FAILED"
        status["exit_code"], status["finished"] = pod.exit_code, pod.finished
        keys = ("state", "exit_code", "attempt", "restarts", "finished", "failure", "slow")
        status.update(cast("Status", {key: it for key, it in pod.report.items() if key in keys and it is not None}))
    part = part_of(
        status, alive=not has_ended, host=where, progress=pod.report.get("progress"),
        checkpoint=pod.report.get("checkpoint"),
    )  # fmt: skip
    part["instances"] = [
        _instance(job, pod, where, number * job.ranks_per_pod + local) for local in range(job.ranks_per_pod)
    ]
    if pod.error and part["failing_rank"] is None:
        part["error"] = f"node {pod.index} ({pod.name}): {pod.error}"
        part["cause"] = part["cause"] or _cause(pod)
    return part


def _cause(pod: Pod) -> Cause | None:
    """Why a pod has failed in which no rank did; see `Failure`."""
    if pod.report.get("refused"):
        return "refused"
    if not pod.report and not pod.is_leaving:  # it was killed
        return "out of memory" if pod.is_out_of_memory else "agent"
    return None if pod.report.get("failure") else "preempted"


def _instance(job: Found, pod: Pod, where: str, rank: int) -> InstanceRecord:
    codes: dict[int, int | None] = dict(pod.report.get("ranks") or ())
    code, state = codes.get(rank, pod.exit_code), pod.report.get("state")
    if state not in ("SUCCEEDED", "STOPPED"):
        state = "RUNNING" if code is None else "FAILED" if code else "SUCCEEDED"
    return {
        "name": f"{job.name}-{role_of(rank)}", "node": where, "rank": rank, "state": state, "pid": None,
        "exit_code": code,
    }  # fmt: skip


# -- the object --------------------------------------------------------------------------------------------------------


def _scheduler(job: Found, parts: Sequence[Part]) -> Scheduler:
    """What the job's object says of it."""
    stopped = moment(job.annotations.get(STOPPED)) if job.is_suspended else None  # otherwise it was resumed
    ended = job.ending
    if ended is not None and ended.is_success:
        return Scheduler("ended", result="SUCCEEDED", exit_code=0, finished=ended.time)
    if stopped is not None and (ended is not None or not any(part["alive"] for part in parts)):
        return Scheduler("ended", result="STOPPED", exit_code=_STOP_CODE, finished=ended.time if ended else stopped)
    if ended is None:
        if not job.is_suspended or SUSPENDED not in job.annotations:
            return Scheduler("suspended" if job.is_suspended else "running", _waiting(job))
        if all(pod.is_over for pod in job.pods):
            return Scheduler("held", _waiting(job))
        return Scheduler("running", "it is being suspended")
    end = Scheduler("ended", result="FAILED", finished=ended.time)
    if ended.is_late and _is_left_alone(job):
        return end._replace(reason=_CLIENT_GONE, exit_code=_STOP_CODE, cause="client gone")
    has_error = any(part["error"] for part in parts)
    why = None if has_error else ended.message or ended.reason or "its pods failed"
    if ended.is_late:
        return end._replace(reason=why, exit_code=_TIMED_OUT, cause="time limit")
    if not has_error and len(job.newest()) < job.least:  # none could say it
        return end._replace(reason=f"{TAKEN_AWAY} ({why})", exit_code=_STOP_CODE, cause="preempted")
    return end._replace(reason=why)


def _is_left_alone(job: Found) -> bool:
    """Whether a job that reached its deadline did so because nothing moved that on any more; see `lease`."""
    spec = job.spec
    limit = spec.time_limit if job.is_plain else None
    if spec.detached or not isinstance(job.kind, BatchJob):
        return False
    return limit is None or int(job.object["spec"].get("activeDeadlineSeconds") or 0) < max(1, int(limit))


def _waiting(job: Found) -> str | None:
    """What a job waits for that has not ended, as far as the cluster knows it."""
    if job.is_suspended:
        if job.annotations.get(STOPPED):
            return "it is being stopped"
        queue = job.spec.queue
        if SUSPENDED in job.annotations:
            return until_resumed(job.name)
        return f"queue {queue} has not admitted it yet" if queue else "it is suspended; resume it with kubectl"
    if job.why:
        return job.why
    pods = job.newest()
    for index in sorted(pods):
        if pods[index].waiting:
            return f"node {index} ({pods[index].name}): {pods[index].waiting}"
    missing = job.least - len(pods)
    return f"{missing} of {job.least} pods are not made yet" if missing > 0 else None


# -- the record --------------------------------------------------------------------------------------------------------


def _facts(job: Found, target: str, reports: Iterable[Report]) -> JobFacts:
    spec, first = job.spec, next(iter(reports), None)
    ended = [pod.report for pod in job.newest().values() if pod.report]
    known = first["job"] if first else None
    ttl = job.kind.ttl(job.object)
    return {
        **facts_of(spec), "name": job.name, "backend": target,
        "framework": spec.framework or (known["framework"] if known else None)
            or next((it["framework"] for it in ended if "framework" in it), None),
        "nodes": len(job.numbers), "ranks": len(job.numbers) * job.ranks_per_pod,
        "created": moment(job.object["metadata"]["creationTimestamp"]) or 0.0, "labels": _labels(job),
        "ttl": None if ttl is None else float(ttl),
        "code": _code(job, [*([known["code"]] if known and known["code"] else ()), *ended]),
        "data": [
            {"volume": it["volume"], "path": it["path"], "wanted": it["path"], "visible": True, "variable": ""}
            for it in spec.data
        ],
        "tensorboard": known["tensorboard"] if known else None,
    }  # fmt: skip


def _with_cluster(job: Found, record: JobRecord) -> JobRecord:
    """The record with what the cluster knows better than the parts, or when there are none."""
    state, over, checkpoint = record["state"], record["state"] in FINAL, record["checkpoint"]
    # Its first start, also of pods that others have replaced, and from before it was stopped and resumed.
    starts = [record["started"], moment(job.annotations.get(STARTED))]
    starts += [it for pod in job.pods for it in (pod.started, pod.report.get("started"))]
    started = min(filter(None, starts), default=None)
    if started is None and state not in ("PENDING", "STARTING"):
        started = moment((job.object.get("status") or {}).get("startTime"))
    failed = int((job.object.get("status") or {}).get("failed") or 0)
    replaced = failed - (job.ending is not None and not job.ending.is_success)
    code, codes = record["exit_code"], (rank["exit_code"] for rank in record["instances"])
    there = {rank["rank"] for rank in record["instances"]}
    absent = "PENDING" if not over else "STOPPED" if state == "FAILED" else state
    others: list[InstanceRecord] = [
        {"name": f"{job.name}-{role_of(rank)}", "node": "", "rank": rank, "state": absent, "pid": None,
         "exit_code": None} for rank in range(record["ranks"]) if rank not in there
    ]  # fmt: skip
    return {
        **record, "started": started, "devices": [],
        # Of a pod that has no others nobody but the Job knows how often it was killed, and another one made for it.
        "restarts": record["restarts"] + (max(0, replaced) if job.nodes == 1 else 0),
        "checkpoint": None if over and checkpoint and not outlasts(job, checkpoint["folder"]) else checkpoint,
        "ttl": None if over and job.ending is None else record["ttl"],  # a suspended job is kept
        "exit_code": code if state != "FAILED" or code else next(filter(None, codes), 1),
        "instances": sorted([*record["instances"], *others], key=lambda rank: rank["rank"]),
    }  # fmt: skip


def outlasts(job: Found, folder: str) -> bool:
    """Whether a folder is on a volume, and not in a pod."""
    mounts = job.kind.main_container(job.object).get("volumeMounts") or ()
    volumes = [it["mountPath"] for it in mounts if it["name"] not in VOLUMES]
    volumes += [it["path"] for it in job.spec.data]
    return any(kept.is_below(folder, volume) for volume in volumes)


def _allocated(job: Found) -> int | None:
    """How many devices its pods have now; which ones, only they know."""
    count = job.spec.devices
    if not isinstance(count, int):
        return None
    return count * sum(bool(pod.node) and not pod.is_over for pod in job.newest().values())


def _labels(job: Found) -> dict[str, str]:
    try:
        return dict(json.loads(job.annotations.get(LABELS, "{}")))
    except (ValueError, TypeError):
        return {}


def _code(job: Found, known: Sequence[CodeRecord | PodReport]) -> CodeRecord | None:
    """The record of the code; the commit is one of those that pods know, if the client did not know it."""
    try:
        found = json.loads(job.annotations.get(CODE, "null"))
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    if found.get("mode") == "git" and not found.get("commit"):
        found["commit"] = next((it["commit"] for it in known if it.get("commit")), None)
    where = str(Path(job.spec.working_dir, "code", job.name))
    return cast("CodeRecord", {"path": f"{where} of the pods", **found})
