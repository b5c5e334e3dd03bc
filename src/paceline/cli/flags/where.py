"""The flags that say on which machines jobs are, for every verb."""

from __future__ import annotations

import functools
import os
import re
import shlex
from typing import TYPE_CHECKING, Any

import click

from paceline.backends.base import Backend
from paceline.backends.registry import HERE, load
from paceline.job.errors import UserError
from paceline.job.text import printable

from .options import Option

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.backends.ssh.backend import Ssh

HOSTS = "ssh"  # the backend of a job whose hosts the flags name
MOST_HOSTS = 1024  # of a job that takes what there is
_META = "paceline.where"  # key of click's meta, which is one for a command line
_LINE = re.compile(
    r"(?P<name>[^\s:\[\]-][^\s:\[\]]*|\[[0-9A-Fa-f:.]+\])"
    r"(?::(?P<colon>\d{1,4}))?(?:\s+slots=(?P<slots>\d{1,4}))?(?:\s+max[_-]slots=\d+)?"
)
_FLAGS = {
    "on": "--on",
    "hosts": "-H",
    "hostfile": "--hostfile",
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "ssh_python": "--ssh-python",
    "ssh_root": "--ssh-root",
}


def where_options() -> list[click.Parameter]:
    """The flags for verbs that look at jobs; `backend` heeds them."""
    return [*_options(_remember, False)]


def job_options() -> list[Option]:
    """The flags for verbs that start jobs."""
    return _options(None, True)


