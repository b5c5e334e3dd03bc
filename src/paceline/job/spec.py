"""JobSpec: what a user asks for, the same model for flags, files, Python and the store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, field
from msgspec.structs import force_setattr

from paceline.contract import CONTRACTS, GIT_CREDENTIALS
from paceline.contract.nodejob import NodeJob

from .errors import nearest
from .flags import ELSEWHERE
from .model import InvalidError, Model, Parsers, as_list, each
from .quantities import duration, duration_or_off, duration_text
from .quantities import memory as memory_size
from .secret_values import split_source

FIXED_NODES = ("indexed", "mpi")  # frameworks whose jobs keep their number of nodes
Kind = Literal["script", "module", "command"]
Mode = Literal["git", "rsync", "snapshot"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"  # 32, none that reads like another


def _user() -> str | None:
    """The name of the user of this process; None if it has none."""
    import getpass

    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):
        return None


def _valid_name(name: Any) -> Any:
    if name and isinstance(name, str) and not NAME.fullmatch(name):
        raise ValueError("a job name has up to 63 letters, digits, '.', '_' and '-', and starts with a letter or digit")
    return name


def _valid_framework(name: Any) -> Any:
    if isinstance(name, str) and name not in CONTRACTS:
        raise ValueError(f"unknown framework {name!r}; {nearest(name, CONTRACTS)}")
    return name


def _valid_nodes(value: Any) -> Any:
    low, colon, high = str(value).partition(":")
    if not low.isdecimal() or int(low) < 1 or (colon and (not high.isdecimal() or int(high) < int(low))):
        raise ValueError("not a number of nodes; write for example 2, or 2:4 for a changing number")
    return f"{int(low)}:{int(high)}" if colon and int(low) != int(high) else int(low)


def _valid_variables(names: Any) -> Any:
    for name in names if isinstance(names, (list, tuple, dict)) else ():
        if isinstance(name, str) and not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is not a valid name of an environment variable")
    return names


def _valid_env(env: Any) -> Any:
    for name, value in _valid_variables(env).items() if isinstance(env, dict) else ():
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"the value of {name} holds a zero byte")
    return env


def _written(schema: dict[str, object]) -> Meta:
    """Have the JSON schema say how a field is written, where that is not how it is kept."""
    return Meta(extra_json_schema={"written": schema})


def _as_text(pattern: str) -> dict[str, object]:
    return {"type": "string", "pattern": f"^{pattern}$"}


def _or_text(pattern: str, minimum: int) -> Meta:
    return _written({"anyOf": [{"type": "integer", "minimum": minimum}, _as_text(pattern)]})


def _as_written(schema: Any) -> Any:
    """A JSON schema of msgspec's with what `_written` says."""
    if isinstance(schema, list):
        return [_as_written(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "written" in schema:
        return {name: schema[name] for name in ("description", "default") if name in schema} | schema["written"]
    return {name: _as_written(part) for name, part in schema.items()}


_WITH_UNIT = _written(_as_text(r"([0-9]+(\.[0-9]+)?[smhdw])+"))
Duration = Annotated[float, Meta(gt=0), _WITH_UNIT]
Memory = Annotated[int, _or_text(r"[0-9]+(\.[0-9]+)?\s*([KMGTPkmgtp][iI]?)?[Bb]?", minimum=64 << 20)]
_LONGEST = 1e9  # seconds
_DURATIONS = {
    "time_limit": "mh",  # minutes for srun and submitit, hours for PBS
    "ttl": "d",
    "keep_warm": "m",
    "hang_after": "s",
    "grace": "s",
    "join_timeout": "s",
    "last_call": "s",
    "silence": "s",
}  # field → the units that a message suggests
_ZERO = {
    "time_limit": "for no limit, leave it out",
    "ttl": "to keep the job, leave it out",
    "hang_after": "to watch for no hang, write --hang off",
    "join_timeout": "give 1s or more",
    "silence": "give more than 2s",
}  # field → what to write in the place of no time, where that is refused
# What a job file may leave unquoted: `job/reading.py` takes it as it is written.
Text = Annotated[str, _written({"type": ["string", "number", "boolean"]})]


class Code(Model, frozen=True, kw_only=True):
    """Where a job's code comes from; it lands in `<working dir>/code/<job's name>`, and the ranks start there."""

    mode: Mode
    source: Annotated[
        str | None, Meta(description="URL[@ref] of a git repository, or a path; a snapshot's default is .")
    ] = None


class Mount(Model, frozen=True, kw_only=True):
    """A named volume, and the path where the job wants to see it."""

    volume: Annotated[str, Meta(min_length=1)]
    path: Annotated[str, Meta(min_length=1)]

    @classmethod
    def arranged(cls, given: Any) -> Any:
        """Take `training-data:/mnist_data` for short."""
        if not isinstance(given, str):
            return given
        volume, colon, path = given.partition(":")
        if not colon or not volume or not path.startswith("/"):
            raise InvalidError((), "not VOLUME:/PATH; write for example training-data:/mnist_data", given)
        return {"volume": volume, "path": path}

    @property
    def variable(self) -> str:
        """The variable that tells the job where the volume really is."""
        return "PACELINE_DATA_" + re.sub(r"[^A-Za-z0-9]", "_", self.volume).upper()


class Rendezvous(Model, frozen=True, kw_only=True):
    """Where the nodes of a job meet that is started by hand on each of them; the port is also a single node's."""

    node_rank: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="this node's number; None lets the coordinator choose")
    ] = None
    main_address: Annotated[str | None, Meta(description="where the nodes meet; None on a single node")] = None
    main_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(description="where the nodes meet; on a single node, MASTER_PORT of its ranks"),
    ] = None
    run_id: Annotated[
        str | None, Meta(description="what the nodes of this job have in common, and other jobs do not")
    ] = None
    local_address: Annotated[str | None, Meta(description="name of this node among the others; None finds out")] = None


