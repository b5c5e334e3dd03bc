"""`paceline tune`: try methods of exchange and other settings on the machines and the script that will use them."""

from __future__ import annotations

import re
import secrets
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.flags.job import REST, SPEC, USUAL, Given
from paceline.cli.flags.option import UNDERSCORES, Option, Section, SectionedCommand, Whole, new_file, output_option
from paceline.cli.flags.where import backend_of_job, job_options, kind_of_hosts
from paceline.cli.terminal.progress_bar import ProgressLine
from paceline.cli.terminal.tables import Column, show
from paceline.cli.terminal.write import say
from paceline.contract.exchange import (
    FIXED_SYNC,
    SETTLING,
    SYNC,
    TRIAL_STEPS,
    TRIED,
    is_other_optimisation,
    problem_with,
)
from paceline.contract.tuning import SETTINGS
from paceline.job.errors import UserError, nearest
from paceline.job.quantities import show_instant, show_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.backends.base import Backend
    from paceline.job.job import Job
    from paceline.job.spec import JobSpec

_METHOD = "method"  # the setting that PACELINE_SYNC gives
_AS_IT_IS = "as it is"
_METHODS = "allreduce,fp16,int8,powersgd(4),powersgd(2)"
_STEPS = 40
_WINDOWS = 5  # into which the steps are divided, to see how much they vary
_FEWEST = 2 * _WINDOWS
_ALIKE = 0.05  # of a step: below that, the value that changes less is better
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")  # what no name of a job may hold
_END = 60.0  # seconds to wait for the end of a trial that is ended
# Fields of a job that a trial does not have, and those that a job file does not get.
_NOT_TRIED: dict[str, object] = {
    "checkpoint_dir": None, "resume_from": None, "max_restarts": 0, "tensorboard": False, "tensorboard_dir": None,
    "ttl": None, "labels": {}, "log_dir": None,
}  # fmt: skip
_NOT_WRITTEN = {"name", "detached", "rendezvous"}
_TUNE = Section("Trials")


class _Given(Given):
    """What a command line has given."""

    output: str | None = None
    methods = _TUNE.text(
        "--methods", metavar="NAME,…", help=f"What to try, of {', '.join(TRIED)}.  [default: {_METHODS}]"
    )
    settings = _TUNE.texts(
        "--try settings",
        metavar="NAME[=V,…]",
        help=f"Another setting to try, of {', '.join(SETTINGS)}; repeatable.  [default: workers]",
    )
    steps = _TUNE.whole(
        "--steps",
        type=Whole(_FEWEST),
        metavar="N",
        help=f"Steps to measure of each, after {SETTLING} that are not measured.  [default: {_STEPS}]",
    )
    write = _TUNE.text(
        "-w --write",
        metavar="FILE.yaml",
        help="The job file that gets the choice.  [default: the one that is tuned, or a new one named as SCRIPT]",
    )
    no_write = _TUNE.switch("--no-write", help="Write no job file.")


@dataclass(frozen=True)
class _Trial:
    """What a value of a setting has shown."""

    setting: str  # its name; `method` is that of exchange
    value: str  # that was tried
    windows: tuple[float, ...] = ()  # the mean seconds of a step in each of the windows; empty if the trial has failed
    sent: float = 0.0  # bytes that rank 0 has sent per step
    losses: tuple[float, float] | None = None  # at the beginning and at the end; None if unknown
    samples: float = 0.0  # of all ranks per step; 0 if unknown
    error: str = ""  # why the trial has failed; "" if it has not

    @property
    def label(self) -> str:
        """The value, with the name of its setting if that is not clear."""
        return self.value if self.setting == _METHOD or self.value == _AS_IT_IS else f"{self.setting}={self.value}"

    @property
    def seconds(self) -> float:
        """Seconds of a step: the median of the windows, or the mean where steps differ because data is read ahead."""
        alike = self.setting == _METHOD and not is_other_optimisation(self.value)
        return (statistics.median if alike else statistics.fmean)(self.windows)

    @property
    def cost(self) -> float:
        """Seconds of a sample; of a step if the number of samples is not known."""
        return self.seconds / (self.samples or 1.0)

    @property
    def costs(self) -> list[float]:
        """The same of each window."""
        return [seconds / (self.samples or 1.0) for seconds in self.windows]


