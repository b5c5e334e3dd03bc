"""Finds the newest intact checkpoint, the same on all ranks, and copies it to the folders that lack it."""

from __future__ import annotations

import functools
import json
import logging
from typing import TYPE_CHECKING, Any

from . import disk_format
from .disk_format import SavedCheckpoint
from .errors import CheckpointError, DamagedCheckpoint
from .replication import spread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from .consensus import Agreement

log = logging.getLogger("paceline")


class Search:
    """Finds the newest checkpoint in the folders of all ranks.

    Attributes:
        damaged: paths of checkpoints whose checksums are wrong.
    """

    def __init__(self, folder: Path, rank: int, writers: list[int], agreement: Agreement) -> None:
        self.damaged: set[Path] = set()
        self._folder = folder
        self._rank = rank
        self._writers = writers  # of each rank's folder
        self._writes = writers[rank] == rank
        self._agreement = agreement
        self._logged: set[str] = set()

    def newest(self, hold: Callable[[], None]) -> SavedCheckpoint | None:
        """The newest checkpoint, verified, in this rank's folder; None if there is none. All ranks must call this."""
        found, unreadable = self._agreement.together(
            "cannot look for checkpoints", lambda: disk_format.scan(self._folder)
        )
        while True:
            whole = [saved for saved in found if not saved.damage and saved.path not in self.damaged]
            chosen = self._choose(whole)
            if self._writes:
                self._warn(unreadable)
                self._warn({s.path: s.damage for s in found if s.damage and _key(s) >= (chosen or [0])})
            if chosen is None:
                self._agreement.together("cannot resume", functools.partial(self._expect_none, found, unreadable))
                return None
            copies = {saved.path.name: saved for saved in whole if _key(saved) == chosen}
            verdict = json.loads(self._agreement.decide(self._verify(copies), self._judge))
            for name, reason in verdict["damaged"].get(str(self._writers[self._rank]), {}).items():
                self.damaged.add(self._folder / name)
                if self._writes:
                    self._warn({self._folder / name: reason})
            names = {int(writer): name for writer, name in verdict["names"].items()}
            if names:
                if {*self._writers} - {*names}:
                    hold()
                return self._brought(names, copies)

    def is_weights_only(self) -> bool:
        """Whether the newest checkpoint, not verified, was imported. All ranks must call this."""
        found, _ = self._agreement.together("cannot look for checkpoints", lambda: disk_format.scan(self._folder))
        chosen = self._choose([saved for saved in found if not saved.damage and saved.path not in self.damaged])
        return chosen is not None and bool(chosen[-1])

    def _choose(self, whole: list[SavedCheckpoint]) -> list[Any] | None:
        """The newest checkpoint of all folders: its serial, step and id; None if there is none."""

        def rule(votes: list[bytes]) -> bytes:
            return json.dumps(max((json.loads(vote) for vote in votes if vote != b"null"), default=None)).encode()

        mine = max(map(_key, whole), default=None) if self._writes else None
        chosen: list[Any] | None = json.loads(self._agreement.decide(json.dumps(mine).encode(), rule))
        return chosen

    def _verify(self, copies: Mapping[str, SavedCheckpoint]) -> bytes:
        """Which copies that this rank needs are intact, and what is wrong with the others."""
        damaged: dict[str, str] = {}
        for name, saved in copies.items():
            needed = {*disk_format.shared_files(saved.manifest).values(), disk_format.rank_file(self._rank)}
            shards = disk_format.shard_files(saved.manifest)
            if saved.manifest.weights_only:  # each rank reads a part of it only
                needed, shards = set(), [*needed & saved.manifest.files.keys()]
            if len(set(self._writers)) == 1:  # the ranks divide among themselves what all of them read
                needed |= {*shards[self._rank :: len(self._writers)]}
            elif self._writes:
                needed |= {*shards}
            try:
                for part, record in saved.manifest.files.items():
                    if part in needed or (self._writes and part not in shards):
                        disk_format.verify_file(saved.path / part, record)
            except DamagedCheckpoint as error:
                damaged[name] = f"{error}"
        writer = self._writers[self._rank]
        missing = f"{self._agreement.who}does not find the checkpoint that rank {writer} finds in {self._folder}"
        return json.dumps({"copies": list(copies), "damaged": damaged, "missing": missing}).encode()

    def _judge(self, votes: list[bytes]) -> bytes:
        """For each writer, the name of a copy that is intact for all ranks that see it; and the damage of others."""
        reports = [json.loads(vote) for vote in votes]
        damaged: dict[int, dict[str, str]] = {}
        for writer, report in zip(self._writers, reports, strict=True):
            copies = reports[writer]["copies"]
            if copies and not set(copies) & set(report["copies"]):
                raise CheckpointError(f"{report['missing']}; make sure that both see the same folder, and start again")
            damaged.setdefault(writer, {}).update(report["damaged"])
        names = {
            writer: next((name for name in reports[writer]["copies"] if name not in bad), None)
            for writer, bad in damaged.items()
        }
        return json.dumps({"names": {w: n for w, n in names.items() if n is not None}, "damaged": damaged}).encode()

    def _brought(self, names: dict[int, str], copies: Mapping[str, SavedCheckpoint]) -> SavedCheckpoint:
        """The checkpoint in this rank's folder, after ranks that lack it have fetched it."""
        holders = sorted(names)
        lacking = sorted({*self._writers} - {*holders})
        if lacking:
            sources = {writer: holders[place % len(holders)] for place, writer in enumerate(lacking)}
            saved = copies.get(names.get(self._rank, ""))
            names = {**names, **spread(self._agreement, self._rank, self._folder, saved, sources)}
        path = self._folder / names[self._writers[self._rank]]
        return self._agreement.together(f"cannot read {path}", functools.partial(disk_format.look, path))

    def _expect_none(self, found: list[SavedCheckpoint], unreadable: Mapping[Path, str]) -> None:
        """Check that there is no checkpoint because none was ever made."""
        damaged = len(unreadable) + sum(1 for saved in found if saved.damage or saved.path in self.damaged)
        if damaged:
            which = (
                f"all {damaged} checkpoints in {self._folder} are damaged"
                if damaged > 1
                else (f"the only checkpoint in {self._folder} is damaged")
            )
            raise CheckpointError(f"{which}; move the folder away to start from the beginning")

    def _warn(self, damaged: Mapping[Path, str]) -> None:
        """Warn, once for each, of damaged checkpoints."""
        for path, reason in damaged.items():
            line = f"checkpoint {path} is damaged and not used: {reason}"
            if line not in self._logged:
                self._logged.add(line)
                log.warning(line)


def _key(saved: SavedCheckpoint) -> list[Any]:
    """A key that orders checkpoints by age, the same for all copies of a checkpoint; at last, if it was imported."""
    return [saved.manifest.serial, saved.manifest.step, saved.manifest.id, saved.manifest.weights_only]
