"""Joining the process group: this rank's place and device, and the check that all ranks were started alike."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from paceline._version import __version__
from paceline.contract import ContractError, Placement, recognise
from paceline.contract.machine import machine_id
from paceline.contract.values import join_address

from . import file_meeting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


# -- ranks of one machine ----------------------------------------------------------------------------------------------
# Which ranks share a machine, where the launcher has not said so.


def network() -> str:
    """Identifies this machine, as ranks of one agent see it."""
    return json.dumps([machine_id(), os.environ.get("PACELINE_NODE_RANK")])


def with_neighbours(placement: Placement, machines: Mapping[int, str], env: Mapping[str, str]) -> Placement:
    """A placement with local rank and local world size, from the machines of all ranks."""
    here = [rank for rank in sorted(machines) if machines[rank] == machines[placement.rank]]
    in_order = list(dict.fromkeys(machines[rank] for rank in sorted(machines)))
    known = replace(
        placement,
        local_rank=here.index(placement.rank),
        local_world_size=len(here),
        node_rank=in_order.index(machines[placement.rank]),
        node_count=len(in_order),
    )
    try:
        return replace(known, local_rank=int(env["LOCAL_RANK"]))
    except (KeyError, ValueError, ContractError):
        return known


# -- joining -----------------------------------------------------------------------------------------------------------


log = logging.getLogger("paceline")
T = TypeVar("T")
_SIOCGIFADDR = 0x8915
_WITH_NCCL = "cpu:gloo,cuda:nccl"
_GLOO = "pt_gloo_runloop"  # as torch names the threads of gloo that end collectives
_LOOKS, _PAUSE = 3, 0.001  # that find them idle, and the seconds between these
_WARN_SECONDS = 10.0  # of waiting for a rank, after which a warning says so
_stores: dict[str, Store] = {}  # one connection per address, kept until the process ends
_partial: dict[str, int] = {}  # the same for meetings of some ranks, by their numbers
_joined = 0  # how often this process has joined; each time it uses other keys in the store


class Disagreement(RuntimeError):
    """This rank and rank 0 were started differently: with another world size or another version."""

    __module__ = "paceline"  # where users find it


@dataclass(frozen=True)
class Membership:
    """This process among the ranks.

    Attributes:
        placement: its rank, the number of ranks, and where they meet.
        device: its device.
        owns_group: whether `join` has created the process group, so that `leave` must destroy it.
    """

    placement: Placement
    device: torch.device
    owns_group: bool


def join(
    *,
    init_method: str = "env://",
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    timeout: float = 1800.0,
) -> Membership:
    """Join the process group. A single process creates none.

    The arguments are those of `paceline.init`.
    """
    global _joined  # noqa: PLW0603 - counts the groups of this process, so that their keys differ
    placement, is_complete = _placement(init_method, rank, world_size)
    limit = timedelta(seconds=timeout)
    store: Store | None = None
    if dist.is_initialized():
        placement = replace(placement, rank=dist.get_rank(), world_size=dist.get_world_size())
        if not is_complete:  # under keys of its own: torch's are not for others
            store = PrefixStore("paceline/machines", dist.distributed_c10d._get_default_store())
            store.set(f"rank-{placement.rank}", json.dumps({"machine": machine_id()}))
    elif placement.world_size > 1:
        _choose_interface(placement)
        store = PrefixStore(f"paceline/{placement.attempt}/{_joined}", _store(init_method, placement, limit))
        _joined += 1
        try:
            _agree(store, placement, limit)
        except BaseException:
            file_meeting.leave()
            raise
    if store is not None and not is_complete:
        placement = with_neighbours(placement, _machines(store, placement, limit), os.environ)
    mine = torch.device(device) if device is not None else _own_device(placement)
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
    if dist.is_initialized() or store is None:
        return Membership(placement, mine, False)
    dist.init_process_group(
        backend_of(backend, mine) if backend else _backend(mine, placement, store, limit),
        store=store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=limit,
    )
    return Membership(placement, mine, True)


def meet(timeout: float, among: Sequence[int] | None = None) -> tuple[Placement, dict[int, str], Store | None]:
    """Find the other ranks without creating a process group. A collective of all ranks, or of some."""
    global _joined  # noqa: PLW0603 - counts the meetings of this process, so that their keys differ
    placement, is_complete = _placement("env://", None, None)
    is_there = dist.is_initialized()
    if is_there:
        placement = replace(placement, rank=dist.get_rank(), world_size=dist.get_world_size())
    if placement.world_size == 1 or among == [placement.rank]:
        return placement, {placement.rank: machine_id()}, None
    limit = timedelta(seconds=timeout)
    _choose_interface(placement)
    base = dist.distributed_c10d._get_default_store() if is_there else _store("env://", placement, limit)
    if among is not None:
        name = "-".join(map(str, among))
        _partial[name] = _partial.get(name, -1) + 1
        store = PrefixStore(f"paceline/{placement.attempt}/{name}/{_partial[name]}", base)
        store.set(f"rank-{placement.rank}", json.dumps({"machine": machine_id()}))
        return placement, _machines(store, placement, limit, among), store
    store = PrefixStore(f"paceline/{placement.attempt}/{_joined}", base)
    _joined += 1
    _agree(store, placement, limit)
    machines = _machines(store, placement, limit)
    if not is_complete:
        placement = with_neighbours(placement, machines, os.environ)
    return placement, machines, store


def leave() -> None:
    """Leave the process group.

    Its object is never freed: that would hold the GIL while waiting for a thread of gloo, which may need the GIL to
    free the last tensor (torch 2.13: `~ProcessGroupGloo` joins its threads).
    """
    settle()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    dist.destroy_process_group()
    file_meeting.leave()


def settle(seconds: float = 5.0) -> None:
    """Wait until gloo's threads are idle, at most so long: Python is about to finalize.

    One that still frees the last tensor asks for the GIL, and meanwhile ends the process (torch 2.13: `terminate called
    without an active exception`). The kernel alone knows that they are idle: they sleep, also after they could have had
    the GIL.
    """
    until, idle = time.monotonic() + seconds, 0
    while idle < _LOOKS and time.monotonic() < until:
        idle = 0 if any(state == "R" for state in _states_of_gloo()) else idle + 1
        time.sleep(_PAUSE)  # without the GIL


def _states_of_gloo() -> Iterator[str]:
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _GLOO:
                yield rest.split()[0]


def share_object(value: T | None) -> T:
    """Return what rank 0 passes. A collective of all ranks."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return cast("T", box[0])


