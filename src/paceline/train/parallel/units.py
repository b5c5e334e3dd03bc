"""The units of a model: what is gathered, or computed again in the backward pass, at a time."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MOST = 5  # names in a message


def find_units(module: torch.nn.Module, given: Sequence[str] | None) -> dict[str, torch.nn.Module]:
    """The units of a model by their names: those that are given, or its repeated blocks.

    Repeated blocks are the children of a ModuleList or a Sequential that have parameters, if there are two or more, and
    all of one class. What is outside of them, such as embeddings and a head, is gathered during the whole pass.

    Raises:
        ValueError: a name is that of no module, or the model has no repeated blocks; or units overlap, or share
            parameters with each other or with the rest of the model.
    """
    units = _repeated(module) if given is None else _named(module, given)
    if not units:
        largest = sorted(module.named_children(), key=lambda each: _size(each[1]), reverse=True)
        names = [name for name, child in largest if _size(child)]
        proposal = f"units={tuple(names[:_MOST])!r}" if len(names) > 1 else "shard=False"
        raise ValueError(
            f"{type(module).__name__} has no repeated blocks, so it is not known what its units are: name "
            f"modules that are used one after the other, as in Strategy({proposal})"
        )
    _check_apart(module, units)
    return units


def compute_again(unit: torch.nn.Module) -> None:
    """Let a unit keep its inputs only, and compute the rest again in the backward pass."""
    unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)


def scales(unit: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The parameters of modules that have no matrix, such as norms: autocast leaves them as they are."""
    for part in unit.modules():
        own = list(part.parameters(recurse=False))
        if all(parameter.dim() < 2 for parameter in own):
            yield from own


def describe(module: torch.nn.Module, units: Mapping[str, torch.nn.Module]) -> str:
    """The units in a few words."""
    kinds: dict[str, int] = {}
    for unit in units.values():
        kinds[type(unit).__name__] = kinds.get(type(unit).__name__, 0) + 1
    rest = _size(module) - sum(map(_size, units.values()))
    largest = max(map(_size, units.values()))
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{len(units)} units ({named}) of at most {largest:,} parameters, and {rest:,} beside them"


def _repeated(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    found: dict[str, torch.nn.Module] = {}
    for name, part in module.named_modules():
        if not isinstance(part, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        if any(f"{name}.".startswith(f"{unit}.") for unit in found):
            continue
        children = {f"{name}.{key}" if name else key: child for key, child in part.named_children() if _size(child)}
        if len(children) > 1 and len({type(child) for child in children.values()}) == 1:
            found.update(children)
    return found


def _named(module: torch.nn.Module, names: Sequence[str]) -> dict[str, torch.nn.Module]:
    here = dict(module.named_modules())
    if not names:
        raise ValueError("units=() names no module; leave it out, and the repeated blocks of the model are found")
    missing = [name for name in names if name not in here or not name]
    if missing:
        raise ValueError(
            f"units={tuple(names)!r}: {type(module).__name__} has no module {missing[0]!r}; its modules are "
            f"{', '.join([name for name in here if name][:_MOST])} …"
        )
    for name in names:
        inside = next((other for other in names if other.startswith(f"{name}.")), None)
        if inside is not None:
            raise ValueError(f"units={tuple(names)!r}: {inside} is within {name}; name one of them")
        if not _size(here[name]):
            raise ValueError(f"units={tuple(names)!r}: {name} has no parameters")
    found: dict[str, torch.nn.Module] = {}
    for name in names:
        if isinstance(here[name], (torch.nn.ModuleList, torch.nn.ModuleDict)):  # it has no forward pass
            found.update({f"{name}.{key}": child for key, child in here[name].named_children() if _size(child)})
        else:
            found[name] = here[name]
    return found


def _check_apart(module: torch.nn.Module, units: dict[str, torch.nn.Module]) -> None:
    """Check that no parameter belongs to two units, or to a unit and the rest."""
    owners: dict[int, tuple[str, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = next((each for each in units if name.startswith(f"{each}.")), "")
        other, other_unit = owners.setdefault(id(parameter), (name, unit))
        if other_unit != unit:
            raise ValueError(
                f"{other} and {name} are one parameter, and belong to different units; leave "
                f"{unit or other_unit} out of the units, or a part of the model that has both becomes one: units=(…)"
            )


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
