"""When a checkpoint is due, and whether one fits what was set up."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Interval:
    """How often to take a checkpoint: steps (`500`, `"500 steps"`) or time (`"90s"`, `"10m"`, `"1h"`).

    Raises:
        ValueError: it is none of these.
    """

    def __init__(self, text: int | str) -> None:
        self.steps, self.seconds = 0, 0.0
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(steps?|[smh])?\s*", str(text))
        if match is None or float(match[1]) <= 0:
            raise ValueError(f"checkpoint_every={text!r} is neither steps (500) nor time ('90s', '10m', '1h')")
        if match[2] in _UNITS:
            self.seconds = float(match[1]) * _UNITS[match[2]]
        elif float(match[1]) == int(float(match[1])):
            self.steps = int(float(match[1]))
        else:
            raise ValueError(f"checkpoint_every={text!r}: a checkpoint is taken after whole steps")


def check_parts(here: Mapping[str, Any], saved: Mapping[str, Any], loaders: int, saved_loaders: int) -> None:
    """See that a checkpoint fits what was set up.

    Raises:
        RuntimeError: it does not; says what it lacks, or has besides.
    """
    missing = sorted(set(here) - set(saved))
    surplus = sorted(set(saved) - set(here) - {"progress"})
    wrong = [f"it has no {' and no '.join(missing)}"] if missing else []
    if surplus:
        wrong.append(f"its {' and '.join(surplus)} {'is' if len(surplus) == 1 else 'are'} not in the script")
    if loaders != saved_loaders:
        wrong.append(f"it is of {_number(saved_loaders)}, and the script has made {_number(loaders)} so far")
    if wrong:
        raise RuntimeError(
            f"the checkpoint does not fit this script: {'; '.join(wrong)}; "
            "set up and register what it was taken with, or take another checkpoint_dir for another script"
        )


def _number(loaders: int) -> str:
    return f"{loaders or 'no'} training loader{'s' if loaders != 1 else ''}"


def load(name: str, thing: Any, state: Any) -> None:
    """Load a part of a checkpoint.

    Raises:
        RuntimeError: it is another model's, or another kind of optimizer's.
    """
    why = ""
    try:
        thing.load_state_dict(state)
    except (ValueError, KeyError) as error:
        if not isinstance(thing, torch.optim.Optimizer):
            raise
        why = f"{error}"
    if isinstance(thing, torch.optim.Optimizer):  # torch looks at what it has loaded when it steps
        lacking = sorted({option for group in thing.param_groups for option in thing.defaults if option not in group})
        why = why or (f"it has no {', '.join(lacking)}" if lacking else "")
        if why:
            raise RuntimeError(
                f"the checkpoint's {name} does not fit {type(thing).__name__}: {why}; "
                "train on with the optimizer that it was taken with, or take another checkpoint_dir"
            )
