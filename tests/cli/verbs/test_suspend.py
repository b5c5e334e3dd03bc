"""What `suspend` says is saved."""

from __future__ import annotations

import pytest
from tests.cli.screens.cases import job

from paceline.cli.verbs.control import _saved


@pytest.mark.parametrize(
    ("state", "before", "after", "said"),
    [
        ("RUNNING", 10, 16, "step 16 is saved"),
        ("RUNNING", 10, 10, "step 10 is saved, and nothing after it"),  # its disk is full, or its grace was too short
        ("SUSPENDED", 10, 10, "step 10 is saved"),
    ],
)
def test_a_job_that_could_not_save_is_told_apart(state: str, before: int, after: int, said: str) -> None:
    was, now = (
        job("it", it, checkpoint={"step": step, "folder": "ckpt"})
        for it, step in ((state, before), ("SUSPENDED", after))
    )
    assert _saved(was, now) == said
