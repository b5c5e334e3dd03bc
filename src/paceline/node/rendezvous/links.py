"""The connections between the agents of a job: one agent leads and has the coordinator, the others follow.

A connection starts with a proof in both directions that each side knows the job's token (`handshake`), so that no other
process can join or impersonate the leader. Every later message has a checksum with its direction and number, by a key
that belongs to this connection. At the first wrong one the connection ends as if the other side were silent.

Both sides send a message every second; a side that sends nothing for long counts as lost (`silence`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from typing import TYPE_CHECKING

from paceline.node.eventloop.channel import Channel, ChannelClosed, Message, MessageAltered, encode

from .silence import exceeded, since_packet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.node.eventloop.loop import Loop

    from .coordinator import Coordinator, Outbox
    from .messages import ToCoordinator, ToNode

BEAT_SECONDS = 1.0
BEAT = encode({"do": "beat"})
_GAP = 3 * BEAT_SECONDS  # between two messages; if it is longer, the other side or this one was silent
STOP_SECONDS = 5.0  # after which a node that has lost its coordinator has certainly stopped its ranks
PART: Message = {"do": "part"}  # the sender is alive, and ends this connection


class Link:
    """The connection to another agent of the job, until it is lost or left.

    Attributes:
        channel: the authenticated connection.
        last_seen: when something of the other side was received last; once it is lost, or of its kernel.
        alive_at: a time at which the other side certainly ran: what is received may have been sent long before, if this
            process was stopped meanwhile, or has come after a silence: the network holds back what it cannot deliver.
    """

    def __init__(
        self,
        loop: Loop,
        channel: Channel,
        silence: float,  # seconds without a packet after which the other side is lost
        *,
        received: Callable[[Message], None],
        lost: Callable[[bool, str], None],  # whether it is known to be dead, and why it counts as lost if not
        is_stopping: Callable[[], bool] = lambda: False,  # then only messages count, not what a kernel answers
        # Whether the other side coordinates. After almost so long a silence of its kernel it may have given this side
        # up, and go on soon; that it has not, only a message shows.
        follows: bool = False,
    ) -> None:
        """Begin to read, and to send."""
        self.channel = channel
        self.last_seen = self.alive_at = self._beaten = self._flows_since = loop.now()
        self._loop, self._silence = loop, silence
        self._received, self._lost, self._is_stopping, self._follows = received, lost, is_stopping, follows
        self._quiet_since = math.inf  # when the last packet came before such a silence, if no message has come since
        self._is_open = True
        loop.watch(channel, self._read)
        self._beat()

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message; if the other side is gone, the loop calls `lost`."""
        self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """`send` a message that is encoded."""
        if self._is_open:
            with contextlib.suppress(ChannelClosed):  # the next `receive` raises it too
                self.channel.put(line)

    def part(self) -> None:
        """Disconnect; the other side learns that this agent is alive."""
        if self._is_open:
            self._is_open = False
            self._loop.forget(self.channel)
            self.channel.part(PART)

    def close(self) -> None:
        """Close the connection."""
        self._is_open = False
        if self.channel.fileno() >= 0:
            self._loop.forget(self.channel)
            self.channel.close()

    def _beat(self) -> None:
        if not self._is_open:
            return
        now = self._loop.now()
        since = None if self._is_stopping() else since_packet(self.channel.socket)
        if self._follows and since is not None and since > max(_GAP, self._silence - _GAP):
            self._quiet_since = min(self._quiet_since, now - since)
        was_running = now - self._beaten < _GAP  # a process that was stopped has received nothing meanwhile
        counted = None if since is None else max(since, now - self._quiet_since)
        limit = exceeded(now - self.last_seen, counted, self._silence) if was_running else None
        if limit is not None:
            self.last_seen = max(self.last_seen, now - (now if since is None else since))
            self.part()
            self._lost(False, f"it did not answer for {limit:g} s")
            return
        if not self.channel.wants_write:
            self.send_line(BEAT)
        self._beaten = now
        self._loop.after(BEAT_SECONDS, self._beat)

    def _read(self) -> None:
        before, self.last_seen, self._quiet_since = self.last_seen, self._loop.now(), math.inf
        if self.last_seen - before > _GAP:
            self._flows_since = self.last_seen
        try:
            for message in self.channel.receive():
                if message == PART:
                    raise ChannelClosed("the other side ended the connection")
                if message["do"] != "beat":
                    self._received(message)
            if self.last_seen - self._flows_since > _GAP:  # what was held back comes at once
                self.alive_at = max(self.alive_at, self._loop.unread_since)
        except ChannelClosed as error:
            if not self._is_open:
                return
            self.last_seen = before
            if isinstance(error, MessageAltered):
                _report(self.channel, error)
                self.part()
                self._lost(False, str(error))
            else:
                self.close()
                self._lost(error.is_dead, "")


