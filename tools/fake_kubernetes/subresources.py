"""What goes through the server to a pod's node: logs, commands, ports; and evictions."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from aiohttp import web

from . import channels, errors, podstatus, resources, spdy
from .errors import Object, StatusError

if TYPE_CHECKING:
    from .api import Api
    from .kubelet import Kubelet
    from .podrunner import PodRunner
    from .server import Call, Server


class Pods:
    """Finds who runs a pod."""

    def __init__(self, api: Api, nodes: dict[str, Kubelet]) -> None:
        self.api, self.nodes = api, nodes

    def reach(self, pod: Object, path: str) -> PodRunner:
        """The runner of a pod, through its node.

        Raises:
            StatusError: there is none, or it cannot be reached.
        """
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        place = pod["spec"].get("nodeName")
        if not place:
            raise errors.bad_request(f"pod {name} does not have a host assigned")
        node = self.nodes.get(place)
        if node is None or not node.answers:
            address = node.address if node else "10.0.0.1"
            words = f'Get "https://{address}:10250/{path}/{namespace}/{name}": dial tcp {address}:10250: connect: no route to host'
            raise StatusError(500, "InternalError", words)
        runner = node.runner(pod)
        if runner is None:
            raise errors.bad_request(f'container "main" in pod "{name}" is waiting to start: ContainerCreating')
        return runner


async def answer(server: Server, call: Call) -> web.StreamResponse:
    """A request below a pod."""
    pod = server.api.get(call.resource, call.namespace, call.name)
    if call.resource is resources.ACCOUNTS:
        raise errors.NotServedError
    if call.sub == "log":
        return await _log(server, call, pod)
    if call.sub == "eviction":
        return await _evict(server, call, pod)
    if call.sub in ("exec", "portforward"):
        runner = server.pods.reach(pod, call.sub)
        request = call.request
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise errors.bad_request("Upgrade request required")
        offered = [one.strip() for one in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
        known = ["v4.channel.k8s.io"] if server.api.minor < 30 else ["v5.channel.k8s.io", "v4.channel.k8s.io"]
        known = known if call.sub == "exec" else [spdy.PROTOCOL]
        if not set(offered) & set(known):
            raise StatusError(403, "Forbidden", f"unable to upgrade: unsupported sub-protocols: {offered}")
        socket = web.WebSocketResponse(protocols=known, max_msg_size=0)
        if call.sub == "exec":
            container = _container(call, pod)
            one = runner.running.get(container)
            if one is None or one.pid is None:
                raise errors.bad_request(f"cannot exec in a stopped state: container {container} is not running")
            await socket.prepare(request)
            await channels.execute(socket, one, runner.namespace, call.query)
        else:
            await socket.prepare(request)
            await spdy.Session(socket, runner.namespace).serve()
        return socket
    raise errors.NotServedError


def _container(call: Call, pod: Object) -> str:
    names = [one["name"] for one in pod["spec"]["containers"]]
    everyone = [*names, *(one["name"] for one in pod["spec"].get("initContainers") or [])]
    wanted = call.query.get("container", "")
    if not wanted:
        default = (pod["metadata"].get("annotations") or {}).get("kubectl.kubernetes.io/default-container")
        if len(everyone) > 1 and not default:
            words = f"a container name must be specified for pod {call.name}, choose one of: [{' '.join(names)}]"
            if len(everyone) > len(names):
                words += f" or one of the init containers: [{' '.join(everyone[len(names) :])}]"
            raise errors.bad_request(words)
        return str(default or names[0])
    if wanted not in everyone:
        raise errors.bad_request(f"container {wanted} is not valid for pod {call.name}")
    return wanted


async def _log(server: Server, call: Call, pod: Object) -> web.StreamResponse:
    name = _container(call, pod)
    runner = server.pods.reach(pod, "containerLogs")
    logs = runner.logs.get(name) or []
    if call.query.get("previous") in ("true", "1"):
        if len(logs) < 2:
            raise errors.bad_request(f'previous terminated container "{name}" in pod "{call.name}" not found')
        log = logs[-2]
    elif not logs:
        reason = runner.waiting.get(name, ("ContainerCreating", ""))[0]
        what = "trying and failing to pull image" if "Image" in reason else reason
        raise errors.bad_request(f'container "{name}" in pod "{call.name}" is waiting to start: {what}')
    else:
        log = logs[-1]
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    response.enable_chunked_encoding()
    await response.prepare(call.request)
    node = server.pods.nodes[pod["spec"]["nodeName"]]
    task = asyncio.ensure_future(_copy(response, log, call.query))
    node.streams.add(task)
    with contextlib.suppress(ConnectionError, asyncio.CancelledError):
        await task
    node.streams.discard(task)
    with contextlib.suppress(ConnectionError, RuntimeError):
        await response.write_eof()
    return response


async def _copy(response: web.StreamResponse, log: Any, query: Any) -> None:
    async for data in log.read(query):
        await response.write(data)


async def _evict(server: Server, call: Call, pod: Object) -> web.StreamResponse:
    body = await server._body(call.request) or {}
    options = body.get("deleteOptions") or {}
    podstatus.disrupt(server.api, pod, "EvictionByEvictionAPI", "Eviction API: evicting")
    server.api.delete(resources.PODS, call.namespace, pod["metadata"]["name"], options)
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}
    return web.json_response(status, status=201)
