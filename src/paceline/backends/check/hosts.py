"""What would go wrong with a job on several hosts, concluded from what each host reports."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError
from paceline.job.text import printable

from .findings import GIB, size
from .report import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .report import Clock

_LEAST_SPACE = 1 << 20  # bytes that the files of a job need
_CLOCK_SECONDS = 2.0
_MOST_NAMES = 4


def line(finding: Finding) -> str:
    """A finding about hosts as one line. Its text already names the hosts."""
    return f"{finding.what}; {finding.do}" if finding.do else finding.what


def grouped(wrong: Iterable[tuple[str, str]]) -> list[str]:
    """Join lines with the same text about several hosts. Each line comes with the host that it is about."""
    found: dict[str, list[str]] = {}
    for host, text in wrong:
        is_about = text.startswith(f"{host}: ")
        found.setdefault(text[len(host) :] if is_about else text, []).append(host if is_about else "")
    return [f"{', '.join(hosts)}{text}" for text, hosts in found.items()]


def names(hosts: Sequence[str]) -> str:
    """A few names."""
    if len(hosts) <= _MOST_NAMES:
        return ", ".join(hosts)
    return f"{', '.join(hosts[: _MOST_NAMES - 1])} and {len(hosts) - _MOST_NAMES + 1} others"


def unreachable(host: str, error: UserError) -> Finding:
    """A host that does not answer, or cannot be used."""
    what, _, do = str(error).rpartition("; ")
    return Finding("error", host, what or do, do if what else "")


def disk_findings(host: str, found: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What is wrong with the disks of the folders for jobs."""
    findings = []
    do = "make room, or choose another root in the target's settings"
    for disk in found:
        where = f"{host}: {printable(disk['path'])}"
        if "total" not in disk:
            findings.append(Finding("error", host, f"{where} is on a disk that does not answer", do))
        elif not disk["writable"]:
            findings.append(Finding("error", host, f"{where} cannot be written", do.partition("or ")[2]))
        elif disk["free"] < _LEAST_SPACE or disk["free_files"] == 0:
            findings.append(Finding("error", host, f"{where} is on a full disk", do))
        elif disk["free"] < GIB:
            findings.append(Finding("warning", host, f"{where} is on a disk with {size(disk['free'])} left", do))
    return findings


def warnings(answers: Mapping[str, Mapping[str, Any]], clocks: Mapping[str, Clock]) -> list[Finding]:
    """What may go wrong on hosts on which a job could run."""
    found = [
        finding
        for host, answer in answers.items()
        for finding in disk_findings(host, answer["disks"])
        if finding.level != "error"
    ]
    found += [finding for host in answers for finding in clock_finding(host, clocks[host])]
    found += differing("Python", {host: minor(answer["python"]) for host, answer in answers.items()})
    framework = next((answer["framework"] for answer in answers.values() if answer["framework"]), None)
    if framework is not None:
        found += differing(framework, {host: answer["version"] for host, answer in answers.items()})
    return found


def clock_finding(host: str, clock: Clock) -> list[Finding]:
    """Whether a host's clock is wrong by more than `_CLOCK_SECONDS`."""
    if abs(clock.offset) - clock.uncertainty <= _CLOCK_SECONDS:
        return []
    side = "ahead of" if clock.offset > 0 else "behind"
    far = f"{abs(clock.offset):.1f} s (± {max(clock.uncertainty, 0.1):.1f} s)"
    what = f"{host}: its clock is {far} {side} this machine's, and so are its times in logs and events"
    return [Finding("warning", host, what, "set both by NTP, for example with chrony")]


def minor(version: str) -> str:
    """The major and minor version: 3.11 for 3.11.7."""
    found = re.match(r"\d+\.\d+", version)
    return found.group() if found else version


def differing(what: str, versions: Mapping[str, str | None]) -> list[Finding]:
    """A finding if hosts have different versions of something; None means not installed."""
    found: dict[str | None, list[str]] = {}
    for host, version in versions.items():
        found.setdefault(version, []).append(host)
    if len(found) < 2:
        return []
    parts = [f"{version or 'none'} on {names(hosts)}" for version, hosts in found.items()]
    do = "install the same version on all of them"
    return [Finding("warning", what, printable(f"{what} is not the same everywhere: {', '.join(parts)}"), do)]
