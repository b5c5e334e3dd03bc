"""Watch as many jobs of Slurm as argv[1] says, as submitit does it, until it is interrupted."""

import contextlib
import sys
import tempfile

import submitit
from submitit.helpers import as_completed

with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory() as folder:
    jobs = [submitit.SlurmJob(folder, str(1000 + number)) for number in range(int(sys.argv[1]))]
    for _ in as_completed(jobs, poll_frequency=1):
        raise SystemExit("a job has ended")
