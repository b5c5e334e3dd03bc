"""Kueue: a Workload for each job with a queue, which is admitted when its LocalQueue is there and not on hold."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from . import resources
from .jobstate import controller_of, has
from .operators import Operator, set_condition

if TYPE_CHECKING:
    from .errors import Object
    from .resources import Resource
    from .storage import Change

_QUEUE, _UID = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/job-uid"
_ENDS = ("Complete", "Completed", "Succeeded", "Failed")


class Kueue(Operator):
    """It alone decides which jobs with a queue run: it resumes one that is suspended, if its Workload is admitted."""

    kinds = ("Workload",)

    def _changed(self, change: Change) -> None:
        object, loop = change.entry.object, asyncio.get_running_loop()
        super()._changed(change)
        workloads = self._kind("Workload")
        if workloads is None or change.type == "DELETED":
            return
        namespace = object["metadata"].get("namespace", "")
        if object["kind"] == "LocalQueue":
            for one in self.storage.all(workloads, namespace):
                self._look("Workload", namespace, one["metadata"]["name"])
        elif (object["metadata"].get("annotations") or {}).get("lab/idle"):
            return
        elif _QUEUE in (object["metadata"].get("labels") or {}) and not controller_of(object):
            loop.call_soon(self._manage, workloads, object)

    def _kind(self, kind: str) -> Resource | None:
        found = (*self.api.custom.values(), resources.JOBS)
        return next((one for one in found if one.kind == kind), None)

    def _manage(self, workloads: Resource, job: Object) -> None:
        data = job["metadata"]
        name = f"{job['kind'].lower()}-{data['name']}-{data['uid'][:5]}"
        if self.storage.get(workloads, data["namespace"], name) is None:
            spec = {"queueName": data["labels"][_QUEUE], "active": True}
            self.make(workloads, job, {"metadata": {"name": name, "labels": {_UID: data["uid"]}}, "spec": spec})
        self._look("Workload", data["namespace"], name)

    def sync(self, object: Object, status: Object) -> None:
        owner, queues = controller_of(object), self._kind("LocalQueue")
        resource = self._kind(owner["kind"]) if owner else None
        namespace = object["metadata"]["namespace"]
        job = self.storage.get(resource, namespace, owner["name"]) if resource and owner else None
        if resource is None or job is None or queues is None:
            return
        if any(has(job.get("status") or {}, kind) for kind in _ENDS):
            set_condition(status, "Finished", "True", "Succeeded", "")
            return
        queue = self.storage.get(queues, namespace, object["spec"]["queueName"])
        if not object["spec"].get("active", True):
            if has(status, "Admitted"):
                set_condition(status, "Evicted", "True", "Deactivated", "The workload is deactivated")
                set_condition(status, "Admitted", "False", "NoReservation", "The workload has no reservation")
        elif queue and (queue.get("spec") or {}).get("stopPolicy", "None") == "None" and not has(status, "Admitted"):
            set_condition(status, "Admitted", "True", "Admitted", "The workload is admitted")
        self._suspend(resource, job, not has(status, "Admitted"))

    def _suspend(self, resource: Resource, job: Object, value: bool) -> None:
        of_group = resource.group == "kubeflow.org"
        spec = job["spec"].get("runPolicy") or {} if of_group else job["spec"]
        if bool(spec.get("suspend")) == value:
            return
        change: Object = {"suspend": value}
        if resource is resources.JOBS and not value:  # it chooses the nodes
            change["template"] = {"spec": {"nodeSelector": {"kubernetes.io/os": "linux"}}}
        data, patch = job["metadata"], {"spec": {"runPolicy": change} if of_group else change}
        self.api.patch(resource, data["namespace"], data["name"], "merge-patch+json", patch)
