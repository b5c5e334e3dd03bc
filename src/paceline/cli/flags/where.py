"""The flags that say on which machines jobs are, for every verb."""

from __future__ import annotations

import copy
import functools
import shlex
from typing import TYPE_CHECKING, Any

import click

from paceline.backends import everywhere, registry
from paceline.backends.base import Backend
from paceline.cli.terminal.write import say
from paceline.job.errors import UserError
from paceline.job.quantities import duration

from . import completion
from .given import Where, flags_of_backends
from .option import Option, Port, Whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backends.base import Flag
    from paceline.backends.hosts import NamedHost
    from paceline.job.spec import JobSpec

    from .job import Given

MOST_HOSTS = 1024  # of a job that takes what there is
_OF_SSH = {"ssh_port", "ssh_identity_file", "ssh_python"}  # parameters, of how ssh reaches hosts
_JOBS = "paceline.jobs"  # key of the names of jobs there
_META, _BACKEND = "paceline.where", "paceline.backend"  # keys of click's meta, which is one for a command line


def where_options() -> list[click.Parameter]:
    """The flags for verbs that look at jobs; `backend` reads them."""
    return [*_options(_remember, False)]


def job_options() -> list[Option]:
    """The flags for verbs that start jobs."""
    return _options(None, True)


def own_options() -> list[Option]:
    """The flags that set the options of one job, for `resubmit`; `backend` reads them too."""
    own = {flag.parameter for _, flag in flags_of_backends() if flag.job}
    return [option for option in _options(_remember, True) if option.name in own]


