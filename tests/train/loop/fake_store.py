"""Checkpoints in memory, for programs that are run thousands of times."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch

import paceline.train.run
from paceline.train.checkpoint.store import Checkpoint

FOLDERS: dict[Path, Checkpoint] = {}


class FakeStore:
    def __init__(self, folder, placement, keep, *, required):
        self.folder, self.lost = folder, None

    def save(self, step, shared, own, block=False):
        FOLDERS[self.folder] = copy.deepcopy(Checkpoint(self.folder, step, 1, dict(shared), own))

    def load(self, device="cpu"):
        return copy.deepcopy(FOLDERS.get(self.folder))

    def read_again(self, found, device="cpu", *, whole):
        kept = FOLDERS[self.folder]
        assert kept.step == found.step
        return copy.deepcopy(kept if whole else dataclasses.replace(kept, shared_state={}))

    def rank_states(self, found): return [found.rank_state]
    def wait(self): pass
    def close(self): pass
    def disconnect(self): pass


def install():
    paceline.train.run.open_store = FakeStore
