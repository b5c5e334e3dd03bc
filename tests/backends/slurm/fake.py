"""Slurm's commands as scripts, for what needs no cluster: how they are called, and what becomes of their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.conftest import Paceline
from tests.typed import refusal, typed

if TYPE_CHECKING:
    from pathlib import Path

PARTITIONS = "PartitionName=main Default=YES DefaultTime=NONE MaxTime=UNLIMITED"


class Login(Paceline):
    """`paceline` where sbatch takes every job as number 7, unless a command is given another script."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.env.update(PATH=f"{self.bin}:{self.env['PATH']}", FAKE=str(folder), HOME=str(folder / "user"))
        (folder / "user").mkdir()
        self.command("sbatch", "echo 7")
        self.command("scontrol", f'echo "{PARTITIONS}"')
        for name in ("sinfo", "squeue", "scancel", "srun"):
            self.command(name, "exit 0")
        self.settings("")

    def command(self, name: str, script: str) -> None:
        """Let a command run a script; how it is called is in `calls`."""
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> "$FAKE/calls"\n{script}\n')
        path.chmod(0o755)

    def settings(self, slurm: str) -> None:
        """Settings with a target `lab`, and these options of sbatch."""
        (self.folder / "paceline.toml").write_text(
            f'[targets.lab]\nbackend = "slurm"\nroot = "{self.folder}/root"\nslurm = {{{slurm}}}\n'
        )

    @property
    def calls(self) -> list[str]:
        """How Slurm was called, one line a call."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def jobs(self) -> list[str]:
        """The folders of jobs."""
        return sorted(path.name for path in (self.folder / "root" / "slurm").glob("*"))

    def directives(self, *flags: str) -> list[str]:
        """The lines for sbatch of a dry run."""
        done = typed(self, "submit", "--on", "lab", "--dry-run", "--name", "it", *flags, self.script("pass"))
        assert done.returncode == 0, done.stderr
        return [line.removeprefix("#SBATCH ") for line in done.stdout.splitlines() if line.startswith("#SBATCH")]

    def refusal(self, *flags: str) -> str:
        """The line with which a job is refused, of which nothing is left."""
        script = self.script("pass")
        (line,) = {refusal(self, "submit", "--on", "lab", *dry, *flags, script) for dry in ((), ("--dry-run",))}
        assert self.jobs() == []
        return line
