"""Finds backends: paceline's own kinds, and those of the entry-point group `paceline.backends`."""

from __future__ import annotations

import functools
import importlib
import os
import shlex
from typing import TYPE_CHECKING, Any

from paceline.job import settings_files
from paceline.job.errors import UserError, nearest

from .base import Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .base import Allocation, Flag

BACKENDS = {
    "local": "paceline.backends.local.backend:Local",
    "ssh": "paceline.backends.ssh.backend:Ssh",
    "slurm": "paceline.backends.slurm.backend:Slurm",
    "kubernetes": "paceline.backends.kubernetes.backend:Kubernetes",
}
# Flags are in their own module, because every verb has them, and few load the backend.
_FLAGS = {kind: f"paceline.backends.{kind}.flags:FLAGS" for kind in ("ssh", "slurm", "kubernetes")}
# Variable → the kind of backend that makes allocations, and the module that reads the one that this process is in.
_ALLOCATIONS = {"SLURM_JOB_ID": ("slurm", "paceline.backends.slurm.allocation")}

HERE = "local"


@functools.lru_cache(maxsize=1)
def flags() -> dict[str, tuple[Flag, ...]]:
    """Kind → the flags that set options of such a backend."""
    return {kind: _loaded(entry) for kind, entry in _FLAGS.items()}


def allocation() -> tuple[str, Allocation] | None:
    """The kind of scheduler that has given nodes to this shell or script, and these; None if none has."""
    for variable, (kind, entry) in _ALLOCATIONS.items():
        if os.environ.get(variable) and (found := _loaded(f"{entry}:current")(os.environ)) is not None:
            return kind, found
    return None


def started_alone() -> str | None:
    """The line for a process that its scheduler has started several times, of which each is a job of its own."""
    lines = (
        _loaded(f"{entry}:alone")(os.environ) for variable, (_, entry) in _ALLOCATIONS.items() if variable in os.environ
    )
    return next(filter(None, lines), None)


def default_target() -> str:
    """The target of verbs without `--on`."""
    if not settings_files.exist():
        return HERE
    from paceline.job.settings import load as settings

    return settings().defaults.on


def load(
    name: str | None = None,
    options: Mapping[str, Any] | None = None,  # go before those of the settings
    *,
    kind: str | None = None,  # then the settings are not read
    given_by: Mapping[str, str] | None = None,  # option → its flag, for messages
    where: str = "",  # the flags that select it, without --on
) -> Backend:
    """The backend of this name: this machine, a target of the settings, or one that `kind` and the options describe."""
    name = name or HERE
    options, given_by, where = options or {}, given_by or {}, f" {where}" if where else ""
    if kind is not None:
        return _configured(kind, name, options, given_by, where)
    if name == HERE:
        return _configured(HERE, HERE, options, given_by, "")
    from paceline.job.settings import load as settings  # takes long to import

    known = settings()
    targets = known.targets
    target = targets.get(name)
    if target is None and needs_no_target(name):
        return _configured(name, name, options, given_by, f" --on {shlex.quote(name)}{where}")
    if target is None:
        hint = nearest(name, [HERE, *targets]) if targets else "define it as [targets.NAME] in paceline.toml"
        by = f"{known.named('defaults', 'on')}: " if name == known.defaults.on else ""
        raise UserError(f"{by}no target {name!r}; {hint}")
    where = f" --on {shlex.quote(name)}{where}"
    there = _configured(target.backend, name, {**target.options, **options}, given_by, where, in_settings=known.named)
    there.setup, there.environment = target.setup, target.environment
    return there


def kinds_of_hosts() -> set[str]:
    """The kinds of backends whose hosts flags can name; jobs there are noted under the kind, as under a target."""
    return {kind for kind, those in flags().items() for flag in those if flag.names_hosts is not None}


def on_hosts(kind: str, options: Mapping[str, Any], given_by: Mapping[str, str] | None = None) -> Backend:
    """The backend of hosts that flags named when a job was submitted to them."""
    from . import hosts

    listed = ",".join(options["hosts"])
    words: list[str] = []
    for flag in flags()[kind]:
        if flag.names_hosts == "list":
            words += [flag.names[0], listed]
            named = hosts.in_list(flag.names[0], listed)
        elif flag.names_hosts is None and not flag.job and options.get(flag.option) is not None:
            words += [flag.names[0], str(options[flag.option])]
    exact = {"hosts": [f"{name}:{slots or 0}" for name, slots in named], "exact": True}
    return load(kind, {**options, **exact}, kind=kind, given_by=given_by, where=shlex.join(words))


def _configured(
    kind: str,
    name: str,
    options: Mapping[str, Any],
    given_by: Mapping[str, str],
    where: str,
    *,
    in_settings: Callable[..., str] = lambda *key: ".".join(key),
) -> Backend:
    """A backend with its options."""
    try:
        backend = _kind(kind)
    except UserError as error:
        where_named = in_settings("targets", name, "backend") if kind != name else ""
        raise UserError(f"{where_named}: {error}" if where_named else str(error)) from None
    own = {flag.names[0] for flag in flags().get(kind, ())}
    for flag in given_by.values():
        if flag not in own:
            raise UserError(_not_its_own(flag, kind, name))

    def named(option: str) -> str:
        return given_by.get(option.partition(".")[0]) or in_settings("targets", name, *option.split("."))

    if backend.Options is None:
        for option in options:
            raise UserError(f"{named(option)}: this backend has no options; leave it out")
        return backend(name, None, where)
    from paceline.job.model import InvalidError

    try:
        model = backend.Options.validated(dict(options))
    except InvalidError as error:
        raise error.named(lambda entry: named(".".join(map(str, entry)))) from None
    return backend(name, model, where)


def needs_no_target(name: str) -> bool:
    """Whether this is a kind of backend whose options all have defaults, so that its name says enough."""
    if name not in BACKENDS:
        return False
    options = _kind(name).Options
    return options is not None and not options.required()


def _not_its_own(flag: str, kind: str, name: str) -> str:
    """The message for a flag of another kind of backend."""
    if name != HERE:
        return f"{flag} means nothing to {name}, whose backend is {kind}; leave it out"
    of, beside = next((kind, those) for kind, those in flags().items() if any(flag in one.names for one in those))
    hosts = [one.names[0] for one in beside if one.names_hosts is not None]
    if not hosts:
        return f'{flag} is for jobs on {of}; add --on {of}, or a target with backend = "{of}"'
    return f"{flag} is for hosts; name some with {', '.join(hosts)} or --on"


def _kind(kind: str) -> type[Backend]:
    """A kind of backend."""
    entry = BACKENDS.get(kind)
    if entry is not None:
        own: type[Backend] = _loaded(entry)
        return own
    from importlib.metadata import entry_points  # slow to import

    found = {point.name: point.value for point in entry_points(group="paceline.backends")}
    if kind not in found:
        raise UserError(f"no backend {kind!r}; {nearest(kind, [*BACKENDS, *found])}")
    try:
        backend = _loaded(found[kind])
    except (ImportError, AttributeError) as error:
        raise UserError(f"backend {kind!r} cannot be loaded from {found[kind]}: {error}; install it again") from None
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise UserError(
            f"backend {kind!r}: {found[kind]} is not a subclass of paceline.backends.base.Backend; install it again"
        )
    return backend


def _loaded(entry: str) -> Any:
    module, _, attribute = entry.partition(":")
    return getattr(importlib.import_module(module), attribute)
