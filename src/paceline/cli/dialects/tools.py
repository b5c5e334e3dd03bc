"""The tools that paceline knows, each loaded when one of its lines is read."""

from __future__ import annotations

import importlib
import os
import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.job.errors import UserError, nearest
from paceline.job.flags import ELSEWHERE, flag_of

from .engine import PYTHON, Line, Tool, knows, parse, settle
from .shell import ASSIGNED, Command, bare, commands, given_to_shell, has_bare, is_expanded, is_variable, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# verb → where its table is
TOOLS = {
    "torchrun": "torchrun:TORCHRUN",
    "torch-launch": "torchrun:TORCH_LAUNCH",
    "horovodrun": "horovodrun:HOROVODRUN",
    "paddle-launch": "paddle:PADDLE_LAUNCH",
    "mpirun": "mpirun:MPIRUN",
    "srun": "srun:SRUN",
    "accelerate": "accelerate:ACCELERATE",
    "arena": "arena:ARENA",
    "paddlecloud": "paddlecloud:PADDLECLOUD",
}
# Those whose lines are not read behind `paceline`, only explained.
_EXPLAINED = {
    "sbatch": "srun:SBATCH",
    "salloc": "srun:SALLOC",
    "ssh": "ssh:SSH",
    "deepspeed": "deepspeed:DEEPSPEED",
    "swift": "finetune:SWIFT",
    "llamafactory-cli": "finetune:LLAMAFACTORY",
}
_PROGRAMS = {
    **{tool: tool for tool in (*TOOLS, *_EXPLAINED)},
    "fleetrun": "paddle-launch",
    "mpiexec": "mpirun",
    "orterun": "mpirun",
}
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch-launch",
    "paddle.distributed.launch": "paddle-launch",
    "paddle.distributed.fleet.launch": "paddle-launch",
    "fleet.launch": "paddle-launch",
    "horovod.runner.launch": "horovodrun",
    "accelerate.commands.launch": "accelerate launch",
}
# Verbs of other tools that paceline has under another name, or not at all.
_VERBS = {
    "job": "paceline run SCRIPT, or paceline submit SCRIPT",
    "sky": "paceline submit SCRIPT",
    "deepspeed": "paceline run -n gpu SCRIPT",
    "python": "paceline run SCRIPT",
    "launch": "paceline run SCRIPT, or paceline submit SCRIPT",
    "train": "paceline run SCRIPT, or paceline submit SCRIPT",
    "exec": "paceline attach JOB -- COMMAND",
    "ssh": "paceline attach JOB",
    "status": "paceline get JOB",
    "describe": "paceline get JOB",
    "info": "paceline get JOB",
    "queue": "paceline list",
    "jobs": "paceline list",
    "ls": "paceline list",
    "ps": "paceline list",
    "log": "paceline logs JOB",
    "logviewer": "paceline logs JOB",
    "cancel": "paceline stop JOB",
    "kill": "paceline stop --now JOB",
    "down": "paceline stop JOB",
    "scancel": "paceline stop JOB",
    "sbatch": "paceline submit --on slurm SCRIPT",
    "salloc": "paceline run --on slurm SCRIPT",
    "squeue": "paceline list",
    "rm": "paceline delete JOB",
    "requeue": "paceline resubmit JOB",
    "unsuspend": "paceline resume JOB",
    "config": "paceline check",
    "env": "paceline check",
    "runopts": "paceline run --help-all",
    "version": "paceline --version",
    "nvidia-smi": "paceline top node",
    "gpustat": "paceline top node",
    "nvitop": "paceline top node",
    "nvtop": "paceline top node -w",
}
# Those of kubectl.
_KUBECTL = {
    "apply": "paceline submit FILE",
    "create": "paceline submit FILE",
    "port-forward": "paceline tensorboard JOB",
    "get": "paceline list, or paceline get JOB",
    "describe": "paceline get JOB, or paceline why JOB",
    "events": "paceline events JOB",
    "logs": "paceline logs JOB",
    "exec": "paceline attach JOB",
    "delete": "paceline delete JOB",
    "top": "paceline top node, or paceline top job",
    "wait": "paceline wait JOB",
}
# Flags that no tool here has, or none in this form; those of a verb stand behind it, of submit behind run.
_ELSEWHERE = "paceline starts jobs on machines that are there: write --on TARGET, or -H HOSTS"
_RESUMES = "paceline resubmit JOB goes on from its last checkpoint; a flag of the script stands behind SCRIPT"
_FOLLOWS = "paceline run shows its job until it ends; of paceline submit, paceline logs -f JOB does"
_ALL = "name the jobs, which paceline list shows"
_FLAGS = {
    "--nproc": "write -n N, for ranks on each machine",
    "--nprocs": "write -n N, for ranks on each machine",
    "--ranks": "write -n N, for ranks on each machine",
    "--world-size": "write -np N, for ranks on all machines",
    "--num-gpus": "write -n gpu, for a rank per GPU; --gpus N asks for GPUs of each machine",
    "--cluster": _ELSEWHERE,
    "--cloud": _ELSEWHERE,
    "--use-spot": f"{_ELSEWHERE}; --max-restarts N survives lost ones",
    "run --config": "a job file stands in the place of SCRIPT; a flag of the script stands behind it",
    "run --resume": _RESUMES,
    "run --resume-from": _RESUMES,
    "run --resume-from-checkpoint": _RESUMES,
    "run --device": "write --devices LIST, or --gpus N; --resources NAME=N asks a cluster for others",
    "run --cpu": "write --cpus N; Accelerate's --cpu is --env ACCELERATE_USE_CPU=true",
    "run --backend": "write --on TARGET; torch's is an argument of init_process_group in the script",
    "run -d": "write --detach; srun's -d is --on slurm --slurm dependency=LIST",
    "run --background": "write --detach",
    "run -o": "paceline get JOB -o json shows the job; srun's file of output is paceline srun -o",
    "run --output": "paceline get JOB -o json shows the job; srun's file of output is paceline srun --output",
    "run --wait": _FOLLOWS,
    "run --watch": _FOLLOWS,
    "run --follow": _FOLLOWS,
    "list --status": "write --state STATE",
    "list --running": "write --state RUNNING",
    "list -a": "write -A",
    "logs --rank": "write -i N",
    "logs -r": "write -i N",
    "logs -n": "write -t N",
    "logs --lines": "write -t N",
    "stop --all": _ALL,
    "stop -a": _ALL,
    "stop --force": "write --now",
    "delete --all": f"{_ALL}; paceline prune -s 0s deletes all that have ended",
    "delete -f": "write --force",
    "prune --all": "write -s 0s, for all that have ended",
    "prune --older-than": "write -s 7d",
    "resubmit --resume": "leave it out: paceline resubmit goes on from the last checkpoint",
}
_RESERVED = {"if", "then", "else", "elif", "while", "until", "do", "{", "!", "time", "exec"}  # words of the shell
_KINDS = ("pytorch", "pytorchjob", "tf", "tfjob", "mpi", "mpijob", "horovod", "horovodjob")  # behind `arena submit`
# How nodes find each other: of a launcher within a job, this is paceline's task.
MEETING = (
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--standalone",
)
# Commands that start the command behind them.
_WRAPPERS = {
    "env", "sudo", "timeout", "nice", "ionice", "numactl", "taskset", "stdbuf", "setsid", "strace", "xvfb-run", "nsys",
    "uv", "poetry", "pipenv", "pdm", "hatch", "pixi", "conda", "mamba", "micromamba", "docker", "podman", "singularity",
    "apptainer", "enroot", "kubectl", "screen", "tmux", "nohup",
}  # fmt: skip


