"""Tells steps of training from those by which torch makes the state of an optimizer, and from parts of a step.

`torch.distributed.checkpoint.state_dict` steps an optimizer that has no state, with gradients and a learning rate of
zero, before it reads or sets its state. That trains nothing.
"""

from __future__ import annotations

import sys

import torch

_MODULE = "torch.distributed.checkpoint.state_dict"
_STEP = torch.optim.Optimizer.profile_hook_step(max).__code__  # of every step: it calls the hooks
_DEPTH = 20  # frames of hooks, wrappers and schedulers between that module and the end of the step


def only_makes_state() -> bool:
    """Whether the current step of an optimizer is such a one; called within it."""
    if _MODULE not in sys.modules:
        return False
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame.f_globals.get("__name__") == _MODULE:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def is_part_of_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of a subclass has called that of its base class, which calls the hooks again."""
    frame, number = sys._getframe(1), 0
    while frame.f_back is not None and number < 2:
        number += frame.f_code is _STEP and frame.f_locals["self"] is optimizer
        frame = frame.f_back
    return number == 2
