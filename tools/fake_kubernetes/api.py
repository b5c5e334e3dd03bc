"""What can be done to objects, for clients and for the controllers alike."""

from __future__ import annotations

import copy
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from . import admission, defaults, errors, patching, resources, schema, validation
from .errors import Object, StatusError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .resources import Resource
    from .storage import Storage


class Api:
    """Creates, changes and deletes objects by the rules of their kinds."""

    def __init__(self, storage: Storage, minor: int) -> None:
        self.storage = storage
        self.minor = minor  # of the server's version: 24 is 1.24
        self.custom: dict[str, Resource] = {}  # kinds of operators, by api version and plural
        self.custom_schemas: dict[str, Any] = {}
        self.warnings: list[str] = []  # of what was created last
        self.conflicts = 0  # so many writes to come are refused
        self._checker = schema.Checker(minor, self.custom_schemas)

    def served(self) -> list[Resource]:
        newer = resources.FROM_28 if self.minor >= 28 else ()
        return [*resources.BUILT_IN, *newer, *self.custom.values()]

    # -- create --------------------------------------------------------------------------------------------------------

    def create(
        self, resource: Resource, namespace: str, body: Object, *, strict: bool = False, dry_run: bool = False
    ) -> Object:
        """A new object, complete.

        Raises:
            StatusError: it is refused.
        """
        object = self._prepare(resource, namespace, body, strict)
        data = object["metadata"]
        defaults.metadata(object)
        self._require_namespace(resource, namespace)
        defaults.fill(resource, object, self.minor)
        defaults.new(resource, object, self.minor)
        if data.get("name") and self.storage.get(resource, namespace, data["name"]):
            raise errors.exists(resource, data["name"])
        if not data.get("name"):
            words = "Required value: name or generateName is required"
            raise errors.invalid(resource, "", [("metadata.name", "FieldValueRequired", words)])
        validation.check(resource, object)
        self.warnings = admission.admit(self.storage, resource, object)
        if dry_run:
            return object
        return self.storage.put(resource, object)

    def _prepare(self, resource: Resource, namespace: str, body: Object, strict: bool) -> Object:
        if not isinstance(body, dict):
            raise errors.bad_request("json: cannot unmarshal array into Go value of type map[string]interface {}")
        version, kind = body.get("apiVersion"), body.get("kind")
        if kind != resource.kind or version != resource.api_version:
            if not kind:
                raise errors.bad_request("Object 'Kind' is missing in '{}'")
            expected = f"expected {resource.api_version}, Kind={resource.kind}"
            text = f'{kind} in version "{version}" cannot be handled as a {resource.kind}: {expected}'
            raise errors.bad_request(text)
        self._data(body)
        object = self._checker.check(resource, body, strict)
        validation.check_base64(resource, object)
        data = object.setdefault("metadata", {})
        if resource.namespaced:
            if data.get("namespace") not in (None, "", namespace):
                raise errors.bad_request("the namespace of the provided object does not match the namespace sent on the request")  # fmt: skip
            data["namespace"] = namespace
        else:
            data.pop("namespace", None)
        return object

    def _data(self, body: Object) -> None:
        if not isinstance(body.get("metadata") or {}, dict):
            raise errors.bad_request("json: cannot unmarshal string into Go struct field .metadata")

    def _require_namespace(self, resource: Resource, namespace: str) -> None:
        if not resource.namespaced:
            return
        found = self.storage.get(resources.NAMESPACES, "", namespace)
        if found is None:
            raise errors.not_found(resources.NAMESPACES, namespace)
        if found["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise errors.forbidden(resource, "", why)

    # -- change --------------------------------------------------------------------------------------------------------

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """The stored object: do not change it.

        Raises:
            StatusError: 404.
        """
        found = self.storage.get(resource, namespace, name)
        if found is None:
            raise errors.not_found(resource, name)
        return found

    def replace(
        self, resource: Resource, namespace: str, name: str, body: Object, *,
        sub: str = "", strict: bool = False, dry_run: bool = False,
    ) -> Object:  # fmt: skip
        """A PUT."""
        object = self._prepare(resource, namespace, body, strict)
        if object["metadata"].get("name") != name:
            raise errors.bad_request(
                f"the name of the object ({object['metadata'].get('name')}) does not match the name on the URL ({name})"
            )
        return self._change(resource, namespace, name, lambda _: object, sub, dry_run)

    def patch(
        self, resource: Resource, namespace: str, name: str, kind: str, body: Any, *,
        sub: str = "", strict: bool = False, dry_run: bool = False,
    ) -> Object:  # fmt: skip
        """A PATCH of one of the three kinds, or of an apply."""
        if kind == "strategic-merge-patch+json" and resource.custom:
            words = "the body of the request was in an unknown format - accepted media types include: application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml"  # fmt: skip
            raise StatusError(415, "UnsupportedMediaType", words)
        if kind == "apply-patch+yaml" and self.storage.get(resource, namespace, name) is None:
            return self.create(resource, namespace, body, strict=strict, dry_run=dry_run)

        def patched(old: Object) -> Object:
            if kind == "json-patch+json":
                result = patching.json_patch(old, body)
            elif kind == "merge-patch+json":
                result = patching.merge(old, body)
            else:
                result = patching.strategic(old, body)
            return self._prepare(resource, namespace, result, strict)

        return self._change(resource, namespace, name, patched, sub, dry_run)

    def _change(
        self, resource: Resource, namespace: str, name: str, make: Callable[[Object], Object], sub: str, dry_run: bool
    ) -> Object:
        old = self.get(resource, namespace, name)
        if self.conflicts:
            self.conflicts -= 1
            raise errors.conflict(resource, name)
        new = copy.deepcopy(make(old))
        data, before = new["metadata"], old["metadata"]
        if data.get("resourceVersion") not in (None, "", before["resourceVersion"]):
            raise errors.conflict(resource, name)
        if data.get("uid") not in (None, before["uid"]):
            why = f"Precondition failed: UID in precondition: {data['uid']}, UID in object meta: {before['uid']}"
            raise errors.conflict(resource, name, why)
        for field in ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation"):
            data.pop(field, None)
            if field in before:
                data[field] = before[field]
        if sub == "status":
            new = {**copy.deepcopy(old), "status": new.get("status", {})}
            data = new["metadata"]
        else:
            if "status" in resource.subresources and "status" in old:
                new["status"] = copy.deepcopy(old["status"])
            if not resource.custom:
                defaults.fill(resource, new, self.minor)
            validation.check(resource, new)
            validation.check_change(resource, old, new, self.minor)
            if new.get("spec") != old.get("spec") and "generation" in before:
                data["generation"] = before["generation"] + 1
        data["resourceVersion"] = before["resourceVersion"]
        if dry_run or new == old:
            return new
        self.storage.put(resource, new)
        if before.get("deletionTimestamp") and not data.get("finalizers") and not self._lingers(resource, new):
            self.storage.remove(resource, namespace, name)
        return new

    def set_status(self, resource: Resource, object: Object, status: Object) -> None:
        """Store a status, for controllers; nothing happens if the object is gone or another one now."""
        data = object["metadata"]
        old = self.storage.get(resource, data.get("namespace", ""), data["name"])
        if old is None or old["metadata"]["uid"] != data["uid"] or old.get("status") == status:
            return
        new = copy.deepcopy(old)
        new["status"] = status
        self.storage.put(resource, new)

    def edit(self, resource: Resource, object: Object, change: Callable[[Object], None]) -> None:
        """Change anything of an object, for controllers."""
        data = object["metadata"]
        old = self.storage.get(resource, data.get("namespace", ""), data["name"])
        if old is None or old["metadata"]["uid"] != data["uid"]:
            return
        new = copy.deepcopy(old)
        change(new)
        if new == old:
            return
        self.storage.put(resource, new)
        finished = new["metadata"].get("deletionTimestamp") and not new["metadata"].get("finalizers")
        if finished and not self._lingers(resource, new):
            self.storage.remove(resource, data.get("namespace", ""), data["name"])

    # -- delete --------------------------------------------------------------------------------------------------------

    def delete(
        self, resource: Resource, namespace: str, name: str, options: Object | None = None, dry_run: bool = False
    ) -> Object:
        """Delete, or begin to; returns the object if it is still there, a Status if not."""
        options = options or {}
        old = self.get(resource, namespace, name)
        data = old["metadata"]
        for field in ("uid", "resourceVersion"):
            wanted = (options.get("preconditions") or {}).get(field)
            if wanted and wanted != data[field]:
                label = "UID" if field == "uid" else "ResourceVersion"
                why = f"Precondition failed: {label} in precondition: {wanted}, {label} in object meta: {data[field]}"
                raise errors.conflict(resource, name, why)
        details = {"name": name, "kind": resource.plural, "uid": data["uid"]}
        if resource.group:
            details["group"] = resource.group
        success = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
        if dry_run:
            return success
        policy = options.get("propagationPolicy")
        if options.get("orphanDependents") is not None and policy is None:
            policy = "Orphan" if options["orphanDependents"] else "Background"
        if policy is None:
            policy = "Orphan" if resource is resources.JOBS else "Background"
        finalizers = [one for one in data.get("finalizers") or [] if one not in ("orphan", "foregroundDeletion")]
        if policy == "Orphan":
            finalizers.append("orphan")
        elif policy == "Foreground":
            finalizers.append("foregroundDeletion")
        grace = self._grace(resource, old, options)
        if grace == 0 and not finalizers:
            self.storage.remove(resource, namespace, name)
            return old if resource is resources.PODS else success
        new = copy.deepcopy(old)
        data = new["metadata"]
        if not data.get("deletionTimestamp") or grace < data.get("deletionGracePeriodSeconds", 0):
            moment = datetime.now(timezone.utc) + timedelta(seconds=grace)
            data["deletionTimestamp"] = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
            data["deletionGracePeriodSeconds"] = grace
        if finalizers:
            data["finalizers"] = finalizers
        if new != old:
            self.storage.put(resource, new)
        return new

    def _grace(self, resource: Resource, object: Object, options: Object) -> int:
        """How long it may still be there; 0: it is gone at once."""
        if resource is resources.NAMESPACES:
            return 1
        if resource is not resources.PODS:
            return 0
        ended = object["status"].get("phase") in ("Succeeded", "Failed")
        if not object["spec"].get("nodeName") or ended:
            return 0
        asked = options.get("gracePeriodSeconds")
        return int(object["spec"].get("terminationGracePeriodSeconds", 30) if asked is None else asked)

    def _lingers(self, resource: Resource, object: Object) -> bool:
        """Whether it stays without finalizers: a pod until its node says that it has ended, a namespace until empty."""
        if resource is resources.NAMESPACES:
            return True
        if resource is not resources.PODS:
            return False
        ended = object["status"].get("phase") in ("Succeeded", "Failed")
        return (
            bool(object["spec"].get("nodeName")) and not ended and object["metadata"]["deletionGracePeriodSeconds"] > 0
        )
