"""Checkpoints: saved in the background, committed by all ranks or by none, and found again after any failure.

In a save, every rank copies its state to CPU memory; the training waits for this only. Then, in a thread, (1) the ranks
send their own states to rank 0 and agree on the step, (2) the writers write a folder with a temporary name, make it
durable and read it back, (3) when all have done so, they give it its name, (4) and then remove the oldest checkpoints.
If a rank fails before (3), the save fails on every rank, and the last checkpoint is kept.

For the format on disk, and how to read it with torch alone, see docs/checkpoints-format.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import operator
import os
import re
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from paceline._version import __version__
from paceline.contract.checkpoint import temporary_name
from paceline.contract.folder_lock import FolderLock, FolderTaken, holder_of
from paceline.train.group import sharded
from paceline.train.replicas.saved import Comparing

from . import disk_format, history
from .consensus import Agreement, Exchange, ExchangeError, SingleExchange, SocketExchange, find_writers
from .disk_format import FileRecord, Manifest, SavedCheckpoint
from .errors import CheckpointError, CheckpointFolderTaken
from .newest import Search
from .pieces import Shards, split
from .plain_state import unsafe_names, why_refused, why_unread
from .snapshots import Snapshot, Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from paceline.train.replicas.saved import Saved

    from .pieces import States

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "Exchange",
    "ExchangeError",
    "SavedCheckpoint",
    "SingleExchange",
    "SocketExchange",
]


PART = re.compile(r"(?!(rank|shard)-\d+$)[A-Za-z0-9_][A-Za-z0-9_.-]*")
_TAKEN = "stop that first, or choose another folder (checkpoint_dir=, --checkpoint-dir)"
log = logging.getLogger("paceline")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory. `world_size` is that of the run that saved it.

    `shared_state` has the parts that were given to `save`, where `shards` has the numbers of what is sharded;
    `rank_state` is None for a rank that did not exist then. If it has `weights_only`, it was imported: the tensors of
    its only part, `model`, are mapped into memory, and there is no `rank_state`.
    """

    path: Path
    step: int
    world_size: int
    shared_state: States
    rank_state: Any | None
    shards: Shards = field(default_factory=lambda: Shards([], _map))
    weights_only: bool = False


class _Head(TypedDict):
    """What a rank says before it saves."""

    step: int
    serial: int
    sum: str
    files: dict[str, int]  # their bytes, which follow
    sharded: str
    shard: int | None  # bytes of what it writes itself


class _Ticket(TypedDict):
    """What rank 0 answers: names are keys, also of ranks, as JSON has it."""

    id: str
    serial: int
    sizes: dict[str, int]
    shards: dict[str, int]
    equal: bool


