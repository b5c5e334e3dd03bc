"""How the ranks agree on a checkpoint, independently of what the training sends.

All ranks have a TCP connection to rank 0, which so detects at once when a rank ends, and notifies the others. A process
group of torch cannot do this: two threads that use one group deadlock (KempnerForge#104); in a collective of a separate
group, ranks that do not exchange data with the dead rank hang; and gloo loses a send whose peer ends at the same time:
one kill in 130 left rank 0 waiting for the timeout of the group (torch 2.13).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import tempfile
import threading
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from paceline.train.control import connect
from paceline.train.control.star import WAKEUP, Star
from paceline.train.group.forks import forget_in_children
from paceline.train.group.join import on_one_machine, share_object

from .disk_format import PROBE, PROBE_TEXT
from .errors import CheckpointError, CheckpointFolderTaken, DamagedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_OK, _FAILED, _LOST, _BY_DISK, _TAKEN = b"+", b"-", b"!", b"d", b"t"


class ExchangeError(CheckpointError):
    """A rank ended, or did not answer in time, while the ranks agreed on a checkpoint."""


class SingleExchange:
    """The exchange of a single process, see `SocketExchange`."""

    def decide(self, data: bytes, rule: Callable[[list[bytes]], bytes], within: float | None = None) -> bytes:
        return rule([data])

    def addresses(self) -> list[str]:
        return []

    def close(self) -> None:
        """See `SocketExchange.close`."""


class SocketExchange:
    """An exchange over separate TCP connections, so that a background thread may use it while training runs.

    One thread at a time uses it, in the same order on all ranks. All ranks must make it at the same place in the
    script. The default process group must be initialised: over it, rank 0 sends the address at which it listens. Once
    a rank is lost, every further call fails.
    """

    def __init__(self, timeout: timedelta = timedelta(minutes=30)) -> None:
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._timeout = timeout.total_seconds()
        self._local = on_one_machine()
        self._broken = ""
        self._deciding = threading.RLock()  # held while the connections are used
        self._lost: dict[int, OSError] = {}
        try:
            links = connect.connect(self._rank, self._world_size, share_object, "checkpoints", local=self._local)
        except connect.NotConnected as error:
            raise ExchangeError(str(error)) from error
        self._own_end: str = "" if self._rank == 0 else links[0].socket.getsockname()[0]
        # By rank: of all others on rank 0, elsewhere of rank 0, which may already say that the next round has failed.
        self._received: dict[int, deque[bytes]] = {rank: deque() for rank in links}
        self._star = Star(links, accepted=self._rank == 0)
        forget_in_children(self)
        try:
            self.decide(b"", lambda _: b"")  # all ranks have connected
        except BaseException:
            self.close()  # so that no rank waits for this one
            raise

    def decide(self, data: bytes, rule: Callable[[list[bytes]], bytes], within: float | None = None) -> bytes:
        """Call `rule` on rank 0 with the `data` of all ranks, in rank order; return its answer on every rank."""
        with self._deciding:
            if not self._broken:
                limit = self._timeout if within is None else within
                answer = self._lead(data, rule, limit) if self._rank == 0 else self._follow(data, limit)
                if answer[:1] == _OK:
                    return answer[1:]
                if answer[:1] == _FAILED:
                    raise CheckpointError(answer[1:].decode())
                self._broken = self._broken or answer[1:].decode()
        raise ExchangeError(self._broken)

    def addresses(self) -> list[str]:
        """Addresses at which the others may reach this rank, the likeliest first."""
        if self._rank == 0 or self._local:
            return connect.addresses(local=self._local)
        return [self._own_end]  # of its connection to rank 0

    def close(self) -> None:
        """End the connections."""
        self._broken = self._broken or "the exchange of the checkpoints is closed"
        self._star.wake()  # a thread that waits in `decide`
        with self._deciding:
            self._star.close()

    def forget(self) -> None:
        """Forked workers must not keep a connection alive when their rank dies."""
        self._broken = "this process is no rank"
        self._star.close()

    def _lead(self, data: bytes, rule: Callable[[list[bytes]], bytes], limit: float) -> bytes:
        lost = self._await_peers(limit)
        if lost:
            answer = _LOST + f"{lost} while the ranks agreed on a checkpoint".encode()
        else:
            try:
                answer = _OK + rule([data, *(self._received[rank].popleft() for rank in range(1, self._world_size))])
            except Exception as error:  # any error: the others wait for an answer
                answer = _FAILED + f"{error}".encode()
        self._star.send_to_all(answer)
        while not (self._star.has_sent_all or self._broken) and self._turn(limit):
            pass
        return answer

    def _follow(self, data: bytes, limit: float) -> bytes:
        self._turn(0.0)  # rank 0 may have ended the exchange, and said why
        self._star.send(0, data)
        lost = self._await_peers(2 * limit)  # longer than rank 0, so that rank 0 reports which rank is late
        return (
            _LOST + f"{lost} while the ranks agreed on a checkpoint".encode() if lost else self._received[0].popleft()
        )

    def _await_peers(self, limit: float) -> str:
        """Wait for a message of each peer; returns which one is lost, and how, if one is."""
        while missing := [rank for rank, those in self._received.items() if not those]:
            for rank, error in self._lost.items():
                return _lost(rank, error)
            if self._broken or not self._turn(limit):
                return f"rank {min(missing)} did not answer within {limit:.0f} s"
        return ""

    def _turn(self, limit: float) -> bool:
        """Send and receive what is possible now; returns whether something was, within the limit."""
        ready = self._star.select(limit)
        for rank, what in self._star.take(ready):
            if isinstance(what, OSError):
                self._lost[rank] = what
            elif rank != WAKEUP:
                self._received[rank].append(what)
        return bool(ready)


def _lost(rank: int, error: OSError) -> str:
    """How a rank was lost. A machine that is gone is recognised by the errors of its connection."""
    is_gone = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
    return f"rank {rank} cannot be reached" if is_gone else f"rank {rank} ended"


Exchange = SingleExchange | SocketExchange  # the collectives that a checkpoint store needs


class Agreement:
    """Work that is done by all ranks or by none."""

    def __init__(self, exchange: Exchange, rank: int, world_size: int) -> None:
        self.decide = exchange.decide
        self.addresses = exchange.addresses
        self.who = f"rank {rank} on {socket.gethostname()} " if world_size > 1 else ""

    def together(self, failed: str, work: Callable[[], T]) -> T:
        """Do this rank's part. The error begins with `failed`, such as "cannot save"."""
        cause: Exception | None = None
        vote = b""
        try:
            result = work()
        except Exception as error:
            cause = error
            reason = error.strerror if isinstance(error, OSError) else str(error).strip()
            by_disk = isinstance(error, (OSError, DamagedCheckpoint)) or getattr(error, "by_disk", False)
            kind = _TAKEN if isinstance(error, CheckpointFolderTaken) else _BY_DISK if by_disk else _FAILED
            vote = kind + f"{self.who}{failed}: {(reason or type(error).__name__).splitlines()[0]}".encode()
        verdict = self.decide(vote, _first_failure)
        if verdict[:1] == _TAKEN:
            raise CheckpointFolderTaken(verdict[1:].decode()) from cause
        if verdict:
            raise CheckpointError(verdict[1:].decode(), by_disk=verdict[:1] == _BY_DISK) from cause
        return result


