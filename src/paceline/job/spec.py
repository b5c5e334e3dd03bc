"""JobSpec: what a user asks for, the same model for flags, files, Python and the store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    PrivateAttr,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from paceline.contract import CONTRACTS, GIT_CREDENTIALS

from .errors import nearest
from .quantities import duration, duration_text, memory
from .secret_values import split_source

FIXED_NODES = ("indexed", "mpi")  # frameworks whose jobs keep their number of nodes
Kind = Literal["script", "module", "command"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"  # 32, none that reads like another


def _valid_name(name: str) -> str:
    if name and not NAME.fullmatch(name):
        raise ValueError("a job name has up to 63 letters, digits, '.', '_' and '-', and starts with a letter or digit")
    return name


def _valid_framework(name: str) -> str:
    if name not in CONTRACTS:
        raise ValueError(f"unknown framework {name!r}; {nearest(name, CONTRACTS)}")
    return name


def _valid_nodes(value: Any) -> Any:
    low, colon, high = str(value).partition(":")
    if not low.isdecimal() or int(low) < 1 or (colon and (not high.isdecimal() or int(high) < int(low))):
        raise ValueError("not a number of nodes; write for example 2, or 2:4 for a changing number")
    return f"{int(low)}:{int(high)}" if colon and int(low) != int(high) else int(low)


def _valid_variables(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid name of an environment variable")
    return names


def _valid_env(env: dict[str, str]) -> dict[str, str]:
    _valid_variables(tuple(env))
    for name, value in env.items():
        if "\0" in value:
            raise ValueError(f"the value of {name} holds a zero byte")
    return env


def _text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{pattern}$"}


def _or_text(kind: str, pattern: str, **limits: int) -> WithJsonSchema:
    """The JSON schema of a number that may also be written as text."""
    return WithJsonSchema({"anyOf": [{"type": kind, **limits}, _text(pattern)]})


Name = Annotated[str, AfterValidator(_valid_name)]
Framework = Annotated[
    str, AfterValidator(_valid_framework), WithJsonSchema({"type": "string", "enum": sorted(CONTRACTS)})
]
Nodes = Annotated[int | str, BeforeValidator(_valid_nodes), _or_text("integer", "[0-9]+(:[0-9]+)?", minimum=1)]
_Duration = Annotated[
    float,
    Field(gt=0, allow_inf_nan=False),
    PlainSerializer(duration_text, return_type=str),
    WithJsonSchema(_text(r"([0-9]+(\.[0-9]+)?[smhdw])+")),
]
Hours = Annotated[_Duration, BeforeValidator(partial(duration, usual="h"))]
Minutes = Annotated[_Duration, BeforeValidator(partial(duration, usual="m"))]
Days = Annotated[_Duration, BeforeValidator(partial(duration, usual="d"))]
_DURATIONS = ("time_limit", "ttl", "keep_warm")  # the fields of a job with these types
Memory = Annotated[
    int,
    BeforeValidator(memory),
    _or_text("integer", r"[0-9]+(\.[0-9]+)?\s*([KMGTPkmgtp][iI]?)?[Bb]?", minimum=64 << 20),
]
# What a job file may leave unquoted: `job/reading.py` takes it as it is written.
Text = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean"]})]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Code(_Model):
    """Where a job's code comes from; it lands in `<working dir>/code/<job's name>`, and the ranks start there."""

    mode: Literal["git", "rsync", "snapshot"]
    source: str | None = Field(None, description="URL[@ref] of a git repository, or a path; a snapshot's default is .")


class Mount(_Model):
    """A named volume, and the path where the job wants to see it."""

    volume: str = Field(min_length=1)
    path: str = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        """`training-data:/mnist_data` for short."""
        if not isinstance(value, str):
            return value
        volume, colon, path = value.partition(":")
        if not colon or not volume or not path.startswith("/"):
            raise ValueError("not VOLUME:/PATH; write for example training-data:/mnist_data")
        return {"volume": volume, "path": path}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        short = {"type": "string", "pattern": "^[^:]+:/", "examples": ["training-data:/mnist_data"]}
        return {"anyOf": [short, handler.resolve_ref_schema(handler(core_schema))]}

    @property
    def variable(self) -> str:
        """The variable that tells the job where the volume really is."""
        return "PACELINE_DATA_" + re.sub(r"[^A-Za-z0-9]", "_", self.volume).upper()


class Rendezvous(_Model):
    """Where the nodes of a job meet that is started by hand on each of them; the port is also a single node's."""

    node_rank: int | None = Field(None, ge=0, description="this node's number; None lets the coordinator choose")
    main_address: str | None = Field(None, description="where the nodes meet; None on a single node")
    main_port: int | None = Field(
        None, ge=1, le=65535, description="where the nodes meet; on a single node, MASTER_PORT of its ranks"
    )
    run_id: str | None = Field(None, description="what the nodes of this job have in common, and other jobs do not")
    local_address: str | None = Field(None, description="name of this node among the others; None finds out")


class JobSpec(_Model):
    """A job as its user asks for it; a backend makes it concrete.

    Exactly one of `script`, `module` and `command` says what each rank runs. GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD in
    `env`, or a password in the address of a repository, are for git alone: they become `git_credentials`, which no dump
    of the job has. `time_limit`, `ttl` and `keep_warm` are given with their unit, such as "2h", or as a timedelta,
    and read in seconds.

    Raises:
        pydantic.ValidationError: a field is unknown, missing or malformed.
    """

    model_config = ConfigDict(
        title="paceline job",
        json_schema_extra={
            "description": "What `paceline submit FILE.yaml` reads",
            "anyOf": [{"required": [program]} for program in ("script", "module", "command")],
        },
    )

    name: Name = Field(
        "", description="unique; one that ends in '-' is completed by the next free number, an empty one is made up"
    )
    script: str | None = Field(None, description="Python file that each rank runs")
    module: str | None = Field(None, description="Python module that each rank runs, as python -m")
    command: str | None = Field(None, description="program that each rank runs")
    args: tuple[Text, ...] = ()
    framework: Framework | None = Field(
        None, description="whose variables the ranks get; the default is what the script imports"
    )
    horovod: Literal["real", "paceline"] | None = Field(
        None, description="whose `horovod` the script imports; the default is the installed one, else paceline's"
    )
    nodes: Nodes = Field(1, description="N, or MIN:MAX")
    ranks: Annotated[int, Field(ge=1, le=4096)] | Literal["auto", "gpu", "cpu", "slots"] = Field(
        1, description="ranks on each node, or what to count"
    )
    devices: Annotated[int, Field(ge=0)] | tuple[Text, ...] | None = Field(
        None, description="accelerators on each node: how many, or which"
    )
    share_devices: bool = Field(False, description="other jobs may use the same devices at the same time")
    cpus: Annotated[int, Field(ge=1)] | None = Field(None, description="cores on each node")
    memory: Memory | None = Field(None, description="memory on each node: bytes, or 16Gi")
    image: str | None = Field(None, description="container image, where the backend runs containers")
    env: Annotated[dict[str, Text], AfterValidator(_valid_env)] = Field({}, description="variables of the ranks")
    secrets: Annotated[tuple[str, ...], AfterValidator(_valid_variables)] = Field(
        (), description="variables whose values are taken from the submitter's environment and never shown"
    )
    working_dir: str = Field(".", description="where the ranks start")
    code: Code | None = Field(None, description="what to copy for the job; without it, it runs what is there")
    data: tuple[Mount, ...] = Field((), description="volumes, as VOLUME:/PATH")
    tensorboard: bool = Field(False, description="a TensorBoard goes with the job")
    tensorboard_dir: str | None = Field(None, description="what it shows; the default is the job's folder")
    log_dir: str | None = Field(None, description="where the run directory goes instead of the user's state folder")
    checkpoint_dir: str | None = Field(None, description="where the library keeps checkpoints unless the script says")
    resume_from: Name | None = Field(None, description="job whose code and checkpoints this one goes on with")
    fresh: bool = Field(False, description="it takes none of the checkpoints of the job that it resumes")
    start_method: Literal["fork", "exec"] | None = Field(
        None, description="how ranks start; the default is fork where that is the same for the script"
    )
    preload: tuple[str, ...] = Field((), description="modules imported once a node, before the ranks are forked")
    keep_warm: Minutes | None = Field(
        None, description="how long a process that has imported the framework stays for the next job, such as 10m"
    )
    max_restarts: int = Field(0, ge=0)
    time_limit: Hours | None = Field(None, description="from the first start on: 90s, 10m, 2h or 7d")
    ttl: Days | None = Field(None, description="time to live: how long after its end the job is kept, such as 7d")
    priority: int = Field(0, ge=-1_000_000, le=1_000_000, description="a waiting job with a higher one starts first")
    queue: str | None = Field(None, description="queue or partition, where the backend has several")
    labels: dict[str, Text] = {}
    backend: str = Field("local", description="where it runs: local, or a target of the settings")
    options: dict[str, Any] = Field({}, description="what only this backend knows")
    grace: float = Field(30.0, ge=0, allow_inf_nan=False, description="seconds between SIGTERM and SIGKILL")
    pass_index: bool = Field(False, description="append --process_index I --process_num N to the arguments")
    use_env: bool = Field(False, description="give no --local_rank to scripts that declare it")
    role: str = "default"
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = Field(
        None, description="the cores that each rank may use: those near its GPU"
    )
    virtual_local_rank: bool = Field(False, description="each rank sees its GPU alone, and LOCAL_RANK is 0")
    rendezvous: Rendezvous = Field(
        default_factory=lambda: Rendezvous.model_validate({}),
        description="of nodes that are started by hand, one by one",
    )
    join_timeout: float = Field(600.0, gt=0, allow_inf_nan=False, description="seconds to wait for the other nodes")
    last_call: float = Field(3.0, ge=0, allow_inf_nan=False, description="seconds to wait for more nodes than MIN")
    silence: float = Field(
        10.0, gt=2, allow_inf_nan=False, description="seconds without a packet after which a node is lost"
    )
    detached: bool = Field(False, description="outlive the terminal")
    _credentials: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _rendezvous(cls, value: Any) -> Any:
        """Jobs that were stored before `rendezvous` was a field have its fields among the job's."""
        flat = [key for key in Rendezvous.model_fields if key in value] if isinstance(value, dict) else []
        if not flat or not isinstance(value.get("rendezvous") or {}, dict):
            return value
        rest = {key: given for key, given in value.items() if key not in flat}
        return {**rest, "rendezvous": {**{key: value[key] for key in flat}, **(value.get("rendezvous") or {})}}

    @field_validator("nodes")
    @classmethod
    def _nodes_change(cls, nodes: int | str, info: ValidationInfo) -> int | str:
        framework = info.data.get("framework")
        if isinstance(nodes, str) and framework in FIXED_NODES:
            raise ValueError(f"with --framework {framework} the number of nodes cannot change; give one")
        return nodes

    @model_validator(mode="after")
    def _take_credentials(self) -> JobSpec:
        fields = self.__dict__  # of a new object, which nobody else has yet
        found = {name: self.env.pop(name) for name in GIT_CREDENTIALS if name in self.env}
        there = {name: os.environ[name] for name in self.secrets if name in GIT_CREDENTIALS and name in os.environ}
        found |= there
        fields["secrets"] = tuple(name for name in self.secrets if name not in there)  # others are refused later
        if self.code is not None and self.code.mode == "git":
            source, inside = split_source(self.code.source or "")
            if inside:
                fields["code"] = self.code.model_copy(update={"source": source})
                found |= inside
        self._credentials |= found
        return self

    @model_validator(mode="after")
    def _one_program(self) -> JobSpec:
        given = [name for name in ("script", "module", "command") if getattr(self, name) is not None]
        if len(given) != 1:
            what = f"{' and '.join(given)} contradict each other" if given else "nothing to run"
            raise ValueError(f"{what}; give one of script, module and command")
        return self

    @model_validator(mode="after")
    def _no_contradictions(self) -> JobSpec:
        both = sorted(set(self.secrets) & set(self.env))
        if both:
            raise ValueError(f"{both[0]} is both a secret and in env; give it once")
        for word in (self.script, self.module, self.command, self.working_dir, *self.args):
            if "\0" in (word or ""):
                raise ValueError(f"{word!r} holds a zero byte, which no command line can")
        if isinstance(self.devices, tuple) and len(set(self.devices)) < len(self.devices):
            raise ValueError("a device is named twice; name each once")
        return self

    @property
    def kind(self) -> Kind:
        """What `target` is."""
        return "script" if self.script is not None else "module" if self.module is not None else "command"

    @property
    def target(self) -> str:
        """The script, module or program that each rank runs."""
        return self.script or self.module or self.command or ""

    def new_name(self) -> str:
        """A name if it was given none: the script's, made unlike any other by five random characters."""
        stem = self.target.rpartition(".")[2] if self.kind == "module" else PurePath(self.target).stem
        cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:50] or "job"
        return f"{cleaned}-{''.join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(5))}"

    @property
    def git_credentials(self) -> dict[str, str]:
        """GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD: the job's own, or else those of this process."""
        return {name: os.environ[name] for name in GIT_CREDENTIALS if os.environ.get(name)} | self._credentials

    @property
    def has_unused_credentials(self) -> bool:
        """Whether it was given credentials for git, which fetches nothing for it."""
        return bool(self._credentials) and (self.code is None or self.code.mode != "git")

    def stored(self, *, exclude_unset: bool = False) -> dict[str, Any]:
        """The job as it is stored: what JSON can hold, with durations in seconds; perhaps without its defaults."""
        job = self.model_dump(mode="json", exclude_unset=exclude_unset)
        return {**job, **{name: getattr(self, name) for name in _DURATIONS if name in job}}

    @classmethod
    def from_stored(cls, job: Any) -> JobSpec:
        """What `stored` or `for_node` has returned, also that of an older version.

        Raises:
            pydantic.ValidationError: it is damaged, or of a version that has more fields.
        """
        if not isinstance(job, Mapping):
            return cls.model_validate(job)
        seconds = {name: job[name] for name in _DURATIONS if isinstance(job.get(name), (int, float))}
        return cls.model_validate({**job, **{name: duration_text(value) for name, value in seconds.items()}})

    @classmethod
    def planned(cls, job: Mapping[str, Any]) -> JobSpec:
        """A job as a node has completed it; its name and framework may be placeholders."""
        placeholders = {"name": job["name"], "framework": job["framework"]}
        return cls.from_stored({**job, "name": "", "framework": None}).model_copy(update=placeholders)

    def for_node(self) -> dict[str, Any]:
        """The job as a node reads it: as it is stored, with the fields of `rendezvous` among its own."""
        job = self.stored()
        return {**job, **job.pop("rendezvous")}

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the most nodes."""
        low, _, high = str(self.nodes).partition(":")
        return int(low), int(high or low)
