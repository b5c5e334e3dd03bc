"""`paceline torchrun`, `paceline arena` and the like: lines of other tools, which become lines of paceline."""

from __future__ import annotations

import os
import shlex
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.dialects.engine import Ignored, Line, Refused, Tool, names_of, parse
from paceline.cli.dialects.tools import explained, load, without_slurm
from paceline.cli.flags.completion import known_jobs
from paceline.cli.flags.option import new_file
from paceline.cli.terminal.write import say
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from paceline.cli.dialects.engine import Meaning


class _Dialect(click.Command):
    """A verb that takes the lines of a tool."""

    def __init__(self, name: str) -> None:
        super().__init__(
            name,
            callback=lambda words: _run(self, load(name), words),
            add_help_option=False,
            help="Take the line as it is: say on stderr which line of paceline that is, and run it. With --explain, "
            "only print that line. The flags of that verb of paceline work, too.",
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Leave all words to the tool's own table."""
        ctx.params["words"] = args
        return []

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The tool's subcommands and flags, jobs where it takes some, and files else."""
        from click.shell_completion import CompletionItem

        tool, flags = load(str(self.name)), ["--explain", "--help"]
        for word in ctx.params.get("words", ()):
            flags += [name for key in tool.flags for name in names_of(key)[0]] if tool.tools else []
            inner = tool.tools.get(word)
            tool = inner if isinstance(inner, Tool) else tool
        names = [name for name, inner in tool.tools.items() if isinstance(inner, Tool)]
        if incomplete.startswith("-"):
            names = flags + [name for key in tool.flags for name in names_of(key)[0]]
        elif not names and tool.verb in ("run", "submit"):
            return [CompletionItem(incomplete, type="file")]
        elif not names:
            names = known_jobs(incomplete)
        return [CompletionItem(name) for name in dict.fromkeys(names) if name.startswith(incomplete)]

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """What follows the name."""
        return ["[--explain] WHAT FOLLOWS IT THERE …"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The tool's flags and what they become, or its subcommands."""
        tool, wants_all = ctx.meta.get(_HELPED) or (load(str(self.name)), False)
        flags = [(names_of(key)[0], meaning) for key, meaning in tool.flags.items()]
        shown = [(names, it) for names, it in flags if wants_all or not isinstance(it, (Ignored, Refused))]
        groups: dict[str, list[tuple[str, ...]]] = {}  # what several flags become → their names
        for names, it in () if wants_all else shown:
            groups.setdefault(_group(names, it), []).append(names)
        alone = shown if wants_all else [(names, it) for names, it in shown if not _group(names, it)]
        for title, lines in (
            ("Verbs", [(name, _meant(it, f"see {tool.name} {name} --help")) for name, it in tool.tools.items()]),
            ("Flags", [(", ".join(names), _meant(it)) for names, it in alone]),
        ):
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)
        for title, several in groups.items():
            if title:
                with formatter.section(title):
                    text = " ".join(next((it for it in names if it.startswith("--")), names[0]) for names in several)
                    indent = " " * formatter.current_indent
                    lines_of = textwrap.wrap(text, formatter.width - len(indent), break_on_hyphens=False)
                    formatter.write("".join(f"{indent}{line}\n" for line in lines_of))
        if len(shown) < len(flags):
            formatter.write_paragraph()
            rest = f"{len(flags) - len(shown)} more flags are known, and have no effect or are refused"
            formatter.write_text(f"{rest}; --help-all lists them.")


_HELPED = "paceline.dialect"  # key of click's meta


def _group(names: tuple[str, ...], meaning: Meaning) -> str:
    """The title above flags that become the same kind of flag; "" for a flag that has a line of its own."""
    if not isinstance(meaning, str) or not meaning or meaning in names:
        return "Flags with the same meaning"
    if meaning == f"--slurm {names[-1][2:]}={{}}":
        return "Flags that become --slurm NAME=VALUE"
    return "Flags that become --env NAME=VALUE" if meaning.startswith("--env ") else ""


def _meant(meaning: Meaning | Tool, usual: str = "as there") -> str:
    if isinstance(meaning, Refused):
        return f"refused: {meaning}"
    if isinstance(meaning, Ignored):
        return f"without effect: {meaning}"
    if isinstance(meaning, str):
        return meaning or "the same without"
    return usual


def _run(command: click.Command, tool: Tool, words: list[str]) -> int:
    line = parse(tool, words)
    if line.helped is not None:
        context = click.get_current_context()
        context.meta[_HELPED] = line.helped, line.wants_all
        click.echo(command.get_help(context))
        return 0
    for note in line.notes:
        say(note)
    _check(line)
    if line.is_asked:
        click.echo(line.text())
        return 0
    say(f"this is: {line.text()}")
    if tool.name == "srun":
        _refuse_without_slurm(line)
    return _started(line)


def _refuse_without_slurm(line: Line) -> None:
    """Refuse a line of srun where nothing says which cluster it means, with the line for machines without Slurm."""
    from paceline.job.settings import load as settings

    if line.get("--on") == "slurm" and "slurm" not in settings().targets and shutil.which("sbatch") is None:
        raise UserError(
            'this machine has no Slurm; name a login node with ssh = "HOST" in [targets.slurm] of paceline.toml, or '
            f"write: {without_slurm(line).text()}"
        )


def _check(line: Line) -> None:
    """Refuse flags that contradict each other or cannot be read before anything is said."""
    context = click.get_current_context()
    cli = context.find_root().command
    command = cli.get_command(context, line.verb) if isinstance(cli, click.Group) else None
    if command is not None and line.verb in ("run", "submit"):
        from paceline.cli.flags.job import Given
        from paceline.cli.flags.spec import spec_of

        inner = command.make_context(line.verb, line.words()[1:], parent=context.find_root())
        spec_of(Given(inner.params), command)


def _started(line: Line) -> int:
    """Run the lines one after the other, as long as they succeed; returns the exit code."""
    cli = click.get_current_context().find_root().command
    os.environ.update(pair.partition("=")[::2] for pair in line.before)
    code: Any = cli.main(line.words(), "paceline", standalone_mode=False)
    return (code if isinstance(code, int) else 0) or (0 if line.also is None else _started(line.also))


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-o", "--output", metavar="FILE.yaml", help="Write the job file that does the same; - prints it.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, required=True, metavar="LINE")
def explain(words: tuple[str, ...], output: str | None) -> int:
    """Print the line of paceline that does what LINE of another launcher does; run nothing.

    LINE is a line of torchrun, python -m torch.distributed.launch, horovodrun, python -m paddle.distributed.launch,
    mpirun, srun, accelerate, arena or paddlecloud, in quotes, as it is typed. What else the shell does stays:
    variables, other commands, redirections. So a script works as well: paceline explain "$(cat job.sh)".

    LINE may also be a file: a task of SkyPilot or dstack, a PyTorchJob, MPIJob or TrainJob, a job of Arena v2, a
    configuration of accelerate, or a batch script of Slurm. Then the job file that does the same is printed. -o may
    stand behind LINE.
    """
    first, *behind = words
    if behind[:1] in (["-o"], ["--output"]) and len(behind) == 2:
        words, output = (first,), behind[1]
    text = words[0] if len(words) == 1 else shlex.join(words)
    _check_output(output)
    if len(words) == 1 and os.path.isfile(text):
        return _job_file(text, output or "-")
    if output is not None:
        from paceline.cli.flags.jobfile import of_script

        return _written(of_script(text), output)
    line, notes = explained(text)
    for note in notes:
        say(note)
    click.echo(line)
    return 0


