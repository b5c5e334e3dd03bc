"""Checkpoints: saved in the background, committed by all ranks or by none, found again after any death.

What happens in a save, on every rank: its state is copied to CPU memory (all that the training waits for); then, in a
thread, (1) the ranks hand their own states to rank 0 and agree on the step, (2) the writers write a folder without a
name, make it durable and read it back, (3) when all have done so, they give it its name, (4) and then remove the
oldest. A rank that fails anywhere before (3) fails the save on every rank and leaves the last checkpoint as it is.

How a checkpoint looks on disk, and how plain torch reads it: docs/checkpoints.md.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import re
import tempfile
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

import paceline
from paceline.train import checkpoint_files as files
from paceline.train.checkpoint_exchange import Agreement, Exchange, ExchangeError, SingleExchange, SocketExchange
from paceline.train.checkpoint_files import CheckpointError, DamagedCheckpoint, Manifest, SavedCheckpoint
from paceline.train.checkpoint_staging import Snapshot, Staging

if TYPE_CHECKING:
    import os
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
    """The checkpoints in one folder.

    Every rank makes a store and calls the same methods in the same order; making one, `save`, `latest` and `load`
    take part of all ranks. A store is used by one thread.

    Args:
        folder: where the checkpoints are; made if need be.
        rank: this rank.
        world_size: the number of ranks.
        exchange: how the ranks agree: `SingleExchange()` or `SocketExchange()`.
        keep: how many checkpoints to keep, at least 1. While saving there is one more on the disk.
        writers: "rank0" writes one checkpoint, for a folder that all ranks share; "node" writes a whole one on every
            node, for a folder of the same name on each node's own disk.
        local_rank: this rank's number on its node; needed where `writers` is "node".

    Raises:
        CheckpointError: the folder cannot be written; the same on all ranks.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        exchange: Exchange,
        keep: int = 3,
        writers: Literal["rank0", "node"] = "rank0",
        local_rank: int | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least one checkpoint must be kept")
        if writers not in ("rank0", "node"):
            raise ValueError(f"writers is {writers!r}: it must be 'rank0' or 'node'")
        if writers == "node" and local_rank is None:
            raise ValueError("writers='node' needs local_rank")
        self.folder = Path(folder).absolute()
        self.last_saved_step: int | None = None  # what this store committed last
        self._rank = rank
        self._world_size = world_size
        self._keep = keep
        self._on_nodes = writers == "node"
        self._writes = rank == 0 or (self._on_nodes and local_rank == 0)
        self._agreement = Agreement(exchange, rank, world_size)
        self._staging = Staging()
        # One thread for all saves: starting one would wait until it runs, and then until it gives Python back.
        self._background = ThreadPoolExecutor(1, "paceline-checkpoint")
        self._saving: Future[None] | None = None
        self._damaged: set[str] = set()  # ids of checkpoints whose checksums were wrong
        self._told: set[str] = set()
        self._agreement.together(f"cannot write checkpoints to {self.folder}", self._prepare)

    def save(self, step: int, shared_state: Mapping[str, object], rank_state: object, block: bool = False) -> None:
        """Save a checkpoint in the background. Returns when the states are copied, and may be changed again.

        A save that still runs is waited for first: none is skipped, so a checkpoint exists for every call. Errors of
        the background are raised by the next call of any method, on all ranks alike; the store stays usable after.

        Args:
            step: the number of optimizer steps done.
            shared_state: the parts of the state that all ranks have alike, such as model and optimizer, each for a
                file of its own; names are letters, digits, and `_`, `.`, `-`. Looked at on ranks that write only.
            rank_state: what this rank alone has, such as random states. Small: it goes through rank 0.
            block: return when the checkpoint is committed, and raise what went wrong.

        Raises:
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

        Newest is what was committed last. A damaged one is skipped with one warning from the logger `paceline`.

        Raises:
            CheckpointError: all checkpoints are damaged, a rank does not see what rank 0 sees, or a checkpoint has an
                unknown format.
        """
        self.wait()
        found, unreadable = self._agreement.together("cannot look for checkpoints", lambda: files.scan(self.folder))
        while True:
            chosen = self._choose([saved for saved in found if not saved.damage])
            mine = next((saved for saved in found if saved.manifest.id == chosen), None)
            if self._writes:
                self._warn(unreadable)
                newer = found[: found.index(mine)] if mine else found
                self._warn({saved.path: saved.damage for saved in newer if saved.damage})
            if not chosen:
                self._agreement.together("cannot resume", functools.partial(self._expect_none, found, unreadable))
                return None
            damage = self._agreement.decide(json.dumps(self._verify(mine)).encode(), _first_damage).decode()
            if not damage:
                return mine
            self._damaged.add(chosen)
            path, _, reason = damage.partition(": ")
            if self._rank == 0:
                self._warn({Path(path): reason})

    def load(self, map_location: torch.device | str = "cpu") -> Checkpoint | None:
        """Read the newest whole checkpoint; None where there is none. See `latest`.

        Args:
            map_location: the device for the tensors of the shared state; those of the rank's state stay on the CPU,
                where torch wants its random states.

        Raises:
            CheckpointError: it cannot be read although it is whole, for example because a class of a registered
                object no longer exists; the same on all ranks.
        """
        saved = self.latest()
        if saved is None:
            return None

        def read(name: str, device: torch.device | str) -> Any:
            try:
                weights_only = saved.manifest.files[name].weights_only
                return torch.load(saved.path / name, map_location=device, weights_only=weights_only)
            except Exception as error:  # unpickling raises anything
                raise CheckpointError(f"{name}: {type(error).__name__}: {error}") from error

        def read_all() -> Checkpoint:
            shared = {part: read(name, map_location) for part, name in files.shared_files(saved.manifest).items()}
            own = files.rank_file(self._rank)
            rank_state = read(own, "cpu") if own in saved.manifest.files else None
            return Checkpoint(saved.path, saved.step, saved.manifest.world_size, shared, rank_state)

        return self._agreement.together(f"cannot load {saved.path}", read_all)

    def close(self) -> None:
        """Wait for a save in the background and give its memory back. The exchange stays open.

        Raises:
            CheckpointError: the save failed.
        """
        try:
            self.wait()
        finally:
            self._staging.close()

    # What follows runs in the thread of a save.

    def _save(self, step: int, staged: dict[str, Snapshot] | CheckpointError) -> None:
        failed = f"cannot save step {step} in {self.folder}"
        message = self._agreement.together(failed, lambda: self._message(step, staged))
        assert not isinstance(staged, CheckpointError)  # or it was raised just now
        ticket, states = self._collect(failed, message)
        temporary = self.folder / f".saving-step-{step:06d}-{ticket['id'][:8]}"
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
            self._prune()

    def _message(self, step: int, staged: dict[str, Snapshot] | CheckpointError) -> bytes:
        """What rank 0 must know of this rank: a line of JSON, then the rank's own state as `torch.save` writes it."""
        if isinstance(staged, CheckpointError):
            raise staged
        serial = 0
        if self._writes:
            files.remove_leftovers(self.folder)
            serial = max((saved.manifest.serial for saved in files.scan(self.folder)[0]), default=0)
        state = io.BytesIO()
        torch.save(staged[files.rank_file(self._rank)].rebuild(), state)
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
            return b"\n".join([json.dumps(ticket).encode(), b"".join(states) if self._on_nodes else b""])

        head, _, body = self._agreement.decide(message, rule).partition(b"\n")
        ticket: dict[str, Any] = json.loads(head)
        if self._on_nodes:
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
            temporary.mkdir()
            records = {n: files.write_file(temporary / n, s.rebuild()) for n, s in staged.items() if n != own}
            for rank, state in enumerate(states):
                name = files.rank_file(rank)
                records[name] = files.write_file(temporary / name, state)
            manifest = Manifest(
                id=ticket["id"],
                serial=ticket["serial"],
                step=step,
                world_size=self._world_size,
                paceline=paceline.__version__,
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
            good = [saved for saved in found if not saved.damage and saved.manifest.id not in self._damaged]
            for saved in found:
                if len(good) >= self._keep and saved.manifest.serial < good[self._keep - 1].manifest.serial:
                    files.remove(saved)
        except (OSError, CheckpointError) as error:
            log.warning("cannot remove old checkpoints in %s: %s", self.folder, error)

    # What follows runs in the training's thread.

    def _prepare(self) -> None:
        if self._writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass

    def _states(self, shared_state: Mapping[str, object], rank_state: object) -> dict[str, object]:
        """What this rank must copy, by the names of the files it will be in."""
        for part in shared_state:
            if not PART.fullmatch(part):
                raise CheckpointError(f"the part {part!r} of the shared state cannot be the name of a file")
        shared = {f"{part}.pt": state for part, state in shared_state.items()} if self._writes else {}
        return {**shared, files.rank_file(self._rank): rank_state}

    def _choose(self, found: list[SavedCheckpoint]) -> str:
        """The id of the newest checkpoint that every writer has; empty where there is none."""
        mine = [[s.manifest.serial, s.step, s.manifest.id] for s in found if s.manifest.id not in self._damaged]

        def rule(votes: list[bytes]) -> bytes:
            lists = [[tuple(entry) for entry in vote] for vote in map(json.loads, votes) if vote is not None]
            common = set(lists[0]).intersection(*lists[1:])
            if common:
                return str(max(common)[2]).encode()
            if not any(lists):
                return b""
            ranks = [rank for rank, vote in enumerate(votes) if json.loads(vote) == []]
            raise CheckpointError(
                f"no checkpoint in {self.folder} is on every node (none at all on those of ranks {ranks}): "
                "copy one to all nodes, or remove all to start anew"
            )

        return self._agreement.decide(json.dumps(mine if self._writes else None).encode(), rule).decode()

    def _verify(self, saved: SavedCheckpoint | None) -> list[str]:
        """What is wrong with the files that this rank needs, and its kind: "", "damaged" or "missing"."""
        if saved is None:
            return ["missing", f"{self._agreement.who}does not find the checkpoint that rank 0 finds in {self.folder}"]
        needed = {*files.shared_files(saved.manifest).values(), files.rank_file(self._rank)}
        try:
            for name, record in saved.manifest.files.items():
                if self._writes or name in needed:
                    files.verify_file(saved.path / name, record)
        except DamagedCheckpoint as error:
            return ["damaged", f"{saved.path}: {error}"]
        return ["", ""]

    def _expect_none(self, found: list[SavedCheckpoint], unreadable: Mapping[Path, str]) -> None:
        """See that there is no checkpoint because none was ever made."""
        damaged = len(unreadable) + sum(1 for saved in found if saved.damage or saved.manifest.id in self._damaged)
        if damaged:
            which = (
                f"all {damaged} checkpoints in {self.folder} are damaged"
                if damaged > 1
                else (f"the only checkpoint in {self.folder} is damaged")
            )
            raise CheckpointError(f"{which}; move the folder away to start from the beginning")

    def _warn(self, damaged: Mapping[Path, str]) -> None:
        """Tell once of each checkpoint that does not count."""
        for path, reason in damaged.items():
            line = f"checkpoint {path} is damaged and not used: {reason}"
            if line not in self._told:
                self._told.add(line)
                log.warning(line)


def _first_damage(votes: list[bytes]) -> bytes:
    verdicts = [json.loads(vote) for vote in votes]
    for kind, text in verdicts:
        if kind == "missing":
            raise CheckpointError(f"{text}: the folder must be one that all ranks share, or writers='node'")
    return next((text for kind, text in verdicts if kind), "").encode()
