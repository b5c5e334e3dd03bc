"""Why a request to an API server has failed, in words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError

from .schema import fields_of

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.object import Object


class ApiError(UserError):
    """The API server refuses a request.

    Attributes:
        code: the HTTP status.
        reason: such as AlreadyExists.
    """

    def __init__(self, text: str, code: int, reason: str) -> None:
        super().__init__(text)
        self.code, self.reason = code, reason


class Gone(ApiError):
    """There is no such object, or kind of object."""


class Unreachable(UserError):
    """The API server does not answer."""


class Expired(Exception):
    """The version that a watch begins at is gone: list again."""


# -- what an API server's refusals mean, and what to do ----------------------------------------------------------------


_FIELD = re.compile(r'unknown field "([^"]+)"')
_OF_GROUP = re.compile(r"/apis/([^/]+)/[^/]+/namespaces/[^/]+/([^/]+).*")
_VERBS = {"GET": "get or list", "POST": "create", "PATCH": "patch", "DELETE": "delete"}


def advice_to_check(where: str) -> str:
    """What to do if something is not allowed; it is no advice for `check` itself."""
    return f"paceline check{where} shows the Role that allows it"


RUN_AS = "add --run-as UID:GID, or --run-as image for an image with a user"


def with_run_as(message: str) -> str:
    """What admission says of pods, with what to do if they may run as root."""
    return f"{message}; {RUN_AS}" if "PodSecurity" in message and "runAsNonRoot" in message else message


def explained(code: int, status: Object, method: str, path: str, *, context: str, where: str, template: Any) -> str:
    """A refusal in one line."""
    message = " ".join(str(status.get("message") or f"HTTP {code}").split())
    if code == 401:
        return f"the cluster of context {context} does not accept your credentials ({message}); log in there again"
    if code == 403 and "exceeded quota" in message:
        return f"{message}; ask for less, delete other jobs, or have the quota of the namespace raised"
    if code == 403 and status.get("reason") == "Forbidden":
        return f"{message}; {advice_to_check(where)}"
    if code == 404 and (status.get("details") or {}).get("kind") == "namespaces":
        return f"{message}; create it (kubectl create namespace NAME), or choose another with --namespace"
    if code == 404 and not status.get("reason"):
        return f"the cluster has no {path.rpartition('/')[2]} at {path}; is what serves it installed there?"
    if code == 400 and "unknown field" in message:
        found = _OF_GROUP.match(path)
        kind = f"{found[2]}.{found[1]}" if found else "API server"
        advice = f"the cluster's {kind} is older than what asks for this: leave that out, or have it updated"
        if any(field.rpartition(".")[2] in fields_of(template) for field in _FIELD.findall(message)):
            advice = "correct --pod-template"
        return f"the API server refuses the manifest: {message}; {advice}"
    if code == 413:
        return f"the API server takes no object of that size: {message}"
    if code in (400, 422):
        return f"the API server refuses it: {message}{_fields(status)}"
    return message if status.get("message") else f"the API server answers {_VERBS.get(method, method)} with {message}"


def _fields(status: Object) -> str:
    """The fields at fault, unless the message names them."""
    causes = (status.get("details") or {}).get("causes") or ()
    message = status.get("message") or ""
    fields = [cause["field"] for cause in causes if cause.get("field") and cause["field"] not in message]
    return f" (in {', '.join(dict.fromkeys(fields))})" if fields else ""