def load(name: str) -> Tool:
    """The tool behind a verb."""
    module, _, attribute = {**TOOLS, **_EXPLAINED}[name].partition(":")
    found: Tool = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    return found


def recognised(words: Sequence[str]) -> tuple[Tool, list[str]] | None:
    """The tool that a command line calls, and the words behind its name; None for other programs."""
    rest = list(words)
    if rest[:1] == ["paceline"] and rest[1:2] and rest[1] in TOOLS:
        rest = rest[1:]
    if not rest:
        return None
    name = _PROGRAMS.get(os.path.basename(rest[0]))
    if name is None and (PYTHON.fullmatch(os.path.basename(rest[0])) or is_expanded(rest[0])):  # $(which python)
        rest = [word for word in rest[:2] if word != "-u"] + rest[2:]
        if (debugged := _debugged(rest)) is not None:
            return recognised(debugged)
        if rest[1:2] == ["-m"] and len(rest) > 2 and rest[2] in _MODULES:
            known, *verb = _MODULES[rest[2]].split()
            return load(known), [*verb, *rest[3:]]
        return None
    if name == "sbatch" and not any(word.startswith("--wrap") for word in rest):
        return None
    if name in ("swift", "llamafactory-cli") and not (rest[1:] and rest[1] in load(name).tools):
        return None
    if name is None or (name in ("salloc", "ssh") and not _starts_one(" ".join(rest[1:]))):
        return None
    return load(name), rest[1:]


