"""Requests to an API server: with patience, in pages, as watches, and with errors that say what to do."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.backends import limits
from paceline.backends.repeated import Repeated
from paceline.job.errors import UserError
from paceline.job.text import printable
from paceline.node.readers import at_once

from .credentials import connect
from .errors import ApiError, Expired, Gone, Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from paceline.backends.kubernetes.api.object import Object
    from paceline.backends.kubernetes.options import Options

    from .credentials import Access
    from .schema import Schema


PAGE = 500  # objects in an answer
_AT_ONCE = 8  # requests
_PAUSE, _MOST_PAUSE = 0.2, 3.0  # seconds between two tries
_MOST_ASKED = 15.0  # seconds of a Retry-After that are waited for by who asks on
_RETRIED = (429, 500, 502, 503, 504)
_WARNING = re.compile(r'299 [^ "]+ "((?:[^"\\]|\\.)*)"')
_QUIET_SECONDS = 60  # of a log that is followed, after which its connection is made anew
_WATCH_SECONDS = 300  # after which a watch is begun anew
STRICT = {"fieldValidation": "Strict"}
MERGE_PATCH = "application/merge-patch+json"


class _Silence:
    """What a server that does not answer means to those who follow a job: they go on asking, and say so once."""

    def __init__(self, say: Callable[[str], None], until: Callable[[], float]) -> None:
        self._say, self._until, self._is_said = say, until, False

    def goes_on(self, why: str, deadline: float) -> bool:
        """Whether it is asked again."""
        if time.monotonic() >= min(self._until(), deadline):
            return False
        if not self._is_said:
            self._is_said = True
            self._say(f"{why}; paceline goes on asking")
        return True

    def end(self) -> None:
        """It has answered."""
        self._is_said = False


def _encoded(body: Any) -> bytes:
    """A body in JSON; the API server would replace what is no text."""
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        value = printable(error.object[max(0, error.start - 20) : error.end + 20])
        raise UserError(f"{value} has bytes that are no UTF-8, which Kubernetes does not take; rename it") from None


class Cluster:
    """The API server of a target. All that asks it raises `UserError` as `send` does.

    Attributes:
        where: the flags that select it.
        pod_template: what the job that is made adds to the template of its pods, for messages.
    """

    def __init__(self, name: str, options: Options, where: str) -> None:
        self.name, self.where = name, where
        self.calls = 0  # how many requests were sent
        self.warnings: list[str] = []  # what the server has warned of in its answers to changes
        self.pod_template = options.pod_template
        self._options = options
        self._found: Access | None = None
        self._deadline = math.inf
        self._silence = _Silence(print, lambda: -math.inf)
        self._version: tuple[int, int] | None = None
        self._mirrors: dict[str, Mirror] | None = None
        self._groups: dict[str, list[str]] | None = None
        self._kinds: dict[str, frozenset[str]] = {}
        self._pauses: dict[str, float] = {}  # path → seconds until a watch that has failed is begun again

    @property
    def access(self) -> Access:
        if self._found is None:
            self._found = connect(self._options, limits.load())
        return self._found

    @property
    def gpu_resource(self) -> str:
        """What nodes call their GPUs."""
        return self._options.gpu_resource

    @property
    def namespace(self) -> str:
        return self.access.namespace

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor version of the server."""
        if self._version is None:
            found = self.get("/version")
            digits = "".join(letter for letter in str(found.get("minor", "")) if letter.isdigit())
            self._version = int(found.get("major") or 1), int(digits or 0)
        return self._version

    def versions(self, group: str) -> list[str]:
        """The versions of a group of kinds that the server has, the one that it prefers first."""
        if self._groups is None:
            found = self.get("/apis").get("groups") or ()
            self._groups = {it["name"]: [one["version"] for one in it.get("versions") or ()] for it in found}
        return self._groups.get(group, [])

    def serves(self, api_version: str, kind: str) -> bool:
        """Whether the server has a kind in this version: `serves("kubeflow.org/v1", "PyTorchJob")`."""
        self.learn([api_version])
        return kind in self._kinds.get(api_version, ())

    def learn(self, api_versions: Iterable[str]) -> None:
        """Find out which kinds these versions of groups have; `serves` asks only for others."""
        there = [it for it in api_versions if it.partition("/")[2] in self.versions(it.partition("/")[0])]
        new = [it for it in dict.fromkeys(there) if it not in self._kinds]
        for name, found in zip(new, self.at_once(*(partial(self.get, f"/apis/{it}") for it in new)), strict=True):
            self._kinds[name] = frozenset(it["kind"] for it in found.get("resources") or ())

    def schema(self, api_version: str, kind: str) -> Schema | None:
        """The schema of a kind; None if the server does not tell."""
        from .schema import Schema

        try:
            return Schema.of(self.get(f"/openapi/v3/apis/{api_version}"), api_version, kind)
        except ApiError as error:
            if error.code not in (403, 404):
                raise
            return None

    def look_until(self, deadline: float) -> None:
        """From now on try no longer than this (monotonic) to read something."""
        self._deadline = deadline

    def ask_on(self, say: Callable[[str], None], until: Callable[[], float] = lambda: math.inf) -> None:
        """From now on read again what the server does not answer, and say once that it does not."""
        self._silence = _Silence(say, until)

    def path(self, group: str, plural: str, name: str = "", sub: str = "") -> str:
        """The path of objects in the namespace: `path("batch/v1", "jobs")`."""
        root = f"/api/{group}" if "/" not in group else f"/apis/{group}"
        return "/".join(filter(None, (f"{root}/namespaces/{self.namespace}/{plural}", name, sub)))

    def at_once(self, *asked: Callable[[], Any]) -> list[Any]:
        """What these functions return, which ask the server at the same time."""
        if len(asked) > 1:
            _ = self.access  # once for all
        return at_once(lambda it: it(), asked, _AT_ONCE)

    # -- requests ------------------------------------------------------------------------------------------------------

    def get(self, path: str, **params: Any) -> Object:
        """An object, or a list of them."""
        return self.send("GET", path, params)

    def create(self, path: str, manifest: Object, **params: Any) -> Object:
        """Create an object, which may have no field that the server does not know.

        One that an earlier try has made, whose answer was lost, is returned.
        """
        try:
            return self.send("POST", path, {**STRICT, **params}, manifest)
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            with contextlib.suppress(ApiError):
                there = self.get(f"{path}/{manifest['metadata']['name']}")
                if _is_of_this_try(there, manifest):
                    return there
            raise

    def patch(self, path: str, changes: Any, kind: str = MERGE_PATCH) -> Object:
        """Change an object; its changes may have no field that the server does not know."""
        return self.send("PATCH", path, STRICT, changes, kind)

    def delete(self, path: str, **options: Any) -> Object:
        """Delete an object, and in the background all that it owns."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background", **options}
        return self.send("DELETE", path, {}, body)

    def send(
        self, method: str, path: str, params: Mapping[str, Any], body: Any = None, kind: str = "application/json"
    ) -> Object:
        """Send a request; tries again while the server is busy or starts anew."""
        import httpx2

        content = None if body is None else _encoded(body)
        headers = {"Accept": "application/json", **({} if body is None else {"Content-Type": kind})}
        within = limits.load()
        until = time.monotonic() + (within.look if method == "GET" else 2 * within.act)
        if method == "GET":
            until = min(until, self._deadline)
        pause = _PAUSE
        while True:
            self.calls += 1
            try:
                answer = self.access.http.request(method, path, params=params, content=content, headers=headers)
            except httpx2.TransportError as error:
                is_in_vain = time.monotonic() + pause > until or not _may_pass(error)
                if is_in_vain and not self._goes_on(method, str(self._unreachable(error))):
                    raise self._unreachable(error) from None
            else:
                # Someone else has changed the object meanwhile; what a patch changes does not depend on the rest.
                # What is created counts in a quota, which others change: https://github.com/kubernetes/kubernetes/issues/67761
                is_behind = answer.status_code == 409 and (method == "PATCH" or _reason(answer) == "Conflict")
                is_done = not (is_behind or answer.status_code in _RETRIED)
                if is_done:
                    self._silence.end()
                why = f"the API server of {self.access.context} answers with HTTP {answer.status_code}"
                pause = max(pause, _seconds(answer.headers.get("Retry-After")))
                is_in_vain = time.monotonic() + pause > until
                if is_done or (is_in_vain and not self._goes_on(method, why)):
                    if method != "GET":
                        said = warnings(answer.headers.get_list("Warning"))
                        self.warnings += [line for line in said if line not in self.warnings]
                    return self._read(answer, method, path)
            time.sleep(min(pause, _MOST_ASKED) if is_in_vain else pause)
            pause = min(2 * pause, _MOST_PAUSE)

    def _goes_on(self, method: str, why: str) -> bool:
        """Whether a server that does not answer is asked again all the same, for who follows a job."""
        return method == "GET" and self._silence.goes_on(why, self._deadline)

    def _read(self, answer: Any, method: str, path: str) -> Object:
        """The object in an answer."""
        try:
            found: Object = answer.json()
        except ValueError:
            found = {"message": answer.text.strip()[:200]}
        if answer.is_success:
            return found
        raise self.error(answer.status_code, found, method, path)

    def error(self, code: int, status: Object, method: str, path: str) -> ApiError:
        """What to say of a refusal."""
        from .errors import explained

        line = explained(
            code, status, method, path, context=self.access.context, where=self.where,
            template=self.pod_template,
        )  # fmt: skip
        return (Gone if code == 404 else ApiError)(line, code, str(status.get("reason", "")))

    def _unreachable(self, error: Exception) -> Unreachable:
        access = self.access
        return Unreachable(
            f"the API server of {access.context} at {access.server} does not answer ({_why(error)}); "
            "does kubectl reach it?"
        )

    # -- lists ---------------------------------------------------------------------------------------------------------

    def mirror(self) -> None:
        """From now on `list` asks once for each list, and has the server tell what changes."""
        if self._mirrors is None:
            self._mirrors = {}

    @property
    def is_mirrored(self) -> bool:
        return self._mirrors is not None

    @property
    def problem(self) -> str | None:
        """Why lists may be old; None if they are not."""
        return next((it.problem for it in (self._mirrors or {}).values() if it.problem), None)

    def list(self, path: str, **params: Any) -> Iterator[Object]:
        """All objects of a kind, in pages; the last page has the version of the list."""
        if self._mirrors is None:
            yield from self.pages(path, **params)
            return
        key = json.dumps([path, params], sort_keys=True)
        found = self._mirrors.get(key)
        if found is None:
            found = self._mirrors[key] = Mirror(self, path, params)
        elif found.is_refused:
            yield from self.pages(path, **params)
            return
        yield found.page()

    def pages(self, path: str, **params: Any) -> Iterator[Object]:
        """All objects of a kind, as the server has them now, page by page; the last has the version of the list."""
        token = version = ""
        tries = 3
        given: set[str] = set()
        while True:
            try:
                page = self.get(path, limit=PAGE, **({"continue": token} if token else {}), **params)
            except ApiError as error:
                if error.code != 410 or not tries:
                    raise
                token, tries = "", tries - 1  # it took too long: the list has changed
                continue
            # Objects that came before it had changed are old: so is its version, with which a watch is refused.
            version = version or page["metadata"].get("resourceVersion", "")
            page["metadata"]["resourceVersion"] = version
            page["items"] = [item for item in page["items"] if item["metadata"].get("uid") not in given]
            given.update(item["metadata"].get("uid", "") for item in page["items"])
            given.discard("")
            yield page
            token = page["metadata"].get("continue") or ""
            if not token:
                return

    def items(self, path: str, **params: Any) -> Iterator[Object]:
        """All objects of a kind."""
        return itertools.chain.from_iterable(page["items"] for page in self.list(path, **params))

    def watch(
        self, path: str, version: str, seconds: float | None = None, *, is_patient: bool = True, **params: Any
    ) -> Iterator[tuple[str, Object]]:
        """Changes of objects of a kind since a version: ADDED, MODIFIED, DELETED or BOOKMARK, and the object.

        It ends when the server ends it, or after this time, or when the server does not answer; who is not patient
        gets an error instead if the server does not answer, or answers that it cannot now.
        """
        import httpx2

        asked = min(_WATCH_SECONDS, max(1, int(seconds or _WATCH_SECONDS)))
        query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true", **params}
        query["timeoutSeconds"] = asked
        self.calls += 1
        within = limits.load()
        timeout = httpx2.Timeout(within.act, connect=within.connect, read=asked + within.act)
        try:
            with self.access.http.stream("GET", path, params=query, timeout=timeout) as answer:
                if not answer.is_success:
                    answer.read()
                    if answer.status_code == 410:
                        raise Expired
                    if answer.status_code in _RETRIED and is_patient:
                        self._rest(path, _seconds(answer.headers.get("Retry-After")))
                        return
                    self._read(answer, "GET", path)
                for line in answer.iter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        self._end_watch(path, event["object"], is_patient=is_patient)
                        return
                    self._pauses.pop(path, None)
                    yield event["type"], event["object"]
        except httpx2.TransportError as error:
            if not is_patient:
                raise self._unreachable(error) from None
            self._rest(path)  # it starts anew; who lists again finds out whether it does
        except ValueError:
            return  # the last line was cut off

    def _end_watch(self, path: str, status: Object, *, is_patient: bool) -> None:
        """Do what the `Status` asks for with which a server ends a watch: wait for what passes, and raise the rest."""
        code = int(status.get("code") or 500)
        if code == 410:
            raise Expired
        if code not in _RETRIED or not is_patient:
            raise self.error(code, status, "GET", path)
        self._rest(path, float((status.get("details") or {}).get("retryAfterSeconds") or 0))

    def _rest(self, path: str, least: float = 0.0) -> None:
        """Pause before a watch is begun again, longer each time until it tells something."""
        pause = self._pauses.get(path, _PAUSE)
        self._pauses[path] = min(2 * pause, _MOST_PAUSE)
        time.sleep(max(pause, min(least, _MOST_ASKED)))

    # -- logs ----------------------------------------------------------------------------------------------------------

    def log(
        self, pod: str, container: str, *, follow: bool, since: str | None, tail: int | None = None
    ) -> Iterator[bytes]:
        """The lines of a container's log, each behind its time."""
        import httpx2

        params = {"container": container, "timestamps": "true"}
        if follow:
            params["follow"] = "true"
        if since is not None:
            params["sinceTime"] = since
        if tail is not None:
            params["tailLines"] = str(tail)
        path = self.path("v1", "pods", pod, "log")
        self.calls += 1
        # A connection that was cut without a word never says so; who follows asks again after this time.
        within = limits.load()
        timeout = httpx2.Timeout(within.act, connect=within.connect, read=_QUIET_SECONDS if follow else within.act)
        until = time.monotonic() + within.look
        try:
            with contextlib.ExitStack() as stack:
                while True:
                    stream = self.access.http.stream("GET", path, params=params, timeout=timeout)
                    answer = stack.enter_context(stream)
                    pause = max(_PAUSE, _seconds(answer.headers.get("Retry-After")))
                    if answer.status_code != 429 or time.monotonic() + pause > until:
                        break
                    stack.close()
                    time.sleep(pause)
                if not answer.is_success:
                    answer.read()
                    self._read(answer, "GET", path)
                rest = b""
                for data in answer.iter_bytes():
                    *lines, rest = (rest + data).split(b"\n")
                    yield from lines
                if rest:
                    yield rest
        except httpx2.TransportError as error:
            raise self._unreachable(error) from None


