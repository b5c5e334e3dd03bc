"""The cluster itself: a killed one leaves nothing, and its sbatch has no option that paceline does not know."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.lab import inside
from tests.needs import need

from paceline.backends.slurm.sbatch_options import ABBREVIATED, KNOWN, OURS

from .cluster import Cluster, missing

if TYPE_CHECKING:
    pass

ROOT = Path(__file__).parents[3]


def test_killed_cluster_is_removed_by_the_next() -> None:
    need(missing())
    program = (
        "from tests.lab.slurm.cluster import Cluster; c = Cluster(1); c.start(); print(c.prefix, c.folder, flush=True);"
        " import time; time.sleep(1000)"
    )
    killed = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert killed.stdout is not None
    prefix, folder = killed.stdout.readline().split()
    daemons = [pid for name in ("hub", "ctl", "n0") for pid in inside(f"{prefix}-{name}")]
    assert len(daemons) == 4  # slurmctld has a helper
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    it = Cluster(1)
    try:
        it.start()
        assert it.states() == {"n0": "idle"}
    finally:
        it.stop()
    for pid in daemons:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a zombie is there, and has no files
            assert not os.listdir(f"/proc/{pid}/fd")
    assert not Path(folder).exists()
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"{prefix}-")]


def test_each_option_of_sbatch_is_known(cluster: Cluster) -> None:
    said = cluster.slurm("sbatch", "--help")
    assert set(re.findall(r"--([a-z][a-z-]+)", said)) <= KNOWN | OURS.keys()
    assert dict(re.findall(r"-([a-zA-Z]), --([a-z][a-z-]+)", said)).items() <= ABBREVIATED.items()