_DEBUGGED = (
    "debugpy is left out, since an agent starts the ranks: write in the script "
    "debugpy.listen(5678 + int(os.environ['LOCAL_RANK'])); debugpy.wait_for_client()"
)


def _debugged(words: Sequence[str]) -> list[str] | None:
    """`python -m MODULE …` of `python -m debugpy … -m MODULE …`; None for other commands."""
    if list(words[1:3]) != ["-m", "debugpy"] or "-m" not in words[3:]:
        return None
    return [words[0], *words[words.index("-m", 3) :]]


def _starts_one(text: str) -> bool:
    """Whether a launcher is somewhere in the commands of a text."""
    inside = [command.words.split() for command in commands(plain(text))]
    return any(recognised(words[start:]) for words in inside for start in range(len(words)))


def unwrap(line: Line) -> None:
    """Replace a launcher in the program by what its flags become: paceline starts the ranks itself."""
    program, text = line.program, given_to_shell(line.program)
    if text is not None:
        inside = commands(text)
        program = shlex.split(inside[0].words) if len(inside) == 1 and not inside[0].redirected else program
    found = recognised(program)
    inner = None if found is None else parse(*found)
    if inner is not None:
        inner.take(*MEETING)
    if program and os.path.basename(program[0]) in _WRAPPERS and _starts_one(" ".join(program)):
        line.notes.append(
            f"the launcher behind {program[0]} starts on every rank: leave it out, and give paceline its flags"
        )
    if text is not None and (any(map(_of_rank(text), inner.words())) if inner is not None else _starts_one(text)):
        shell = line.program[0]
        line.notes.append(f"the launcher within {shell} -c starts on every rank: write its line without {shell} -c")
        return
    if inner is None:
        return
    if text is not None:
        inner.flags = [tuple(map(bare, words)) for words in inner.flags]
        inner.program = list(map(bare, inner.program))
    if any(words[0] in ("-n", "-np") for words in inner.flags):
        line.take("-n", "-np")
    if line.get("--gpus") is not None:
        inner.take("--devices")
    has = {words[0] for words in line.flags}
    line.flags += [words for words in inner.flags if words[0] not in has or words[0] == "--env"]
    line.notes += inner.notes
    line.program = inner.program


def _of_rank(text: str) -> Callable[[str], bool]:
    """Says whether a word in TEXT of `sh -c TEXT` has a variable of each rank, not of the shell that reads the line."""
    return has_bare if is_expanded(text) else is_expanded


def explained(text: str) -> tuple[str, list[str]]:
    """A line of the shell in which launchers are replaced by paceline, and what the user is told about it."""
    found = commands(text)
    is_batch = any(command.words.startswith("#SBATCH") for command in found)
    try:
        found = [it for command in found for it in inlined(command)]
        lines = [launched(command) for command in found]
        if not any(lines):
            lines = [launched(command, is_alone=True) for command in found]
        if not any(lines):
            raise UserError(_unknown(found))
    except UserError as error:
        raise UserError(plain(str(error))) from None
    said, notes = "", list[str]()
    for started in (it for it in lines if is_batch and it is not None and it.get("--on") == "slurm"):
        started.take("--on")
        started.notes.append(
            "lines #SBATCH stay: in its allocation, paceline run takes the nodes and tasks that they ask for"
        )
    for command, line in zip(found, lines, strict=True):
        said += " ".join(filter(None, (plain(command.words) if line is None else line.text(), command.redirected)))
        said += {"\n": "\n", ";": "; ", "(": "(", ")": ")", "": ""}.get(command.end, f" {command.end} ")
        notes += [] if line is None else map(plain, line.notes)
    return said.strip(), notes


def parts(command: Command) -> tuple[list[str], list[str]]:
    """The words of a command: variables, words of the shell, and commands that start others; and those behind them."""
    if command.words.startswith("#"):
        return [], []
    try:
        words = shlex.split(command.words)
    except ValueError as error:
        raise UserError(
            f"{plain(command.words)!r}: {str(error).lower()}; put the line into quotes of the other kind"
        ) from None
    words = words[1:] if words[:1] == ["$"] else words
    others = (place for place, it in enumerate(words) if not (ASSIGNED.fullmatch(it) or plain(it) in _RESERVED))
    start = next(others, len(words))
    if words[start:] and os.path.basename(words[start]) in _WRAPPERS:
        behind = range(start, len(words))
        start = next(
            (it for it in behind if recognised(words[it:]) is not None or given_to_shell(words[it:]) is not None), start
        )
    return words[:start], words[start:]


