"""What a node does for one pod, from its volumes to its last container."""

from __future__ import annotations

import asyncio
import copy
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

from . import defaults, events, machine, network, podstatus, quantity, resources
from .containers import Container
from .images import Image
from .logs import Log
from .volumes import ConfigError, MountError, Volumes, expand, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from .errors import Object
    from .kubelet import Kubelet


class PodRunner:
    """Runs a pod and tells its status."""

    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self.kubelet, self.pod = kubelet, pod
        self.api, self.storage = kubelet.api, kubelet.api.storage
        self.uid: str = pod["metadata"]["uid"]
        self.name: str = pod["metadata"]["name"]
        self.namespace = f"{kubelet.network.prefix}-{kubelet.number}p{self.uid[:8]}"
        self.folder: Path = kubelet.folder / "pods" / self.uid
        self.phase, self.address, self.verdict = "Pending", "", ("", "")  # the verdict is of the node: Evicted
        self.begun = defaults.now()
        self.running: dict[str, Container] = {}
        self.last: dict[str, Object] = {}  # how the run before ended
        self.restarts: dict[str, int] = {}
        self.logs: dict[str, list[Log]] = {}
        self.waiting: dict[str, tuple[str, str]] = {}
        self.initialized = not pod["spec"].get("initContainers")
        self.ready_since = ""
        self._containers = [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]
        self._stopping = asyncio.Event()
        self._grace = 30.0
        self._connected = False
        self._lost = False
        self.volumes = Volumes(self.storage, pod, self.folder / "volumes", kubelet.claims, kubelet.token)
        for one in self._containers:
            word = "PodInitializing" if pod["spec"].get("initContainers") else "ContainerCreating"
            self.waiting[one["name"]] = (word, "")
        self.task = asyncio.ensure_future(self._run())

    def event(self, kind: str, reason: str, message: str) -> None:
        if self.kubelet.answers:
            events.record(self.api, self.pod, kind, reason, message, "kubelet", self.kubelet.name)

    # -- from start to end ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            if not self._stopping.is_set():
                await self._prepare()
                await self._work()
        except asyncio.CancelledError:
            self.kill()
            raise
        except Exception as error:
            self.phase, self.verdict = "Failed", ("LabError", f"{type(error).__name__}: {error}")
            self.kill()
            print(f"lab: pod {self.name}: {error!r}", file=sys.stderr)
        finally:
            self._clean()
        self.publish()
        self.kubelet.ended(self)

    async def _prepare(self) -> None:
        self.publish()
        await self._until(self._has_volumes)
        if self._stopping.is_set():
            return
        self.address = self.kubelet.network.address_of(self.kubelet.number)
        link = f"p{self.uid[:10].replace('-', '')}"
        loop = asyncio.get_running_loop()
        self._connected = True
        arguments = (self.kubelet.number, self.namespace, link, self.address)
        await loop.run_in_executor(None, self.kubelet.network.connect, *arguments)
        self.publish()

    def _has_volumes(self) -> bool:
        try:
            self.volumes.make()
        except MountError as error:
            self.event("Warning", "FailedMount", str(error))
            return False
        return True

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that objects bring is there, or the pod has to stop."""
        while not self._stopping.is_set():
            changed = self.kubelet.config_changed
            if condition():
                return
            await self._either(changed.wait())

    async def _either(self, *others: Coroutine[Any, Any, object]) -> None:
        """Wait for something, or for the order to stop."""
        tasks = [asyncio.ensure_future(one) for one in (*others, self._stopping.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _work(self) -> None:
        policy = self.pod["spec"].get("restartPolicy", "Always")
        for spec in self.pod["spec"].get("initContainers") or []:
            await self._repeat(spec, "Never" if policy == "Never" else "OnFailure")
            done = self.running.get(spec["name"])
            if self._stopping.is_set() or done is None or done.code != 0:
                self.phase = "Failed"
                await self._end()
                return
        self.initialized = True
        names = [spec["name"] for spec in self.pod["spec"]["containers"]]
        for name in names:
            self.waiting[name] = ("ContainerCreating", "")
        measuring = asyncio.ensure_future(self._measure())
        await asyncio.gather(*(self._repeat(spec, policy) for spec in self.pod["spec"]["containers"]))
        measuring.cancel()
        await self._end()
        ran = [self.running.get(name) for name in names]
        good = all(one is not None and one.code == 0 for one in ran)
        self.phase = "Succeeded" if good and not self.verdict[0] else "Failed"

    async def _measure(self) -> None:
        """Evict it when one of its folders on disk has more than its limit, as its node looks from time to time."""
        limits = {
            volume["name"]: str(volume["emptyDir"]["sizeLimit"]) for volume in self.pod["spec"].get("volumes") or []
            if (volume.get("emptyDir") or {}).get("sizeLimit") and volume["emptyDir"].get("medium") != "Memory"
        }  # fmt: skip
        while limits:
            await asyncio.sleep(self.kubelet.restart_delay)
            for name, limit in limits.items():
                files = [os.lstat(path).st_blocks for path in self.volumes.paths[name].rglob("*") if path.is_file()]
                if 512 * sum(files) > quantity.parse(limit):
                    words = f'Usage of EmptyDir volume "{name}" exceeds the limit "{limit}". '
                    self.evict("Evicted", words)
                    return

    async def _end(self) -> None:
        """Stop what still runs, with its grace."""
        alive = [one for one in self.running.values() if not one.ended.is_set()]
        for one in alive:
            one.kill(signal.SIGTERM)
        if alive and self._grace > 0:
            await asyncio.wait([asyncio.ensure_future(one.ended.wait()) for one in alive], timeout=self._grace)
        for one in alive:
            one.kill()
        for one in alive:
            await one.ended.wait()

    async def _repeat(self, spec: Object, policy: str) -> None:
        """Run a container, again as long as its policy says so."""
        name, delay = spec["name"], self.kubelet.restart_delay
        while not self._stopping.is_set():
            one = await self._start(spec)
            if one is None:
                return
            await self._either(one.ended.wait())
            if self._stopping.is_set():
                await self._end()
            await one.ended.wait()
            self._note(one, spec)
            if self._stopping.is_set() or policy == "Never" or (policy == "OnFailure" and one.code == 0):
                self.publish()
                return
            self.last[name] = one.state()
            self.restarts[name] = self.restarts.get(name, 0) + 1
            words = f"back-off {delay:g}s restarting failed container={name} pod={self.name}"
            self.waiting[name] = ("CrashLoopBackOff", words)
            del self.running[name]
            self.event("Warning", "BackOff", "Back-off restarting failed container")
            self.publish()
            await self._either(asyncio.sleep(delay))
            delay = min(2.0, 2 * delay)

    def _note(self, one: Container, spec: Object) -> None:
        if one.reason == "StartError":
            words = one.state()["terminated"]["message"]
            self.event("Warning", "Failed", f"Error: {words}")

    async def _start(self, spec: Object) -> Container | None:
        image = await self._pull(spec)
        own: dict[str, str] = {}
        if image is not None:
            found = await self._variables(spec)
            if found is None:
                return None
            own = found
        if image is None or self._stopping.is_set():
            return None
        name = spec["name"]
        count = self.restarts.get(name, 0)
        logs = self.kubelet.folder / "logs" / f"{self.pod['metadata']['namespace']}_{self.name}_{self.uid}"
        log = Log(logs / name / f"{count}.log", self.kubelet.log_limit, self.kubelet.late)
        self.logs.setdefault(name, []).append(log)
        message = self.folder / f"{name}-{count}.message"
        one = Container(
            self.folder, log, self._specification(spec, image, own, message), message,
            spec.get("terminationMessagePolicy") == "FallbackToLogsOnError",
        )  # fmt: skip
        self.running[name] = one
        self.waiting.pop(name, None)
        self.event("Normal", "Created", f"Created container {name}")
        one.start()
        await one.started.wait()
        if one.reason != "StartError":
            self.event("Normal", "Started", f"Started container {name}")
        if self.initialized:
            self.phase = "Running"
        self.publish()
        return one

    async def _pull(self, spec: Object) -> Image | None:
        """The image, once it can be pulled; None if the pod has to stop before."""
        name, text = spec["name"], spec["image"]
        if not _is_image(text):
            words = f'Failed to apply default image tag "{text}": couldn\'t parse image reference "{text}": invalid reference format'
            self.waiting[name] = ("InvalidImageName", words)
            self.event("Warning", "InspectFailed", words)
            self.publish()
            await self._stopping.wait()
            return None
        while not self._stopping.is_set():
            image = self.kubelet.images(text)
            if not image.error:
                self.event("Normal", "Pulled", f'Container image "{text}" already present on machine')
                return image
            if spec.get("imagePullPolicy") == "Never":
                self.waiting[name] = (
                    "ErrImageNeverPull",
                    f'Container image "{text}" is not present with pull policy of Never',
                )
                self.publish()
                await self._stopping.wait()
                return None
            self.event("Normal", "Pulling", f'Pulling image "{text}"')
            reason = f'rpc error: code = Unknown desc = failed to pull and unpack image "{text}": {image.error}'
            self.event("Warning", "Failed", f'Failed to pull image "{text}": {reason}')
            self.event("Warning", "Failed", "Error: ErrImagePull")
            self.waiting[name] = ("ErrImagePull", reason)
            self.publish()
            await self._either(asyncio.sleep(self.kubelet.restart_delay))
            self.event("Normal", "BackOff", f'Back-off pulling image "{text}"')
            self.event("Warning", "Failed", "Error: ImagePullBackOff")
            self.waiting[name] = ("ImagePullBackOff", f'Back-off pulling image "{text}"')
            self.publish()
            await self._either(asyncio.sleep(self.kubelet.restart_delay * 5))
        return None

    async def _variables(self, spec: Object) -> dict[str, str] | None:
        found: list[dict[str, str]] = []

        def known() -> bool:
            pod = copy.deepcopy(self.pod)
            pod["status"] = {"podIP": self.address, "hostIP": self.kubelet.address}
            try:
                own = {**(pod["spec"].get("securityContext") or {}), **(spec.get("securityContext") or {})}
                if own.get("runAsNonRoot") and own.get("runAsUser", self.kubelet.images(spec["image"]).user) in (
                    0,
                    None,
                ):
                    where = f'pod: "{self.name}_{pod["metadata"]["namespace"]}({self.uid})", container: {spec["name"]}'
                    kind = "container's runAsUser breaks non-root policy" if own.get("runAsUser") == 0 else (
                        "container has runAsNonRoot and image will run as root")  # fmt: skip
                    raise ConfigError(f"{kind} ({where})")
                found.append(variables(self.storage, pod, spec))
            except ConfigError as error:
                self.waiting[spec["name"]] = ("CreateContainerConfigError", str(error))
                self.event("Warning", "Failed", f"Error: {error}")
                self.publish()
                return False
            return True

        await self._until(known)
        return found[0] if found else None

    def _specification(self, spec: Object, image: Image, own: dict[str, str], message: Path) -> Object:
        """What the sandbox has to make."""
        pod = self.pod["spec"]
        hostname = self.kubelet.name if pod.get("hostNetwork") else pod.get("hostname") or self.name
        namespace = self.pod["metadata"]["namespace"]
        full = f"{hostname}.{pod['subdomain']}.{namespace}.svc.cluster.local" if pod.get("subdomain") else ""
        server, port = self.kubelet.network.address, self.kubelet.server_port
        env = {
            **image.variables(), "HOSTNAME": hostname, "KUBERNETES_SERVICE_HOST": server,
            "KUBERNETES_SERVICE_PORT": str(port), "KUBERNETES_PORT": f"tcp://{server}:{port}",
            machine.MARK: self.kubelet.network.prefix, **own,
        }  # fmt: skip
        command = [expand(part, env) for part in spec.get("command") or image.entrypoint]
        arguments = [expand(part, env) for part in spec.get("args") or []]
        mounts = [{"source": str(message), "target": spec["terminationMessagePath"]}]
        for mount in spec.get("volumeMounts") or []:
            source = self.volumes.paths[mount["name"]]
            below = expand(mount["subPathExpr"], env) if mount.get("subPathExpr") else mount.get("subPath", "")
            if below:
                source = source / below
                if not source.exists():
                    source.mkdir(parents=True)
            kind = next(v for v in pod["volumes"] if v["name"] == mount["name"])
            fixed = any(key in kind for key in ("configMap", "secret", "projected", "downwardAPI"))
            mounts.append(
                {"source": str(source), "target": mount["mountPath"], "read_only": mount.get("readOnly") or fixed}
            )
        mounts.sort(key=lambda mount: str(mount["target"]).count("/"))
        search = f"{namespace}.svc.cluster.local svc.cluster.local cluster.local"
        files = {
            **image.files, "/etc/hostname": f"{hostname}\n",
            "/etc/hosts": f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{self.address}\t{full} {hostname}\n".replace("\t ", "\t"),
            "/etc/resolv.conf": f"search {search}\nnameserver {server}\noptions ndots:5\n",
        }  # fmt: skip
        security = {**(pod.get("securityContext") or {}), **(spec.get("securityContext") or {})}
        return {
            "network": f"/run/netns/{self.namespace}", "hostname": hostname, "argv": [*command, *arguments], "env": env,
            "cwd": spec.get("workingDir") or "/", "mounts": mounts, "files": files, "hidden": list(image.hidden),
            "emptied": [] if sys.prefix.startswith("/tmp/") else ["/tmp"], "mark": self.kubelet.network.prefix,
            "user": security.get("runAsUser", image.user), "group": security.get("runAsGroup"),
            "read_only": security.get("readOnlyRootFilesystem", False),
        }  # fmt: skip

    # -- orders --------------------------------------------------------------------------------------------------------

    def stop(self, grace: float) -> None:
        """End it with some grace; a shorter one than before counts."""
        if self._stopping.is_set() and grace >= self._grace:
            return
        again = self._stopping.is_set()
        self._grace = grace
        self._stopping.set()
        if again:
            self.kill()
        self.event("Normal", "Killing", f"Stopping container {self._containers[-1]['name']}")

    def evict(self, reason: str, message: str, grace: float = 0.0) -> None:
        """Let the node end it for a reason of its own."""
        self.verdict = (reason, message)
        podstatus.disrupt(self.api, self.pod, "TerminationByKubelet", message)
        self.event("Warning", reason, message)
        self.stop(grace)

    def kill(self, reason: str = "", name: str = "") -> None:
        """End its containers, or one of them, at once."""
        for key, one in self.running.items():
            if name in ("", key) and not one.ended.is_set():
                one.kill(signal.SIGKILL, reason)

    def _clean(self) -> None:
        self.volumes.remove()
        if self._connected:
            self.kubelet.forget(self.namespace)

    # -- status --------------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Store its status, if the node can be heard."""
        if not self.kubelet.answers:
            return
        stored = self.storage.get(resources.PODS, self.pod["metadata"]["namespace"], self.name)
        if stored is None or stored["metadata"]["uid"] != self.uid:
            return
        self.api.set_status(resources.PODS, stored, podstatus.status(self, stored))


def _is_image(text: str) -> bool:
    """Whether it names an image at all: lower case but for the host, the tag and the digest."""
    path = text.partition("@")[0]
    head, slash, rest = path.partition("/")
    if slash and (set(head) & set(".:") or head == "localhost"):
        path = rest
    path, _, tag = path.partition(":")
    parts = all(re.fullmatch(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*", part) for part in path.split("/"))
    return parts and (not tag or re.fullmatch(r"\w[\w.-]{0,127}", tag) is not None)


def remove_network(namespace: str) -> None:
    """Remove a pod's network, with its link."""
    try:
        network.ip("netns", "del", namespace)
    except RuntimeError:
        return