def _remember(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    context.meta.setdefault(_META, {})[parameter.name] = value
    return value


def _options(callback: Callable[..., Any] | None, is_exposed: bool) -> list[Option]:
    option = functools.partial(Option, callback=callback, expose_value=is_exposed)

    def of(kind_of: str, flag: Flag) -> Option:
        letter = [flag.letter] if flag.letter and is_exposed else []  # other verbs have other meanings for letters
        declared = functools.partial(
            option,
            [*letter, *flag.names],
            help=flag.help,
            section=f"On {kind_of}" if flag.job else "Where",
            kind=kind_of if flag.job else None,
            is_rare=not flag.job and flag.names_hosts != "list",  # these are in the settings, or have defaults
        )
        if flag.is_switch:
            return declared(is_flag=True, default=None)
        if flag.repeats:
            return declared(metavar=flag.metavar, multiple=True)
        number = None if flag.number is None else (Port if flag.letter == "-p" else Whole)(*flag.number)
        some = (lambda _, __, text: [it for it in flag.values if it.startswith(text)]) if flag.values else None
        return declared(metavar=flag.metavar, type=number, shell_complete=some)

    # A kind whose flags name no hosts needs no target.
    kinds = "".join(f", or {kind}" for kind in registry.flags() if kind not in registry.kinds_of_hosts())
    return [
        option(
            ["--on"],
            section="Where",
            metavar="TARGET",
            shell_complete=completion.targets,
            kind_of=_kind_of_target,
            help=f"A target of the settings, [targets.TARGET]{kinds}.  [default: this machine]",
        ),
        *(of(kind, flag) for kind, flag in flags_of_backends() if is_exposed or not flag.job),
    ]


def _kind_of_target(name: str) -> str | None:
    if registry.needs_no_target(name):
        return name
    from paceline.job.settings import load  # takes long to import

    target = load().targets.get(name)
    return None if target is None else target.backend


def _given_flags(given: Where) -> list[tuple[str, Flag]]:
    return [(kind, flag) for kind, flag in flags_of_backends() if flag.parameter in given.of_backends]


def _naming_hosts(given: Where) -> list[tuple[str, Flag]]:
    return [(kind, flag) for kind, flag in _given_flags(given) if flag.names_hosts is not None]


def is_elsewhere(given: Where) -> bool:
    """Whether the flags name other machines than this one."""
    return bool(given.on or given.host_discovery_script or _naming_hosts(given))


def kind_of_hosts(given: Where) -> str:
    """The kind of backend of the hosts that the flags name, or a script; it is the name of their target, too."""
    kinds = [kind for kind, _ in _naming_hosts(given)]
    return kinds[0] if kinds else next(kind for kind, flag in flags_of_backends() if flag.names_hosts is not None)


def kind_of_place(given: Where) -> str | None:
    """The kind of backend that the flags select, HERE also for hosts that are this machine; None: unknown."""
    if hosts := named(given):
        from paceline.backends.remote.here import is_here

        needs_ssh = not _OF_SSH.isdisjoint(given.of_backends)
        return kind_of_hosts(given) if needs_ssh or not all(is_here(host.name) for host in hosts) else registry.HERE
    target = given.on or registry.default_target()
    return registry.HERE if target == registry.HERE else _kind_of_target(target)


def named(given: Where) -> list[NamedHost]:
    """The hosts that a flag names, with their slots."""
    script, naming = given.host_discovery_script, _naming_hosts(given)
    selectors = [*(flag.names[0] for _, flag in naming), *(["--on"] if given.on else [])]
    if script is not None:
        if selectors:
            others = ", ".join(flag.names[0] for _, flag in flags_of_backends() if flag.names_hosts is not None)
            raise UserError(f"--host-discovery-script says where; leave {others} and --on out")
        return _first_found(script)
    if not naming:
        return []
    if len(selectors) > 1:
        raise UserError(f"{selectors[0]} and {selectors[1]} both say where; give one")
    from paceline.backends import hosts

    flag = naming[0][1]
    read = hosts.in_list if flag.names_hosts == "list" else hosts.in_file
    return read(flag.names[0], str(given.of_backends[flag.parameter]))


@functools.lru_cache(maxsize=1)
def _first_found(script: str) -> list[NamedHost]:
    from paceline.backends.hosts import printed_by

    return printed_by(script)


def taking_part(given: Given) -> list[tuple[str, int]]:
    """The hosts that a job is to have, with their ranks: as many of the named ones as --nnodes or -np need."""
    hosts = [(name, slots or 1) for name, slots in named(given)]
    least, _, most = (nnodes(given, hosts) or "").partition(":")
    if hosts and least.isdecimal():
        if int(least) > len(hosts):
            flag = "--nnodes" if given.nnodes is not None else "--min-np"
            asked = least if flag == "--nnodes" else given.min_np
            raise UserError(f"{flag} {asked}, but {len(hosts)} hosts are named; name more, or ask for fewer")
        if not most:  # else those that are too many stand by
            hosts = hosts[: int(least)]
    remaining = given.total
    if not hosts or remaining is None:
        return hosts
    slots = sum(count for _, count in hosts)
    if remaining > slots:
        raise UserError(
            f"-np {remaining}, but the hosts have {slots} slots; write for example -H {hosts[0][0]}:{remaining}"
        )
    chosen = []
    for name, count in hosts:
        if remaining:
            chosen.append((name, min(count, remaining)))
            remaining -= chosen[-1][1]
    return chosen


def options_of(given: Where, *, job: bool) -> dict[str, object]:
    """The options of a backend that flags set, but for which hosts it has: those of one job, or the others."""
    flags = [flag for _, flag in _given_flags(given) if flag.names_hosts is None and flag.job is job]
    return {flag.option: _value(given.of_backends[flag.parameter]) for flag in flags}


def _value(given: str | int | tuple[str, ...]) -> object:
    """What a flag sets its option to; NAME alone, among NAME=VALUE, is true."""
    if not isinstance(given, tuple):
        return given
    pairs = (text.partition("=") for text in given)
    return {name: value if equals else True for name, equals, value in pairs}


def flag_options(given: Where) -> dict[str, str]:
    """Option of a backend → the flag that sets it."""
    return {flag.option: flag.names[0] for _, flag in _given_flags(given)}


def nnodes(given: Given, hosts: list[tuple[str, int]]) -> str | None:
    """How many machines: what --nnodes says, or as many of these hosts as --min-np and --max-np need."""
    text, least, most = given.nnodes, given.min_np, given.max_np
    if least is None and most is None and given.host_discovery_script is None:
        if given.cooldown is not None:
            raise UserError("--blacklist-cooldown-range: hosts come back only to a job with --min-np; add that")
        return text
    if given.cooldown is not None:
        try:
            first, most_of_it = (duration(it, usual="s", zero="give 1s or more") or 0.0 for it in given.cooldown)
        except ValueError as error:
            raise UserError(f"--blacklist-cooldown-range: {error}") from None
        if first > most_of_it:
            raise UserError("--blacklist-cooldown-range {} {}: MIN comes first, then MAX".format(*given.cooldown))
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
    if needed < at_most and given.framework in FIXED_NODES:
        flag = "--min-np" if least else "--max-np" if most else "--host-discovery-script"
        raise UserError(f"{flag}: with --framework {given.framework} the number of nodes cannot change; leave it out")
    return f"{needed}:{at_most}"


def _needed(hosts: list[tuple[str, int]], ranks: int) -> int:
    """How many hosts have so many slots together; further ones are taken to be as the last."""
    count = 0
    while ranks > 0:
        ranks -= hosts[min(count, len(hosts) - 1)][1]
        count += 1
    return count


def backend_of_job(given: Given, spec: JobSpec) -> Backend:
    """The backend that the flags of a new job select, else the target that the job names, or the default one."""
    target = spec.backend if "backend" in spec.given else registry.default_target()
    return backend_for(given, target, taking_part(given))


def backend_for(given: Where, target: str | None = None, hosts: Sequence[tuple[str, int]] | None = None) -> Backend:
    """The backend that the flags select: of these hosts, or of all that they name."""
    options = options_of(given, job=False)
    given_by = flag_options(given)
    hosts = [(name, slots or 0) for name, slots in named(given)] if hosts is None else hosts
    if not hosts:
        there = registry.load(given.on or target, options, given_by=given_by, where=where_flags(given))
        return says_who_is_waited_for(there)
    kind, texts = kind_of_hosts(given), [f"{name}:{slots}" for name, slots in hosts]
    script = given.host_discovery_script
    if script is not None:  # later there may be others
        listing = next(flag for other, flag in flags_of_backends() if other == kind and flag.names_hosts == "list")
        given = copy.copy(given)
        given.of_backends = {**given.of_backends, listing.parameter: ",".join(texts)}
    options.update(hosts=texts, exact=True, host_discovery_script=script, cooldown=given.cooldown)
    return says_who_is_waited_for(registry.load(kind, options, kind=kind, given_by=given_by, where=where_flags(given)))


def where_flags(given: Where) -> str:
    """The flags that select the backend, as typed; without --on, and without those of one job."""
    flags = [flag for _, flag in _given_flags(given) if not flag.job]
    return shlex.join(word for flag in flags for word in (flag.names[0], str(given.of_backends[flag.parameter])))


def backend() -> Backend:
    """Where this command line's jobs are: as its flags say, or else here or where they were submitted to from here."""
    meta = click.get_current_context().meta
    if _BACKEND not in meta:
        given = given_where()
        meta[_BACKEND] = backend_for(given) if is_elsewhere(given) else _backend_of(meta.get(_JOBS, ()), given)
    found: Backend = meta[_BACKEND]
    return found


def says_who_is_waited_for(there: Backend) -> Backend:
    """This backend, which from now on says on stderr which machines do not answer while it waits for them."""
    there.say_who_is_waited_for(say)
    return there


def given_where() -> Where:
    """What the flags of this command line say of where jobs are, for verbs that do not start any."""
    return Where(click.get_current_context().meta.get(_META, {}))


def backend_before(name: str, there: Backend) -> Backend | None:
    """Where a job is that is to go on on another target; None if that one has it itself, or nothing is known of it."""
    if not is_narrowed():
        return None
    known = everywhere.target_of(name)
    if known is None or (known == there.name and known not in registry.kinds_of_hosts()):
        return None
    elsewhere = _backend_of((name,), Where({}))
    if known in registry.kinds_of_hosts() and elsewhere.where == there.where:
        return None
    try:
        found = there.describe([name]).jobs
    except UserError:  # some hosts do not answer; the start says so if it needs them
        return elsewhere
    return None if found and found[0].state != "LOST" else elsewhere


def is_narrowed() -> bool:
    """Whether the flags of this command line say where jobs are."""
    return is_elsewhere(given_where())


def _remember_jobs(context: click.Context, _: click.Parameter, value: Any) -> Any:
    """The callback of the argument that names jobs, for which `backend` looks."""
    names = (value,) if isinstance(value, str) else value or ()
    context.meta[_JOBS] = (*context.meta.get(_JOBS, ()), *names)
    return value


OF_JOBS: dict[str, Any] = {"callback": _remember_jobs, "shell_complete": completion.jobs}  # of arguments that name jobs


def _backend_of(names: Sequence[str], given: Where) -> Backend:
    """Where jobs of these names are; the default target if nothing is known of them."""
    found = {name: target for name in names if (target := everywhere.target_of(name)) is not None}
    one, here = next(iter(found.items()), ("", None))
    for other, there in found.items():
        if there != here:
            raise UserError(f"job {one} is on {here}, and {other} on {there}; name the jobs of one target, or add --on")
    noted = everywhere.hosts_named_for(list(found), here)
    if here is not None and noted is not None:  # it was submitted to hosts that flags named
        options = {**options_of(given, job=False), **noted}
        return says_who_is_waited_for(registry.on_hosts(here, options, flag_options(given)))
    return backend_for(given, here or registry.default_target())