def _tune(**params: Any) -> int:
    """Try ways to exchange gradients, and other settings: run SCRIPT with each, and write the best to a job file.

    SCRIPT is unchanged; it trains with run.setup, and leaves Strategy(sync=…) out. Settings of data are for
    run.dataloader. Only what averages gradients in every step, and leaves the batch as it is, is chosen.
    """
    from paceline.cli.flags.spec import JOB_FILES, say_what_is_exposed, say_what_means_nothing, spec_of
    from paceline.cli.terminal.write import ended_by_signals

    from .submit import dry_run, refuse_script

    typed = _Given(params)
    path = typed.script
    is_file = not (typed.module or typed.no_python) and path.lower().endswith(JOB_FILES)
    spec, given = spec_of(typed, tune)
    tried = _tried(given.methods, given.settings, is_alone=spec.ranks == 1 and spec.nodes == 1)
    steps, output = given.steps or _STEPS, given.output
    say_what_means_nothing(given)
    say_what_is_exposed(spec)
    refuse_script(given)
    target = None
    if not given.no_write:
        target = Path(given.write or (path if is_file else f"{Path(spec.target).stem}.yaml"))
        _check_target(target, spec)
    there = backend_of_job(given, spec)
    if given.dry_run:
        return dry_run(_trial_spec(spec, {}, steps), there)
    with ended_by_signals(), ProgressLine() as progress:
        trials, chosen, notes = _search(tried, _Place(there, spec, steps, progress))
    show(trials, _columns(trials), output or "table", _to_dict)
    for line in notes:
        say(line)
    if target is not None and not chosen:
        say(f"{target} stays as it is")
    elif target is not None:
        _write(target, spec, chosen, is_at_named_hosts=spec.backend == kind_of_hosts(given))
        said = ", ".join(f"{name}: {value}" for name, value in chosen.items())
        say(f"{target} says {said}")
    return 0


# -- what is tried -----------------------------------------------------------------------------------------------------


def _tried(methods: str | None, settings: Sequence[str], *, is_alone: bool) -> dict[str, list[str]]:
    """Setting → the values to try, in this order."""
    found: dict[str, list[str]] = {}
    if methods is not None or not (settings or is_alone):
        found[_METHOD] = _methods(methods or _METHODS)
    for text in settings or (() if methods else ("workers",)):
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        if name not in SETTINGS:
            raise UserError(f"--try {name}: there is no such setting; {nearest(name, SETTINGS)}")
        found[name] = [value.strip() for value in values.split(",") if value.strip()] or [*SETTINGS[name].values]
        if not found[name]:
            raise UserError(f"--try {name} needs values; write for example --try {name}=32,64")
        for value in found[name]:
            if re.fullmatch(SETTINGS[name].form, value) is None:
                raise UserError(
                    f"--try {name}={value}: {value!r} is no value for it; it must match {SETTINGS[name].form}"
                )
    return found


