"""Verbs with 32 hosts of which one lets in and then says nothing, against the same with all hosts well.

The limits are those of a user who has set none.
"""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Callable

from ..case import Case, Side
from ..lab import DEFAULT_LIMITS, HOSTS, SCRIPTS, Lab
from ..sample import Sample
from .hosts import paceline

NOTHING = str(SCRIPTS / "nothing.py")
_TARGET = ("--on", f"lab{HOSTS}")
_NUMBERS = itertools.count()


def _measure(verb: str, hangs: bool, again: bool = False) -> Callable[[Lab], Sample]:
    """The time of a verb, with new connections, or of the same verb soon after, while a job runs on all hosts."""

    def measure(lab: Lab) -> Sample:
        victim, name = lab.hosts().hosts[-1], f"silent-{next(_NUMBERS)}"
        lab.forget_silent_hosts()
        with lab.started(
            paceline(lab, "submit", *_TARGET, "--name", name, "--nnodes", str(HOSTS), NOTHING, "600")
        ) as it:
            it.finish()
            env = {"XDG_RUNTIME_DIR": str(lab.folder), **DEFAULT_LIMITS}  # so the connections of `submit` are not used
            line = paceline(lab, verb, *_TARGET, *([] if verb == "list" else [name]))
            try:
                if hangs:
                    victim.hang_logins()
                if again:
                    return Sample(lab.answer([sys.executable, str(SCRIPTS / "again.py"), *line], **env))
                # 1: `stop` has not reached a host
                with lab.started(["sh", "-c", f"{shlex.join(line)}; test $? -le 1"], **env) as done:
                    return Sample(done.finish())
            finally:
                victim.heal_logins()

    return measure


def _case(verb: str, again: bool = False) -> Case:
    name, work = f"hosts-silent-{verb}", f"paceline {verb} with {HOSTS} hosts, of which one does not answer"
    if again:
        name, work = f"{name}-again", f"{work}, a second time"
    sides = Side(verb, _measure(verb, True, again)), Side("all of them answer", _measure(verb, False, again))
    return Case(name, work, *sides, once=True)


CASES = [_case("list"), _case("list", again=True), _case("get"), _case("stop")]
