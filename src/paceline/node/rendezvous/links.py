"""How the agents of a job talk: one hosts the coordinator, the others are its guests.

A connection starts with a challenge in both directions: each side proves that it knows the job's token by an HMAC of
both sides' random numbers (`contract/handshake.py`), so that nobody else can join, and nobody else can pose as the
host. The host proves first: a visitor sends nothing that depends on the token to an address that has not proved itself.
A visitor says with its proof whether it wants to join, or only to ask who coordinates.

Both sides say something every second; whoever has said nothing for long is taken for gone.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, cast

from paceline.node.eventloop.channel import Channel, ChannelClosed, Message

from .handshake import knock

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.node.eventloop.loop import Loop

    from .coordinator import Coordinator, Outbox
    from .messages import ToCoordinator, ToNode

BEAT_SECONDS = 1.0
BEAT: Message = {"do": "beat"}
PART: Message = {"do": "part"}  # I live, and this connection is over


class _Pulse:
    """Whether this process itself has been awake: one that was stopped for a while has heard nobody meanwhile."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def is_steady(self, now: float) -> bool:
        """Whether the last beat was about as long ago as it should be."""
        return now - self._last < 3 * BEAT_SECONDS

    def beat(self, now: float) -> None:
        """Another one."""
        self._last = now


class Host:
    """Runs the coordinator in this agent, which is its peer 0."""

    def __init__(self, loop: Loop, coordinator: Coordinator, deliver: Callable[[ToNode], None], silence: float) -> None:
        """Take it up.

        Args:
            loop: of this agent.
            coordinator: decides.
            deliver: takes what it says to this agent.
            silence: seconds without a word after which a guest is gone.
        """
        self.coordinator = coordinator
        self._loop = loop
        self._deliver = deliver
        self._silence = silence
        self._peers: dict[int, Channel] = {}
        self._heard: dict[int, float] = {}
        self._parted: list[Channel] = []
        self._next_peer = 1
        self._pulse: _Pulse | None = None  # nobody to talk to, nothing to say

    def admit(self, channel: Channel) -> None:
        """Take in a guest."""
        peer = self._next_peer
        self._next_peer += 1
        self._peers[peer] = channel
        self._heard[peer] = time.monotonic()
        self._loop.watch(channel, lambda: self._read(peer))
        if self._pulse is None:
            self._pulse = _Pulse()
            self._beat(self._pulse)

    def heard_of_death(self, name: str) -> None:
        """An agent is known to be dead."""
        self._post(self.coordinator.has_died(name))

    def send(self, message: ToCoordinator) -> None:
        """A message of this agent to the coordinator."""
        self._post(self.coordinator.receive(0, message))

    def flush(self, timeout: float) -> None:
        """Wait until the other agents have been told everything, `timeout` seconds at most."""
        self._loop.run_until(lambda: not any(channel.wants_write for channel in self._peers.values()), timeout)

    def part(self) -> None:
        """Coordinate no more; the guests know that this agent lives."""
        for peer in list(self._peers):
            self._part(peer)

    def close(self) -> None:
        """Drop everybody."""
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
            if pulse.is_steady(now) and now - self._heard[peer] > self._silence:
                self._part(peer)
                self._post(self.coordinator.lost(peer, is_dead=False))
            elif not channel.wants_write:
                with contextlib.suppress(ChannelClosed):  # reading from it tells
                    channel.send(BEAT)
        pulse.beat(now)
        if self._peers:
            self._loop.after(BEAT_SECONDS, lambda: self._beat(pulse))
        else:
            self._pulse = None

    def _read(self, peer: int) -> None:
        channel = self._peers[peer]
        self._heard[peer] = time.monotonic()
        try:
            for message in channel.receive():
                if message == PART:
                    raise ChannelClosed("it has parted")
                if message != BEAT:
                    self._post(self.coordinator.receive(peer, cast("ToCoordinator", message)))
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
                with contextlib.suppress(ChannelClosed):  # reading from it tells, and the coordinator hears `lost`
                    self._peers[peer].send(message)


class Guest:
    """Connects this agent to the coordinator on another node."""

    def __init__(
        self, loop: Loop, deliver: Callable[[ToNode], None], lost: Callable[[bool], None], silence: float
    ) -> None:
        """Connect later.

        Args:
            loop: of this agent.
            deliver: takes what the coordinator says.
            lost: called when the host is gone, with whether it is known to be dead.
            silence: seconds without a word after which it is gone.
        """
        self._loop = loop
        self._deliver = deliver
        self._lost = lost
        self._silence = silence
        self._channel: Channel | None = None
        self._parted: list[Channel] = []
        self._pulse = _Pulse()
        self.heard = 0.0  # when the host last said something
        self.local_address = ""

    def connect(self, address: str, port: int, token: bytes, timeout: float) -> Message:
        """One try to join; returns what the host says of itself, and this is connected if that has "leads".

        Raises:
            OSError: nobody answers there.
            PermissionError: it does not know the token.
        """
        channel, status = knock(address, port, token, timeout, joins=True)
        if not status["leads"]:
            channel.close()
            return status
        self.local_address = channel.socket.getsockname()[0]
        self._channel = channel
        self.heard = time.monotonic()
        self._loop.watch(channel, self._read)
        self._beat()
        return status

    def send(self, message: ToCoordinator) -> None:
        """A message of this agent to the coordinator; if the host is gone, `lost` is called from the loop."""
        if self._channel is not None:
            with contextlib.suppress(ChannelClosed):
                self._channel.send(message)

    def part(self) -> None:
        """Leave, and let the host know that this agent lives."""
        if self._channel is not None:
            self._loop.forget(self._channel)
            self._channel.part(PART)
            self._parted.append(self._channel)
            self._channel = None

    def close(self) -> None:
        """Leave."""
        for channel in [*self._parted, *([] if self._channel is None else [self._channel])]:
            self._loop.forget(channel)
            channel.close()
        self._parted.clear()
        self._channel = None

    def _beat(self) -> None:
        if self._channel is None:
            return
        now = time.monotonic()
        if self._pulse.is_steady(now) and now - self.heard > self._silence:
            self.part()
            self._lost(False)
            return
        if not self._channel.wants_write:
            with contextlib.suppress(ChannelClosed):  # reading from it tells
                self._channel.send(BEAT)
        self._pulse.beat(now)
        self._loop.after(BEAT_SECONDS, self._beat)

    def _read(self) -> None:
        channel = self._channel
        assert channel is not None
        before, self.heard = self.heard, time.monotonic()
        try:
            for message in channel.receive():
                if message == PART:
                    raise ChannelClosed("it has parted")
                if message != BEAT:
                    self._deliver(cast("ToNode", message))
        except ChannelClosed as error:
            if self._channel is channel:
                self.heard = before
                self.close()
                self._lost(error.is_dead)
