"""What a test can do to a cluster."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import uuid
from typing import TYPE_CHECKING, Any

from . import events, podstatus, resources
from .access import Denial

if TYPE_CHECKING:
    from collections.abc import Callable

    from .errors import Object
    from .podrunner import PodRunner


class Faults:
    """The part of a cluster that breaks it."""

    if TYPE_CHECKING:
        do: Callable[..., Any]
        _await: Callable[..., Any]
        server: Any
        access: Any
        api: Any
        storage: Any
        nodes: Any
        network: Any
        scheduler: Any
        create: Callable[..., Any]
        _listen: Callable[..., Any]

    # -- the server ----------------------------------------------------------------------------------------------------

    def stop_server(self) -> None:
        """End it and all its connections; what it knows is kept."""
        self._await(self.server.close())

    def start_server(self) -> None:
        """Undo `stop_server`."""
        self._await(self._listen())

    def restart_server(self) -> None:
        self.stop_server()
        self.start_server()

    def restart_at(self, method: str, part: str, after: bool = False) -> None:
        """Restart the server at the next request of a method whose path has a part, which then gets no answer.

        Args:
            method: GET, POST, …
            part: of the path or the query.
            after: whether the server has carried the request out before.
        """

        async def restart() -> None:
            await self.server.close()
            await self._listen()

        name = "late_hook" if after else "hook"

        def hook(request: Any) -> None:
            if request.method == method and part in request.path_qs:
                setattr(self.server, name, None)
                self._restarting = asyncio.ensure_future(restart())
                request.transport.abort()
                raise ConnectionResetError

        self.do(lambda: setattr(self.server, name, hook))

    def wait_for_server(self) -> None:
        """Wait until a restart of `restart_at` is done."""
        self._await(self._finish_restart())

    async def _finish_restart(self) -> None:
        await self._restarting

    def expire_watches(self) -> None:
        """Let the server forget all old versions, and end every watch with 410."""
        self.do(self.server.expire_watches)

    def throttle(self, requests: int) -> None:
        """Refuse so many requests with 429."""
        self.do(lambda: setattr(self.server, "throttled", requests))

    def silence(self, part: str) -> None:
        """Answer no more requests whose path has a part; "" for all are answered again."""
        self.do(lambda: setattr(self.server, "silent", part))

    def conflict(self, writes: int = 1) -> None:
        """Refuse so many changes of objects with 409."""
        self.do(lambda: setattr(self.api, "conflicts", writes))

    def deny(self, verb: str, resource: str, namespace: str = "", user: str = "") -> None:
        """Refuse a verb on a resource, such as "create" on "jobs" or "get" on "pods/log", to everyone or a user."""
        self.do(lambda: self.access.denials.append(Denial(verb, resource, namespace, user)))

    def allow(self) -> None:
        """Undo `deny`."""
        self.do(self.access.denials.clear)

    def quota(self, namespace: str = "default", name: str = "q", **hard: str) -> None:
        """Limit what a namespace has: pods="1"; in names _ stands for . and __ for /."""
        limits = {key.replace("__", "/").replace("_", "."): value for key, value in hard.items()}
        body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": limits}}
        self.create(body, namespace)

    # -- pods ----------------------------------------------------------------------------------------------------------

    def runner(self, name: str, namespace: str = "default") -> PodRunner:
        pod = self.api.get(resources.PODS, namespace, name)
        found: PodRunner | None = self.nodes[pod["spec"]["nodeName"]].runner(pod)
        assert found is not None, f"{name} does not run"
        return found

    def oom(self, name: str, container: str = "", namespace: str = "default") -> None:
        """Let a container run out of memory."""
        self.do(lambda: self.runner(name, namespace).kill("OOMKilled", container))

    def kill(self, name: str, number: int = signal.SIGKILL, namespace: str = "default") -> None:
        """Send the first process of a pod's containers a signal."""

        def send() -> None:
            for one in self.runner(name, namespace).running.values():
                if one.pid is not None:
                    os.kill(one.pid, number)

        self.do(send)

    def evict(self, name: str, namespace: str = "default", resource: str = "memory") -> None:
        """Let the node evict a pod, because it lacks something."""
        words = f"The node was low on resource: {resource}. Threshold quantity: 100Mi, available: 80Mi. "
        self.do(lambda: self.runner(name, namespace).evict("Evicted", words))

    def preempt(self, name: str, namespace: str = "default") -> None:
        """Let a pod make room for a more important one."""

        def preempt() -> None:
            pod = self.api.get(resources.PODS, namespace, name)
            words = "default-scheduler: preempting to accommodate a higher priority pod"
            podstatus.disrupt(self.api, pod, "PreemptionByScheduler", words)
            events.record(
                self.api, pod, "Normal", "Preempted", "Preempted by a pod of higher priority", "default-scheduler"
            )
            self.api.delete(resources.PODS, namespace, name, {})

        self.do(preempt)

    def rotate_log(self, name: str) -> None:
        def rotate() -> None:
            for logs in self.runner(name).logs.values():
                if not logs[-1].ended:
                    logs[-1].rotate()

        self.do(rotate)

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def cut(self, node: str) -> None:
        """Take a node off the network: its pods go on, and nobody reaches them, nor the node."""
        self.network.cut(self.nodes[node].number)
        self.do(self.nodes[node].silence)

    def lose(self, node: str) -> None:
        """Cut a node off, and let the server see that it is gone: not ready, unreachable."""
        self.cut(node)
        self.do(self.nodes[node].lose)

    def expire(self, node: str) -> None:
        """Let the five minutes go by after which the pods of a lost node are to be deleted."""
        self.do(self.nodes[node].expire)

    def power_off(self, node: str) -> None:
        """End all that runs on a node, at once and silently; the server sees that it is gone."""
        self.network.cut(self.nodes[node].number)
        self.do(self.nodes[node].power_off)
        self.do(self.nodes[node].lose)

    def crash(self, node: str) -> None:
        """As `power_off`, but connections of its pods are closed: peers need not wait for a silence to be long enough."""
        self.do(self.nodes[node].power_off)
        self._await(self.nodes[node].closed())
        self.network.cut(self.nodes[node].number)
        self.do(self.nodes[node].lose)

    def back(self, node: str) -> None:
        """Undo `cut`, `lose`, `power_off` or `crash`."""
        self.network.heal(self.nodes[node].number)
        self.do(self.nodes[node].back)

    def cordon(self, node: str) -> None:
        """Let no new pods onto a node."""
        change = {"spec": {"unschedulable": True}}
        self.do(lambda: self.api.patch(resources.NODES, "", node, "merge-patch+json", change))

    def taint(self, node: str, key: str, value: str = "", effect: str = "NoSchedule") -> None:
        change = {"spec": {"taints": [{"key": key, "value": value, "effect": effect}]}}
        self.do(lambda: self.api.patch(resources.NODES, "", node, "merge-patch+json", change))

    # -- many objects --------------------------------------------------------------------------------------------------

    def fill(self, job: Object, jobs: int, pods: int, namespace: str = "default") -> None:
        """Put in many copies of a Job, each with so many running pods, that nothing runs and no controller sees."""
        self.do(lambda: self._fill(job, jobs, pods, namespace))

    def _fill(self, job: Object, jobs: int, pods: int, namespace: str) -> None:
        idle = {"lab/idle": "true"}
        body = copy.deepcopy(job)
        body["metadata"].setdefault("annotations", {}).update(idle)
        first = self.api.create(resources.JOBS, namespace, body, dry_run=True)
        template = first["spec"]["template"]
        made = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
        spec = self.api.create(resources.PODS, namespace, made, dry_run=True)["spec"]
        of_node = [{**spec, "nodeName": node} for node in sorted(self.nodes)]
        name, uid, moment = first["metadata"]["name"], first["metadata"]["uid"], first["metadata"]["creationTimestamp"]
        text = json.dumps(first)
        container = {"name": template["spec"]["containers"][0]["name"], "ready": True, "restartCount": 0, "lastState": {},
                     "state": {"running": {"startedAt": moment}}, "image": "i", "imageID": "i", "started": True}  # fmt: skip
        status = {"phase": "Running", "startTime": moment, "podIP": "10.0.0.1", "containerStatuses": [container],
                  "conditions": [{"type": "Ready", "status": "True"}]}  # fmt: skip
        all_jobs, all_pods = [], []
        for number in range(jobs):
            own = str(uuid.uuid4())
            one = json.loads(text.replace(uid, own).replace(f'"{name}"', f'"{name}-{number}"'))
            one["status"] = {"startTime": moment, "active": pods, "ready": pods}
            all_jobs.append(one)
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": f"{name}-{number}", "uid": own,
                     "controller": True, "blockOwnerDeletion": True}  # fmt: skip
            for index in range(pods):
                metadata = {
                    "name": f"{name}-{number}-{index}-abcde", "namespace": namespace, "uid": str(uuid.uuid4()),
                    "creationTimestamp": moment, "labels": one["spec"]["template"]["metadata"]["labels"],
                    "annotations": {**idle, "batch.kubernetes.io/job-completion-index": str(index)},
                    "ownerReferences": [owner],
                }  # fmt: skip
                all_pods.append(
                    {"apiVersion": "v1", "kind": "Pod", "metadata": metadata,
                     "spec": of_node[(number + index) % len(of_node)], "status": status}
                )  # fmt: skip
        self.storage.load(resources.JOBS, all_jobs)
        self.storage.load(resources.PODS, all_pods)