class JobSpec(Model, frozen=True, kw_only=True):
    """A job as its user asks for it; a backend makes it concrete.

    Exactly one of `script`, `module` and `command` says what each rank runs. GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD in
    `env`, or a password in the address of a repository, are for git alone: they become `git_credentials`, which no dump
    of the job has. Durations, such as `time_limit` and `grace`, are given with their unit, "2h", or as a timedelta,
    and read in seconds. `gpus` is another name for `devices`.
    """

    name: Annotated[
        str,
        Meta(description="unique; one that ends in '-' is completed by the next free number, an empty one is made up"),
    ] = ""
    script: Annotated[str | None, Meta(description="Python file that each rank runs")] = None
    module: Annotated[str | None, Meta(description="Python module that each rank runs, as python -m")] = None
    command: Annotated[str | None, Meta(description="program that each rank runs")] = None
    args: tuple[Text, ...] = ()
    framework: Annotated[
        Annotated[str, _written({"enum": sorted(CONTRACTS)})] | None,
        Meta(description="whose variables the ranks get; the default is what the script imports"),
    ] = None
    horovod: Annotated[
        Literal["real", "paceline"] | None,
        Meta(description="whose `horovod` the script imports; the default is the installed one, else paceline's"),
    ] = None
    nodes: Annotated[int | str, Meta(description="N, or MIN:MAX"), _or_text("[0-9]+(:[0-9]+)?", 1)] = 1
    ranks: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | Literal["auto", "gpu", "cpu", "slots"],
        Meta(description="ranks on each node, or what to count"),
    ] = 1
    devices: Annotated[
        Annotated[int, Meta(ge=0)] | tuple[Text, ...] | None,
        Meta(description="accelerators on each node: how many, or which"),
    ] = None
    share_devices: Annotated[bool, Meta(description="other jobs may use the same devices at the same time")] = False
    cpus: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="cores on each node")] = None
    memory: Annotated[Memory | None, Meta(description="memory on each node: bytes, or 16Gi")] = None
    image: Annotated[str | None, Meta(description="container image, where the backend runs containers")] = None
    env: Annotated[dict[str, Text], Meta(description="variables of the ranks")] = {}
    secrets: Annotated[
        tuple[str, ...],
        Meta(description="variables whose values are taken from the submitter's environment and never shown"),
    ] = ()
    setup: Annotated[
        tuple[Text, ...],
        Meta(description="shell commands, run once on each node before its ranks, which get their variables"),
        _written({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}], "default": []}),
    ] = ()
    environment: Annotated[
        str | None,
        Meta(
            description="packages of the ranks, which paceline installs on each machine into a folder of its own: a "
            "lock, requirements or project file, a folder of wheels, a virtual environment, 'here', 'auto' or 'none'"
        ),
    ] = None
    environment_digest: Annotated[
        str | None, Meta(description="what that was when the job was submitted; paceline sets it")
    ] = None
    working_dir: Annotated[str, Meta(description="where the ranks start")] = "."
    code: Annotated[Code | None, Meta(description="what to copy for the job; without it, it runs what is there")] = None
    data: Annotated[tuple[Mount, ...], Meta(description="volumes, as VOLUME:/PATH")] = ()
    tensorboard: Annotated[bool, Meta(description="a TensorBoard goes with the job")] = False
    tensorboard_dir: Annotated[str | None, Meta(description="what it shows; the default is the job's folder")] = None
    log_dir: Annotated[
        str | None, Meta(description="where the run directory goes instead of the user's state folder")
    ] = None
    checkpoint_dir: Annotated[
        str | None, Meta(description="where the library keeps checkpoints unless the script says")
    ] = None
    resume_from: Annotated[str | None, Meta(description="job whose code and checkpoints this one goes on with")] = None
    fresh: Annotated[bool, Meta(description="it takes none of the checkpoints of the job that it resumes")] = False
    start_method: Annotated[
        Literal["fork", "exec"] | None,
        Meta(description="how ranks start; the default is fork where that is the same for the script"),
    ] = None
    preload: Annotated[
        tuple[str, ...], Meta(description="modules imported once a node, before the ranks are forked")
    ] = ()
    keep_warm: Annotated[
        Duration | Literal["off"] | None,
        Meta(description="how long a process that has imported the framework stays for the next job, such as 10m"),
    ] = None
    max_restarts: Annotated[int, Meta(ge=0)] = 0
    time_limit: Annotated[Duration | None, Meta(description="from the first start on: 90s, 10m, 2h or 7d")] = None
    ttl: Annotated[
        Duration | None, Meta(description="time to live: how long after its end the job is kept, such as 7d")
    ] = None
    priority: Annotated[
        int, Meta(ge=-1_000_000, le=1_000_000, description="a waiting job with a higher one starts first")
    ] = 0
    queue: Annotated[str | None, Meta(description="queue or partition, where the backend has several")] = None
    labels: dict[str, Text] = {}
    backend: Annotated[str, Meta(description="where it runs: local, or a target of the settings")] = "local"
    options: Annotated[dict[str, Any], Meta(description="what only this backend knows")] = {}
    grace: Annotated[
        float, Meta(ge=0, le=_LONGEST, description="time between SIGTERM and SIGKILL, such as 30s"), _WITH_UNIT
    ] = 30.0
    hang: Annotated[
        Literal["warn", "restart", "off"],
        Meta(description="what happens when no rank goes on, and none works for which the others wait"),
    ] = "warn"
    hang_after: Annotated[Duration, Meta(description="how long that lasts before it is a hang, such as 60s")] = 60.0
    pass_index: Annotated[bool, Meta(description="append --process_index I --process_num N to the arguments")] = False
    use_env: Annotated[bool, Meta(description="give no --local_rank to scripts that declare it")] = False
    role: str = "default"
    numa_binding: Annotated[
        Literal["node", "socket", "exclusive", "core-complex"] | None,
        Meta(description="the cores that each rank may use: those near its GPU"),
    ] = None
    virtual_local_rank: Annotated[bool, Meta(description="each rank sees its GPU alone, and LOCAL_RANK is 0")] = False
    rendezvous: Annotated[Rendezvous, Meta(description="of nodes that are started by hand, one by one")] = field(
        default_factory=lambda: Rendezvous.validated({})
    )
    join_timeout: Annotated[
        float, Meta(gt=0, le=_LONGEST, description="how long to wait for the other nodes, such as 10m"), _WITH_UNIT
    ] = 600.0
    last_call: Annotated[
        float, Meta(ge=0, le=_LONGEST, description="how long to wait for more nodes than MIN, such as 3s"), _WITH_UNIT
    ] = 3.0
    silence: Annotated[
        float,
        Meta(gt=2, le=_LONGEST, description="time without a packet after which a node is lost, such as 10s"),
        _WITH_UNIT,
    ] = 10.0
    detached: Annotated[bool, Meta(description="outlive the terminal")] = False

    elsewhere: ClassVar[Mapping[str, str]] = ELSEWHERE
    parsers: ClassVar[Parsers] = {
        "name": _valid_name, "resume_from": _valid_name, "framework": _valid_framework, "nodes": _valid_nodes,
        "memory": memory_size, "setup": as_list, "env": _valid_env, "secrets": _valid_variables, "data": each(Mount),
        **{name: partial(duration, usual=unit, zero=_ZERO.get(name, "")) for name, unit in _DURATIONS.items()},
        "keep_warm": partial(duration_or_off, usual=_DURATIONS["keep_warm"]),
    }  # fmt: skip

    @classmethod
    def arranged(cls, given: Any) -> Any:
        """Take `gpus`, and the fields of `rendezvous` among the job's, as flags, job files and nodes have them."""
        if not isinstance(given, dict):
            return given
        if "gpus" in given and "devices" not in given:
            given = {"devices" if name == "gpus" else name: value for name, value in given.items()}
        flat = [key for key in Rendezvous.__struct_fields__ if key in given]
        if not flat or not isinstance(given.get("rendezvous") or {}, dict):
            return given
        rest = {key: value for key, value in given.items() if key not in flat}
        return {**rest, "rendezvous": {**{key: given[key] for key in flat}, **(given.get("rendezvous") or {})}}

    def check(self) -> None:
        """Refuse fields that contradict each other, and take the credentials out of the job."""
        programs = [name for name in ("script", "module", "command") if getattr(self, name) is not None]
        if len(programs) != 1:
            what = f"{' and '.join(programs)} contradict each other" if programs else "nothing to run"
            raise InvalidError((), f"{what}; give one of script, module and command")
        if isinstance(self.nodes, str) and self.framework in FIXED_NODES:
            why = f"with --framework {self.framework} the number of nodes cannot change; give one"
            raise InvalidError(("nodes",), why, self.nodes)
        both = sorted(set(self.secrets) & set(self.env))
        if both:
            raise InvalidError((), f"{both[0]} is both a secret and in env; give it once")
        for word in (self.script, self.module, self.command, self.working_dir, *self.args):
            if "\0" in (word or ""):
                raise InvalidError((), f"{word!r} holds a zero byte, which no command line can")
        if isinstance(self.devices, tuple) and len(set(self.devices)) < len(self.devices):
            raise InvalidError((), "a device is named twice; name each once")
        self._take_credentials()

    def _take_credentials(self) -> None:
        found = {name: self.env.pop(name) for name in GIT_CREDENTIALS if name in self.env}
        there = {name: os.environ[name] for name in self.secrets if name in GIT_CREDENTIALS and name in os.environ}
        found |= there
        # It is a new object, which nobody else has yet. Secrets that are not there are refused later.
        force_setattr(self, "secrets", tuple(name for name in self.secrets if name not in there))
        if self.code is not None and self.code.mode == "git":
            source, inside = split_source(self.code.source or "")
            if inside:
                force_setattr(self, "code", self.code.changed({"source": source}))
                found |= inside
        self.__dict__["credentials"] = found

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The JSON schema of job files."""
        found = _as_written(msgspec.json.schema(cls))
        parts = found["$defs"]
        for of_field in (parts["JobSpec"]["properties"][name] for name in _DURATIONS):
            if of_field.get("default") is not None:
                of_field["default"] = duration_text(of_field["default"])
        short = {"type": "string", "pattern": "^[^:]+:/", "examples": ["training-data:/mnist_data"]}
        parts["Mount"] = {"anyOf": [short, parts["Mount"]]}
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **parts.pop("JobSpec"),
            "title": "paceline job",
            "description": "What `paceline submit FILE.yaml` reads",
            "anyOf": [{"required": [program]} for program in ("script", "module", "command")],
            "$defs": parts,
        }

    def dumped(self, *, only_given: bool = False, only_changed: bool = False) -> dict[str, Any]:
        """See `Model.dumped`; durations have a unit."""
        found = super().dumped(only_given=only_given, only_changed=only_changed)
        return {
            **found,
            **{name: duration_text(found[name]) for name in _DURATIONS if isinstance(found.get(name), float)},
        }

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
    def _credentials(self) -> dict[str, str]:
        found: dict[str, str] = self.__dict__.get("credentials", {})
        return found

    @property
    def git_credentials(self) -> dict[str, str]:
        """GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD: the job's own, or else those of this process."""
        return {name: os.environ[name] for name in GIT_CREDENTIALS if os.environ.get(name)} | self._credentials

    @property
    def has_unused_credentials(self) -> bool:
        """Whether it was given credentials for git, which fetches nothing for it."""
        return bool(self._credentials) and (self.code is None or self.code.mode != "git")

    def stored(self, *, only_given: bool = False) -> dict[str, Any]:
        """The job as it is stored: what JSON can hold, with durations in seconds; perhaps without its defaults.

        `user` says who has submitted it.
        """
        return {**super().dumped(only_given=only_given), "user": _user()}

    @classmethod
    def from_stored(cls, job: Any) -> JobSpec:
        """What `stored` or `for_node` has returned."""
        if not isinstance(job, Mapping):
            return cls.validated(job)
        seconds = {name: job[name] for name in _DURATIONS if isinstance(job.get(name), (int, float))}
        fields = {name: value for name, value in job.items() if name != "user"}
        return cls.validated({**fields, **{name: duration_text(value) for name, value in seconds.items()}})

    @classmethod
    def planned(cls, job: NodeJob) -> JobSpec:
        """A job as a node has completed it; its name and framework may be placeholders."""
        placeholders = {"name": job.name, "framework": job.framework}
        return cls.from_stored(replace(job, name="", framework=None).to_json()).changed(placeholders)

    def for_node(self, name: str | None = None) -> NodeJob:
        """The job as a node reads it, perhaps with another name, with the fields of `rendezvous` among its own."""
        job = self.stored()
        return NodeJob.from_json({**job, **job["rendezvous"], "name": self.name if name is None else name})

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the most nodes."""
        low, _, high = str(self.nodes).partition(":")
        return int(low), int(high or low)
