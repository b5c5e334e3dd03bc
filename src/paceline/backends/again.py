"""What a job is that is submitted again, with changes or on another target."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from paceline.job.errors import UserError
from paceline.job.flags import flag_of
from paceline.job.model import InvalidError
from paceline.job.spec import JobSpec

from .registry import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.job.job import Job
    from paceline.job.model import KeyPath

    from .base import Backend


def refuse_running(job: Job, here: Backend) -> None:
    """Refuse to submit a job again that has not ended, as far as that is known; one that is LOST may be given up."""
    runs_on = here.unended_on(job.name) if job.state == "LOST" else ()
    if not job.is_over and (job.state != "LOST" or runs_on):
        more = f" and {len(runs_on) - 1} more" if len(runs_on) > 1 else ""
        on = f", and has not ended on {runs_on[0]}{more}" if runs_on else ""
        it = f"{here.where_of(job.name)} {job.name}"
        instead = f"paceline resume{it} lets it go on" if job.state == "SUSPENDED" else "wait for it"
        raise UserError(f"job {job.name} is {job.state}{on}; {instead}, or stop it first: paceline stop{it}")


def kept_there(spec: JobSpec, here: Backend, there: Backend, warn: Callable[[str], None]) -> JobSpec:
    """What of a job goes on with it on another target; `warn` gets a line about options that are left out."""
    kept = dict(spec.options) if type(there) is type(here) else {}
    if left_out := [option for option in spec.options if option not in kept]:
        names = ", ".join(left_out)
        warn(f"options of {here.name}, which mean nothing to {there.name}, are left out: {names}")
    return spec.changed({"backend": there.name, "log_dir": None, "keep_warm": None, "options": kept})


def refuse_nodes_here(spec: JobSpec, there: Backend) -> None:
    """Refuse several nodes on this machine, on which nodes are started by hand."""
    if there.name == HERE and spec.node_range[1] > 1:
        raise UserError(f"--nnodes {spec.nodes}, but this machine is one; add --nnodes 1, and -n for its ranks")


def changed(spec: JobSpec, changes: Mapping[str, Any], name_of: Callable[[KeyPath], str] = flag_of) -> JobSpec:
    """A job with some of its fields changed; `changes` that are None change nothing."""
    from .functions import is_function

    if changes.get("args") is not None and is_function(spec):
        raise UserError("the arguments of a function are kept with it; submit it again with others: jobs.submit")
    old = spec.dumped()
    new = {name: value for name, value in changes.items() if value is not None}
    env, secrets = new.get("env", {}), new.get("secrets", ())  # a variable that was one may become the other
    new["env"] = {**{name: value for name, value in old["env"].items() if name not in secrets}, **env}
    new["secrets"] = (*(name for name in old["secrets"] if name not in {*env, *secrets}), *secrets)
    if "environment" in new:  # else it is what it was when the job was submitted
        new["environment_digest"] = None
    new["labels"] = {**old["labels"], **new.get("labels", {})}
    new["options"] = _changed_options(old["options"], new.get("options", {}))
    try:
        return JobSpec.validated({**old, **new})
    except InvalidError as error:
        raise error.named(name_of) from None


def _changed_options(old: dict[str, object], new: dict[str, object]) -> dict[str, object]:
    """Options with changes; tables change name by name, and an empty value takes an option back."""
    found = dict(old)
    for name, value in new.items():
        before: Any = old.get(name)
        within = before if isinstance(before, dict) else {}
        found[name] = _changed_options(within, value) if isinstance(value, dict) else value
    return {name: value for name, value in found.items() if name not in new or value not in ("", {})}


def next_name(old: Job, spec: JobSpec) -> str:
    """The name of a job that is submitted again: that of the old one, with the next free number."""
    stem = re.sub(r"-\d+$", "", old.name) if spec.resume_from else old.name  # it was numbered here itself
    return f"{stem[:55]}-"
