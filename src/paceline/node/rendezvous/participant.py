"""This node among the others of its job: it leads, and so coordinates them, or follows the node that does."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline._version import __version__
from paceline.contract import TOKEN, handshake
from paceline.contract.values import join_address
from paceline.node.eventloop.channel import ChannelClosed
from paceline.node.machine.network import LOOPBACK, is_loopback
from paceline.node.signals import EXIT_REPLACED

from .coordinator import GATHERING, Coordinator
from .links import STOP_SECONDS, Leader, Link
from .quorum import Standing, agent_id
from .search import CONNECT_PAUSE, CONNECT_SECONDS, Peers, Search
from .silence import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from paceline.contract.records import Cause
    from paceline.node.eventloop.channel import Channel
    from paceline.node.eventloop.loop import Loop
    from paceline.node.journal.status import Agreement, NodeEntry
    from paceline.node.spec import NodeSpec

    from .handshake import Network
    from .messages import AgentStatus, Finish, Offer, Start, ToCoordinator, ToNode


class Participant:
    """How this node takes part in its job: as the leader, which has the coordinator, or as a follower.

    Attributes:
        id: identifies this agent.
        standing: what this node knows of the generations of the job.
        former: what the agent that was here before has agreed to last; it is dead.
    """

    def __init__(
        self,
        loop: Loop,
        spec: NodeSpec,
        network: Network,
        *,
        offer: Callable[[], Offer],
        deliver: Callable[[ToNode], None],
        fail: Callable[[str, Cause, int], None],
        is_over: Callable[[], bool],
        is_suspended: Callable[[], bool],
    ) -> None:
        """No other node knows of this one yet."""
        self.id = agent_id(spec.node_rank if spec.peers else None)
        self.standing: Standing | None = None
        self.former: Agreement | None = None
        self._loop = loop
        self._spec = spec
        self._network = network
        self._offer = offer
        self._deliver_to_agent = deliver
        self._fail = fail
        self._is_over, self._is_suspended = is_over, is_suspended
        secret = os.environ.get(TOKEN, "").encode()
        # A single node can make its own secret; several nodes share one only if they were given it.
        self._rank_secret = secret or (secrets.token_bytes(32) if spec.nodes == 1 else b"")
        self._address = spec.local_address or spec.main_address or LOOPBACK
        self._only = ""  # the address at which alone this agent listens
        self._listener = network.listener(self._status, self._admit)
        self._link: Leader | Link | None = None
        self._parted: list[Leader | Link] = []
        self._nodes: list[NodeEntry] = []  # of the last attempt, and of the one before until all have agreed
        self._leader: tuple[str, int] | None = None  # address of the coordinator
        self._leader_id = ""
        self._leads_others = False  # whether the leader runs an attempt in which this node takes no part
        self._leads_this = False  # whether it has started an attempt with this node, and does not only look for nodes
        self._dead: set[str] = set()
        self._others_stop_by: float | None = None  # during a search: when lost nodes have stopped their ranks
        self._none_goes_on_until = -math.inf  # in the last attempt without this node
        self._none_went_on = False  # without this node, before the search
        self.last_call_until: float | None = None  # there are enough nodes, and others may come until then
        self._news = 0  # messages of the coordinator to this agent

    @property
    def has_met(self) -> bool:
        """Whether another node, or the coordinator here, knows of this node."""
        return self._link is not None

    @property
    def coordinator_address(self) -> list[str | int] | None:
        """Address and port of the coordinator."""
        return None if self._leader is None else list(self._leader)

    @property
    def address(self) -> list[str | int] | None:
        """Address and port at which this agent listens for the others; None if it does not listen."""
        return [self._address, self._listener.port] if self._listener.port else None

    def others(self) -> list[str]:
        """Addresses of the other nodes of the attempt."""
        return [node["address"] for node in self._nodes if node["id"] != self.id]

    def rank_key(self, start: Start) -> str | None:
        """The key of the ranks of an attempt; None if the nodes share no secret."""
        if not self._rank_secret:
            return None
        return handshake.derive_key(self._rank_secret, "ranks", str(start["job"]), str(start["attempt"])).hex()

    @property
    def missing(self) -> str:
        """The nodes that have not joined the coordinator here: their names, or their number."""
        spec = self._spec
        assert isinstance(self._link, Leader)
        members = self._link.coordinator.members.values()
        there = {member.joined["node_rank"] for member in members}
        names = [name for rank, name in enumerate(spec.hosts) if rank not in there]
        return ", ".join(names) or str(self._link.coordinator.missing)

    # -- the first coordinator -----------------------------------------------------------------------------------------

    def meet(self, join_by: Callable[[], float], within: Callable[[], float]) -> None:
        """Join the coordinator: here if this is node 0, else over the network, with tries until `join_by()`.

        `within()` is the same as a number of seconds, for messages.
        """
        spec = self._spec
        if spec.nodes > 1 and not self._listen():
            return
        if spec.peers:
            self._meet_peers(join_by, within)
        elif self._is_first():
            self.lead()
            self._look_for_another_first(CONNECT_PAUSE)
        elif not self._is_over():
            assert spec.main_address is not None and spec.main_port is not None
            self._follow_first((spec.main_address, spec.main_port), join_by, within)

    def _meet_peers(self, join_by: Callable[[], float], within: Callable[[], float]) -> None:
        """Join the other nodes, which may have begun long ago; returns when the job goes on, or has ended here."""
        spec = self._spec
        assert spec.main_port is not None
        before, last_try = self._news, False
        peers = Peers(self._loop, spec.peers, spec.main_port, spec.node_rank or 0, self._network)
        while not self._is_over() and self._news == before:
            peers.ask(lambda: self._is_over() or self._news > before)
            if peers.have_ended and not self.leads:
                end: Finish = {"do": "finish", "state": "SUCCEEDED", "exit_code": 0, "failure": None, "others": []}
                self._deliver_to_agent(end)
                return
            address = peers.leader
            if address is not None and (peers.have_begun or not self.leads):
                self.part()
                with contextlib.suppress(OSError):
                    if self.follow(address, CONNECT_SECONDS)["leads"]:
                        return
            elif not self.leads and spec.node_rank == 0 and peers.may_begin(spec.least == spec.nodes):
                self.lead()
            if last_try and not self.leads and not self._is_over():
                code = 1 if spec.least == spec.nodes else EXIT_REPLACED  # the others may go on without this node
                self._fail(
                    f"cannot reach the other nodes of the job within {within():g} s: {peers.found}",
                    "nodes missing",
                    code,
                )
            if last_try:  # a leader reports the missing nodes
                return
            last_try = self._loop.now() > join_by()
            self._loop.run_until(lambda: self._is_over() or self._news > before, CONNECT_PAUSE)

    def _look_for_another_first(self, pause: float) -> None:
        """Join the node at the main address if that is another one: it calls itself node 0 too, and says so to both."""
        spec = self._spec
        if spec.node_rank != 0 or spec.peers or not self.leads or self.has_led_on or self._is_over():
            return
        assert spec.main_address is not None
        assert spec.main_port is not None
        main = (spec.main_address, spec.main_port)
        if self._network.is_here(spec.main_address):
            return
        with contextlib.suppress(OSError, ChannelClosed):  # not yet there, or behind it is this node itself
            channel, status = self._network.connect(main, CONNECT_PAUSE)
            channel.close()
            if status["leads"] and status["id"] != self.id:
                self.part()
                self.follow(main, CONNECT_SECONDS)
                return
        self._loop.after(pause, lambda: self._look_for_another_first(2 * pause))

    def _listen(self) -> bool:
        """Listen for other agents if that is needed; returns False, and fails, if it is needed and impossible."""
        spec = self._spec
        assert spec.main_port is not None
        is_ours = self._network.is_here(spec.main_address or "")
        is_first = not spec.joins and (spec.node_rank == 0 or (spec.node_rank is None and is_ours))
        if not is_first and spec.least == spec.nodes and not spec.peers:
            return True
        self._only = self._only_address(is_first)
        self._listener.close()  # it has met nobody before it was suspended
        try:
            wanted = spec.main_port if is_first or spec.peers or not is_ours else 0
            self._listener.open(wanted, self._only)
        except OSError as error:
            if spec.node_rank == 0:
                why = f"cannot listen on port {spec.main_port}: {error.strerror}; choose another --master-port"
                self._fail(why, "refused", 2)
                return False
            if spec.least < spec.nodes or spec.peers:
                self._listener.open(0, self._only)
        return True

    def _only_address(self, is_first: bool) -> str:
        """The only IP address at which other agents connect to this one; "" if they may use any of this machine's.

        A host name is no such address: other machines may resolve it to another one than this machine does.
        """
        spec = self._spec
        main, local = spec.main_address or "", spec.local_address or ""
        if is_loopback(main):  # all nodes are on this machine
            return LOOPBACK if main == "localhost" else main
        if spec.peers:  # which find each other by name
            return ""
        asked = {address for address in (main if is_first else "", local) if address}
        return next((address for address in asked if len(asked) == 1 and self._network.is_own_ip(address)), "")

    def _is_first(self) -> bool:
        """Whether this node is the first coordinator: node 0, or the first that listens at the main address."""
        spec = self._spec
        if spec.nodes == 1:
            return True
        if spec.joins:
            return False
        is_there = spec.node_rank is None and self._network.is_here(spec.main_address or "")
        return self._listener.port == spec.main_port and (spec.node_rank == 0 or is_there)

    def lead(self) -> None:
        """Coordinate from now on."""
        spec = self._spec
        coordinator = Coordinator(
            spec.least, spec.nodes, spec.max_restarts, spec.expected,
            replaces=bool(spec.peers), attempt=spec.first_attempt, restarts=spec.restarts,
            began=spec.began or time.time(),
        )  # fmt: skip
        coordinator.dead |= self._dead
        self._link = leader = Leader(
            self._loop, coordinator, lambda message: self._deliver(leader, message), spec.silence
        )
        self._leader, self._leader_id, self._leads_others = (self._address, self._listener.port), self.id, False
        self._join()

    def _follow_first(self, first: tuple[str, int], join_by: Callable[[], float], within: Callable[[], float]) -> None:
        """Follow the agent at this address, or the one that it names as the leader."""
        address = first
        while not self._is_over():
            remaining = join_by() - self._loop.now()
            try:
                status = self.follow(address, max(0.1, min(CONNECT_SECONDS, remaining)))
                if self._link is not None:
                    return
                if status["leader"] is not None:
                    address = (str(status["leader"][0]), int(status["leader"][1]))
                why = "another node coordinates the job"
            except PermissionError as error:
                self._fail(str(error), "refused", 2)
                return
            except (OSError, ChannelClosed) as error:
                why, address = str(error), first
            if remaining <= 0:
                spec = self._spec
                first_name = "".join(f" ({name})" for name in spec.hosts[:1])
                who = "the job" if spec.joins else f"node 0{first_name}"
                do = "check that host" if spec.hosts else "is `paceline run` started there, and the port open?"
                at = join_address(address[0], address[1])
                self._fail(f"cannot reach {who} at {at} within {within():g} s ({why}); {do}", "nodes missing", 1)
                return
            self._loop.run_until(self._is_over, CONNECT_PAUSE)

    def follow(self, address: tuple[str, int], timeout: float) -> AgentStatus:
        """Try once to follow an agent; returns its status: this node follows it now if that has "leads"."""
        begun = self._loop.now()
        channel, status = self._network.connect(address, timeout)
        if not status["leads"]:
            channel.close()
            return status
        own = channel.socket.getsockname()[0]
        self._link = link = Link(
            self._loop,
            channel,
            self._spec.silence,
            received=lambda message: self._deliver(link, message),
            lost=lambda is_dead, why: self._lose_leader(link, is_dead, why or "it ended the connection"),
            follows=True,
        )
        link.alive_at = begun  # its answers may have waited here since then, if this process was suspended
        self._leader, self._leader_id, self._leads_others = address, status["id"], status["has_started"]
        self._leads_this = False
        self._address = self._spec.local_address or self._only or own
        self._join()
        return status

    def _join(self) -> None:
        spec = self._spec
        self.send(
            {"do": "join", "id": self.id, "node_rank": spec.node_rank, "nodes": [spec.least, spec.nodes],
             "slots": spec.nproc, "host": self._network.host, "address": self._address, "listen": self._listener.port,
             "job": spec.run_id or spec.job, "version": __version__,
             "standing": None if self.standing is None else self.standing.to_dict(), "former": self.former,
             "suspended": self._is_suspended(), **self._offer()}
        )  # fmt: skip

    def _status(self) -> AgentStatus:
        has_started = isinstance(self._link, Leader) and self._link.coordinator.has_started
        return {
            "id": self.id, "leads": self.leads, "has_started": has_started, "leader": self.coordinator_address,
            "has_begun": self.standing is not None, "has_ended": False,
        }  # fmt: skip

    def _admit(self, channel: Channel) -> None:
        assert isinstance(self._link, Leader)
        self._link.admit(channel)

    def _deliver(self, link: Leader | Link, message: ToNode) -> None:
        """Handle a message of the coordinator, unless it is a former one."""
        if link is not self._link:
            return
        if message["do"] == "last call":
            seconds = self._last_call()
            self.last_call_until = until = self._loop.now() + seconds
            self._loop.after(seconds, lambda: self._end_last_call(link, until))
            return
        if message["do"] == "prepare":
            self._nodes = message["nodes"]
        elif message["do"] == "start":
            own = next(number for number, node in enumerate(message["nodes"]) if node["id"] == self.id)
            message = {**message, "node_rank": own}
            self._leads_others, self._leads_this = False, True
            self.standing = Standing.from_dict(message["standing"])
            before = self.standing.members - {node["id"] for node in message["nodes"]}  # they count until all agree
            self._nodes = [*message["nodes"], *(node for node in self._nodes if node["id"] in before)]
        elif message["do"] == "go":
            assert self.standing is not None
            self.standing = replace(self.standing, agreed=True, asked=self.standing.asked[-1:])
            members = self.standing.members
            self._nodes = [node for node in self._nodes if node["id"] in members]
        self._news += 1
        self._deliver_to_agent(message)

    def _last_call(self) -> float:
        """Seconds to wait for other nodes: lost nodes must have stopped their ranks before the job goes on."""
        if self._others_stop_by is None:
            return self._spec.last_call
        return max(self._spec.last_call, self._others_stop_by - self._loop.now())

    def _end_last_call(self, link: Leader | Link, until: float) -> None:
        if self.last_call_until == until:  # not that of a later coordinator
            self.last_call_until = None
        if link is self._link:
            self.send({"do": "called"})

    def send(self, message: ToCoordinator) -> None:
        """Send a message of this node to the coordinator."""
        if self._link is not None:
            self._link.send(message)

    def close(self, seconds: float) -> None:
        """Leave the job; messages that are still to be sent get so many seconds."""
        if isinstance(self._link, Leader):
            self._link.flush(seconds)
        for link in [*self._parted, *([] if self._link is None else [self._link])]:
            link.close()
        self._listener.close()

    # -- another coordinator -------------------------------------------------------------------------------------------

    def _lose_leader(self, link: Link, is_dead: bool, why: str) -> None:
        if link is not self._link:
            return
        if not self._goes_on():
            names = [node["host"] for node in self._nodes if node["id"] == self._leader_id] or self._spec.hosts[:1]
            name = "".join(f" ({name})" for name in names)
            gone = "is gone" if is_dead else f"is gone: {why}"
            self._deliver_to_agent({"do": "alone", "why": f"node 0{name}, which coordinates the job, {gone}"})
            return
        why = "the node that coordinated the job is gone" + ("" if is_dead else f": {why}")
        # One that went on with others may have ended well: it did not die in the last attempt of this node.
        dead = [self._leader_id] if is_dead and not self._leads_others else []
        self._deliver_to_agent({"do": "search", "why": why, "dead": dead})

    def _goes_on(self) -> bool:
        """Whether the job goes on without the node that coordinated it, which counts as a failure if it needs all."""
        spec, standing = self._spec, self.standing
        if not spec.peers:
            return spec.least < spec.nodes and bool(self._nodes)
        if standing is None or spec.least < spec.nodes:
            return True
        if standing.restarts >= spec.max_restarts:
            return False
        self.standing = replace(standing, restarts=standing.restarts + 1)
        return True

    def search(self, dead: Sequence[str], search_by: float) -> None:
        """Find the agent that coordinates the job now, or coordinate it here; all ranks here have been stopped.

        Returns when the job goes on, or has ended here.
        """
        self._dead.update(dead)
        last = self._link
        self.part()
        if self._spec.peers and not self._nodes:  # no attempt has begun here
            self._meet_peers(lambda: search_by, lambda: self._spec.join_timeout)
            return
        followed = last if isinstance(last, Link) else None
        since = self._loop.now() if followed is None else followed.last_seen
        self._others_stop_by = since + self._spec.silence + STOP_SECONDS
        # Others that do not hear of this node wait for so long before they go on without it.
        heard = followed.alive_at if followed is not None and self._leader_id in dead else -math.inf
        until, none_went_on = heard + STOP_SECONDS - CONNECT_SECONDS, self._loop.now() < heard + self._spec.silence
        if followed is not None and not self._leads_this:  # it searched as well, and others may have gone on before
            until, none_went_on = min(until, self._none_goes_on_until), none_went_on and self._none_went_on
        self._none_goes_on_until, self._none_went_on = until, none_went_on
        search = Search(self._loop, self, self._nodes, self._network, PATIENCE * self._spec.silence)
        if not search.run(search_by, self._is_over):
            why = (
                "this node was cut off from the others, and their agents have ended: the job has, or their machines "
                f"have rebooted; paceline get {self._spec.job} says how the job is"
                if search.is_in_vain
                else f"this node has lost the others, and too few were found within {self._spec.join_timeout:g} s to "
                "continue without them: they may continue elsewhere"
            )
            self.send({"do": "give up", "why": why})  # for those that have come here, too
            self._fail(why, "nodes missing", 1)
        self._others_stop_by = None

    @property
    def leads(self) -> bool:
        """Whether the coordinator runs here."""
        return isinstance(self._link, Leader)

    @property
    def has_led_on(self) -> bool:
        """Whether the coordinator here has made a decision."""
        leader = self._link
        return isinstance(leader, Leader) and (leader.coordinator.phase != GATHERING or leader.coordinator.is_suspended)

    def may_still_go_on(self, ended: Collection[str]) -> bool:
        """Whether the job could go on here if all agents came that have not ended; others may replace those."""
        if self._spec.peers or self.standing is None:
            return True
        dead = self._link.coordinator.dead if isinstance(self._link, Leader) else self._dead
        return self.standing.may_go_on(self.standing.members - set(ended), dead)

    def may_have_gone_on(self) -> bool:
        """Whether other agents may have gone on with the job by now, without this one."""
        if self._loop.now() <= self._none_goes_on_until:
            return False
        needed = self.standing is not None and not self.standing.others_may_go_on(self.id, self._dead)
        return not (needed and self._none_went_on)

    def agent_died(self, name: str) -> None:
        """Record that an agent is dead, and let the coordinator know if it is here."""
        self._dead.add(name)
        if isinstance(self._link, Leader):
            self._link.agent_died(name)

    def part(self) -> None:
        """Leave the coordinator, or stop to coordinate; the other side learns that this agent is alive."""
        if self._link is not None:
            self._link.part()
            self._parted.append(self._link)
            self._link = None
            self._leader = None
