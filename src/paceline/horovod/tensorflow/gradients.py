"""Gradients of all ranks: how they are reduced and accumulated, and a tape that does so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from paceline.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.horovod.common.util import split_list

from .bridge import traced_name
from .compression import Compression, Compressor
from .mpi_ops import Adasum, Average, Sum, reduce_all
from .replicas import ComparedVariables, comparison


@dataclass
class Reduction:
    """How gradients are reduced over all ranks."""

    name: str  # of the operations; they are numbered
    compression: type[Compressor] = Compression.none  # how gradients are made smaller for sending
    sparse_as_dense: bool = False  # reduce IndexedSlices as dense tensors
    op: int = Average  # Average, Sum or Adasum
    predivide: float = 1.0  # with Average: gradients are divided by it before the sum, and multiplied by it afterwards
    groups: int | Sequence[Sequence[Any]] | None = None  # how many, or lists of variables, are reduced together
    process_set: ProcessSet = global_process_set  # who takes part
    scale_local: bool = True  # divide gradients of local variables by the number of ranks
    local: set[int] = field(default_factory=set)  # ids of the variables whose gradients are not reduced

    def __post_init__(self) -> None:
        if self.predivide != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if self.op not in (Average, Sum, Adasum):
            raise ValueError(f"op={self.op!r}: gradients are reduced with Average, Sum or Adasum")
        if not isinstance(self.groups, (int, list, tuple, type(None))):
            raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")

    def __call__(self, grads: Sequence[Any], variables: Sequence[Any], optimizer: Any = None) -> list[Any]:
        """The gradients of all ranks, one per variable; what is None stays None."""
        grads = list(grads)
        if not self.process_set.included() or self.process_set.size() == 1:
            return grads
        if self.sparse_as_dense:
            grads = [tf.convert_to_tensor(it) if isinstance(it, tf.IndexedSlices) else it for it in grads]
        own = [index for index, variable in enumerate(variables) if id(variable) in self.local]
        shared = [None if index in own else grad for index, grad in enumerate(grads)]
        name = traced_name(self.name) or self.name
        reduced = reduce_all(
            shared, [f"{name}.{index}" for index in range(len(grads))], self.op, self.process_set,
            compression=self.compression, prescale=1 / self.predivide, postscale=self.predivide,
            groups=self._positions(shared, variables), compare=self._comparison(grads, variables, optimizer),
        )  # fmt: skip
        for index in own:
            reduced[index] = self._scaled(grads[index]) if self.scale_local else grads[index]
        return reduced

    def _comparison(self, grads: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> ComparedVariables | None:
        """What compares the variables of all ranks, if these are to be equal."""
        if self.local or self.op == Adasum or self.process_set.process_set_id != 0:
            return None
        return comparison([one for grad, one in zip(grads, variables, strict=True) if grad is not None], optimizer)

    def _scaled(self, grad: Any) -> Any:
        """The gradient of a local variable, divided by the number of ranks."""
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(self._scaled(grad.values), grad.indices, grad.dense_shape)
        return None if grad is None else grad / self.process_set.size()

    def _positions(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[list[int]]:
        if not self.groups:
            return []
        if isinstance(self.groups, int):
            return split_list([index for index, grad in enumerate(grads) if grad is not None], self.groups)
        places = {id(variable): index for index, variable in enumerate(variables)}
        return [[places[id(one)] for one in group if id(one) in places] for group in self.groups]


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape of the same class whose `gradient` gives the gradients of all ranks.

    Args:
        gradtape: a `tf.GradientTape`, before or after its `with` block.
        device_dense, device_sparse: accepted; collectives run on the CPU.
        compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set, scale_local_gradients: see
            `Reduction`; local variables are those given to `register_local_source`.
        num_groups: deprecated, see `groups`.

    Raises:
        ValueError: `op`, `groups` or the predivide factor is malformed.
    """
    reduction = Reduction(
        "DistributedGradientTape", compression, sparse_as_dense, op, gradient_predivide_factor, groups or num_groups,
        process_set, scale_local_gradients,
    )  # fmt: skip
    kind = type(type(gradtape).__name__, (_TapeMethods, type(gradtape)), {})
    made: Any = object.__new__(kind)
    made.__dict__.update(vars(gradtape), _reduction=reduction)
    return made


