"""A job that is run again asks Slurm for what it asked for before."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Client

WHERE = """
    import os
    print(os.uname().nodename, os.environ["SLURM_JOB_PARTITION"], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
"""
TASK = """
    import os
    print("task", os.environ["SLURM_ARRAY_TASK_ID"], "of", os.environ["SLURM_ARRAY_TASK_COUNT"], flush=True)
"""


def told(user: Client, name: str) -> str:
    assert user.paceline("wait", "--on", "lab", name).returncode == 0
    return str(user.paceline("logs", "--on", "lab", name).stdout)


def options(user: Client, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(user.paceline("get", "--on", "lab", name, "-o", "json").stdout)["options"]
    return found


def test_what_was_asked_of_slurm_is_asked_again(user: Client) -> None:
    flags = ("--slurm", "partition=urgent", "--slurm", "exclude=n0,n2", "--slurm", "gres=gpu:a100:1", "--chain")
    user.paceline("submit", "--on", "lab", "--name", "it", *flags, user.script(WHERE))
    assert told(user, "it") == "n1 urgent 0\n"
    asked = {"slurm": {"partition": "urgent", "exclude": "n0,n2", "gres": "gpu:a100:1"}, "chain": True}
    assert options(user, "it") == asked
    assert user.paceline("resubmit", "it").stdout == "it-2\n"
    assert told(user, "it-2") == "n1 urgent 0\n"
    assert user.paceline("resubmit", "--slurm", "exclude=n0,n1", "it").stdout == "it-3\n"
    assert told(user, "it-3") == "n2 urgent 0\n"
    assert options(user, "it-3") == {**asked, "slurm": {**asked["slurm"], "exclude": "n0,n1"}}


def test_a_job_of_an_array_keeps_its_index(user: Client) -> None:
    user.paceline("submit", "--on", "lab", "--name", "it", "--array", "0-1", user.script(TASK))
    assert told(user, "it-1") == "task 1 of 2\n"
    told(user, "it-0")
    assert user.paceline("resubmit", "it-1").stdout == "it-1-2\n"
    assert told(user, "it-1-2") == "task 1 of 2\n"
