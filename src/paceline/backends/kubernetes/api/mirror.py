"""A list of objects that a watch keeps up to date, for who looks again and again: one list and one watch per kind."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError

from .errors import ApiError, Expired, Unreachable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .client import Cluster, Object

_PAUSE = 1.0  # seconds until an API server that does not answer is asked again
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
        self._list()
        threading.Thread(target=self._follow, daemon=True).start()

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

    def _follow(self) -> None:
        while not self.is_refused:
            try:
                for kind, item in self._cluster.watch(self._path, self._version, is_patient=False, **self._params):
                    self._note(kind, item)
            except (Expired, Unreachable):
                self._list_again()
            except ApiError as error:
                self.is_refused = error.code in _REFUSED
                time.sleep(_PAUSE)

    def _list_again(self) -> None:
        """List the objects anew, as soon as the server answers."""
        while True:
            try:
                self._list()
            except UserError as error:
                self.problem = str(error)
                time.sleep(_PAUSE)
            else:
                self.problem = None
                return

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
