"""`paceline tune`: try the methods of exchange on the machines and the script that will use them."""

from __future__ import annotations

import re
import secrets
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.flags.job import HOROVODRUN, NODES, PROGRAM_ARGUMENTS, SPEC, TORCHRUN, USUAL
from paceline.cli.flags.options import Option, SectionedCommand
from paceline.cli.flags.where import backend_for, job_options, kind_of_hosts, target_of
from paceline.cli.terminal.progress_bar import ProgressLine
from paceline.cli.terminal.tables import Column, output_option, show
from paceline.contract.exchange import (
    FIXED_SYNC,
    SETTLING,
    SYNC,
    TRIAL_STEPS,
    TRIED,
    is_other_optimisation,
    problem_with,
)
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backends.base import Backend
    from paceline.job.job import Job
    from paceline.job.spec import JobSpec

_METHODS = "allreduce,fp16,int8,powersgd(4),powersgd(2)"
_STEPS = 40
_WINDOWS = 5  # into which the steps are divided, to see how much they vary
_FEWEST = 2 * _WINDOWS
_ALIKE = 0.05  # of a step: below that, the method that changes less is better
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")  # what no name of a job may hold
_END = 60.0  # seconds to wait for the end of a trial that is ended
# Fields of a job that a trial does not have, and those that a job file does not get.
_NOT_TRIED: dict[str, Any] = {
    "checkpoint_dir": None, "resume_from": None, "max_restarts": 0, "tensorboard": False, "tensorboard_dir": None,
    "ttl": None, "labels": {}, "log_dir": None,
}  # fmt: skip
_NOT_WRITTEN = {"name", "detached", "rendezvous"}
_TUNE = [
    Option(
        ["--methods"],
        section="Trials",
        metavar="NAME,…",
        help=f"What to try, of {', '.join(TRIED)}.  [default: {_METHODS}]",
    ),
    Option(
        ["--steps"],
        section="Trials",
        type=click.IntRange(_FEWEST),
        metavar="N",
        help=f"Steps to measure of each, after {SETTLING} that are not measured.  [default: {_STEPS}]",
    ),
    Option(
        ["-w", "--write"],
        section="Trials",
        metavar="FILE.yaml",
        help="The job file that gets the choice.  [default: the one that is tuned, or a new one named as SCRIPT]",
    ),
    Option(["--no-write"], section="Trials", is_flag=True, help="Write no job file."),
]


@dataclass(frozen=True)
class _Trial:
    """What a method has shown.

    Attributes:
        method: its name.
        windows: the mean seconds of a step in each of the windows; empty if the trial has failed.
        sent: bytes that rank 0 has sent per step.
        losses: at the beginning and at the end; None if unknown.
        error: why the trial has failed; "" if it has not.
    """

    method: str
    windows: tuple[float, ...] = ()
    sent: float = 0.0
    losses: tuple[float, float] | None = None
    error: str = ""

    @property
    def seconds(self) -> float:
        """Of a step: the median of the windows, or the mean where steps differ because only some exchange anything."""
        return (statistics.fmean if is_other_optimisation(self.method) else statistics.median)(self.windows)


def _tune(**given: Any) -> int:
    """Try ways to exchange gradients: run SCRIPT with each for some steps, and write the choice to a job file.

    SCRIPT is unchanged; it trains with run.setup, and leaves Strategy(sync=…) out. Only methods that average gradients
    in every step are chosen.
    """
    from paceline.cli.flags.spec import JOB_FILES, say_what_is_exposed, say_what_means_nothing, spec_of
    from paceline.cli.terminal.ending import ended_by_signals

    from .submit import dry_run, refuse_script

    path = given["script"]
    is_file = not (given["module"] or given["no_python"]) and path.lower().endswith(JOB_FILES)
    spec, given = spec_of(given, tune)
    methods, steps, output = _methods(given["methods"] or _METHODS), given["steps"] or _STEPS, given["output"]
    say_what_means_nothing(given)
    say_what_is_exposed(spec)
    refuse_script(given)
    target = None
    if not given["no_write"]:
        target = Path(given["write"] or (path if is_file else f"{Path(spec.target).stem}.yaml"))
        _check_target(target, spec)
    there = backend_for(given, target_of(spec))
    if given["dry_run"]:
        return dry_run(_trial_spec(spec, methods[0], steps), there)
    trials: list[_Trial] = []
    with ended_by_signals(), ProgressLine() as progress:
        for method in methods:
            progress(f"trying {method}", len(trials), len(methods))
            trials.append(_try(there, _trial_spec(spec, method, steps), method, progress))
            if not any(trial.windows for trial in trials):  # the others would fail, too
                raise UserError(f"the trial of {method} has failed: {trials[0].error}")
    show(trials, _columns(trials), output or "table", _to_dict)
    good = [trial for trial in trials if trial.windows]
    chosen = _choose(good)
    _say_choice(chosen, good)
    if target is not None:
        _write(target, spec, chosen.method, is_at_named_hosts=spec.backend == kind_of_hosts(given))
        click.echo(f"paceline: {target} says {SYNC}: {chosen.method}", err=True)
    return 0