class Leader:
    """Runs the coordinator in this agent, which is its peer 0, and connects the followers to it."""

    def __init__(self, loop: Loop, coordinator: Coordinator, deliver: Callable[[ToNode], None], silence: float) -> None:
        """No follower is connected yet."""
        self.coordinator = coordinator
        self._loop, self._deliver, self._silence = loop, deliver, silence
        self._peers: dict[int, Link] = {}
        self._parted: list[Link] = []
        self._next_peer = 1

    def admit(self, channel: Channel) -> None:
        """Connect an authenticated follower."""
        peer = self._next_peer
        self._next_peer += 1
        self._peers[peer] = Link(
            self._loop,
            channel,
            self._silence,
            received=lambda message: self._post(self.coordinator.receive(peer, message)),
            lost=lambda is_dead, why: self._lose(peer, is_dead, why),
            is_stopping=lambda: bool(self.coordinator.stop_signal),
        )

    def agent_died(self, name: str) -> None:
        """Let the coordinator know that an agent is dead."""
        self._post(self.coordinator.has_died(name))

    def send(self, message: ToCoordinator) -> None:
        """Send a message of this agent to the coordinator."""
        self._post(self.coordinator.receive(0, message))

    def flush(self, timeout: float) -> None:
        """Wait until all messages to followers have been sent, at most `timeout` seconds."""
        self._loop.run_until(lambda: not any(link.channel.wants_write for link in self._peers.values()), timeout)

    def part(self) -> None:
        """Stop coordinating; the followers learn that this agent is alive."""
        for link in self._peers.values():
            link.part()
        self._parted += self._peers.values()
        self._peers.clear()

    def close(self) -> None:
        """Close all connections."""
        for link in [*self._peers.values(), *self._parted]:
            link.close()
        self._peers.clear()

    def _lose(self, peer: int, is_dead: bool, why: str) -> None:
        link = self._peers.pop(peer)
        self._parted.append(link)
        self._post(self.coordinator.lost(peer, is_dead, why or "it does not answer"))
        if not is_dead:
            now = self._loop.now()
            was_stopped = now - self._loop.unread_since > _GAP  # then the kernel here has answered meanwhile
            seconds = (now if was_stopped else min(link.last_seen + self._silence, now)) + STOP_SECONDS - now
            self._loop.after(max(0.0, seconds), lambda: self._post(self.coordinator.has_stopped(peer)))

    def _post(self, outbox: Outbox) -> None:
        encoded: tuple[ToNode | None, bytes] = None, b""  # the last one: many are for all nodes
        for peer, message in outbox:
            if peer == 0:
                self._deliver(message)
            elif peer in self._peers:
                if encoded[0] is not message:
                    encoded = message, encode(message)
                self._peers[peer].send_line(encoded[1])


def _report(channel: Channel, error: MessageAltered) -> None:
    """Say in the agent's log which connection was tampered with."""
    with contextlib.suppress(OSError):  # it may be gone
        address, port = channel.socket.getpeername()[:2]
        print(f"paceline: connection to the agent at {address}:{port}: {error}", file=sys.stderr, flush=True)
