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


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state: the tensors in CPU memory, everything else pickled."""

    pickled: bytes
    tensors: list[torch.Tensor]

    def rebuild(self) -> Any:
        """The state with tensors on the CPU, which share memory with each other as the originals did."""
        return _Unpickler(self).load()

    @property
    def size(self) -> int:
        """Bytes that a file with it has at least: those of its plain tensors, each storage once."""
        plain = (t.untyped_storage() for t in self.tensors if type(t) in _PLAIN and _is_plain(t))
        return sum({storage.data_ptr(): storage.nbytes() for storage in plain}.values())


class Staging:
    """Copies states into CPU memory, which is used again for the next state; pinned for tensors from CUDA.

    So a snapshot is valid until the next call of `stage`.
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    def stage(self, states: Mapping[str, object]) -> dict[str, Snapshot]:
        """Copy each state. Tensors that share a storage, also between states, share it in the copy."""
        copier = _Copier(self._buffers)
        snapshots = {}
        for name, state in states.items():
            file, tensors = io.BytesIO(), list[torch.Tensor]()
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
    """Copies the tensors of states, each storage once, into free buffers of the same size."""

    def __init__(self, buffers: list[_Buffer]) -> None:
        self.used: list[_Buffer] = []
        self._free: dict[tuple[int, bool], list[_Buffer]] = {}
        for buffer in reversed(buffers):
            self._free.setdefault((buffer.memory.nbytes, buffer.pinned), []).append(buffer)
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}  # with the original, so ids stay unique
        self._devices: set[torch.device] = set()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor in a buffer; ready after `synchronize`."""
        if tensor.device.type == "meta":  # it has no numbers, see `pieces`
            return tensor
        if type(tensor) not in _PLAIN or not _is_plain(tensor):
            return tensor.detach().cpu().clone()
        storage = tensor.untyped_storage()
        if storage._cdata not in self._copies:
            self._copies[storage._cdata] = storage, self._copy_storage(storage)
        buffer = self._copies[storage._cdata][1]
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(buffer.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(copy, tensor.requires_grad)
        return copy.requires_grad_(tensor.requires_grad)

    def synchronize(self) -> None:
        """Wait for the copies from CUDA devices."""
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
        self, file: io.BytesIO, copy: Callable[[torch.Tensor], torch.Tensor], tensors: list[torch.Tensor]
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
        self._tensors = snapshot.tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fully described by its size, strides and offset into its storage."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )
