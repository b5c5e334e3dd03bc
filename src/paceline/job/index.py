"""An index of the jobs that have ended, so that listing thousands of them opens none of their folders.

The run directories are authoritative. The index is a cache of them, and is rebuilt if it is lost.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from paceline.contract.records import JobRecord

_BUSY = 2.0  # seconds to wait for another process that writes
_VERSION = 3  # of the table, and of keys that have changed while their number has not
_APPLICATION = 0x70636C6E  # what SQLite has in the header of a file to say whose it is: "pcln"
_SCHEMA = """
    CREATE TABLE IF NOT EXISTS jobs (
        name TEXT PRIMARY KEY, identity INTEGER NOT NULL, finished REAL NOT NULL, expires REAL, record TEXT NOT NULL
    )
"""


class Index:
    """Records by name and identity of jobs: another job of that name has another."""

    # `keys`: how many a record has; an index of records with another number is made anew.
    def __init__(self, path: Path, keys: int, warn: Callable[[str], None]) -> None:
        self._path = path
        self._version = 1000 * _VERSION + keys
        self._warn = warn
        self._connection: sqlite3.Connection | None = None
        try:
            self._open()
        except sqlite3.Error as error:
            self._give_up(error)

    def _open(self) -> None:
        if self._is_foreign():
            self._warn(f"{self._path} is not paceline's index: move it away; reading the jobs' folders instead")
            return
        try:
            self._connect()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # locked, or it cannot be written
                raise
            self._rebuild(error)

    def _is_foreign(self) -> bool:
        """Whether there is a file that paceline did not create; it is not changed."""
        try:
            with self._path.open("rb") as file:
                header = file.read(100)
        except OSError:  # none, or SQLite says what is wrong with it
            return False
        return header != b"" and header[68:72] != _APPLICATION.to_bytes(4, "big")

    def _connect(self) -> None:
        is_new = not self._path.exists() or not self._path.stat().st_size
        if not self._is_foreign():
            self._keep_private()
        self._connection = sqlite3.connect(self._path, timeout=_BUSY, isolation_level=None)
        if is_new:  # before there is a log to which this would go instead of the header
            self._connection.execute(f"PRAGMA application_id={_APPLICATION}")
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        if self._connection.execute("PRAGMA user_version").fetchone() != (self._version,):
            self._connection.execute("DROP TABLE IF EXISTS jobs")
            self._connection.execute(_SCHEMA)
            self._connection.execute(f"PRAGMA user_version={self._version}")

    def _keep_private(self) -> None:
        """Give the database mode 0600; SQLite creates its other files with the same mode."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError:  # SQLite says why
            return
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o600)
        os.close(descriptor)
        for end in ("-wal", "-shm"):
            with contextlib.suppress(OSError):
                os.chmod(f"{self._path}{end}", 0o600)

    def _rebuild(self, error: Exception) -> None:
        if self._is_foreign():
            self.close()
            return
        self._warn(f"the index {self._path} was damaged ({error}); it is rebuilt from the jobs' folders")
        self.close()
        for end in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + end).unlink(missing_ok=True)
        self._connect()

    def _give_up(self, error: sqlite3.Error) -> None:
        self._warn(f"the index {self._path} cannot be used ({error}); reading the jobs' folders instead")
        self.close()

    def close(self) -> None:
        """Release the database."""
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def names(self) -> dict[str, int]:
        """Name → identity of every job that is known to have ended."""
        return dict(self._execute("SELECT name, identity FROM jobs"))

    def load(self, since: float) -> dict[str, str]:
        """Name → record, as JSON, of the jobs that ended after `since`, in seconds since the epoch."""
        return dict(self._execute("SELECT name, record FROM jobs WHERE finished >= ?", (since,)))

    def expired(self, now: float) -> list[str]:
        """The jobs whose time to live is over."""
        return [name for (name,) in self._execute("SELECT name FROM jobs WHERE expires <= ?", (now,))]

    def discard(self, why: Exception) -> None:
        """Rebuild the index, because its records are invalid."""
        self._rebuild(why)

    def update(self, ended: Mapping[str, tuple[int, JobRecord]], gone: Iterable[str]) -> None:
        """Remember jobs that have ended, and forget those whose folders are gone."""
        rows = [
            (
                name,
                identity,
                record["finished"] or record["kept_since"] or record["created"],
                (record["kept_since"] or 0.0) + (record["ttl"] or math.inf),
                json.dumps(record),
            )
            for name, (identity, record) in ended.items()
        ]
        missing = [(name,) for name in gone]
        if self._connection is None or not (rows or missing):
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?)", rows)
            self._connection.executemany("DELETE FROM jobs WHERE name = ?", missing)
            self._connection.execute("COMMIT")
        except sqlite3.Error:
            self.close()  # a full disk, or others that write: what is true is elsewhere

    def _execute(self, statement: str, values: tuple[Any, ...] = ()) -> list[Any]:
        if self._connection is None:
            return []
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            self._give_up(error)
        except sqlite3.DatabaseError as error:
            self._rebuild(error)
        return []
