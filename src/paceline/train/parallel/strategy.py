"""How the ranks train together: all options in one place."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from paceline.contract.exchange import SYNC, TRIAL_STEPS
from paceline.contract.tuning import setting

from .errors import FixedSync
from .sync.options import EveryStep, Sync, parse, without_warmup

if TYPE_CHECKING:
    from collections.abc import Mapping


_SHARDS = ("auto", "node", "optimizer")


@dataclass(frozen=True)
class Strategy:
    """Options of `Run.setup`.

    Attributes:
        precision: "fp32", or "bf16" to run forward passes under autocast (weights and gradients stay fp32). The
            variable PACELINE_PRECISION takes the place of "fp32".
        accumulate: number of batches per step of the optimizer; gradients are exchanged only in the last of them.
        sync_batchnorm: normalise over the batches of all ranks (torch.nn.SyncBatchNorm; CUDA only).
        compile: pass the model through torch.compile; a string names the backend to compile with.
        lr_scaling: "none" does not change learning rates; "linear" multiplies them by the number of ranks that have
            batches of their own and "sqrt" by its square root, for scripts whose batch per rank stays the same when
            ranks are added (Goyal et al. 2017, arXiv:1706.02677).
        find_unused_parameters: allow parameters without a gradient, at the cost of a search in every step.
        bucket_mb: megabytes of gradients that are exchanged at once. None is 4 if ranks sum them as they are in memory
            that they share, which then stays in the caches of the cores, and 25 otherwise, but 1 in the first exchange
            of a step, so that it begins early; the variable PACELINE_BUCKET_MB takes the place of None.
        sync: how ranks exchange what they learn: a method such as `AllReduce(wire="fp16")`, or its name. "auto"
            measures and chooses. None takes the name in the variable PACELINE_SYNC, or "allreduce".
        shard: what each rank keeps a part of, instead of a copy. False: nothing. True: parameters, gradients and the
            optimizer's state, by torch's `fully_shard`, over all ranks; "node": over the ranks of each machine; a
            number: over groups of so many ranks. The parts are the same in each machine or group. "optimizer": the
            optimizer's state alone, over all ranks. With one rank, it has no effect. "auto": the first pass is
            measured, and the fastest way is taken that fits into the memory of the device, the machine or its cgroup.
        tensor: number of ranks that compute each layer of `plan` together, each with a part of its weights; they follow
            each other, and have the same data. `shard` is about ranks with other data then.
        plan: how layers are divided, by their names, in which `*` stands for one part: "colwise", "rowwise" or another
            style of `torch.distributed.tensor.parallel`. None takes the model's own plan, `tp_plan`.
        pipeline: number of ranks that have a copy of the model together, each with some of its blocks; they follow
            each other, and have the same data. What is beside the blocks is on all of them. A step is
            `Run.pipeline_step`.
        microbatches: number of parts of a batch that are on their way through a pipeline; None is four per rank of it.
        schedule: in which order a rank of a pipeline computes: "1f1b" takes turns of forward and backward passes, so
            that it keeps fewer activations than "gpipe", which computes all forward passes first.
        units: the names of the modules that are gathered, computed again, or given to ranks of a pipeline, at a time;
            None finds the repeated blocks of the model.
        reshard: give back what a forward pass has gathered of a unit until the backward pass needs it.
        recompute: compute each unit again in the backward pass, instead of keeping what its forward pass has computed
            (`torch.utils.checkpoint`).
        offload: keep parameters, gradients and the optimizer's state in the memory of the machine, and not of the GPU.
        replicas: what to do if ranks train with different parameters or numbers of an optimizer: "check" ends the job,
            "warn" says so once, "off" does not compare them.

    Raises:
        ValueError: an option has another value than those named.
        TypeError: `sync` is neither a method nor a name.
    """

    __module__ = "paceline"  # where users find it

    precision: Literal["fp32", "bf16"] = "fp32"
    accumulate: int = 1
    sync_batchnorm: bool = False
    compile: bool | str = False
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    find_unused_parameters: bool = False
    bucket_mb: int | None = None
    sync: Sync | str | None = None
    shard: bool | int | Literal["auto", "node", "optimizer"] = False
    tensor: int = 1
    plan: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)
    pipeline: int = 1
    microbatches: int | None = None
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    units: tuple[str, ...] | None = None
    reshard: bool = True
    recompute: bool = False
    offload: bool = False
    replicas: Literal["check", "warn", "off"] = "check"

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision {self.precision!r} is neither 'fp32' nor 'bf16'")
        if self.lr_scaling not in ("none", "linear", "sqrt"):
            raise ValueError(f"lr_scaling {self.lr_scaling!r} is none of 'none', 'linear', 'sqrt'")
        if self.replicas not in ("check", "warn", "off"):
            raise ValueError(f"replicas {self.replicas!r} is none of 'check', 'warn', 'off'")
        if self.accumulate < 1:
            raise ValueError(f"accumulate {self.accumulate} is less than 1")
        if self.bucket_mb is not None and self.bucket_mb <= 0:
            raise ValueError(f"bucket_mb {self.bucket_mb} is not more than 0")
        if self.sync is not None:
            parse(self.sync)
        self._check_shard()

    def _check_shard(self) -> None:
        """Check the options of sharded models."""
        is_number = isinstance(self.shard, int) and not isinstance(self.shard, bool)
        if not (isinstance(self.shard, bool) or self.shard in _SHARDS or (is_number and int(self.shard) > 1)):
            raise ValueError(
                f"shard {self.shard!r} is neither True nor False, nor 'auto', 'node' or 'optimizer', nor a number from "
                "2 on"
            )
        if isinstance(self.units, str):
            raise TypeError(f"units {self.units!r} is one name; write units=({self.units!r},)")
        if self.units is not None:
            object.__setattr__(self, "units", tuple(self.units))
        if self.tensor < 1:
            raise ValueError(f"tensor {self.tensor} is less than 1")
        self._check_pipeline()
        if self.plan is not None and self.tensor == 1:
            raise ValueError("plan= has an effect with tensor= only; add the number of ranks that compute a layer")
        if self.tensor > 1 and (self.shard in ("auto", "optimizer") or self.sync not in (None, "allreduce")):
            raise ValueError(
                f'tensor={self.tensor} divides layers among ranks, and goes together with shard=False, True, "node" or '
                "a number, and without sync="
            )
        if self.keeps_copies or self.pipeline > 1:
            if self.shard and not isinstance(self.method, EveryStep):
                raise ValueError(
                    f'sync={self.sync!r} lets each rank step alone, and with shard="optimizer" each updates a part; '
                    "leave out one of them"
                )
            for option, is_given in (("offload=True", self.offload), ("reshard=False", not self.reshard)):
                if is_given:
                    raise ValueError(f"{option} has an effect on sharded parameters only; add shard=True")
            return
        if self.sync not in (None, "allreduce"):
            raise ValueError(
                f"sync={self.sync!r} exchanges whole gradients, and with shard={self.shard!r} no rank has them; leave "
                "out one of them"
            )

    def _check_pipeline(self) -> None:
        """Check the options of pipelines."""
        if self.pipeline < 1:
            raise ValueError(f"pipeline {self.pipeline} is less than 1")
        if self.schedule not in ("1f1b", "gpipe"):
            raise ValueError(f"schedule {self.schedule!r} is neither '1f1b' nor 'gpipe'")
        if self.microbatches is not None and self.microbatches < 1:
            raise ValueError(f"microbatches {self.microbatches} is less than 1")
        if self.pipeline == 1:
            if self.microbatches is not None:
                raise ValueError("microbatches= has an effect with pipeline= only; add pipeline=N")
            return
        for option, is_given in (
            (f"shard={self.shard!r}", self.shard is not False),
            (f"tensor={self.tensor}", self.tensor > 1),
            (f"sync={self.sync!r}", self.sync not in (None, "allreduce")),
            ("sync_batchnorm=True", self.sync_batchnorm),
        ):
            if is_given:
                raise ValueError(
                    f"pipeline={self.pipeline} gives each rank whole blocks, and does not go together with {option}; "
                    "leave out one of them"
                )

    @property
    def keeps_copies(self) -> bool:
        """Whether each rank has all parameters."""
        return self.shard in (False, "optimizer") and self.together == 1

    @property
    def together(self) -> int:
        """The number of ranks that have the same data."""
        return self.tensor * self.pipeline

    @property
    def together_option(self) -> str:
        """The option that says so."""
        return f"pipeline={self.pipeline}" if self.pipeline > 1 else f"tensor={self.tensor}"

    @property
    def method(self) -> Sync:
        """The method that `sync` names."""
        return parse("allreduce" if self.sync is None else self.sync)

    def completed(self, env: Mapping[str, str]) -> Strategy:
        """This strategy, with what the environment says of the method, the precision and the size of buckets.

        What the script says itself holds.

        In a trial of `paceline tune`, the method compresses from the first step on.

        Raises:
            FixedSync: it has a method in a trial.
            ValueError: the environment names no method, no precision or no size.
        """
        given = self._given(env)
        if not self.keeps_copies:
            return given
        name = env.get(SYNC) or "allreduce"
        if self.sync is not None:
            if TRIAL_STEPS in env and SYNC in env:
                raise FixedSync(
                    f"the script itself says Strategy(sync={self.sync!r}), so no other method can be tried; leave "
                    f"sync= out, and {SYNC} decides"
                )
            return given
        try:
            method = parse(name)
        except ValueError as error:
            raise ValueError(f"{SYNC}: {error}") from None
        return dataclasses.replace(given, sync=without_warmup(method) if TRIAL_STEPS in env else name)

    def _given(self, env: Mapping[str, str]) -> Strategy:
        """This strategy, with what the environment says of options that have their defaults."""
        found: dict[str, Any] = {}
        if self.precision == "fp32" and (precision := setting("precision", env)) is not None:
            found["precision"] = precision
        if self.bucket_mb is None and (size := setting("bucket_mb", env)) is not None:
            found["bucket_mb"] = int(size)
        return dataclasses.replace(self, **found) if found else self

    def learning_rate_factor(self, world_size: int) -> float:
        """The factor for learning rates."""
        return {"none": 1.0, "linear": float(world_size), "sqrt": math.sqrt(world_size)}[self.lr_scaling]
