"""Quantities of Kubernetes: 500m, 2Gi, 8."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .errors import Object

_SCALES = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1),
    **{letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", 1)},
    **{f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", 1)},
}  # fmt: skip
_FORM = re.compile(r"^([+-]?[0-9.]+)(?:[eE]([+-]?[0-9]+)|([numkKMGTPE]i?)?)$")


def parse(text: str | int | float) -> Fraction:
    """A quantity as a number.

    Raises:
        ValueError: it is none.
    """
    found = _FORM.match(str(text))
    if not found:
        raise ValueError(f"not a quantity: {text}")
    number, power, scale = found.groups()
    return Fraction(number) * (Fraction(10) ** int(power) if power else _SCALES[scale or ""])


def show(number: Fraction) -> str:
    """A number as a quantity, without a unit where it is whole."""
    return str(int(number)) if number.denominator == 1 else f"{int(number * 1000)}m"


def requests(pod_spec: Object) -> dict[str, Fraction]:
    """What a pod asks of its node."""
    total: dict[str, Fraction] = {}
    for container in pod_spec.get("containers") or []:
        for name, value in wanted(container).items():
            total[name] = total.get(name, Fraction(0)) + value
    for container in pod_spec.get("initContainers") or []:
        for name, value in wanted(container).items():
            total[name] = max(total.get(name, Fraction(0)), value)
    return total


def wanted(container: Object) -> dict[str, Fraction]:
    """What a container asks; a limit stands for a request that is not there."""
    resources = container.get("resources") or {}
    both = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: parse(value) for name, value in both.items()}
