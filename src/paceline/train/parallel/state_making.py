"""Tells steps of training from those by which torch makes the state of an optimizer.

`torch.distributed.checkpoint.state_dict` steps an optimizer that has no state, with gradients and a learning rate of
zero, before it reads or sets its state. That trains nothing.
"""

from __future__ import annotations

import sys

_MODULE = "torch.distributed.checkpoint.state_dict"
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
