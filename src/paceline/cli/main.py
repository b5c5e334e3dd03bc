"""The `paceline` command: its verbs, each loaded when it is used."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import errno
import gc
import importlib
import os
import re
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import click

from paceline._version import __version__

from .terminal.write import has_colours

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_ELSEWHERE = {
    "win32": "Windows: install it in WSL2, which is Linux within Windows",
    "darwin": "macOS: install it in a Linux container or virtual machine, or on a Linux host that you reach over ssh",
}
_COLLECT_EVERY = 50_000  # objects; imports make more than that, and Python would look through all of them 70 times
_COMPLETES = "_PACELINE_COMPLETE"  # set while a shell completes a line
_DELETING = ("delete", "prune")  # no guess at a verb is one of these
_NEAR = 0.75  # of two flags, where 1 is equal

# verb → (module, what `paceline --help` says of it); of those that take lines of other launchers
DIALECTS = {
    "explain": ("dialect", "Print what a line of another launcher is here."),
    "torchrun": ("dialect", "Take a line of torchrun."),
    "torch-launch": ("dialect", "Take a line of python -m torch.distributed.launch."),
    "horovodrun": ("dialect", "Take a line of horovodrun."),
    "paddle-launch": ("dialect", "Take a line of python -m paddle.distributed.launch."),
    "mpirun": ("dialect", "Take a line of mpirun."),
    "srun": ("dialect", "Take a line of srun."),
    "accelerate": ("dialect", "Take a line of accelerate launch."),
    "arena": ("dialect", "Take a line of Arena."),
    "paddlecloud": ("dialect", "Take a line of paddlecloud."),
}
VERBS = {
    "run": ("run", "Train a script here, on as many ranks as you like."),
    "submit": ("submit", "Start a job that outlives this terminal."),
    "warm": ("warm", "Keep a framework imported, so that jobs start at once."),
    "plan": ("plan", "Say what a script's training takes in memory, and whether it fits."),
    "tune": ("tune", "Measure which settings of a script are the fastest."),
    "list": ("show", "List the jobs."),
    "get": ("show", "Show all about one job."),
    "logs": ("logs", "Show the output of a job's ranks."),
    "wait": ("control", "Wait until jobs have ended."),
    "stop": ("control", "Stop jobs: cleanly, or at once."),
    "suspend": ("control", "Suspend jobs: they save, and give their devices back."),
    "resume": ("control", "Let suspended jobs go on."),
    "delete": ("remove", "Delete jobs that have ended."),
    "prune": ("remove", "Delete jobs that ended long ago."),
    "events": ("attach", "Show what happened to a job."),
    "why": ("why", "Say why a job failed, hangs or waits, and where its ranks are."),
    "profile": ("profile", "Record some steps of a running job with torch.profiler."),
    "attach": ("attach", "Run a shell in a rank's folder, with its variables."),
    "resubmit": ("resubmit", "Run a job again, from its last checkpoint (saved state)."),
    "checkpoint": ("checkpoint", "Show, verify, export and import checkpoints."),
    "scaleout": ("control", "Add hosts to a running job."),
    "scalein": ("control", "Remove hosts from a running job."),
    "check": ("check", "Say what this machine has, and what would go wrong."),
    "data": ("data", "List the named volumes, and whether they can be read."),
    "top": ("top", "Show what jobs and machines use now."),
    "report": ("report", "Write all about jobs into one file to send."),
    "web": ("web", "Show all jobs on a page in your browser, live."),
    "notify": ("notify", "Send notices when jobs end, fail, hang or are slow."),
    "tensorboard": ("tensorboard", "Print the address of a job's TensorBoard."),
    "init": ("init", "Write a first job file, with comments."),
    "trust": ("trust", "Agree to a project's settings that run programs."),
    "schema": ("init", "Print the JSON schema of job files."),
    "skill": ("skill", "Print how a coding agent uses paceline: a SKILL.md."),
    **DIALECTS,
}


def _attribute(verb: str) -> str:
    """The command's name in its module: a name of Python's gets an underscore."""
    return f"{verb}_" if hasattr(builtins, verb) else verb.replace("-", "_")


class _Verbs(click.Group):
    """Loads a verb's module when the verb is used, so that `--help` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"paceline.cli.verbs.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, _attribute(cmd_name))
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] == "help":
            if len(args) == 1 and not ctx.resilient_parsing:
                click.echo(ctx.get_help())
                ctx.exit()
            args = [*args[1:], "--help"]
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from paceline.cli.dialects.tools import old_verb
            from paceline.job.errors import UserError

            raise UserError(old_verb(args[0], args[1:], tuple(it for it in VERBS if it not in _DELETING)))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(it, text) for it, (_, text) in VERBS.items() if it not in DIALECTS])
        with formatter.section("Lines of other launchers"):
            explain, *tools = DIALECTS
            formatter.write_dl([(explain, DIALECTS[explain][1])])
            formatter.write_text(f"Take a line as it is: {', '.join(tools)}.")


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="paceline")
def cli() -> None:
    """Train a script on one machine or many.

    \b
    paceline run train.py            one rank here (a process of the job)
    paceline run -n 4 train.py       four ranks here
    paceline check                   what this machine has
    paceline help run                the flags of a verb
    """


