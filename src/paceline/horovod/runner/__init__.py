"""`horovod.run`: a function on several ranks of this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# What horovod.run takes beside, and what it would need several hosts or other launchers for.
_ELSEWHERE = ("hosts", "hostfile", "host_discovery_script", "use_mpi")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = 1,
    **others: Any,
) -> list[T]:
    """Call `func(*args, **kwargs)` on ranks of this machine.

    Args:
        func: picklable: defined at the top level of a module.
        args: its arguments.
        kwargs: its named arguments.
        np: number of ranks.
        others: the other arguments of `horovod.run`; those that only tune it are accepted.

    Returns:
        What each rank returned, in rank order.

    Raises:
        Exception: the one that the first failing rank raised.
        ValueError: hosts are given: several machines are a job of `paceline run --hosts`.
    """
    from paceline.train.launch import launch

    for name in _ELSEWHERE:
        given = others.get(name)
        if given and not (name == "hosts" and str(given).partition(":")[0] == "localhost"):
            raise ValueError(
                f"horovod.run({name}=…) works on this machine only; run the script with paceline run --hosts"
            )
    return launch(functools.partial(func, **(kwargs or {})), args, np or 1)