def inlined(command: Command) -> list[Command]:
    """The commands that one gives to a shell, as in `bash -c "LINE"`; or itself, if no launcher is among them."""
    before, words = parts(command)
    text = given_to_shell(words)
    inside = [] if text is None else [it for one in commands(plain(text)) for it in inlined(one)]
    if not any(recognised(parts(it)[1]) for it in inside):
        return [command]
    if len(inside) == 1:
        redirected = " ".join(filter(None, (inside[0].redirected, command.redirected)))
        return [Command(" ".join((*map(shlex.quote, before), inside[0].words)), redirected, command.end)]
    if before:
        raise UserError(f"{before[0]} … {words[0]} -c: explain what stands in its quotes; paceline explain LINE")
    return [Command("", "", "("), *inside, Command("", "", ")"), Command("", command.redirected, command.end)]


def launched(command: Command, *, is_alone: bool = False) -> Line | None:
    """The line that one command becomes; None if it starts no launcher, or without one if it is alone no script."""
    before, words = parts(command)
    found = recognised(words)
    if found is None:
        is_script = is_alone and len(words) > 1 and PYTHON.fullmatch(os.path.basename(words[0])) is not None
        return Line(program=words, before=before) if is_script else None
    tool, typed = found
    line = _line_of(tool, typed, before)
    if line is None:
        return None
    if _debugged([word for word in words if word != "-u"]) is not None:
        line.notes.append(_DEBUGGED)
    if "nohup" in line.before:
        line.before.remove("nohup")
        line.notes.append("nohup is not needed: a job of paceline submit, or run --detach, outlives the terminal")
    return line


def _line_of(tool: Tool, typed: list[str], before: list[str]) -> Line | None:
    """What a line of a tool becomes; one whose flags only the shell knows, or that asks for help, stays as it is."""
    try:
        line = parse(tool, typed, outer=Line(before=before))
        is_open = _may_hold_flags(line.program)
    except UserError as error:
        if not is_expanded(str(error)):
            raise
        line, is_open = Line(), True
    if tool.name not in TOOLS:
        if is_open:
            raise UserError(f"{tool.name}: a variable may hold its flags; write them out")
        return line if line.helped is None else None
    if not is_open and line.helped is None:
        return line
    why = f"it stays a line of {tool.name}, which is read when its variables have values"
    return Line(tool.name, program=typed, notes=[why] if is_open else [], before=before)


def _may_hold_flags(program: Sequence[str]) -> bool:
    """Whether what is taken for a program is a variable, which may hold a launcher or its flags."""
    text = given_to_shell(program)
    words = program if text is None else bare(text).split()
    return bool(words) and is_variable(words[0])


def _unknown(found: Sequence[Command]) -> str:
    """Why a line has nothing to explain, and what to do."""
    found = [it for it in found if it.words and not it.words.startswith("#")]
    if not found:
        return "there is no line to explain; write it in quotes, for example 'torchrun --nproc-per-node 2 train.py'"
    words = plain(found[-1].words).split()
    name = os.path.basename(words[0])
    files = [word for word in words[1:] if not word.startswith("-")]
    if name in ("sh", "bash", "sbatch") and files and "-c" not in words:
        lines = "; lines #SBATCH hold flags of srun" if name == "sbatch" else ""
        file = next((it for it in files if it.endswith((".sh", ".sbatch", ".slurm"))), files[-1])
        return f'{name}: the lines in the file matter; write paceline explain "$(cat {file})"{lines}'
    if name in ("sh", "bash") and "-c" in words:
        return f"{name} -c: no launcher that paceline knows stands in its quotes"
    if name.startswith("$"):
        return f"{name} may hold a launcher; then write paceline before it: paceline {' '.join(words)}"
    if (answer := _instead(words)) is not None:
        return f"{name} is no launcher; write {answer}"
    if name.lower().endswith((".yaml", ".yml", ".json", ".py", ".sh", ".sbatch", ".slurm")):
        return f"no file {words[0]} in {os.getcwd()}; check the name and the folder"
    known = ", ".join((*TOOLS, *_EXPLAINED))
    return f"{name} is no launcher that paceline knows; they are {known}, and python -m of their modules"


# -- old flags and verbs behind verbs of paceline ----------------------------------------------------------------------


