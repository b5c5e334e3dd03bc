"""Accounting of a cluster: slurmdbd, and a MariaDB of its own in the cluster's folder, which starts within a second.

The database has no tables of users: whoever reaches it in the controller's namespace may do everything.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from tests.conftest import eventually

from . import programs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .machine import Machine

NO_ACCOUNTING = """\
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none"""
_SETTINGS = """\
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations,limits,qos"""
_CONFIG = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=ctl
DbdAddr={address}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost={address}
StoragePort=3306
StorageUser=root
StorageLoc=slurm
{plugins}
"""
_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")
_DATABASE = (
    "--no-defaults", "--skip-grant-tables", "--user=root", "--performance-schema=off", "--skip-name-resolve",
    "--innodb-log-file-size=4M", "--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0",
    "--innodb-doublewrite=0", "--innodb-lock-wait-timeout=900",
)  # fmt: skip


def missing() -> str:
    """What keeps a cluster here from having accounting, or ""."""
    return programs.missing("mariadbd", "slurmdbd", "sacctmgr")


class Accounting:
    """What keeps the accounts of a cluster.

    Attributes:
        settings: lines of slurm.conf.
    """

    def __init__(self, folder: Path, controller: Machine, address: str) -> None:
        self._folder, self._controller, self._address = folder, controller, address
        self.settings = _SETTINGS.format(address=address, folder=folder)

    def start(self, launch: Callable[[str, Sequence[str]], None], slurm: Callable[..., str]) -> None:
        """Start it on the controller; comes back when slurmdbd answers, for which slurmctld does not wait."""
        config = self._folder / "slurmdbd.conf"
        config.write_text(_CONFIG.format(folder=self._folder, address=self._address, plugins=programs.plugins()))
        config.chmod(0o600)
        (self._folder / "database").mkdir()
        (self._folder / "database.sql").write_text(_procedures())
        own = {
            "datadir": "database", "socket": "mariadb.socket", "pid-file": "mariadb.pid", "init-file": "database.sql",
        }  # fmt: skip
        options = [*_DATABASE, *(f"--{option}={self._folder / name}" for option, name in own.items())]
        command = [programs.path("mariadbd"), *options, f"--bind-address={self._address}"]
        launch("mariadbd", self._controller.command(command))
        eventually(lambda: _listens(str(self._folder / "mariadb.socket")), "the database listens")
        launch("slurmdbd", self._controller.command([programs.path("slurmdbd"), "-D"]))

        def answers() -> bool:
            with contextlib.suppress(RuntimeError):
                return slurm("sacctmgr", "--noheader", "show", "cluster") is not None
            return False

        eventually(answers, "slurmdbd answers")


def _procedures() -> str:
    """What makes the one table of MariaDB itself that slurmdbd needs: it has procedures."""
    statements = _TABLES.read_text().splitlines()
    (table,) = (line for line in statements if line.startswith("CREATE TABLE IF NOT EXISTS proc "))
    return f"SET SESSION sql_mode='';\nCREATE DATABASE mysql;\nUSE mysql;\n{table}\n"


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(path) == 0
