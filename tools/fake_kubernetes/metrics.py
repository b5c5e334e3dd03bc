"""What a metrics-server says: the CPUs and the memory of pods and nodes, as their processes use them now."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from . import defaults, resources

if TYPE_CHECKING:
    from .containers import Container
    from .errors import Object
    from .server import Call, Server

GROUP = "metrics.k8s.io"
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


def answer(server: Server, call: Call) -> Object:
    """The metrics of a pod or a node, or of all that the selectors take; such a list has no pages."""
    matches = call.matches() or (lambda object: True)
    of = resources.NODES if call.resource.plural == "nodes" else resources.PODS
    found = [
        _metrics(server, object, call.resource.kind, call.resource.api_version)
        for object in server.storage.all(of, call.namespace)
        if matches(object) and (of is resources.NODES or object["status"].get("phase") == "Running")
    ]
    if not call.name:
        head = {"kind": f"{call.resource.kind}List", "apiVersion": call.resource.api_version}
        return {**head, "metadata": {}, "items": found}
    if not found:
        from .errors import not_found

        raise not_found(call.resource, call.name)
    return found[0]


def _metrics(server: Server, object: Object, kind: str, version: str) -> Object:
    data, moment = object["metadata"], defaults.now()
    metadata = {key: data[key] for key in ("name", "namespace", "labels") if data.get(key)}
    result: Object = {"kind": kind, "apiVersion": version, "metadata": {**metadata, "creationTimestamp": moment}}
    result.update(timestamp=moment, window="15s")
    if kind == "PodMetrics":
        node = server.pods.nodes.get(object["spec"].get("nodeName", ""))
        runner = node.runner(object) if node else None
        running = runner.running.items() if runner else ()
        result["containers"] = [{"name": name, "usage": _show(*_usage(one))} for name, one in running]
        return result
    each = [
        _usage(one) for runner in server.pods.nodes[data["name"]].runners.values() for one in runner.running.values()
    ]
    result["usage"] = _show(sum(cpu for cpu, _ in each), sum(memory for _, memory in each))
    return result


def _show(cpu: float, memory: int) -> dict[str, str]:
    return {"cpu": f"{int(cpu * 1e9)}n", "memory": f"{memory // 1024}Ki"}


def _usage(one: Container) -> tuple[float, int]:
    """CPUs since it was asked before, and bytes now."""
    seconds, memory, waiting = 0.0, 0, [one.pid] if one.pid else []
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / _TICKS
            memory += int(fields[21]) * _PAGE
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
    clock = time.monotonic()
    since, before = one.measured or (clock - 1, 0.0)
    if clock - since < 0.5 and one.measured:
        return one.cpus, memory
    one.cpus = max(0.0, seconds - before) / max(clock - since, 0.5)
    one.measured = (clock, seconds)
    return one.cpus, memory
