"""Gives each pod a node, or says why none fits."""

from __future__ import annotations

import asyncio
from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING

from . import defaults, events, quantity, resources, selectors
from .errors import Object

if TYPE_CHECKING:
    from .api import Api
    from .storage import Change


class Scheduler:
    """Looks at the pods without a node whenever something has changed."""

    def __init__(self, api: Api) -> None:
        self.api, self.storage = api, api.storage
        self.paused = False
        self._waiting: dict[str, Object] = {}  # by uid
        self._taken: dict[str, dict[str, Fraction]] = {}
        self._is_due = False

    def start(self) -> None:
        self.storage.listen(self._changed)

    def _changed(self, change: Change) -> None:
        if change.store == "pods":
            pod, old = change.entry.object, None if change.old is None else change.old.object
            self._count(old, -1)
            if change.type != "DELETED":
                self._count(pod, 1)
            uid = pod["metadata"]["uid"]
            waits = not pod["spec"].get("nodeName") and pod["status"].get("phase") == "Pending"
            if waits and change.type != "DELETED" and not pod["metadata"].get("deletionTimestamp"):
                known = uid in self._waiting
                self._waiting[uid] = pod
                if known:
                    return
            else:
                self._waiting.pop(uid, None)
        elif change.store not in ("nodes", "persistentvolumeclaims"):
            return
        self.again()

    def again(self) -> None:
        """Try all pods that wait, soon."""
        if not self._is_due and self._waiting:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._work)

    def _count(self, pod: Object | None, sign: int) -> None:
        if pod is None or not pod["spec"].get("nodeName") or pod["status"].get("phase") in ("Succeeded", "Failed"):
            return
        taken = self._taken.setdefault(pod["spec"]["nodeName"], {})
        for name, value in {**quantity.requests(pod["spec"]), "pods": Fraction(1)}.items():
            taken[name] = taken.get(name, Fraction(0)) + sign * value

    def _work(self) -> None:
        self._is_due = False
        if self.paused:
            return
        for pod in sorted(self._waiting.values(), key=lambda pod: -pod["spec"].get("priority", 0)):
            if pod["spec"].get("schedulerName", "default-scheduler") not in (
                "default-scheduler",
                "volcano",
                "scheduler-plugins-scheduler",
            ):
                continue
            self._place(pod)

    def _place(self, pod: Object) -> None:
        nodes = list(self.storage.all(resources.NODES))
        why: Counter[str] = Counter()
        fitting = []
        missing = self._missing_claim(pod)
        for node in nodes:
            reasons = [missing] if missing else self._against(pod, node)
            why.update(reasons)
            if not reasons:
                fitting.append(node)
        if fitting:
            best = min(fitting, key=lambda node: self._score(pod, node))
            self._bind(pod, best["metadata"]["name"])
            return
        listed = ", ".join(f"{count} {reason}" for reason, count in sorted(why.items(), key=lambda item: item[0]))
        if missing:
            listed = missing
            words = f"0/{len(nodes)} nodes are available: {len(nodes)} {missing}."
        else:
            words = f"0/{len(nodes)} nodes are available: {listed}."
        preempt = (
            "Preemption is not helpful for scheduling" if len(why) else "No preemption victims found for incoming pod"
        )
        words += f" preemption: 0/{len(nodes)} nodes are available: {len(nodes)} {preempt}."
        status = {**pod["status"]}
        others = [one for one in status.get("conditions") or [] if one["type"] != "PodScheduled"]
        before = next((one for one in status.get("conditions") or [] if one["type"] == "PodScheduled"), None)
        if before and before.get("message") == words:
            return
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words,
                     "lastProbeTime": None, "lastTransitionTime": defaults.now()}  # fmt: skip
        status["conditions"] = [*others, condition]
        self.api.set_status(resources.PODS, pod, status)
        events.record(self.api, pod, "Warning", "FailedScheduling", words, "default-scheduler")

    def _missing_claim(self, pod: Object) -> str:
        for volume in pod["spec"].get("volumes") or []:
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if claim and self.storage.get(resources.CLAIMS, pod["metadata"]["namespace"], claim) is None:
                return f'persistentvolumeclaim "{claim}" not found'
        return ""

    def _against(self, pod: Object, node: Object) -> list[str]:
        """Why a pod cannot run on a node."""
        spec, labels = pod["spec"], node["metadata"].get("labels") or {}
        if node["spec"].get("unschedulable"):
            return ["node(s) were unschedulable"]
        for taint in node["spec"].get("taints") or []:
            if taint["effect"] != "PreferNoSchedule" and not _tolerates(spec.get("tolerations") or [], taint):
                value = f"{{{taint['key']}: {taint.get('value', '')}}}"
                return [f"node(s) had untolerated taint {value}"]
        wanted = spec.get("nodeSelector") or {}
        affinity = spec.get("affinity") or {}
        required = (affinity.get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution")
        if any(labels.get(name) != value for name, value in wanted.items()) or (
            required and not any(_fits(term, node) for term in required["nodeSelectorTerms"])
        ):
            return ["node(s) didn't match Pod's node affinity/selector"]
        for term in (affinity.get("podAntiAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or []:
            if self._neighbours(pod, node, term):
                return ["node(s) didn't match pod anti-affinity rules"]
        for term in (affinity.get("podAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or []:
            anywhere = any(self._neighbours(pod, other, term) for other in self.storage.all(resources.NODES))
            itself = selectors.of_object(term.get("labelSelector"))(pod["metadata"].get("labels") or {})
            if not self._neighbours(pod, node, term) and (anywhere or not itself):
                return ["node(s) didn't match pod affinity rules"]
        for rule in spec.get("topologySpreadConstraints") or []:
            if rule["whenUnsatisfiable"] == "DoNotSchedule":
                if rule["topologyKey"] not in labels:
                    return ["node(s) didn't match pod topology spread constraints (missing required label)"]
                if self._skew(pod, node, rule) > rule["maxSkew"]:
                    return ["node(s) didn't match pod topology spread constraints"]
        room, taken = node["status"].get("allocatable") or {}, self._taken.get(node["metadata"]["name"], {})
        lacks = []
        for name, asked in {**quantity.requests(spec), "pods": Fraction(1)}.items():
            if asked and taken.get(name, Fraction(0)) + asked > quantity.parse(room.get(name, "0")):
                lacks.append("Too many pods" if name == "pods" else f"Insufficient {name}")
        return lacks

    def _skew(self, pod: Object, node: Object, rule: Object) -> int:
        """How many pods more than the emptiest domain that of a node would have."""
        domains: dict[str, int] = {}
        for other in self.storage.all(resources.NODES):
            if (value := (other["metadata"].get("labels") or {}).get(rule["topologyKey"])) is not None:
                domains[value] = self._neighbours(pod, other, rule)
        return domains[node["metadata"]["labels"][rule["topologyKey"]]] + 1 - min(domains.values())

    def _neighbours(self, pod: Object, node: Object, term: Object) -> int:
        """How many pods that a term means are where a node is."""
        key = term["topologyKey"]
        value = (node["metadata"].get("labels") or {}).get(key)
        places = {
            other["metadata"]["name"]
            for other in self.storage.all(resources.NODES)
            if (other["metadata"].get("labels") or {}).get(key) == value
        }
        matches = selectors.of_object(term.get("labelSelector"))
        return sum(
            other["spec"].get("nodeName") in places
            and other["status"].get("phase") not in ("Succeeded", "Failed")
            and matches(other["metadata"].get("labels") or {})
            for other in self.storage.all(resources.PODS, pod["metadata"]["namespace"])
        )

    def _score(self, pod: Object, node: Object) -> tuple[float, Fraction]:
        """Lower is better: what it prefers, then where there is more room."""
        affinity, wishes = pod["spec"].get("affinity") or {}, 0
        for kind, sign in (("podAffinity", -1), ("podAntiAffinity", 1)):
            for each in (affinity.get(kind) or {}).get("preferredDuringSchedulingIgnoredDuringExecution") or []:
                wishes += sign * each["weight"] * self._neighbours(pod, node, each["podAffinityTerm"])
        for each in (affinity.get("nodeAffinity") or {}).get("preferredDuringSchedulingIgnoredDuringExecution") or []:
            wishes -= each["weight"] * _fits(each["preference"], node)
        for rule in pod["spec"].get("topologySpreadConstraints") or []:
            is_there = rule["topologyKey"] in (node["metadata"].get("labels") or {})
            wishes += 100 * (self._skew(pod, node, rule) if is_there else len(self._taken) + 1)
        taken = self._taken.get(node["metadata"]["name"], {})
        return wishes, taken.get("nvidia.com/gpu", Fraction(0)) * 1000 + taken.get("pods", Fraction(0))

    def _bind(self, pod: Object, node: str) -> None:
        def bind(pod: Object) -> None:
            pod["spec"]["nodeName"] = node
            others = [one for one in pod["status"].get("conditions") or [] if one["type"] != "PodScheduled"]
            condition = {"type": "PodScheduled", "status": "True", "lastProbeTime": None}
            pod["status"]["conditions"] = [*others, {**condition, "lastTransitionTime": defaults.now()}]

        self.api.edit(resources.PODS, pod, bind)
        data = pod["metadata"]
        words = f"Successfully assigned {data['namespace']}/{data['name']} to {node}"
        events.record(self.api, pod, "Normal", "Scheduled", words, "default-scheduler")


def _tolerates(tolerations: list[Object], taint: Object) -> bool:
    for one in tolerations:
        if one.get("effect") not in (None, "", taint["effect"]):
            continue
        if one.get("key") not in (None, "", taint["key"]):
            continue
        if one.get("operator", "Equal") == "Exists" or (one.get("value") or "") == (taint.get("value") or ""):
            seconds = one.get("tolerationSeconds")
            if seconds is None or taint["effect"] != "NoSchedule":
                return True
    return False


def _fits(term: Object, node: Object) -> bool:
    labels = node["metadata"].get("labels") or {}
    return all(selectors.expression(rule, labels) for rule in term.get("matchExpressions") or [])