def _methods(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if why := problem_with(name):
            raise UserError(f"--methods {why}")
    if not names or len(set(names)) < len(names):
        raise UserError(f"--methods {text!r} must name at least one method, and each once")
    return names


def _check_target(target: Path, spec: JobSpec) -> None:
    """Refuse a file that cannot get the choice, before anything runs.

    Raises:
        UserError: there is such a file, of another job.
    """
    from paceline.job.reading import read

    if not target.parent.is_dir():
        raise UserError(f"--write {target}: there is no folder {target.parent}; name a file in one that exists")
    if target.exists():
        there = read(target)
        if there.target != spec.target or there.kind != spec.kind:
            raise UserError(
                f"{target} is the job file of {there.target}, not of {spec.target}; name another with --write, or add "
                "--no-write"
            )


def _trial_spec(spec: JobSpec, method: str, steps: int) -> JobSpec:
    """The job of a trial: the same one, for some steps, and without what it would leave behind."""
    env = {**spec.env, SYNC: method, TRIAL_STEPS: str(SETTLING + steps + 1)}
    name = f"tune-{_UNFIT.sub('-', Path(spec.target).stem)[:40]}-{secrets.token_hex(3)}"  # known before it is started
    return spec.changed({**_NOT_TRIED, "name": name, "env": env})


def _try(there: Backend, spec: JobSpec, method: str, progress: ProgressLine) -> _Trial:
    """Run a trial, and remove what it leaves.

    Raises:
        UserError: it cannot start, or no method can be tried with this script.
    """
    prepared = there.prepare(spec)
    try:
        there.start(prepared, progress)
        there.wait([spec.name])
        found = there.describe([spec.name]).jobs
        return _result(found[0], method) if found else _Trial(method, error="its job is gone")
    finally:
        _remove(there, spec.name, progress)


def _remove(there: Backend, name: str, progress: ProgressLine) -> None:
    """End a job, and remove it, if it is there: a signal may have come before its start returned."""
    if there.describe([name]).jobs:
        there.stop([name], now=True)
        there.wait([name], _END)
        for line in there.delete([name]):
            progress.say(f"paceline: {line}")


def _result(job: Job, method: str) -> _Trial:
    """What a trial's job has left of it.

    Raises:
        UserError: no method can be tried with this script.
    """
    error = job.error or ""
    if FIXED_SYNC in error:
        raise UserError(error.rpartition(f"{FIXED_SYNC}: ")[2])
    found = (job.progress or {}).get("trial")
    if job.state != "SUCCEEDED":
        return _Trial(method, error=error or f"the job was {job.state.lower()}")
    if not isinstance(found, dict) or not found["losses"]:
        raise UserError(
            f"{job.command}: no optimizer that run.setup returns has made a step, so there is nothing to measure"
        )
    if found["method"] is None:
        raise UserError("one rank exchanges nothing; add -n for more ranks, or -H for machines")
    seconds, losses = found["seconds"][SETTLING:], [each for each in found["losses"] if each is not None]
    if len(seconds) < _WINDOWS:
        few = len(found["seconds"]) + 1
        raise UserError(f"{job.command} has ended after {few} steps; {SETTLING + _WINDOWS + 1} are needed to measure")
    size = len(seconds) // _WINDOWS
    windows = tuple(statistics.fmean(seconds[at : at + size]) for at in range(0, size * _WINDOWS, size))
    part = max(1, len(losses) // _WINDOWS)
    ends = (statistics.fmean(losses[:part]), statistics.fmean(losses[-part:])) if losses else None
    return _Trial(method, windows, statistics.fmean(found["bytes"][SETTLING:]), ends)


def _choose(trials: Sequence[_Trial]) -> _Trial:
    """The first of the methods, in the order of `TRIED`, that is not clearly slower than the fastest."""
    allowed = [trial for trial in trials if not is_other_optimisation(trial.method)] or list(trials)
    exact_first = sorted(allowed, key=lambda trial: list(TRIED).index(trial.method.partition("(")[0]))
    if not any(trial.sent for trial in allowed):  # what is not sent is not compressed either
        return exact_first[0]
    fastest = min(trial.seconds for trial in allowed)
    return next(t for t in exact_first if t.seconds * (1 - _ALIKE) <= fastest or min(t.windows) <= fastest)


def _say_choice(chosen: _Trial, trials: Sequence[_Trial]) -> None:
    """Say what is chosen, and what would be faster but is not chosen."""
    base = next((trial for trial in trials if trial.method == "allreduce"), None)
    if not any(trial.sent for trial in trials):
        click.echo(
            "paceline: nothing is sent between machines, so methods that average gradients are the same", err=True
        )
    saved = f", which saves {1 - chosen.seconds / base.seconds:.0%} of a step" if base not in (None, chosen) else ""
    click.echo(f"paceline: {chosen.method}{saved}".replace("%", " %"), err=True)
    for trial in trials:
        if is_other_optimisation(trial.method) and trial.seconds < chosen.seconds * (1 - _ALIKE):
            less = f"{1 - trial.seconds / chosen.seconds:.0%}".replace("%", " %")
            click.echo(
                f"paceline: {trial.method} takes {less} less, but is another optimisation: compare the validation loss",
                err=True,
            )


def _write(target: Path, spec: JobSpec, method: str, *, is_at_named_hosts: bool) -> None:
    """Write the choice."""
    from paceline.job.writing import set_variable, write_job

    if target.exists():
        set_variable(target, SYNC, method)
        return
    left_out = _NOT_WRITTEN | ({"backend", "nodes"} if is_at_named_hosts else set())
    fields = {name: it for name, it in spec.dumped(only_changed=True).items() if name not in left_out}
    if fields.get("ranks") == "slots":
        del fields["ranks"]
    write_job(target, {**fields, "env": {**spec.env, SYNC: method}})


# -- the table ---------------------------------------------------------------------------------------------------------


def _columns(trials: Sequence[_Trial]) -> list[Column[_Trial]]:
    from paceline.job.quantities import show_size

    base = next((trial.seconds for trial in trials if trial.method == "allreduce" and trial.windows), None)

    def compared(trial: _Trial) -> str | None:
        return f"{trial.seconds / base:.2f}" if base is not None and trial.windows else None

    return [
        Column("METHOD", lambda trial: trial.method),
        Column("STEP", lambda trial: _milliseconds(trial.seconds) if trial.windows else None),
        Column("SPREAD", _spread),
        Column("OF ALLREDUCE", compared),
        Column("SENT/STEP", lambda trial: show_size(trial.sent) if trial.windows else None),
        Column("LOSS", lambda trial: f"{trial.losses[0]:#.4g} → {trial.losses[1]:#.4g}" if trial.losses else None),
        Column("CHANGE", lambda trial: f"{trial.losses[1] - trial.losses[0]:+.4g}" if trial.losses else None),
        *(
            [Column[_Trial]("ERROR", lambda trial: trial.error or None, is_text=True)]
            if any(trial.error for trial in trials)
            else []
        ),
    ]


def _spread(trial: _Trial) -> str | None:
    """The fastest and the slowest window."""
    if not trial.windows:
        return None
    return f"{_milliseconds(min(trial.windows))} … {_milliseconds(max(trial.windows))}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"


def _to_dict(trial: _Trial) -> dict[str, Any]:
    return {
        "method": trial.method,
        "step_seconds": trial.seconds if trial.windows else None,
        "fastest": min(trial.windows, default=None),
        "slowest": max(trial.windows, default=None),
        "sent_bytes": trial.sent if trial.windows else None,
        "first_loss": trial.losses and trial.losses[0],
        "last_loss": trial.losses and trial.losses[1],
        "error": trial.error or None,
    }


def _output() -> Option:
    """As for other verbs, but without a default, since flags before and behind a job file are merged."""
    option = output_option()
    option.default = None
    return option


tune = SectionedCommand(
    "tune",
    callback=_tune,
    help=_tune.__doc__,
    usual=(*(option.opts[0] for option in _TUNE), "--output", *USUAL[:7]),
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
    params=[*job_options(), *_TUNE, _output(), *SPEC, *NODES, *TORCHRUN, *HOROVODRUN, *PROGRAM_ARGUMENTS],
)
