"""Deep gradient compression: the momentum of the optimizer is taken before the exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.train.parallel.sync.wires.dgc import DeepGradientCompression, Rule

from .every_step import EveryStepExchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import GradBucket
    from torch.utils.hooks import RemovableHandle

    from paceline.train.parallel.sync.options import DGC
    from paceline.train.parallel.sync.routes.route import Route
    from paceline.train.parallel.sync.wires.wire import Wire

_TAKEN = {"momentum": 0.0, "weight_decay": 0.0}  # what the optimizer leaves to the wire


class DGCExchange(EveryStepExchange):
    """Exchanges momentum in place of gradients, and lets the optimizer step by it as it is.

    If there is one machine only, gradients are averaged as they are, and the optimizer does all by itself.
    """

    follows_optimizer = True

    def __init__(
        self,
        options: DGC,
        way: tuple[Route, Wire | None],
        world_size: int,
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        super().__init__([way], world_size, parameters)
        self._options, self._parameters = options, parameters
        self._compresses = way[0].machines > 1
        self._wire = way[1]
        self._hooks: list[RemovableHandle] = []
        self._taken: list[tuple[dict[str, Any], dict[str, Any]]] = []  # param groups, and what they had

    def begin(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.buffer().layout is not torch.strided and self._compresses:
            raise RuntimeError("DGC does not take sparse gradients; use Embedding(sparse=False), or another method")
        if isinstance(self._wire, DeepGradientCompression) and bucket.index() == 0:
            self._wire.rules = self._rules()
        return super().begin(bucket)

    def _rules(self) -> list[Rule]:
        """What the wire does for each parameter; nothing for those of another optimizer."""
        found: dict[int, Rule] = {}
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            rule = Rule(group["momentum"], group["nesterov"], group["weight_decay"])
            found.update({id(parameter): rule for parameter in group["params"]})
        return [found.get(id(parameter), Rule()) for parameter in self._parameters]

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.SGD):
            problem = f"{type(optimizer).__name__} is another optimizer"
        else:
            options = ("dampening", "maximize")
            problem = ", ".join(f"{each}=…" for each in options if any(g[each] for g in optimizer.param_groups))
        if problem:
            raise ValueError(f"DGC knows torch.optim.SGD alone, without dampening= and maximize=: {problem}; use TopK")
        super().follow(optimizer)
        if self._compresses:
            self._hooks = [
                optimizer.register_step_pre_hook(lambda *_: self._take()),
                optimizer.register_step_post_hook(lambda *_: self._give_back()),
            ]

    def _take(self) -> None:
        """Before a step: what the wire has done is not done again."""
        self._give_back()  # what a step that has failed has left
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            self._taken.append((group, {name: group[name] for name in _TAKEN}))
            group.update(_TAKEN)

    def _give_back(self) -> None:
        for group, values in self._taken:
            group.update(values)
        self._taken.clear()

    def leaves_clipping(self) -> bool:
        if self._compresses and self._options.clip is None:
            raise RuntimeError(
                "with DGC, gradients are clipped before they are exchanged: say by how much, DGC(clip=1.0), and leave "
                "run.clip_grad_norm as it is, for runs on one machine"
            )
        return not self._compresses

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().close()
