"""The hosts of a target: what the settings or the flags say of them, and how all are asked at once."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.job.errors import UserError, nearest
from paceline.job.text import printable
from paceline.job.validation import validation_error

from .connection import Host, Silent, ask_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .connection import Answer, Request

_HOST = re.compile(r"(?P<name>[^\s:\[\]-][^\s:\[\]]*|\[[0-9A-Fa-f:.]+\])(:(?P<slots>[0-9]{1,4}))?")
_SILENCE = 10.0  # seconds in which a host that does not answer is not asked again


class Options(BaseModel):
    """What a target's settings say, beside its backend."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    hosts: list[str] = Field(min_length=1)
    port: int | None = Field(None, ge=1, le=65535)
    identity_file: str | None = None
    python: str = "python3"
    root: str = "~/.local/state/paceline"


def hosts_of(where: Callable[[str], str], given: Mapping[str, Any]) -> list[Host]:
    """The hosts that the settings of a target, or the flags, name.

    Args:
        where: what names an option such as `port` or `hosts.0`, for the reader of an error.
        given: see `Options`.

    Raises:
        UserError: they make no sense.
    """
    try:
        options = Options.model_validate(dict(given))
    except ValidationError as error:
        raise validation_error(error, Options, lambda place: where(".".join(map(str, place)))) from None
    key = options.identity_file
    if key is not None and not os.path.exists(os.path.expanduser(key)):
        raise UserError(f"{where('identity_file')}: no file {key}; name the private key that the hosts accept")
    hosts: dict[str, Host] = {}
    for text in options.hosts:
        found = _HOST.fullmatch(text)
        if found is None:
            raise UserError(
                printable(f"{where('hosts')}: {text!r} is no host; write for example node1, or user@node2:4")
            )
        name = found["name"].strip("[]")
        slots = int(found["slots"] or 0)
        if name in hosts:
            raise UserError(f"{where('hosts')} names {name} twice; leave one out")
        hosts[name] = Host(name, slots, options.port, key, options.python, options.root)
    return list(hosts.values())


class Hosts:
    """The hosts of a target.

    Attributes:
        name: of the target.
        all: its hosts, as the settings or the flags have them.
        is_exact: a job's nodes are the first of the hosts in this order, and not those that suit best.
    """

    def __init__(
        self, name: str, hosts: list[Host], *, is_exact: bool = False, script: Callable[[], list[str]] | None = None
    ) -> None:
        """Connect to nothing yet.

        Args:
            name: of the target.
            hosts: its hosts.
            is_exact: see the attribute.
            script: gives the hosts that there are now, as the settings have them.
        """
        self.name, self.all, self.is_exact, self._script = name, hosts, is_exact, script
        first = hosts[0]
        self._options = {
            "port": first.port, "identity_file": first.identity_file, "python": first.python, "root": first.root
        }  # fmt: skip
        self._silent: dict[Host, tuple[UserError, float]] = {}  # why, and since when
        self._told: set[Host] = set()

    def named(self, names: Sequence[str]) -> list[Host]:
        """The hosts of these names.

        Raises:
            UserError: one is none of the target's.
        """
        known = {host.name: host for host in self.all}
        for name in names:
            if name not in known:
                raise UserError(f"{name} is none of the hosts of {self.name}; {nearest(name, known)}")
        return [known[name] for name in dict.fromkeys(names)]

    def wanted(self) -> list[Host]:
        """The hosts that a job which somebody watches is to have."""
        if self._script is None:
            return self.all
        found = hosts_of(lambda _: "--host-discovery-script", {**self._options, "hosts": self._script()})
        known = {host.name: host for host in self.all}
        self.all += [host for host in found if host.name not in known]
        return [known.get(host.name, host) for host in found]

    def ask(
        self, hosts: Sequence[Host], request: Callable[[Host], Request]
    ) -> tuple[dict[Host, Answer], dict[Host, UserError]]:
        """The answers of these hosts, and why others give none; one that was silent just now is not asked again."""
        now = time.monotonic()
        silent = {host: error for host, (error, when) in self._silent.items() if now - when < _SILENCE}
        asked = [host for host in hosts if host not in silent]
        told: dict[Host, Answer | UserError] = {**silent, **(ask_all(asked, request) if asked else {})}
        answers, failed = {}, {}
        for host in hosts:
            answer = told[host]
            if isinstance(answer, UserError):
                failed[host] = answer
            else:
                answers[host] = answer
        self.note({host: error for host, error in failed.items() if host not in silent})
        return answers, failed

    def answers(self, hosts: Sequence[Host], request: Callable[[Host], Request]) -> dict[Host, Answer]:
        """The answers of all these hosts.

        Raises:
            UserError: one does not answer.
        """
        answers, failed = self.ask(hosts, request)
        for error in failed.values():
            raise error
        return answers

    def note(self, failed: Mapping[Host, UserError]) -> None:
        """Remember who was silent."""
        now = time.monotonic()
        self._silent.update((host, (error, now)) for host, error in failed.items() if isinstance(error, Silent))

    @property
    def silent(self) -> set[str]:
        """The names of those that were silent."""
        return {host.name for host in self._silent}

    def warn(self, failed: Mapping[Host, UserError]) -> None:
        """Tell once of hosts that did not answer."""
        for host, error in failed.items():
            if host not in self._told:
                self._told.add(host)
                print(f"paceline: {error}; what is there is not shown", file=sys.stderr)