class CheckpointStore:
    """The checkpoints in one folder that all ranks share, or in several folders, each with a complete copy.

    Every rank makes a store and calls the same methods in the same order. The constructor, `save`, `latest` and `load`
    are collectives of all ranks; the constructor finds out which ranks share a folder. One thread uses a store.

    Attributes:
        last_saved_step: the step that this store has committed last; None before the first.
        follows: whether an earlier store of this process has saved into the folder.
        lost: why the checkpoint that was saved last is not on the disk; None if it is, or is being written. The same on
            all ranks when no save is under way.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        exchange: Exchange,
        keep: int = 3,  # during a save, there is one more on the disk
        required: bool = True,  # whether a full or failing disk is an error; else rank 0 warns, and the next save tries
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least one checkpoint must be kept")
        self.folder = Path(folder).absolute()
        self.last_saved_step: int | None = None
        self.follows = history.has_saved(self.folder)
        self.lost: CheckpointError | None = None
        self._required = required
        self._rank = rank
        self._world_size = world_size
        self._keep = keep
        self._exchange = exchange
        self._agreement = Agreement(exchange, rank, world_size)
        writers = find_writers(self.folder, rank, self._agreement)
        self._is_one_folder = len({*writers}) == 1
        self._writes = writers[rank] == rank
        self._search = Search(self.folder, rank, writers, self._agreement)
        self._lock: FolderLock | None = None
        self._holds, self._lost_folder = False, ""  # or why nothing may be saved any more; the same on all ranks
        self._jobs: list[str] = []  # the PACELINE_JOB_ID of all ranks, each once: nodes started by hand have several
        self._serial = 0  # of the checkpoint that this store has loaded or saved last
        self._staging = Staging()
        self._sharded = ""  # a digest of which tensors are sharded, see `pieces`
        # One thread for all saves: starting a thread would wait until it runs, and then until it releases the GIL.
        self._background = ThreadPoolExecutor(1, "paceline-checkpoint")
        self._saving: Future[None] | None = None

    def hold(self) -> None:
        """Lock the folder until `close`, so that other jobs cannot save into it. All ranks must call this.

        `save` does this by itself, and so does `latest` if it copies a checkpoint to a folder. Reading needs no lock.
        On a file system without locks, this does nothing.
        """
        self._hold(f"cannot save checkpoints in {self.folder}")

    def _hold(self, failed: str) -> None:
        if self._lost_folder:
            raise CheckpointFolderTaken(self._lost_folder)
        if self._holds:
            return
        own = os.environ.get("PACELINE_JOB_ID", "").encode()
        try:
            self._jobs = self._agreement.decide(own, lambda ids: b" ".join({*ids})).decode().split()
            self._agreement.together(failed, self._take_folder)
        except CheckpointError:
            self._release()
            raise
        self._holds = True

    def _take_folder(self) -> None:
        """Lock this rank's folder if this rank writes there."""
        if self._writes and self._lock is None:
            try:
                self._lock = FolderLock(self.folder, self._rank, self._jobs)
            except FolderTaken as error:
                raise CheckpointFolderTaken(f"held by {error}; {_TAKEN}") from None

    def _keep_folder(self, serial: int) -> None:
        """Check that no later attempt has taken the folder over, as from a machine that did not answer for a while."""
        if self._lock is None or self._lock.is_kept():
            return
        self._lock.release()
        self._lock, holder = None, holder_of(self.folder)
        if holder is not None or serial > self._serial:
            by = "another run has saved there meanwhile" if holder is None else f"held by {holder} now"
            raise CheckpointFolderTaken(f"{by}; {_TAKEN}")
        self._take_folder()  # somebody has just removed the file

    def _release(self) -> None:
        lock, self._lock, self._holds = self._lock, None, False
        if lock is not None:
            lock.release()

    def save(
        self,
        step: int,
        shared_state: Mapping[str, object],
        rank_state: object,
        block: bool = False,
        compared: Saved | None = None,
    ) -> None:
        """Save a checkpoint in the background. Returns when the states are copied, so that they may change again.

        If the previous save still runs, this waits for it: no save is skipped. Errors in the background are raised by
        the next call of any method, the same on all ranks; the store can be used afterwards. For those of a disk, see
        `required`.
        """
        self.wait()
        sums = compared.of(shared_state.__getitem__) if compared and (compared.at_once or not self._writes) else None
        staged: dict[str, Snapshot] | CheckpointError
        try:
            staged = self._staging.stage(self._states(shared_state, rank_state))
        except CheckpointError as error:
            staged = error  # the other ranks wait for it
        self._start(step, staged, block, Comparing(compared, sums) if compared else None)

    def refuse(self, step: int, why: CheckpointError) -> None:
        """Make this save fail on all ranks. A rank that cannot save its state calls this instead of `save`."""
        self.wait()
        self._start(step, why, block=True)

    def _start(
        self,
        step: int,
        staged: dict[str, Snapshot] | CheckpointError,
        block: bool,
        comparing: Comparing | None = None,
    ) -> None:
        self._saving = self._background.submit(self._save, step, staged, comparing)
        if block or isinstance(staged, CheckpointError):
            self.wait()

    def wait(self) -> None:
        """Wait for a save in the background."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def latest(self) -> SavedCheckpoint | None:
        """The newest intact checkpoint, the same on all ranks; None if there is none. Every checksum is verified.

        The newest is the one committed last, in any folder; folders that lack it get it from one that has it. A damaged
        checkpoint is skipped with one warning from the logger `paceline`.
        """
        self.wait()
        newest = self._search.newest(self.hold)
        self._serial = 0 if newest is None else newest.manifest.serial
        return newest

    def begins_with_weights(self) -> bool:
        """Whether the newest checkpoint was imported, as far as names and sizes show; the same on all ranks."""
        self.wait()
        return self._search.is_weights_only()

    def load(self, map_location: torch.device | str = "cpu") -> Checkpoint | None:
        """Read the newest intact checkpoint; None if there is none. See `latest`."""
        saved = self.latest()
        if saved is None:
            self._check_never_saved()
            return None
        history.used(self.folder)

        def read_all() -> Checkpoint:
            is_imported = saved.manifest.weights_only
            shared = {
                n: _map(saved.path / file) if is_imported else _read(saved.path / file, map_location)
                for n, file in disk_format.shared_files(saved.manifest).items()
            }
            own = disk_format.rank_file(self._rank)
            rank_state = _read(saved.path / own, "cpu") if own in saved.manifest.files else None
            shards = Shards([saved.path / name for name in disk_format.shard_files(saved.manifest)], _map)
            ranks = saved.manifest.world_size
            return Checkpoint(saved.path, saved.step, ranks, shared, rank_state, shards, is_imported)

        return self._agreement.together(f"cannot load {saved.path}", read_all)

    def read_again(self, found: Checkpoint, map_location: torch.device | str = "cpu", *, whole: bool) -> Checkpoint:
        """Read a checkpoint that `load` has returned once more. All ranks must call this."""

        def read_all() -> Checkpoint:
            names = found.shared_state if whole else ()
            shared = {name: _read(found.path / f"{name}.pt", map_location) for name in names}
            own = None if found.rank_state is None else _read(found.path / disk_format.rank_file(self._rank), "cpu")
            return dataclasses.replace(found, shared_state=shared, rank_state=own)

        return self._agreement.together(f"cannot load {found.path}", read_all)

    def _check_never_saved(self) -> None:
        """Check that there is nothing to load because nothing was ever saved."""
        noted = history.noted(self.folder)
        if noted is not None and noted[1].name != self.folder.name and disk_format.scan(noted[1])[0]:
            if self._rank == 0:
                log.warning("%s has no checkpoint yet; step %d of this job is in %s", self.folder, *noted)
            noted = None
        steps = self._agreement.decide(
            b"" if noted is None else b"%d" % noted[0], lambda notes: max(notes, key=lambda it: int(it or 0))
        )
        if steps:
            job = os.environ.get("PACELINE_JOB", "JOB")
            raise CheckpointError(
                f"this job has saved step {steps.decode()}, and there is no checkpoint in {self.folder} any more; "
                f"restore it, or start again without it: paceline resubmit --fresh {job}"
            )

    def rank_states(self, found: Checkpoint) -> list[Any]:
        """The own states of all ranks that saved a checkpoint, in rank order, on the CPU. All ranks must call this."""
        names = [disk_format.rank_file(rank) for rank in range(found.world_size)]
        return self._agreement.together(
            f"cannot load {found.path}", lambda: [_read(found.path / name, "cpu") for name in names]
        )

    def close(self) -> None:
        """Wait for a save in the background, release its memory, and unlock the folder. The exchange stays open."""
        try:
            self.wait()
        finally:
            self._staging.close()
            self._release()

    def disconnect(self) -> None:
        """Close the connections to the other ranks; nothing can be saved or loaded afterwards."""
        self._exchange.close()

    # What follows runs in the thread of a save.

    def _save(self, step: int, staged: dict[str, Snapshot] | CheckpointError, comparing: Comparing | None) -> None:
        try:
            self._save_now(step, staged, comparing)
        except CheckpointError as error:
            if self._holds and isinstance(error, CheckpointFolderTaken):
                self._lost_folder = str(error)
            if self._required or not error.by_disk:
                raise
            self.lost = CheckpointError(f"{error}; {self._kept()}", by_disk=True)
            if self._rank == 0:
                log.warning("%s; the training goes on, and the next save tries again", self.lost)
        else:
            if self.lost is not None and self._rank == 0:
                log.warning("checkpoints can be saved again: step %d is in %s", step, self.folder)
            self.lost = None

    def _kept(self) -> str:
        """What is kept when a save fails."""
        try:
            steps = [saved.step for saved in disk_format.scan(self.folder)[0] if not saved.damage]
        except CheckpointError:
            steps = []
        return f"the checkpoint of step {steps[0]} is kept" if steps else "there is no checkpoint"

    def _save_now(self, step: int, staged: dict[str, Snapshot] | CheckpointError, comparing: Comparing | None) -> None:
        failed = f"cannot save step {step} in {self.folder}"
        self._hold(failed)
        message = self._agreement.together(failed, lambda: self._message(step, staged, comparing))
        assert not isinstance(staged, CheckpointError)  # it would have been raised above
        ticket, files = self._collect(failed, message)
        if comparing is not None and not ticket["equal"]:
            comparing.explain(self._agreement.decide, f"at the checkpoint of step {step}", self.last_saved_step)
        temporary = temporary_name(self.folder, step, ticket["id"])
        try:
            self._write(temporary, step, staged, ticket, files)
            self._agreement.together(failed, lambda: self._commit(temporary, step, ticket["serial"]))
        except CheckpointError:
            if self._writes:
                with contextlib.suppress(OSError):
                    disk_format.discard(temporary)
            raise
        self.last_saved_step, self._serial = step, ticket["serial"]
        history.used(self.folder, saved=True)
        if self._writes:
            history.note(step, self.folder)
            self._prune()

    def _message(self, step: int, staged: dict[str, Snapshot] | CheckpointError, comparing: Comparing | None) -> bytes:
        """This rank's message to rank 0: a line of JSON, then the files that others are to write for it."""
        if isinstance(staged, CheckpointError):
            raise staged
        serial = 0
        if self._writes:
            serial = max((saved.manifest.serial for saved in disk_format.scan(self.folder)[0]), default=0)
            self._keep_folder(serial)
            disk_format.remove_leftovers(self.folder)
        files = {}
        own, shard = disk_format.rank_file(self._rank), disk_format.shard_file(self._rank)
        for name in (own,) if self._is_one_folder else (own, shard):
            if name in staged:
                file = io.BytesIO()
                torch.save(staged[name].rebuild(), file)
                names = unsafe_names(file)
                if names:
                    raise CheckpointError(f"{name}: {why_refused(staged[name].rebuild(), names)}")
                files[name] = file.getvalue()
        head: _Head = {
            "step": step,
            "serial": serial,
            "sum": "" if comparing is None else comparing.digest(lambda part: staged[f"{part}.pt"].rebuild()),
            "files": {name: len(content) for name, content in files.items()},
            "sharded": self._sharded,
            "shard": staged[shard].size if shard in staged and shard not in files else None,
        }
        return json.dumps(head).encode() + b"\n" + b"".join(files.values())

    def _collect(self, failed: str, message: bytes) -> tuple[_Ticket, dict[str, bytes]]:
        """The id and serial of the checkpoint, and, on ranks that write, the files of all ranks that they write."""
        files: dict[str, bytes] = {}

        def rule(messages: list[bytes]) -> bytes:
            heads: list[_Head] = []
            for each in messages:
                line, _, body = each.partition(b"\n")
                heads.append(json.loads(line))
                files.update(_cut(heads[-1]["files"], body))
            for rank, head in enumerate(heads):
                if head["step"] != heads[0]["step"]:
                    raise CheckpointError(
                        f"{failed}: rank {rank} saves step {head['step']} and rank 0 step {heads[0]['step']}; "
                        "all ranks must save after the same step"
                    )
                if head["sharded"] != heads[0]["sharded"]:
                    raise CheckpointError(
                        f"{failed}: other tensors are sharded on rank {rank} than on rank 0; all ranks must shard "
                        "the same"
                    )
            ticket: _Ticket = {
                "id": uuid.uuid4().hex,
                "serial": 1 + max(head["serial"] for head in heads),
                "sizes": {name: len(content) for name, content in files.items()},
                "shards": {str(rank): head["shard"] for rank, head in enumerate(heads) if head["shard"] is not None},
                "equal": len({head["sum"] for head in heads}) == 1,
            }
            return b"\n".join([json.dumps(ticket).encode(), b"" if self._is_one_folder else b"".join(files.values())])

        head, _, body = self._agreement.decide(message, rule).partition(b"\n")
        ticket: _Ticket = json.loads(head)
        return ticket, files if self._is_one_folder else dict(_cut(ticket["sizes"], body))

    def _write(
        self, temporary: Path, step: int, staged: dict[str, Snapshot], ticket: _Ticket, files: dict[str, bytes]
    ) -> None:
        """Write the files of this rank, all ranks at the same time; those that write a folder describe it."""
        failed = f"cannot save step {step} in {self.folder}"
        own, shard = disk_format.rank_file(self._rank), disk_format.shard_file(self._rank)
        mine = {name: snapshot for name, snapshot in staged.items() if name not in (own, shard)}
        needed = sum(map(operator.attrgetter("size"), mine.values())) + sum(ticket["sizes"].values())
        needed += sum(ticket["shards"].values())
        records: dict[str, FileRecord] = {}

        def begin() -> None:
            if self._writes:
                disk_format.make_temporary(temporary, needed)

        def write() -> None:
            if str(self._rank) in ticket["shards"]:
                records[shard] = disk_format.write_file(temporary / shard, staged[shard].rebuild())
            if self._writes:
                records.update({n: disk_format.write_file(temporary / n, s.rebuild()) for n, s in mine.items()})
                records.update({n: disk_format.write_file(temporary / n, content) for n, content in files.items()})

        def describe() -> None:
            if self._writes:
                manifest = Manifest(
                    id=ticket["id"],
                    serial=ticket["serial"],
                    step=step,
                    world_size=self._world_size,
                    paceline=__version__,
                    torch=torch.__version__,
                    saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    files=records,
                )
                disk_format.write_manifest(temporary, manifest)

        def together(*parts: Callable[[], None]) -> None:
            def work() -> None:
                try:
                    for part in parts:
                        part()
                except OSError as error:
                    raise CheckpointError(disk_format.describe(error, self.folder, needed), by_disk=True) from error

            self._agreement.together(failed, work)

        if not ticket["shards"]:  # then nobody waits for another rank's folder or records
            together(begin, write, describe)
            return
        together(begin)
        together(write)
        shards = self._agreement.decide(
            json.dumps({shard: asdict(records[shard])} if shard in records else {}).encode(),
            lambda votes: json.dumps({name: it for vote in votes for name, it in json.loads(vote).items()}).encode(),
        )
        records.update({name: FileRecord(**record) for name, record in json.loads(shards).items()})
        together(describe)

    def _commit(self, temporary: Path, step: int, serial: int) -> None:
        if self._writes:
            self._keep_folder(serial - 1)
            disk_format.commit(temporary, self.folder, step)

    def _prune(self) -> None:
        """Remove all but the `keep` newest. A failure is logged, and tried again after the next save."""
        try:
            found, _ = disk_format.scan(self.folder)
            good = [saved for saved in found if not saved.damage and saved.path not in self._search.damaged]
            for saved in found:
                if len(good) >= self._keep and saved.manifest.serial < good[self._keep - 1].manifest.serial:
                    disk_format.remove(saved)
        except (OSError, CheckpointError) as error:
            log.warning("cannot remove old checkpoints in %s: %s", self.folder, error)

    # What follows runs in the training's thread.

    def _states(self, shared_state: Mapping[str, object], rank_state: object) -> dict[str, object]:
        """The states that this rank must copy, by the names of their files."""
        for part, state in shared_state.items():
            if not PART.fullmatch(part):
                raise CheckpointError(f"the part {part!r} of the shared state cannot be the name of a file")
            found = sharded.in_state(state, part, sharded.old_kind_of)
            if found is not None:
                raise CheckpointError(sharded.why_refused(part, found))
        whole, pieces, self._sharded = split(shared_state)
        shared = {f"{part}.pt": state for part, state in whole.items()} if self._writes else {}
        own = {disk_format.shard_file(self._rank): pieces} if pieces else {}
        return {**shared, **own, disk_format.rank_file(self._rank): rank_state}


def _cut(sizes: Mapping[str, int], content: bytes) -> Iterator[tuple[str, bytes]]:
    """Files that follow each other, with their names."""
    file = io.BytesIO(content)
    for name, size in sizes.items():
        yield name, file.read(size)


def _map(file: Path) -> Any:
    """Map a file of a checkpoint into memory, without running code from it."""
    return _read(file, "cpu", mmap=True)


def _read(file: Path, device: torch.device | str, *, mmap: bool = False) -> Any:
    """Read a file of a checkpoint, without running code from it."""
    try:
        return torch.load(file, map_location=device, weights_only=True, mmap=mmap)
    except Exception as error:  # unpickling may raise anything
        names = unsafe_names(file)
        why = why_unread(names) if names else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file.name}: {why}") from error
