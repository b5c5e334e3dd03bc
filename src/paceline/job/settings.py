"""Settings: what is so on this machine and in this project, whatever the job.

They come from the user's `paceline/config.toml` and from the project's `paceline.toml`, whose keys win one by one.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from paceline.contract import found

from . import trust
from .errors import UserError
from .model import InvalidError, Model, Parsers, as_list, each
from .quantities import duration, duration_or_off
from .settings_files import place_of, project_file, user_file
from .text import printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_VOLUME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Seconds = Annotated[float, Meta(gt=0)]
Files = dict[tuple[str, ...], Path]  # key → the file that sets it


class _Model(Model, frozen=True, kw_only=True):
    is_strict: ClassVar[bool] = True


_limit = partial(duration, usual="s", zero="give for example 5s")


class LocalSettings(_Model, frozen=True, kw_only=True):
    """This machine.

    Attributes:
        devices: how many slots it has where it has no GPUs; GPUs are counted.
        setup: shell commands that run before the ranks of each job.
        environment: the packages of jobs that do not say; see `JobSpec`.
    """

    devices: Annotated[int, Meta(ge=0, le=4096)] | None = None
    setup: tuple[str, ...] = ()
    environment: str | None = None

    parsers: ClassVar[Parsers] = {"setup": as_list}


class Target(_Model, frozen=True, kw_only=True):
    """A named target for jobs: a backend, its options, and what goes before the ranks of each job there."""

    backend: Annotated[str, Meta(min_length=1)]
    setup: tuple[str, ...] = ()
    environment: str | None = None
    options: dict[str, Any] = {}

    parsers: ClassVar[Parsers] = {"setup": as_list}

    @classmethod
    def arranged(cls, given: Any) -> Any:
        """All keys but those of a target are options."""
        if not isinstance(given, dict):
            return given
        own = {name: given[name] for name in ("backend", "setup", "environment") if name in given}
        return {**own, "options": {name: value for name, value in given.items() if name not in own}}


class Defaults(_Model, frozen=True, kw_only=True):
    """What holds where no flag says otherwise.

    Attributes:
        on: the target.
        look_timeout: seconds that a verb that looks waits for a machine; None leaves it to paceline.
        act_timeout: the same for a verb that acts.
        reconnect_timeout: seconds to connect again to a host of a job in the foreground; None leaves it to paceline.
        keep_warm: `keep_warm` of the jobs on this machine and on hosts that do not say; None is 10 minutes after runs
            that a person has typed on this machine, and nothing after others.
    """

    on: Annotated[str, Meta(min_length=1)] = "local"
    look_timeout: Seconds | None = None
    act_timeout: Seconds | None = None
    reconnect_timeout: Seconds | None = None
    keep_warm: Seconds | Literal["off"] | None = None

    parsers: ClassVar[Parsers] = {
        "look_timeout": _limit, "act_timeout": _limit, "reconnect_timeout": _limit,
        "keep_warm": partial(duration_or_off, usual="m"),
    }  # fmt: skip


class Receiver(_Model, frozen=True, kw_only=True):
    """Who gets notices of jobs from `paceline notify`: by a webhook, or by mail.

    Attributes:
        webhook: the address.
        webhook_file: a file with the address, which only its user can read.
        mail: addresses.
        format: of what is sent to the webhook.
        secret_file: a file with the secret by which messages of Feishu and DingTalk are signed.
        on: the events.
        slow_for: seconds for which a job has been slow when that is told.
        targets: of whose jobs; None for all.
        labels: that a job must have.
    """

    webhook: str | None = None
    webhook_file: str | None = None
    mail: tuple[str, ...] = ()
    format: Literal["json", "slack", "feishu", "dingtalk", "wecom"] = "json"
    secret_file: str | None = None
    on: Annotated[tuple[Literal["failed", "ended", "hung", "slow"], ...], Meta(min_length=1)] = (
        "failed", "ended", "hung", "slow",
    )  # fmt: skip
    slow_for: Seconds = 600.0
    targets: tuple[str, ...] | None = None
    labels: dict[str, str] = {}

    parsers: ClassVar[Parsers] = {
        "mail": as_list, "on": as_list, "targets": as_list,
        "slow_for": partial(duration, usual="m", zero="give for example 10m"),
    }  # fmt: skip

    def check(self) -> None:
        """There is one way to the receiver, with the keys that belong to it."""
        ways = [name for name in ("webhook", "webhook_file", "mail") if getattr(self, name)]
        if len(ways) != 1:
            what = f"has {' and '.join(ways)}; leave one" if ways else "says not where notices go; add webhook_file"
            raise InvalidError((), f"{what}, of webhook, webhook_file and mail" if ways else f"{what}, webhook or mail")
        if self.mail and "format" in self.given:
            raise InvalidError(("format",), "is for webhooks; mail is plain text, leave it out")
        if self.secret_file is not None and self.format not in ("feishu", "dingtalk"):
            raise InvalidError(("secret_file",), 'is for format = "feishu" or "dingtalk"; leave it out')


class Settings(_Model, frozen=True, kw_only=True):
    """What the files say.

    Attributes:
        volumes: name → absolute path.
        local: this machine.
        targets: by name.
        notify: who gets notices, by name.
    """

    volumes: dict[str, str] = {}
    local: LocalSettings = msgspec.field(default_factory=lambda: LocalSettings.validated({}))
    targets: dict[str, Target] = {}
    defaults: Defaults = msgspec.field(default_factory=lambda: Defaults.validated({}))
    notify: dict[str, Receiver] = {}

    parsers: ClassVar[Parsers] = {
        "local": LocalSettings.validated, "targets": each(Target), "defaults": Defaults.validated,
        "notify": each(Receiver),
    }  # fmt: skip

    def file_of(self, *key: str) -> Path | None:
        """The file that sets a key such as `"volumes", "training-data"`; None where none does."""
        files: Files = self.__dict__.get("files", {})
        return files.get(key)

    def named(self, *key: str) -> str:
        """A key with the file and the line that set it, for messages."""
        return _named(self.__dict__.get("files", {}), key)


def load(folder: Path | None = None) -> Settings:
    """The settings for work in `folder`, the current one by default."""
    tables: dict[str, Any] = {}
    files: Files = {}
    for file, is_project in ((user_file(), False), (project_file(folder), True)):
        if file is not None and (table := read_table(file, is_project=is_project)) is not None:
            if is_project:
                trust.check(file, table)
            _place_volumes(table, file, is_project)
            _merge(tables, table, file, files, ())

    try:
        settings = Settings.validated(tables)
    except InvalidError as error:
        raise error.named(lambda key_path: _named(files, tuple(map(str, key_path)))) from None
    settings.__dict__["files"] = files
    return settings


def _named(files: Files, key: tuple[str, ...]) -> str:
    above = next((files[key[:end]] for end in range(len(key), 0, -1) if key[:end] in files), None)
    return f"{'' if above is None else f'{place_of(above, key)}: '}{'.'.join(key)}"


def read_table(file: Path, *, is_project: bool) -> dict[str, Any] | None:
    """What a TOML file holds; None where there is none, or a project's may be of another user."""
    try:
        content = found.read(file) if is_project else file.read_bytes()
        return None if content is None else tomllib.loads(content.decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(printable(f"cannot read {file}: {error.strerror}; correct or remove it")) from None
    except UnicodeDecodeError:
        raise UserError(printable(f"{file}: this is not UTF-8; save the file as UTF-8")) from None
    except tomllib.TOMLDecodeError as error:
        what, _, position = str(error).partition(" (at ")
        numbered = re.match(r"line (\d+)", position)
        # At the end of the document there is no number; its last line it is.
        line = numbered[1] if numbered else max(1, len(file.read_bytes().splitlines()))
        raise UserError(printable(f"{file}:{line}: not valid TOML: {what[:1].lower()}{what[1:]}")) from None
    except RecursionError:
        raise UserError(printable(f"{file}: its values are nested too deeply")) from None


def _place_volumes(table: dict[str, Any], file: Path, is_project: bool) -> None:
    """Make the paths of volumes absolute: a project's relative ones start at its file, `~` is the user's home."""
    volumes = table.get("volumes")
    if not isinstance(volumes, dict):
        return
    for name, text in volumes.items():
        where = printable(f"{place_of(file, ('volumes', name))}: volumes.{name}")
        if not _VOLUME.fullmatch(name):
            raise UserError(f"{where}: a volume's name has letters, digits, '.', '_' and '-'; rename it")
        if not isinstance(text, str):
            continue
        try:
            path = Path(text).expanduser()
        except RuntimeError:
            raise UserError(f"{where} {text!r}: there is no such home folder; write the absolute path") from None
        if not text or "\0" in text or not (path.is_absolute() or is_project):
            raise UserError(f"{where} {text!r}: not an absolute path; write for example /mnt/data or ~/data")
        volumes[name] = os.path.normpath(file.parent / path)


def _merge(into: dict[str, Any], table: dict[str, Any], file: Path, files: Files, above: tuple[str, ...]) -> None:
    for name, value in table.items():
        key = (*above, name)
        files[key] = file
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value, file, files, key)
        elif isinstance(value, dict):
            into[name] = {}
            _merge(into[name], value, file, files, key)
        else:
            into[name] = value
