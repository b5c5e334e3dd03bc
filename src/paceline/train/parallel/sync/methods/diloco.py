"""DiLoCo: ranks train alone for many steps, and an outer optimizer makes one step of what they have learned."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from .apart import ApartExchange, floating, means

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nn.parallel import DistributedDataParallel

    from paceline.train.parallel.sync.options import DiLoCo
    from paceline.train.torch_types import StateDict

    from .averaging import Averaging

    Future = torch.futures.Future[torch.Tensor]


# -- fragments ---------------------------------------------------------------------------------------------------------
# Fragments of a model: some of its layers, which take their outer steps together.


class Fragment:
    """Parameters in one tensor, with the state of their outer optimizer.

    Attributes:
        parameters: in the order of the model.
        key: the number of this fragment, and that of its elements.
        common: what all ranks have in common since the last outer step; empty before the first step.
        momentum: of the outer optimizer, as large.
        pending: the mean outer gradient of the exchange that was begun last, or its future, until the outer step.
    """

    def __init__(self, number: int, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.parameters = parameters
        self.key = number, sum(parameter.numel() for parameter in parameters)
        self.common = torch.empty(0, dtype=dtype)
        self.momentum = torch.empty(0, dtype=dtype)
        self.pending: Future | torch.Tensor | None = None

    def local(self) -> torch.Tensor:
        """A copy of the parameters of this rank."""
        return torch.cat([parameter.detach().reshape(-1).to(self.common.dtype) for parameter in self.parameters])

    def write(self, values: torch.Tensor) -> None:
        """Set the parameters of this rank."""
        parts = torch.split(values, [parameter.numel() for parameter in self.parameters])
        with torch.no_grad():
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.copy_(part.view(parameter.shape))

    def start(self) -> None:
        """Begin with the parameters of this rank, which are the same on all ranks."""
        self.common = self.local()
        self.momentum = torch.zeros_like(self.common)
        self.pending = None

    def received(self) -> torch.Tensor | None:
        """The mean outer gradient, for which this waits; None if no exchange was begun."""
        if self.pending is not None and not isinstance(self.pending, torch.Tensor):
            try:
                self.pending = self.pending.wait()
            except RuntimeError:
                raise
            except Exception as error:
                raise RuntimeError(f"the exchange of parameters failed: {error}") from error
        return self.pending

    def outer_step(self, rate: float, momentum: float, keep: float) -> None:
        """A step of SGD with Nesterov momentum, as torch.optim.SGD takes it, by the outer gradient received."""
        gradient = self.received()
        if gradient is None:
            return
        self.pending = None
        self.momentum.mul_(momentum).add_(gradient)
        self.common.add_(gradient.add(self.momentum, alpha=momentum), alpha=-rate)
        self.write(self.common if keep == 0 else self.local().mul_(keep).add_(self.common, alpha=1 - keep))

    def state_dict(self) -> StateDict:
        """What a checkpoint holds; an exchange that is under way is waited for, and its result is in it."""
        pending = self.received()
        return {"common": self.common.clone(), "momentum": self.momentum.clone(), "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on."""
        device = self.parameters[0].device
        self.common, self.momentum = state["common"].to(device), state["momentum"].to(device)
        self.pending = None if state["pending"] is None else state["pending"].to(device)


def deal(module: torch.nn.Module, count: int) -> list[Fragment]:
    """Deal the layers of a model out to fragments of similar size: the largest first, each to the smallest fragment.

    Layers are the modules with trained parameters of their own. With layers of equal size, each fragment has every
    `count`-th of them, which Streaming DiLoCo (arXiv:2501.18512) calls strided.
    """
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    layers: dict[str, list[tuple[int, torch.nn.Parameter]]] = {}
    for number, (name, parameter) in enumerate(trained):
        layers.setdefault(name.rpartition(".")[0], []).append((number, parameter))
    if count > len(layers):
        raise ValueError(
            f"fragments={count} is more than the {len(layers)} layers of {type(module).__name__} that have trained "
            f"parameters; pass fragments={len(layers)} or less"
        )
    dtype = functools.reduce(torch.promote_types, (parameter.dtype for _, parameter in trained), torch.float32)
    dealt: list[list[tuple[int, torch.nn.Parameter]]] = [[] for _ in range(count)]
    sizes = [0] * count
    for layer in sorted(layers.values(), key=_size, reverse=True):
        smallest = sizes.index(min(sizes))
        dealt[smallest] += layer
        sizes[smallest] += _size(layer)
    return [
        Fragment(number, [parameter for _, parameter in sorted(each, key=lambda one: one[0])], dtype)
        for number, each in enumerate(dealt)
    ]


def _size(layer: Sequence[tuple[int, torch.nn.Parameter]]) -> int:
    return sum(parameter.numel() for _, parameter in layer)


# -- the exchange ------------------------------------------------------------------------------------------------------