def main() -> NoReturn:
    """Run the command line, and end this process with its exit code."""
    if sys.platform in _ELSEWHERE:
        os.write(2, f"paceline: this runs on Linux, not on {_ELSEWHERE[sys.platform]} (docs/wsl2.md)\n".encode())
        sys.exit(2)
    if os.getpid() == 1:  # the kernel keeps from the first process of a container what it does not handle
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    gc.set_threshold(_COLLECT_EVERY)
    _end(run())


def _with_given(text: str, words: Sequence[str]) -> str:
    """A message with its advice to add a flag as advice to change it, where the flag is typed with another value."""
    typed = {word.partition("=")[0] for word in words if word.startswith("--")}
    return re.sub(
        r"\badd (--[a-z-]+)(?= [\w'\"])(?! and| or| to)",
        lambda found: f"change it to {found[1]}" if found[1] in typed else found[0],
        text,
    )


def run() -> int:
    """Run the command line, and return its exit code; bad input is one line on stderr and exit code 2."""
    from paceline.cli.terminal.write import say
    from paceline.job import trust
    from paceline.job.errors import UserError

    trust.ask = None if _COMPLETES in os.environ else _is_trusted
    _open_closed_streams()
    try:
        code = cli.main(standalone_mode=False, color=None if has_colours() else False)
    except UserError as error:
        with contextlib.suppress(OSError):
            for line in _with_given(str(error), sys.argv[1:]).rstrip("\n").split("\n"):
                say(line)
        code = 2
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        code = 2
    except click.ClickException as error:
        say(_one_line(error))
        code = 2
    except click.Abort:
        code = 130
    except BrokenPipeError:  # the reader of our output has ended, as with `| head`
        code = 128 + signal.SIGPIPE
    except (OSError, RuntimeError) as error:
        why = _lack(error)
        if why is None:
            raise
        with contextlib.suppress(OSError):
            click.echo(f"paceline: {why}", err=True)
        code = 1 if getattr(error, "errno", None) == errno.ENOSPC else 2  # of `wait`, 1 is a job that failed
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # so that Python does not try again
    return code if isinstance(code, int) else 0


def _is_trusted(file: Path, settings: Mapping[str, Any]) -> bool:
    from paceline.cli.verbs.trust import asks

    return asks(file, settings)


def _lack(error: OSError | RuntimeError) -> str | None:
    """What this machine has no more of, in one line; None if an error is another one."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        return f"cannot write the output: {error.strerror}"
    # Python has no other sign of a thread that cannot be started.
    is_full = str(error) == "can't start new thread" or getattr(error, "errno", None) == errno.EAGAIN
    if is_full:
        return "no more threads and processes can be started here; end some, or have the limit raised (ulimit -u)"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error.strerror} here; close some, or have the limit raised (ulimit -n)"
    return None


def _end(code: int) -> NoReturn:
    """End this process without freeing all that was imported, which takes a sixth of a short command's time."""
    if any(thread is not threading.main_thread() and not thread.daemon for thread in threading.enumerate()):
        sys.exit(code)  # Python waits for them
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _open_closed_streams() -> None:
    """Reopen closed standard streams: otherwise the next opened file would get their descriptors."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - as long as the process


def _is_near(name: str, other: str) -> bool:
    """Whether a flag is likely to be what was meant: click suggests such as --cpus for --bogus."""
    import difflib  # not needed where all is well

    return difflib.SequenceMatcher(None, name.lstrip("-"), other.lstrip("-")).ratio() >= _NEAR


def _one_line(error: click.ClickException) -> str:
    context, hint = getattr(error, "ctx", None), ""
    if isinstance(error, click.NoSuchOption) and context is not None:
        from paceline.cli.dialects.tools import old_flag

        verb, above = "", context
        while above.parent is not None:
            verb, above = f"{above.info_name} {verb}".rstrip(), above.parent
        run = cli.get_command(above, "run") if verb == "submit" else None
        if run is not None and any(error.option_name in parameter.opts for parameter in run.params):
            return f"{error.option_name} is a flag of paceline run, which shows the job; leave it out"
        if (answer := old_flag(verb, error.option_name)) is not None:
            return answer
        near = [name for name in error.possibilities or () if _is_near(name, error.option_name)]
        error = click.NoSuchOption(error.option_name, possibilities=near[:1], ctx=context)
        if not near and verb in ("run", "submit"):
            hint = "; flags of the script stand behind SCRIPT"
    text = " ".join(error.format_message().split()).rstrip(".") + hint
    for theirs, ours in (("integer", "a whole number"), ("float", "a number")):
        text = text.replace(f"a valid {theirs} range", ours).replace(f"a valid {theirs}", ours)
    if context is None:
        return text
    return f"{text}{' See' if text.endswith('?') else '; see'} {context.command_path} --help"