def old_verb(verb: str, words: Sequence[str], own: Sequence[str]) -> str:
    """What is said of a verb that paceline does not have, with the words behind it."""
    if (answer := _instead([verb, *words])) is not None:
        return f"paceline has no verb {verb!r}; write {answer}"
    if verb in _PROGRAMS:
        return f"paceline has no verb {verb!r}; write paceline {_PROGRAMS[verb]}"
    if verb.endswith((".py", ".sh", ".yaml", ".yml")):
        return f"{verb} is no verb; write paceline run {verb}"
    return f"paceline has no verb {verb!r}; {nearest(verb, own)}"


def _instead(words: Sequence[str]) -> str | None:
    """What to write for a command that starts no ranks; None if nothing is known of it."""
    name, *behind = words
    plain_words = [word for word in behind if not word.startswith("-")]
    if name == "watch":
        inner = next(
            (behind[place:] for place, it in enumerate(behind) if it in _VERBS or it in ("kubectl", "paceline")), []
        )
        answer = _instead(inner) if inner[:1] != ["paceline"] else " ".join(inner)
        return answer and f"{answer} -w"
    if name != "kubectl":
        return _VERBS.get(name)
    verb = next((it for it in plain_words if it in _KUBECTL), "")
    files = [word for word in behind if word.lower().endswith((".yaml", ".yml", ".json"))]
    if verb in ("apply", "create") and files:
        return f"paceline submit {files[0]}"
    if verb == "port-forward":
        match = re.search(r"(?:^|/)([\w.-]+)-tensorboard(?= |$)(?:.* (\d+):\d+)?", " ".join(plain_words))
        job, port = ("JOB", None) if match is None else match.groups()
        return f"paceline tensorboard {job}" + ("" if port is None else f" --port {port}")
    return _KUBECTL.get(verb)


def old_program(verb: str, flags: Sequence[tuple[str, ...]], words: Sequence[str]) -> str | None:
    """What is said of a verb of paceline with a launcher, or a kind of job of Arena's, in the place of SCRIPT.

    `flags` are those of the verb that the user has written before it: none is lost but for what the launcher says too.
    """
    name = " ".join(words[: words.index("-m") + 2 if "-m" in words[1:3] else 1])
    try:
        found = recognised(["arena", "submit", *words] if name in _KINDS else words)
        if found is None:
            return f"{name} is no script; write {_VERBS[name]}" if name in _VERBS else None
        tool, typed = found
        line = parse(tool, typed, outer=Line(flags=[*flags]))
    except UserError as error:
        return f"{name} is no script of paceline {verb}: {error}"
    line.verb = verb if line.verb == "run" else line.verb
    settle(line)
    more = "" if _debugged(words) is None else f"; {_DEBUGGED}"
    return f"{name} is no script; write: {line.text()}{more}"


def old_flag(verb: str, name: str) -> str | None:
    """What is said of a flag that only another tool has; None if none has it."""
    known = _FLAGS.get(f"{'run' if verb == 'submit' else verb} {name}") or _FLAGS.get(name)
    if known is not None:
        return f"{name}: {known}"
    verbs = ("run", "submit") if verb in ("run", "submit") else (verb,)
    tools = [tool for it in TOOLS for tool in _leaves(load(it)) if tool.verb.removesuffix(" --force") in verbs]
    if found := list(dict.fromkeys(tool.name for tool in tools if knows(tool, name))):
        help_of = ", ".join(f"paceline {it} --help" for it in found)
        return f"{name} is a flag of {' and '.join(found)}; see {help_of}"
    field = ELSEWHERE.get(name.lstrip("-").replace("-", "_"), "") if verb in ("run", "submit", "resubmit") else ""
    return f"{name}: write {flag_of((field,))}" if field else None


def _leaves(tool: Tool) -> list[Tool]:
    """A tool without subcommands, or these, each with the flags of the tools around it."""
    inner = [it for it in dict.fromkeys(tool.tools.values()) if isinstance(it, Tool)]
    return [it for one in inner for it in _leaves(replace(one, flags={**tool.flags, **one.flags}))] or [tool]


def without_slurm(line: Line) -> Line:
    """What a line for Slurm is on machines without it."""
    there = replace(line, flags=[it for it in line.flags if it[0] not in ("--on", "--queue", "--slurm", "--array")])
    if there.take("--nnodes") not in (None, "1"):
        there.flags.insert(0, ("-H", "HOST1,HOST2"))
    return there
