"""The exchange of gradients whose forward pass or parameters DistributedDataParallel does not know."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.train.collective_trace import script_line

from .errors import ModelMismatch, NotExchanged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paceline.train.group.group import Group


class LateExchange:
    """Averages gradients over all ranks at the end of the backward pass that has computed them, where that is due.

    A mean of what is equal on all ranks changes nothing, so gradients may be a sum of some that were averaged and some
    that were not.

    Attributes:
        parameters: those whose gradients are averaged.
        backwards: number of backward passes so far that have given some of them a gradient.
        was_late: whether the last one ended with an exchange.
    """

    def __init__(self, group: Group, is_due: Callable[[], bool]) -> None:
        self.parameters: list[torch.Tensor] = []
        self.backwards = 0
        self.was_late = False
        self._group, self._is_due = group, is_due
        self._open = False  # whether a backward pass is under way
        self._last = -1  # torch's number of the last one
        self._hooked: set[int] = set()

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take these parameters in place of those so far."""
        self.parameters = list(parameters)
        if self._group.world_size == 1:
            return
        # DDP's reducer, in C++, holds the parameters, and Python's garbage collector does not see that. A hook that
        # held this object would keep the model, and the files that the script has open in it, until after Python's end.
        method = weakref.WeakMethod(self._gradient_ready)

        def ready(_: torch.Tensor) -> None:
            if (call := method()) is not None:
                call()

        for parameter in self.parameters:
            if id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """Note that no backward pass is under way: an error may have ended the last one."""
        self._open = False

    def _gradient_ready(self) -> None:
        if self._open:
            return
        number = torch._C._current_graph_task_id()
        self._open = True
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        if number < self._last:  # it encloses the last one, as with activation checkpointing
            return
        self._last = number
        self.backwards += 1
        self.was_late = self._is_due()

    def _backward_ended(self) -> None:
        self._open = False
        if self.was_late:
            self.exchange(self.parameters)

    def exchange(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average the gradients of these parameters. One that has a gradient on some ranks gets one on all."""
        with self._group.guard:
            for dtype in dict.fromkeys(each.dtype for each in parameters):
                self._exchange([each for each in parameters if each.dtype is dtype])

    def _exchange(self, parameters: Sequence[torch.Tensor]) -> None:
        for each in parameters:
            if each.grad is not None and each.grad.is_sparse:
                raise NotExchanged(
                    f"sparse gradients stay on this rank, {self._group.rank} ({script_line()}): they are exchanged "
                    "only if the loss comes from the model that run.setup returned; call that, or use sparse=False"
                )
        average_gradients(parameters, self._group.world_size)


def average_gradients(
    parameters: Sequence[torch.Tensor], ranks: int, process_group: dist.ProcessGroup | None = None
) -> None:
    """Average gradients of one type over the ranks of a group, or over all; one that only some have, all get."""
    # After the gradients, a number per parameter says whether some rank has one.
    parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    given = torch.tensor([each.grad is not None for each in parameters], dtype=parts[0].dtype)
    flat = torch.cat([*(part.detach().reshape(-1) for part in parts), given.to(parts[0].device)])
    dist.all_reduce(flat, group=process_group)
    flat /= ranks
    *means, given = torch.split(flat, [*(part.numel() for part in parts), len(parts)])
    lacks = [each.grad is None for each in parameters]
    is_given = [bool(each) for each in given] if any(lacks) else []
    for number, (parameter, mean) in enumerate(zip(parameters, means, strict=True)):
        if not lacks[number]:
            parts[number].detach().copy_(mean.view_as(parameter))
        elif is_given[number]:
            parameter.grad = mean.view_as(parameter).clone()


# -- parameters in no model --------------------------------------------------------------------------------------------
# Parameters that an optimizer of the run trains, and that are in none of its models, such as weights of losses.


class LooseParameters:
    """Those of one optimizer. They start with rank 0's values, their gradients are averaged, and checkpoints have them.

    A rank's loss may not depend on them, so their exchange does not wait for gradients: it belongs to each
    `Run.backward`, and to a step of the optimizer where gradients come from elsewhere.

    Attributes:
        accumulate: number of batches per step of the optimizer.
        averages: whether gradients are averaged now: the next backward pass is the last one of its accumulation.
        is_averaged: whether they were since the last step.
        late: the exchange of their gradients.
        is_expected: whether a checkpoint that is being loaded has some.
    """

    def __init__(self, group: Group, accumulate: int) -> None:
        self.accumulate, self.averages = accumulate, accumulate == 1
        self.is_averaged = self.is_expected = False
        self.late = LateExchange(group, lambda: False)
        self._group = group
        self._named: dict[str, torch.Tensor] = {}
        self._others: set[int] = set()  # of which something else in the checkpoints has the values
        self._saved: dict[str, torch.Tensor] = {}  # by a checkpoint, of groups that the script has not added yet

    def hold(self, named: Mapping[str, torch.Tensor]) -> None:
        """Make these, by their names, the parameters. New ones get the values of the checkpoint, or of rank 0."""
        new = {name: each for name, each in named.items() if self._named.get(name) is not each}
        self._named = dict(named)
        for each in new.values():
            each.data = each.data.to(self._group.device)
        self.late.parameters = list(self._named.values())
        self._load({name: self._saved.pop(name) for name in new if name in self._saved})
        if not new or self._group.world_size == 1:
            return
        mine = [(name, tuple(each.shape), str(each.dtype)) for name, each in new.items()]
        theirs = self._group.broadcast_object(mine)
        alike = self._group.gather_objects(mine == theirs)
        if not all(alike):
            raise ModelMismatch(
                f"the optimizer of rank {alike.index(False)} has other parameters than that of rank 0, beside those of "
                "the models of run.setup; give all ranks' optimizers the same"
            )
        with torch.no_grad(), self._group.guard:
            for each in new.values():
                dist.broadcast(each, 0)

    def average(self) -> None:
        """Average the gradients, on all ranks, unless more batches are to add to them."""
        if self.averages and self.late.parameters and self._group.world_size > 1:
            self.late.exchange(self.late.parameters)
            self.is_averaged = True

    def leave_to_others(self, others: set[int]) -> None:
        """Leave parameters, given by their ids, out of `state_dict`: other parts of the checkpoints have them."""
        self._others = others

    def __len__(self) -> int:
        return len(self.state_dict())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Their values by their names."""
        return {name: each.detach() for name, each in self._named.items() if id(each) not in self._others}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load values; those of parameters that the optimizer gets later wait for them."""
        self._load({name: value for name, value in state.items() if name in self._named})
        self._saved = {name: value for name, value in state.items() if name not in self._named}
        self.is_expected = False

    def _load(self, state: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in state.items():
                self._named[name].copy_(value)