def on_one_machine() -> bool:
    """Whether all ranks are on one machine, in one network namespace. A collective of all ranks."""
    all_of_them: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, network())
    return len(set(all_of_them)) == 1


def _placement(init_method: str, rank: int | None, world_size: int | None) -> tuple[Placement, bool]:
    """This process among the ranks, and whether it is known which ranks share its machine."""
    if init_method == "env://":
        found = recognise(os.environ, sys.argv)
        return found.placement, found.launcher not in ("environment", "none")
    scheme = urlsplit(init_method).scheme
    if scheme not in ("tcp", "file"):
        raise ValueError(f"init_method {init_method!r} is none of env://, tcp://host:port, file:///path")
    if rank is None or world_size is None:
        raise ValueError(f"init_method {init_method!r} needs rank= and world_size=")
    url = urlsplit(init_method)
    where = {"main_address": url.hostname, "main_port": url.port} if scheme == "tcp" else {}
    if scheme == "tcp" and None in where.values():
        raise ValueError(f"init_method {init_method!r} is not tcp://host:port")
    return Placement(rank=rank, world_size=world_size, **where), False  # type: ignore[arg-type]  # None is refused above


def backend_of(given: str, device: torch.device) -> str:
    """The backend of a script that names one: nccl has no tensors of the CPU, and ranks exchange some of these too."""
    return _WITH_NCCL if given == "nccl" and device.type == "cuda" else given


def _backend(device: torch.device, placement: Placement, store: Store, timeout: timedelta) -> str:
    """The backend that exchanges tensors: nccl for those on GPUs, unless ranks share a GPU, which nccl refuses."""
    if torch.version.cuda is None and torch.version.hip is None:  # then no rank has one: all have the same torch
        return "gloo"
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    is_shared = gpu_is_shared(store, placement.world_size, gpu, timeout)
    if is_shared and placement.rank == 0:
        log.warning("ranks share a GPU: gloo exchanges gradients, which is slower; nccl needs one GPU per rank")
    return "gloo" if is_shared or not gpu else _WITH_NCCL


def gpu_is_shared(store: Store, world_size: int, gpu: str, timeout: timedelta) -> bool:
    """Whether any two ranks have one GPU; this one has `gpu`, a UUID, or "" for none. A collective of all ranks.

    The number of GPUs that a rank sees does not tell: each may see its own alone.
    """
    store.add("gpus-shared", int(gpu != "" and store.add(f"gpu-{gpu}", 1) > 1))
    if store.add("gpus-named", 1) == world_size:
        store.set("gpus-known", str(store.add("gpus-shared", 0)))
    store.wait(["gpus-known"], timeout)
    return bool(store.get("gpus-known") != b"0")


def _own_device(placement: Placement) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", placement.local_rank % torch.cuda.device_count())


