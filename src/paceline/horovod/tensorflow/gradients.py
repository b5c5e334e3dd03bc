"""Gradients of all ranks: a tape and an optimizer of `tf.compat.v1` whose gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from paceline.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.horovod.common.util import split_list

from .bridge import traced_name
from .compression import Compression, Compressor
from .mpi_ops import Adasum, Average, Sum, reduce_all


@dataclass
class Reduction:
    """How gradients are reduced over all ranks.

    Attributes:
        name: of the operations; they are numbered.
        compression: how gradients are made smaller for sending.
        sparse_as_dense: reduce IndexedSlices as dense tensors.
        op: Average, Sum or Adasum.
        predivide: with Average, gradients are divided by it before they are summed, and multiplied by it afterwards.
        groups: number of groups, or lists of variables, whose gradients are reduced together.
        process_set: who takes part.
        scale_local: divide gradients of local variables by the number of ranks.
        local: ids of the variables whose gradients are not reduced.

    Raises:
        ValueError: `op` is another one, a predivide factor is given with another reduction than Average, or `groups` is
            malformed.
    """

    name: str
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    op: int = Average
    predivide: float = 1.0
    groups: int | Sequence[Sequence[Any]] | None = None
    process_set: ProcessSet = global_process_set
    scale_local: bool = True
    local: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.predivide != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if self.op not in (Average, Sum, Adasum):
            raise ValueError(f"op={self.op!r}: gradients are reduced with Average, Sum or Adasum")
        if not isinstance(self.groups, (int, list, tuple, type(None))):
            raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")

    def __call__(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks, one per variable; what is None stays None.

        Raises:
            HorovodInternalError: the ranks disagree, or a rank is gone.
        """
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
            groups=self._positions(shared, variables),
        )  # fmt: skip
        for index in own:
            scaled = self.scale_local and grads[index] is not None
            reduced[index] = grads[index] / self.process_set.size() if scaled else grads[index]
        return reduced

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
        flat = [sources] if not isinstance(sources, (list, tuple, dict)) else tf.nest.flatten(sources)
        grads = [own] if flat == [sources] else tf.nest.flatten(own)
        reduced = self._reduction(grads, flat)
        return reduced[0] if grads == [own] else tf.nest.pack_sequence_as(sources, reduced)


class Passes:
    """Gradients that are accumulated over several backward passes.

    Args:
        count: number of passes.
        averages: whether the accumulated gradients are divided by it.
    """

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

    def reduced(self, reduction: Reduction, grads: Sequence[Any], variables: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Add gradients; returns whether these were of the last pass, and then those of all ranks, else zeros."""
        is_last, totals = self.add(grads, variables)
        present = [total for total in totals if total is not None]
        there = [one for one, total in zip(variables, totals, strict=True) if total is not None]
        made = iter(
            _listed(tf.cond(is_last, lambda: reduction(present, there), lambda: [tf.zeros_like(it) for it in present]))
        )
        return is_last, [None if total is None else next(made) for total in totals]


def _listed(made: Any) -> list[Any]:
    return list(made) if isinstance(made, (list, tuple)) else [made]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that applies the gradients of all ranks.

    Args:
        optimizer: of `tf.compat.v1.train` or Keras. One of Keras becomes distributed itself.
        name: of the optimizer of `tf.compat.v1`.
        use_locking: see `tf.compat.v1.train.Optimizer`.
        device_dense, device_sparse: accepted; collectives run on the CPU.
        compression, sparse_as_dense, op, gradient_predivide_factor, groups, process_set, scale_local_gradients: see
            `Reduction`; local variables are those given to `register_local_var`. With Adasum, an optimizer of
            `tf.compat.v1` is applied first, and the changes of all ranks are combined.
        backward_passes_per_step: number of backward passes whose gradients are accumulated.
        average_aggregated_gradients: whether these are averaged, not summed.
        num_groups: deprecated, see `groups`.

    Raises:
        ValueError: it is another kind of optimizer; or `op`, `groups`, the predivide factor or the number of passes is
            malformed.
    """
    reduction = Reduction(
        "DistributedOptimizer", compression, sparse_as_dense, op, gradient_predivide_factor, groups or num_groups,
        process_set, scale_local_gradients,
    )  # fmt: skip
    passes = Passes(backward_passes_per_step, average_aggregated_gradients)
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _Optimizer(optimizer, name, use_locking, reduction, passes)
    from .keras.optimizer import distributed

    return distributed(optimizer, reduction, passes)


class _Optimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer of `tf.compat.v1` around another."""

    def __init__(
        self, optimizer: Any, name: str | None, use_locking: bool, reduction: Reduction, passes: Passes
    ) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._reduction = reduction
        self._passes = passes
        self._is_last: Any = None

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of a variable."""
        self._reduction.local.add(id(var))

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """The gradients of all ranks, with their variables."""
        grads: Any
        grads, variables = zip(*self._optimizer.compute_gradients(*args, **kwargs), strict=True)
        if self._passes.count > 1 and self._reduction.op == Adasum:
            self._is_last, grads = self._passes.add(grads, variables)
        elif self._passes.count > 1:
            self._is_last, grads = self._passes.reduced(self._reduction, grads, variables)
        elif self._reduction.op != Adasum:
            grads = self._reduction(grads, variables)
        return list(zip(grads, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients, those of several passes after the last."""
        pairs = list(grads_and_vars)

        def apply() -> Any:
            step = self._combined if self._reduction.op == Adasum else self._optimizer.apply_gradients
            with tf.control_dependencies([it for it in [step(pairs, *args, **kwargs)] if it is not None]):
                return tf.constant(True)

        if self._passes.count == 1:
            return apply() if tf.executing_eagerly() else apply().op
        made = tf.cond(self._is_last, apply, lambda: tf.constant(False))
        return None if tf.executing_eagerly() else made.op

    def _combined(self, pairs: list[tuple[Any, Any]], *args: Any, **kwargs: Any) -> Any:
        """Apply gradients, and combine the changes of all ranks with Adasum."""
        variables = [variable for grad, variable in pairs if grad is not None]
        before = [tf.identity(variable) for variable in variables]
        with tf.control_dependencies(before):
            step = self._optimizer.apply_gradients(pairs, *args, **kwargs)
        with tf.control_dependencies([] if step is None else [step]):
            changes = [variable - start for variable, start in zip(variables, before, strict=True)]
            changes = self._reduction(changes, variables)
            return tf.group(
                *[
                    variable.assign(start + change)
                    for variable, start, change in zip(variables, before, changes, strict=True)
                ]
            )

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """A slot of the optimizer inside."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """The names of its slots."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Its variables."""
        return self._optimizer.variables(*args, **kwargs)
