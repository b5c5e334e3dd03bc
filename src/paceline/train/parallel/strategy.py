"""How the ranks train together: all options in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Strategy:
    """Options of `Run.setup`.

    Attributes:
        precision: "fp32", or "bf16" to run forward passes under autocast (weights and gradients stay fp32).
        accumulate: number of batches per step of the optimizer; gradients are exchanged only in the last of them.
        sync_batchnorm: normalise over the batches of all ranks (torch.nn.SyncBatchNorm; CUDA only).
        compile: pass the model through torch.compile; a string names the backend to compile with.
        lr_scaling: "none" does not change learning rates; "linear" multiplies them by the world size and "sqrt" by its
            square root, for scripts whose batch per rank stays the same when ranks are added (Goyal et al. 2017,
            arXiv:1706.02677).
        find_unused_parameters: allow parameters without a gradient, at the cost of a search in every step.
        bucket_cap_mb: megabytes of gradients that are exchanged at once.

    Raises:
        ValueError: an option has another value than those named.
    """

    precision: Literal["fp32", "bf16"] = "fp32"
    accumulate: int = 1
    sync_batchnorm: bool = False
    compile: bool | str = False
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    find_unused_parameters: bool = False
    bucket_cap_mb: int = 25

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision {self.precision!r} is neither 'fp32' nor 'bf16'")
        if self.lr_scaling not in ("none", "linear", "sqrt"):
            raise ValueError(f"lr_scaling {self.lr_scaling!r} is none of 'none', 'linear', 'sqrt'")
        if self.accumulate < 1:
            raise ValueError(f"accumulate {self.accumulate} is less than 1")

    def learning_rate_factor(self, world_size: int) -> float:
        """The factor for learning rates."""
        return {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[self.lr_scaling]
