"""A Kubernetes cluster on this machine: an API server, controllers, and nodes that run pods as processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import trustme
import yaml

from . import faults, images, machine, network, resources
from .access import ADMINS, Access, User
from .api import Api
from .controllers import Collector, Deployments, Housekeeping
from .jobs import Jobs
from .kubelet import Kubelet
from .kueue import Kueue
from .operators import OPERATORS
from .scheduler import Scheduler
from .server import Server
from .storage import Storage
from .subresources import Pods

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .errors import Object
    from .images import Image

_T = TypeVar("_T")
_CAPACITY = {"cpu": "8", "memory": "24684092Ki", "pods": "110", "ephemeral-storage": "100Gi", "nvidia.com/gpu": "8"}
_NUMBERS = iter(range(1, 10_000))


class Cluster(faults.Faults):
    """A cluster; see `faults.Faults` for what can be done to it.

    Attributes:
        kubeconfig: the path of a file with a context for each user; `admin` is the current one.
        url: where its server is.
        nodes: the nodes by name: node-1, node-2.
        images: what names of images stand for; every other name is `images.usual()`.
        names: the name server of the pods.
        folder: all that it keeps.
    """

    def __init__(
        self, nodes: int = 2, *, minor: int = 24, tracking: bool | None = None, operators: Iterable[str] = (),
        capacity: dict[str, str] | None = None, pace: float = 0.02,
    ) -> None:  # fmt: skip
        """Nothing is made yet.

        Args:
            nodes: how many.
            minor: of the version: 24 is 1.24.
            tracking: whether jobs count pods with finalizers; by default from 1.26 on.
            operators: whose kinds are installed: those of resources.CUSTOM.
            capacity: what a node has.
            pace: of a real Job controller's pauses before it replaces lost pods (10 s, doubling up to 600 s).
        """
        number = next(_NUMBERS)
        self.prefix = machine.prefix(number)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.prefix}-"))
        self.kubeconfig = self.folder / "kubeconfig"
        self.images: dict[str, Image] = {
            "no-python": images.without_python(), "python:3.8": images.with_old_python(),
            "no-torch": images.without_torch(), "non-root": replace(images.usual(), user=1000),
            "missing": images.Image(error='failed to resolve reference "missing": dial tcp: lookup registry: no such host'),
        }  # fmt: skip
        self._usual = images.usual()
        self._count, self._capacity = nodes, {**_CAPACITY, **(capacity or {})}
        self._minor, self._tracking = minor, minor >= 26 if tracking is None else tracking
        self._pace = pace
        self._operators = tuple(operators)
        self.network = network.Network(self.prefix, 64 + number % 128)
        self.nodes: dict[str, Kubelet] = {}
        self.users: dict[str, str] = {}  # the tokens by name
        self._contexts: dict[str, str] = {}  # the namespace by user
        self._holders: list[socket.socket] = []
        self._tokens: dict[str, str] = {}

    # -- start and stop ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make it; comes back when it answers."""
        machine.remove_leftovers()
        self.network.start(self._count)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        authority = trustme.CA()
        self._authority = authority.cert_pem.bytes().decode()
        (self.folder / "ca.crt").write_text(self._authority)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1", "localhost", self.network.address, "kubernetes.default.svc").configure_cert(
            self._context
        )
        self._context.set_alpn_protocols(["http/1.1"])
        self._await(self._start())
        self.user("admin", groups=(ADMINS, "system:authenticated"))
        self.namespace("default")
        self.namespace("kube-system")

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.set_default_executor(ThreadPoolExecutor(4))
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()

    def _await(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def do(self, work: Callable[[], _T]) -> _T:
        """Call something in the thread that everything belongs to."""

        async def call() -> _T:
            return work()

        return self._await(call())  # type: ignore[no-any-return]

    async def _start(self) -> None:
        self.storage = Storage()
        self.api = Api(self.storage, self._minor)
        self.access = Access(self.storage)
        self.scheduler = Scheduler(self.api)
        self.jobs = Jobs(self.api, self._tracking, self._pace)
        self.collector = Collector(self.api)
        claims = self.folder / "claims"
        claims.mkdir()
        self.housekeeping = Housekeeping(self.api, claims, self._authority)
        for name in self._operators:
            self._install(name)
        operators = [one(self.api) for one in (*OPERATORS, Kueue)]
        for one in (self.scheduler, self.jobs, self.collector, self.housekeeping, Deployments(self.api), *operators):
            one.start()
        for number in range(1, self._count + 1):
            folder = self.folder / f"node-{number}"
            folder.mkdir()
            node = Kubelet(
                self.api, self.network, number, folder, claims, self._capacity,
                lambda name: self.images.get(name, self._usual), self._token_of,
            )  # fmt: skip
            self.nodes[node.name] = node
        self.server = Server(self.api, self.access, Pods(self.api, self.nodes))
        self._hold()
        await self._listen()
        for node in self.nodes.values():
            node.server_port = self.port
            node.start()
        with network.inside(self.network.hub):
            names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            names.bind((self.network.address, 53))
        names.setblocking(False)
        self.names = network.Names(self.storage)
        await self.loop.create_datagram_endpoint(lambda: self.names, sock=names)

    def _hold(self) -> None:
        """Take a port, here and in the pods' network, and keep it while the server is down."""
        outside = _socket("127.0.0.1", 0)
        self.port = outside.getsockname()[1]
        self._holders.append(outside)
        self.url = f"https://127.0.0.1:{self.port}"

    async def _listen(self) -> None:
        with network.inside(self.network.hub):
            inside = _socket(self.network.address, self.port)
        await self.server.listen([_socket("127.0.0.1", self.port), inside], self._context)

    def stop(self) -> None:
        """Remove everything."""
        try:
            if hasattr(self, "loop") and self._thread.is_alive():
                with contextlib.suppress(Exception):
                    self._await(self._stop())
                self.loop.call_soon_threadsafe(self.loop.stop)
                self._thread.join(20)
        finally:
            for one in self._holders:
                one.close()
            machine.remove(self.prefix, self.folder)

    async def _stop(self) -> None:
        if not hasattr(self, "server"):
            return
        await self.server.close()
        for node in self.nodes.values():
            node.close()
        for node in self.nodes.values():
            await node.closed(20)
        self.names.transport.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def processes(self) -> list[int]:
        """Everything that lives and was started by it, however indirectly."""
        return machine.processes_of(self.prefix)

    # -- users ---------------------------------------------------------------------------------------------------------

    def user(
        self, name: str, *, groups: tuple[str, ...] = ("system:authenticated",), namespace: str = "default",
        rules: list[Object] | None = None, cluster_rules: list[Object] | None = None,
    ) -> str:  # fmt: skip
        """Add a user, with a context of the same name; returns the token. Rules are as in a Role."""
        token = f"token-of-{name}-{self.prefix}"
        self.do(lambda: self.access.tokens.__setitem__(token, User(name, groups)))
        self.users[name], self._contexts[name] = token, namespace
        if rules:
            self._grant("Role", name, namespace, rules)
        if cluster_rules:
            self._grant("ClusterRole", name, "", cluster_rules)
        self._write_kubeconfig()
        return token

    def _grant(self, kind: str, name: str, namespace: str, rules: list[Object]) -> None:
        group = "rbac.authorization.k8s.io"
        subject = {"kind": "User", "name": name, "apiGroup": group}
        reference = {"kind": kind, "name": name, "apiGroup": group}
        role = {"apiVersion": f"{group}/v1", "kind": kind, "metadata": {"name": name}, "rules": rules}
        binding = {"apiVersion": f"{group}/v1", "kind": f"{kind}Binding", "metadata": {"name": name},
                   "subjects": [subject], "roleRef": reference}  # fmt: skip
        self.create(role, namespace)
        self.create(binding, namespace)

    def _write_kubeconfig(self) -> None:
        cluster = {"server": self.url, "certificate-authority": str(self.folder / "ca.crt")}
        contexts = [
            {"name": name, "context": {"cluster": "lab", "user": name, "namespace": self._contexts[name]}}
            for name in self.users
        ]
        contexts.append(
            {"name": "anonymous", "context": {"cluster": "lab", "user": "anonymous", "namespace": "default"}}
        )
        contexts.append({"name": "wrong-token", "context": {"cluster": "lab", "user": "wrong", "namespace": "default"}})
        users = [{"name": name, "user": {"token": token}} for name, token in self.users.items()]
        users += [{"name": "anonymous", "user": {}}, {"name": "wrong", "user": {"token": "nobody-knows-it"}}]
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "admin", "contexts": contexts, "users": users,
            "clusters": [{"name": "lab", "cluster": cluster}],
        }  # fmt: skip
        self.kubeconfig.write_text(yaml.safe_dump(content))

    def _token_of(self, pod: Object) -> str:
        name = f"{pod['metadata']['namespace']}:{pod['spec'].get('serviceAccountName', 'default')}"
        token = self._tokens.setdefault(name, f"service-account-{name}-{self.prefix}")
        groups = ("system:serviceaccounts", "system:authenticated")
        self.access.tokens[token] = User(f"system:serviceaccount:{name}", groups)
        return token

    # -- objects -------------------------------------------------------------------------------------------------------

    def resource(self, kind: str, version: str = "") -> resources.Resource:
        """A kind by its name: Job, pods, jobs.batch."""
        one: resources.Resource
        for one in self.api.served():
            if kind in (one.kind, one.plural, one.qualified) and version in ("", one.api_version):
                return one
        raise KeyError(kind)

    def create(self, object: Object, namespace: str = "default") -> Object:
        """Create an object, without HTTP."""
        resource = self.resource(object["kind"], object["apiVersion"])
        place = object["metadata"].get("namespace") or namespace
        return self.do(lambda: self.api.create(resource, place if resource.namespaced else "", object))

    def get(self, kind: str, name: str, namespace: str = "default") -> Object | None:
        resource = self.resource(kind)
        found: Object | None = self.do(
            lambda: self.storage.get(resource, namespace if resource.namespaced else "", name)
        )
        return found

    def all(self, kind: str, namespace: str = "default") -> list[Object]:
        resource = self.resource(kind)
        return self.do(lambda: list(self.storage.all(resource, namespace if resource.namespaced else "")))

    def custom(self) -> list[str]:
        """The kinds of operators that may be part of a job."""
        found = self.do(lambda: list(self.api.custom.values()))
        return sorted({one.kind for one in found if one.namespaced and one.kind.endswith(("Job", "Set", "Group"))})

    def ended(self, name: str, namespace: str = "default") -> str:
        """How a Job has ended: Complete, Failed, or not yet ""."""
        job = self.storage.get(resources.JOBS, namespace, name)
        found = [
            one["type"] for one in (job or {}).get("status", {}).get("conditions") or [] if one["status"] == "True"
        ]
        return next((kind for kind in found if kind in ("Complete", "Failed")), "")

    def delete(self, kind: str, name: str, namespace: str = "default", **options: object) -> None:
        resource = self.resource(kind)
        self.do(lambda: self.api.delete(resource, namespace if resource.namespaced else "", name, options))

    def patch(self, kind: str, name: str, changes: Object, namespace: str = "default") -> None:
        """Change an object by a merge patch, as somebody else does."""
        resource = self.resource(kind)
        self.do(lambda: self.api.patch(resource, namespace, name, "merge-patch+json", changes))

    def namespace(self, name: str) -> None:
        self.do(lambda: self.api.create(
            resources.NAMESPACES, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        ))  # fmt: skip

    def claim(self, name: str, namespace: str = "default", size: str = "1Gi", mode: str = "ReadWriteMany") -> Path:
        """Add a volume claim; returns the folder that pods see."""
        spec = {"accessModes": [mode], "resources": {"requests": {"storage": size}}}
        body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
        self.create(body, namespace)
        return self.folder / "claims" / f"{namespace}-{name}"

    def install(self, operator: str) -> None:
        """Add the kinds of an operator, which then acts on them."""
        self.do(lambda: self._install(operator))

    def uninstall(self, operator: str) -> None:
        """Undo `install`."""
        for one in resources.CUSTOM[operator]:
            self.do(lambda one=one: self.api.custom.pop(f"{one.api_version}/{one.plural}"))  # type: ignore[misc]

    def _install(self, operator: str) -> None:
        from . import custom

        for one in resources.CUSTOM[operator]:
            self.api.custom[f"{one.api_version}/{one.plural}"] = one
        self.api.custom_schemas.update(custom.schemas(operator, self._minor))
        for one in resources.CUSTOM[operator] if operator != "metrics-server" else ():
            self.storage.put(resources.DEFINITIONS, custom.definition(self.api, one))

    def written(self, job: str, namespace: str = "default") -> list[str]:
        """What the pods of a job have written, also those that are gone, as the disks of the nodes have it: lines without times."""
        found = sorted(self.folder.glob(f"node-*/logs/{namespace}_{job}-*/*/*.log"))
        return [line.partition(" ")[2] for path in found for line in path.read_text().splitlines()]

    def wait(self, condition: Callable[[], _T], what: str, seconds: float = 60.0) -> _T:
        """Wait until something is true of the objects; it is looked at again after each change."""

        async def look() -> _T:
            while True:
                changed = self.storage.changed
                result = condition()
                if result:
                    return result
                await changed.wait()

        async def limited() -> _T:
            try:
                return await asyncio.wait_for(look(), seconds)
            except asyncio.TimeoutError:
                raise AssertionError(f"never happened: {what}") from None

        return asyncio.run_coroutine_threadsafe(limited(), self.loop).result(seconds + 10)

    def kubectl(self, *args: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """The real kubectl."""
        env = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.folder)}
        done = subprocess.run(
            ["kubectl", *args], env=env, capture_output=True, text=True, check=False, timeout=60, **options
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    @contextlib.contextmanager
    def forward(self, pod: str, port: int) -> Iterator[int]:
        """A port of this machine that the real kubectl leads to a port of a pod."""
        env = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.folder)}
        words = ["kubectl", "port-forward", "--address", "127.0.0.1", pod, f":{port}"]
        with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            try:
                yield int(running.stdout.readline().split(" -> ")[0].rpartition(":")[2])
            finally:
                running.terminate()

    def apply(self, *objects: Object, **options: Any) -> subprocess.CompletedProcess[str]:
        """`kubectl apply` of some objects."""
        return self.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(objects), **options)


def _socket(address: str, port: int) -> socket.socket:
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    one.bind((address, port))
    one.setblocking(False)
    return one