def _store(init_method: str, placement: Placement, timeout: timedelta) -> Store:
    """The store through which the ranks find each other; rank 0 serves it, or torchrun's agent."""
    if init_method.startswith("file:"):
        return file_meeting.join(urlsplit(init_method).path, placement.world_size)
    key = f"{placement.main_address}:{placement.main_port}"
    if key not in _stores:
        agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        serves = placement.rank == 0 and not agent_serves
        server = _loopback_server(placement.main_address, placement.main_port) if serves else None
        _stores[key] = TCPStore(
            placement.main_address,
            placement.main_port,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=server,
            use_libuv=server is None or torch.__version__ >= "2.7",  # before, libuv's server takes no socket
        )
    return _stores[key]


def _loopback_server(address: str, port: int) -> int | None:
    """A socket for the store that listens on the loopback only, if all ranks meet there. The store closes it.

    By default, the store listens on all addresses of the machine, whichever address it is given.
    """
    if not (address.startswith("127.") or address in ("localhost", "::1")):
        return None
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as server:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # the agent reserves the port
            server.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            server.bind((address, port))
            server.listen(2048)
        except OSError:
            return None  # the store reports the error
        return server.detach()


def _agree(store: Store, placement: Placement, timeout: timedelta) -> None:
    """Compare how the ranks were started, before any collective: it would hang if they differed.

    Rank 0 compares itself with all others, every other rank with rank 0, so both sides report a difference.
    """
    mine = {"world size": placement.world_size, "paceline": __version__, "torch": torch.__version__}
    store.set(f"rank-{placement.rank}", json.dumps({**mine, "machine": machine_id()}))
    others = range(1, placement.world_size) if placement.rank == 0 else (0,)
    deadline = time.monotonic() + timeout.total_seconds()
    for other in others:
        _await(store, other, placement, deadline)
        theirs = json.loads(store.get(f"rank-{other}"))
        if placement.rank != 0:
            store.set(f"compared-{placement.rank}", "")
        for what, value in mine.items():
            if theirs[what] != value:
                if placement.rank == 0:  # which serves the store: the other one is to find the difference, too
                    with contextlib.suppress(RuntimeError, OSError):
                        store.wait([f"compared-{other}"], timedelta(seconds=_WARN_SECONDS))
                raise Disagreement(
                    f"rank {placement.rank} has {what} {value}, rank {other} has {theirs[what]}; start all ranks alike"
                )


def _machines(
    store: Store, placement: Placement, timeout: timedelta, among: Sequence[int] | None = None
) -> dict[int, str]:
    """The machine of every rank, by rank; waits for all ranks, or for those named."""
    deadline = time.monotonic() + timeout.total_seconds()
    found = {}
    for rank in among if among is not None else range(placement.world_size):
        _await(store, rank, placement, deadline)
        found[rank] = json.loads(store.get(f"rank-{rank}"))["machine"]
    return found


def _await(store: Store, other: int, placement: Placement, deadline: float) -> None:
    """Wait until a rank has joined, and warn if it takes long."""
    has_warned = False
    while True:
        try:
            store.wait([f"rank-{other}"], timedelta(seconds=_WARN_SECONDS))
            return
        except (RuntimeError, OSError):
            if time.monotonic() > deadline:
                raise
            if not has_warned:
                where = join_address(placement.main_address, placement.main_port)
                log.warning("rank %d is waiting for rank %d to join at %s", placement.rank, other, where)
                has_warned = True


def _choose_interface(placement: Placement) -> None:
    """Set gloo's network interface to the one with the route to rank 0; its default is that of the host name."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        found = socket.getaddrinfo(placement.main_address, placement.main_port, type=socket.SOCK_DGRAM)
    except OSError:
        return
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: the kernel picks the route
            name = _interface_of(probe, probe.getsockname()[0])
            if name is not None:
                os.environ["GLOO_SOCKET_IFNAME"] = name
                return


def _interface_of(sock: socket.socket, mine: str) -> str | None:
    """The interface that has an address of this machine; None if none is found."""
    if mine.startswith("127.") or mine == "::1":
        return "lo"
    if sock.family == socket.AF_INET6:
        packed = socket.inet_pton(socket.AF_INET6, mine.partition("%")[0]).hex()
        with open("/proc/net/if_inet6") as file:  # address, index, length of the prefix, scope, flags, interface
            return next((fields[5] for fields in map(str.split, file) if fields[0] == packed), None)
    for _, name in socket.if_nameindex():
        request = struct.pack("256s", name.encode()[:15])
        try:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)
        except OSError:
            continue  # an interface without an IPv4 address
        if socket.inet_ntoa(answer[20:24]) == mine:
            return name
    return None