def _first_failure(votes: list[bytes]) -> bytes:
    return next(filter(None, votes), b"")


# -- which ranks share a folder ----------------------------------------------------------------------------------------
# Which ranks see the same folder, and which one of them writes there.
#
# Whether nodes share a folder is not configured but tested. Ranks of one machine with the same path see the same
# folder; if that holds for all ranks, nothing is tested. Otherwise every rank tries to create the same new file. In
# each folder, however it is mounted, exactly one rank succeeds; this also holds on NFS, and does not depend on its
# caches.


_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def find_writers(folder: Path, rank: int, agreement: Agreement) -> list[int]:
    """The writer of each rank's folder: the lowest rank that sees it. All ranks must call this; it makes the folder."""
    failed = f"cannot write checkpoints to {folder}"

    def rule(places: list[bytes]) -> bytes:
        return (f"{len(places)}" if len(set(places)) == 1 else f".meeting-{secrets.token_hex(16)}").encode()

    answer = agreement.decide(_place(folder), rule).decode()
    if not PROBE.fullmatch(answer):
        agreement.together(failed, lambda: _try(folder) if rank == 0 else None)
        return [0] * int(answer)
    probe = folder / answer
    try:
        refused = agreement.together(failed, lambda: _make(probe, rank))
        maker = agreement.together(failed, lambda: _maker(probe, refused))
        writers: list[int] = json.loads(agreement.decide(maker.encode(), _lowest))
    finally:
        with contextlib.suppress(OSError):
            if probe.read_text() == f"{PROBE_TEXT}{rank}":
                probe.unlink()
    return writers


def _place(folder: Path) -> bytes:
    """Identifies the folder: equal on two ranks only if it is certainly the same folder."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        mounts, root = os.stat("/proc/self/ns/mnt"), os.stat("/")
    except OSError:
        kernel, mounts, root = secrets.token_hex(16), os.stat("/"), os.stat("/")
    return json.dumps([kernel, mounts.st_ino, root.st_dev, root.st_ino, str(folder)]).encode()


def _try(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _make(probe: Path, rank: int) -> OSError | None:
    """Create the file, unless another rank was faster. Returns the error if this rank may not write, only read."""
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in _READ_ONLY:
            return error
        raise
    try:
        with probe.open("x") as file:
            file.write(f"{PROBE_TEXT}{rank}")
    except FileExistsError:
        return None
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink()
        if error.errno in _READ_ONLY:
            return error
        raise
    return None


def _maker(probe: Path, refused: OSError | None) -> str:
    try:
        return probe.read_text()
    except FileNotFoundError:
        raise refused or FileNotFoundError(errno.ENOENT, f"{probe.name}, just made there, is not found") from None


def _lowest(makers: list[bytes]) -> bytes:
    return json.dumps([makers.index(maker) for maker in makers]).encode()
