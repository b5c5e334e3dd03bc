"""What the flags of `paceline run` mean, torchrun's and Horovod's as well as paceline's own: a `JobSpec`."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import shlex
import shutil
import sys
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import click

from paceline.backends.base import MOST_RANKS
from paceline.backends.registry import HERE, default_target
from paceline.cli.terminal.write import say_once
from paceline.contract.tensorflow import ROLES
from paceline.job.errors import UserError
from paceline.job.flags import flag_of
from paceline.job.model import InvalidError
from paceline.job.quantities import duration_text
from paceline.job.secret_values import notes_on_secrets
from paceline.job.spec import JobSpec

from .option import TYPED, flags_of, parse_address, parse_pairs
from .where import kind_of_hosts, kind_of_place, named, nnodes, options_of, taking_part

if TYPE_CHECKING:
    from paceline.job.spec import Code

    from .job import Given

    Flags = TypeVar("Flags", bound=Given)  # those of the verb

JOB_FILES = (".yaml", ".yml", ".json")
_SCRIPTS = (".sh", ".sbatch", ".slurm", ".bash")
_MOST_BYTES = 1 << 16  # in which options for sbatch stand
_MOST_NODES, _SHOWN = 1 << 16, 20  # of a job; characters of a number
Counted = Literal["auto", "gpu", "cpu", "slots"]
HANDLED_SIGNALS = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP", "SIGUSR1", "SIGUSR2")  # by every agent
_METHODS = {"spawn": "exec", "forkserver": "fork"}  # of Python → the one that does the same here
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# Launchers, and kinds of jobs of Arena's: what people type in the place of SCRIPT who have used these.
_OTHERS = frozenset({
    "torchrun", "horovodrun", "fleetrun", "mpirun", "mpiexec", "orterun", "srun", "sbatch", "arena", "paddlecloud",
    "accelerate", "deepspeed", "swift", "llamafactory-cli",
    "pytorch", "pytorchjob", "tf", "tfjob", "mpi", "mpijob", "horovod", "horovodjob",
})  # fmt: skip


def say_what_means_nothing(given: Given) -> None:
    """Say on stderr which flags of torchrun have no effect, and what to use instead; defaults are not reported."""
    kept = "all lines are kept; show such lines with paceline logs JOB --all --grep TEXT"
    events = "paceline records the events of a job itself; show them with paceline events JOB"
    for flag, value, instead in (
        ("--duplicate-stdout-filters", given.duplicate_stdout_filters, kept),
        ("--duplicate-stderr-filters", given.duplicate_stderr_filters, kept),
        ("--event-log-handler", given.event_log_handler, events),
        ("--logs-specs", given.logs_specs, "--log-dir says where logs go, --tee and --redirects what is shown"),
        ("--monitor-interval", given.monitor_interval, "paceline waits for events"),
    ):
        if value not in (None, "", "null", "default"):
            click.echo(f"paceline: {flag} has no effect: {instead}", err=True)


def say_what_is_exposed(spec: JobSpec) -> None:
    """Say on stderr, once, which variables look like secrets and are stored with the job."""
    for line in notes_on_secrets(spec.env, spec.setup, spec.has_unused_credentials):
        say_once(line)


def say_what_idles(spec: JobSpec) -> None:
    """Say on stderr, once, that a job that can start has more devices than ranks."""
    if isinstance(spec.devices, tuple) and len(spec.devices) > 1 and "ranks" not in spec.given:
        say_once(f"one rank starts for {len(spec.devices)} devices; -n gpu starts one for each")


def spec_of(given: Flags, verb: click.Command) -> tuple[JobSpec, Flags]:
    """The job that SCRIPT and the flags describe, and all the flags; SCRIPT may be a job file, with flags behind it."""
    given = _program_of(given, verb)
    path = given.script
    if not (given.module or given.no_python) and _is_batch(path):
        from .jobfile import refuse

        refuse(path, str(verb.name), _typed_flags(verb), spec_of)
    if given.module or given.no_python or not path.lower().endswith(JOB_FILES):
        try:
            return JobSpec.validated(fields(given)), given
        except InvalidError as error:
            raise error.named(flag_of) from None
    from paceline.job.reading import read

    if given.args:
        given = type(given)(verb.make_context(verb.name, [*_words_before(given), *given.args, path]).params)
        if given.script != path or given.args:
            raise UserError(f"{path} contains the script's arguments; only flags may follow it")
    flags = copy.copy(given)
    flags.script, flags.args = "", ()
    try:
        spec = read(path, fields(flags), flag_of)
    except UserError:
        from .jobfile import refuse

        refuse(path, str(verb.name), _typed_flags(verb), spec_of)
        raise
    if spec.script and spec.code is None and not os.path.exists(os.path.join(spec.working_dir, spec.script)):
        folder = os.path.dirname(path)
        if os.path.exists(os.path.join(folder, spec.script)):
            raise UserError(f"no script {spec.script} here, but beside {path}; go there, or add --working-dir {folder}")
    return spec, given


def _is_batch(path: str) -> bool:
    """Whether a script of the shell has options for sbatch."""
    if path.lower().endswith(_SCRIPTS):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            return b"\n#SBATCH" in b"\n" + file.read(_MOST_BYTES)
    return False


def fields(given: Given) -> dict[str, object]:
    """The fields of a job that the flags name."""
    given = _with_roles(given)
    hosts = taking_part(given)
    count = nnodes(given, hosts) or (str(len(hosts)) if hosts else None)
    nodes, most = _nodes(count or "1")
    if given.logdir is not None and not given.tensorboard:
        raise UserError("--logdir is what a TensorBoard shows; add --tensorboard")
    found: dict[str, object] = {
        "name": given.name,
        "args": given.args or None,
        "framework": given.framework,
        "horovod": given.horovod,
        "nodes": count,
        "ranks": _ranks(given, nodes, bool(hosts)),
        "devices": _devices(given),
        "share_devices": given.share_devices or None,
        "cpus": given.cpus,
        "memory": given.memory,
        "image": given.image,
        "env": parse_pairs("--env", given.env, variable=True) or None,
        "secrets": given.secret or None,
        "setup": given.setup or None,
        "environment": given.environment,
        "working_dir": os.path.abspath(given.working_dir) if given.working_dir else None,
        "code": _code(given.sync_mode, given.sync_source),
        "data": given.data or None,
        "tensorboard": given.tensorboard or None,
        "tensorboard_dir": given.logdir,
        "log_dir": given.log_dir or _output_folder(given, bool(hosts)),
        "checkpoint_dir": given.checkpoint_dir,
        "start_method": _METHODS.get(given.start_method or "", given.start_method),
        "preload": tuple(filter(None, (given.preload or "").split(","))) or None,
        "max_restarts": given.max_restarts,
        "keep_warm": given.keep_warm,
        "time_limit": given.time_limit,
        "ttl": given.ttl,
        "priority": given.priority,
        "queue": given.queue,
        "labels": parse_pairs("--label", given.label) or None,
        "options": {**parse_pairs("--option", given.option), **options_of(given, job=True)} or None,
        "backend": kind_of_hosts(given) if hosts else given.on,
        "grace": _grace(given),
        "hang": given.hang,
        "hang_after": given.hang_after,
        "pass_index": given.pass_index or None,
        "role": given.role,
        "numa_binding": given.numa_binding,
        "use_env": given.use_env or None,
        "virtual_local_rank": given.virtual_local_rank or None,
        **_program(given),
        **_meeting(given, most, bool(hosts)),
    }
    return {name: value for name, value in found.items() if value is not None}


def _with_roles(given: Given) -> Given:
    """The flags where the roles that TensorFlow's have named are ranks, besides those that --workers counts."""
    counts = {"chief": given.chief or 0, "evaluator": given.evaluator or 0, "ps": given.ps or 0}
    if not any(counts.values()):
        return given
    flags = ", ".join(f"--{role}" for role, number in counts.items() if number)
    if given.framework not in (None, "tensorflow"):
        raise UserError(f"{flags}: only --framework tensorflow has such ranks; leave {flags} out")
    if given.ranks is not None or given.total is not None:
        raise UserError(f"{flags}: --workers counts the other ranks; write it in the place of -n and -np")
    workers = given.nnodes or "1"
    if not workers.isdecimal() or int(workers) < 1:
        raise UserError(f"--workers {workers} is no number of workers; write for example --workers 2")
    count = int(workers) + sum(counts.values())
    roles = [role if role != "ps" else f"ps={number}" for role, number in counts.items() if number]
    given = copy.copy(given)
    given.framework, given.env = "tensorflow", (*given.env, f"{ROLES}={','.join(roles)}")
    given.nnodes = None
    if named(given):
        given.total = count
    elif (given.on or default_target()) == HERE:
        given.ranks = str(count)
    else:
        given.nnodes = str(count)
    return given