def _methods(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if why := problem_with(name):
            raise UserError(f"--methods {why}")
    if not names or len(set(names)) < len(names):
        raise UserError(f"--methods {text!r} must name at least one method, and each once")
    return names


def _variable(setting: str) -> str:
    return SYNC if setting == _METHOD else SETTINGS[setting].variable


def _search(tried: Mapping[str, Sequence[str]], place: _Place) -> tuple[list[_Trial], dict[str, str], list[str]]:
    """Try one setting after the other, each with the best values of those before it."""
    trials: list[_Trial] = []
    notes: list[str] = []
    chosen: dict[str, str] = {}
    best: _Trial | None = None
    count = sum(map(len, tried.values())) + (_METHOD not in tried)
    for setting, values in tried.items():
        if best is None and setting != _METHOD:
            place.progress("trying it as it is", 0, count)
            best = place.run(setting, _AS_IT_IS, {})
            trials.append(best)
        before = len(trials)
        for value in values:
            place.progress(f"trying {_Trial(setting, value).label}", len(trials), count)
            try:
                trials.append(place.run(setting, value, {**chosen, _variable(setting): value}))
            except _NotTaken as error:
                notes.append(f"{setting} is not tried: {error}")
                break
            if not any(trial.windows for trial in trials):  # the others would fail, too
                raise UserError(f"the trial of {trials[0].label} has failed: {trials[0].error}")
        good = [trial for trial in trials[before:] if trial.windows]
        if setting == _METHOD:
            best = _choose(good)
            notes += _about_choice(best, good)
        elif good and best is not None:
            best, note = _better(best, good)
            notes.append(note)
        if best is not None and best.setting == setting and best.value != _AS_IT_IS:
            chosen[_variable(setting)] = best.value
    return trials, chosen, notes


def _better(best: _Trial, trials: Sequence[_Trial]) -> tuple[_Trial, str]:
    """The first of the trials that is not clearly slower than the fastest, if it saves something; and why."""
    least = min(trial.cost for trial in trials)
    fastest = next(trial for trial in trials if trial.cost * (1 - _ALIKE) <= least)
    saved = 1 - fastest.cost / best.cost
    is_by_chance = statistics.median(fastest.costs) > sorted(best.costs)[1]
    if saved <= _ALIKE or is_by_chance:
        return best, f"{fastest.setting} stays as it is: no value clearly saves {_percent(_ALIKE)} of a step"
    if SETTINGS[fastest.setting].changes:
        what = "but is another optimisation: compare the validation loss"
        return best, f"{fastest.label} takes {_percent(saved)} less per sample, {what}"
    return fastest, f"{fastest.label}, which saves {_percent(saved)} of a step"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _check_target(target: Path, spec: JobSpec) -> None:
    """Refuse a file that cannot get the choice, before anything runs."""
    from paceline.job.reading import read

    if new_file("--write", str(target)).exists():
        there = read(target)
        if there.target != spec.target or there.kind != spec.kind:
            raise UserError(
                f"{target} is the job file of {there.target}, not of {spec.target}; name another with --write, or add "
                "--no-write"
            )


class _NotTaken(Exception):
    """The script has nothing that takes a setting."""


def _trial_spec(spec: JobSpec, variables: Mapping[str, str], steps: int) -> JobSpec:
    """The job of a trial: the same one, for some steps, and without what it would leave behind."""
    env = {**spec.env, **variables, TRIAL_STEPS: str(SETTLING + steps + 1)}
    name = f"tune-{_UNFIT.sub('-', Path(spec.target).stem)[:40]}-{secrets.token_hex(3)}"  # known before it is started
    return spec.changed({**_NOT_TRIED, "name": name, "env": env})


@dataclass(frozen=True)
class _Place:
    """Where and how trials of a job run."""

    there: Backend
    of: JobSpec
    steps: int
    progress: ProgressLine

    def run(self, setting: str, value: str, variables: Mapping[str, str]) -> _Trial:
        """Run a trial, and remove what it leaves."""
        spec = _trial_spec(self.of, variables, self.steps)
        prepared = self.there.prepare(spec)
        try:
            self.there.start(prepared, self.progress)
            self.there.wait([spec.name])
            found = self.there.describe([spec.name]).jobs
            return _result(found[0], setting, value) if found else _Trial(setting, value, error="its job is gone")
        finally:
            _remove(self.there, spec.name, self.progress)


def _remove(there: Backend, name: str, progress: ProgressLine) -> None:
    """End a job, and remove it, if it is there: a signal may have come before its start returned."""
    if there.describe([name]).jobs:
        there.stop([name], now=True)
        there.wait([name], _END)
        for line in there.delete([name]):
            progress.say(line)


def _result(job: Job, setting: str, value: str) -> _Trial:
    """What a trial's job has left of it."""
    error = job.error or ""
    if FIXED_SYNC in error:
        raise UserError(error.rpartition(f"{FIXED_SYNC}: ")[2])
    found = (job.progress or {}).get("trial")
    if job.state != "SUCCEEDED":
        return _Trial(setting, value, error=error or f"the job was {job.state.lower()}")
    if not isinstance(found, dict) or not found["losses"]:
        raise UserError(
            f"{job.command}: no optimizer that run.setup returns has made a step, so there is nothing to measure"
        )
    of = "" if setting == _METHOD or value == _AS_IT_IS else SETTINGS[setting].of
    if of and setting not in found["settings"]:
        raise _NotTaken(f"{job.command} has nothing of {of} that takes it")
    if setting == _METHOD and found["method"] is None:
        raise UserError("one rank exchanges nothing; add -n for more ranks, or -H for machines")
    seconds, losses = found["seconds"][SETTLING:], [each for each in found["losses"] if each is not None]
    if len(seconds) < _WINDOWS:
        few = len(found["seconds"]) + 1
        raise UserError(f"{job.command} has ended after {few} steps; {SETTLING + _WINDOWS + 1} are needed to measure")
    size = len(seconds) // _WINDOWS
    windows = tuple(statistics.fmean(seconds[at : at + size]) for at in range(0, size * _WINDOWS, size))
    part = max(1, len(losses) // _WINDOWS)
    ends = (statistics.fmean(losses[:part]), statistics.fmean(losses[-part:])) if losses else None
    return _Trial(setting, value, windows, statistics.fmean(found["bytes"][SETTLING:]), ends, found["samples"])


def _choose(trials: Sequence[_Trial]) -> _Trial:
    """The first of the methods, in the order of `TRIED`, that is not clearly slower than the fastest."""
    allowed = [trial for trial in trials if not is_other_optimisation(trial.value)] or list(trials)
    exact_first = sorted(allowed, key=lambda trial: list(TRIED).index(trial.value.partition("(")[0]))
    if not any(trial.sent for trial in allowed):  # what is not sent is not compressed either
        return exact_first[0]
    fastest = min(trial.seconds for trial in allowed)
    return next(t for t in exact_first if t.seconds * (1 - _ALIKE) <= fastest or min(t.windows) <= fastest)


def _about_choice(chosen: _Trial, trials: Sequence[_Trial]) -> Iterator[str]:
    """Lines about which method is chosen, and what would be faster but is not chosen."""
    base = next((trial for trial in trials if trial.value == "allreduce"), None)
    if not any(trial.sent for trial in trials):
        yield "nothing is sent between machines, so methods that average gradients are the same"
    if base is None or base is chosen:
        yield chosen.value
    else:
        yield f"{chosen.value}, which saves {_percent(1 - chosen.seconds / base.seconds)} of a step"
    for trial in trials:
        if is_other_optimisation(trial.value) and trial.seconds < chosen.seconds * (1 - _ALIKE):
            less = _percent(1 - trial.seconds / chosen.seconds)
            yield f"{trial.value} takes {less} less, but is another optimisation: compare the validation loss"


def _write(target: Path, spec: JobSpec, chosen: Mapping[str, str], *, is_at_named_hosts: bool) -> None:
    """Write the choice."""
    from paceline.cli.flags.jobfile import fields_of
    from paceline.job.writing import set_variable, write_job

    if target.exists():
        for name, value in chosen.items():
            set_variable(target, name, value)
        return
    written = fields_of(spec, is_at_named_hosts=is_at_named_hosts)
    fields = {name: it for name, it in written.items() if name not in _NOT_WRITTEN}
    write_job(target, {**fields, "env": {**spec.env, **chosen}})


# -- the table ---------------------------------------------------------------------------------------------------------


def _columns(trials: Sequence[_Trial]) -> list[Column[_Trial]]:
    has_methods = any(trial.value == "allreduce" for trial in trials)
    base = next((it.cost for it in trials if it.windows and (it.value == "allreduce" or not has_methods)), None)

    def compared(trial: _Trial) -> str | None:
        return f"{trial.cost / base:.2f}" if base is not None and trial.windows else None

    return [
        Column("METHOD" if all(trial.setting == _METHOD for trial in trials) else "SETTING", lambda trial: trial.label),
        Column("STEP", lambda trial: show_instant(trial.seconds) if trial.windows else None),
        Column("SPREAD", _spread),
        Column("OF ALLREDUCE" if has_methods else "OF FIRST", compared),
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
    return f"{show_instant(min(trial.windows))} … {show_instant(max(trial.windows))}"


def _to_dict(trial: _Trial) -> dict[str, object]:
    return {
        "method": trial.value if trial.setting == _METHOD else None,
        "setting": trial.setting,
        "value": trial.value,
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
    usual=(*(option.opts[0] for option in _TUNE), "--output", *USUAL[:7]),
    context_settings={"allow_interspersed_args": False, **UNDERSCORES},
    params=[*job_options(), *_TUNE, _output(), *SPEC, *REST],
)
