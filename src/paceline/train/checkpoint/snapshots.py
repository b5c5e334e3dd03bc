"""Copies of a state, which a background thread writes while the training continues and changes the original."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SMALL = 4096  # bytes of a tensor for which a copy of its own takes longer than copying
_PACKED = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64}


class _Pack:
    """Small tensors of one type and device, which are copied at once: one by one takes 50 times as long."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._parts: tuple[torch.Tensor, ...] = ()
        self._flat: torch.Tensor | None = None

    def add(self, tensor: torch.Tensor) -> int:
        """Add one; returns its number."""
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def copy(self) -> None:
        """Copy all."""
        with torch.no_grad():
            self._flat = torch._utils._flatten_dense_tensors(self._tensors).cpu()  # type: ignore[no-untyped-call]
        self._counts = [tensor.numel() for tensor in self._tensors]
        self._tensors = []

    def part(self, number: int) -> torch.Tensor:
        """The values of one, as they were, in one dimension."""
        if self._flat is not None:
            self._parts, self._flat = self._flat.split(self._counts), None  # type: ignore[no-untyped-call]
        return self._parts[number]


class _Part(NamedTuple):
    """The place of a small storage."""

    pack: _Pack
    number: int


@dataclass(frozen=True, slots=True)
class _Small:
    """How to make a tensor of a small storage again, which is left to the thread that writes."""

    part: _Part
    dtype: torch.dtype
    view: tuple[Any, ...]  # offset, size, strides
    is_parameter: bool
    requires_grad: bool


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state: the tensors in CPU memory, the small ones packed, everything else pickled."""

    pickled: bytes
    tensors: list[torch.Tensor | _Small]

    def rebuild(self) -> Any:
        """The state with tensors on the CPU, which share memory with each other as the originals did."""
        return _Unpickler(self).load()

    @property
    def size(self) -> int:
        """Bytes that a file with it has at least: those of its plain tensors, each storage once."""
        small = {t.part: t.part.pack.part(t.part.number).nbytes for t in self.tensors if isinstance(t, _Small)}
        plain = (t.untyped_storage() for t in self.tensors if isinstance(t, _PLAIN) and _is_plain(t))
        return sum({storage.data_ptr(): storage.nbytes() for storage in plain}.values()) + sum(small.values())


class Staging:
    """Copies states into CPU memory, which is used again for the next state; pinned for tensors from CUDA.

    So a snapshot is valid until the next call of `stage`.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def stage(self, states: Mapping[str, object]) -> dict[str, Snapshot]:
        """Copy each state. Tensors that share a storage, within a state or between states, also share it in the copy.

        Raises:
            CheckpointError: something in a state cannot be pickled, or there is not enough memory.
        """
        copier = _Copier(self._buffers)
        snapshots = {}
        for name, state in states.items():
            file, tensors = io.BytesIO(), list[torch.Tensor | _Small]()
            try:
                _Pickler(file, copier.copy, tensors).dump(state)
            except Exception as error:  # pickle and __reduce__ methods may raise anything
                raise CheckpointError(f"cannot copy {name!r}: {type(error).__name__}: {error}") from error
            snapshots[name] = Snapshot(file.getvalue(), tensors)
        copier.synchronize()
        self._buffers = copier.used
        return snapshots

    def close(self) -> None:
        """Release the memory."""
        self._buffers = []


class _Buffer(NamedTuple):
    memory: torch.Tensor  # of bytes
    pinned: bool


class _Copier:
    """Copies the tensors of states, each storage once, into free buffers of the same size, and small ones at once."""

    def __init__(self, buffers: list[_Buffer]) -> None:
        self.used: list[_Buffer] = []
        self._free: dict[tuple[int, bool], list[_Buffer]] = {}
        for buffer in reversed(buffers):
            self._free.setdefault((buffer.memory.nbytes, buffer.pinned), []).append(buffer)
        # With the original, so ids stay unique.
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor | _Part]] = {}
        self._packs: dict[tuple[torch.dtype, torch.device], _Pack] = {}
        self._devices: set[torch.device] = set()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor | _Small:
        """The same tensor in a buffer; ready after `synchronize`."""
        if type(tensor) not in _PLAIN or not _is_plain(tensor):
            return tensor.detach().cpu().clone()
        storage = tensor.untyped_storage()
        if storage._cdata not in self._copies:
            is_small = 0 < storage.nbytes() <= _SMALL and _is_whole(tensor, storage)
            self._copies[storage._cdata] = storage, self._pack(tensor) if is_small else self._copy_storage(storage)
        copied = self._copies[storage._cdata][1]
        view = tensor.storage_offset(), tensor.size(), tensor.stride()
        is_parameter = type(tensor) is torch.nn.Parameter
        if isinstance(copied, _Part):
            return _Small(copied, tensor.dtype, view, is_parameter, tensor.requires_grad)
        return _made(copied, tensor.dtype, view, is_parameter, tensor.requires_grad)

    def _pack(self, tensor: torch.Tensor) -> _Part:
        pack = self._packs.setdefault((tensor.dtype, tensor.device), _Pack())
        return _Part(pack, pack.add(tensor))

    def synchronize(self) -> None:
        """Copy the small tensors, and wait for the copies from CUDA devices."""
        for pack in self._packs.values():
            pack.copy()
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def _copy_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        size, pinned = storage.nbytes(), storage.device.type == "cuda"
        free = self._free.get((size, pinned))
        buffer = free.pop() if free else _Buffer(torch.empty(size, dtype=torch.uint8, pin_memory=pinned), pinned)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,), (1,))
        buffer.memory.copy_(source, non_blocking=pinned)
        if pinned:
            self._devices.add(storage.device)
        self.used.append(buffer)
        return buffer.memory


class _Pickler(pickle.Pickler):
    """Pickles without tensors, so that this is fast and the tensors can be copied separately."""

    def __init__(
        self,
        file: io.BytesIO,
        copy: Callable[[torch.Tensor], torch.Tensor | _Small],
        tensors: list[torch.Tensor | _Small],
    ) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._copy = copy
        self._tensors = tensors
        self._places: dict[int, tuple[torch.Tensor, int]] = {}  # with the tensor, so ids stay unique

    def persistent_id(self, obj: Any) -> int | None:
        """The index of a tensor among the copies; None for everything else."""
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = obj, len(self._tensors)
            self._tensors.append(self._copy(obj))
        return self._places[id(obj)][1]


class _Unpickler(pickle.Unpickler):
    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(io.BytesIO(snapshot.pickled))
        self._tensors = list(snapshot.tensors)
        self._storages: dict[_Part, torch.Tensor] = {}  # each of its own, so a file has them as they were

    def persistent_load(self, pid: int) -> torch.Tensor:
        tensor = self._tensors[pid]
        if isinstance(tensor, _Small):
            part = tensor.part
            if part not in self._storages:
                self._storages[part] = part.pack.part(part.number).clone()
            storage = self._storages[part]
            tensor = _made(storage, tensor.dtype, tensor.view, tensor.is_parameter, tensor.requires_grad)
            self._tensors[pid] = tensor
        return tensor


def _made(
    memory: torch.Tensor, dtype: torch.dtype, view: tuple[Any, ...], is_parameter: bool, requires_grad: bool
) -> torch.Tensor:
    """A tensor in the storage of another."""
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(memory.untyped_storage(), *view)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _is_whole(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether a tensor has all of its storage, in order, and is of a type that is packed."""
    return tensor.dtype in _PACKED and tensor.nbytes == storage.nbytes() and tensor.is_contiguous()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fully described by its size, strides and offset into its storage."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )
