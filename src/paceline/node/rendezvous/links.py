"""The connections between the agents of a job: one agent leads and has the coordinator, the others follow.

A connection starts with a proof in both directions that each side knows the job's token (`handshake`), so that no other
process can join or impersonate the leader. Every later message has a checksum with its direction and number, by a key
that belongs to this connection. At the first wrong one the connection ends as if the other side were silent.

Both sides send a message every second; a side that sends nothing for long counts as lost (`silence`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, cast

from paceline.node.eventloop.channel import Channel, ChannelClosed, Message, MessageAltered

from .handshake import connect
from .silence import exceeded, since_packet

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.node.eventloop.loop import Loop

    from .coordinator import Coordinator, Outbox
    from .messages import AgentStatus, ToCoordinator, ToNode

BEAT_SECONDS = 1.0
BEAT: Message = {"do": "beat"}
PART: Message = {"do": "part"}  # the sender is alive, and ends this connection


class _Pulse:
    """Whether this process has been running: one that was stopped for a while has received nothing meanwhile."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def is_steady(self, now: float) -> bool:
        """Whether the last beat was about as long ago as it should be."""
        return now - self._last < 3 * BEAT_SECONDS

    def beat(self, now: float) -> None:
        """Record a beat."""
        self._last = now


class Leader:
    """Runs the coordinator in this agent, which is its peer 0, and connects the followers to it."""

    def __init__(self, loop: Loop, coordinator: Coordinator, deliver: Callable[[ToNode], None], silence: float) -> None:
        """No follower is connected yet.

        Args:
            deliver: receives its messages to this agent.
            silence: seconds without a packet after which a follower is lost.
        """
        self.coordinator = coordinator
        self._loop = loop
        self._deliver = deliver
        self._silence = silence
        self._peers: dict[int, Channel] = {}
        self._last_seen: dict[int, float] = {}
        self._parted: list[Channel] = []
        self._next_peer = 1
        self._pulse: _Pulse | None = None  # None while there is no follower

    def admit(self, channel: Channel) -> None:
        """Connect an authenticated follower."""
        peer = self._next_peer
        self._next_peer += 1
        self._peers[peer] = channel
        self._last_seen[peer] = time.monotonic()
        self._loop.watch(channel, lambda: self._read(peer))
        if self._pulse is None:
            self._pulse = _Pulse()
            self._beat(self._pulse)

    def agent_died(self, name: str) -> None:
        """Let the coordinator know that an agent is dead."""
        self._post(self.coordinator.has_died(name))

    def send(self, message: ToCoordinator) -> None:
        """Send a message of this agent to the coordinator."""
        self._post(self.coordinator.receive(0, message))

    def flush(self, timeout: float) -> None:
        """Wait until all messages to followers have been sent, at most `timeout` seconds."""
        self._loop.run_until(lambda: not any(channel.wants_write for channel in self._peers.values()), timeout)

    def part(self) -> None:
        """Stop coordinating; the followers learn that this agent is alive."""
        for peer in list(self._peers):
            self._part(peer)

    def close(self) -> None:
        """Close all connections."""
        for channel in [*self._peers.values(), *self._parted]:
            self._loop.forget(channel)
            channel.close()
        self._peers.clear()

    def _part(self, peer: int) -> None:
        channel = self._peers.pop(peer)
        self._loop.forget(channel)
        channel.part(PART)
        self._parted.append(channel)

    def _beat(self, pulse: _Pulse) -> None:
        now = time.monotonic()
        for peer, channel in list(self._peers.items()):
            packet = None if self.coordinator.stop_signal else since_packet(channel.socket)  # who stops a job waits
            limit = exceeded(now - self._last_seen[peer], packet, self._silence) if pulse.is_steady(now) else None
            if limit is not None:
                self._part(peer)
                self._post(self.coordinator.lost(peer, is_dead=False, why=_silent(limit)))
            elif not channel.wants_write:
                with contextlib.suppress(ChannelClosed):  # the next `receive` raises it too
                    channel.send(BEAT)
        pulse.beat(now)
        if self._peers:
            self._loop.after(BEAT_SECONDS, lambda: self._beat(pulse))
        else:
            self._pulse = None

    def _read(self, peer: int) -> None:
        channel = self._peers[peer]
        self._last_seen[peer] = time.monotonic()
        try:
            for message in channel.receive():
                if message == PART:
                    raise ChannelClosed("the other side ended the connection")
                if message != BEAT:
                    self._post(self.coordinator.receive(peer, cast("ToCoordinator", message)))
        except MessageAltered as error:
            if peer in self._peers:
                _report(channel, error)
                self._part(peer)
                self._post(self.coordinator.lost(peer, is_dead=False, why=str(error)))
        except ChannelClosed as error:
            if self._peers.pop(peer, None) is not None:
                self._loop.forget(channel)
                channel.close()
                self._post(self.coordinator.lost(peer, error.is_dead))

    def _post(self, outbox: Outbox) -> None:
        for peer, message in outbox:
            if peer == 0:
                self._deliver(message)
            elif peer in self._peers:
                with contextlib.suppress(ChannelClosed):  # the next `receive` raises it too, and `lost` follows
                    self._peers[peer].send(message)