KEPT = 0.5  # of a rank's own parameters, when an outer step comes that was computed from earlier ones


class DiLoCoExchange(ApartExchange):
    """Takes an outer step of each fragment of a model after every so many steps of its optimizer.

    The outer gradient of a fragment is what all ranks had in common after its last outer step, minus what a rank has
    now; its mean over the ranks is a gradient for SGD with Nesterov momentum. Fragments take turns. If the exchange
    overlaps with the training, its result is applied a fixed number of steps later, and each rank keeps half of its own
    parameters: local = 0.5 local + 0.5 common.

    The end of an epoch averages the ranks' parameters. Their outer steps go on as if it had not: neither what they have
    in common nor the momentum changes, so the next outer gradient has all steps since the last one.

    Sources: Douillard et al. 2023, arXiv:2311.08105; fragments, overlap and mixing (alpha there): Douillard et al.
    2025, arXiv:2501.18512, algorithm 2.
    """

    _averaging: Averaging

    def __init__(
        self, options: DiLoCo, module: torch.nn.Module, fragments: Sequence[Fragment], averaging: Averaging
    ) -> None:
        super().__init__(module, averaging)
        self._options, self._fragments = options, fragments
        self._steps = 0  # of the optimizer, ever
        self._is_started = False  # whether fragments have what is common
        self._is_apart = False  # whether ranks have stepped since all had the same model

    def attach(self, exchange: DistributedDataParallel) -> None:
        """See `Synchroniser.attach`: no gradients are exchanged."""

    @property
    def exchanges_gradients(self) -> bool:
        return False

    @property
    def is_common(self) -> bool:
        """See `Synchroniser.is_common`: after an outer step of the only fragment, too."""
        stepped = len(self._fragments) == 1 and not self._options.delayed and self._is_turn(0, self._steps)
        return not self._is_apart or stepped

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """See `Synchroniser.follow`: before its first step, all ranks have the same model."""
        super().follow(optimizer)
        optimizer.register_step_pre_hook(self._start)

    def _start(self, *_: object) -> None:
        if not self._is_started:
            self._is_started = True
            for fragment in self._fragments:
                fragment.start()

    def after_step(self) -> None:
        self._start()
        self._steps += 1
        self._is_apart = True
        options, delay = self._options, self._options.delayed
        for number, fragment in enumerate(self._fragments):
            if self._is_turn(number, self._steps):
                fragment.pending = self._averaging.begin(fragment.common - fragment.local(), fragment.key)
        for number, fragment in enumerate(self._fragments):
            if self._is_turn(number, self._steps - delay):
                fragment.outer_step(options.outer_lr, options.outer_momentum, KEPT if delay else 0.0)

    def _is_turn(self, number: int, step: int) -> bool:
        """Whether the exchange of a fragment begins after this step: fragments are spread evenly over the cycle."""
        every = self._options.every
        return step > 0 and (step - (number + 1) * every // len(self._fragments)) % every == 0

    def settle(self) -> None:
        if self._is_apart:
            self._average()
            self._is_apart = False

    def _average(self) -> None:
        """Set parameters and buffers to their means over all ranks."""
        for fragment in self._fragments:
            fragment.received()  # nothing else may be under way
        for fragment in self._fragments:
            difference = fragment.local() - fragment.common  # which fits into few bits
            fragment.write(self._averaging.now(difference, exact=False).add_(fragment.common))
        buffers = floating(self._module.buffers())
        for each, mean in zip(buffers, means(buffers, lambda flat: self._averaging.now(flat, exact=True)), strict=True):
            each.copy_(mean)

    def common_state(self) -> StateDict:
        """See `Synchroniser.common_state`: the mean of all ranks, which go on with what they have."""
        if not self._is_apart:
            return self._module.state_dict()
        own = [fragment.local() for fragment in self._fragments]
        buffers = [(each, each.clone()) for each in floating(self._module.buffers())]
        self._average()
        state = {
            name: each.clone() if torch.is_tensor(each) else each for name, each in self._module.state_dict().items()
        }
        for fragment, values in zip(self._fragments, own, strict=True):
            fragment.write(values)
        for each, values in buffers:
            each.copy_(values)
        return state

    def model_loaded(self) -> None:
        """See `Synchroniser.model_loaded`: a new cycle begins, without momentum."""
        self._steps, self._is_started, self._is_apart = 0, False, False

    def state_dict(self) -> StateDict:
        if not self._is_started:
            return {}
        return {
            "steps": self._steps,
            "fragments": [fragment.state_dict() for fragment in self._fragments],
            "model": self._module.state_dict() if self._is_apart else None,
            "optimizer": self._optimizer.state_dict() if self._optimizer is not None else None,
            "wire": self._averaging.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        self._steps, self._is_started = state["steps"], True
        for fragment, kept in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(kept)
        self._is_apart = state["model"] is not None
        self._load_own(state)
        self._averaging.load_state_dict(state["wire"])
