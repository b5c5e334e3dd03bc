"""The operators: of kubeflow.org, JobSet and Trainer. Each makes pods, or what makes them, as the real one does."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import sys
from typing import TYPE_CHECKING, Any

from . import defaults, events, jobstate, resources
from .errors import Object, StatusError
from .jobstate import controller_of, ended, finished, has, is_ready, owner_reference, seconds_since

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .api import Api
    from .resources import Resource
    from .storage import Change

set_condition = functools.partial(jobstate.set_condition, with_probe=False)
_GROUP = "training.kubeflow.org"
_FIELDS = {"PyTorchJob": "pytorchReplicaSpecs", "TFJob": "tfReplicaSpecs", "PaddleJob": "paddleReplicaSpecs",
           "MPIJob": "mpiReplicaSpecs"}  # fmt: skip
_CONTAINERS = {"PyTorchJob": "pytorch", "TFJob": "tensorflow", "PaddleJob": "paddle"}
# Before the Training Operator, labels of pods were called by the kind, and the policy of a job was in its spec itself.
_OLD_LABELS = {"PyTorchJob": "pytorch", "TFJob": "tf"}
_PORTS = {"PyTorchJob": 23456, "TFJob": 2222, "PaddleJob": 36543, "MPIJob": 9999}


class Operator:
    """Looks at the objects of its kinds, when they or what they own has changed."""

    kinds: tuple[str, ...] = ()

    def __init__(self, api: Api) -> None:
        self.api, self.storage = api, api.storage
        self._due: dict[tuple[str, str, str], None] = {}
        self._scheduled = False

    def start(self) -> None:
        self.storage.listen(self._changed)

    def _changed(self, change: Change) -> None:
        object = change.entry.object
        for one in (object, controller_of(object) or {}):
            if one.get("kind") in self.kinds:
                name = one["metadata"]["name"] if "metadata" in one else one["name"]
                self._look(one["kind"], object["metadata"].get("namespace", ""), name)

    def _look(self, *key: str) -> None:
        self._due[key] = None  # type: ignore[index]
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        self._scheduled = False
        due, self._due = self._due, {}
        for kind, namespace, name in due:
            resource = next((one for one in self.api.custom.values() if one.kind == kind), None)
            object = None if resource is None else self.storage.get(resource, namespace, name)
            if resource is None or object is None or object["metadata"].get("deletionTimestamp"):
                continue
            try:
                status = copy.deepcopy(object.get("status") or {})
                self.sync(object, status)
                self.api.set_status(resource, object, status)
            except StatusError as error:
                print(f"lab: {kind} {name}: {error}", file=sys.stderr)
                events.record(
                    self.api, object, "Warning", "FailedCreate", f"Error creating: {error.message}", "operator"
                )

    def sync(self, object: Object, status: Object) -> None:
        raise NotImplementedError

    def owned(self, resource: Resource, owner: Object) -> Iterator[Object]:
        uid = owner["metadata"]["uid"]
        for one in list(self.storage.all(resource, owner["metadata"]["namespace"])):
            if (controller_of(one) or {}).get("uid") == uid:
                yield one

    def make(self, resource: Resource, owner: Object, body: Object) -> None:
        """Create an object of an owner, unless it is there."""
        namespace = owner["metadata"]["namespace"]
        if self.storage.get(resource, namespace, body["metadata"]["name"]) is None:
            body = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
            body["metadata"]["ownerReferences"] = [owner_reference(owner)]
            self.api.create(resource, namespace, body)

    def remove(self, resource: Resource, object: Object) -> None:
        data = object["metadata"]
        if not data.get("deletionTimestamp"):
            with contextlib.suppress(StatusError):
                self.api.delete(resource, data["namespace"], data["name"])

    def later(self, object: Object, seconds: float) -> None:
        data = object["metadata"]
        loop = asyncio.get_running_loop()
        loop.call_later(max(0.0, seconds), self._look, object["kind"], data["namespace"], data["name"])

    def expire(self, object: Object, seconds: float | None, since: str) -> None:
        """Delete a finished object when its time to live is over."""
        if seconds is None:
            return
        left = seconds - seconds_since(since)
        if left > 0:
            self.later(object, left + 0.1)
            return
        resource = next(one for one in self.api.custom.values() if one.kind == object["kind"])
        self.remove(resource, object)


class Training(Operator):
    """The training operator and the MPI operator: pods by role, a Service for each, and variables that say which it is."""

    kinds = ("PyTorchJob", "TFJob", "PaddleJob", "MPIJob")

    def sync(self, object: Object, status: Object) -> None:
        spec = object["spec"]
        if "template" in spec:  # an MPIJob v1alpha1, on which nobody acts here
            return
        policy = spec.get("runPolicy") or spec
        pods = list(self.owned(resources.PODS, object))
        if has(status, "Succeeded") or has(status, "Failed"):
            clean = policy.get("cleanPodPolicy", "None")
            for pod in pods:
                if clean == "All" or (clean == "Running" and not ended(pod)):
                    self.remove(resources.PODS, pod)
            self.expire(object, policy.get("ttlSecondsAfterFinished"), status["completionTime"])
            return
        if not status.get("conditions"):
            set_condition(status, "Created", "True", f"{object['kind']}Created", f"{object['kind']} is created.")
        if policy.get("suspend"):
            for pod in pods:
                self.remove(resources.PODS, pod)
            if not has(status, "Suspended"):
                set_condition(status, "Running", "False", f"{object['kind']}Suspended", "is suspended.")
                set_condition(status, "Suspended", "True", f"{object['kind']}Suspended", "is suspended.")
            status.pop("startTime", None)
            return
        if has(status, "Suspended"):
            set_condition(status, "Suspended", "False", f"{object['kind']}Resumed", "is resumed.")
        status.setdefault("startTime", defaults.now())
        roles = spec[_FIELDS[object["kind"]]]
        there = {pod["metadata"]["name"]: pod for pod in pods}
        for role, replica in roles.items():
            for index in range(replica.get("replicas", 1)):
                self._pod(object, roles, role, index)
        self._judge(object, roles, there, status)

    def _pod(self, object: Object, roles: Object, role: str, index: int) -> None:
        name = _pod_name(object, role, index)
        data, kind = object["metadata"], object["kind"]
        template = copy.deepcopy(roles[role]["template"])
        labels = {f"{_GROUP}/job-name": data["name"], f"{_GROUP}/operator-name": f"{kind.lower()}-controller",
                  f"{_GROUP}/replica-type": role.lower()}  # fmt: skip
        is_worker = bool(object["spec"].get("runLauncherAsWorker"))  # its launcher
        if role != "Launcher" or is_worker:
            labels[f"{_GROUP}/replica-index"] = str(index + (is_worker and role == "Worker"))
        if kind in _OLD_LABELS and "runPolicy" not in object["spec"]:
            old = _OLD_LABELS[kind]
            labels = {"group-name": "kubeflow.org", f"{old}-job-name": data["name"],
                      f"{old}-replica-type": role.lower(), f"{old}-replica-index": str(index)}  # fmt: skip
        metadata = {**(template.get("metadata") or {}), "name": name}
        metadata["labels"] = {**metadata.get("labels", {}), **labels}
        spec = template["spec"]
        spec["restartPolicy"] = roles[role]["restartPolicy"]
        wanted = _CONTAINERS.get(kind)
        container = next((one for one in spec["containers"] if wanted in (None, one["name"])), None)
        if container is None:  # it refuses such a job
            set_condition(
                object.setdefault("status", {}), "Failed", "True", "Invalid", f"no container is named {wanted}"
            )
            return
        container.setdefault("env", []).extend(
            {"name": key, "value": value} for key, value in self._variables(object, roles, role, index).items()
        )
        if kind == "MPIJob":
            if not container.get("command") and role == "Worker":
                container["command"] = ["/usr/sbin/sshd", "-De"]
            spec.update(hostname=name, subdomain=data["name"])
        port = [{"name": "port", "port": _PORTS[kind]}]
        service = data["name"] if kind == "MPIJob" else name
        selector = {key: labels[key] for key in labels if kind != "MPIJob" or not key.endswith(("type", "index"))}
        self.make(resources.PODS, object, {"metadata": metadata, "spec": spec})
        self.make(resources.SERVICES, object, {
            "metadata": {"name": service}, "spec": {"clusterIP": "None", "selector": selector, "ports": port},
        })  # fmt: skip

    def _variables(self, object: Object, roles: Object, role: str, index: int) -> dict[str, str]:
        name, kind, port = object["metadata"]["name"], object["kind"], _PORTS[object["kind"]]
        counts = {key: one.get("replicas", 1) for key, one in roles.items()}
        if kind == "PyTorchJob":
            nproc = object["spec"].get("nprocPerNode", "auto")
            size = sum(counts.values()) * (int(nproc) if nproc.isdigit() else 1)
            rank = index + (role == "Worker" and "Master" in roles)
            found = {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": nproc, "PET_NNODES": str(sum(counts.values())),
                     "WORLD_SIZE": str(size), "RANK": str(rank), "PET_NODE_RANK": str(rank)}  # fmt: skip
            if "Master" in roles:
                address = f"{name}-master-0"
                found.update(
                    MASTER_ADDR=address, MASTER_PORT=str(port), PET_MASTER_ADDR=address, PET_MASTER_PORT=str(port)
                )
            return found
        if kind == "TFJob" and sum(counts.values()) > 1:
            cluster = {
                key.lower(): [
                    f"{name}-{key.lower()}-{n}.{object['metadata']['namespace']}.svc:{port}" for n in range(count)
                ]
                for key, count in counts.items()
            }
            task = {"type": role.lower(), "index": index}
            return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})}
        if kind == "PaddleJob":
            return {"PYTHONUNBUFFERED": "1", "PADDLE_JOB_ID": name, "PADDLE_NNODES": str(sum(counts.values())),
                    "PADDLE_MASTER": f"{name}-worker-0:{port}"}  # fmt: skip
        if kind == "MPIJob" and role == "Launcher":
            return {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile", "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
                    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10", "OMPI_MCA_orte_set_default_slots": "1",
                    "K_MPI_JOB_ROLE": "launcher",
                    **({} if object["spec"].get("runLauncherAsWorker") else {"NVIDIA_VISIBLE_DEVICES": ""})}  # fmt: skip
        return {"K_MPI_JOB_ROLE": "worker"} if kind == "MPIJob" else {}

    def _judge(self, object: Object, roles: Object, there: dict[str, Object], status: Object) -> None:
        kind, policy = object["kind"], object["spec"].get("runPolicy") or object["spec"]
        counted: dict[str, Any] = {}
        for role, replica in roles.items():
            own = [there.get(_pod_name(object, role, index)) for index in range(replica.get("replicas", 1))]
            phases = [pod["status"].get("phase") if pod else "" for pod in own]
            counted[role] = {"active": phases.count("Running") + phases.count("Pending"),
                             "succeeded": phases.count("Succeeded"), "failed": phases.count("Failed")}  # fmt: skip
        status["replicaStatuses"] = counted
        main = next((role for role in ("Master", "Chief", "Launcher") if role in roles), None)
        deadline = policy.get("activeDeadlineSeconds")
        if deadline is not None:
            self.later(object, deadline - seconds_since(status["startTime"]) + 0.1)
        name = f"{kind} {object['metadata']['name']}"
        if any(one["failed"] for one in counted.values()):
            self._end(object, status, "Failed", f"{name} is failed because 1 replica(s) failed.")
        elif deadline is not None and seconds_since(status["startTime"]) >= deadline:
            for pod in there.values():
                self.remove(resources.PODS, pod)
            words = f"Job {object['metadata']['name']} has failed because it was active longer than specified deadline"
            self._end(object, status, "Failed", words)
        elif all(
            one["succeeded"] >= roles[role].get("replicas", 1) for role, one in counted.items() if main in (None, role)
        ):
            self._end(object, status, "Succeeded", f"{name} is successfully completed.")
        elif all(is_ready(pod) for pod in there.values()) and there and not has(status, "Running"):
            set_condition(status, "Running", "True", f"{kind}Running", f"{name} is running.")

    def _end(self, object: Object, status: Object, kind: str, message: str) -> None:
        set_condition(status, "Running", "False", f"{object['kind']}{kind}", message)
        set_condition(status, kind, "True", f"{object['kind']}{kind}", message)
        status["completionTime"] = defaults.now()
        self.later(object, 0.0)


def _pod_name(object: Object, role: str, index: int) -> str:
    number = "" if role == "Launcher" else f"-{index}"
    return f"{object['metadata']['name']}-{role.lower()}{number}"


class JobSets(Operator):
    """JobSet: a Job for each replica of each replicated Job, and a Service."""

    kinds = ("JobSet",)

    def sync(self, object: Object, status: Object) -> None:
        data, spec = object["metadata"], object["spec"]
        jobs = {job["metadata"]["name"]: job for job in self.owned(resources.JOBS, object)}
        if has(status, "Completed") or has(status, "Failed"):
            for job in jobs.values():
                if not finished(job):
                    self.remove(resources.JOBS, job)
            since = next(one for one in status["conditions"] if one["type"] in ("Completed", "Failed"))[
                "lastTransitionTime"
            ]
            self.expire(object, spec.get("ttlSecondsAfterFinished"), since)
            return
        network = spec.get("network") or {}
        subdomain = network.get("subdomain") or data["name"]
        selector = {"jobset.sigs.k8s.io/jobset-name": data["name"]}
        self.make(resources.SERVICES, object, {"metadata": {"name": subdomain}, "spec": {
            "clusterIP": "None", "selector": selector,
            "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
        }})  # fmt: skip
        suspended = bool(spec.get("suspend"))
        if suspended != has(status, "Suspended") and (suspended or status.get("conditions")):
            words = "jobset is suspended" if suspended else "jobset is resumed"
            reason = "SuspendedJobs" if suspended else "ResumeJobs"
            set_condition(status, "Suspended", str(suspended), reason, words)
        for replicated in spec["replicatedJobs"]:
            for index in range(replicated.get("replicas", 1)):
                name = f"{data['name']}-{replicated['name']}-{index}"
                if name in jobs:
                    self._suspend(jobs[name], suspended)
                else:
                    self._job(object, replicated, name, subdomain)
        self._judge(object, list(jobs.values()), status)

    def _job(self, object: Object, replicated: Object, name: str, subdomain: str) -> None:
        template = copy.deepcopy(replicated["template"])
        marks = {"jobset.sigs.k8s.io/jobset-name": object["metadata"]["name"],
                 "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"]}  # fmt: skip
        metadata = {**(template.get("metadata") or {}), "name": name}
        metadata["labels"] = {**metadata.get("labels", {}), **marks}
        pod = template["spec"]["template"]
        pod["metadata"] = {**(pod.get("metadata") or {})}
        pod["metadata"]["labels"] = {**pod["metadata"].get("labels", {}), **marks}
        pod["spec"]["subdomain"] = subdomain
        pod["spec"].setdefault("restartPolicy", "OnFailure")
        spec = {"completionMode": "Indexed", **template["spec"], "suspend": bool(object["spec"].get("suspend"))}
        self.make(resources.JOBS, object, {"metadata": metadata, "spec": spec})

    def _suspend(self, job: Object, value: bool) -> None:
        if bool(job["spec"].get("suspend")) != value and not finished(job):
            data = job["metadata"]
            self.api.patch(
                resources.JOBS, data["namespace"], data["name"], "merge-patch+json", {"spec": {"suspend": value}}
            )

    def _judge(self, object: Object, jobs: list[Object], status: Object) -> None:
        failed = [job for job in jobs if has(job.get("status") or {}, "Failed")]
        wanted = sum(one.get("replicas", 1) for one in object["spec"]["replicatedJobs"])
        done = [job for job in jobs if has(job.get("status") or {}, "Complete")]
        if failed:
            words = f"jobset failed due to one or more job failures (first failed job: {failed[0]['metadata']['name']})"
            set_condition(status, "Failed", "True", "FailedJobs", words)
        elif len(done) == wanted:
            set_condition(status, "Completed", "True", "AllJobsCompleted", "jobset completed successfully")
        if failed or len(done) == wanted:
            status["terminalState"] = "Failed" if failed else "Completed"
            self.later(object, 0.0)


class Trainer(Operator):
    """Kubeflow Trainer: a JobSet of a TrainJob's runtime, which has one container and tries no pod again, and its patches."""

    kinds = ("TrainJob",)

    def sync(self, object: Object, status: Object) -> None:
        data, spec = object["metadata"], object["spec"]
        (resource,) = resources.CUSTOM["jobset"]
        trainer = spec.get("trainer") or {}
        nodes, name = trainer.get("numNodes", 1), data["name"]
        env = [
            *(trainer.get("env") or []), {"name": "PET_NNODES", "value": str(nodes)},
            {"name": "PET_NPROC_PER_NODE", "value": str(trainer.get("numProcPerNode", "auto"))},
            {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {
                "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}},
            {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"}, {"name": "PET_MASTER_PORT", "value": "29500"},
        ]  # fmt: skip
        container = {"name": "node", "image": trainer["image"], "command": trainer["command"], "env": env,
                     "resources": trainer.get("resourcesPerNode") or {}}  # fmt: skip
        pod: Object = {"metadata": {}, "spec": {"restartPolicy": "Never", "containers": [container]}}
        for patch in spec.get("runtimePatches") or []:
            for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
                pod = merge_patch(pod, job["template"]["spec"]["template"], container)
        job = {"completions": nodes, "parallelism": nodes, "backoffLimit": 0, "template": pod}
        if spec.get("activeDeadlineSeconds"):
            job["activeDeadlineSeconds"] = spec["activeDeadlineSeconds"]
        replicated = [{"name": "node", "replicas": 1, "template": {"spec": job}}]
        suspended = bool(spec.get("suspend"))
        self.make(
            resource, object, {"metadata": {"name": name}, "spec": {"replicatedJobs": replicated, "suspend": suspended}}
        )
        below = self.storage.get(resource, data["namespace"], name)
        if below is None or has(status, "Complete") or has(status, "Failed"):
            return
        if bool(below["spec"].get("suspend")) != suspended:
            patch = {"spec": {"suspend": suspended}}
            self.api.patch(resource, data["namespace"], name, "merge-patch+json", patch)
        if suspended != has(status, "Suspended"):
            reason = "Suspended" if suspended else "Resumed"
            set_condition(status, "Suspended", str(suspended), reason, f"TrainJob is {reason.lower()}")
        for kind, ours in (("Completed", "Complete"), ("Failed", "Failed")):
            found = next(
                (one for one in (below.get("status") or {}).get("conditions") or [] if one["type"] == kind), None
            )
            if found and found["status"] == "True":
                set_condition(status, ours, "True", found["reason"], found["message"])


def merge_patch(pod: Object, patch: Object, container: Object) -> Object:
    """A pod template with a patch of a TrainJob, whose containers have the names of those that are there."""
    (changed,) = patch["spec"].get("containers") or [{"name": container["name"]}]
    assert changed["name"] == container["name"]
    assert "env" not in changed, "the webhook refuses it"
    spec = {**pod["spec"], **patch["spec"], "containers": [{**container, **changed}]}
    return {"metadata": {**pod["metadata"], **(patch.get("metadata") or {})}, "spec": spec}


OPERATORS: tuple[type[Operator], ...] = (Training, JobSets, Trainer)
