"""Hosts that a user names, with the ranks on each: in a list, in a file, or by a script that prints them."""

from __future__ import annotations

import ipaddress
import os
import re
import subprocess
from typing import NamedTuple

from paceline.job.errors import UserError
from paceline.job.text import printable

# A name, or an IPv6 address in brackets; both may have a user before them.
NAME = r"(?P<name>[^\s:\[\]-][^\s:\[\]]*|([^\s:\[\]@-][^\s:\[\]@]*@)?\[[0-9A-Fa-f:.]+(%[\w.-]+)?\])"
_LINE = re.compile(NAME + r"(?::(?P<colon>\d{1,4}))?(?:\s+slots=(?P<slots>\d{1,4}))?(?:\s+max[_-]slots=\d+)?")
_SCRIPT_SECONDS = 10.0


def example_for(text: str, other: str = "node1:2") -> str:
    """How to write a host: an IPv6 address in brackets; for anything else an example."""
    user, at, address = text.partition(" ")[0].rpartition("@")
    try:
        ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return f"for example {other}"
    return f"an IPv6 address in brackets: {user}{at}[{address}], or {user}{at}[{address}]:4"


def bare(name: str) -> str:
    """The name of a host as ssh takes it: an IPv6 address without its brackets."""
    return name.replace("[", "").replace("]", "")


class NamedHost(NamedTuple):
    """A host and its slots; None if they were not given."""

    name: str
    slots: int | None


def in_list(flag: str, text: str) -> list[NamedHost]:
    """The hosts of `HOST[:SLOTS],…`."""
    return _hosts([(part.strip(), f"{flag} {text!r}") for part in text.split(",")])


def in_file(flag: str, file: str) -> list[NamedHost]:
    """The hosts of a file with one host per line, `HOST:SLOTS` or `HOST slots=N`."""
    try:
        with open(os.path.expanduser(file)) as opened:
            read = [line.partition("#")[0].strip() for line in opened]
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "it is not a text file"
        raise UserError(f"{flag} {file}: {what}; name a file with a line for each host") from None
    lines = [(line, f"{flag} {file}:{number}") for number, line in enumerate(read, 1) if line]
    if not lines:
        raise UserError(f"{flag} {file} names no host; write a line such as: node1 slots=2")
    return _hosts(lines)


def printed_by(script: str) -> list[NamedHost]:
    """The hosts that a script prints, one per line, as `HOST` or `HOST:SLOTS`."""
    try:
        done = subprocess.run(
            [script], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            timeout=_SCRIPT_SECONDS,
        )  # fmt: skip
    except OSError as error:
        raise UserError(f"--host-discovery-script {script}: {error.strerror}; name a program") from None
    except subprocess.TimeoutExpired:
        raise UserError(
            f"--host-discovery-script {script} took more than {_SCRIPT_SECONDS:g} s; make it quicker"
        ) from None
    if done.returncode:
        last = "".join(f": {line}" for line in done.stderr.strip().splitlines()[-1:])
        raise UserError(f"--host-discovery-script {script}: exit code {done.returncode}{last}")
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if not lines:
        raise UserError(f"--host-discovery-script {script} names no host; print a line such as: node1:2")
    return _hosts([(line, f"--host-discovery-script {script}") for line in lines])


def _hosts(lines: list[tuple[str, str]]) -> list[NamedHost]:
    """The hosts of lines, each given with its origin for messages."""
    hosts: list[NamedHost] = []
    for line, where in lines:
        found = _LINE.fullmatch(line)
        if found is None or (found["colon"] and found["slots"]):
            raise UserError(printable(f"{where}: {line!r} is not a host; write {example_for(line)}"))
        slots = found["colon"] or found["slots"]
        if slots is not None and int(slots) < 1:
            raise UserError(printable(f"{where}: {line!r} has no slot; leave the host out, or give it one"))
        if any(host.name == found["name"] for host in hosts):
            raise UserError(printable(f"{where}: {found['name']} is named twice; leave one out"))
        hosts.append(NamedHost(found["name"], None if slots is None else int(slots)))
    return hosts
