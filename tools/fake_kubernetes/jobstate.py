"""What Jobs, their pods and their statuses say; without any state."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

from . import defaults

if TYPE_CHECKING:
    from .errors import Object

INDEX = "batch.kubernetes.io/job-completion-index"


def controller_of(object: Object) -> Object | None:
    """The owner that manages an object."""
    for owner in object["metadata"].get("ownerReferences") or []:
        if owner.get("controller"):
            return owner  # type: ignore[no-any-return]
    return None


def owner_reference(object: Object) -> Object:
    data = object["metadata"]
    return {"apiVersion": object["apiVersion"], "kind": object["kind"], "name": data["name"], "uid": data["uid"],
            "controller": True, "blockOwnerDeletion": True}  # fmt: skip


def index_of(pod: Object) -> int:
    return int((pod["metadata"].get("annotations") or {}).get(INDEX, -1))


def finished(job: Object) -> bool:
    return any(one["type"] in ("Complete", "Failed") and one["status"] == "True" for one in conditions(job))


def conditions(job: Object) -> list[Object]:
    return job.get("status", {}).get("conditions") or []


def ended(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def is_ready(pod: Object) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions") or [])


def has(status: Object, kind: str) -> bool:
    return any(one["type"] == kind and one["status"] == "True" for one in status.get("conditions") or [])


def set_condition(status: Object, kind: str, value: str, reason: str, message: str, *, with_probe: bool = True) -> None:
    """Set a condition; those of Jobs and pods also say when they were probed last."""
    moment = defaults.now()
    condition = {"type": kind, "status": value, "lastTransitionTime": moment}
    if with_probe:
        condition["lastProbeTime"] = moment
    condition.update({key: text for key, text in (("reason", reason), ("message", message)) if text})
    status["conditions"] = [one for one in status.get("conditions") or [] if one["type"] != kind] + [condition]


def seconds_since(moment: str) -> float:
    begun = datetime.strptime(moment, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return (datetime.now(timezone.utc) - begun).total_seconds()


def rule_for(policy: Object, pod: Object) -> tuple[str, str]:
    """The action of the first rule of a pod failure policy that a failed pod fulfils, and what it says; "" for none.

    Source: pkg/controller/job/pod_failure_policy.go.
    """
    status, name = pod["status"], f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    entries = [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]
    codes = [(one["name"], one["state"]["terminated"]["exitCode"]) for one in entries if "terminated" in one["state"]]
    found = {(one["type"], one["status"]) for one in status.get("conditions") or []}
    for index, rule in enumerate(policy["rules"]):
        action, wanted = rule["action"], rule.get("onExitCodes") or {}
        for container, code in codes if wanted else ():
            is_meant = wanted.get("containerName") in (None, container)
            if is_meant and code and (code in wanted["values"]) == (wanted["operator"] == "In"):
                what = f"Container {container} for pod {name} failed with exit code {code}"
                return action, f"{what} matching {action} rule at index {index}"
        for one in rule.get("onPodConditions") or ():
            if (one["type"], one.get("status", "True")) in found:
                return action, f"Pod {name} has condition {one['type']} matching {action} rule at index {index}"
    return "", ""


def matched(spec: Object, done: set[int]) -> int | None:
    """The number of the first rule of a job's success policy that the indexes that are done fulfil."""
    rules = (spec.get("successPolicy") or {}).get("rules") or []
    for number, rule in enumerate(rules if done else []):
        wanted = done if rule.get("succeededIndexes") is None else numbers(rule["succeededIndexes"])
        if len(done & wanted) >= rule.get("succeededCount", len(wanted)):
            return number
    return None


def numbers(text: str) -> set[int]:
    """The numbers in a list such as 0-2,5.

    Raises:
        ValueError: it is none.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def ranges(indexes: set[int]) -> str:
    """Numbers as a status lists them: 0-2,5."""
    parts: list[list[int]] = []
    for index in sorted(indexes):
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
