"""What is said of a time limit of Slurm's."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.contract.nodejob import NodeJob
from paceline.node.host.slurm.place.batch_script import notes_on_limit


@pytest.mark.parametrize(
    ("limit", "options", "last"),
    [
        (60.0, {"slurm": {}}, "of its time limit of 60 s, the last 30 to 60 s are for saving and ending"),
        (None, {"slurm": {"time": "4"}}, "of its time limit of 240 s, the last 90 to 150 s are for saving and ending"),
        (None, {"slurm": {}, "limit": 120.0}, "of its time limit of 120 s, the last 60 to 120 s are for saving"),
        (3600.0, {"slurm": {}}, ""),
        (None, {"slurm": {}}, ""),
    ],
)
def test_a_limit_is_named_of_which_half_is_needed_to_end(limit: float | None, options: Any, last: str) -> None:
    notes = notes_on_limit(NodeJob(grace=30.0, time_limit=limit), options)
    assert [note.startswith(last) for note in notes] == [True] * bool(last)
