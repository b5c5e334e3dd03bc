"""Checkpoints: saved in the background, committed by all ranks or by none, found again after any death.

What happens in a save, on every rank: its state is copied to CPU memory (all that the training waits for); then, in a
thread, (1) the ranks hand their own states to rank 0 and agree on the step, (2) the writers write a folder without a
name, make it durable and read it back, (3) when all have done so, they give it its name, (4) and then remove the
oldest. A rank that fails anywhere before (3) fails the save on every rank and leaves the last checkpoint as it is.

How a checkpoint looks on disk, and how plain torch reads it: docs/checkpoints.md.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline._version import __version__
from paceline.contract.folder_lock import FolderLock, FolderTaken

from . import files, history
from .errors import CheckpointError, CheckpointFolderTaken
from .exchange import Agreement, Exchange, ExchangeError, SingleExchange, SocketExchange
from .files import Manifest, SavedCheckpoint
from .folders import find_writers
from .plain_state import unsafe_names, why_refused, why_unread
from .search import Search
from .staging import Snapshot, Staging

if TYPE_CHECKING:
    from collections.abc import Mapping

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


PART = re.compile(r"(?!rank-\d+$)[A-Za-z0-9_][A-Za-z0-9_.-]*")
log = logging.getLogger("paceline")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory. `world_size` is that of the run that saved it.

    `shared_state` has the parts that were given to `save`; `rank_state` is None for a rank that did not exist then.
    """

    path: Path
    step: int
    world_size: int
    shared_state: dict[str, Any]
    rank_state: Any | None


