"""`horovod.run`: a function on several ranks of this machine."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from paceline.contract import CONTRACTS, recognise
from paceline.contract.functions import Pickled

T = TypeVar("T")

# What horovod.run takes for several machines or other launchers, and what only tunes it.
_ELSEWHERE = (
    "hosts", "hostfile", "host_discovery_script", "min_np", "max_np", "min_num_proc", "max_num_proc", "use_mpi",
)  # fmt: skip
_TUNING = (
    "slots", "reset_limit", "cooldown_range", "start_timeout", "ssh_port", "ssh_identity_file", "disable_cache",
    "output_filename", "verbose", "use_gloo", "mpi_args", "network_interface", "network_interfaces", "executable",
    "prefix_output_with_timestamp",
)  # fmt: skip
_HERE = ("localhost", "127.0.0.1")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    num_proc: int | None = None,
    **others: Any,
) -> list[T]:
    """Call `func(*args, **kwargs)` on ranks of this machine.

    Args:
        func: any function where cloudpickle is installed, else one that is defined at the top level of a module.
        args: its arguments.
        kwargs: its named arguments.
        np: number of ranks; 1 by default.
        num_proc: the same.
        others: the other arguments of `horovod.run`; those that only tune it have no effect.

    Returns:
        What each rank returned, in rank order.

    Raises:
        Exception: the one that the first failing rank raised.
        TypeError: there is no such argument.
        PicklingError: the function or an argument cannot be pickled.
        ValueError: other machines are given: several machines are a job of `paceline run -H`.
    """
    from paceline.train.launch import launch

    if np is not None and num_proc is not None and np != num_proc:
        raise ValueError(f"horovod.run: np={np} and num_proc={num_proc} say the same; give one of them")
    for name, given in others.items():
        if name not in (*_ELSEWHERE, *_TUNING):
            raise TypeError(f"horovod.run has no argument {name!r}")
        if name in _ELSEWHERE and given and not (name == "hosts" and _is_here(str(given))):
            raise ValueError(
                f"horovod.run({name}={given!r}) works on this machine only; make the function a script, and run it "
                "with paceline run -H HOST:RANKS,…"
            )
    work = Pickled(functools.partial(func, *args, **(kwargs or {})), "horovod.run")
    return launch(_call, (work,), np or num_proc or 1, "spawn")


def _call(work: Callable[[], T]) -> T:
    placement = recognise(os.environ, sys.argv).placement
    os.environ.update(CONTRACTS["horovod"].write(placement))  # the process that launched the ranks may be one, too
    return work()


def _is_here(hosts: str) -> bool:
    return all(host.partition(":")[0].strip() in _HERE for host in hosts.split(","))
