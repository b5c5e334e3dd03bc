"""Decides for all nodes of a job: when an attempt starts, when it halts, which nodes take part, how the job ends.

Pure state: messages in, messages out. `links` sends and receives them, `messages` has their types.

    node → coordinator   {"do": "join", "id", "node_rank", "nodes": [least, most], "slots", "host", "address", "listen",
                          "job", "main_port", "ports", "version", "standing", "former"}
                         {"do": "prepared"}                          this newcomer could start its ranks at once
                         {"do": "ready"}                             agrees to the attempt, and waits for "go"
                         {"do": "failed"}                            a rank has failed here
                         {"do": "symptom"}                           all have, as it seems because of a failure on
                                                                     another node, which will report it
                         {"do": "done"}                              all ranks here have succeeded
                         {"do": "over"}                              the job has succeeded, whatever still runs
                         {"do": "preempted", "final"}                the ranks here have saved their state and ended, to
                                                                     go on later; "final": not in this job, and they may
                                                                     have ended without that
                         {"do": "stands", "after", "stands"}         where the ranks are, none of which goes on; or
                                                                     none: they go on
                         {"do": "stop", "signal"}                    this node was asked to stop the job
                         {"do": "daemon", "node_rank", "attempt", "command", "folders"}   start mpirun's daemon there
                         {"do": "leave"}                             this node is to leave the job, which goes on, or
                                                                     waits for another one in its place
                         {"do": "leave or stop", "signal"}           this node is to leave the job if it goes on, and
                                                                     to stop it otherwise
                         {"do": "stopped", "failures", "main_port", "ports"}   no rank of this attempt is left here
    of its own node      {"do": "called"}                            the time of a "last call" is over
                         {"do": "give up", "why"}                    the missing nodes have not joined
    coordinator → node   {"do": "refuse", "why"}
                         {"do": "prepare", "nodes"}                  the job runs: prepare to take part
                         {"do": "start", "attempt", "node_rank", "nodes": [{"id", "host", "address", "listen", "slots",
                          "ports"}], "main_address", "main_port", "job", "standing"}
                         {"do": "go"}                                all have agreed: start your ranks
                         {"do": "halt", "signal", "save", "grace", "gone"}   stop your ranks; signal 0 if none asked
                                                                     for it, "save" lets them save their state first,
                                                                     "gone" has the first loss of a node, if any
                         {"do": "hung", "hang"}                      some ranks keep the others waiting; or none do any
                                                                     more: "hang" is null
                         {"do": "restart", "attempt", "restarts", "failure", "others", "why", "nodes"}
                                                                     sent before the next "start"
                         {"do": "wait", "why", "failure", "others"}  too few nodes are left: others must join
                         {"do": "search", "why", "dead"}             this coordinator decides nothing any more
                         {"do": "finish", "state", "exit_code", "failure", "others"}
    to its own node      {"do": "last call"}                         send "called" after a moment

A job whose number of nodes may change is elastic: nodes join and leave, and each change makes a new attempt. Where
nodes are replaced, another node of the same rank comes for one that is lost or has left; the newer one of a rank stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.contract import RESUME_CODE
from paceline.node.failure import culprit, node_failure, outcome
from paceline.node.watching import hang

from .quorum import Membership, Standing, rank_in

if TYPE_CHECKING:
    from collections.abc import Collection

    from paceline.contract.records import Failure, FinalState
    from paceline.contract.stands import Stand
    from paceline.node.journal.status import NodeEntry

    from .messages import (
        Finish,
        Halt,
        Join,
        Restart,
        StandingRecord,
        Start,
        StartDaemon,
        Suspend,
        ToCoordinator,
        ToNode,
    )

    Outbox = list[tuple[int, ToNode]]

GATHERING, AGREEING, RUNNING, HALTING, FINISHED = "gathering", "agreeing", "running", "halting", "finished"
GONE_GRACE = 1.0  # seconds between SIGTERM and SIGKILL for the ranks of an attempt that has lost a node
SUSPENSION_GRACE = 86400.0  # likewise when the job is suspended: as long as its own grace, which each node knows


@dataclass
class _Member:
    """What the coordinator knows of one node."""

    joined: Join
    node_rank: int = -1
    prepared: bool = True
    is_idle: bool = False  # whether it has given its devices back, and has to be prepared again
    takes_part: bool = False  # in the current attempt
    done: bool = False
    wants_to_leave: bool = False
    leaves: bool = False
    or_stop: int = 0  # the signal that stops the job if this node has to leave and cannot
    failures: list[Failure] = field(default_factory=list)
    stands: list[Stand] = field(default_factory=list)  # where its ranks are, while none of them goes on
    is_news: bool = True  # whether it has said that since it was last looked for a hang

    @property
    def id(self) -> str:
        return str(self.joined["id"])

    @property
    def name(self) -> str:
        return str(self.joined["host"])

    @property
    def is_leaving(self) -> bool:
        return self.leaves or self.wants_to_leave


class Coordinator:
    """The state of a job over its nodes. `receive` and `lost` return (peer, message) pairs to send.

    Attributes:
        least, most: how many nodes the job may have.
        expected: how many nodes the first attempt waits for.
        replaces: whether another node comes for one that is lost.
        attempt: the current one, or the next.
        began: when the job's first coordinator began, as far as it is known.
        is_suspended: whether no attempt begins before the job is resumed.
    """

    def __init__(
        self, least: int, most: int, max_restarts: int, expected: int | None = None, *, replaces: bool = False,
        attempt: int = 0, restarts: int = 0, began: float = math.inf,
    ) -> None:  # fmt: skip
        self.least = least
        self.most = most
        self.expected = most if expected is None else expected
        self.replaces = replaces
        self.is_closed = expected is not None and not self.changes  # no other node comes for one that is lost
        self.max_restarts = max_restarts
        self.phase = GATHERING
        self.attempt = attempt
        self.restarts = restarts  # after failures
        self.began = began
        self.stop_signal = 0
        self.is_suspended = False
        self.preempted = False
        self.final = False
        self.members: dict[int, _Member] = {}
        self._peer_of: dict[str | int | None, int] = {}  # by its id, and by the node rank that it asked for
        self._awaited: set[int] = set()  # peers that take part and have not answered the last order, or how it went
        self._silent: set[int] = set()  # lost ones of them whose ranks may still run
        self._has_symptom = False
        self._saves = False  # the ranks were asked to save their state and end: nodes come or go, or it is suspended
        self._hung: object = None  # the hang that was said last, while it lasts
        self.standing: Standing | None = None
        self.dead: set[str] = set()
        self._leavers: dict[int, str] = {}  # nodes that were told to leave, and may not know it yet
        self._next: list[Failure] | None = None  # of the attempt that has ended, if another one waits for their end
        self.has_started = False
        self._in_last_call = False
        self._gone: list[Failure] = []
        self._changes: list[str] = []  # of the membership, since the attempt began

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may join and leave."""
        return self.least < self.most

    @property
    def changes(self) -> bool:
        """Whether the job goes on when a node is lost, at once or with another one in its place."""
        return self.is_elastic or self.replaces

    @property
    def missing(self) -> int:
        """How many of the nodes that the job needs have not joined."""
        return max(0, (self.least if self.is_elastic else self.most) - len(self.members))

    def receive(self, peer: int, message: ToCoordinator) -> Outbox:
        """Handle a message of a node; returns the messages to send."""
        if message["do"] == "join":
            return self._join(peer, message)
        if message["do"] == "called":
            return self._end_last_call()
        if message["do"] == "give up":
            return self._give_up(message["why"])
        member = self.members.get(peer)
        if member is None or self.phase == FINISHED:
            return []
        return self._handle(peer, member, message)

    def _handle(self, peer: int, member: _Member, message: ToCoordinator) -> Outbox:
        """Handle a message of a member of a job that has not ended."""
        if message["do"] == "prepared":
            was_idle, member.is_idle, member.prepared = member.is_idle, False, True
            return self._gathered(was_idle) if was_idle and self.phase == GATHERING else self._last_call()
        if message["do"] == "ready":
            return self._agreed() if self.phase == AGREEING and self._is_last(peer) else []
        if message["do"] == "done" or message["do"] == "symptom":
            member.done = message["do"] == "done"
            self._has_symptom = self._has_symptom or not member.done
            return self._end_attempt() if self.phase == RUNNING and self._is_last(peer) else []
        if message["do"] == "over":
            return self._finish("SUCCEEDED", 0, []) if self.phase == RUNNING else []
        if message["do"] == "failed":
            return self._halt()
        if message["do"] == "preempted":
            self.preempted, self.final = True, self.final or message["final"]
            return self._halt()
        if message["do"] == "stands":
            member.stands, member.is_news = message["stands"], True
            return self._look_for_hang(message["after"])
        if message["do"] == "stop":
            return self._stop(message["signal"])
        if message["do"] == "suspend":
            return self._suspend()
        if message["do"] == "resume":
            return self._resume()
        if message["do"] == "leave" or message["do"] == "leave or stop":
            member.or_stop = message["signal"] if message["do"] == "leave or stop" else member.or_stop
            return self._leave(member)
        if message["do"] == "stopped" and self.phase == HALTING:
            member.failures = message["failures"]
            member.joined.update({"main_port": message["main_port"], "ports": message["ports"]})
            return self._decide() if self._is_last(peer) else []
        return self._forward(message) if message["do"] == "daemon" else []

    def _await_all(self) -> None:
        self._awaited = {peer for peer, member in self.members.items() if member.takes_part} | self._silent

    def _is_last(self, peer: int) -> bool:
        """Whether all that take part have answered now."""
        self._awaited.discard(peer)
        return self._have_answered

    @property
    def _have_answered(self) -> bool:
        """Whether all have that take part; before another attempt, ranks must also have ended of which none answers."""
        goes_on = self.changes and not self.stop_signal
        return not (self._awaited if goes_on else self._awaited - self._silent)

    def _look_for_hang(self, after: float) -> Outbox:
        """Say, once, that ranks hang, when no rank of any node goes on; and that they do no more, when one does.

        It looks at the ranks of all nodes once each node has said anew where its ranks are, and not for each of them.
        """
        nodes = [member for member in self._participants() if not member.done]
        stand = all(member.stands for member in nodes)
        if self.phase != RUNNING or (stand and not all(member.is_news for member in nodes)):
            return []
        for member in nodes:
            member.is_news = not stand
        found = hang.find([it for member in nodes for it in member.stands], after) if stand else None
        said = found and (found["kind"], found["ranks"], found["collective"])
        if said == self._hung:
            return []
        self._hung = said
        return self._to_participants({"do": "hung", "hang": found})

    def _stop(self, number: int) -> Outbox:
        self.stop_signal = number
        # Ranks may be ending already; that the job is to stop, each node must know before its coordinator may die.
        return self._order_halt(number) if self.phase == HALTING else self._halt(number)

    def _forward(self, message: StartDaemon) -> Outbox:
        """Send another node what one node asks of it."""
        if self.phase != RUNNING:
            return []
        return [(peer, message) for peer, m in self.members.items() if m.node_rank == message["node_rank"]]

    def lost(self, peer: int, is_dead: bool = True, why: str = "it does not answer") -> Outbox:
        """Handle the loss of a node's connection: its ranks are gone or out of reach, so the others stop."""
        if peer in self._leavers:
            return self._left(self._leavers.pop(peer), is_dead)
        member = self.members.pop(peer, None)
        if member is None or self.phase == FINISHED:
            return []
        if is_dead:
            self.dead.add(member.id)
        if _joins(member) in self._changes:  # it is lost before the attempt begins that it was to take part in
            self._changes.append(f"{member.name} is gone")
        if self.phase == GATHERING and self.is_closed:
            rank = member.joined["node_rank"] or 0
            why = f"node {rank} ({member.name}) is gone" + ("" if is_dead else f": {why}")
            return self._finish("FAILED", 1, [node_failure(rank, member.name, "node lost", why)])
        if self.phase == GATHERING and self._next is not None:
            return []
        if self.phase == GATHERING:
            is_too_few = self.has_started and not self._may_go_on()
            return self._disband("") if is_too_few else self._gathered(member.is_idle)
        if not member.takes_part:
            return []
        if not is_dead and not member.done and (self.phase == RUNNING or peer in self._awaited):
            self._silent.add(peer)
        else:
            self._awaited.discard(peer)
        is_last = self._have_answered
        if self.phase == RUNNING and member.done:
            return self._end_attempt() if is_last else []
        why = f"node {member.node_rank} ({member.name}) is gone" + ("" if is_dead else f": {why}")
        self._gone.append(node_failure(member.node_rank, member.name, "node lost", why))
        self._changes.append(why)
        if self.phase != HALTING:
            return self._halt(grace=GONE_GRACE)
        halt = self._order_halt(grace=None if is_dead else GONE_GRACE)
        return halt + (self._decide() if is_last else [])

    def _left(self, name: str, is_dead: bool) -> Outbox:
        """Handle the end of a node that was told to leave; one that does not answer may still count itself in."""
        if is_dead:
            self.dead.add(name)
        return self._go_on() if self.phase == GATHERING else []

    def has_stopped(self, peer: int) -> Outbox:
        """Handle that the ranks of a node that was lost, but is not known to be dead, have certainly ended."""
        self._silent.discard(peer)
        is_last = peer in self._awaited and self._is_last(peer)
        return self._decide() if self.phase == HALTING and is_last else []

    def has_died(self, name: str) -> Outbox:
        """Handle the death of an agent that is not connected."""
        self.dead.add(name)
        return self._gathered() if self.phase == GATHERING else []

    # -- membership ----------------------------------------------------------------------------------------------------

    def _join(self, peer: int, message: Join) -> Outbox:
        outbox: Outbox = []
        other = self._peer_of.get(message["id"])
        if other in self.members and other > peer:  # the network has held this back; the node has connected again
            return []
        if other in self.members:  # it reconnects before its loss was noticed
            if self.phase == GATHERING:
                del self.members[other]
            else:
                outbox += self.lost(other, is_dead=False)
        if self.replaces and message["id"] not in self.dead:
            outbox += self._make_room(message)
        why = self._refusal(message)
        if why:
            outbox.append((peer, {"do": "refuse", "why": why}))
            gathers_first = self.phase == GATHERING and not self._has_begun
            own = self._of_rank(0) if message["node_rank"] == 0 and gathers_first else None
            if own is not None:  # it would wait for the other nodes in vain
                outbox += self._finish("FAILED", 2, [node_failure(0, own.name, "refused", why)])
            return outbox
        self._adopt(message["standing"])
        former = message["former"]
        if former is not None and self.standing is not None and former["attempt"] <= self.standing.attempt:
            self.dead.add(former["id"])  # it cannot have gone on with others
        gathering, is_idle = self.phase == GATHERING, message["suspended"]
        if is_idle and not self.has_started:  # so its last coordinator has said
            self.is_suspended = True
        self.members[peer] = _Member(message, prepared=gathering, is_idle=is_idle)
        self._peer_of.update(dict.fromkeys((message["id"], message["node_rank"]), peer))
        if gathering and self.is_suspended:
            return outbox + self._order_suspension([], [peer])
        if gathering and is_idle:  # it has not heard that the job is resumed
            return [*outbox, (peer, {"do": "resume"})]
        if gathering:
            return outbox + self._gathered()
        return [*outbox, (peer, {"do": "prepare", "nodes": self._nodes()})]

    def _make_room(self, message: Join) -> Outbox:
        """Let the node leave that another one replaces; one that is not connected is dead from now on."""
        rank = message["node_rank"]
        if self.phase == FINISHED or rank is None:
            return []
        outbox: Outbox = []
        for member in list(self.members.values()):
            if member.joined["node_rank"] == rank and not member.is_leaving:
                outbox += self._leave(member)
        present = {member.id for member in self.members.values()}
        known = set() if self.standing is None else self.standing.members
        self.dead |= {name for name in known - present if rank_in(name) == rank and name != message["id"]}
        return outbox

    def _refusal(self, message: Join) -> str:
        """Why a node may not join, or ""."""
        if self.phase == FINISHED:
            return "the job has ended"
        if self.replaces and message["id"] in self.dead:
            return "another node has taken its place"
        is_full = len(self.members) >= self.most and sum(not it.is_leaving for it in self.members.values()) >= self.most
        if is_full or (self.phase != GATHERING and not self.changes):
            return "the job has all its nodes already"
        if message["nodes"] != [self.least, self.most]:
            theirs, ours = (_range(*pair) for pair in (message["nodes"], (self.least, self.most)))
            return f"this node was started with --nnodes {theirs}, node 0 with --nnodes {ours}"
        for member in self.members.values():
            if message["version"] != member.joined["version"]:
                name, version = member.name, member.joined["version"]
                return f"this node has paceline {message['version']}, {name} has {version}"
            break  # all members have the same
        if (other := self._of_rank(message["node_rank"])) is not None:
            who = f"two machines call themselves node {message['node_rank']}, {other.name} and {message['host']}"
            return f"{who}; give each its own --node-rank"
        return ""

    def _of_rank(self, asked: int | None) -> _Member | None:
        """The node that has this rank already, in a job that has not begun."""
        other = self.members.get(self._peer_of[asked]) if asked is not None and asked in self._peer_of else None
        return other if self.standing is None and other is not None and not other.is_leaving else None

    def _adopt(self, stored: StandingRecord | None) -> None:
        """Adopt the standing of a node that has lost its coordinator, if it is the newest one."""
        if stored is None:
            return
        theirs, ours = Standing.from_dict(stored), self.standing
        if (
            self.has_started
        ):  # others may have gone on meanwhile, with an attempt that this coordinator has not proposed
            if ours is not None and theirs.attempt > ours.attempt and theirs.asked[-1].leader != self.members[0].id:
                self.standing = theirs
            return
        self.restarts = max(self.restarts, theirs.restarts)
        self.began = min(self.began, theirs.began)
        if ours is None or (theirs.attempt, theirs.agreed) > (ours.attempt, ours.agreed):
            self.standing = theirs
            self.attempt = theirs.attempt + 1

    def _may_go_on(self, present: Collection[str] | None = None, dead: Collection[str] | None = None) -> bool:
        """Whether the members, or these nodes, are a quorum: no other nodes can go on without them."""
        if self.standing is None or (self.replaces and not self.is_elastic):  # an attempt needs one of every rank
            return True
        there = {member.id for member in self.members.values()} if present is None else present
        return self.standing.may_go_on(there, self.dead if dead is None else dead)

    def _gathered(self, was_idle: bool = False) -> Outbox:
        """Start if no other nodes can come; begin a last call if there are enough.

        When the last node that `was_idle` is prepared again, all wait for others in place of those that are gone since.
        """
        if self._waits:
            return []
        if len(self.members) < self.least or not self._may_go_on():
            return self._await_others() if was_idle and self.standing is not None else []
        if self.standing is None:
            is_complete = len(self.members) >= self.expected
        else:
            is_complete = self.standing.members - self.dead <= {member.id for member in self.members.values()}
        return self._start() if is_complete or len(self.members) == self.most else self._last_call()

    @property
    def _waits(self) -> bool:
        """Whether no attempt may begin, however many nodes there are."""
        return self._next is not None or self.is_suspended or any(it.is_idle for it in self.members.values())

    def _last_call(self) -> Outbox:
        """Give other nodes a moment to join too."""
        if self._in_last_call or self.phase not in (GATHERING, RUNNING):
            return []
        self._in_last_call = True
        return [(0, {"do": "last call"})]

    def _end_last_call(self) -> Outbox:
        self._in_last_call = False
        if self.phase == GATHERING and not self._waits and len(self.members) >= self.least and self._may_go_on():
            return self._start()
        if self.phase == RUNNING and (newcomers := self._newcomers()):
            self._changes += [_joins(member) for member in newcomers]
            return self._halt(save=True)
        return []

    @property
    def _has_begun(self) -> bool:
        """Whether all that take part in this attempt have begun, so that each of them knows the job's state."""
        return self.standing is not None and self.standing.agreed and self.standing.attempt == self.attempt

    def _newcomers(self) -> list[_Member]:
        return [member for member in self.members.values() if member.prepared and not member.takes_part]

    def _leave(self, member: _Member) -> Outbox:
        """Let a node leave, once all have saved their state, unless too few would stay that know the job's state.

        One that is replaced leaves in any case.
        """
        if not self.changes or member.leaves:
            return []
        if self.phase == GATHERING and self.replaces:
            return self._dismiss([member])
        if self.phase in (GATHERING, AGREEING) or not self._has_begun:
            member.wants_to_leave = True
            return []
        if not member.takes_part:
            self._changes += [_leaves(member)] if _joins(member) in self._changes else []
            return self._dismiss([member])
        if not self.replaces and len(self._staying()) <= self.least:
            return self._stop(member.or_stop) if member.or_stop else []
        member.leaves = True
        self._changes.append(_leaves(member))
        return self._halt(save=True)

    def _staying(self) -> list[_Member]:
        return [member for member in self._participants() if not member.leaves]

    def _choose_leaving(self) -> None:
        """Let no node leave if too few would stay, now that others are gone, but in any case one that is replaced."""
        too_few = not self.replaces and len(self._staying()) < self.least
        for member in self._participants():
            if member.leaves and too_few:
                member.leaves = False
                self._changes.remove(_leaves(member))
            elif member.wants_to_leave and self.replaces:
                member.leaves = True
                self._changes.append(_leaves(member))

    def _dismiss(self, leaving: list[_Member]) -> Outbox:
        """End the job for nodes that leave; if this node is among them, another one must coordinate the rest."""
        outbox: Outbox = []
        for peer, member in list(self.members.items()):
            if member in leaving:
                del self.members[peer]
                if peer == 0 or not self.is_elastic:  # it decides nothing any more, here or elsewhere
                    self.dead.add(member.id)
                elif member.takes_part:
                    self._leavers[peer] = member.id
                outbox.append((peer, _finish("STOPPED", 0, [])))
        if 0 not in self.members:
            outbox += self._disband("the node that coordinated the job has left it")
        return outbox

    # -- an attempt ----------------------------------------------------------------------------------------------------

    def _participants(self) -> list[_Member]:
        return [member for member in self.members.values() if member.takes_part]

    def _nodes(self) -> list[NodeEntry]:
        """The nodes that take part, by node rank."""
        order = sorted(self._participants(), key=lambda m: m.node_rank)
        return [
            {"id": m.joined["id"], "host": m.joined["host"], "address": m.joined["address"],
             "listen": m.joined["listen"], "slots": m.joined["slots"], "ports": m.joined["ports"]} for m in order
        ]  # fmt: skip

    def _number(self) -> None:
        """Number the nodes that take part: at first as they asked, later with the former participants first."""
        free = iter(sorted(set(range(self.most)) - {m.joined["node_rank"] for m in self.members.values()}))
        too_few = sum(member.prepared or member.takes_part for member in self.members.values()) < self.least
        for _, member in sorted(self.members.items()):
            if member.prepared or member.takes_part or too_few:
                member.takes_part = True
                if not self.has_started and self.standing is None:
                    wanted = member.joined["node_rank"]
                    member.node_rank = next(free) if wanted is None else wanted
        order = sorted(self.members, key=lambda peer: (self._rank_before(self.members[peer]), peer))
        for number, peer in enumerate(peer for peer in order if self.members[peer].takes_part):
            self.members[peer].node_rank = number

    def _rank_before(self, member: _Member) -> int:
        """Where a node comes among the others: where it was, or where it asked to be if nodes are replaced."""
        asked = member.joined["node_rank"]
        if self.replaces and asked is not None:
            return asked
        return member.node_rank if member.node_rank >= 0 else self.most

    def _start(self) -> Outbox:
        """Propose the attempt to all that take part; it starts when all have agreed."""
        self._number()
        self.phase, self.has_started = AGREEING, True
        self._changes.clear()
        order = sorted(self._participants(), key=lambda m: m.node_rank)
        for member in order:
            member.done = False
            member.failures, member.stands = [], []
        self._await_all()
        self._hung, self._has_symptom = None, False
        proposed = Membership(tuple(m.id for m in order), self.members[0].id)
        before = self.standing.asked if self.standing is not None else ()  # other nodes do not know all that are dead
        asked = (*(membership.without(self.dead) for membership in before), proposed)
        standing = Standing(self.attempt, self.restarts, False, asked, self.began)
        self.standing = self.standing or standing
        start: Start = {
            "do": "start",
            "attempt": self.attempt,
            "node_rank": -1,  # each node finds itself among the nodes: the message is the same for all
            "nodes": self._nodes(),
            "main_address": order[0].joined["address"],
            "main_port": order[0].joined["main_port"],
            "job": order[0].joined["job"],
            "standing": standing.to_dict(),
        }
        return self._to_participants(start)

    def _agreed(self) -> Outbox:
        """Start the ranks, as all have agreed: from now on the former members do not count."""
        self.phase = RUNNING
        self._await_all()
        ids = tuple(member.id for member in sorted(self._participants(), key=lambda m: m.node_rank))
        asked = (Membership(ids, self.members[0].id),)
        self.standing = Standing(self.attempt, self.restarts, True, asked, self.began)
        outbox = self._to_participants({"do": "go"}) + (self._last_call() if self._newcomers() else [])
        for member in [member for member in self.members.values() if member.wants_to_leave]:
            member.wants_to_leave = False
            outbox += self._leave(member)
        return outbox

    def _end_attempt(self) -> Outbox:
        """No rank is left anywhere."""
        return self._halt() if self._has_symptom else self._finish("SUCCEEDED", 0, [])

    def _halt(self, number: int = 0, save: bool = False, grace: float | None = None) -> Outbox:
        if self.phase == GATHERING:
            return self._finish("STOPPED", 128 + number, []) if number else []
        if self.phase not in (AGREEING, RUNNING):
            return []
        self.phase, self._saves = HALTING, save or self.is_suspended
        self._await_all()
        return self._order_halt(number, save, grace)

    def _order_halt(self, number: int = 0, save: bool = False, grace: float | None = None) -> Outbox:
        halt: Halt = {"do": "halt", "signal": number, "save": save, "grace": grace, "gone": self._gone[:1]}
        return self._to_participants(halt)

    def _decide(self) -> Outbox:
        """No rank is left on any node: start another attempt, or end the job."""
        participants = self._participants()
        failures = [failure for member in participants for failure in member.failures]
        if (self.changes and self._gone) or self._saves:  # failures that others have caused by ending do not count
            failures = [failure for failure in failures if not failure["symptom"]]
        if not self.is_elastic:  # such a loss itself does, if the job needs all nodes
            failures += self._gone
        if self.stop_signal:
            return self._finish("STOPPED", 128 + self.stop_signal, [])
        if self.preempted and self.final and not failures:
            return self._finish("STOPPED", RESUME_CODE, [])
        if failures or not (self.preempted or self._changes):
            gives_way = self.final and bool(failures) and culprit(failures)["signal"] == "SIGUSR2"
            if (self._gone and not self.changes) or self.restarts >= self.max_restarts or gives_way:
                return self._finish("FAILED", culprit(failures)["exit_code"] if failures else 1, failures)
            self.restarts += 1
        self._choose_leaving()
        if stops := [member.or_stop for member in participants if member.or_stop and not member.is_leaving]:
            return self._finish("STOPPED", 128 + stops[0], [])
        self._gone.clear()
        self.preempted = self.final = False
        self.attempt = max(self.attempt, self.standing.attempt if self.standing is not None else 0) + 1
        self.phase = GATHERING
        self._next = failures
        outbox = self._dismiss([member for member in participants if member.leaves and member is not self.members[0]])
        return outbox + self._go_on()

    def _go_on(self) -> Outbox:
        """Start another attempt, once those that stay need none of those that leave.

        A node that was told to leave may not know it yet, and go on with others. So it counts until it has ended.
        """
        own = self.members[0]
        staying = {member.id for member in self.members.values() if member is not own or not own.leaves}
        may = self._may_go_on(staying, self.dead | ({own.id} if own.leaves else set()))
        if self._next is None or (self._leavers and not may):
            return []
        why = ", ".join(dict.fromkeys(self._changes))
        failures, self._next = self._next, None
        if own.leaves:
            return self._dismiss([own])
        if not may:
            return self._disband(why)
        if self.is_suspended:
            return self._order_suspension(failures, list(self.members))
        if len(self.members) < self.least:
            return self._to_all({"do": "wait", "why": why, **outcome(failures)})
        starts = self._start()
        restart: Restart = {
            "do": "restart", "attempt": self.attempt, "restarts": self.restarts, "why": why,
            "nodes": len(self._participants()), **outcome(failures),
        }  # fmt: skip
        return self._to_participants(restart) + starts

    # -- suspended -----------------------------------------------------------------------------------------------------

    def _suspend(self) -> Outbox:
        """Have all nodes save their state and give their devices back; the job goes on when it is resumed."""
        if self.is_suspended or self.stop_signal:
            return []
        self.is_suspended = True
        if self.phase == GATHERING:
            return self._order_suspension([], list(self.members)) if self._next is None else []
        self._changes.append("it was suspended")  # which is no failure
        return self._halt(grace=SUSPENSION_GRACE)

    def _order_suspension(self, failures: list[Failure], peers: list[int]) -> Outbox:
        for peer in peers:
            self.members[peer].is_idle = True
        order: Suspend = {
            "do": "suspend", "attempt": self.attempt, "restarts": self.restarts, **outcome(failures)
        }  # fmt: skip
        return [(peer, order) for peer in peers]

    def _resume(self) -> Outbox:
        """Have all nodes prepare for the next attempt, which starts when they are."""
        if not self.is_suspended:
            return []
        self.is_suspended = False
        is_idle = self.phase == GATHERING and self._next is None
        return self._to_all({"do": "resume"}) if is_idle else []

    def _await_others(self) -> Outbox:
        """Wait for other nodes in place of those that are gone since the job was suspended."""
        if not self._may_go_on():
            return self._disband("nodes are gone since it was suspended")
        why = f"{self.missing} of its nodes are gone since it was suspended"
        return self._to_all({"do": "wait", "why": why, **outcome([])})

    # -- the end -------------------------------------------------------------------------------------------------------

    def _disband(self, why: str) -> Outbox:
        """Decide nothing any more: too few nodes are left, and others may go on elsewhere."""
        self.phase = FINISHED
        return self._to_all({"do": "search", "why": why, "dead": sorted(self.dead)})

    def _give_up(self, why: str) -> Outbox:
        if self.phase != GATHERING:
            return []
        own = self.members[0]
        return self._finish("FAILED", 1, [node_failure(max(own.node_rank, 0), own.name, "nodes missing", why)])

    def _finish(self, state: FinalState, exit_code: int, failures: list[Failure]) -> Outbox:
        self.phase = FINISHED
        return self._to_all(_finish(state, exit_code, failures))

    def _to_all(self, message: ToNode) -> Outbox:
        return [(peer, message) for peer in self.members]

    def _to_participants(self, message: ToNode) -> Outbox:
        return [(peer, message) for peer, member in self.members.items() if member.takes_part]


def _joins(member: _Member) -> str:
    return f"{member.name} joins"


def _leaves(member: _Member) -> str:
    return f"{member.name} leaves"


def _range(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least}:{most}"


def _finish(state: FinalState, exit_code: int, failures: list[Failure]) -> Finish:
    return {"do": "finish", "state": state, "exit_code": exit_code, **outcome(failures)}
