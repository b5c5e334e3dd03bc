"""Layers that several ranks compute together, each with a part of their weights, by torch's styles."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

_NAMES = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input", "sequence_parallel")
_OTHER_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}  # of transformers
_MOST = 5  # names in a message


def plan_of(module: torch.nn.Module, given: Mapping[str, Any] | None, ranks: int) -> dict[str, ParallelStyle]:
    """The style of each layer that ranks compute together, by its name.

    Args:
        module: the model.
        given: styles of torch, or their names, by names of layers, in which `*` stands for one part of a name. None is
            the model's own plan, `tp_plan` or `_tp_plan`, as models of transformers have.
        ranks: how many compute a layer.

    Raises:
        ValueError: there is no plan; or it names no layer, or a style that does not exist; or a layer cannot be
            divided so.
    """
    kind = type(module).__name__
    plan = given or getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
    if not plan:
        raise ValueError(
            f'{kind} has no plan of its own, so tensor={ranks} needs one, as in plan={{"blocks.*.up": "colwise", '
            '"blocks.*.down": "rowwise"}'
        )
    found: dict[str, ParallelStyle] = {}
    layers = dict(module.named_modules())
    for pattern, style in plan.items():
        form = re.compile(r"[^.]+".join(map(re.escape, pattern.split("*"))))
        names = [name for name in layers if form.fullmatch(name)]
        if not names:
            of = ", ".join([name for name in layers if name][:_MOST])
            raise ValueError(f"plan: {kind} has no layer {pattern!r}; its modules are {of} …")
        for name in names:
            found[name] = _style(style, name)
            _check_divisible(layers[name], name, found[name], ranks)
    return found


def _style(style: Any, name: str) -> ParallelStyle:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

    if isinstance(style, ParallelStyle):
        return style
    styles: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "sequence_parallel": SequenceParallel,
    }
    made = styles.get(_OTHER_NAMES.get(style, style)) if isinstance(style, str) else None
    if made is None:
        raise ValueError(
            f"plan: {name} has the style {style!r}, which is none of {', '.join(_NAMES)}; pass a style of "
            "torch.distributed.tensor.parallel"
        )
    return made()


def _check_divisible(layer: torch.nn.Module, name: str, style: ParallelStyle, ranks: int) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    weight = getattr(layer, "weight", None)
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return
    if not isinstance(layer, (torch.nn.Linear, torch.nn.Embedding)) or weight is None:
        raise ValueError(f"plan: {name} is a {type(layer).__name__}, and only Linear and Embedding can be divided")
    is_column = isinstance(style, ColwiseParallel) is isinstance(layer, torch.nn.Linear)
    size = weight.shape[0 if is_column else 1]
    if size % ranks:
        what = "rows" if is_column else "columns"
        raise ValueError(f"plan: the weight of {name} has {size} {what}, and tensor={ranks} does not divide them")


def divide(part: torch.nn.Module, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh | None) -> None:
    """Give each rank its part of the weights of layers, by their names within a part of a model."""
    from torch.distributed.tensor.parallel import parallelize_module

    if plan and mesh is not None:
        parallelize_module(part, mesh, dict(plan))


def forget_groups() -> None:
    """Let torch forget how it has exchanged DTensors: a later run of this process has other process groups."""
    from torch.distributed.tensor import debug

    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()  # the only way, and not there in older versions
