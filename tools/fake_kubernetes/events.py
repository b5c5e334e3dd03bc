"""Events: what controllers and nodes have to say of an object."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from . import defaults, resources

if TYPE_CHECKING:
    from .api import Api
    from .errors import Object


def record(api: Api, object: Object, kind: str, reason: str, message: str, component: str, host: str = "") -> None:
    """Store an event; the same one again only counts up."""
    data = object["metadata"]
    namespace = data.get("namespace") or "default"
    moment = defaults.now()
    for event in api.storage.all(resources.EVENTS, namespace):
        involved = event["involvedObject"]
        if involved.get("uid") == data["uid"] and (event["reason"], event["message"]) == (reason, message):

            def count(event: Object) -> None:
                event["count"] += 1
                event["lastTimestamp"] = moment

            api.edit(resources.EVENTS, event, count)
            return
    involved = {"kind": object["kind"], "namespace": namespace, "name": data["name"], "uid": data["uid"],
                "apiVersion": object["apiVersion"], "resourceVersion": data["resourceVersion"]}  # fmt: skip
    metadata = {"name": f"{data['name']}.{uuid.uuid4().hex[:16]}", "namespace": namespace}
    source = {"component": component, **({"host": host} if host else {})}
    if api.storage.get(resources.NAMESPACES, "", namespace) is None:
        return
    event = {
        "apiVersion": "v1", "kind": "Event", "metadata": {**metadata, "uid": str(uuid.uuid4()), "creationTimestamp": moment},
        "involvedObject": involved, "type": kind, "reason": reason, "message": message, "count": 1,
        "firstTimestamp": moment, "lastTimestamp": moment, "source": source, "eventTime": None,
        "reportingComponent": component, "reportingInstance": host,
    }  # fmt: skip
    api.storage.put(resources.EVENTS, event)
