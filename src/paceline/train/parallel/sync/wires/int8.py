"""Gradients in 8 bits, with one scale per block and error feedback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.train.parallel.sync.forecast import BLOCK

from .wire import Residuals, Wire, all_gather, all_to_all, starts, sum_in_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.train.torch_types import StateDict

_SCALE = 4  # bytes, before the values of a block


class Layout:
    """The blocks of a bucket: those of each gradient one after the other, and equally many of each for every rank.

    So which rank sums a block does not depend on how gradients are put into buckets, and nor does the result.

    Attributes:
        begins: where each gradient begins in the bucket.
        offsets: where it begins in the blocks, in values.
        blocks: their number.
        order: the blocks as they are sent, those for the first rank first.
        places: where each block is in that order.
    """

    def __init__(self, keys: Sequence[tuple[int, int]], ranks: int) -> None:
        self.begins = starts(keys)
        self.offsets: list[int] = []
        order, at = [], 0
        for _, count in keys:
            self.offsets.append(at * BLOCK)
            each = -(-count // (BLOCK * ranks))
            order.append(torch.arange(at, at + each * ranks).view(ranks, each))
            at += each * ranks
        self.blocks = at
        self.order = torch.cat(order, dim=1).view(-1)
        self.places = torch.argsort(self.order)


class Int8(Wire):
    """Sends each value as a multiple, -127 … 127, of a 127th of the largest one in its block of 256.

    A rank sends 2 (K - 1) shares of (4 + 256) bytes per block, with K ranks and 1 / K of all blocks in a share. What is
    lost by rounding is kept, that of a sum by the rank that has computed it, and added in the next step.

    Attributes:
        most: the largest multiple.
        packed: bytes of the values of a block.
    """

    most = 127
    packed = BLOCK

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._rank = dist.get_rank(group)
        self._residuals = Residuals()
        self._layouts: dict[tuple[tuple[int, int], ...], Layout] = {}
        self._lost = torch.empty(0)  # the residuals of the bucket under way, by blocks
        self._mine = torch.empty(0)  # the blocks of it that this rank sums

    def sum(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]], step: int) -> None:
        """See `Wire.sum`: each rank sums one share of what all have sent it, in fp32, and sends the sum to all."""
        mine = self._sum_of(all_to_all(self._encode(tensor, keys), self.group))
        self._decode(all_gather(mine, self.group), tensor, keys)
        self.sent += 2 * (self.ranks - 1) * mine.numel()

    def _encode(self, tensor: torch.Tensor, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Gradients as they are sent, in one share of equal size per rank."""
        layout = self._layout(keys)
        lost = self._residuals.of(keys, layout.offsets, layout.blocks * BLOCK, tensor)
        for (_, count), begin, offset in zip(keys, layout.begins, layout.offsets, strict=True):
            lost[offset : offset + count] += tensor[begin : begin + count]
        self._lost = lost.view(layout.blocks, BLOCK)
        self._mine = layout.order.view(self.ranks, -1)[self._rank].to(tensor.device)
        return self._encoded(self._lost)[layout.order].view(-1)

    def _sum_of(self, received: torch.Tensor) -> torch.Tensor:
        """The sum of this rank's share of all ranks, as it is sent."""
        total = sum_in_order(self._decoded(received.view(self.ranks, -1, _SCALE + self.packed)))
        sent = self._encoded(total)
        self._lost[self._mine] += total
        return sent.view(-1)

    def _decode(self, sums: torch.Tensor, out: torch.Tensor, keys: Sequence[tuple[int, int]]) -> None:
        """Write the sums of all shares into the gradients."""
        layout = self._layout(keys)
        values = self._decoded(sums.view(-1, _SCALE + self.packed)[layout.places]).view(-1)
        for (_, count), begin, offset in zip(keys, layout.begins, layout.offsets, strict=True):
            out[begin : begin + count] = values[offset : offset + count]

    def _layout(self, keys: Sequence[tuple[int, int]]) -> Layout:
        found = self._layouts.get(tuple(keys))
        if found is None:
            found = self._layouts[tuple(keys)] = Layout(keys, self.ranks)
        return found

    def _encoded(self, blocks: torch.Tensor) -> torch.Tensor:
        """Blocks as they are sent; the blocks themselves keep what that leaves out."""
        sent = torch.empty(blocks.shape[0], _SCALE + self.packed, dtype=torch.uint8, device=blocks.device)
        scales = blocks.abs().amax(1, keepdim=True).float() / self.most
        factors = torch.where(scales > 0, scales, 1)
        values = (blocks / factors).round_().clamp_(-self.most, self.most)
        blocks.sub_(values * factors).nan_to_num_(0.0, 0.0, 0.0)
        sent[:, :_SCALE] = scales.view(torch.uint8)
        sent[:, _SCALE:] = self.pack(values)
        return sent

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Multiples, of shape [blocks, 256], as bytes, of shape [blocks, packed]; NaN may become anything."""
        return values.to(torch.int8).view(torch.uint8)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """The multiples that were packed, in fp32; their last dimension is that of `packed`."""
        return packed.view(torch.int8).float()

    def _decoded(self, sent: torch.Tensor) -> torch.Tensor:
        """The values of blocks, in fp32."""
        scales = sent[..., :_SCALE].contiguous().view(torch.float32)
        return self.unpack(sent[..., _SCALE:].contiguous()) * scales

    def state_dict(self) -> StateDict:
        return self._residuals.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._residuals.load_state_dict(state)


# -- four bits ---------------------------------------------------------------------------------------------------------
# Values in 4 bits, with one scale per block and error feedback.


class Int4(Int8):
    """Sends each value as a multiple, -7 … 7, of a 7th of the largest one in its block of 256.

    A rank sends 2 (K - 1) shares of (4 + 128) bytes per block, with K ranks and 1 / K of all blocks in a share.
    """

    most = 7
    packed = BLOCK // 2

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """See `Int8.pack`: the first half of a block is in the lower bits."""
        shifted = (values + 8).to(torch.uint8)
        return shifted[:, : self.packed] | shifted[:, self.packed :] << 4

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        return torch.cat([packed & 15, packed >> 4], dim=-1).float() - 8