def _code(mode: str | None, source: str | None) -> Code | None:
    if mode is None and source is None:
        return None
    from paceline.job.code.bring import parse  # brings much along that most jobs do not need

    return parse(mode, source)


def _output_folder(given: Given, on_hosts: bool) -> str | None:
    if given.output_filename is not None and (on_hosts or given.on):
        raise UserError("--output-filename: the logs stay on the hosts; leave it out, and see them with paceline logs")
    return given.output_filename


def _program(given: Given) -> dict[str, object]:
    if given.module and given.no_python:
        raise UserError("--module and --no-python contradict each other; give one of them")
    return {"module" if given.module else "command" if given.no_python else "script": given.script or None}


def _ranks(given: Given, nodes: int, on_hosts: bool) -> int | Counted | None:
    ranks, total = given.ranks, given.total
    if total is not None:
        if ranks is not None and os.environ.get("PET_NPROC_PER_NODE") != ranks:
            raise UserError("-np counts the ranks of all nodes, -n those of one; give one of them")
        if on_hosts:
            return "slots"
        if total < 1 or total % nodes:
            raise UserError(f"-np {total} cannot be shared by {nodes} nodes; take a positive multiple of {nodes}")
        return int(total // nodes)
    if ranks is None:
        return "slots" if on_hosts else None
    if ranks in ("auto", "gpu", "cpu"):
        return cast("Counted", ranks)
    try:
        count = int(ranks)
    except ValueError:
        raise UserError(f"-n {shlex.quote(ranks)} is neither a number nor auto, gpu or cpu") from None
    if count < 1:
        raise UserError(f"-n {count} starts no rank; take 1 or more")
    if count > MOST_RANKS:
        raise UserError(f"-n {count} is more ranks than one machine can have; take {MOST_RANKS} or fewer")
    return count


def _meeting(given: Given, nodes: int, on_hosts: bool) -> dict[str, object]:
    """This node's number, and where the nodes meet."""
    backend = given.rdzv_backend
    if backend not in (None, "c10d", "static"):
        raise UserError(f"--rdzv-backend {backend}: paceline has its own rendezvous; leave the flag out, or give c10d")
    if given.standalone and nodes > 1:
        raise UserError(f"--standalone is one machine, --nnodes {nodes} is several; leave one of them out")
    meeting: dict[str, object] = {"run_id": given.rdzv_id, "local_address": given.local_addr}
    address, port = given.master_addr, given.master_port
    if given.rdzv_endpoint and nodes > 1:
        if on_hosts or given.on:
            raise UserError("--rdzv-endpoint: hosts that ssh reaches find each other by themselves; leave it out")
        if address is not None:
            raise UserError("--rdzv-endpoint and --master-addr name the same thing; give one of them")
        address, endpoint_port = parse_address("--rdzv-endpoint", given.rdzv_endpoint)
        port = port or endpoint_port or 29400
    meeting.update(main_address=address if nodes > 1 else None, main_port=port)
    meeting["node_rank"] = given.node_rank if nodes > 1 else None
    times: dict[str, object] = {name: duration_text(it) for name, it in _times(given.rdzv_conf or "").items()}
    if given.start_timeout is not None:
        times["join_timeout"] = given.start_timeout
    return {**times, "rendezvous": {key: value for key, value in meeting.items() if value is not None} or None}


def _grace(given: Given) -> str | None:
    """Between SIGTERM and SIGKILL; also torchrun's flags that say how ranks are signalled are looked at."""
    for name in filter(None, (given.signals_to_handle or "").split(",")):
        if name.strip() not in HANDLED_SIGNALS:
            handled = ", ".join(HANDLED_SIGNALS)
            raise UserError(f"--signals-to-handle {name.strip()}: paceline handles {handled}; leave it out")
    if given.grace is not None and given.shutdown_timeout is not None:
        raise UserError("--grace and --shutdown-timeout say the same; give one of them")
    seconds = given.shutdown_timeout  # torchrun's unit
    return given.grace if seconds is None else duration_text(seconds)


def _times(conf: str) -> dict[str, float]:
    """What torchrun's --rdzv-conf says of times that mean something here."""
    given = dict(pair.partition("=")[::2] for pair in conf.split(",") if pair)
    found = {}
    for key in ("join_timeout", "timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt"):
        if key in given:
            try:
                found[key] = float(given[key])
                if not 0 < found[key] < float("inf"):
                    raise ValueError
            except ValueError:
                raise UserError(f"--rdzv-conf {key}={given[key]} is not a number of seconds") from None
    times = {}
    if "join_timeout" in found or "timeout" in found:
        times["join_timeout"] = found.get("join_timeout", found.get("timeout", 0.0))
    if "last_call_timeout" in found:
        times["last_call"] = found["last_call_timeout"]
    if "keep_alive_interval" in found or "keep_alive_max_attempt" in found:  # torchrun's defaults are 5 and 3
        times["silence"] = found.get("keep_alive_interval", 5.0) * found.get("keep_alive_max_attempt", 3.0)
    return times


def _nodes(text: str) -> tuple[int, int]:
    """The least and the most machines."""
    low, colon, high = text.partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()) or not low.strip("0"):
        raise UserError(f"--nnodes {text!r} is not a number of machines; write for example --nnodes 2")
    if max(len(low), len(high)) > len(str(_MOST_NODES)) or max(int(low), int(high or 0)) > _MOST_NODES:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        raise UserError(f"--nnodes {shown!r} is more than {_MOST_NODES} machines; give fewer")
    return int(low), int(high or low)


