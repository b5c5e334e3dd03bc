"""Objects for tests, and waiting for what is outside of the cluster."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Object = dict[str, Any]

CONFIG: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "hello\n"}}


def service(name: str = "t") -> Object:
    """A headless Service for the pods of a Job of the same name."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def job(
    script: str,
    name: str = "t",
    completions: int = 1,
    *,
    volumes: list[Object] | None = None,
    mounts: dict[str, str] | None = None,
    container: Object | None = None,
    pod: Object | None = None,
    **spec: Any,
) -> Object:
    """An Indexed Job whose pods run a shell script; further fields of its container, of its pods and of its own."""
    main = {"name": "main", "image": "any:1", "command": ["sh", "-c", script], **(container or {})}
    if mounts:
        main["volumeMounts"] = [{"name": key, "mountPath": path} for key, path in mounts.items()]
    template: Object = {"restartPolicy": "Never", "subdomain": name, "containers": [main], **(pod or {})}
    if volumes:
        template["volumes"] = volumes
    template.setdefault("terminationGracePeriodSeconds", 1)
    body = {
        "completions": completions,
        "parallelism": completions,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        **spec,
    }
    body["template"] = {"spec": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": body}


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until something has happened of which the cluster's objects say nothing."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)
