"""JobSpec: what a user asks for, the same model for flags, files, Python and the store."""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from paceline.contract import CONTRACTS

from .errors import nearest
from .script import Kind

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"  # none that reads like another


def _valid_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError("a job name has up to 63 letters, digits, '.', '_' and '-', and starts with a letter or digit")
    return name


def _valid_framework(name: str) -> str:
    if name not in CONTRACTS:
        raise ValueError(f"unknown framework {name!r}; {nearest(name, CONTRACTS)}")
    return name


class JobSpec(BaseModel):
    """A job as its user asks for it; a backend makes it concrete.

    Raises:
        pydantic.ValidationError: a field is unknown, missing or malformed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, AfterValidator(_valid_name)]
    kind: Kind = Field("script", description="what `target` is")
    target: str = Field(description="the script, module or executable that each rank runs")
    args: tuple[str, ...] = ()
    framework: Annotated[str, AfterValidator(_valid_framework)] = "torch"
    nodes: int = Field(1, ge=1, description="how many nodes take part")
    ranks: int | Literal["auto", "gpu", "cpu"] = Field(1, description="ranks on each node, or what to count")
    devices: tuple[str, ...] | None = Field(None, description="accelerators of each node that the job may use")
    env: dict[str, str] = {}
    working_dir: str
    log_dir: str | None = Field(None, description="where the run directory goes instead of the user's state folder")
    start_method: Literal["fork", "exec"] = "fork"
    preload: tuple[str, ...] = Field((), description="modules imported once a node, before the ranks are forked")
    max_restarts: int = Field(0, ge=0)
    grace: float = Field(30.0, ge=0, allow_inf_nan=False, description="seconds between SIGTERM and SIGKILL")
    pass_index: bool = Field(False, description="append --process_index I --process_num N to the arguments")
    role: str = "default"
    run_id: str | None = Field(None, description="what the nodes of this job have in common, and other jobs do not")
    node_rank: int | None = Field(0, ge=0, description="this node's number; None lets the coordinator choose")
    main_address: str | None = Field(None, description="where the nodes meet; None on a single node")
    main_port: int | None = Field(None, ge=1, le=65535)
    local_address: str | None = None
    join_timeout: float = Field(600.0, gt=0, allow_inf_nan=False, description="seconds to wait for the other nodes")
    detached: bool = Field(False, description="outlive the terminal")


def new_name(stem: str) -> str:
    """A name for a job that was given none: the script's, made unlike any other by five random characters."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:50] or "job"
    return f"{cleaned}-{''.join(secrets.choice(_LETTERS) for _ in range(5))}"
