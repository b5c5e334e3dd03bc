"""Values in 4 bits, with one scale per block and error feedback."""

from __future__ import annotations

import torch

from paceline.train.parallel.sync.forecast import BLOCK

from .int8 import Int8


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