class Follower:
    """Connects this agent to the coordinator on another node."""

    def __init__(
        self, loop: Loop, deliver: Callable[[ToNode], None], lost: Callable[[bool, str], None], silence: float
    ) -> None:
        """Nothing is connected before `connect`.

        Args:
            deliver: receives the messages of the coordinator.
            lost: called when the leader is lost, with whether it is known to be dead, and why it counts as lost if not.
            silence: seconds without a packet after which it is lost.
        """
        self._loop = loop
        self._deliver = deliver
        self._lost = lost
        self._silence = silence
        self._channel: Channel | None = None
        self._parted: list[Channel] = []
        self._pulse = _Pulse()
        self.last_seen = 0.0  # when the leader last sent something; once it is lost, or its kernel
        self.local_address = ""

    def connect(self, address: str, port: int, token: bytes, timeout: float) -> AgentStatus:
        """Try once to join; returns the agent's status: this is connected if that has "leads".

        Raises:
            OSError: no agent answers there.
            PermissionError: it does not know the token.
        """
        channel, status = connect(address, port, token, timeout, joins=True)
        if not status["leads"]:
            channel.close()
            return status
        self.local_address = channel.socket.getsockname()[0]
        self._channel = channel
        self.last_seen = time.monotonic()
        self._loop.watch(channel, self._read)
        self._beat()
        return status

    def send(self, message: ToCoordinator) -> None:
        """Send a message of this agent to the coordinator; if the leader is gone, the loop calls `lost`."""
        if self._channel is not None:
            with contextlib.suppress(ChannelClosed):
                self._channel.send(message)

    def part(self) -> None:
        """Disconnect; the leader learns that this agent is alive."""
        if self._channel is not None:
            self._loop.forget(self._channel)
            self._channel.part(PART)
            self._parted.append(self._channel)
            self._channel = None

    def close(self) -> None:
        """Close the connection."""
        for channel in [*self._parted, *([] if self._channel is None else [self._channel])]:
            self._loop.forget(channel)
            channel.close()
        self._parted.clear()
        self._channel = None

    def _beat(self) -> None:
        if self._channel is None:
            return
        now = time.monotonic()
        since = since_packet(self._channel.socket)
        limit = exceeded(now - self.last_seen, since, self._silence) if self._pulse.is_steady(now) else None
        if limit is not None:
            self.last_seen = max(self.last_seen, now - (now if since is None else since))
            self.part()
            self._lost(False, _silent(limit))
            return
        if not self._channel.wants_write:
            with contextlib.suppress(ChannelClosed):  # the next `receive` raises it too
                self._channel.send(BEAT)
        self._pulse.beat(now)
        self._loop.after(BEAT_SECONDS, self._beat)

    def _read(self) -> None:
        channel = self._channel
        assert channel is not None
        before, self.last_seen = self.last_seen, time.monotonic()
        try:
            for message in channel.receive():
                if message == PART:
                    raise ChannelClosed("the other side ended the connection")
                if message != BEAT:
                    self._deliver(cast("ToNode", message))
        except MessageAltered as error:
            if self._channel is channel:
                self.last_seen = before
                _report(channel, error)
                self.part()
                self._lost(False, str(error))
        except ChannelClosed as error:
            if self._channel is channel:
                self.last_seen = before
                self.close()
                self._lost(error.is_dead, "it ended the connection")


def _silent(seconds: float) -> str:
    return f"it did not answer for {seconds:g} s"


def _report(channel: Channel, error: MessageAltered) -> None:
    """Say in the agent's log which connection was tampered with."""
    with contextlib.suppress(OSError):  # it may be gone
        address, port = channel.socket.getpeername()[:2]
        print(f"paceline: connection to the agent at {address}:{port}: {error}", file=sys.stderr, flush=True)
