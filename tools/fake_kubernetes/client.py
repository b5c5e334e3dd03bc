"""HTTP to a cluster, as plain as it can be."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .cluster import Cluster

Object = dict[str, Any]


class Http:
    """Requests of one user; answers are a code and an object, or text."""

    def __init__(self, cluster: Cluster, user: str = "admin") -> None:
        self.url = cluster.url
        self.token = cluster.users.get(user, user)
        self.context = ssl.create_default_context(cafile=str(cluster.folder / "ca.crt"))

    def open(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, method=method)
        request.add_header("Content-Type", kind)
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        return urllib.request.urlopen(request, timeout=60, context=self.context)

    def __call__(self, method: str, path: str, body: Any = None, kind: str = "json") -> tuple[int, Any]:
        try:
            with self.open(method, path, body, f"application/{kind}") as answer:
                code, text, self.headers = answer.status, answer.read().decode(), answer.headers
        except urllib.error.HTTPError as error:
            code, text, self.headers = error.code, error.read().decode(), error.headers
        return code, json.loads(text) if text.startswith("{") else text

    def watch(self, path: str) -> Iterator[tuple[str, Object]]:
        """What a watch sends: the kind of event and the object."""
        with self.open("GET", path) as answer:
            for line in answer:
                event = json.loads(line)
                yield event["type"], event["object"]
