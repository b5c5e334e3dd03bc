"""The status of a pod, as its node tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import defaults, resources

if TYPE_CHECKING:
    from .api import Api
    from .errors import Object
    from .podrunner import PodRunner


def disrupt(api: Api, pod: Object, reason: str, message: str) -> None:
    """Say that the cluster takes a pod away, which newer versions do."""
    if api.minor < 26:
        return

    def mark(pod: Object) -> None:
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        pod["status"].setdefault("conditions", []).append({**condition, "lastTransitionTime": defaults.now()})

    data = pod["metadata"]
    stored = api.storage.get(resources.PODS, data["namespace"], data["name"])
    if stored is not None and stored["metadata"]["uid"] == data["uid"]:
        api.edit(resources.PODS, stored, mark)


def status(runner: PodRunner, stored: Object) -> Object:
    """The whole status of a pod; what others have put into the stored one is kept."""
    spec = runner.pod["spec"]
    mine = [_container_status(runner, one) for one in spec["containers"]]
    ready = bool(mine) and all(one["ready"] for one in mine) and runner.phase == "Running"
    status: Object = {
        name: value for name, value in stored["status"].items() if name in ("qosClass", "conditions", "nominatedNodeName")
    }  # fmt: skip
    status.update(phase=runner.phase, hostIP=runner.kubelet.address, startTime=runner.begun)
    if runner.verdict[0]:
        status.update(phase="Failed", reason=runner.verdict[0], message=runner.verdict[1])
        if runner.verdict[0] == "Evicted":
            mine = []
    done = runner.phase == "Succeeded"
    initialized = {"status": "True"} if runner.initialized else _not("ContainersNotInitialized")
    unready = _not("PodCompleted") if done else _not("ContainersNotReady")
    conditions = {
        "Initialized": initialized, "Ready": {"status": "True"} if ready else unready,
        "ContainersReady": {"status": "True"} if ready else unready, "PodScheduled": {"status": "True"},
    }  # fmt: skip
    before = {one["type"]: one for one in status.get("conditions") or []}
    others = [one for name, one in before.items() if name not in conditions]
    status["conditions"] = [_condition(name, value, before.get(name)) for name, value in conditions.items()] + others
    if runner.address:
        status.update(podIP=runner.address, podIPs=[{"ip": runner.address}])
    if mine:
        status["containerStatuses"] = mine
    first = [_container_status(runner, one) for one in spec.get("initContainers") or []]
    if first and runner.verdict[0] != "Evicted":
        status["initContainerStatuses"] = first
    return status


def _container_status(runner: PodRunner, spec: Object) -> Object:
    name = spec["name"]
    one = runner.running.get(name)
    state = one.state() if one else {}
    if not state:
        reason, message = runner.waiting.get(name, ("ContainerCreating", ""))
        state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    alive = "running" in state
    status: Object = {"name": name, "state": state, "lastState": runner.last.get(name, {})}
    status.update(ready=alive, restartCount=runner.restarts.get(name, 0), image=spec["image"], started=alive)
    status["imageID"] = f"docker.io/library/{spec['image']}@sha256:{'0' * 64}" if one else ""
    if one:
        status["containerID"] = one.id
    return status


def _not(reason: str) -> Object:
    return {"status": "False", "reason": reason}


def _condition(name: str, value: Object, before: Object | None) -> Object:
    same = before is not None and before["status"] == value["status"]
    since = before["lastTransitionTime"] if same and before else defaults.now()
    return {"type": name, **value, "lastProbeTime": None, "lastTransitionTime": since}
