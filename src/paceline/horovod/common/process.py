"""Starting and ending, and this rank's place among the ranks."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import threading
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from paceline.contract import Placement, recognise
from paceline.horovod.engine.entries import Entry
from paceline.horovod.engine.execution import Members
from paceline.horovod.engine.negotiation import UNNAMED, Request
from paceline.horovod.engine.sums import share_memory
from paceline.horovod.engine.thread import Engine
from paceline.horovod.engine.timeline import Timeline
from paceline.horovod.engine.variables import Settings
from paceline.train.control import connect
from paceline.train.control.errors import ReplicaMismatch
from paceline.train.control.exit_report import fail_at_exit, has_failed
from paceline.train.group.join import meet, network, with_neighbours

from .exceptions import NotInitialized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.contract.stands import Answer

__all__ = [
    "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled",
    "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "rank", "rocm_built", "shutdown", "size", "start_timeline", "stop_timeline",
]  # fmt: skip

_COLLECTIVE = timedelta(days=1)  # that a rank is gone is known from its connection
lock = threading.RLock()
_state: _State | None = None
_counts: dict[str, int] = {}
_joins = 0  # that have ended


@dataclass
class _State:
    """What `init` has made."""

    placement: Placement
    cross: tuple[int, int]  # cross rank and cross size
    is_homogeneous: bool
    engine: Engine
    pid: int


def begin(comm: Sequence[int] | Any | None = None) -> int | None:
    """Join the other ranks; returns how many ranks there are, or None if that was done before. See `basics.init`."""
    global _state  # noqa: PLW0603 - Horovod's API has one state per process
    if _state is not None and _state.pid == os.getpid():
        return None
    settings = Settings.read()
    ranks = _ranks_of(comm)
    placement, machines, store = meet(settings.start_timeout, ranks)
    if ranks is not None:
        placement = _part(ranks, placement, machines)
    _begin_counting(0)
    _state = _start(placement, store, settings)
    if settings.timeline:
        start_timeline(settings.timeline, settings.mark_cycles)
    return placement.world_size


def shutdown() -> None:
    """End on all ranks: what waits for other ranks fails with HorovodInternalError. `init` may follow.

    Raises:
        ReplicaMismatch: ranks have trained with different variables.
    """
    global _state
    with lock:
        state, _state = _state, None
    if state is not None and state.pid == os.getpid():
        try:
            state.engine.shutdown()
        finally:
            if state.engine.timeline is not None:
                state.engine.timeline.close()


def _at_exit() -> None:
    try:
        shutdown()
    except ReplicaMismatch as error:
        if not has_failed():
            fail_at_exit(error)


atexit.register(_at_exit)


def _start(placement: Placement, store: Store | None, settings: Settings) -> _State:
    rank, size = placement.rank, placement.world_size
    if store is None:
        engine = Engine(rank, Members((0,), 0, None), {}, settings, lambda _, ranks: Members(ranks, 0, None))
        return _State(placement, (0, 1), True, engine, os.getpid())
    nodes, networks = _nodes(placement, store)

    def share(offer: connect.Offer | None) -> connect.Offer:
        if offer is not None:
            store.set("offer", json.dumps([offer, asdict(settings)]))
        return tuple(json.loads(store.get("offer"))[0])

    links = connect.connect(rank, size, share, "horovod", local=len(set(networks)) == 1)
    common = json.loads(store.get("offer"))[1]
    for name in ("fusion_threshold", "cache_capacity", "replicas"):
        settings = replace(settings, **{name: common[name]})

    def members(number: int, ranks: tuple[int, ...]) -> Members:
        index, own = ranks.index(rank), PrefixStore(f"set-{number}", store)
        shared = None
        if len(ranks) > 1 and len({networks[other] for other in ranks}) == 1:
            shared = share_memory(PrefixStore("memory", own), index, len(ranks), wanted=settings.shared_memory)
        return Members(ranks, rank, _group(own, index, len(ranks)), shared)

    engine = Engine(rank, members(0, tuple(range(size))), links, settings, members)
    return _State(placement, cross_of(placement, nodes), len(set(nodes.values())) == 1, engine, os.getpid())


def _nodes(placement: Placement, store: Store) -> tuple[dict[int, int], list[str]]:
    """The number of ranks of each node, and the network namespace of each rank. A collective of all ranks."""
    store.set(f"node-{placement.rank}", json.dumps([placement.node_rank, placement.local_world_size, network()]))
    found = [json.loads(store.get(f"node-{rank}")) for rank in range(placement.world_size)]
    nodes: dict[int, int] = {}
    for node, count, _ in found:
        nodes[node] = max(count, nodes.get(node, 0))
    return nodes, [where for *_, where in found]


def cross_of(placement: Placement, nodes: dict[int, int]) -> tuple[int, int]:
    """This node's position among those that have a rank of this local rank, and their number."""
    alike = [node for node in sorted(nodes) if nodes[node] > placement.local_rank]
    return alike.index(placement.node_rank), len(alike)


def _group(store: Store, rank: int, size: int) -> Any:
    if size == 1:
        return None
    group: Any = ProcessGroupGloo(store, rank, size, _COLLECTIVE)
    group.barrier().wait()  # a rank that ends now would break the connections that others still make
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # never freed: see `paceline.train.group.join.leave`
    return group


