"""How a user or `paceline tune` chooses the exchange of gradients of a script that does not say itself."""

from __future__ import annotations

import re

# The name of a method for each `Strategy` without one, such as "powersgd(4)".
SYNC = "PACELINE_SYNC"
# In a trial of `paceline tune`: the ranks end after so many steps of the optimizer, and say what these have taken.
TRIAL_STEPS = "PACELINE_TRIAL_STEPS"
# The type of the error if a script in a trial chooses the method itself.
FIXED_SYNC = "FixedSync"
# Steps at the start of a trial that are not like later ones: memory is new, buckets change, code is compiled.
SETTLING = 5

# The methods that can be tried: name → the number after it; the more exact ones first.
TRIED: dict[str, str] = {
    "allreduce": "", "fp16": "", "bf16": "", "int8": "", "powersgd": r"[1-9]\d*", "topk": r"1(\.0*)?|0?\.\d*[1-9]\d*",
    "local_sgd": r"[1-9]\d*", "diloco": r"[1-9]\d*",
}  # fmt: skip
# Of these, those that are another optimisation: never chosen without being asked for.
OTHER_OPTIMISATIONS = frozenset({"local_sgd", "diloco"})
_NAME = re.compile(r"(\w+)(?:\((.*)\))?")


def problem_with(name: str) -> str:
    """Why a trial cannot use this method; "" if it can."""
    match = _NAME.fullmatch(name)
    number = TRIED.get(match[1]) if match is not None else None
    if match is None or number is None:
        return f"{name!r} is none of {', '.join(TRIED)}"
    if match[2] is not None and not number:
        return f"{name!r}: {match[1]} has no number; leave it out"
    if match[2] is not None and not re.fullmatch(number, match[2]):
        return f"{name!r}: {match[2]!r} is no number for {match[1]}"
    return ""


def is_other_optimisation(name: str) -> bool:
    """Whether this method changes what is computed, and not how it is sent alone."""
    return name.partition("(")[0] in OTHER_OPTIMISATIONS
