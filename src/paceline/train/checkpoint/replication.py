"""Copies a checkpoint from ranks that have it to ranks whose folder lacks it, over separate TCP connections.

Each holder listens while it serves. Both sides of a connection prove that they know the job's key (`job_key`), and the
messages over it are the manifest and parts of the files. The receiver writes them like a save: under a hidden name,
made durable, read back and compared with the manifest, and named by one rename. Meanwhile all ranks report their state
to each other every few seconds. So if one fails, because of a dead holder, a lost connection or a full disk, all fail
with the same error.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, TypedDict

from paceline.contract.checkpoint import MANIFEST, temporary_name
from paceline.contract.handshake import HandshakeError
from paceline.contract.links import Acceptor, Link, Messages, keep_alive, listen
from paceline.train.control.connect import LOOPBACK, job_key, try_addresses

from . import disk_format
from .disk_format import Manifest, SavedCheckpoint
from .errors import CheckpointError, DamagedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from .consensus import Agreement

_ROUND = 5.0  # seconds between two reports of a rank that fetches
_SILENCE = 60.0  # seconds without data after which a fetch fails
_PART = 1024 * 1024  # bytes of a file in a message


def spread(
    agreement: Agreement, rank: int, folder: Path, saved: SavedCheckpoint | None, sources: Mapping[int, int]
) -> dict[int, str]:
    """Copy a checkpoint to the folders that lack it. All ranks must call this."""
    with contextlib.ExitStack() as stack:
        holder, offer = None, None
        if rank in sources.values():
            assert saved is not None
            try:
                addresses = agreement.addresses()
                fetchers = {who for who, source in sources.items() if source == rank}
                holder = stack.enter_context(
                    contextlib.closing(_Holder(saved, fetchers, local=addresses == [LOOPBACK]))
                )
                offer = {"port": holder.port, "addresses": addresses}
            except OSError as error:
                offer = {"failed": f"{agreement.who}cannot serve {saved.path}: {error.strerror}"}
        answer = json.loads(agreement.decide(json.dumps(offer).encode(), _introduce, _SILENCE))
        key = job_key("checkpoint transfer", answer["salt"])
        if holder is not None:
            holder.serve(key)
        fetched: Future[str] | None = None
        if rank in sources:
            fetcher = _Fetcher(rank, sources[rank], key=key, **answer["offers"][str(sources[rank])])
            background = stack.enter_context(ThreadPoolExecutor(1, "paceline-fetch"))
            stack.callback(fetcher.cancel)  # before waiting for the thread
            fetched = background.submit(fetcher.fetch, folder)
        while True:
            names = agreement.decide(_report(rank, fetched, folder, agreement.who), _sum_up, _SILENCE)
            if names:
                return {int(who): name for who, name in json.loads(names).items()}


class _Report(TypedDict):
    """What a rank says in a round."""

    goes_on: bool
    failed: str
    name: dict[int, str]  # the checkpoint that it has fetched


def _introduce(offers: list[bytes]) -> bytes:
    known = {rank: offer for rank, offer in enumerate(map(json.loads, offers)) if offer is not None}
    for offer in known.values():
        if "failed" in offer:
            raise CheckpointError(offer["failed"])
    return json.dumps({"salt": secrets.token_hex(32), "offers": known}).encode()


def _report(rank: int, fetched: Future[str] | None, folder: Path, who: str) -> bytes:
    """The state of this rank: still fetching, failed, or done with the name of the checkpoint."""
    report: _Report = {"goes_on": False, "failed": "", "name": {}}
    if fetched is not None and not wait([fetched], _ROUND).done:
        report["goes_on"] = True
    elif fetched is not None:
        error = fetched.exception()
        if error is None:
            report["name"] = {rank: fetched.result()}
        else:
            report["failed"] = f"{who}cannot fetch a checkpoint into {folder}: {error}"
    return json.dumps(report).encode()


def _sum_up(reports: list[bytes]) -> bytes:
    names: dict[str, str] = {}
    goes_on = False
    for report in map(json.loads, reports):
        if report["failed"]:
            raise CheckpointError(report["failed"])
        goes_on = goes_on or report["goes_on"]
        names.update(report["name"])
    return b"" if goes_on else json.dumps(names).encode()


class _Holder:
    """Serves one checkpoint to the ranks that fetch it here, in parallel, until it is closed."""

    def __init__(self, saved: SavedCheckpoint, fetchers: set[int], *, local: bool) -> None:
        self._saved = saved
        self._fetchers = fetchers  # that have not connected yet
        self._server = listen(address=LOOPBACK if local else "")
        self.port: int = self._server.getsockname()[1]
        self._peers: list[socket.socket] = []
        self._threads = ThreadPoolExecutor(1 + len(fetchers), "paceline-serve")
        self._accepting: list[Future[None]] = []

    def serve(self, key: bytes) -> None:
        """Start to serve, in threads."""
        self._accepting.append(self._threads.submit(self._accept, key))

    def close(self) -> None:
        """Close all connections."""
        _wake(self._server)
        wait(self._accepting)  # then there are no more peers
        for peer in self._peers:
            _wake(peer)
        self._threads.shutdown()
        self._server.close()

    def _accept(self, key: bytes) -> None:
        acceptor = Acceptor(self._server, key, self._fetchers.__contains__, len(self._fetchers))
        with contextlib.closing(acceptor), contextlib.suppress(OSError):  # closed
            while True:
                for rank, link in acceptor.accept():
                    self._fetchers.discard(rank)
                    keep_alive(link.socket)
                    self._peers.append(link.socket)
                    self._threads.submit(self._send, link)

    def _send(self, link: Link) -> None:
        """Send it without a timeout: the receiver may write slowly; if it is dead, the round ends."""
        messages = Messages(link, accepted=True)
        with contextlib.suppress(OSError), link.socket:
            messages.send((self._saved.path / MANIFEST).read_bytes())
            for name in self._saved.manifest.files:
                with (self._saved.path / name).open("rb", buffering=0) as file:
                    while part := file.read(_PART):
                        messages.send(part)


def _wake(sock: socket.socket) -> None:
    """Make a thread fail that waits for a socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class _Fetcher:
    """Fetches a checkpoint in a thread."""

    def __init__(self, rank: int, holder: int, port: int, addresses: list[str], key: bytes) -> None:
        self._rank = rank
        self._holder = holder
        self._port = port
        self._addresses = addresses
        self._key = key
        self._lock = threading.Lock()
        self._peer: socket.socket | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """Make `fetch` fail if it still runs."""
        with self._lock:
            self._is_cancelled = True
            if self._peer is not None:
                _wake(self._peer)

    def fetch(self, folder: Path) -> str:
        """Write the checkpoint into a folder. Returns its name there."""
        temporary: Path | None = None
        needed = 0
        try:
            disk_format.remove_leftovers(folder)
            link = self._connect()
            with link.socket:
                messages = Messages(link, accepted=False)
                manifest = Manifest.from_json(self._receive(messages))
                needed = sum(record.size for record in manifest.files.values())
                temporary = temporary_name(folder, manifest.step, manifest.id)
                disk_format.make_temporary(temporary, needed)
                for name, record in manifest.files.items():
                    written = disk_format.write_stream(temporary / name, self._parts(messages, record.size))
                    if written != record:
                        raise DamagedCheckpoint(f"{name} of rank {self._holder} arrived damaged")
            disk_format.write_manifest(temporary, manifest)
            return disk_format.commit(temporary, folder, manifest.step).name
        except (OSError, DamagedCheckpoint, CheckpointError) as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    disk_format.discard(temporary)
            reason = disk_format.describe(error, folder, needed) if isinstance(error, OSError) else str(error)
            raise CheckpointError(reason) from error

    def _connect(self) -> Link:
        link, why = try_addresses(self._rank, self._port, self._addresses, self._key)
        if link is None:
            where = f"port {self._port} at {', '.join(self._addresses)}"
            raise CheckpointError(f"cannot connect to rank {self._holder}, which has it: {where}{why}")
        link.socket.settimeout(_SILENCE)
        with self._lock:
            self._peer = link.socket
            if self._is_cancelled:
                _wake(link.socket)
        return link

    def _parts(self, messages: Messages, size: int) -> Iterator[bytes]:
        """A file of so many bytes."""
        while size > 0:
            part = self._receive(messages)
            size -= len(part)
            yield part

    def _receive(self, messages: Messages) -> bytes:
        try:
            return messages.receive()
        except HandshakeError:
            raise DamagedCheckpoint(f"the received data is not what rank {self._holder} has sent") from None
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:
                raise CheckpointError(f"rank {self._holder} has sent nothing for {_SILENCE:.0f} s") from None
            raise CheckpointError(f"the connection to rank {self._holder}, which has it, has ended") from None
