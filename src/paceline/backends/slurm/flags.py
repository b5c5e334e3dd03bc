"""The flags of the Slurm backend; what they set is in `options.Options`."""

from __future__ import annotations

from paceline.backends.base import Flag

FLAGS = (
    Flag(
        "slurm",
        ("--slurm",),
        "NAME=VALUE",
        "An option of sbatch, such as qos=high; repeatable.",
        job=True,
        repeats=True,
    ),
    Flag("array", ("--array",), "0-3[%2]", "Submit a job for each index; %2: two at a time.", job=True),
    Flag("chain", ("--chain",), "", "Go on in a new job when a time limit ends this one.", is_switch=True, job=True),
    Flag("containers", ("--containers",), "PROGRAM", "What runs --image: pyxis, apptainer or singularity.", job=True),
)