class CheckpointStore:
    """The checkpoints in one folder that all ranks share, or in several: then each has a whole copy.

    Every rank makes a store and calls the same methods in the same order; making one, `save`, `latest` and `load`
    take part of all ranks, and making one finds out which ranks share a folder. A store is used by one thread.

    Args:
        folder: where the checkpoints are, as this rank sees it; made if need be.
        rank: this rank.
        world_size: the number of ranks.
        exchange: how the ranks agree: `SingleExchange()` or `SocketExchange()`.
        keep: how many checkpoints to keep, at least 1. While saving there is one more on the disk.

    Raises:
        CheckpointError: a folder cannot be written; the same on all ranks.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        exchange: Exchange,
        keep: int = 3,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least one checkpoint must be kept")
        self.folder = Path(folder).absolute()
        self.last_saved_step: int | None = None  # what this store committed last
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
        self._holds = False  # the same on all ranks
        self._staging = Staging()
        # One thread for all saves: starting one would wait until it runs, and then until it gives Python back.
        self._background = ThreadPoolExecutor(1, "paceline-checkpoint")
        self._saving: Future[None] | None = None

    def hold(self) -> None:
        """Keep other jobs from saving into the folder until `close`; all ranks call it.

        `save` does it by itself, as does `latest` where it brings a checkpoint into a folder. Reading needs no hold.
        On a file system without locks it does nothing.

        Raises:
            CheckpointFolderTaken: another job saves there; the same on all ranks.
            CheckpointError: a folder cannot be written; the same on all ranks.
        """
        self._hold(f"cannot save checkpoints in {self.folder}")

    def _hold(self, failed: str) -> None:
        if self._holds:
            return
        own = os.environ.get("PACELINE_JOB_ID", "").encode()
        try:
            jobs = self._agreement.decide(own, lambda ids: b" ".join({*ids})).decode().split()
            taken = self._agreement.together(failed, lambda: self._take_folder(jobs))
            first = self._agreement.decide(taken.encode(), lambda reasons: next(filter(None, reasons), b""))
            if first:
                raise CheckpointFolderTaken(first.decode())
        except CheckpointError:
            self._release()
            raise
        self._holds = True

    def _take_folder(self, jobs: list[str]) -> str:
        """Take this rank's folder if it writes there; returns why it may not.

        Args:
            jobs: the PACELINE_JOB_ID of all ranks, each once: nodes that are started by hand have one each.
        """
        if self._writes and self._lock is None:
            try:
                self._lock = FolderLock(self.folder, self._rank, jobs)
            except FolderTaken as error:
                return (
                    f"{self._agreement.who}cannot save checkpoints in {self.folder}: held by {error}; "
                    "stop that first, or choose another folder (checkpoint_dir=, --checkpoint-dir)"
                )
        return ""

    def _release(self) -> None:
        lock, self._lock, self._holds = self._lock, None, False
        if lock is not None:
            lock.release()

    def save(self, step: int, shared_state: Mapping[str, object], rank_state: object, block: bool = False) -> None:
        """Save a checkpoint in the background. Returns when the states are copied, and may be changed again.

        A save that still runs is waited for first: none is skipped, so a checkpoint exists for every call. Errors of
        the background are raised by the next call of any method, on all ranks alike; the store stays usable after.

        Args:
            step: the number of optimizer steps done.
            shared_state: the parts of the state that all ranks have alike, such as model and optimizer, each for a
                file of its own; names are letters, digits, and `_`, `.`, `-`. Looked at on ranks that write only.
            rank_state: what this rank alone has, such as random states. Small: it goes through rank 0. Both must be
                such as `torch.load(..., weights_only=True)` reads.
            block: return when the checkpoint is committed, and raise what went wrong.

        Raises:
            CheckpointFolderTaken: the last save, or with `block` this one, found that another job saves there.
            CheckpointError: the last save failed, this one's states cannot be copied, or, with `block`, it failed.
        """
        self.wait()
        staged: dict[str, Snapshot] | CheckpointError
        try:
            staged = self._staging.stage(self._states(shared_state, rank_state))
        except CheckpointError as error:
            staged = error  # the other ranks wait to hear of it
        self._saving = self._background.submit(self._save, step, staged)
        if block or isinstance(staged, CheckpointError):
            self.wait()

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: it failed.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def latest(self) -> SavedCheckpoint | None:
        """The newest whole checkpoint, the same on all ranks; None where there is none. Every checksum is verified.

        Newest is what was committed last, in whatever folder; the folders that lack it get it from one that has it. A
        damaged one is skipped with one warning from the logger `paceline`.

        Raises:
            CheckpointError: all checkpoints are damaged, one did not arrive in some folder, or one has an unknown
                format; the same on all ranks.
        """
        self.wait()
        return self._search.newest(self.hold)

    def load(self, map_location: torch.device | str = "cpu") -> Checkpoint | None:
        """Read the newest whole checkpoint; None where there is none. See `latest`.

        Args:
            map_location: the device for the tensors of the shared state; those of the rank's state stay on the CPU,
                where torch wants its random states.

        Raises:
            CheckpointError: it cannot be read although it is whole, for example because a class in it is not marked
                with `torch.serialization.add_safe_globals` here; the same on all ranks. No code from it is run.
        """
        saved = self.latest()
        if saved is None:
            self._check_never_saved()
            return None

        def read_all() -> Checkpoint:
            shared = {
                n: _read(saved.path / file, map_location) for n, file in files.shared_files(saved.manifest).items()
            }
            own = files.rank_file(self._rank)
            rank_state = _read(saved.path / own, "cpu") if own in saved.manifest.files else None
            return Checkpoint(saved.path, saved.step, saved.manifest.world_size, shared, rank_state)

        return self._agreement.together(f"cannot load {saved.path}", read_all)

    def _check_never_saved(self) -> None:
        """See that there is nothing to load because nothing was ever saved.

        Raises:
            CheckpointError: this job, or the one that it resumes, has saved checkpoints; the same on all ranks.
        """
        step = history.noted(self.folder)
        steps = self._agreement.decide(
            b"" if step is None else b"%d" % step, lambda notes: max(notes, key=lambda it: int(it or 0))
        )
        if steps:
            job = os.environ.get("PACELINE_JOB", "JOB")
            raise CheckpointError(
                f"this job has saved step {steps.decode()}, and there is no checkpoint in {self.folder} any more; "
                f"bring it back, or begin anew: paceline resubmit --fresh {job}"
            )

    def rank_states(self, found: Checkpoint) -> list[Any]:
        """The own states of all ranks that saved a checkpoint, in their order; on the CPU. All ranks call it.

        Raises:
            CheckpointError: one cannot be read; the same on all ranks.
        """
        names = [files.rank_file(rank) for rank in range(found.world_size)]
        return self._agreement.together(
            f"cannot load {found.path}", lambda: [_read(found.path / name, "cpu") for name in names]
        )

    def close(self) -> None:
        """Wait for a save in the background; give its memory back, and the folder free. The exchange stays open.

        Raises:
            CheckpointError: the save failed.
        """
        try:
            self.wait()
        finally:
            self._staging.close()
            self._release()

    def disconnect(self) -> None:
        """End the connections to the other ranks; nothing can be saved or loaded afterwards."""
        self._exchange.close()

    # What follows runs in the thread of a save.

    def _save(self, step: int, staged: dict[str, Snapshot] | CheckpointError) -> None:
        failed = f"cannot save step {step} in {self.folder}"
        self._hold(failed)
        message = self._agreement.together(failed, lambda: self._message(step, staged))
        assert not isinstance(staged, CheckpointError)  # or it was raised just now
        ticket, states = self._collect(failed, message)
        temporary = files.temporary_name(self.folder, step, ticket["id"])
        try:
            self._agreement.together(failed, lambda: self._write(temporary, step, staged, ticket, states))
        except CheckpointError:
            if self._writes:
                with contextlib.suppress(OSError):
                    files.remove_leftovers(self.folder)
            raise
        self._agreement.together(failed, lambda: files.commit(temporary, self.folder, step) if self._writes else None)
        self.last_saved_step = step
        if self._writes:
            history.note(step, self.folder)
            self._prune()

    def _message(self, step: int, staged: dict[str, Snapshot] | CheckpointError) -> bytes:
        """What rank 0 must know of this rank: a line of JSON, then the rank's own state as `torch.save` writes it."""
        if isinstance(staged, CheckpointError):
            raise staged
        serial = 0
        if self._writes:
            files.remove_leftovers(self.folder)
            serial = max((saved.manifest.serial for saved in files.scan(self.folder)[0]), default=0)
        own, state = files.rank_file(self._rank), io.BytesIO()
        torch.save(staged[own].rebuild(), state)
        names = unsafe_names(state)
        if names:
            raise CheckpointError(f"{own}: {why_refused(staged[own].rebuild(), names)}")
        return json.dumps({"step": step, "serial": serial}).encode() + b"\n" + state.getvalue()

    def _collect(self, failed: str, message: bytes) -> tuple[dict[str, Any], list[bytes]]:
        """The id and serial of the checkpoint, and on ranks that write every rank's state."""
        states: list[bytes] = []

        def rule(messages: list[bytes]) -> bytes:
            heads = []
            for each in messages:
                head, _, state = each.partition(b"\n")
                heads.append(json.loads(head))
                states.append(state)
            for rank, head in enumerate(heads):
                if head["step"] != heads[0]["step"]:
                    raise CheckpointError(
                        f"{failed}: rank {rank} saves step {head['step']} and rank 0 step {heads[0]['step']}; "
                        "all ranks must save after the same step"
                    )
            ticket = {
                "id": uuid.uuid4().hex,
                "serial": 1 + max(head["serial"] for head in heads),
                "sizes": [len(state) for state in states],
            }
            return b"\n".join([json.dumps(ticket).encode(), b"".join(states) if not self._is_one_folder else b""])

        head, _, body = self._agreement.decide(message, rule).partition(b"\n")
        ticket: dict[str, Any] = json.loads(head)
        if not self._is_one_folder:
            file = io.BytesIO(body)
            states = [file.read(size) for size in ticket["sizes"]]
        return ticket, states

    def _write(
        self, temporary: Path, step: int, staged: dict[str, Snapshot], ticket: dict[str, Any], states: list[bytes]
    ) -> None:
        if not self._writes:
            return
        own = files.rank_file(self._rank)
        needed = sum(t.nbytes for s in staged.values() for t in s.tensors) + sum(ticket["sizes"])
        try:
            files.make_temporary(temporary)
            records = {n: files.write_file(temporary / n, s.rebuild()) for n, s in staged.items() if n != own}
            for rank, state in enumerate(states):
                name = files.rank_file(rank)
                records[name] = files.write_file(temporary / name, state)
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
            files.write_manifest(temporary, manifest)
        except OSError as error:
            with contextlib.suppress(OSError):
                files.remove_leftovers(self.folder)
            raise CheckpointError(files.describe(error, self.folder, needed)) from error

    def _prune(self) -> None:
        """Remove what is older than the `keep` newest; a failure is told, and tried again after the next save."""
        try:
            found, _ = files.scan(self.folder)
            good = [saved for saved in found if not saved.damage and saved.path not in self._search.damaged]
            for saved in found:
                if len(good) >= self._keep and saved.manifest.serial < good[self._keep - 1].manifest.serial:
                    files.remove(saved)
        except (OSError, CheckpointError) as error:
            log.warning("cannot remove old checkpoints in %s: %s", self.folder, error)

    # What follows runs in the training's thread.

    def _states(self, shared_state: Mapping[str, object], rank_state: object) -> dict[str, object]:
        """What this rank must copy, by the names of the files it will be in."""
        for part in shared_state:
            if not PART.fullmatch(part):
                raise CheckpointError(f"the part {part!r} of the shared state cannot be the name of a file")
        shared = {f"{part}.pt": state for part, state in shared_state.items()} if self._writes else {}
        return {**shared, files.rank_file(self._rank): rank_state}


def _read(file: Path, device: torch.device | str) -> Any:
    """Read a file of a checkpoint; runs no code from it."""
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # unpickling raises anything
        names = unsafe_names(file)
        why = why_unread(names) if names else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file.name}: {why}") from error