def _ranks_of(comm: Sequence[int] | Any | None) -> list[int] | None:
    """The ranks that `init` is to join; None for all."""
    if comm is None:
        return None
    mine = recognise(os.environ, sys.argv).placement
    first = comm if hasattr(comm, "allgather") else next(iter(comm), None)
    if first is None:
        return None
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and hasattr(first, "allgather") and mpi.COMM_WORLD.size < mine.world_size:
        raise ValueError(
            f"MPI connects {mpi.COMM_WORLD.size} of the {mine.world_size} ranks; start them with --framework mpi"
        )
    ranks = list(first.allgather(mine.rank)) if hasattr(first, "allgather") else [int(rank) for rank in comm]
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(mine.world_size)):
        raise ValueError(f"comm={ranks} does not name different ranks of 0 … {mine.world_size - 1}")
    if mine.rank not in ranks:
        raise ValueError(f"rank {mine.rank} is not in comm={ranks}; it must not call hvd.init() with it")
    return ranks


def _part(ranks: list[int], placement: Placement, machines: dict[int, str]) -> Placement:
    """This rank's place among some of the ranks."""
    there = {index: machines[rank] for index, rank in enumerate(ranks)}
    alone = replace(placement, rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, node_count=1)
    part = replace(alone, rank=ranks.index(placement.rank), world_size=len(ranks))
    return with_neighbours(part, there, {})


# -- queries -----------------------------------------------------------------------------------------------------------


def state() -> _State:
    """What `init` has made."""
    if _state is None or _state.pid != os.getpid():
        raise NotInitialized()
    return _state


def engine() -> Engine:
    """The engine of this process."""
    return state().engine


def tell(answer: Answer) -> None:
    """Add to what a rank answers its operations: those of a process set are a group, and count as it submits them."""
    if _state is None or _state.pid != os.getpid():
        return
    for number, ranks in list(_state.engine.sets.items()):
        if _state.placement.rank not in ranks:
            continue
        group = f"horovod.{number}"
        count, waiting = _state.engine.submitted(number)
        answer["numbers"][group], answer["sizes"][group] = count, len(ranks)
        # Ranks may submit in other orders: by their names, the last one is the same on all that wait for the same.
        for it in sorted(waiting, key=lambda it: it.title)[-1:] if "collectives" in answer else ():
            answer["collectives"].append({
                "group": group, "number": count, "kind": it.title, "shapes": [list(shape) for _, shape in it.tensors],
                "dtypes": [dtype for dtype, _ in it.tensors], "over": False,
            })  # fmt: skip


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return _state is not None and _state.pid == os.getpid()


def rank() -> int:
    """Position of this process among all ranks."""
    return state().placement.rank


def size() -> int:
    """Number of ranks."""
    return state().placement.world_size


def local_rank() -> int:
    """Position among the ranks of this machine."""
    return state().placement.local_rank


def local_size() -> int:
    """Number of ranks of this machine."""
    return state().placement.local_world_size


def cross_rank() -> int:
    """Position of this machine among those that have a rank of this local rank."""
    return state().cross[0]


def cross_size() -> int:
    """Number of machines that have a rank of this local rank."""
    return state().cross[1]


def is_homogeneous() -> bool:
    """Whether all machines have as many ranks."""
    return state().is_homogeneous


def mpi_threads_supported() -> bool:
    """Whether MPI may be used beside: there is no MPI here."""
    state()
    return False


def mpi_enabled() -> bool:
    """Whether collectives use MPI: they do not."""
    state()
    return False


def mpi_built() -> bool:
    """Whether MPI is there: it is not."""
    return False


def gloo_enabled() -> bool:
    """Whether collectives use gloo: they do."""
    state()
    return True


def gloo_built() -> bool:
    """Whether gloo is there: it is."""
    return True


def nccl_built() -> int:
    """Version of NCCL that collectives use; 0, as they go through gloo."""
    return 0


def ddl_built() -> bool:
    """Whether IBM's DDL is there: it is not."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL is there: it is not."""
    return False


def cuda_built() -> bool:
    """Whether torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built for ROCm."""
    return torch.version.hip is not None


# -- timeline ----------------------------------------------------------------------------------------------------------


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write a timeline on rank 0; one that is open is completed first.

    Raises:
        OSError: the file cannot be written.
    """
    stop_timeline()
    if rank() == 0:
        engine().timeline = Timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the timeline."""
    timeline, engine().timeline = engine().timeline, None
    if timeline is not None:
        timeline.close()


# -- what ranks do together --------------------------------------------------------------------------------------------


def together(kind: str, name: str | None = None, process_set: int = 0, extra: tuple[int, ...] = ()) -> Any:
    """Do what has no tensors: a join, a barrier, a change of process sets. Returns the value of the response."""
    return submitted(Entry(Request(kind, name or unnamed(kind, process_set), process_set, extra=extra), [])).received


def submitted(entry: Entry) -> Entry:
    """Submit an operation, and wait for its end."""
    engine().submit(entry, is_awaited=True)
    engine().wait(entry)
    return entry


def unnamed(kind: str, process_set: int) -> str:
    """A name for an operation that has none: the same on all ranks that do the same operations in the same order."""
    with lock:
        where = f"{kind}{process_set}"
        _counts[where] = _counts.get(where, -1) + 1
        return f"{kind}{UNNAMED}{f'{_joins}.' if _joins else ''}{_counts[where]}"


def join_ended() -> None:
    """Number operations without a name anew, and compare nothing: the ranks have done different numbers of them."""
    engine().replicas.joined()
    _begin_counting(_joins + 1)


def _begin_counting(joins: int) -> None:
    global _joins  # noqa: PLW0603 - see `_state`
    with lock:
        _counts.clear()
        _joins = joins
