"""The Job controller."""

from __future__ import annotations

import asyncio
import copy
import sys
import time
from typing import TYPE_CHECKING

from . import defaults, events, resources
from .errors import Object, StatusError
from .jobstate import (
    INDEX,
    controller_of,
    ended,
    finished,
    has,
    index_of,
    is_ready,
    matched,
    owner_reference,
    ranges,
    rule_for,
    seconds_since,
    set_condition,
)

if TYPE_CHECKING:
    from .api import Api
    from .storage import Change

_TRACKING = "batch.kubernetes.io/job-tracking"
_FIRST, _LONGEST = 10.0, 600.0  # seconds until a lost pod is replaced, which double with each one


class Jobs:
    """Keeps the pods of all jobs as their jobs want them.

    With tracking (newer servers) a pod counts once it has ended, even if it was deleted, and a finalizer keeps it until it
    has been counted; without, only the pods that are there count, and a deleted one never has.
    """

    def __init__(self, api: Api, tracking: bool, pace: float) -> None:
        self.api, self.storage = api, api.storage
        self.tracking, self.pace = tracking, pace
        self._due: dict[tuple[str, str], None] = {}
        self._scheduled = False
        self._counted: dict[str, tuple[set[str], int, int, set[int]]] = {}  # by job: pods, succeeded, failed, indexes
        self._lost: dict[str, tuple[set[str], int, float]] = {}  # by job: pods, how many since one succeeded, when last

    def start(self) -> None:
        self.storage.listen(self._changed)

    def _changed(self, change: Change) -> None:
        data = change.entry.object["metadata"]
        if change.store == "jobs.batch":
            self.look(data["namespace"], data["name"])
            if change.type == "DELETED":
                self._counted.pop(data["uid"], None)
                self._lost.pop(data["uid"], None)
        elif change.store == "pods":
            owner = controller_of(change.entry.object)
            if owner and owner["kind"] == "Job":
                self.look(data["namespace"], owner["name"])
            if change.type != "DELETED" and _TRACKING in (data.get("finalizers") or []):
                self._release_orphan(change.entry.object, owner)

    def _release_orphan(self, pod: Object, owner: Object | None) -> None:
        """A pod whose job is gone has nobody who counts it."""
        namespace = pod["metadata"]["namespace"]
        job = self.storage.get(resources.JOBS, namespace, owner["name"]) if owner else None
        if job is None or job["metadata"]["uid"] != (owner or {}).get("uid"):
            asyncio.get_running_loop().call_soon(self._release, pod)

    def look(self, namespace: str, name: str) -> None:
        """Look at a job soon."""
        self._due[(namespace, name)] = None
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._work)

    def _later(self, job: Object, seconds: float) -> None:
        data = job["metadata"]
        asyncio.get_running_loop().call_later(max(0.0, seconds), self.look, data["namespace"], data["name"])

    def _work(self) -> None:
        self._scheduled = False
        due, self._due = self._due, {}
        for namespace, name in due:
            job = self.storage.get(resources.JOBS, namespace, name)
            if (
                job is None
                or job["spec"].get("managedBy", "kubernetes.io/job-controller") != "kubernetes.io/job-controller"
            ):
                continue
            if (job["metadata"].get("annotations") or {}).get("lab/idle"):
                continue
            try:
                self._sync(job)
            except StatusError as error:
                print(f"lab: job {name}: {error}", file=sys.stderr)

    def _pods(self, job: Object) -> list[Object]:
        uid = job["metadata"]["uid"]
        return [
            pod
            for pod in self.storage.all(resources.PODS, job["metadata"]["namespace"])
            if (controller_of(pod) or {}).get("uid") == uid
        ]

    # -- one job -------------------------------------------------------------------------------------------------------

    def _sync(self, job: Object) -> None:
        pods = self._pods(job)
        status = copy.deepcopy(job.get("status") or {})
        if finished(job):
            self._finish(job, pods)
            return
        if job["metadata"].get("deletionTimestamp"):
            for pod in pods:
                self._release(pod)
            return
        self._note_losses(job, pods)
        succeeded, failed, indexes = self._count(job, pods)
        # Newer servers take a pod that is going for one that is still there only when the job asks for it.
        waits = job["spec"].get("podReplacementPolicy") == "Failed"
        going = [pod for pod in pods if pod["metadata"].get("deletionTimestamp") and not ended(pod)]
        active = [pod for pod in pods if not ended(pod) and not pod["metadata"].get("deletionTimestamp")]
        spec = job["spec"]
        is_met = has(status, "SuccessCriteriaMet")
        verdict = None if is_met else self._target(status) or self._verdict(job, pods, failed, status)
        rule = None if verdict else matched(spec, indexes)
        if rule is not None:
            self._remove(active)
            going, active = [*going, *active], []
            reason, message = "SuccessPolicy", f"Matched rules at index {rule}"
            if not is_met:
                set_condition(status, "SuccessCriteriaMet", "True", reason, message)
            if not going:
                self._complete(job, status, reason, message)
            for pod in pods:
                self._release(pod)
        elif verdict:
            self._delete(active)
            failed += 0 if self.tracking else len(active)
            going, active = [*going, *active], []
            if self.api.minor >= 31 and going:  # it has failed when its pods have ended
                set_condition(status, "FailureTarget", "True", *verdict)
            else:
                self._conclude(job, status, "Failed", *verdict)
        elif spec.get("suspend"):
            self._remove(active)
            active = []
            if not has(status, "Suspended"):
                set_condition(status, "Suspended", "True", "JobSuspended", "Job suspended")
                events.record(self.api, job, "Normal", "Suspended", "Job suspended", "job-controller")
            status.pop("startTime", None)
        else:
            if has(status, "Suspended"):
                set_condition(status, "Suspended", "False", "JobResumed", "Job resumed")
                events.record(self.api, job, "Normal", "Resumed", "Job resumed", "job-controller")
            if not status.get("startTime"):
                status["startTime"] = defaults.now()
            if spec.get("activeDeadlineSeconds") is not None:
                self._later(job, spec["activeDeadlineSeconds"] - seconds_since(status["startTime"]) + 0.1)
            has_all = self._has_all(spec, succeeded)
            if has_all and not active and not (going and self.tracking):
                self._complete(job, status, "", "")
            elif not has_all:
                active = self._adjust(job, active, going if waits else [], succeeded, indexes)
        status["active"] = len(active)
        status["ready"] = sum(is_ready(pod) for pod in active)
        status["succeeded"], status["failed"] = succeeded, failed
        if self.api.minor >= 28:
            status["terminating"] = len(going)
        if spec["completionMode"] == "Indexed" and indexes:
            status["completedIndexes"] = ranges(indexes)
        if self.tracking:
            status["uncountedTerminatedPods"] = {}
        for name in ("active", "succeeded", "failed", "terminating"):
            if not status.get(name):
                status.pop(name, None)
        self.api.set_status(resources.JOBS, job, status)
        if self.tracking:
            for pod in pods:
                if ended(pod):
                    self._release(pod)

    def _target(self, status: Object) -> tuple[str, str] | None:
        """Why a job is about to fail, whose pods have not ended yet."""
        found = (one for one in status.get("conditions") or [] if one["type"] == "FailureTarget")
        return next(((one["reason"], one["message"]) for one in found), None)

    def _count(self, job: Object, pods: list[Object]) -> tuple[int, int, set[int]]:
        """How many pods have succeeded and failed, and the indexes that are done."""
        indexed = job["spec"]["completionMode"] == "Indexed"
        if not self.tracking:
            good = [pod for pod in pods if pod["status"].get("phase") == "Succeeded"]
            bad = [pod for pod in pods if pod["status"].get("phase") == "Failed" and not self._is_ignored(job, pod)]
            done = {index_of(pod) for pod in good} if indexed else set()
            return (len(done) if indexed else len(good)), len(bad), done
        seen, good_count, bad_count, done = self._counted.get(job["metadata"]["uid"], (set(), 0, 0, set()))
        for pod in pods:
            uid = pod["metadata"]["uid"]
            if uid in seen or not ended(pod) or _TRACKING not in (pod["metadata"].get("finalizers") or []):
                continue
            seen.add(uid)
            if pod["status"]["phase"] == "Succeeded":
                good_count += 1
                if indexed:
                    done.add(index_of(pod))
            elif not self._is_ignored(job, pod):
                bad_count += 1
        self._counted[job["metadata"]["uid"]] = (seen, good_count, bad_count, done)
        return (len(done) if indexed else good_count), bad_count, done

    def _verdict(self, job: Object, pods: list[Object], failed: int, status: Object) -> tuple[str, str] | None:
        """Why a job has failed, if it has."""
        spec = job["spec"]
        deadline = spec.get("activeDeadlineSeconds")
        begun = status.get("startTime") if not spec.get("suspend") else None
        if deadline is not None and begun and seconds_since(begun) >= deadline:
            return "DeadlineExceeded", "Job was active longer than specified deadline"
        policy = spec.get("podFailurePolicy")
        if policy and self.api.minor >= 26:
            for pod in pods:
                action, why = rule_for(policy, pod) if pod["status"].get("phase") == "Failed" else ("", "")
                if action == "FailJob":
                    return "PodFailurePolicy", why
        if failed > spec["backoffLimit"]:
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        restarts = sum(
            one.get("restartCount", 0) for pod in pods for one in pod["status"].get("containerStatuses") or []
        )
        if spec["template"]["spec"].get("restartPolicy") == "OnFailure" and restarts > spec["backoffLimit"]:
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        return None

    def _is_ignored(self, job: Object, pod: Object) -> bool:
        """Whether a failed pod does not count, by the policy."""
        policy = job["spec"].get("podFailurePolicy")
        return bool(policy) and self.api.minor >= 26 and rule_for(policy, pod)[0] == "Ignore"

    def _has_all(self, spec: Object, succeeded: int) -> bool:
        if spec.get("completions") is None:
            return succeeded > 0
        return bool(succeeded >= spec["completions"])

    def _adjust(
        self, job: Object, active: list[Object], going: list[Object], succeeded: int, indexes: set[int]
    ) -> list[Object]:
        """Create and delete pods; returns those that are there now."""
        spec = job["spec"]
        wanted = spec["parallelism"]
        if spec.get("completions") is not None:
            wanted = min(wanted, spec["completions"] - succeeded)
        if spec["completionMode"] == "Indexed":
            there: set[int] = set()
            surplus = []
            for pod in sorted(active, key=lambda pod: (index_of(pod), pod["metadata"]["creationTimestamp"])):
                index = index_of(pod)
                if index in there or index >= spec["completions"] or index in indexes:
                    surplus.append(pod)
                there.add(index)
            blocked = {index_of(pod) for pod in going}
            self._remove(surplus)
            active = [pod for pod in active if pod not in surplus]
            if len(active) > wanted:
                extra = sorted(active, key=index_of)[wanted:]
                self._remove(extra)
                return [pod for pod in active if pod not in extra]
            free = [i for i in range(spec["completions"]) if i not in there | indexes | blocked]
            missing: list[int | None] = list(free[: max(0, wanted - len(active))])
        else:
            if len(active) > wanted:
                self._remove(active[wanted:])
                return active[:wanted]
            missing = [None] * max(0, wanted - len(active) - len(going))
        if missing and self._backs_off(job):
            return active
        for number in missing:
            made = self._create(job, number)
            if made is None:
                break
            active = [*active, made]
        return active

    def _note_losses(self, job: Object, pods: list[Object]) -> None:
        """Note how many pods have failed since one has succeeded, also those that a policy ignores."""
        seen, count, last = self._lost.get(job["metadata"]["uid"], (set(), 0, 0.0))
        for pod in pods:
            uid = pod["metadata"]["uid"]
            is_removed = self.tracking and _TRACKING not in (pod["metadata"].get("finalizers") or [])
            if uid in seen or is_removed or not ended(pod):
                continue
            seen.add(uid)
            if pod["status"]["phase"] == "Succeeded":
                count = 0
            else:
                count, last = count + 1, time.monotonic()
        self._lost[job["metadata"]["uid"]] = (seen, count, last)

    def _backs_off(self, job: Object) -> bool:
        """Whether the replacement of a failed pod has to wait."""
        _, count, last = self._lost[job["metadata"]["uid"]]
        left = last + self.pace * min(_LONGEST, _FIRST * 2 ** (count - 1)) - time.monotonic()
        if not count or left <= 0:
            return False
        self._later(job, left + 0.01)
        return True

    def _create(self, job: Object, index: int | None) -> Object | None:
        data, template = job["metadata"], copy.deepcopy(job["spec"]["template"])
        metadata = template.get("metadata") or {}
        metadata["namespace"] = data["namespace"]
        middle = "" if index is None else f"-{index}"
        metadata["generateName"] = f"{data['name'][: defaults.LONGEST - len(middle) - 1]}{middle}-"
        metadata["name"] = metadata["generateName"] + defaults.suffix()
        metadata["ownerReferences"] = [owner_reference(job)]
        if index is not None:
            metadata.setdefault("annotations", {})[INDEX] = str(index)
            if self.api.minor >= 28:
                metadata.setdefault("labels", {})[INDEX] = str(index)
            template["spec"].setdefault("hostname", f"{data['name']}-{index}")
            reference = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
            for container in [*(template["spec"].get("initContainers") or []), *template["spec"]["containers"]]:
                env = container.setdefault("env", [])
                if not any(one["name"] == "JOB_COMPLETION_INDEX" for one in env):
                    env.append({"name": "JOB_COMPLETION_INDEX", "valueFrom": reference})
        if self.tracking:
            metadata["finalizers"] = [_TRACKING]
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        try:
            pod = self.api.create(resources.PODS, data["namespace"], body)
        except StatusError as error:
            words = f"Error creating: {error.message}"
            events.record(self.api, job, "Warning", "FailedCreate", words, "job-controller")
            self._later(job, 1.0)
            return None
        words = f"Created pod: {pod['metadata']['name']}"
        events.record(self.api, job, "Normal", "SuccessfulCreate", words, "job-controller")
        return pod

    def _delete(self, pods: list[Object]) -> None:
        for pod in pods:
            data = pod["metadata"]
            if self.storage.get(resources.PODS, data["namespace"], data["name"]) and not data.get("deletionTimestamp"):
                self.api.delete(resources.PODS, data["namespace"], data["name"])
                job = self.storage.get(resources.JOBS, data["namespace"], (controller_of(pod) or {}).get("name", ""))
                if job is not None:
                    words = f"Deleted pod: {data['name']}"
                    events.record(self.api, job, "Normal", "SuccessfulDelete", words, "job-controller")

    def _remove(self, pods: list[Object]) -> None:
        """Delete pods that the job wants no more: they are never counted."""
        for pod in pods:
            self._release(pod)
        self._delete(pods)

    def _release(self, pod: Object) -> None:
        def release(pod: Object) -> None:
            kept = [one for one in pod["metadata"].get("finalizers") or [] if one != _TRACKING]
            pod["metadata"].pop("finalizers", None)
            if kept:
                pod["metadata"]["finalizers"] = kept

        if _TRACKING in (pod["metadata"].get("finalizers") or []):
            self.api.edit(resources.PODS, pod, release)

    def _complete(self, job: Object, status: Object, reason: str, message: str) -> None:
        status["completionTime"] = defaults.now()
        self._conclude(job, status, "Complete", reason, message)
        events.record(self.api, job, "Normal", "Completed", "Job completed", "job-controller")

    def _conclude(self, job: Object, status: Object, kind: str, reason: str, message: str) -> None:
        before = {"Failed": "FailureTarget", "Complete": "SuccessCriteriaMet"}[kind]
        if self.api.minor >= 31 and not has(status, before):
            set_condition(status, before, "True", reason, message)
        set_condition(status, kind, "True", reason, message)
        if kind == "Failed":
            events.record(self.api, job, "Warning", reason, message, "job-controller")
        if job["spec"].get("ttlSecondsAfterFinished") is not None:
            self._later(job, job["spec"]["ttlSecondsAfterFinished"] + 0.5)

    def _finish(self, job: Object, pods: list[Object]) -> None:
        """What is left to do for a job that has ended."""
        for pod in pods:
            if ended(pod) or pod["metadata"].get("deletionTimestamp"):
                self._release(pod)
        if self.tracking:
            _, failed, _ = self._count(job, pods)
            if failed > job["status"].get("failed", 0):
                self.api.set_status(resources.JOBS, job, {**job["status"], "failed": failed})
        lifetime = job["spec"].get("ttlSecondsAfterFinished")
        if lifetime is None or job["metadata"].get("deletionTimestamp"):
            return
        last = next(one for one in job["status"]["conditions"] if one["type"] in ("Complete", "Failed"))
        left = lifetime - seconds_since(last["lastTransitionTime"])
        if left > 0:
            self._later(job, left + 0.1)
        else:
            data = job["metadata"]
            self.api.delete(resources.JOBS, data["namespace"], data["name"], {"propagationPolicy": "Foreground"})
