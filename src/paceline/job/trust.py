"""Settings of projects that run programs or choose credentials: they are obeyed when the user has agreed to them.

A project may come from anybody, as a repository that was cloned; `paceline list` in it runs none of its programs
unasked.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .errors import UserError
from .paths import jobs_folder, make_private
from .settings_files import place_of
from .text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

UNASKED = "PACELINE_TRUST"  # the variable that is 1 where all projects are trusted
# Keys of targets, of any backend.
_KEYS = frozenset(
    {"python", "host_discovery_script", "pod_template", "kubeconfig", "identity_file", "setup", "environment"}
)

_OF_RECEIVERS = frozenset({"webhook", "webhook_file", "secret_file", "mail"})  # where notices of jobs go

# How the command line asks whether to obey these settings of a file; None where nobody can be asked.
ask: Callable[[Path, Mapping[str, Any]], bool] | None = None


def guarded(table: Mapping[str, Any]) -> dict[str, object]:
    """The settings of a project's file to which the user has to agree."""
    local = table.get("local")
    own = {f"local.{key}": value for key, value in (local.items() if isinstance(local, dict) else ()) if key in _KEYS}
    for kind, keys in (("targets", _KEYS), ("notify", _OF_RECEIVERS)):
        tables = table.get(kind)
        own |= {
            f"{kind}.{name}.{key}": value
            for name, options in (tables.items() if isinstance(tables, dict) else ())
            for key, value in (options.items() if isinstance(options, dict) else ())
            if key in keys
        }
    return own


def check(file: Path, table: Mapping[str, Any]) -> None:
    """Check that the user has agreed to what a project's file sets, or ask."""
    settings = guarded(table)
    if not settings or os.environ.get(UNASKED) == "1" or _record(file, settings).exists():
        return
    if ask is not None and ask(file, settings):
        agree(file, settings)
        return
    first, *others = settings
    more = f", and {len(others)} more like it" if others else ""
    raise UserError(
        printable(
            f"{place_of(file, tuple(first.split('.')))}: {first}{more}: a project's setting that runs a program or "
            f"chooses credentials; look at it, and agree to it with paceline trust {file}"
        )
    )


def agree(file: Path, settings: Mapping[str, Any]) -> None:
    """Note that the user has agreed to these settings of a file, as they are now."""
    record = _record(file, settings)
    make_private(record.parent.parent)
    try:
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        record.write_text(f"{file}\n", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"cannot write {record}: {error.strerror}; check its folder") from None


def _record(file: Path, settings: Mapping[str, Any]) -> Path:
    """The note of an agreement; with the path of the file, as relative ones in it lead elsewhere in another project."""
    import hashlib
    import json

    content = json.dumps([str(file), settings], sort_keys=True, default=str)
    return jobs_folder().parent / "trusted" / hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()