def _devices(given: Given) -> int | tuple[str, ...] | None:
    text = given.devices
    if text is None:
        return given.gpus
    if given.gpus is not None:
        raise UserError("--devices says which GPUs, --gpus how many; give one of them")
    devices = tuple(part.strip() for part in text.split(","))
    if len(set(devices)) < len(devices):
        raise UserError(f"--devices {text!r} names a device twice; name each once")
    if not all(devices):
        raise UserError(f"--devices {text!r} is not a list of devices; write for example --devices 0,1")
    return devices


# -- the program -------------------------------------------------------------------------------------------------------


def _program_of(given: Flags, verb: click.Command) -> Flags:
    """The flags with SCRIPT and ARGS as if the user had named the script alone.

    `python [-u] [-m] SCRIPT` is SCRIPT if that is the Python of the ranks anyway, so that they can be forked. With
    another Python, or other options of Python, it is a command.
    """
    words, given = [given.script, *given.args], copy.copy(given)
    if given.module:
        _refuse_launchers(verb, ["python", "-m", *words])
    if given.module or given.no_python:
        return given
    if given.of_backends.get("plain") and words[0] in _OTHERS:  # the launcher is the image's
        given.no_python = True
        return given
    folder = given.working_dir or "."
    if " " in words[0].strip() and not os.path.exists(os.path.join(folder, words[0])):
        if not words[1:] and any(it in words[0] for it in ("&&", ";", "\n")):
            from paceline.cli.dialects.script import setup_line

            if (answer := setup_line(str(verb.name), _typed_flags(verb), words[0])) is not None:
                raise UserError(answer)
        try:
            words[:1] = shlex.split(words[0])
        except ValueError as error:
            raise UserError(f"{words[0]!r}: {str(error).lower()}; write the command without quotes around it") from None
    is_file = not os.path.isabs(words[0]) and os.path.isfile(os.path.join(folder, words[0]))
    if not is_file:
        _refuse_launchers(verb, words)
    if not _PYTHON.fullmatch(os.path.basename(words[0])) or is_file:
        given.script, given.args = words[0], tuple(words[1:])
        return given
    python, *rest = words
    options = []
    while rest and rest[0] in ("-u", "-m"):
        options.append(rest.pop(0))
    if not rest:
        raise UserError(f"{' '.join(words)} names no script; write for example paceline run train.py")
    if rest[0].startswith("-") or not _is_that_of_ranks(python, given):
        given.no_python, given.script, given.args = True, python, tuple(words[1:])
        return given
    given.module, given.script, given.args = "-m" in options, rest[0], tuple(rest[1:])
    return given


