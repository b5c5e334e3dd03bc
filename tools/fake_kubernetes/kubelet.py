"""A node: it runs the pods that are given to it, and says how they are."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from . import defaults, events, podstatus, resources
from .errors import Object, StatusError
from .podrunner import PodRunner, remove_network

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .api import Api
    from .images import Image
    from .network import Network
    from .storage import Change

_UNREACHABLE = "node.kubernetes.io/unreachable"


class Kubelet:
    """The kubelet of a node, and the node."""

    def __init__(
        self, api: Api, network: Network, number: int, folder: Path, claims: Path, capacity: dict[str, str],
        images: Callable[[str], Image], token: Callable[[Object], str],
    ) -> None:  # fmt: skip
        self.api, self.network, self.number, self.folder, self.claims = api, network, number, folder, claims
        self.name = f"node-{number}"
        self.address = f"10.{network.number}.200.{number}"
        self.capacity, self.images, self.token = capacity, images, token
        self.server_port = 0
        self.answers = True  # to the API server
        self.restart_delay = 0.2  # seconds; it doubles, up to 2 (of a real one: 10, up to 300)
        self.log_limit = 10 << 20  # bytes
        self.late = 0.0  # seconds that the clock is behind that writes times into logs
        self.runners: dict[str, PodRunner] = {}
        self.finished: dict[str, PodRunner] = {}  # their logs can still be read
        self.streams: set[asyncio.Future[None]] = set()  # of logs that are followed
        self.config_changed = asyncio.Event()
        self._closed = False

    def start(self) -> None:
        self.api.storage.listen(self._changed)
        self._register()

    def _register(self) -> None:
        labels = {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        if any(name.endswith("/gpu") for name in self.capacity):
            labels["nvidia.com/gpu.product"] = "NVIDIA-H100-80GB-HBM3"
        node: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": labels},
            "spec": {},
        }
        stored = self.api.create(resources.NODES, "", node)
        info = {"kubeletVersion": f"v1.{self.api.minor}.0", "osImage": "Debian GNU/Linux 12 (bookworm)", "architecture": "amd64",
                "operatingSystem": "linux", "kernelVersion": "6.1", "containerRuntimeVersion": "containerd://1.6.8",
                "machineID": self.name, "systemUUID": self.name, "bootID": self.name, "kubeProxyVersion": ""}  # fmt: skip
        self.api.set_status(resources.NODES, stored, {
            "capacity": dict(self.capacity), "allocatable": dict(self.capacity), "conditions": _conditions("True"),
            "addresses": [{"type": "InternalIP", "address": self.address}, {"type": "Hostname", "address": self.name}],
            "nodeInfo": info, "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
        })  # fmt: skip

    @property
    def node(self) -> Object:
        return self.api.get(resources.NODES, "", self.name)

    def close(self) -> None:
        """End all pods, without a word to the server."""
        self._closed, self.answers = True, False
        self.api.storage.unlisten(self._changed)
        for runner in list(self.runners.values()):
            runner.stop(0)
            runner.kill()

    async def closed(self, seconds: float | None = None) -> None:
        """Wait until no pod runs here."""
        tasks = [runner.task for runner in self.runners.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    # -- pods ----------------------------------------------------------------------------------------------------------

    def _changed(self, change: Change) -> None:
        if change.store in ("configmaps", "secrets", "persistentvolumeclaims"):
            self.config_changed.set()
            self.config_changed = asyncio.Event()
        elif change.store == "pods" and self.answers:
            self._look(change.entry.object, change.type == "DELETED")

    def _look(self, pod: Object, gone: bool) -> None:
        if pod["spec"].get("nodeName") != self.name or pod["metadata"].get("annotations", {}).get("lab/idle"):
            return
        uid = pod["metadata"]["uid"]
        runner = self.runners.get(uid)
        if gone:
            self.finished.pop(uid, None)
            if runner is not None:
                runner.stop(0)
                runner.kill()
            return
        leaving = pod["metadata"].get("deletionTimestamp")
        if runner is None:
            if pod["status"].get("phase") in ("Succeeded", "Failed") or uid in self.finished:
                if leaving and uid in self.finished:
                    asyncio.get_running_loop().call_soon(self._remove, pod)
                return
            if leaving and pod["metadata"].get("deletionGracePeriodSeconds") == 0:
                asyncio.get_running_loop().call_soon(self._remove, pod)
                return
            runner = self.runners[uid] = PodRunner(self, pod)
        if leaving:
            runner.stop(pod["metadata"].get("deletionGracePeriodSeconds", 0))

    def ended(self, runner: PodRunner) -> None:
        """A runner has come to its end."""
        self.runners.pop(runner.uid, None)
        self.finished[runner.uid] = runner
        if self.answers:
            self._remove(runner.pod)

    def _remove(self, pod: Object) -> None:
        """Take a pod that was to be deleted and has ended off the server."""
        data = pod["metadata"]
        stored = self.api.storage.get(resources.PODS, data["namespace"], data["name"])
        if stored is None or stored["metadata"]["uid"] != data["uid"] or data["uid"] in self.runners:
            return
        if stored["metadata"].get("deletionTimestamp"):
            with contextlib.suppress(StatusError):
                self.api.delete(resources.PODS, data["namespace"], data["name"], {"gracePeriodSeconds": 0})

    def runner(self, pod: Object) -> PodRunner | None:
        """Who runs or has run a pod."""
        uid = pod["metadata"]["uid"]
        return self.runners.get(uid) or self.finished.get(uid)

    def forget(self, namespace: str) -> None:
        """Remove a pod's network without waiting for it."""
        if self._closed:
            remove_network(namespace)
        else:
            asyncio.get_running_loop().run_in_executor(None, remove_network, namespace)

    # -- faults --------------------------------------------------------------------------------------------------------

    def silence(self) -> None:
        """Say nothing more to the server, nor listen to it; pods go on."""
        self.answers = False
        for stream in self.streams:
            stream.cancel()

    def lose(self) -> None:
        """What the server makes of a node that is silent for long enough."""

        def mark(node: Object) -> None:
            node["status"]["conditions"] = _conditions("Unknown")
            taints = node["spec"].setdefault("taints", [])
            for effect in ("NoSchedule", "NoExecute"):
                taints.append({"key": _UNREACHABLE, "effect": effect, "timeAdded": defaults.now()})

        self.api.edit(resources.NODES, self.node, mark)
        events.record(self.api, self.node, "Normal", "NodeNotReady", f"Node {self.name} status is now: NodeNotReady",
                      "node-controller")  # fmt: skip
        for pod in self._pods():

            def unready(pod: Object) -> None:
                for one in pod["status"].get("conditions") or []:
                    if one["type"] == "Ready":
                        one.update(status="False", lastTransitionTime=defaults.now())

            self.api.edit(resources.PODS, pod, unready)

    def expire(self) -> None:
        """What the server does minutes later: the pods are to be deleted, and stay."""
        for pod in self._pods():
            if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                data = pod["metadata"]
                podstatus.disrupt(
                    self.api, pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint"
                )
                self.api.delete(resources.PODS, data["namespace"], data["name"], {})

    def back(self) -> None:
        """Be there again, and do what was missed."""
        self.answers = True

        def mark(node: Object) -> None:
            node["status"]["conditions"] = _conditions("True")
            taints = [one for one in node["spec"].get("taints") or [] if one["key"] != _UNREACHABLE]
            node["spec"].pop("taints", None)
            if taints:
                node["spec"]["taints"] = taints

        self.api.edit(resources.NODES, self.node, mark)
        known = {pod["metadata"]["uid"] for pod in self._pods()}
        for uid, runner in list(self.runners.items()):
            if uid not in known:
                runner.stop(0)
                runner.kill()
        for pod in self._pods():
            there = self.runner(pod)
            if there is not None:
                there.publish()
            self._look(
                self.api.storage.get(resources.PODS, pod["metadata"]["namespace"], pod["metadata"]["name"]) or pod,
                False,
            )

    def power_off(self) -> None:
        """End all that runs here; the server learns nothing."""
        self.silence()
        for runner in self.runners.values():
            runner.stop(0)
            runner.kill()

    def _pods(self) -> list[Object]:
        return [pod for pod in self.api.storage.all(resources.PODS) if pod["spec"].get("nodeName") == self.name]


def _conditions(ready: str) -> list[Object]:
    moment = defaults.now()
    words = {"True": ("KubeletReady", "kubelet is posting ready status"),
             "Unknown": ("NodeStatusUnknown", "Kubelet stopped posting node status.")}[ready]  # fmt: skip
    found = [
        {
            "type": name,
            "status": "False" if ready == "True" else "Unknown",
            "reason": f"KubeletHasNo{name}",
            "message": "",
        }
        for name in ("MemoryPressure", "DiskPressure", "PIDPressure")
    ]
    found.append({"type": "Ready", "status": ready, "reason": words[0], "message": words[1]})
    return [{**one, "lastHeartbeatTime": moment, "lastTransitionTime": moment} for one in found]
