"""This node among the others of its job: who coordinates them, and how another one is found when that one is gone."""

from __future__ import annotations

import os
import secrets
import socket
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline._version import __version__
from paceline.contract import TOKEN, handshake
from paceline.node.eventloop.channel import ChannelClosed, Message
from paceline.node.machine.network import is_loopback

from .coordinator import GATHERING, Coordinator
from .handshake import Door, Survey
from .links import Guest, Host
from .quorum import Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.node.eventloop.channel import Channel
    from paceline.node.eventloop.loop import Loop
    from paceline.node.rundir.status import NodeEntry
    from paceline.node.spec import NodeSpec

    from .messages import Offer, Start, ToCoordinator, ToNode

CONNECT_PAUSE = 0.3  # seconds between two tries to reach the coordinator
CONNECT_SECONDS = 2.0  # for one try
STOP_SECONDS = 5.0  # in which a node that hears nobody any more has surely stopped its ranks


class Team:
    """How this node takes part in its job: as the one that coordinates, or as a guest of that one.

    Attributes:
        id: identifies this agent.
        standing: what it knows of the generations of the job.
    """

    def __init__(
        self,
        loop: Loop,
        spec: NodeSpec,
        *,
        offer: Callable[[], Offer],
        deliver: Callable[[ToNode], None],
        fail: Callable[[str, int], None],
        is_over: Callable[[], bool],
    ) -> None:
        """Meet nobody yet.

        Args:
            loop: of this agent.
            spec: this node's part of the job.
            offer: the ports that this node has for the next attempt.
            deliver: takes what the coordinator says.
            fail: ends the job here: why, and with which exit code.
            is_over: whether it has ended here.
        """
        self.id = uuid.uuid4().hex[:12]
        self.standing: Standing | None = None
        self._loop = loop
        self._spec = spec
        self._offer = offer
        self._deliver_further = deliver
        self._fail = fail
        self._is_over = is_over
        secret = os.environ.get(TOKEN, "").encode()
        self._token = secret or (spec.run_id or "none").encode()
        # One node shares its secret with nobody else; several have none in common unless they were given one.
        self._rank_secret = secret or (secrets.token_bytes(32) if spec.nodes == 1 else b"")
        self._address = spec.local_address or spec.main_address or "127.0.0.1"
        self._door = Door(loop, self._token, self._status, self._admit)
        self._meeting: Host | Guest | None = None
        self._parted: list[Host | Guest] = []
        self._nodes: list[NodeEntry] = []  # of the last attempt
        self._leader: tuple[str, int] | None = None  # where the coordinator is
        self._leader_id = ""
        self._dead: set[str] = set()
        self._others_stop_by: float | None = None  # while searching
        self._proof_until = 0.0  # so long a port that is refused proves that its agent died in the last attempt

    @property
    def has_met(self) -> bool:
        """Whether anybody knows of this node."""
        return self._meeting is not None

    @property
    def place(self) -> list[str | int] | None:
        """Address and port of the coordinator."""
        return None if self._leader is None else list(self._leader)

    @property
    def door(self) -> list[str | int] | None:
        """Address and port of this agent, which knows who coordinates."""
        return [self._address, self._door.port] if self._door.port else None

    def rank_key(self, start: Start) -> str | None:
        """The key of the ranks of an attempt; None where the nodes have no secret in common."""
        if not self._rank_secret:
            return None
        return handshake.derive_key(self._rank_secret, "ranks", str(start["job"]), str(start["attempt"])).hex()

    @property
    def missing(self) -> str:
        """Who has not come, as far as this node knows."""
        spec = self._spec
        if not isinstance(self._meeting, Host):
            return "some"
        members = self._meeting.coordinator.members.values()
        there = {member.joined["node_rank"] for member in members}
        names = [name for rank, name in enumerate(spec.hosts) if rank not in there]
        return ", ".join(names) or str(self._meeting.coordinator.missing)

    # -- meeting the others --------------------------------------------------------------------------------------------

    def meet(self, join_by: float) -> None:
        """Join the coordinator: here if this is node 0, else over the network, tried until `join_by`."""
        spec = self._spec
        if spec.nodes > 1 and not self._open():
            return
        if self._is_first():
            self._lead()
        elif not self._is_over():
            assert spec.main_address is not None
            assert spec.main_port is not None
            self._follow_first((spec.main_address, spec.main_port), join_by)

    def _open(self) -> bool:
        """Listen for others; returns whether that works where it must."""
        spec = self._spec
        assert spec.main_port is not None
        is_here = _is_here(spec.main_address or "")
        is_first = not spec.joins and (spec.node_rank == 0 or (spec.node_rank is None and is_here))
        if not is_first and spec.least == spec.nodes:
            return True
        # Where the nodes meet on the loopback, all of them are on this machine.
        here_alone = spec.main_address or "" if is_loopback(spec.main_address or "") else ""
        try:
            self._door.open(spec.main_port if is_first or not is_here else 0, here_alone)
        except OSError as error:
            if spec.node_rank == 0:
                self._fail(f"cannot listen on port {spec.main_port}: {error.strerror}; choose another --master-port", 2)
                return False
            if spec.least < spec.nodes:
                self._door.open(0, here_alone)
        return True

    def _is_first(self) -> bool:
        """Whether this node coordinates at first: node 0, or whoever listens first at the main address."""
        spec = self._spec
        if spec.nodes == 1:
            return True
        if spec.joins:
            return False
        is_there = spec.node_rank is None and _is_here(spec.main_address or "")
        return self._door.port == spec.main_port and (spec.node_rank == 0 or is_there)

    def _lead(self) -> None:
        """Coordinate from now on."""
        spec = self._spec
        coordinator = Coordinator(spec.least, spec.nodes, spec.max_restarts, spec.expected)
        coordinator.dead |= self._dead
        self._meeting = host = Host(self._loop, coordinator, lambda message: self._deliver(host, message), spec.silence)
        self._leader, self._leader_id = (self._address, self._door.port), self.id
        self._join()

    def _follow_first(self, place: tuple[str, int], join_by: float) -> None:
        """Become the guest of whoever coordinates there, or where that one says."""
        first = place
        while not self._is_over():
            left = join_by - time.monotonic()
            try:
                status = self._follow(place, max(0.1, min(CONNECT_SECONDS, left)))
                if self._meeting is not None:
                    return
                if status["leader"] is not None:
                    place = (status["leader"][0], status["leader"][1])
                why = "another node coordinates the job"
            except PermissionError as error:
                self._fail(f"{error}; start all nodes with the same --rdzv-id and PACELINE_TOKEN", 2)
                return
            except (OSError, ChannelClosed) as error:
                why, place = str(error), first
            if left <= 0:
                spec = self._spec
                first_name = "".join(f" ({name})" for name in spec.hosts[:1])
                who = "the job" if spec.joins else f"node 0{first_name}"
                do = "see what it does" if spec.hosts else "is `paceline run` started there, and the port open?"
                at = f"{place[0]}:{place[1]}"
                self._fail(f"cannot reach {who} at {at} within {spec.join_timeout:g} s ({why}); {do}", 1)
                return
            self._loop.run_until(self._is_over, CONNECT_PAUSE)

    def _follow(self, place: tuple[str, int], timeout: float) -> Message:
        """One try to become a guest of an agent; returns what it says of itself.

        Raises:
            OSError: it does not answer.
            PermissionError: it does not know the token.
        """
        guest = Guest(
            self._loop,
            lambda message: self._deliver(guest, message),
            lambda is_dead: self._host_is_gone(guest, is_dead),
            self._spec.silence,
        )
        status = guest.connect(place[0], place[1], self._token, timeout)
        if status["leads"]:
            self._meeting, self._leader, self._leader_id = guest, place, str(status["id"])
            self._address = self._spec.local_address or guest.local_address
            self._join()
        return status

    def _join(self) -> None:
        spec = self._spec
        self.send(
            {"do": "join", "id": self.id, "node_rank": spec.node_rank, "nodes": [spec.least, spec.nodes],
             "slots": spec.nproc, "host": socket.gethostname(), "address": self._address, "listen": self._door.port,
             "job": spec.run_id or spec.job, "version": __version__,
             "standing": None if self.standing is None else self.standing.to_dict(), **self._offer()}
        )  # fmt: skip

    def _status(self) -> Message:
        """What this agent tells others of itself."""
        meeting = self._meeting
        leads = isinstance(meeting, Host)
        has_started = isinstance(meeting, Host) and meeting.coordinator.has_started
        return {"id": self.id, "leads": leads, "has_started": has_started, "leader": self.place}

    def _admit(self, channel: Channel) -> None:
        assert isinstance(self._meeting, Host)
        self._meeting.admit(channel)

    def _deliver(self, meeting: Host | Guest, message: ToNode) -> None:
        """Take what the coordinator says, unless it is a former one."""
        if meeting is not self._meeting:
            return
        if message["do"] == "last call":
            self._loop.after(self._last_call(), lambda: self._call_is_over(meeting))
            return
        if message["do"] == "start" or message["do"] == "prepare":
            self._nodes = message["nodes"]
        if message["do"] == "start":
            self.standing = Standing.from_dict(message["standing"])
        elif message["do"] == "go":
            assert self.standing is not None
            self.standing = replace(self.standing, agreed=True, asked=self.standing.asked[-1:])
        self._deliver_further(message)

    def _last_call(self) -> float:
        """Seconds to wait for others; those that hear nobody any more must have stopped before it goes on without."""
        if self._others_stop_by is None:
            return self._spec.last_call
        return max(self._spec.last_call, self._others_stop_by - time.monotonic())

    def _call_is_over(self, meeting: Host | Guest) -> None:
        if meeting is self._meeting:
            self.send({"do": "called"})

    def send(self, message: ToCoordinator) -> None:
        """A message of this node to the coordinator."""
        if self._meeting is not None:
            self._meeting.send(message)

    def close(self, seconds: float) -> None:
        """Leave; what the others are to hear gets so many seconds."""
        if isinstance(self._meeting, Host):
            self._meeting.flush(seconds)
        for meeting in [*self._parted, *([] if self._meeting is None else [self._meeting])]:
            meeting.close()
        self._door.close()

    # -- when the coordinator is gone ----------------------------------------------------------------------------------

    def _host_is_gone(self, guest: Guest, is_dead: bool) -> None:
        if guest is not self._meeting:
            return
        if self._spec.least == self._spec.nodes or not self._nodes:
            why = "is gone" if is_dead else f"did not answer for {self._spec.silence:g} s"
            names = [node["host"] for node in self._nodes if node["id"] == self._leader_id] or self._spec.hosts[:1]
            name = "".join(f" ({name})" for name in names)
            self._deliver_further({"do": "alone", "why": f"node 0{name}, which coordinates the job, {why}"})
            return
        why = "the node that coordinated the job is gone" if is_dead else "the node that coordinates the job is silent"
        dead = [self._leader_id] if is_dead else []
        self._deliver_further({"do": "search", "why": why, "dead": dead, "heard": guest.heard})

    def search(self, dead: Sequence[str], heard: float | None, search_by: float) -> None:
        """Find the agent that coordinates the job now, or become it; all ranks here have been stopped.

        Comes back when the job goes on, or has ended here. An agent that refuses to be asked is dead. But only soon
        after all was well does that mean that it was in the last attempt to the end: later it may have gone on with
        others, and ended with them.

        Args:
            dead: agents that are known to be dead.
            heard: when the last coordinator said something last, if it is one of them.
            search_by: when to give up.
        """
        self._dead.update(dead)
        self._part()
        since = time.monotonic() if heard is None else heard
        self._proof_until = heard + self._spec.silence - CONNECT_SECONDS if dead and heard is not None else 0.0
        self._others_stop_by = since + self._spec.silence + STOP_SECONDS
        while not self._is_over():
            leader, place = self._next_leader()
            if self._has_led_on():
                break
            if leader == self.id:
                if self._meeting is None:
                    self._lead()
            elif place is not None:
                self._part()
                try:
                    self._follow(place, CONNECT_SECONDS)
                    if self._meeting is not None:
                        break
                except (OSError, ChannelClosed):
                    pass
            if self._has_led_on():
                break
            if time.monotonic() > search_by:
                self._fail(
                    f"this node has lost the others, and too few were found within {self._spec.join_timeout:g} s to go "
                    "on without them: they may go on elsewhere",
                    1,
                )
            self._loop.run_until(lambda: self._is_over() or self._has_led_on(), CONNECT_PAUSE)
        self._others_stop_by = None

    def _has_led_on(self) -> bool:
        """Whether the coordinator here has decided something."""
        return isinstance(self._meeting, Host) and self._meeting.coordinator.phase != GATHERING

    def _next_leader(self) -> tuple[str, tuple[str, int] | None]:
        """Who coordinates now, or should: the first that lives, in the order of the last attempt; and its place."""
        others = [node for node in self._nodes if node["id"] != self.id]
        survey = Survey(
            self._loop, [(n["id"], n["address"], n["listen"]) for n in others], self._token, CONNECT_SECONDS
        )
        if others:
            self._loop.run_until(lambda: survey.is_over or self._is_over())
        survey.close()
        living = {}
        for name, answer in survey.answers.items():
            if answer == "refused":
                if time.monotonic() > self._proof_until:
                    continue
                self._dead.add(name)
                if isinstance(self._meeting, Host):
                    self._meeting.heard_of_death(name)
            elif answer is not None and answer["id"] == name:
                living[name] = answer
        places = [(n["address"], n["listen"]) for n in self._nodes if n["id"] in living or n["id"] == self.id]
        for answer in living.values():
            if answer["leader"] is not None:
                address, port = answer["leader"]
                if answer["has_started"] or (address, port) not in places:
                    return answer["id"], (address, port)
        for node in self._nodes:
            if node["id"] == self.id:
                return self.id, None
            if node["id"] in living:
                return node["id"], (node["address"], node["listen"])
        return "", None

    def _part(self) -> None:
        """Leave whoever coordinates, or stop to do so; they know that this agent lives."""
        if self._meeting is not None:
            self._meeting.part()
            self._parted.append(self._meeting)
            self._meeting = None
            self._leader = None


def _is_here(address: str) -> bool:
    """Whether an address belongs to this machine: only then can it be bound."""
    try:
        candidates = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, where in candidates:
        with socket.socket(family, kind, protocol) as sock:
            try:
                sock.bind(where)
            except OSError:
                continue
            return True
    return False
