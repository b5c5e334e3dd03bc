"""Settings: what is so on this machine and in this project, whatever the job.

They come from the user's `paceline/config.toml` and from the project's `paceline.toml`, whose keys win one by one.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from .errors import UserError
from .quantities import duration
from .settings_files import project_file, user_file
from .text import printable
from .validation import validation_error

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from .validation import KeyPath

_VOLUME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Limit = Annotated[float, BeforeValidator(partial(duration, usual="s")), Field(gt=0, allow_inf_nan=False)]
Period = Annotated[float, BeforeValidator(partial(duration, usual="m")), Field(gt=0, allow_inf_nan=False)]
Files = dict[tuple[str, ...], Path]  # key → the file that sets it


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LocalSettings(_Model):
    """This machine: `devices` is how many slots it has where it has no GPUs; GPUs are counted."""

    devices: int | None = Field(default=None, ge=0, le=4096)


class Target(_Model):
    """A named target for jobs: a backend and its options."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    backend: str = Field(min_length=1)

    @property
    def options(self) -> dict[str, Any]:
        """All keys but `backend`."""
        return dict(self.model_extra or {})


class Defaults(_Model):
    """What holds where no flag says otherwise.

    Attributes:
        on: the target.
        look_timeout: seconds that a verb that looks waits for a machine; None leaves it to paceline.
        act_timeout: the same for a verb that acts.
        reconnect_timeout: seconds to connect again to a host of a job in the foreground; None leaves it to paceline.
        keep_warm: `keep_warm` of the jobs on this machine and on hosts that do not say.
    """

    on: str = Field(default="local", min_length=1)
    look_timeout: Limit | None = None
    act_timeout: Limit | None = None
    reconnect_timeout: Limit | None = None
    keep_warm: Period | None = None


class Settings(_Model):
    """What the files say.

    Attributes:
        volumes: name → absolute path.
        local: this machine.
        targets: by name.
    """

    volumes: dict[str, str] = {}
    local: LocalSettings = LocalSettings()
    targets: dict[str, Target] = {}
    defaults: Defaults = Defaults()
    _files: Files = PrivateAttr(default={})

    def file_of(self, *key: str) -> Path | None:
        """The file that sets a key such as `"volumes", "training-data"`; None where none does."""
        return self._files.get(key)


def load(folder: Path | None = None) -> Settings:
    """The settings for work in `folder`, the current one by default.

    Raises:
        UserError: a file cannot be read, or holds something wrong; names the file and the key.
    """
    tables: dict[str, Any] = {}
    files: Files = {}
    for file, is_project in ((user_file(), False), (project_file(folder), True)):
        if file is not None and (table := _table(file)) is not None:
            _place_volumes(table, file, is_project)
            _merge(tables, table, file, files, ())

    def where(key_path: KeyPath) -> str:
        key = tuple(str(part) for part in key_path)
        while key and key not in files:
            key = key[:-1]
        return f"{files[key]}: {'.'.join(map(str, key_path))}"

    try:
        settings = Settings.model_validate(tables)
    except ValidationError as error:
        raise validation_error(error, Settings, where) from None
    settings._files = files
    return settings


def _table(file: Path) -> dict[str, Any] | None:
    """What a TOML file holds; None where there is none."""
    try:
        table: dict[str, Any] = tomllib.loads(file.read_bytes().decode("utf-8-sig"))
        return table
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(printable(f"cannot read {file}: {error.strerror}; correct or remove it")) from None
    except UnicodeDecodeError:
        raise UserError(printable(f"{file}: this is not UTF-8; save the file as UTF-8")) from None
    except tomllib.TOMLDecodeError as error:
        what, _, position = str(error).partition(" (at ")
        found = re.match(r"line (\d+)", position)
        # At the end of the document there is no number; its last line it is.
        line = found[1] if found else max(1, len(file.read_bytes().splitlines()))
        raise UserError(printable(f"{file}:{line}: not valid TOML: {what[:1].lower()}{what[1:]}")) from None
    except RecursionError:
        raise UserError(printable(f"{file}: its values are nested too deeply")) from None


def _place_volumes(table: dict[str, Any], file: Path, is_project: bool) -> None:
    """Make the paths of volumes absolute: a project's relative ones start at its file, `~` is the user's home."""
    volumes = table.get("volumes")
    if not isinstance(volumes, dict):
        return
    for name, text in volumes.items():
        where = printable(f"{file}: volumes.{name}")
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
