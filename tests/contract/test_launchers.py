"""The launchers of torch themselves: what they start recognises itself."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]

SCRIPT = """
import dataclasses, json, os, pathlib, sys
from paceline.contract import recognise

found = dataclasses.asdict(recognise(os.environ, sys.argv))
pathlib.Path(__file__).with_name(f"rank-{found['placement']['rank']}.json").write_text(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (["torch.distributed.run", "--rdzv-id=tour", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"], "torchrun"),
        (["torch.distributed.launch", "--master-addr=localhost"], "torch.distributed.launch"),
        (["torch.distributed.launch", "--use_env", "--master-addr=localhost"], "torchrun"),
    ],
    ids=["torchrun", "launch", "launch-use_env"],
)
def test_torch_launchers(command: list[str], launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "who.py"
    script.write_text(SCRIPT)
    folders = {"PYTHONPATH": str(Path(paceline.__file__).parents[1]), "TMPDIR": str(tmp_path)}
    line = [sys.executable, "-m", *command, "--nproc-per-node=2", str(script)]
    subprocess.run(line, env={**os.environ, **folders}, check=True, capture_output=True)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        placement = found["placement"]
        assert found["launcher"] == launcher
        assert placement["rank"] == placement["local_rank"] == rank
        assert placement["world_size"] == placement["local_world_size"] == 2
        assert (placement["node_rank"], placement["node_count"], placement["attempt"]) == (0, 1, 0)
        assert placement["main_address"]
        assert ("--rdzv-id=tour" in command) == (placement["job"] == "tour")
