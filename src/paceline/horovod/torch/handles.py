"""From a call with tensors to an operation of the engine, and back from a handle to its result."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from paceline.horovod.common import process
from paceline.horovod.common.process_sets import ProcessSet
from paceline.horovod.common.util import num_rank_is_power_2
from paceline.horovod.engine.entries import Entry
from paceline.horovod.engine.negotiation import ADASUM, AVERAGE, OP_NAMES, SUM, Request
from paceline.train.group.sharded import kind_of

from .compression import Compression, Compressor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paceline.horovod.engine.thread import Engine

Result = TypeVar("Result")
_SAME_SHAPE = ("allreduce", "broadcast")  # kinds whose results have the shapes of the tensors
_handles: dict[int, tuple[Engine, Entry]] = {}
_numbers = itertools.count()
_names: dict[torch.dtype, str] = {}


def chosen_op(op: int | None, average: bool | None) -> int:
    """The reduction that `op` and the older `average` mean."""
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if op not in range(len(OP_NAMES)):
            raise ValueError(f"op={op!r} is none of {', '.join(OP_NAMES)}")
        return op
    if average is not None:
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=4,
        )
        return AVERAGE if average else SUM
    return AVERAGE


@dataclass
class Call(Generic[Result]):
    """An operation as a script has called it; `Result` is the type of what it returns."""

    kind: str  # see `Request`
    tensors: Sequence[Tensor]  # what is submitted
    name: str | None  # of the operation; one is made up if it is None
    process_set: ProcessSet  # who takes part
    grouped: bool = False  # whether the result is a list
    op: int = SUM  # the reduction
    prescale: float = 1.0  # factor before the reduction
    postscale: float = 1.0  # factor after it
    compression: type[Compressor] = Compression.none  # how tensors are made smaller for sending
    root: int = 0  # global rank of the root
    extra: tuple[int, ...] = ()  # splits of alltoall
    splits: Tensor | None = None  # the tensor that they come from; None if none were given


def submit(
    call: Call[Any], tensors: Sequence[Tensor] | None = None, *, in_place: bool = False, is_awaited: bool = False
) -> int:
    """Submit an operation, with other tensors if they are given; returns its handle.

    `is_awaited` if `synchronize` follows at once.
    """
    if torch.is_inference_mode_enabled():  # its tensors could not be changed by other threads
        with torch.inference_mode(False):
            return submit(call, tensors, in_place=in_place, is_awaited=is_awaited)
    engine = process.engine()
    tensors = call.tensors if tensors is None else tensors
    number = member_of(engine, call.process_set)
    described = []
    for tensor in tensors:
        check_tensor(call.kind, tensor)
        if tensor.layout != torch.strided:
            raise ValueError(f"{call.kind} takes dense tensors, not {tensor.layout}; see sparse_allreduce_async")
        dtype = _names.get(tensor.dtype)
        if dtype is None:
            dtype = _names[tensor.dtype] = str(tensor.dtype).removeprefix("torch.")
        if tensor.dtype.is_complex and call.op not in (SUM, AVERAGE):
            raise ValueError(f"complex tensors are reduced with Sum or Average, not with {OP_NAMES[call.op]}")
        described.append((dtype, tuple(tensor.shape)))
    is_cuda = any(tensor.is_cuda for tensor in tensors)
    request = Request(
        call.kind,
        str(call.name) if call.name is not None else process.unnamed(call.kind, number),
        number,
        tuple(described),
        call.op,
        call.root,
        float(call.prescale),
        float(call.postscale),
        "cuda" if is_cuda else "cpu",
        call.extra,
    )
    targets: list[Tensor] | None = None
    outputs: list[Tensor] | None = None
    inputs = [_changeable(tensor) for tensor in tensors]
    if in_place:
        targets, outputs = inputs, list(tensors)
    elif call.kind in _SAME_SHAPE:
        targets = outputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]
    entry = Entry(request, inputs, targets, outputs, call.grouped, call.splits)
    if is_cuda:
        entry.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        entry.ready.record(torch.cuda.current_stream(inputs[0].device))
    handle = next(_numbers)
    engine.submit(entry, is_awaited=is_awaited)
    _handles[handle] = engine, entry
    return handle


def _changeable(tensor: Tensor) -> Tensor:
    """A tensor without autograd that shares the memory, and can be changed outside of inference mode."""
    if not tensor.is_inference():
        return tensor.detach()
    place = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)


def submit_in_place(call: Call[Any]) -> int:
    """Submit an operation whose results replace the tensors; returns its handle."""
    return submit(call, in_place=True)


def in_place(call: Call[Result]) -> Result:
    """Do an operation, and wait for its results, which replace the tensors."""
    return synchronize(submit(call, in_place=True, is_awaited=True))  # type: ignore[no-any-return]


def check_tensor(kind: str, tensor: object) -> None:
    """Refuse what is no tensor, or is spread over ranks."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{kind} takes a torch.Tensor, not {type(tensor).__name__}")
    if found := kind_of(tensor):
        raise TypeError(f"{kind} takes a tensor of this rank, and this one is {found}; pass a copy of its local tensor")


def listed(kind: str, tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors of a grouped operation."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(f"a grouped {kind} takes a list of tensors, not {type(tensors).__name__}")
    made = list(tensors)
    for tensor in made:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a grouped {kind} takes a list of tensors; one of its items is {type(tensor).__name__}")
    if not made:
        raise ValueError(f"a grouped {kind} of no tensors does nothing; leave it out")
    return made


def member_of(engine: Engine, process_set: ProcessSet) -> int:
    """The number of a process set that this rank belongs to."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"process_set={process_set!r} is no hvd.ProcessSet; see hvd.add_process_set()")
    number = process_set.process_set_id
    if number == 0:
        return 0
    ranks = engine.sets.get(number) if number is not None else None
    if number is None or ranks is None:
        raise ValueError(f"{process_set} is not registered; give it to hvd.init() or hvd.add_process_set() first")
    if engine.rank not in ranks:
        raise ValueError(f"rank {engine.rank} does not belong to {process_set}; only its ranks may use it")
    return number


def check_adasum(op: int, process_set: ProcessSet) -> None:
    """Refuse what Adasum cannot do."""
    if op != ADASUM:
        return
    if process_set.process_set_id != 0:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if not num_rank_is_power_2(process.size()):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")


def poll(handle: int | Callable[[], Tensor]) -> bool:
    """Whether an operation has ended: `synchronize` will not wait.

    Raises:
        ValueError: there is no such handle, or it was synchronized.
    """
    if callable(handle):
        waits: Sequence[int] = getattr(handle, "waits_for", ())
        return all(poll(one) for one in waits)
    if handle not in _handles:
        raise ValueError(f"handle {handle} was not created or has been cleared")
    return _handles[handle][1].is_done


def synchronize(handle: int | Callable[[], Tensor]) -> Any:
    """Wait for an operation, and return its result: a tensor, or a list of a grouped operation.

    Of alltoall, it is the tensor and the number of rows that came from each rank. A handle is good for one call.

    Raises:
        HorovodInternalError: it has failed: the ranks disagree, or a rank is gone.
    """
    if callable(handle):
        return handle()
    known = _handles.pop(handle, None)
    if known is None:
        return None
    engine, entry = known
    engine.wait(entry)
    outputs = entry.outputs
    if outputs is None:
        return entry.received
    if entry.request.kind == "alltoall":
        like = entry.splits if entry.splits is not None else torch.empty(0, dtype=torch.int32)
        return outputs[0], like.new_tensor(entry.received)
    return list(outputs) if entry.grouped else outputs[0]
