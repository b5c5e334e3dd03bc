"""Sums among the ranks of one machine through memory that they share: no sockets, no copies in the kernel.

Tensors go through the memory in pieces. Each piece has one share per rank. In each step a rank passes on a piece, that
is the shares that others sum; sums its share of the piece before; and copies the other shares of the one before that
out of the memory. Between two steps all ranks wait for each other once. Sums are taken in the order of ranks, so all
ranks get the same bits, and every run does.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import torch

from .neighbours import GATHERS, Neighbours, NeighboursError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Share = list[torch.Tensor]  # consecutive parts of tensors

__all__ = ["GATHERS", "SharedMemory", "SharedMemoryError"]

SharedMemoryError = NeighboursError
_REGIONS = 3  # one is filled, one summed, and one read
_TOTAL = 24 << 20  # bytes of all regions of all ranks: every model has some
_MOST = 4 << 20  # bytes of a rank in a region: more does not stay in the caches, less means to wait more often
_ALIGNED = 4096
_STEP = 16  # a share is a multiple of this many numbers, so that ranks write to different cache lines
_SCATTERED, _GATHERED = 1 << 62, 1 << 63  # with the number of bytes: what ranks do together, if it is no sum


class SharedMemory:
    """The memory that ranks of one machine share. All of them call the same methods in the same order.

    Attributes:
        sent: bytes sent by the network: none.
    """

    sent = 0

    def __init__(
        self, position: int, count: int, gather: Callable[[str], Sequence[str]], timeout: float | None = None
    ) -> None:
        self.position, self.count = position, count
        self._others = [(position + each) % count for each in range(1, count)]
        slot = max(min(_MOST, _TOTAL // (_REGIONS * count)), count * _STEP * torch.complex128.itemsize)
        self._slot_bytes = -(-slot // _ALIGNED) * _ALIGNED
        self._region_bytes = self._slot_bytes * count
        self._region = 0  # of the next piece
        self._memory = torch.empty(0, dtype=torch.uint8)
        length = _REGIONS * self._region_bytes
        self._neighbours = Neighbours(
            position, count, length, gather, lambda file: self._map(file, length), timeout=timeout
        )

    def _map(self, file: int, length: int) -> None:
        self._memory = torch.frombuffer(mmap.mmap(file, length), dtype=torch.uint8)

    def close(self) -> None:
        """Leave the others: what is under way fails, here and there. The memory goes with the last of them."""
        self._neighbours.close()
        self._memory = torch.empty(0, dtype=torch.uint8)

    # -- what ranks do -------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, divisor: float = 1.0) -> None:
        """Sum a contiguous CPU tensor over the ranks, in place, and divide by `divisor`."""
        flat = [tensor.detach().view(-1)]
        self.sum(flat, flat, divisor=divisor)

    def reduce(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous CPU tensor over the ranks, in place on the rank of position 0; the others lose theirs."""
        flat = [tensor.detach().view(-1)]
        self.sum(flat, flat, out=self.position == 0)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy a contiguous CPU tensor of the rank of position 0 to the others, in place."""
        flat = tensor.detach().view(-1)
        for piece in torch.split(flat, self._slot_bytes // flat.element_size()):
            shared = self._slots(piece, piece.numel())[0]
            if self.position == 0:
                shared.copy_(piece)
            self._neighbours.meet(piece.nbytes)
            if self.position:
                piece.copy_(shared)

    def reduce_scatter(self, source: torch.Tensor, target: torch.Tensor, divisor: float = 1.0) -> None:
        """Sum contiguous CPU tensors over the ranks, and divide; each rank gets the chunk of its position.

        Args:
            source: has one dimension, and one chunk per rank; 16-bit numbers are summed in fp32.
            target: of the size of a chunk, in other memory.
            divisor: of the sum.
        """
        mine = self.position
        chunks = _rows(source, self.count, target)
        most = self._slot_bytes // source.element_size() // self.count // _STEP * _STEP
        for parts, out in zip(torch.split(chunks, most, 1), torch.split(target, most), strict=True):
            length = out.numel()
            places = [slot.view(self.count, most)[:, :length] for slot in self._slots(source, self.count * most)]
            for other in self._others:
                places[mine][other].copy_(parts[other])
            self._neighbours.meet(_SCATTERED + source.nbytes)
            _add([parts[mine] if rank == mine else place[mine] for rank, place in enumerate(places)], divisor, 1.0, out)

    def all_gather(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the contiguous CPU tensors of all ranks to `target`, one after the other.

        Args:
            source: has one dimension; it may be this rank's part of `target`.
            target: of the size of all of them.
        """
        rows = _rows(target, self.count, source)
        most = self._slot_bytes // source.element_size()
        for part, out in zip(torch.split(source, most), torch.split(rows, most, 1), strict=True):
            slots = self._slots(source, part.numel())
            slots[self.position].copy_(part)
            out[self.position].copy_(part)
            self._neighbours.meet(_GATHERED + target.nbytes)
            for other in self._others:
                out[other].copy_(slots[other])

    def sum(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        *,
        prescale: float = 1.0,
        divisor: float = 1.0,
        postscale: float = 1.0,
        out: bool = True,
    ) -> None:
        """Sum contiguous CPU tensors of one dimension and type over the ranks; 16-bit ones in fp32."""
        total = sum(each.numel() for each in sources)
        if not total:
            return
        most = self._slot_bytes // sources[0].element_size() // self.count // _STEP * _STEP
        count = -(-total // (most * self.count))
        share = -(-total // (count * self.count * _STEP)) * _STEP
        given = self._pieces(sources, share)
        wanted = given if targets is sources else self._pieces(targets, share)
        slots: list[list[torch.Tensor]] = []
        mine = self.position
        for step in range(len(given) + 2):
            if step < len(given):
                slots.append(self._slots(sources[0], share * self.count))
                for other in self._others:
                    _gather(given[step][other], slots[step][mine], other * share, prescale)
            if 1 <= step <= len(given):
                own, own_out = given[step - 1][mine], wanted[step - 1][mine]
                places = [slot[mine * share : (mine + 1) * share] for slot in slots[step - 1]]
                _sum_share(places, mine, own, own_out, (prescale, divisor, postscale))
            if step >= 2 and out:
                for other in self._others:
                    place = slots[step - 2][other][other * share :]
                    _scatter(place, wanted[step - 2][other])
            if step <= len(given):
                self._neighbours.meet(total * sources[0].element_size())

    def _slots(self, like: torch.Tensor, length: int) -> list[torch.Tensor]:
        """The places of all ranks in the next region, for so many numbers of a type."""
        memory = self._memory
        if not memory.numel():
            raise ConnectionError("this rank has left the exchange")
        begin = self._region * self._region_bytes
        self._region = (self._region + 1) % _REGIONS
        region = memory[begin : begin + self._region_bytes].view(self.count, -1)
        return list(region[:, : length * like.element_size()].view(like.dtype))

    def _pieces(self, tensors: Sequence[torch.Tensor], share: int) -> list[list[Share]]:
        """Cut tensors into pieces, and these into one share per rank; at the end, shares may be smaller, or empty."""
        shares = _cut(tensors, share)
        shares += [[] for _ in range(-len(shares) % self.count)]
        return [shares[first : first + self.count] for first in range(0, len(shares), self.count)]


def _rows(tensor: torch.Tensor, count: int, row: torch.Tensor) -> torch.Tensor:
    """A tensor as one row per rank, each like another tensor."""
    if tensor.numel() != count * row.numel() or tensor.dtype is not row.dtype:
        raise ValueError(f"{tensor.numel()} numbers of {tensor.dtype} are not {count} x {row.numel()} of {row.dtype}")
    return tensor.view(count, row.numel())


def _cut(tensors: Sequence[torch.Tensor], size: int) -> list[Share]:
    """Cut tensors, as if they were one, into shares of so many numbers; the last may have fewer."""
    shares: list[Share] = []
    remaining = 0
    for tensor in tensors:
        start, end = 0, tensor.numel()
        while start < end:
            if not remaining:
                shares.append([])
                remaining = size
            length = min(remaining, end - start)
            shares[-1].append(tensor if length == end else tensor[start : start + length])
            start += length
            remaining -= length
    return shares


def _gather(share: Share, slot: torch.Tensor, begin: int, factor: float) -> None:
    """Copy a share into a slot."""
    length = sum(part.numel() for part in share)
    if not length:
        return
    place = slot[begin : begin + length]
    if len(share) == 1:
        place.copy_(share[0])
    else:
        torch.cat(share, out=place)
    if factor != 1.0:
        place.mul_(factor)


def _scatter(place: torch.Tensor, share: Share) -> None:
    """Copy a share out."""
    lengths = [part.numel() for part in share]
    if len(share) == 1:
        share[0].copy_(place[: lengths[0]])
    elif share:
        torch._foreach_copy_(share, torch.split(place[: sum(lengths)], lengths))


def _sum_share(
    places: Sequence[torch.Tensor], mine: int, own: Share, target: Share, factors: tuple[float, float, float]
) -> None:
    """Sum a share that the others have passed on, and write it to its place of this rank and to its target.

    This rank has not passed on the share that it sums itself, so the place is free for the sum.
    """
    length = sum(part.numel() for part in own)
    if not length:
        return
    prescale, divisor, postscale = factors
    parts = [place[:length] for place in places]
    out = parts[mine]
    if len(own) == 1 and prescale == 1.0:
        parts[mine] = own[0]
    else:
        _gather(own, out, 0, prescale)
    _add(parts, divisor, postscale, out)
    _scatter(out, target)


def _add(parts: Sequence[torch.Tensor], divisor: float, postscale: float, out: torch.Tensor) -> None:
    """Write the sum of tensors, divided and multiplied, into another one, which may be one of them."""
    is_half = out.is_floating_point() and out.element_size() < 4
    if is_half or any(out is part for part in parts[2:]):
        total = parts[0].float() if is_half else parts[0].clone()
    else:
        total = torch.add(parts[0], parts[1], out=out)
        parts = parts[1:]
    for part in parts[1:]:
        total += part
    if divisor != 1:
        total /= divisor
    if postscale != 1.0:
        total *= postscale
    if total is not out:
        out.copy_(total)
