"""When an agent that says nothing counts as lost: later if the kernel of its machine still answers.

A kernel acknowledges what it receives, however busy its machine is. So an agent that says nothing while its kernel
acknowledges is starved or suspended, and may go on; a machine from which no packet comes is down or cut off.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

PATIENCE = 6  # times the limit of silence: for an agent whose kernel answers, and for one that is just being started
_LAYOUT = struct.Struct("=16xI32x2I")  # of Linux' tcp_info: snd_mss, last_data_recv and last_ack_recv (milliseconds)


def exceeded(since_message: float, since_packet: float | None, limit: float) -> float | None:
    """The limit of silence that a peer has exceeded, in seconds; None as long as it does not count as lost."""
    if since_message <= limit:
        return None
    if since_packet is None or since_packet > limit:
        return limit
    return PATIENCE * limit if since_message > PATIENCE * limit else None


def since_packet(sock: socket.socket) -> float | None:
    """Seconds since the kernel at the other end of a connection sent data or acknowledged some; None if not known."""
    if sys.platform != "linux":  # other systems have another layout
        return None
    with contextlib.suppress(OSError, struct.error):
        segment, data, acknowledgement = _LAYOUT.unpack(
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAYOUT.size)
        )
        if segment:  # sandboxes that only look like Linux leave most fields empty
            return float(min(data, acknowledgement)) / 1000
    return None