def _refuse_launchers(verb: click.Command, words: list[str]) -> None:
    is_python = _PYTHON.fullmatch(os.path.basename(words[0])) is not None
    if words[0] in _OTHERS or (is_python and any(word.endswith((".run", ".launch")) for word in words[2:])):
        from paceline.cli.dialects.tools import old_program

        flags = [it for it in _typed_flags(verb) if it[0] != "-m"]  # which said that the launcher is a module
        if (answer := old_program(str(verb.name), flags, words)) is not None:
            raise UserError(answer)


def _typed_flags(verb: click.Command) -> list[tuple[str, ...]]:
    """The flags before SCRIPT, one by one."""
    return flags_of(verb, _typed())


def _typed() -> list[str]:
    """The words behind the verb, as they were typed."""
    context = click.get_current_context(silent=True)
    return [] if context is None else context.meta.get(TYPED, [])


def _words_before(given: Given) -> list[str]:
    """The words that were typed before a job file which has flags behind it."""
    words, behind = _typed(), [given.script, *given.args]
    if words[-len(behind) :] != behind:  # a launcher or a script of sbatch stands there
        raise UserError(f"{given.script} contains the script's arguments; give its flags before it")
    before = words[: -len(behind)]
    return before[:-1] if before[-1:] == ["--"] else before


def _is_that_of_ranks(python: str, given: Given) -> bool:
    """Whether ranks have this Python without being told; on other machines `python` alone is the one of their target.

    The PATH of this machine says nothing of others, where often no program is named `python`.
    """
    found, is_named = shutil.which(python), python not in ("python", "python3")
    is_ours = (
        not is_named if found is None else os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable)
    )
    kind = kind_of_place(given)
    if kind == HERE:
        return is_ours
    is_chosen = is_named or is_ours or "ssh_python" in given.of_backends
    if not is_chosen and kind not in (None, "kubernetes"):  # an image has its own
        say_once(
            f"{python} is that of the target, not {found} of this machine; to choose another, write its whole path"
        )
    return not is_named
