"""What a target on a Slurm cluster can set, and flags for one job."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from paceline.job.errors import nearest

from .sbatch import ABBREVIATED, KNOWN, OURS


class Options(BaseModel):
    """The keys of a target other than `backend`; flags can set them too."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    ssh: str | None = Field(None, description="a login node that ssh reaches; the default is this machine")
    port: int | None = Field(None, ge=1, le=65535, description="of its sshd")
    identity_file: str | None = Field(None, description="the private key")
    python: str | None = Field(None, description="the interpreter on login node and nodes")
    root: str = Field("~/.local/state/paceline", description="a folder that all nodes share")
    slurm: dict[str, str | int | bool] = Field(
        {}, description="options of sbatch, such as partition, qos, account, constraint"
    )
    chain: bool = Field(False, description="when a time limit ends the job, it goes on in a new job of Slurm")
    containers: Literal["pyxis", "apptainer", "singularity"] | None = Field(
        None, description="what runs the images of --image"
    )

    @field_validator("slurm")
    @classmethod
    def _known(cls, options: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for given, value in options.items():
            name = ABBREVIATED.get(given.lstrip("-"), given.lstrip("-").replace("_", "-"))
            if name in OURS:
                raise ValueError(f"{given} is not for --slurm: {OURS[name]}")
            if name not in KNOWN:
                raise ValueError(f"sbatch has no option {given!r}; {nearest(name, KNOWN)}")
            if isinstance(value, str) and any(letter in value for letter in "\n\r\0"):
                raise ValueError(f"{given}: its value has a line end, which no batch script can; write it in one line")
            found[name] = value
        return found

    @field_validator("identity_file")
    @classmethod
    def _is_there(cls, file: str | None) -> str | None:
        if file is not None and not os.path.exists(os.path.expanduser(file)):
            raise ValueError(f"no file {file!r}; name the private key that the login node accepts")
        return file
