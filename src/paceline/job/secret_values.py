"""Values that are not to be stored: the credentials for git, and what looks like a secret among the variables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from paceline.contract import GIT_CREDENTIALS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SECRET = re.compile(r"(.*_)?(TOKEN|PASSWORD|PASSWD|PASSPHRASE|SECRET|APIKEY)|.*_KEY|AWS_.*", re.IGNORECASE)
_AWS_SETTINGS = re.compile(
    r"AWS_((DEFAULT_)?(REGION|OUTPUT|PROFILE)|.*_(FILE|BUNDLE|MODE|ATTEMPTS|DISABLED|ENDPOINTS?|CONFIG|TIMEOUT)"
    r"|ENDPOINT_URL.*|EC2_METADATA_.*|ROLE_.*|PAGER|EXECUTION_ENV|SDK_.*)",
    re.IGNORECASE,
)
# `$TOKEN`, `$(cat FILE)` and `` `cat FILE` `` hold no secret.
_ASSIGNED = re.compile(r"""(?<![\w$./-])([A-Za-z_]\w*)=["']?([^\s"'$`;&|)]+)""")
_IN_URL = re.compile(r"(:/+[^/\s:@]*):[^/\s]+@")


def split_source(source: str) -> tuple[str, dict[str, str]]:
    """The address of a repository without the password that it holds, and the credentials for git.

    An address without one, and one that is not of http or https, comes back as it is.
    """
    scheme, separator, rest = source.partition("://")
    authority, slash, path = rest.partition("/")
    user, at, host = authority.rpartition("@")
    name, colon, password = user.partition(":")
    if not (separator and at and colon) or scheme.lower() not in ("http", "https"):
        return source, {}
    values = dict(zip(GIT_CREDENTIALS, (unquote(name), unquote(password)), strict=True))
    credentials = {variable: value for variable, value in values.items() if value}
    return f"{scheme}://{name}{at if name else ''}{host}{slash}{path}", credentials


def without_passwords(text: str) -> str:
    """The text with … for the password of each URL."""
    return _IN_URL.sub(r"\1:…@", text)


def looks_secret(name: str, value: str) -> bool:
    """Whether the value of a variable seems to be a secret."""
    if not value:
        return False
    is_secret = _SECRET.fullmatch(name) is not None and _AWS_SETTINGS.fullmatch(name) is None
    return is_secret or _IN_URL.search(value) is not None


def notes_on_secrets(env: Mapping[str, str], setup: Sequence[str], has_unused_credentials: bool) -> list[str]:
    """Lines for the user about values that are stored and should not be, or reach no rank; they show no value."""
    notes = []
    assigned = dict(pair for command in setup for pair in _ASSIGNED.findall(command))
    for stored, values in (("values of --env", env), ("commands of --setup", assigned)):
        if names := [name for name, value in values.items() if looks_secret(name, value)]:
            what, them = ("looks like a secret", "it") if len(names) == 1 else ("look like secrets", "them")
            flags = " ".join(f"--secret {name}" for name in names)
            notes.append(
                f"{', '.join(names)} {what}, and {stored} are stored and shown with the job; export {them}, and "
                f"type {flags} instead"
            )
    if has_unused_credentials:
        notes.append(f"{' and '.join(GIT_CREDENTIALS)} are for --sync-mode git alone; the ranks do not get them")
    return notes
