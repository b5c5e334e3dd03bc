"""The operators: of kubeflow.org, JobSet and Trainer. Each makes pods, or what makes them, as the real one does."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import sys
from typing import TYPE_CHECKING, Any

from . import defaults, events, resources
from .errors import Object, StatusError
from .jobstate import controller_of, ended, has, is_ready, owner_reference, seconds_since, set_condition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .api import Api
    from .resources import Resource
    from .storage import Change

_GROUP = "training.kubeflow.org"
_FIELDS = {"PyTorchJob": "pytorchReplicaSpecs", "TFJob": "tfReplicaSpecs", "PaddleJob": "paddleReplicaSpecs",
           "MPIJob": "mpiReplicaSpecs"}  # fmt: skip
_CONTAINERS = {"PyTorchJob": "pytorch", "TFJob": "tensorflow", "PaddleJob": "paddle"}
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
            object = resource and self.storage.get(resource, namespace, name)
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
        spec, policy = object["spec"], object["spec"].get("runPolicy") or {}
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
        if role != "Launcher":
            labels[f"{_GROUP}/replica-index"] = str(index)
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
        return {}

    def _judge(self, object: Object, roles: Object, there: dict[str, Object], status: Object) -> None:
        kind, policy = object["kind"], object["spec"].get("runPolicy") or {}
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


OPERATORS: tuple[type[Operator], ...] = (Training,)
