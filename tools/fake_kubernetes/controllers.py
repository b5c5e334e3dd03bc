"""The other controllers: the garbage collector, namespaces, claims, quotas, Deployments."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from typing import TYPE_CHECKING

from . import admission, defaults, quantity, resources
from .errors import Object, StatusError
from .jobstate import controller_of, owner_reference

if TYPE_CHECKING:
    from pathlib import Path

    from .api import Api
    from .resources import Resource
    from .storage import Change


class Collector:
    """Deletes what belongs to nobody any more."""

    def __init__(self, api: Api) -> None:
        self.api, self.storage = api, api.storage
        self.delay = 0.0  # seconds after which it acts; a real one takes a few
        self._kinds: dict[str, Resource] = {}
        self._by_owner: dict[str, dict[tuple[str, str, str], None]] = {}  # by uid: the dependents

    def start(self) -> None:
        self.storage.listen(self._changed)

    def _changed(self, change: Change) -> None:
        object = change.entry.object
        data = object["metadata"]
        key = (change.store, data.get("namespace", ""), data["name"])
        before = (change.old.object["metadata"].get("ownerReferences") or []) if change.old else []
        for owner in before:
            self._by_owner.get(owner["uid"], {}).pop(key, None)
        loop = asyncio.get_running_loop()
        if change.type != "DELETED":
            for owner in data.get("ownerReferences") or []:
                self._by_owner.setdefault(owner["uid"], {})[key] = None
            if change.old is None and data.get("ownerReferences"):
                loop.call_later(self.delay, self._judge, key)
            if data.get("deletionTimestamp") and {"orphan", "foregroundDeletion"} & set(data.get("finalizers") or []):
                loop.call_later(self.delay, self._finalize, key)
        else:
            loop.call_later(self.delay, self._owner_gone, data["uid"])
        if change.type == "DELETED":
            for owner in data.get("ownerReferences") or []:  # an owner may wait for it
                found = self._find_owner(owner, data.get("namespace", ""))
                if found:
                    loop.call_later(self.delay, self._finalize, found)

    def _resource(self, store: str) -> Resource:
        return next(resource for resource in self.api.served() if resource.store == store)

    def _find_owner(self, owner: Object, namespace: str) -> tuple[str, str, str] | None:
        for resource in self.api.served():
            if (resource.api_version, resource.kind) == (owner["apiVersion"], owner["kind"]):
                place = namespace if resource.namespaced else ""
                found = self.storage.get(resource, place, owner["name"])
                if found and found["metadata"]["uid"] == owner["uid"]:
                    return resource.store, place, owner["name"]
        return None

    def _owner_gone(self, uid: str) -> None:
        for key in list(self._by_owner.pop(uid, {})):
            self._judge(key)

    def _judge(self, key: tuple[str, str, str]) -> None:
        """Delete an object if all its owners are gone."""
        resource = self._resource(key[0])
        object = self.storage.get(resource, *key[1:])
        owners = (object or {}).get("metadata", {}).get("ownerReferences") or []
        if object is None or not owners or object["metadata"].get("deletionTimestamp"):
            return
        there = [owner for owner in owners if self._find_owner(owner, key[1])]
        if there:
            return
        with contextlib.suppress(StatusError):
            self.api.delete(resource, *key[1:], {"propagationPolicy": "Background"})

    def _finalize(self, key: tuple[str, str, str]) -> None:
        """Do what the deletion of an owner waits for."""
        resource = self._resource(key[0])
        object = self.storage.get(resource, *key[1:])
        if object is None or not object["metadata"].get("deletionTimestamp"):
            return
        finalizers = object["metadata"].get("finalizers") or []
        dependents = list(self._by_owner.get(object["metadata"]["uid"], {}))
        done = ""
        if "orphan" in finalizers:
            for one in dependents:
                self._orphan(one, object["metadata"]["uid"])
            done = "orphan"
        elif "foregroundDeletion" in finalizers:
            for store, namespace, name in dependents:
                other = self._resource(store)
                found = self.storage.get(other, namespace, name)
                if found and not found["metadata"].get("deletionTimestamp"):
                    with contextlib.suppress(StatusError):
                        self.api.delete(
                            other,
                            namespace,
                            name,
                            {"propagationPolicy": "Foreground"} if other is not resources.PODS else {},
                        )
            if not self._by_owner.get(object["metadata"]["uid"]):
                done = "foregroundDeletion"
        if done:

            def remove(object: Object) -> None:
                left = [one for one in object["metadata"]["finalizers"] if one != done]
                object["metadata"]["finalizers"] = left

            self.api.edit(resource, object, remove)

    def _orphan(self, key: tuple[str, str, str], uid: str) -> None:
        resource = self._resource(key[0])
        object = self.storage.get(resource, *key[1:])

        def release(object: Object) -> None:
            owners = [one for one in object["metadata"].get("ownerReferences") or [] if one["uid"] != uid]
            object["metadata"].pop("ownerReferences", None)
            if owners:
                object["metadata"]["ownerReferences"] = owners

        if object is not None:
            self.api.edit(resource, object, release)


class Housekeeping:
    """Namespaces come with what every namespace has, and go with all that is in them; claims are bound, quotas counted."""

    def __init__(self, api: Api, claims: Path, authority: str) -> None:
        self.api, self.storage, self.claims, self.authority = api, api.storage, claims, authority
        self.binds = True

    def start(self) -> None:
        self.storage.listen(self._changed)

    def _changed(self, change: Change) -> None:
        object = change.entry.object
        data = object["metadata"]
        loop = asyncio.get_running_loop()
        if change.store == "namespaces" and change.type != "DELETED":
            loop.call_soon(self._empty if data.get("deletionTimestamp") else self._furnish, data["name"])
        elif change.type == "DELETED" and data.get("namespace"):
            loop.call_soon(self._empty, data["namespace"])
        if change.store == "persistentvolumeclaims" and change.type == "ADDED" and self.binds:
            (self.claims / f"{data['namespace']}-{data['name']}").mkdir(parents=True, exist_ok=True)
            loop.call_soon(self._bind, object)
        counted = change.store in ("pods", "resourcequotas", "jobs.batch", "configmaps") and data.get("namespace")
        if counted and any(True for _ in self.storage.all(resources.QUOTAS, data["namespace"])):
            loop.call_soon(self._count, data["namespace"])

    def _furnish(self, name: str) -> None:
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        authority = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kube-root-ca.crt"},
                     "data": {"ca.crt": self.authority}}  # fmt: skip
        for resource, body in ((resources.ACCOUNTS, account), (resources.CONFIGMAPS, authority)):
            with contextlib.suppress(StatusError):
                self.api.create(resource, name, body)

    def _empty(self, name: str) -> None:
        namespace = self.storage.get(resources.NAMESPACES, "", name)
        if namespace is None or not namespace["metadata"].get("deletionTimestamp"):
            return
        left = 0
        for resource in self.api.served():
            for object in self.storage.all(resource, name) if resource.namespaced else ():
                left += 1
                if not object["metadata"].get("deletionTimestamp"):
                    with contextlib.suppress(StatusError):
                        self.api.delete(resource, name, object["metadata"]["name"], {"propagationPolicy": "Background"})
        if not left:
            self.storage.remove(resources.NAMESPACES, "", name)

    def _bind(self, claim: Object) -> None:
        spec = claim["spec"]
        capacity = {"storage": ((spec.get("resources") or {}).get("requests") or {}).get("storage", "1Gi")}
        status = {"phase": "Bound", "accessModes": spec.get("accessModes") or [], "capacity": capacity}
        self.api.edit(
            resources.CLAIMS, claim, lambda one: one["spec"].setdefault("volumeName", f"pvc-{one['metadata']['uid']}")
        )
        self.api.set_status(resources.CLAIMS, claim, status)

    def _count(self, namespace: str) -> None:
        for quota in list(self.storage.all(resources.QUOTAS, namespace)):
            hard = (quota.get("spec") or {}).get("hard") or {}
            total: dict[str, str] = {name: "0" for name in hard}
            for resource in self.api.served():
                if resource.namespaced and not resource.virtual:
                    taken = admission.used(self.storage, resource, namespace)
                    total.update({name: quantity.show(value) for name, value in taken.items() if name in hard})
            self.api.set_status(resources.QUOTAS, quota, {"hard": hard, "used": total})


class Deployments:
    """Deployments and ReplicaSets: as many pods as they want; a changed template replaces them all at once."""

    def __init__(self, api: Api) -> None:
        self.api, self.storage = api, api.storage

    def start(self) -> None:
        self.storage.listen(self._changed)

    def _changed(self, change: Change) -> None:
        object, loop = change.entry.object, asyncio.get_running_loop()
        owner = controller_of(object)
        if change.store in ("deployments.apps", "replicasets.apps") and change.type != "DELETED":
            loop.call_soon(self._sync, change.store, object["metadata"]["namespace"], object["metadata"]["name"])
        if owner and owner["kind"] in ("ReplicaSet", "Deployment"):
            loop.call_soon(self._sync, f"{owner['kind'].lower()}s.apps", object["metadata"]["namespace"], owner["name"])

    def _owned(self, resource: Resource, owner: Object) -> list[Object]:
        uid = owner["metadata"]["uid"]
        found = self.storage.all(resource, owner["metadata"]["namespace"])
        return [one for one in found if (controller_of(one) or {}).get("uid") == uid]

    def _sync(self, store: str, namespace: str, name: str) -> None:
        resource = resources.DEPLOYMENTS if store == "deployments.apps" else resources.REPLICASETS
        object = self.storage.get(resource, namespace, name)
        if object is None or object["metadata"].get("deletionTimestamp"):
            return
        below = resources.REPLICASETS if resource is resources.DEPLOYMENTS else resources.PODS
        owned = [one for one in self._owned(below, object) if not one["metadata"].get("deletionTimestamp")]
        with contextlib.suppress(StatusError):
            if below is resources.PODS:
                self._pods(object, owned)
            else:
                self._sets(object, owned)

    def _sets(self, deployment: Object, owned: list[Object]) -> None:
        spec = deployment["spec"]
        plain = {"template": spec["template"]}
        current = [one for one in owned if one["spec"]["template"] == plain["template"]]
        namespace = deployment["metadata"]["namespace"]
        for one in owned:
            count = spec["replicas"] if one in current[:1] else 0
            if one["spec"]["replicas"] != count:
                patch = {"spec": {"replicas": count}}
                self.api.patch(resources.REPLICASETS, namespace, one["metadata"]["name"], "merge-patch+json", patch)
        if not current:
            body = {
                "apiVersion": "apps/v1", "kind": "ReplicaSet",
                "metadata": {"name": f"{deployment['metadata']['name']}-{defaults.suffix()}", "ownerReferences":
                             [owner_reference(deployment)], "labels": (spec["template"].get("metadata") or {}).get("labels")},
                "spec": {"replicas": spec["replicas"], "selector": spec["selector"], **copy.deepcopy(plain)},
            }  # fmt: skip
            self.api.create(resources.REPLICASETS, namespace, body)
        ready = sum(one["status"].get("readyReplicas", 0) for one in current)
        status = {"observedGeneration": deployment["metadata"]["generation"], "replicas": spec["replicas"],
                  "updatedReplicas": spec["replicas"], "readyReplicas": ready, "availableReplicas": ready}  # fmt: skip
        self.api.set_status(resources.DEPLOYMENTS, deployment, status)

    def _pods(self, owner: Object, owned: list[Object]) -> None:
        alive = [pod for pod in owned if pod["status"].get("phase") not in ("Succeeded", "Failed")]
        namespace, count = owner["metadata"]["namespace"], owner["spec"]["replicas"]
        for pod in alive[count:]:
            self.api.delete(resources.PODS, namespace, pod["metadata"]["name"])
        for _ in range(count - len(alive)):
            template = copy.deepcopy(owner["spec"]["template"])
            metadata = {**(template.get("metadata") or {}), "generateName": f"{owner['metadata']['name']}-",
                        "ownerReferences": [owner_reference(owner)]}  # fmt: skip
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
            self.api.create(resources.PODS, namespace, body)
        ready = sum(
            one["type"] == "Ready" and one["status"] == "True"
            for pod in alive
            for one in pod["status"].get("conditions") or []
        )
        status = {"replicas": len(alive), "readyReplicas": ready, "observedGeneration": owner["metadata"]["generation"]}
        self.api.set_status(resources.REPLICASETS, owner, status)