def _check_output(output: str | None) -> None:
    """Refuse a name for a job file that it cannot have."""
    if output is None or output == "-":
        return
    if not output.endswith((".yaml", ".yml")):
        raise UserError(f"-o {output}: a job file ends in .yaml; write for example -o job.yaml, or -o - to print it")
    if new_file("-o", output).exists():
        raise UserError(f"-o {output}: it exists; name another file")


def _job_file(path: str, output: str) -> int:
    """Print or write the job file that does what a file of another tool does."""
    from paceline.cli.flags.jobfile import of_file

    if (found := of_file(path)) is None:
        raise UserError(
            f"{path} is no file of a tool that paceline knows; paceline submit {path} starts a job file, and "
            f'paceline explain "$(cat {path})" explains the lines of a script'
        )
    what, line = found
    say(f"{path} is {what}")
    return _written(line, output)


def _written(line: Line, output: str) -> int:
    """Print or write the job file of a line."""
    from pathlib import Path

    from paceline.cli.flags.jobfile import job_of
    from paceline.cli.flags.spec import spec_of
    from paceline.job.writing import job_text, write_job

    fields, rest = job_of(line, spec_of)
    for note in line.notes:
        say(note)
    rest.program = ["job.yaml" if output == "-" else output]
    if output == "-":
        click.echo(job_text(fields), nl=False)
        if rest.flags:
            say(f"start it with: {rest.text()}, where job.yaml is this file")
        return 0
    write_job(Path(output), fields)
    say(f"{output} is written; start it with: {rest.text()}")
    return 0


torchrun = _Dialect("torchrun")
torch_launch = _Dialect("torch-launch")
horovodrun = _Dialect("horovodrun")
paddle_launch = _Dialect("paddle-launch")
mpirun = _Dialect("mpirun")
srun = _Dialect("srun")
accelerate = _Dialect("accelerate")
arena = _Dialect("arena")
paddlecloud = _Dialect("paddlecloud")
