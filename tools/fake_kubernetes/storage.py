"""Where the server keeps its objects: versions, lists in pages, and everything that has changed, for watches."""

from __future__ import annotations

import asyncio
import base64
import binascii
import bisect
import copy
import itertools
import json
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from .errors import Object, bad_request, expired

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .resources import Resource

Key = tuple[str, str]  # namespace, name


class Entry:
    """A stored object, and its JSON without kind and version, as lists have it."""

    __slots__ = ("_json", "object")

    def __init__(self, object: Object) -> None:
        self.object = object
        self._json: bytes | None = None

    @property
    def json(self) -> bytes:
        if self._json is None:
            bare = {name: value for name, value in self.object.items() if name not in ("kind", "apiVersion")}
            self._json = json.dumps(bare, separators=(",", ":")).encode()
        return self._json


class Change(NamedTuple):
    """What happened to an object; `old` is it before, None if it is new."""

    revision: int
    type: str  # ADDED, MODIFIED, DELETED
    store: str
    entry: Entry
    old: Entry | None


class Storage:
    """All objects; belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.revision = 1000
        self.compacted = 1000  # older versions are forgotten
        self._objects: dict[str, dict[Key, Entry]] = {}
        self._sorted: dict[str, list[Key] | None] = {}
        self._changes: deque[Change] = deque(maxlen=50_000)
        self._listeners: list[Callable[[Change], None]] = []
        self.changed = asyncio.Event()  # set and replaced at every change

    # -- reading -------------------------------------------------------------------------------------------------------

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """The stored object itself: do not change it."""
        entry = self._objects.get(resource.store, {}).get((namespace, name))
        return None if entry is None else entry.object

    def all(self, resource: Resource, namespace: str = "") -> Iterator[Object]:
        for (place, _), entry in list(self._objects.get(resource.store, {}).items()):
            if not namespace or place == namespace:
                yield entry.object

    def count(self, resource: Resource) -> int:
        return len(self._objects.get(resource.store, {}))

    def page(
        self, resource: Resource, namespace: str, matches: Callable[[Object], bool] | None, limit: int, token: str
    ) -> tuple[list[Entry], Object]:
        """Some objects, in the order of their names, and the list's metadata."""
        revision, start = self._read_token(token) if token else (self.revision, ("", ""))
        objects = self._objects.get(resource.store, {})
        keys = self._sorted.get(resource.store)
        if keys is None:
            keys = self._sorted[resource.store] = sorted(objects)
        found: list[Entry] = []
        metadata: Object = {"resourceVersion": str(revision)}
        begin = bisect.bisect_right(keys, max(start, (namespace, "")))
        for index in range(begin, len(keys)):
            key = keys[index]
            if namespace and key[0] != namespace:
                break
            entry = objects[key]
            if matches is not None and not matches(entry.object):
                continue
            if limit and len(found) == limit:
                last = found[-1].object["metadata"]
                after = [revision, last.get("namespace", ""), last["name"]]
                metadata["continue"] = base64.urlsafe_b64encode(json.dumps(after).encode()).decode().rstrip("=")
                if matches is None:
                    rest = itertools.islice(keys, index, None)
                    metadata["remainingItemCount"] = sum(not namespace or place == namespace for place, _ in rest)
                break
            found.append(entry)
        return found, metadata

    def _read_token(self, token: str) -> tuple[int, Key]:
        try:
            revision, namespace, name = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        except (binascii.Error, ValueError) as error:
            raise bad_request(f"invalid continue token: {error}") from None
        if revision < self.compacted:
            raise expired("The provided continue parameter is too old to display a consistent list result. You can "
                          "start a new list without the continue parameter.")  # fmt: skip
        return revision, (namespace, name)

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, resource: Resource, object: Object) -> Object:
        """Store a new or changed object under a new version."""
        key = (object["metadata"].get("namespace", ""), object["metadata"]["name"])
        objects = self._objects.setdefault(resource.store, {})
        old = objects.get(key)
        self.revision += 1
        object["metadata"]["resourceVersion"] = str(self.revision)
        entry = objects[key] = Entry(object)
        if old is None:
            self._sorted[resource.store] = None
        self._announce(Change(self.revision, "MODIFIED" if old else "ADDED", resource.store, entry, old))
        return object

    def load(self, resource: Resource, objects: Iterable[Object]) -> None:
        """Put in many objects at once; nobody is notified."""
        stored = self._objects.setdefault(resource.store, {})
        for object in objects:
            self.revision += 1
            object["metadata"]["resourceVersion"] = str(self.revision)
            stored[(object["metadata"].get("namespace", ""), object["metadata"]["name"])] = Entry(object)
        self._sorted[resource.store] = None
        self.compact()

    def remove(self, resource: Resource, namespace: str, name: str) -> Object:
        old = self._objects[resource.store].pop((namespace, name))
        self._sorted[resource.store] = None
        self.revision += 1
        last = copy.deepcopy(old.object)
        last["metadata"]["resourceVersion"] = str(self.revision)
        self._announce(Change(self.revision, "DELETED", resource.store, Entry(last), old))
        return last

    def _announce(self, change: Change) -> None:
        self._changes.append(change)
        self.changed.set()
        self.changed = asyncio.Event()
        for listener in self._listeners:
            listener(change)

    # -- watching ------------------------------------------------------------------------------------------------------

    def listen(self, listener: Callable[[Change], None]) -> None:
        """Call it at every change, before anything else goes on."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[Change], None]) -> None:
        self._listeners.remove(listener)

    def since(self, revision: int) -> list[Change] | None:
        """The changes after a version, None if some are forgotten."""
        if revision < self.compacted or (self._changes and revision < self._changes[0].revision - 1):
            return None
        found: list[Change] = []
        for change in reversed(self._changes):
            if change.revision <= revision:
                break
            found.append(change)
        return found[::-1]

    def compact(self) -> None:
        """Forget all old versions."""
        self.revision += 1
        self.compacted = self.revision
        self._changes.clear()
