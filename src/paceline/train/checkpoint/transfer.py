"""A checkpoint goes from ranks that have it to ranks whose folder lacks it, over TCP connections of their own.

Each holder listens while it serves, and lets in who proves to know a token that the ranks got over their exchange; the
token itself is never sent. What comes is written like a save: under a hidden name, made durable, read back and compared
with the manifest, and named by one rename. Meanwhile all ranks tell each other every few seconds how it stands, so that
whatever ends it, a dead holder, a cut, a full disk, ends it on all of them with the same error.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from paceline.train.control import connect
from paceline.train.control.connect import read

from . import files
from .errors import CheckpointError, DamagedCheckpoint
from .files import Manifest, SavedCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from .exchange import Agreement

_ROUND = 5.0  # seconds between two words of a rank that fetches
_SILENCE = 60.0  # seconds after which a rank that sends nothing is given up
_GREETING = 5.0  # seconds to connect, and for a stranger to prove who he is
_CHUNK = 1024 * 1024  # bytes received at once
_SIZE = struct.Struct("!Q")
_NONCE = 32
_PROOF = 32


def spread(
    agreement: Agreement, rank: int, folder: Path, saved: SavedCheckpoint | None, sources: Mapping[int, int]
) -> dict[int, str]:
    """Bring a checkpoint to the folders that lack it; all ranks call it.

    Args:
        folder: where this rank fetches it to.
        saved: the checkpoint, on ranks that others fetch it from.
        sources: from which rank each rank that lacks it fetches it.

    Returns:
        For each rank that fetched it, the name that it has in its folder.

    Raises:
        CheckpointError: it did not arrive somewhere; the same on all ranks.
    """
    with contextlib.ExitStack() as stack:
        holder, offer = None, None
        if rank in sources.values():
            assert saved is not None
            try:
                holder = stack.enter_context(contextlib.closing(_Holder(saved)))
                offer = {"port": holder.port, "addresses": agreement.addresses()}
            except OSError as error:
                offer = {"failed": f"{agreement.who}cannot serve {saved.path}: {error.strerror}"}
        answer = json.loads(agreement.decide(json.dumps(offer).encode(), _introduce, _SILENCE))
        token = answer["token"].encode()
        if holder is not None:
            holder.serve(token)
        fetched: Future[str] | None = None
        if rank in sources:
            fetcher = _Fetcher(sources[rank], token=token, **answer["offers"][str(sources[rank])])
            background = stack.enter_context(ThreadPoolExecutor(1, "paceline-fetch"))
            stack.callback(fetcher.cancel)  # before the thread is waited for
            fetched = background.submit(fetcher.fetch, folder)
        while True:
            told = agreement.decide(_report(rank, fetched, folder, agreement.who), _sum_up, _SILENCE)
            if told:
                return {int(who): name for who, name in json.loads(told).items()}


def _introduce(offers: list[bytes]) -> bytes:
    known = {rank: offer for rank, offer in enumerate(map(json.loads, offers)) if offer is not None}
    for offer in known.values():
        if "failed" in offer:
            raise CheckpointError(offer["failed"])
    return json.dumps({"token": secrets.token_hex(32), "offers": known}).encode()


def _report(rank: int, fetched: Future[str] | None, folder: Path, who: str) -> bytes:
    """How it stands here: it goes on, it failed, or it is there under a name."""
    report: dict[str, Any] = {"goes_on": False, "failed": "", "name": {}}
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
    """Serves one checkpoint to any number of ranks at once, until it is closed."""

    def __init__(self, saved: SavedCheckpoint) -> None:
        self._saved = saved
        self._server = connect.listen()
        self.port: int = self._server.getsockname()[1]
        self._lock = threading.Lock()
        self._peers: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def serve(self, token: bytes) -> None:
        """Begin, in threads."""
        self._start(self._accept, token)

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            self._closed.set()
            for open_socket in (self._server, *self._peers):
                with contextlib.suppress(OSError):
                    open_socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
        for thread in self._threads:
            thread.join()
        self._server.close()

    def _start(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="paceline-serve", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, token: bytes) -> None:
        while True:
            try:
                peer, _ = self._server.accept()
            except OSError:  # closed; or whoever it was went away, or there are too many open files
                if self._closed.wait(0.1):
                    return
                continue
            with self._lock:
                if self._closed.is_set():
                    peer.close()
                    return
                self._peers.add(peer)
                self._start(self._attend, peer, token)

    def _attend(self, peer: socket.socket, token: bytes) -> None:
        try:
            with contextlib.suppress(OSError), peer:
                peer.settimeout(_GREETING)
                if _greet_as_holder(peer, token):
                    peer.settimeout(None)  # who receives may take its time to write; a dead one ends the round
                    self._send(peer)
        finally:
            with self._lock:
                self._peers.discard(peer)

    def _send(self, peer: socket.socket) -> None:
        manifest = (self._saved.path / files.MANIFEST).read_bytes()
        peer.sendall(_SIZE.pack(len(manifest)) + manifest)
        for name in self._saved.manifest.files:
            with (self._saved.path / name).open("rb") as file:
                peer.sendfile(file)


class _Fetcher:
    """Fetches a checkpoint, in a thread."""

    def __init__(self, holder: int, port: int, addresses: list[str], token: bytes) -> None:
        self._holder = holder
        self._port = port
        self._addresses = addresses
        self._token = token
        self._lock = threading.Lock()
        self._peer: socket.socket | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """Let `fetch` fail, if it still runs."""
        with self._lock:
            self._is_cancelled = True
            if self._peer is not None:
                with contextlib.suppress(OSError):
                    self._peer.shutdown(socket.SHUT_RDWR)

    def fetch(self, folder: Path) -> str:
        """Write the checkpoint into a folder; returns the name that it has there.

        Raises:
            CheckpointError: it did not arrive, or cannot be written; nothing is left of it.
        """
        temporary: Path | None = None
        needed = 0
        try:
            files.remove_leftovers(folder)
            with self._connect() as peer:
                manifest = self._manifest(peer)
                needed = sum(record.size for record in manifest.files.values())
                temporary = files.temporary_name(folder, manifest.step, manifest.id)
                files.make_temporary(temporary)
                for name, record in manifest.files.items():
                    written = files.write_stream(temporary / name, self._chunks(peer, record.size))
                    if written.crc32 != record.crc32:
                        raise DamagedCheckpoint(f"{name} of rank {self._holder} arrived damaged")
            files.write_manifest(temporary, manifest)
            return files.commit(temporary, folder, manifest.step).name
        except (OSError, DamagedCheckpoint, CheckpointError) as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    files.remove_leftovers(folder)
            reason = files.describe(error, folder, needed) if isinstance(error, OSError) else str(error)
            raise CheckpointError(reason) from error

    def _connect(self) -> socket.socket:
        for address in self._addresses:
            with contextlib.suppress(OSError):
                peer = socket.create_connection((address, self._port), _GREETING)
                if not _greet_as_fetcher(peer, self._token):
                    peer.close()
                    continue
                peer.settimeout(_SILENCE)
                with self._lock:
                    self._peer = peer
                    if self._is_cancelled:
                        peer.shutdown(socket.SHUT_RDWR)
                return peer
        where = f"port {self._port} at {', '.join(self._addresses)}"
        raise CheckpointError(f"no way to rank {self._holder}, which has it: {where}")

    def _manifest(self, peer: socket.socket) -> Manifest:
        (size,) = _SIZE.unpack(b"".join(map(bytes, self._chunks(peer, _SIZE.size))))
        manifest = Manifest.from_json(b"".join(map(bytes, self._chunks(peer, size))))
        for name in manifest.files:
            if not files.OURS.fullmatch(name):
                raise DamagedCheckpoint(f"the checkpoint of rank {self._holder} has a file {name!r}")
        return manifest

    def _chunks(self, peer: socket.socket, size: int) -> Iterator[memoryview]:
        """The next `size` bytes; each chunk is good until the next one is asked for.

        Raises:
            CheckpointError: they do not come.
        """
        chunk = memoryview(bytearray(min(size, _CHUNK)))
        while size:
            try:
                count = peer.recv_into(chunk[: min(size, _CHUNK)])
            except OSError as error:
                if isinstance(error, TimeoutError) and error.errno is None:
                    raise CheckpointError(f"rank {self._holder} has sent nothing for {_SILENCE:.0f} s") from None
                count = 0
            if not count:
                raise CheckpointError(f"the connection to rank {self._holder}, which has it, has ended")
            size -= count
            yield chunk[:count]


def _greet_as_holder(peer: socket.socket, token: bytes) -> bool:
    """Whether the other side knows the token; the token itself goes neither way."""
    theirs, ours = read(peer, _NONCE), secrets.token_bytes(_NONCE)
    peer.sendall(ours + _proof(token, b"holder", theirs, ours))
    return hmac.compare_digest(read(peer, _PROOF), _proof(token, b"fetcher", theirs, ours))


def _greet_as_fetcher(peer: socket.socket, token: bytes) -> bool:
    ours = secrets.token_bytes(_NONCE)
    peer.sendall(ours)
    theirs = read(peer, _NONCE)
    if not hmac.compare_digest(read(peer, _PROOF), _proof(token, b"holder", ours, theirs)):
        return False
    peer.sendall(_proof(token, b"fetcher", ours, theirs))
    return True


def _proof(token: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(token, who + b"".join(nonces), "sha256")
