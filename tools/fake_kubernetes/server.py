"""The API server: HTTP in front of the objects."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import time
from typing import TYPE_CHECKING, Any

import yaml
from aiohttp import web

from . import discovery, errors, metrics, openapi, patching, resources, selectors, subresources, tables
from .access import ADMINS, ANONYMOUS, Access
from .errors import NotServedError, Object, StatusError

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from .api import Api
    from .resources import Resource
    from .storage import Entry

_LIMIT = 3145728  # bytes of a body
_COMPRESSED = 128 << 10  # bytes of an answer from which on it is compressed
_PATH = re.compile(r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))/(?P<rest>.+)")
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class Call:
    """A request to objects, taken apart."""

    def __init__(self, request: web.BaseRequest, resource: Resource, namespace: str, name: str, sub: str) -> None:
        self.request, self.resource = request, resource
        self.namespace, self.name, self.sub = namespace, name, sub
        self.query = request.query
        self.is_dry = self.query.get("dryRun") == "All"
        self.is_strict = self.query.get("fieldValidation") == "Strict"

    @property
    def watches(self) -> bool:
        return self.query.get("watch") in ("true", "1", "True")

    @property
    def verb(self) -> str:
        if self.request.method == "GET":
            return "watch" if self.watches else "get" if self.name else "list"
        verb = _VERBS.get(self.request.method, self.request.method.lower())
        return "deletecollection" if verb == "delete" and not self.name else verb

    def matches(self) -> Callable[[Object], bool] | None:
        """What its selectors take, None for everything."""
        labels, fields = self.query.get("labelSelector", ""), self.query.get("fieldSelector", "")
        if self.name:
            fields = f"metadata.name={self.name}"
        if not labels and not fields:
            return None
        by_label, by_field = selectors.of_labels(labels), selectors.of_fields(fields, self.resource)
        return lambda object: by_label(object["metadata"].get("labels") or {}) and by_field(object)


class Server:
    """Answers requests; lives in the event loop's thread."""

    def __init__(self, api: Api, access: Access, pods: subresources.Pods) -> None:
        self.api, self.storage, self.access, self.pods = api, api.storage, access, pods
        self.throttled = 0  # so many requests to come are refused
        self.silent = ""  # requests with this part in their paths get no answer
        self.bookmark_every = 60.0  # seconds
        self.warning = ""  # in the answer to each POST
        self.requests: list[str] = []  # all that were answered: method and path
        # Called before each request, and after it has been carried out but not answered; may raise StatusError.
        self.hook: Callable[[web.BaseRequest], None] | None = None
        self.late_hook: Callable[[web.BaseRequest], None] | None = None
        self._watches: set[asyncio.Event] = set()
        self._handlers: set[asyncio.Task[Any]] = set()
        self._runner: web.ServerRunner | None = None

    # -- listening -----------------------------------------------------------------------------------------------------

    async def listen(self, sockets: list[socket.socket], context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()

        def make(*args: Any) -> web.BaseRequest:
            message, payload, protocol, writer, task = args
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=1 << 26)

        server = web.Server(self._handle, request_factory=make, access_log=None)
        self._server = server
        self._runner = web.ServerRunner(server, shutdown_timeout=0)
        await self._runner.setup()
        for one in sockets:
            await web.SockSite(self._runner, one, ssl_context=context, backlog=256).start()

    async def close(self) -> None:
        """End all connections, as a server that is killed."""
        if self._runner is None:
            return
        for site in list(self._runner.sites):
            await site.stop()
        for connection in list(self._server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        for task in self._handlers:
            task.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await self._runner.cleanup()
        self._runner = None

    def expire_watches(self) -> None:
        """Forget all old versions; watches end, and who continues from what it has seen is refused."""
        self.storage.compact()
        for event in self._watches:
            event.set()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)  # a task for each connection
        task.add_done_callback(self._handlers.discard)
        return await self._respond(request)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        self.requests.append(f"{request.method} {request.path_qs}")
        try:
            if path in ("/healthz", "/livez", "/readyz"):
                return web.Response(text="ok")
            if self.throttled:
                self.throttled -= 1
                raise errors.too_many()
            if self.silent and self.silent in path:
                await asyncio.Event().wait()  # until the connection or the server ends
            user = self.access.user(request.headers.get("Authorization", ""))
            if self.hook is not None:
                self.hook(request)
            if path == "/openapi/v2":
                return web.Response(body=openapi.document(self.api), headers={"Content-Type": openapi.TYPE})
            found = discovery.answer(self.api, path)
            if found is not None:
                if user is ANONYMOUS and path != "/version":
                    words = f'forbidden: User "{user.name}" cannot get path "{path}"'
                    raise StatusError(403, "Forbidden", words)
                return _json(found)
            call = self._call(request)
            verb = call.verb
            self.access.require(user, verb, call.resource, call.namespace, call.name, call.sub)
            answer = await self._answer(call, user)
            if self.late_hook is not None:
                self.late_hook(request)
            return answer
        except StatusError as error:
            return _json(error.body(), error.code, error.headers)
        except NotServedError:
            return web.Response(status=404, text="404 page not found\n")

    def _call(self, request: web.BaseRequest) -> Call:
        found = _PATH.fullmatch(request.path.rstrip("/"))
        if not found:
            raise NotServedError
        group, version = found["group"] or "", found["version"] or "v1"
        parts = found["rest"].split("/")
        namespace = ""
        if parts[0] == "namespaces" and len(parts) > 2 and parts[2] not in ("status", "finalize"):
            namespace, parts = parts[1], parts[2:]
        for resource in self.api.served():
            if (resource.group, resource.version, resource.plural) == (group, version, parts[0]):
                break
        else:
            raise NotServedError
        name = parts[1] if len(parts) > 1 else ""
        sub = parts[2] if len(parts) > 2 else ""
        if len(parts) > 3 or (sub and sub not in resource.subresources) or (namespace and not resource.namespaced):
            raise NotServedError
        if resource is resources.NAMESPACES:
            namespace = ""
        return Call(request, resource, namespace, name, sub)

    async def _answer(self, call: Call, user: Any) -> web.StreamResponse:
        resource, method = call.resource, call.request.method
        if call.sub and call.sub not in ("status", "scale"):
            return await subresources.answer(self, call)
        if method == "GET":
            return await self._read(call)
        body = await self._body(call.request)
        if method == "POST" and not call.name:
            if resource.virtual:
                return _json(self._review(user, body, resource), 201)
            object = self.api.create(resource, call.namespace, body, strict=call.is_strict, dry_run=call.is_dry)
            answer = self._one(call, object, 201)
            for line in filter(None, (self.warning, *self.api.warnings)):
                answer.headers.add("Warning", f"299 - {json.dumps(line)}")
            return answer
        if method == "DELETE" and not call.name:
            return self._delete_all(call, body)
        if not call.name:
            raise StatusError(
                405, "MethodNotAllowed", "the server does not allow this method on the requested resource"
            )
        if method == "DELETE":
            for option in ("gracePeriodSeconds", "propagationPolicy"):
                value = call.query.get(option)
                if value is not None:
                    body = {**(body or {}), option: int(value) if option.startswith("grace") else value}
            dry = call.is_dry or "All" in ((body or {}).get("dryRun") or [])
            return self._one(call, self.api.delete(resource, call.namespace, call.name, body or {}, dry))
        options: dict[str, Any] = {"sub": call.sub, "strict": call.is_strict, "dry_run": call.is_dry}
        if call.sub == "scale":
            return self._scale(call, body)
        if method == "PUT":
            return self._one(call, self.api.replace(resource, call.namespace, call.name, body, **options))
        if method == "PATCH":
            kind = call.request.content_type.partition("/")[2]
            return self._one(call, self.api.patch(resource, call.namespace, call.name, kind, body, **options))
        raise StatusError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    async def _body(self, request: web.BaseRequest) -> Any:
        if (request.content_length or 0) > _LIMIT:
            raise errors.too_large()
        data = await request.read()
        if len(data) > _LIMIT:
            raise errors.too_large()
        if not data:
            return None
        if "protobuf" in request.content_type:
            raise StatusError(415, "UnsupportedMediaType", "the body of the request was in an unknown format")
        try:
            return yaml.safe_load(data) if "yaml" in request.content_type else json.loads(data)
        except (ValueError, yaml.YAMLError) as error:
            raise errors.bad_request(f"couldn't get version/kind; json parse error: {error}") from None

    def _one(self, call: Call, object: Object, code: int = 200) -> web.Response:
        shown = tables.wanted(call.request) and tables.table(call.resource, [object], self.api)
        return _json(shown or object, code)

    # -- reading -------------------------------------------------------------------------------------------------------

    async def _read(self, call: Call) -> web.StreamResponse:
        if call.watches:
            return await self._watch(call)
        if call.resource.group == metrics.GROUP:
            return _json(metrics.answer(self, call))
        if call.name:
            object = self.api.get(call.resource, call.namespace, call.name)
            if call.sub == "scale":
                return _json(_scale_of(object))
            return self._one(call, object)
        resource = call.resource
        limit = int(call.query.get("limit") or 0)
        matches = call.matches()
        token = call.query.get("continue", "")
        found, metadata = self.storage.page(resource, call.namespace, matches, limit, token)
        if tables.wanted(call.request):
            return _json(tables.table(resource, [entry.object for entry in found], self.api, metadata))
        head = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": metadata}
        start = json.dumps(head, separators=(",", ":")).encode()[:-1]
        if resource.custom:
            items = [json.dumps(entry.object, separators=(",", ":")).encode() for entry in found]
        else:
            items = [entry.json for entry in found]
        data = b'%s,"items":[%s]}' % (start, b",".join(items))
        headers = {}
        if len(data) > _COMPRESSED and "gzip" in call.request.headers.get("Accept-Encoding", ""):
            data, headers["Content-Encoding"] = gzip.compress(data, 1), "gzip"
        return web.Response(body=data, content_type="application/json", headers=headers)

    async def _watch(self, call: Call) -> web.StreamResponse:
        version = call.query.get("resourceVersion") or "0"
        try:
            revision = int(version)
        except ValueError:
            raise errors.bad_request(f'Invalid value: "{version}": strconv.ParseUint: invalid syntax') from None
        matches = call.matches() or (lambda object: True)
        bookmarks = call.query.get("allowWatchBookmarks") in ("true", "1")
        as_table = tables.wanted(call.request)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(call.request)
        expires = asyncio.Event()
        self._watches.add(expires)
        end = time.monotonic() + float(call.query.get("timeoutSeconds") or 2400)
        next_mark = time.monotonic() + self.bookmark_every

        async def send(kind: str, object: Object) -> None:
            if as_table and kind not in ("BOOKMARK", "ERROR"):
                object = tables.table(call.resource, [object], self.api)
            await response.write(json.dumps({"type": kind, "object": object}, separators=(",", ":")).encode() + b"\n")

        def mark() -> Object:
            resource = call.resource
            metadata = {"resourceVersion": str(revision), "creationTimestamp": None}
            return {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": metadata}

        try:
            if revision == 0:
                revision = self.storage.revision
                for object in list(self.storage.all(call.resource, call.namespace)):
                    if matches(object):
                        await send("ADDED", object)
            while True:
                waiting = self.storage.changed
                changes = None if expires.is_set() else self.storage.since(revision)
                if changes is None:
                    words = f"too old resource version: {revision} ({self.storage.revision})"
                    await send("ERROR", errors.expired(words).body())
                    break
                for change in changes:
                    revision = change.revision
                    if change.store != call.resource.store:
                        continue
                    object = change.entry.object
                    if call.namespace and object["metadata"].get("namespace") != call.namespace:
                        continue
                    kind = _kind_of(change.type, change.old, object, matches)
                    if kind:
                        await send(kind, object)
                clock = time.monotonic()
                if bookmarks and (clock >= next_mark or clock >= end):
                    next_mark = clock + self.bookmark_every
                    await send("BOOKMARK", mark())
                if clock >= end:
                    break
                await _first(min(end, next_mark if bookmarks else end) - clock, waiting, expires)
            await response.write_eof()
        except (ConnectionError, RuntimeError):  # the client is gone
            pass
        finally:
            self._watches.discard(expires)
        return response

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _review(self, user: Any, body: Object, resource: Resource) -> Object:
        spec = body.get("spec") or {}
        if resource is resources.SUBJECT_REVIEWS:
            return {**body, "status": {"userInfo": {"username": user.name, "groups": list(user.groups)}}}
        if resource is resources.RULES_REVIEWS:
            rules = list(self.access.rules(user, spec.get("namespace", "")))
            if ADMINS in user.groups:
                rules.append({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]})
            return {**body, "status": {"resourceRules": rules, "nonResourceRules": [], "incomplete": False}}
        asked = spec.get("resourceAttributes") or {}
        allowed = self.access.allows(
            user, asked.get("verb", ""), asked.get("group", ""), asked.get("resource", ""),
            asked.get("namespace", ""), asked.get("name", ""), asked.get("subresource", ""),
        )  # fmt: skip
        metadata = {"creationTimestamp": None}
        return {**body, "metadata": metadata, "status": {"allowed": allowed}}

    def _delete_all(self, call: Call, body: Object | None) -> web.Response:
        matches = call.matches() or (lambda object: True)
        found = [object for object in self.storage.all(call.resource, call.namespace) if matches(object)]
        for object in found:
            with contextlib.suppress(StatusError):
                self.api.delete(
                    call.resource, object["metadata"].get("namespace", ""), object["metadata"]["name"], body
                )
        head = {"kind": f"{call.resource.kind}List", "apiVersion": call.resource.api_version}
        return _json({**head, "metadata": {"resourceVersion": str(self.storage.revision)}, "items": found})

    def _scale(self, call: Call, body: Object) -> web.Response:
        old = _scale_of(self.api.get(call.resource, call.namespace, call.name))
        count = patching.merge(old, body)["spec"]["replicas"]
        patch = {"spec": {"replicas": count}}
        object = self.api.patch(call.resource, call.namespace, call.name, "merge-patch+json", patch)
        return _json(_scale_of(object))


def _scale_of(object: Object) -> Object:
    data = object["metadata"]
    metadata = {name: data[name] for name in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")}
    return {
        "kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata,
        "spec": {"replicas": object["spec"].get("replicas", 1)},
        "status": {"replicas": object.get("status", {}).get("replicas", 0)},
    }  # fmt: skip


def _kind_of(kind: str, old: Entry | None, object: Object, matches: Callable[[Object], bool]) -> str:
    """What a change is to a watch with selectors."""
    was, is_ = old is not None and matches(old.object), matches(object)
    if kind == "DELETED":
        return "DELETED" if was or is_ else ""
    if was:
        return "MODIFIED" if is_ else "DELETED"
    return "ADDED" if is_ else ""


async def _first(seconds: float, *events: asyncio.Event) -> None:
    """Wait for the first of some events, or the time."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=max(0, seconds), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _json(object: Any, code: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    data = json.dumps(object, separators=(",", ":")).encode()
    return web.Response(body=data, status=code, content_type="application/json", headers=headers)