def PartialDistributedGradientTape(gradtape: Any, *args: Any, local_layers: Any = (), **kwargs: Any) -> Any:
    """A `DistributedGradientTape` that does not reduce the gradients of some layers' variables."""
    made = DistributedGradientTape(gradtape, *args, **kwargs)
    for variable in local_variables(local_layers):
        made.register_local_source(variable)
    return made


def local_variables(layers: Any) -> list[Any]:
    """The trainable variables of a layer or of several."""
    layers = layers if isinstance(layers, Iterable) else [layers]
    return [variable for layer in layers for variable in layer.trainable_weights]


class _TapeMethods:
    """What the class that `DistributedGradientTape` makes has besides the methods of the tape's own class."""

    _reduction: Reduction

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradient of a variable."""
        self._reduction.local.add(id(source))

    def gradient(self, target: Any, sources: Any, *args: Any, use_generic_names: bool = False, **kwargs: Any) -> Any:
        """The gradients of all ranks, in the structure of `sources`."""
        own: Any = super().gradient(target, sources, *args, **kwargs)  # type: ignore[misc]
        if not isinstance(sources, (list, tuple, dict)):
            return self._reduction([own], [sources])[0]
        reduced = self._reduction(tf.nest.flatten(own), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], *args: Any, **kwargs: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """What `gradient` gives, as pairs of variable and gradient: of the local variables, and of the others."""
        pairs = list(zip(sources, self.gradient(target, sources, *args, **kwargs), strict=True))
        own = [pair for pair in pairs if id(pair[0]) in self._reduction.local]
        return own, [pair for pair in pairs if id(pair[0]) not in self._reduction.local]


class Passes:
    """Gradients that are accumulated over several backward passes."""

    def __init__(self, count: int, averages: bool) -> None:
        if count < 1:
            raise ValueError(f"backward_passes_per_step={count} must be 1 or more")
        self.count = count
        self._averages = averages
        self._sums: list[Any] | None = None
        self._done: Any = None

    def add(self, grads: Sequence[Any], variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Add gradients; returns whether these were of the last pass, and what was accumulated."""
        if self._sums is None:
            with tf.init_scope():
                self._sums = [
                    None if grad is None else tf.Variable(tf.zeros(one.shape, grad.dtype), trainable=False)
                    for grad, one in zip(grads, variables, strict=True)
                ]
                self._done = tf.Variable(0, trainable=False)
        is_first = tf.equal(self._done, 0)
        updates = [is_first]
        for total, grad in zip(self._sums, grads, strict=True):
            if grad is not None:
                before = tf.where(is_first, tf.zeros_like(total), total)
                updates.append(total.assign(before + tf.convert_to_tensor(grad), read_value=True))
        with tf.control_dependencies(updates):
            number = self._done.assign((self._done + 1) % self.count, read_value=True)
        with tf.control_dependencies([number]):
            factor = 1 / self.count if self._averages else 1.0
            totals = [None if total is None else total * tf.cast(factor, total.dtype) for total in self._sums]
            return tf.equal(number, 0), totals

    def reduced(
        self, reduction: Callable[..., list[Any]], grads: Sequence[Any], variables: Sequence[Any], optimizer: Any = None
    ) -> tuple[Any, list[Any]]:
        """Add gradients; returns whether these were of the last pass, and then those of all ranks, else zeros."""
        is_last, totals = self.add(grads, variables)
        present = [total for total in totals if total is not None]
        there = [one for one, total in zip(variables, totals, strict=True) if total is not None]
        made = iter(
            _listed(
                tf.cond(
                    is_last, lambda: reduction(present, there, optimizer), lambda: [tf.zeros_like(it) for it in present]
                )
            )
        )
        return is_last, [None if total is None else next(made) for total in totals]


def _listed(made: Any) -> list[Any]:
    return list(made) if isinstance(made, (list, tuple)) else [made]
