"""DiLoCo: ranks train alone for many steps, and an outer optimizer makes one step of what they have learned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .apart import ApartExchange, floating, means

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nn.parallel import DistributedDataParallel

    from paceline.train.parallel.sync.options import DiLoCo

    from .averaging import Averaging
    from .fragments import Fragment

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

    def saw_loss(self, loss: torch.Tensor) -> None:
        """See `Synchroniser.saw_loss`: before the first step, all ranks have the same model."""
        self._start()

    def _start(self) -> None:
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

    def common_state(self) -> dict[str, Any]:
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

    def state_dict(self) -> dict[str, Any]:
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
