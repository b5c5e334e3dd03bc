"""The names under which gradients are exchanged."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def checked_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None, base: str
) -> dict[Tensor, str]:
    """The name of each parameter of an optimizer; made up from `base` if none are given."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        pairs = [(f"{base}.{index}", parameter) for index, parameter in enumerate(own)]
    else:
        pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    named = {parameter for _, parameter in pairs}
    missing = [parameter for parameter in own if parameter not in named]
    if missing:
        shapes = ", ".join(str(list(parameter.shape)) for parameter in missing)
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"Python object ids: {', '.join(str(id(parameter)) for parameter in missing)}; shapes: {shapes}"
        )
    return {parameter: name for name, parameter in pairs}
