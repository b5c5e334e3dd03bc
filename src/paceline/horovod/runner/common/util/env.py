"""The place of this process, as its launcher says, before `init`."""

from __future__ import annotations

import os
import sys

from paceline.contract import recognise


def get_env_rank_and_size() -> tuple[int, int]:
    """The rank of this process, and how many there are; 0 and 1 if nothing has launched it."""
    placement = recognise(os.environ, sys.argv).placement
    return placement.rank, placement.world_size