def _remember(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    context.meta.setdefault(_META, {})[parameter.name] = value
    return value


def _options(callback: Callable[..., Any] | None, is_exposed: bool) -> list[Option]:
    def option(*names: str, **kwargs: Any) -> Option:
        return Option(names, section="Where", callback=callback, expose_value=is_exposed, **kwargs)

    short = is_exposed  # other verbs have other meanings for these letters
    return [
        option(
            "--on",
            metavar="TARGET",
            help="Hosts that the settings name as [targets.TARGET].  [default: this machine]",
        ),
        option("-H", "--hosts", metavar="HOST[:SLOTS],…", help="Hosts that ssh reaches, and the ranks on each."),
        option("--hostfile", metavar="FILE", help="The same from a file, with lines such as: node1 slots=2"),
        option(
            *(["-p"] if short else []),
            "--ssh-port",
            type=click.IntRange(1, 65535),
            metavar="PORT",
            help="Of their sshd.",
        ),
        option(*(["-i"] if short else []), "--ssh-identity-file", metavar="FILE", help="The key to use."),
        option("--ssh-python", metavar="PYTHON", help="The interpreter there.  [default: python3]"),
        option("--ssh-root", metavar="DIR", help="The folder with the jobs there.  [default: ~/.local/state/paceline]"),
    ]


def named(given: dict[str, Any]) -> list[tuple[str, int | None]]:
    """The hosts that -H or --hostfile name, with their slots.

    Raises:
        UserError: they cannot be read.
    """
    text, file, script = given.get("hosts"), given.get("hostfile"), given.get("host_discovery_script")
    if script is not None:
        if text or file or given.get("on"):
            raise UserError("--host-discovery-script says where; leave -H, --hostfile and --on out")
        return _first_found(script)
    if text is None and file is None:
        return []
    for other in (flag for key, flag in _FLAGS.items() if key in ("on", "hosts", "hostfile") and given.get(key)):
        if other not in ("-H", "--hostfile") or (text is not None and file is not None):
            raise UserError(
                f"{'-H' if text is not None else '--hostfile'} and {_other(given)} both say where; give one"
            )
    if text is not None:
        lines = [(part.strip(), f"-H {text!r}") for part in text.split(",")]
    else:
        try:
            with open(os.path.expanduser(str(file))) as opened:
                read = [line.partition("#")[0].strip() for line in opened]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--hostfile {file}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
        lines = [(line, f"--hostfile {file}:{number}") for number, line in enumerate(read, 1) if line]
        if not lines:
            raise UserError(f"--hostfile {file} names no host; write a line such as: node1 slots=2")
    return _hosts(lines)


def _found(script: str) -> list[tuple[str, int | None]]:
    """The hosts that a script prints.

    Raises:
        UserError: it fails, or prints none.
    """
    from paceline.backends.ssh.elastic import discovered

    lines = discovered(script)
    if not lines:
        raise UserError(f"--host-discovery-script {script} names no host; print a line such as: node1:2")
    return _hosts([(line, f"--host-discovery-script {script}") for line in lines])


_first_found = functools.lru_cache(maxsize=1)(_found)


def _hosts(lines: list[tuple[str, str]]) -> list[tuple[str, int | None]]:
    hosts: list[tuple[str, int | None]] = []
    for line, where in lines:
        found = _LINE.fullmatch(line)
        if found is None or (found["colon"] and found["slots"]):
            raise UserError(printable(f"{where}: {line!r} is no host; write for example node1:2"))
        slots = found["colon"] or found["slots"]
        if slots is not None and int(slots) < 1:
            raise UserError(printable(f"{where}: {line!r} has no slot; leave the host out, or give it one"))
        if any(name == found["name"] for name, _ in hosts):
            raise UserError(printable(f"{where}: {found['name']} is named twice; leave one out"))
        hosts.append((found["name"], None if slots is None else int(slots)))
    return hosts


def _other(given: dict[str, Any]) -> str:
    return "--on" if given.get("on") else "--hostfile"


def taking_part(given: dict[str, Any]) -> list[tuple[str, int]]:
    """Of the hosts that are named those that a job is to have, with their ranks: as many as --nnodes or -np need.

    Raises:
        UserError: there are too few.
    """
    hosts = [(name, slots or 1) for name, slots in named(given)]
    least, _, most = (nnodes(given, hosts) or "").partition(":")
    if hosts and least.isdecimal():
        if int(least) > len(hosts):
            flag = "--nnodes" if given["nnodes"] is not None else "--min-np"
            asked = least if flag == "--nnodes" else given["min_np"]
            raise UserError(f"{flag} {asked}, but {len(hosts)} hosts are named; name more, or ask for fewer")
        if not most:  # else those that are too many stand by
            hosts = hosts[: int(least)]
    left = given["total"]
    if not hosts or left is None:
        return hosts
    slots = sum(count for _, count in hosts)
    if left < 1:
        raise UserError(f"-np {left}: a job needs a rank; give at least 1")
    if left > slots:
        raise UserError(f"-np {left}, but the hosts have {slots} slots; write for example -H {hosts[0][0]}:{left}")
    chosen = []
    for name, count in hosts:
        if left:
            chosen.append((name, min(count, left)))
            left -= chosen[-1][1]
    return chosen


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    """What the flags say of hosts, beside which they are."""
    keys = (key for key in _FLAGS if key.startswith("ssh_") and given.get(key) is not None)
    return {key.removeprefix("ssh_"): given[key] for key in keys}


def nnodes(given: dict[str, Any], hosts: list[tuple[str, int]]) -> str | None:
    """How many machines: what --nnodes says, or as many of these hosts as --min-np and --max-np need.

    Raises:
        UserError: the flags contradict each other.
    """
    text: str | None = given["nnodes"]
    least, most = given["min_np"], given["max_np"]
    if least is None and most is None and given["host_discovery_script"] is None:
        return text
    if not hosts:
        raise UserError(f"{'--min-np' if least else '--max-np'} needs hosts; name some with -H or --hostfile")
    if text is not None:
        if least is None and most is None:
            return text
        raise UserError("--nnodes MIN:MAX counts hosts, --min-np and --max-np ranks; give one of them")
    if least and most and most < least:
        raise UserError(f"--max-np {most} is less than --min-np {least}; give more")
    from paceline.job.spec import FIXED_NODES  # takes long to import, and most verbs do not need it

    needed = 1 if least is None else _needed(hosts, least)
    at_most = MOST_HOSTS if most is None else max(needed, _needed(hosts, most))
    if needed < at_most and given["framework"] in FIXED_NODES:
        flag = "--min-np" if least else "--max-np" if most else "--host-discovery-script"
        raise UserError(
            f"{flag}: with --framework {given['framework']} the number of nodes cannot change; leave it out"
        )
    return f"{needed}:{at_most}"


def _needed(hosts: list[tuple[str, int]], ranks: int) -> int:
    """How many hosts have so many slots together; further ones are taken to be as the last."""
    count = 0
    while ranks > 0:
        ranks -= hosts[min(count, len(hosts) - 1)][1]
        count += 1
    return count


def place(given: dict[str, Any], target: str | None = None) -> Backend:
    """The place that the flags name.

    Args:
        given: the flags.
        target: the place that a job names itself.

    Raises:
        UserError: there is no such place.
    """
    options = options_of(given)
    hosts = taking_part(given) if "nnodes" in given else [(name, slots or 0) for name, slots in named(given)]
    if hosts:
        return _on(hosts, options, given)
    target = given.get("on") or target or HERE
    if target == HERE and options:
        raise UserError(f"{_FLAGS[f'ssh_{next(iter(options))}']} is for hosts; name some with -H, --hostfile or --on")
    return load(target, options)


def _on(hosts: list[tuple[str, int]], options: dict[str, Any], given: dict[str, Any]) -> Ssh:
    from paceline.backends.ssh.backend import Ssh
    from paceline.backends.ssh.target import Hosts, hosts_of

    def name(key: str) -> str:
        key = key.partition(".")[0]
        return _FLAGS[key if key in _FLAGS else f"ssh_{key}"]

    names = ",".join(f"{host}:{slots}" for host, slots in hosts)
    found = hosts_of(name, {**options, "hosts": names.split(",")})
    script = given.get("host_discovery_script")
    if script is None:
        return Ssh(Hosts(HOSTS, found, is_exact=True), f" {flags(given)}")

    def now() -> list[str]:
        return [f"{host}:{slots or 1}" for host, slots in _found(script)]

    return Ssh(Hosts(HOSTS, found, is_exact=True, script=now), f" {flags({**given, 'hosts': names})}")


def flags(given: dict[str, Any]) -> str:
    """The flags that say where, as one may type them again."""
    words = (word for key, flag in _FLAGS.items() if given.get(key) is not None for word in (flag, str(given[key])))
    return " ".join(map(shlex.quote, words))


def backend() -> Backend:
    """Where this command line's jobs are.

    Raises:
        UserError: there is no such place.
    """
    meta = click.get_current_context().meta
    given = meta.setdefault(_META, {})
    if "backend" not in given:
        given["backend"] = place(given)
    found: Backend = given["backend"]
    return found
