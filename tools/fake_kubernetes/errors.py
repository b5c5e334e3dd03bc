"""What the server refuses, in Kubernetes' words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .resources import Resource

Object = dict[str, Any]


class StatusError(Exception):
    """A request that fails; `body` is the Status object that the client gets."""

    def __init__(self, code: int, reason: str, message: str, details: Object | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.details = code, reason, message, details
        self.headers: dict[str, str] = {}

    def body(self) -> Object:
        body: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        body.update(message=self.message, reason=self.reason)
        if self.details:
            body["details"] = self.details
        body["code"] = self.code
        return body


class NotServedError(Exception):
    """No such path: answered as plain text, without a Status."""


def bad_request(message: str) -> StatusError:
    return StatusError(400, "BadRequest", message)


def not_found(resource: Resource, name: str) -> StatusError:
    return StatusError(404, "NotFound", f'{resource.qualified} "{name}" not found', _details(resource, name))


def exists(resource: Resource, name: str) -> StatusError:
    return StatusError(409, "AlreadyExists", f'{resource.qualified} "{name}" already exists', _details(resource, name))


def conflict(resource: Resource, name: str, why: str = "") -> StatusError:
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return StatusError(409, "Conflict", message, _details(resource, name))


def forbidden(resource: Resource, name: str, why: str) -> StatusError:
    named = f'{resource.qualified} "{name}"' if name else resource.qualified
    return StatusError(403, "Forbidden", f"{named} is forbidden: {why}", _details(resource, name))


def not_allowed(resource: Resource, name: str, user: str, verb: str, namespace: str, sub: str = "") -> StatusError:
    """A permission that the user lacks."""
    plural = f"{resource.plural}/{sub}" if sub else resource.plural
    why = f'User "{user}" cannot {verb} resource "{plural}" in API group "{resource.group}"'
    why += f' in the namespace "{namespace}"' if namespace else " at the cluster scope"
    return forbidden(resource, name, why)


def invalid(resource: Resource, name: str, causes: list[tuple[str, str, str]]) -> StatusError:
    """Values that are refused: of each its field, the reason (FieldValueInvalid …) and the words."""
    listed = [f"{field or '[]'}: {words}" for field, _, words in causes]
    text = listed[0] if len(listed) == 1 else f"[{', '.join(listed)}]"
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    details: Object = {"name": name, "group": resource.group, "kind": resource.kind}
    details["causes"] = [{"reason": reason, "message": words, "field": field} for field, reason, words in causes]
    return StatusError(422, "Invalid", f'{kind} "{name}" is invalid: {text}', details)


def unauthorized() -> StatusError:
    return StatusError(401, "Unauthorized", "Unauthorized")


def too_large() -> StatusError:
    return StatusError(413, "RequestEntityTooLarge", "Request entity too large: limit is 3145728")


def too_many() -> StatusError:
    message = "The server has received too many requests and has asked us to try again later"
    error = StatusError(429, "TooManyRequests", message, {"retryAfterSeconds": 1})
    error.headers["Retry-After"] = "1"
    return error


def expired(message: str) -> StatusError:
    return StatusError(410, "Expired", message)


def _details(resource: Resource, name: str) -> Object:
    details = {"name": name} if name else {}
    return {**details, **({"group": resource.group} if resource.group else {}), "kind": resource.plural}