def warnings(headers: Iterable[str]) -> list[str]:
    """The texts of Warning headers: `299 - "text"`, one or several in each."""
    found = [text for header in headers for text in _WARNING.findall(header)]
    return [" ".join(re.sub(r"\\(.)", r"\1", text).split()) for text in found]


def _is_of_this_try(there: Object, manifest: Object) -> bool:
    """Whether an object was made from this manifest: its annotations or its owners have identifiers of the submit."""
    made, asked = there["metadata"], manifest["metadata"]
    annotations = asked.get("annotations") or {}
    owners = {it["uid"] for it in asked.get("ownerReferences") or ()}
    has_owners = owners <= {it["uid"] for it in made.get("ownerReferences") or ()}
    return bool(annotations or owners) and has_owners and annotations.items() <= (made.get("annotations") or {}).items()


def _may_pass(error: Exception) -> bool:
    """Whether another try may work: not if a certificate or a name is wrong."""
    text = str(error)
    return "CERTIFICATE_VERIFY_FAILED" not in text and "Name or service not known" not in text


def _why(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def _reason(answer: Any) -> str:
    """The reason in the `Status` of a refusal."""
    try:
        return str(answer.json().get("reason", ""))
    except (ValueError, AttributeError):
        return ""


def _seconds(text: str | None) -> float:
    return float(text) if text and text.isdigit() else 0.0


# -- objects that a watch keeps up to date, for who looks again and again: one list and one watch per kind -------------

_SILENCE = 1.0  # seconds until an API server that does not answer is asked again
_UNSIGNED = 15.0  # the same where there are no credentials: a program that fetches them may ask its user
_REFUSED = (401, 403)


class Mirror:
    """Objects of one path, as the server has them; while it does not answer, as it had them last."""

    def __init__(self, cluster: Cluster, path: str, params: Mapping[str, Any]) -> None:
        """List the objects, and begin to watch them."""
        self.is_refused = False  # whether this user may list the objects, and not watch them
        self.problem: str | None = None  # why nothing new is known; None if all is well
        self._cluster, self._path, self._params = cluster, path, dict(params)
        self._lock = threading.Lock()
        self._items: dict[str, Object] = {}
        self._version = ""
        self._is_behind = False
        self._list()
        Repeated(self._follow)

    def page(self) -> Object:
        """All objects, as one page of a list."""
        with self._lock:
            return {"metadata": {"resourceVersion": self._version}, "items": list(self._items.values())}

    def _list(self) -> None:
        found: dict[str, Object] = {}
        version = ""
        for page in self._cluster.pages(self._path, **self._params):
            found.update((item["metadata"]["name"], _small(item)) for item in page["items"])
            version = page["metadata"]["resourceVersion"]
        with self._lock:
            self._items, self._version = found, version

    def _follow(self) -> float | None:
        """Note what changes; or list the objects anew, as soon as the server answers."""
        try:
            if self._is_behind:
                self._list()
                self._is_behind, self.problem = False, None
        except UserError as error:
            self.problem = str(error)
            return _SILENCE if isinstance(error, (ApiError, Unreachable)) else _UNSIGNED
        try:
            for kind, item in self._cluster.watch(self._path, self._version, is_patient=False, **self._params):
                self._note(kind, item)
        except (Expired, UserError) as error:
            self.is_refused = isinstance(error, ApiError) and error.code in _REFUSED
            self._is_behind = True
            return None if self.is_refused else _SILENCE if isinstance(error, ApiError) else 0.0
        return 0.0

    def _note(self, kind: str, item: Object) -> None:
        with self._lock:
            self._version = item["metadata"]["resourceVersion"]
            if kind == "DELETED":
                self._items.pop(item["metadata"]["name"], None)
            elif kind != "BOOKMARK":
                self._items[item["metadata"]["name"]] = _small(item)


def _small(item: Object) -> Object:
    """An object without what only the server needs, which may be most of it."""
    item["metadata"].pop("managedFields", None)
    return item
