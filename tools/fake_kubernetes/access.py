"""Who asks, and what they may: tokens, and the Roles and RoleBindings that are stored."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import errors, resources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .errors import Object
    from .resources import Resource
    from .storage import Storage

ADMINS = "system:masters"


@dataclass(frozen=True)
class User:
    """Somebody who asks."""

    name: str
    groups: tuple[str, ...] = ("system:authenticated",)


ANONYMOUS = User("system:anonymous", ("system:unauthenticated",))


@dataclass(frozen=True)
class Denial:
    """What is refused whatever the Roles say; "" and "*" are any."""

    verb: str
    resource: str
    namespace: str = ""
    user: str = ""


class Access:
    """Knows the tokens and decides."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.tokens: dict[str, User] = {}
        self.denials: list[Denial] = []

    def user(self, header: str) -> User:
        """Who sent a request.

        Raises:
            StatusError: 401.
        """
        if not header:
            return ANONYMOUS
        scheme, _, token = header.partition(" ")
        for known, user in self.tokens.items():
            if scheme.lower() == "bearer" and hmac.compare_digest(known.encode(), token.strip().encode()):
                return user
        raise errors.unauthorized()

    def require(self, user: User, verb: str, resource: Resource, namespace: str, name: str, sub: str = "") -> None:
        """Refuse what a user may not.

        Raises:
            StatusError: 403.
        """
        if not self.allows(user, verb, resource.group, resource.plural, namespace, name, sub):
            raise errors.not_allowed(resource, name, user.name, verb, namespace, sub)

    def allows(
        self, user: User, verb: str, group: str, plural: str, namespace: str = "", name: str = "", sub: str = ""
    ) -> bool:
        full = f"{plural}/{sub}" if sub else plural
        for denial in self.denials:
            meant = denial.verb in ("*", verb) and denial.resource in ("*", full)
            if meant and denial.namespace in ("", namespace) and denial.user in ("", user.name):
                return False
        if ADMINS in user.groups:
            return True
        reviews = group in ("authorization.k8s.io", "authentication.k8s.io") and plural.startswith("selfsubject")
        if reviews and "system:authenticated" in user.groups:
            return True
        return any(_covers(rule, verb, group, full, name) for rule in self.rules(user, namespace))

    def rules(self, user: User, namespace: str) -> Iterator[Object]:
        """What is granted to a user in a namespace."""
        for binding in self.storage.all(resources.CLUSTER_BINDINGS):
            if _is_meant(binding, user):
                yield from self._role(binding, "")
        if namespace:
            for binding in self.storage.all(resources.BINDINGS, namespace):
                if _is_meant(binding, user):
                    yield from self._role(binding, namespace)

    def _role(self, binding: Object, namespace: str) -> Iterator[Object]:
        reference = binding["roleRef"]
        kind = resources.CLUSTER_ROLES if reference["kind"] == "ClusterRole" else resources.ROLES
        place = "" if kind is resources.CLUSTER_ROLES else namespace
        role = self.storage.get(kind, place, reference["name"])
        yield from (role or {}).get("rules") or []


def _is_meant(binding: Object, user: User) -> bool:
    for subject in binding.get("subjects") or []:
        kind, name = subject["kind"], subject["name"]
        if kind == "ServiceAccount":
            place = subject.get("namespace") or binding["metadata"].get("namespace", "")
            kind, name = "User", f"system:serviceaccount:{place}:{name}"
        if (kind == "User" and name == user.name) or (kind == "Group" and name in user.groups):
            return True
    return False


def _covers(rule: Object, verb: str, group: str, full: str, name: str) -> bool:
    def has(listed: list[str] | None, value: str) -> bool:
        return "*" in (listed or []) or value in (listed or [])

    names = rule.get("resourceNames")
    if names and name not in names:
        return False
    return has(rule.get("verbs"), verb) and has(rule.get("apiGroups"), group) and has(rule.get("resources"), full)
