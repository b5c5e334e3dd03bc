"""Events: what controllers and nodes have to say of an object."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from . import defaults, resources

if TYPE_CHECKING:
    from .api import Api
    from .errors import Object


_MOST = 10  # messages for a reason about an object; more are combined, as client-go does
_LONGEST = 1024  # letters of a message
_COMBINED = "(combined from similar events): "
_NEWER = ("default-scheduler",)  # who writes events.k8s.io, whose events have other times


def record(api: Api, object: Object, kind: str, reason: str, message: str, component: str, host: str = "") -> None:
    """Store an event; the same one again only counts up.

    Source: staging/src/k8s.io/client-go/tools/record/events_cache.go.
    """
    data, message, moment = object["metadata"], message[:_LONGEST], defaults.now()
    namespace = data.get("namespace") or "default"
    if api.storage.get(resources.NAMESPACES, "", namespace) is None:
        return
    similar = [
        event for event in api.storage.all(resources.EVENTS, namespace)
        if event["involvedObject"].get("uid") == data["uid"] and event["reason"] == reason
    ]  # fmt: skip
    same = next((event for event in similar if event["message"] == message), None)
    if same is None and len(similar) >= _MOST:
        message = _COMBINED + message
        same = next((event for event in similar if event["message"].startswith(_COMBINED)), None)
    if same is not None:

        def count(event: Object) -> None:
            event["message"] = message
            if component in _NEWER:
                series = event.get("series") or {"count": 1}
                event["series"] = {"count": series["count"] + 1, "lastObservedTime": f"{moment[:-1]}.000000Z"}
            else:
                event.update(count=event["count"] + 1, lastTimestamp=moment)

        api.edit(resources.EVENTS, same, count)
        return
    involved = {"kind": object["kind"], "namespace": namespace, "name": data["name"], "uid": data["uid"],
                "apiVersion": object["apiVersion"], "resourceVersion": data["resourceVersion"]}  # fmt: skip
    metadata = {"name": f"{data['name']}.{uuid.uuid4().hex[:16]}", "namespace": namespace}
    event: Object = {
        "apiVersion": "v1", "kind": "Event", "metadata": {**metadata, "uid": str(uuid.uuid4()), "creationTimestamp": moment},
        "involvedObject": involved, "type": kind, "reason": reason, "message": message,
        "reportingComponent": component, "reportingInstance": host,
    }  # fmt: skip
    if component in _NEWER:
        event.update(firstTimestamp=None, lastTimestamp=None, source={}, eventTime=f"{moment[:-1]}.000000Z",
                     action="Scheduling", reportingInstance=f"{component}-0")  # fmt: skip
    else:
        source = {"component": component, **({"host": host} if host else {})}
        event.update(count=1, firstTimestamp=moment, lastTimestamp=moment, source=source, eventTime=None)
    api.storage.put(resources.EVENTS, event)
