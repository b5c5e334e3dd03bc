"""Decides for all nodes of a job: when an attempt starts, when it halts, who takes part, how the job ends.

Pure state: messages in, messages out. `meeting` carries them.

    node → coordinator   {"do": "join", "id", "node_rank", "nodes": [least, most], "slots", "host", "address", "listen",
                          "job", "main_port", "ports", "version", "standing"}
                         {"do": "prepared"}                          this newcomer could start its ranks at once
                         {"do": "ready"}                             agrees to the attempt, and waits for "go"
                         {"do": "failed"}                            a rank failed here
                         {"do": "done"}                              all ranks here ended well
                         {"do": "preempted", "final"}                the ranks here have saved their state, to go on
                                                                     later; "final": not in this job
                         {"do": "stop", "signal"}                    somebody stops the job here
                         {"do": "daemon", "node_rank", "attempt", "command"}    of mpirun, to be passed on to that node
                         {"do": "leave"}                             this node is to leave the job, which goes on
                         {"do": "stopped", "failures", "main_port", "ports"}   no rank of this attempt is left here
    of its own node      {"do": "called"}                            the time of a "last call" is over
                         {"do": "give up", "why"}                    those that are missing do not come
    coordinator → node   {"do": "refuse", "why"}
                         {"do": "prepare", "nodes"}                  the job runs: get ready to take part
                         {"do": "start", "attempt", "node_rank", "nodes": [{"id", "host", "address", "listen", "slots",
                          "ports"}], "main_address", "main_port", "job", "standing"}
                         {"do": "go"}                                all have agreed: start your ranks
                         {"do": "halt", "signal", "save", "grace"}   stop your ranks; signal 0 if nobody asked for it,
                                                                     "save" lets them save their state first
                         {"do": "restart", "attempt", "restarts", "failure", "others", "why", "nodes"}
                                                                     told before the next "start"
                         {"do": "wait", "why"}                       too few are left: others must come
                         {"do": "search", "why", "dead"}             this one may decide nothing any more
                         {"do": "finish", "state", "exit_code", "failure", "others"}
    to its own node      {"do": "last call"}                         send "called" after a moment

A job whose number of nodes may change is elastic: nodes come and go, and each change makes a new attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.contract import RESUME_CODE
from paceline.node.eventloop.channel import Message
from paceline.node.failure import Failure, culprit, node_failure

from .quorum import Membership, Standing

GATHERING, AGREEING, RUNNING, HALTING, FINISHED = "gathering", "agreeing", "running", "halting", "finished"
GONE_GRACE = 1.0  # seconds for the ranks of an attempt that has lost a node, and can do nothing any more
Outbox = list[tuple[int, Message]]


@dataclass
class _Member:
    """What the coordinator knows of one node."""

    joined: Message
    node_rank: int = -1
    prepared: bool = True
    takes_part: bool = False  # in the current attempt
    ready: bool = False
    done: bool = False
    stopped: bool = False
    wants_to_leave: bool = False
    leaves: bool = False
    failures: list[Failure] = field(default_factory=list)

    @property
    def id(self) -> str:
        return str(self.joined["id"])

    @property
    def name(self) -> str:
        return str(self.joined["host"])


class Coordinator:
    """The state of a job over its nodes. `receive` and `lost` return (peer, message) pairs to be sent.

    Attributes:
        least, most: how many nodes the job may have.
        expected: how many are on their way at first.
    """

    def __init__(self, least: int, most: int, max_restarts: int, expected: int | None = None) -> None:
        self.least = least
        self.most = most
        self.expected = most if expected is None else expected
        self.max_restarts = max_restarts
        self.phase = GATHERING
        self.attempt = 0  # the next one, or the one that runs
        self.restarts = 0  # after failures
        self.stop_signal = 0
        self.preempted = False
        self.final = False
        self.members: dict[int, _Member] = {}
        self.standing: Standing | None = None
        self.dead: set[str] = set()
        self.has_started = False
        self._is_calling = False
        self._gone: list[Failure] = []
        self._changes: list[str] = []  # of the membership, since the attempt began

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may come and go."""
        return self.least < self.most

    @property
    def missing(self) -> int:
        """How many nodes have not joined that the job needs."""
        return max(0, (self.least if self.is_elastic else self.most) - len(self.members))

    def receive(self, peer: int, message: Message) -> Outbox:
        """Take a message of a node; returns what is to be sent to whom."""
        what = message["do"]
        if what == "join":
            return self._join(peer, message)
        member = self.members.get(peer)
        if what == "called":
            return self._called()
        if what == "give up":
            return self._give_up(message["why"])
        if member is None or self.phase == FINISHED:
            return []
        if what == "prepared":
            member.prepared = True
            return self._call()
        if what == "ready":
            member.ready = True
            return self._agreed()
        if what == "done":
            member.done = True
            return self._check_done()
        if what == "failed":
            return self._halt()
        if what == "preempted":
            self.preempted, self.final = True, self.final or message["final"]
            return self._halt()
        if what == "stop":
            self.stop_signal = message["signal"]
            return self._halt(self.stop_signal) if self.phase != HALTING else []
        if what == "leave":
            return self._leave(member)
        if what == "stopped" and self.phase == HALTING:
            member.stopped = True
            member.failures = [Failure.from_dict(f) for f in message["failures"]]
            member.joined.update(main_port=message["main_port"], ports=message["ports"])
            return self._decide()
        return self._pass_on(message) if what == "daemon" else []

    def _pass_on(self, message: Message) -> Outbox:
        """What one node wants of another one."""
        if self.phase != RUNNING:
            return []
        return [(peer, message) for peer, m in self.members.items() if m.node_rank == message["node_rank"]]

    def lost(self, peer: int, is_dead: bool = True) -> Outbox:
        """A node's connection broke: its ranks are gone, or nobody hears of them any more, and the others stop."""
        member = self.members.pop(peer, None)
        if member is None or self.phase == FINISHED:
            return []
        if is_dead:
            self.dead.add(member.id)
        if self.phase == GATHERING:
            return self._disband("") if self.has_started and not self._may_go_on() else self._gathered()
        if not member.takes_part:
            return []
        if self.phase == RUNNING and member.done:
            return self._check_done()
        why = f"node {member.node_rank} ({member.name}) is gone" + ("" if is_dead else ": it does not answer")
        self._gone.append(node_failure(member.node_rank, member.name, why))
        self._changes.append(why)
        if self.phase != HALTING:
            return self._halt(grace=GONE_GRACE)
        return self._to_team({"do": "halt", "signal": 0, "save": False, "grace": GONE_GRACE}) + self._decide()

    def has_died(self, name: str) -> Outbox:
        """An agent is known to be dead, of which nothing was heard."""
        self.dead.add(name)
        return self._gathered() if self.phase == GATHERING else []

    # -- who takes part ------------------------------------------------------------------------------------------------

    def _join(self, peer: int, message: Message) -> Outbox:
        outbox: Outbox = []
        for other, member in list(self.members.items()):
            if member.id == message["id"]:  # it comes back before anybody has noticed that it was away
                outbox += self.lost(other, is_dead=False)
        why = self._refusal(message)
        if why:
            return [*outbox, (peer, {"do": "refuse", "why": why})]
        self._learn(message["standing"])
        gathering = self.phase == GATHERING
        self.members[peer] = _Member(message, prepared=gathering)
        if gathering:
            return outbox + self._gathered()
        return [*outbox, (peer, {"do": "prepare", "nodes": self._nodes()})]

    def _refusal(self, message: Message) -> str:
        if self.phase == FINISHED:
            return "the job has ended"
        if len(self.members) >= self.most or (self.phase != GATHERING and not self.is_elastic):
            return "the job has all its nodes already"
        if message["nodes"] != [self.least, self.most]:
            theirs, ours = (_range(*pair) for pair in (message["nodes"], (self.least, self.most)))
            return f"this node was started with --nnodes {theirs}, node 0 with --nnodes {ours}"
        for member in self.members.values():
            other = member.joined
            if message["version"] != other["version"]:
                return f"this node has paceline {message['version']}, {other['host']} has {other['version']}"
            asked = message["node_rank"]
            if self.standing is None and asked is not None and asked == other["node_rank"]:
                return f"node rank {asked} is taken by {other['host']}; give each node its own --node-rank"
        return ""

    def _learn(self, stored: dict[str, Any] | None) -> None:
        """A node that has lost its coordinator tells how far the job was."""
        if stored is None or self.has_started:
            return
        told, known = Standing.from_dict(stored), self.standing
        self.restarts = max(self.restarts, told.restarts)
        if known is None or (told.attempt, told.agreed) > (known.attempt, known.agreed):
            self.standing = told
            self.attempt = told.attempt + 1

    def _may_go_on(self) -> bool:
        """Whether no others can go on without these."""
        present = {member.id for member in self.members.values()}
        return self.standing is None or self.standing.may_go_on(present, self.dead)

    def _gathered(self) -> Outbox:
        """Start when all are there that can come; call for the last ones when there are enough."""
        if len(self.members) < self.least or not self._may_go_on():
            return []
        if self.standing is None:
            is_complete = len(self.members) >= self.expected
        else:
            is_complete = self.standing.members - self.dead <= {member.id for member in self.members.values()}
        return self._start() if is_complete or len(self.members) == self.most else self._call()

    def _call(self) -> Outbox:
        """Give others a moment to come too."""
        if self._is_calling or self.phase not in (GATHERING, RUNNING):
            return []
        self._is_calling = True
        return [(0, {"do": "last call"})]

    def _called(self) -> Outbox:
        self._is_calling = False
        if self.phase == GATHERING and len(self.members) >= self.least and self._may_go_on():
            return self._start()
        if self.phase == RUNNING and (newcomers := self._newcomers()):
            self._changes += [f"{member.name} joins" for member in newcomers]
            return self._halt(save=True)
        return []

    def _newcomers(self) -> list[_Member]:
        return [member for member in self.members.values() if member.prepared and not member.takes_part]

    def _leave(self, member: _Member) -> Outbox:
        """Let a node go, once all have saved their state, unless too few would stay that know how far the job is."""
        if not self.is_elastic or member.leaves:
            return []
        if self.phase in (GATHERING, AGREEING):
            member.wants_to_leave = True
            return []
        if not member.takes_part:
            return self._let_go([member])
        if len(self._staying()) <= self.least:
            return []
        member.leaves = True
        self._changes.append(_leaves(member))
        return self._halt(save=True)

    def _staying(self) -> list[_Member]:
        return [member for member in self._team() if not member.leaves]

    def _keep_enough(self) -> None:
        """Nobody leaves where too few would stay, now that others are gone."""
        if len(self._staying()) < self.least:
            for member in self._team():
                if member.leaves:
                    member.leaves = False
                    self._changes.remove(_leaves(member))

    def _let_go(self, leaving: list[_Member]) -> Outbox:
        """Those that leave hear that it is over for them; if this node is among them, others must coordinate."""
        outbox: Outbox = []
        for peer, member in list(self.members.items()):
            if member in leaving:
                del self.members[peer]
                self.dead.add(member.id)
                outbox.append((peer, {"do": "finish", "state": "STOPPED", "exit_code": 0, **_told([])}))
        if 0 not in self.members:
            outbox += self._disband("the node that coordinated the job has left it")
        return outbox

    # -- an attempt ----------------------------------------------------------------------------------------------------

    def _team(self) -> list[_Member]:
        return [member for member in self.members.values() if member.takes_part]

    def _nodes(self) -> list[Message]:
        """Those that take part, in the order of their node ranks."""
        order = sorted(self._team(), key=lambda m: m.node_rank)
        return [{key: m.joined[key] for key in ("id", "host", "address", "listen", "slots", "ports")} for m in order]

    def _number(self) -> None:
        """Number those that take part: first as they asked, later those that were there before come first."""
        free = iter(sorted(set(range(self.most)) - {m.joined["node_rank"] for m in self.members.values()}))
        prepared = [member for member in self.members.values() if member.prepared or member.takes_part]
        for _, member in sorted(self.members.items()):
            if member in prepared or len(prepared) < self.least:
                member.takes_part = True
                if not self.has_started and self.standing is None:
                    wanted = member.joined["node_rank"]
                    member.node_rank = next(free) if wanted is None else wanted
        rank_before = {
            peer: member.node_rank if member.node_rank >= 0 else self.most for peer, member in self.members.items()
        }
        order = sorted(self.members, key=lambda peer: (rank_before[peer], peer))
        for number, peer in enumerate(peer for peer in order if self.members[peer].takes_part):
            self.members[peer].node_rank = number

    def _start(self) -> Outbox:
        """Propose the attempt to all that take part; it begins when they have agreed."""
        self._number()
        self.phase, self.has_started = AGREEING, True
        self._changes.clear()
        order = sorted(self._team(), key=lambda m: m.node_rank)
        for member in order:
            member.ready = member.done = member.stopped = False
            member.failures = []
        proposed = Membership(tuple(m.id for m in order), self.members[0].id)
        before = self.standing.asked if self.standing is not None else ()
        told = Standing(self.attempt, self.restarts, False, (*before, proposed))
        self.standing = self.standing or told
        start: Message = {
            "do": "start",
            "attempt": self.attempt,
            "nodes": self._nodes(),
            "main_address": order[0].joined["address"],
            "main_port": order[0].joined["main_port"],
            "job": order[0].joined["job"],
            "standing": told.to_dict(),
        }
        return [
            (peer, {**start, "node_rank": member.node_rank})
            for peer, member in self.members.items()
            if member.takes_part
        ]

    def _agreed(self) -> Outbox:
        """Once all have agreed there is no way back to the members before."""
        if self.phase != AGREEING or not all(member.ready for member in self._team()):
            return []
        self.phase = RUNNING
        ids = tuple(member.id for member in sorted(self._team(), key=lambda m: m.node_rank))
        self.standing = Standing(self.attempt, self.restarts, True, (Membership(ids, self.members[0].id),))
        outbox = self._to_team({"do": "go"}) + (self._call() if self._newcomers() else [])
        for member in [member for member in self.members.values() if member.wants_to_leave]:
            member.wants_to_leave = False
            outbox += self._leave(member)
        return outbox

    def _check_done(self) -> Outbox:
        if self.phase == RUNNING and all(member.done for member in self._team()):
            return self._finish("SUCCEEDED", 0, [])
        return []

    def _halt(self, number: int = 0, save: bool = False, grace: float | None = None) -> Outbox:
        if self.phase == GATHERING:
            return self._finish("STOPPED", 128 + number, []) if number else []
        if self.phase not in (AGREEING, RUNNING):
            return []
        self.phase = HALTING
        return self._to_team({"do": "halt", "signal": number, "save": save, "grace": grace})

    def _decide(self) -> Outbox:
        """Once no rank is left anywhere: again, or the end."""
        team = self._team()
        if not all(member.stopped for member in team):
            return []
        failures = [failure for member in team for failure in member.failures]
        if self.is_elastic and self._gone:  # what fails because a node is gone does not count
            failures = [failure for failure in failures if not failure.symptom]
        else:
            failures += self._gone
        if self.stop_signal:
            return self._finish("STOPPED", 128 + self.stop_signal, [])
        if self.preempted and self.final and not failures:
            return self._finish("STOPPED", RESUME_CODE, [])
        if failures or not (self.preempted or self._changes):
            if (self._gone and not self.is_elastic) or self.restarts >= self.max_restarts:
                return self._finish("FAILED", culprit(failures).exit_code if failures else 1, failures)
            self.restarts += 1
        self._keep_enough()
        why = ", ".join(dict.fromkeys(self._changes))
        self._gone.clear()
        self.preempted = self.final = False
        self.attempt += 1
        self.phase = GATHERING
        outbox = self._let_go([member for member in team if member.leaves])
        if self.phase == FINISHED:
            return outbox
        if not self._may_go_on():
            return outbox + self._disband(why)
        if len(self.members) < self.least:
            return outbox + self._to_all({"do": "wait", "why": why, **_told(failures)})
        starts = self._start()
        told = {"attempt": self.attempt, "restarts": self.restarts, "why": why, "nodes": len(self._team())}
        return outbox + self._to_team({"do": "restart", **told, **_told(failures)}) + starts

    # -- the end -------------------------------------------------------------------------------------------------------

    def _disband(self, why: str) -> Outbox:
        """Decide nothing any more: too few are left, and others may go on elsewhere."""
        self.phase = FINISHED
        return self._to_all({"do": "search", "why": why, "dead": sorted(self.dead)})

    def _give_up(self, why: str) -> Outbox:
        if self.phase != GATHERING:
            return []
        own = self.members[0]
        return self._finish("FAILED", 1, [node_failure(max(own.node_rank, 0), own.name, why)])

    def _finish(self, state: str, exit_code: int, failures: list[Failure]) -> Outbox:
        self.phase = FINISHED
        return self._to_all({"do": "finish", "state": state, "exit_code": exit_code, **_told(failures)})

    def _to_all(self, message: Message) -> Outbox:
        return [(peer, message) for peer in self.members]

    def _to_team(self, message: Message) -> Outbox:
        return [(peer, message) for peer, member in self.members.items() if member.takes_part]


def _leaves(member: _Member) -> str:
    return f"{member.name} leaves"


def _range(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least}:{most}"


def _told(failures: list[Failure]) -> dict[str, Any]:
    """The culprit in full, the others by rank and what they said."""
    if not failures:
        return {"failure": None, "others": []}
    first = culprit(failures)
    others = [{"rank": f.rank, "node": f.node, "message": f.message} for f in failures if f is not first]
    return {"failure": first.to_dict(), "others": sorted(others, key=lambda o: (o["rank"] is None, o["rank"]))}
