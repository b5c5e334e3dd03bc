"""`paceline run --rehearse N`: N ranks of a job on the cores of this machine, and what differs between them."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import random
import secrets
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.backends.base import MOST_RANKS
from paceline.backends.foreground import Output, RankStreams, obey_signals
from paceline.backends.registry import HERE
from paceline.backends.rehearsal.findings import findings
from paceline.backends.rehearsal.records import Course, read
from paceline.backends.rehearsal.summary import nothing, summary
from paceline.backends.repeated import Repeated
from paceline.cli.flags.job import REHEARSED_STEPS
from paceline.cli.flags.option import BOTH
from paceline.cli.terminal.progress_bar import ProgressLine
from paceline.cli.terminal.write import ended_by_signals, say
from paceline.contract.memory import machine_memory
from paceline.contract.rehearsal import FOLDER, PLAN, UNPROTECTED, UPPER, WORK
from paceline.job.errors import UserError
from paceline.job.quantities import show_duration, show_size
from paceline.job.text import counted, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.backends.base import Backend
    from paceline.backends.foreground import Foreground
    from paceline.backends.rehearsal.records import Finding
    from paceline.cli.flags.job import Given
    from paceline.contract.records import Failure, OtherFailure
    from paceline.contract.rehearsal import Plan
    from paceline.contract.stands import Hang
    from paceline.job.spec import JobSpec

_LIMIT, _HANG = 600.0, 5.0
_OF_A_RANK = 96 << 20  # bytes that a rank takes at least, once torch computes in it
_LAST = 0.04  # of the machine's memory: with less of it free, the ranks are stopped
_OFTEN = 0.5  # seconds between two looks at that
_FRAMEWORKS = (None, "torch", "horovod")


def ranks_of(given: Given) -> int | None:
    """How many ranks to rehearse; None for a job that is run. Refuses what makes no sense with it."""
    text = given.rehearse
    if text is None:
        for flag, number in (("--rehearse-steps", given.rehearse_steps), ("--rehearse-seed", given.rehearse_seed)):
            if number is not None:
                raise UserError(f"{flag} is for a rehearsal; add --rehearse 8")
        return None
    if not text.isdecimal() or int(text) < 2:
        raise UserError(f"--rehearse {text}: a rehearsal has 2 ranks or more; write for example --rehearse 8")
    if int(text) > MOST_RANKS:
        raise UserError(f"--rehearse {text} is more ranks than one machine can have; take {MOST_RANKS} or fewer")
    others = {  # where a job runs, or how its machines meet
        "--detach": given.detach, "--dry-run": given.dry_run, "--nnodes": given.nnodes, "-n": given.ranks,
        "-np": given.total, "--min-np": given.min_np, "--max-np": given.max_np,
        "--host-discovery-script": given.host_discovery_script, "--node-rank": given.node_rank,
        "--master-addr": given.master_addr, "--rdzv-endpoint": given.rdzv_endpoint, "--pass-index": given.pass_index,
        "--tensorboard": given.tensorboard,
    }  # fmt: skip
    for flag, value in others.items():
        if value not in (None, False):
            raise UserError(
                f"--rehearse runs its ranks on the cores of this machine, so {flag} says nothing; leave it out"
            )
    return int(text)


def rehearse(ranks: int, spec: JobSpec, given: Given, there: Backend) -> int:
    """Rehearse a job; the exit code is 1 if there are findings, and if nothing could be compared."""
    _check(ranks, spec, there)
    seed = given.rehearse_seed if given.rehearse_seed is not None else secrets.randbelow(10_000)
    draw = random.Random(seed)
    plan: Plan = {
        "steps": given.rehearse_steps or REHEARSED_STEPS, "victim": draw.randrange(ranks), "after": draw.randint(1, 3),
        "differ": _uses_sets(spec),
    }  # fmt: skip
    began, streams = time.monotonic(), RankStreams({0: BOTH}, {}, (), several=False)
    with tempfile.TemporaryDirectory(prefix="paceline-rehearsal-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for each in (UPPER, WORK):
            (folder / each).mkdir()
        (folder / PLAN).write_text(json.dumps(plan))
        spec = _rehearsed(ranks, spec, folder, plan)
        with ended_by_signals(), ProgressLine() as progress:
            prepared = there.prepare(spec, detached=False)
            job = there.run(prepared, progress, streams)
            obey_signals(job)
        say(
            f"rehearsing {counted(ranks, 'rank')} of {spec.target} on {counted(os.cpu_count() or 1, 'core')} here, "
            f"for at most {3 * plan['steps']} steps and {show_duration(spec.time_limit or _LIMIT)}; seed {seed}"
        )
        course, is_interrupted = _follow(job, streams, folder)
        attempts = read(folder)
        unprotected = folder / UNPROTECTED
        if unprotected.exists():
            say(f"this folder could not be protected ({unprotected.read_text()}): what the script wrote in it is there")
        _open_up(folder / WORK)
    took = show_duration(time.monotonic() - began)
    if is_interrupted:
        say(f"interrupted after {took}; nothing is compared")
        _remove(there, job.name)
        return 130
    found = findings(attempts, course)
    for finding in found:
        click.echo(_shown(finding, Path(spec.working_dir).resolve()))
    if found:
        say(f"{counted(len(found), 'finding')} in {took}; logs of all ranks: paceline logs {job.name} --all")
        return 1
    if none := nothing(attempts, course):
        say(f"{none}; {took}; see paceline logs {job.name} --all")
        return 1
    say(f"{summary(attempts, course, ranks)}; {took}")
    if course.stopped:
        say(f"where its ranks were then: paceline why {job.name}")
    else:
        _remove(there, job.name)
    return 0


# -- before it starts --------------------------------------------------------------------------------------------------


def _check(ranks: int, spec: JobSpec, there: Backend) -> None:
    """Refuse what cannot be rehearsed."""
    if there.name != HERE:
        raise UserError(
            f"--rehearse runs its ranks on the cores of this machine, not on {there.name}; leave out what names that"
        )
    if spec.kind == "command":
        raise UserError(
            f"--rehearse sees what scripts of Python do, and {spec.target} is a command; name a script or -m"
        )
    if spec.framework not in _FRAMEWORKS:
        raise UserError(
            f"--rehearse knows scripts of torch and Horovod, not --framework {spec.framework}; leave it out"
        )
    available = machine_memory().available
    if ranks * _OF_A_RANK > available:
        raise UserError(
            f"--rehearse {ranks}: a rank of torch takes {show_size(_OF_A_RANK)} or more, and {show_size(available)} "
            f"of memory are free here; take {max(2, available // _OF_A_RANK)} or fewer"
        )


def _rehearsed(ranks: int, spec: JobSpec, folder: Path, plan: Plan) -> JobSpec:
    """The job as it is rehearsed: on cores, for a limited time, with one restart."""
    env = {
        "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline",
        **spec.env, FOLDER: str(folder),
    }  # fmt: skip
    return spec.changed({
        "ranks": ranks, "devices": None, "env": env, "max_restarts": 1, "grace": 1.0, "hang": "warn",
        "hang_after": _HANG, "keep_warm": "off", "time_limit": spec.time_limit or _LIMIT,
        **({"start_method": "exec"} if plan["differ"] else {}),
    })  # fmt: skip


def _uses_sets(spec: JobSpec) -> bool:
    """Whether a script makes sets, whose order is another one on each machine."""
    if spec.kind != "script":
        return False
    try:
        nodes = list(ast.walk(ast.parse(Path(spec.working_dir, spec.target).read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError):  # the ranks report it
        return False
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return bool(called & {"set", "frozenset"}) or any(isinstance(node, (ast.Set, ast.SetComp)) for node in nodes)


# -- while it runs -----------------------------------------------------------------------------------------------------


def _follow(job: Foreground, streams: RankStreams, folder: Path) -> tuple[Course, bool]:
    """Show what rank 0 writes until the job has ended; returns how it went, and whether the user has interrupted it."""
    from paceline.cli.terminal.screen import Screen

    screen = Screen(streams, job)
    failures: dict[int, list[Failure | OtherFailure]] = {}
    hang: Hang | None = None
    stopped, attempt, is_interrupted, is_stopping, has_ended = "", 0, False, False, False
    with _short_of_memory(job) as short:
        for update in job.updates():
            if isinstance(update, Output):
                screen.show(update)
                continue
            details = update.details
            if update.name in ("importing", "imported", "exec", "note"):
                screen.show(update)
            elif update.name == "hang" and hang is None:
                hang, is_stopping = details["hang"], True
                job.interrupt()
            elif update.name in ("restarting", "finished"):
                screen.finish_lines()
                failure = details["failure"]
                killed = next((it.killed for it in read(folder) if it.number == attempt), None)
                if failure is not None and failure["rank"] is None:
                    stopped = failure["message"]
                elif failure is not None:
                    failures[attempt] = [failure, *details["others"]]
                if update.name == "restarting" and killed is not None:
                    say(f"rank {killed[0]} was killed after step {killed[1]}, as rehearsed; all ranks start again")
                elif update.name == "restarting":
                    is_stopping = True
                    job.interrupt()
                elif failure is None and details["state"] == "STOPPED" and not (is_stopping or short):
                    is_interrupted = True
                attempt, has_ended = attempt + 1, update.name == "finished"
    if not has_ended:
        stopped = "; ".join(job.unreported_end()[1])
    return Course(failures, hang, short[0] if short else stopped), is_interrupted


@contextlib.contextmanager
def _short_of_memory(job: Foreground) -> Iterator[list[str]]:
    """Stop the job before the kernel does so as memory runs out; the list says so then."""
    short: list[str] = []

    def look() -> float | None:
        memory = machine_memory()
        if memory.available >= _LAST * min(memory.total, memory.limit or memory.total):
            return _OFTEN
        short.append("it was stopped, as the memory of this machine ran out")
        job.interrupt()
        return None

    looks = Repeated(look, _OFTEN)
    try:
        yield short
    finally:
        looks.stop()
        looks.join()


# -- what it says ------------------------------------------------------------------------------------------------------


def _shown(found: Finding, folder: Path) -> str:
    """A finding in one line, with the path of its file as short as possible."""
    path, _, line = found.at.rpartition(":")
    inner = os.path.relpath(path, folder) if path else ""
    where = f"{inner if not inner.startswith('..') else path}:{line}: " if path else ""
    return printable(f"{where}{found.what}; {found.todo}")


def _open_up(folder: Path) -> None:
    """Let what an overlay has made be removed: it gives nobody a right to read its own folder."""
    for each in folder.iterdir():
        with contextlib.suppress(OSError):
            each.chmod(0o700)


def _remove(there: Backend, name: str) -> None:
    """Remove the job of a rehearsal that has found nothing."""
    with contextlib.suppress(UserError):
        there.delete([name])
