"""Decides for all nodes of a job: when an attempt starts, when it halts, how the job ends.

Pure state: messages in, messages out. `meeting` carries them.

    node → coordinator   {"do": "join", "node_rank", "nodes", "slots", "host", "address", "job", "main_port", "ports",
                          "version"}
                         {"do": "failed"}                            a rank failed here
                         {"do": "done"}                              all ranks here ended well
                         {"do": "preempted", "final"}                the ranks here have saved their state, to go on
                                                                     later; "final": not in this job
                         {"do": "stop", "signal"}                    somebody stops the job here
                         {"do": "daemon", "node_rank", "attempt", "command"}    of mpirun, to be passed on to that node
                         {"do": "stopped", "failures", "main_port", "ports"}   no rank of this attempt is left here
    coordinator → node   {"do": "refuse", "why"}
                         {"do": "start", "attempt", "node_rank", "nodes": [{"host", "address", "slots", "ports"}],
                          "main_address", "main_port", "job"}
                         {"do": "halt", "signal"}                    stop your ranks; signal 0 after a failure
                         {"do": "restart", "attempt", "restarts", "failure", "others"}    told before the next "start"
                         {"do": "finish", "state", "exit_code", "failure", "others"}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.contract import RESUME_CODE

from .channel import Message
from .failure import Failure, culprit, node_failure

GATHERING, RUNNING, HALTING, FINISHED = "gathering", "running", "halting", "finished"
Outbox = list[tuple[int, Message]]


@dataclass
class _Member:
    """What the coordinator knows of one node."""

    joined: Message
    node_rank: int = -1
    done: bool = False
    stopped: bool = False
    failures: list[Failure] = field(default_factory=list)


class Coordinator:
    """The state of a job over its nodes. `receive` and `lost` return (peer, message) pairs to be sent."""

    def __init__(self, nodes: int, max_restarts: int) -> None:
        self.nodes = nodes
        self.max_restarts = max_restarts
        self.phase = GATHERING
        self.attempt = 0
        self.restarts = 0  # after failures
        self.stop_signal = 0
        self.preempted = False
        self.final = False
        self.members: dict[int, _Member] = {}
        self._gone: list[Failure] = []

    @property
    def missing(self) -> int:
        """How many nodes have not joined."""
        return self.nodes - len(self.members)

    def receive(self, peer: int, message: Message) -> Outbox:
        """Take a message of a node; returns what is to be sent to whom."""
        what = message["do"]
        if what == "join":
            return self._join(peer, message)
        member = self.members.get(peer)
        if member is None or self.phase == FINISHED:
            return []
        if what == "done":
            member.done = True
            if self.phase == RUNNING and all(m.done for m in self.members.values()):
                return self._finish("SUCCEEDED", 0, [])
        elif what == "failed":
            return self._halt(0)
        elif what == "preempted":
            self.preempted, self.final = True, self.final or message["final"]
            return self._halt(0)
        elif what == "stop":
            self.stop_signal = message["signal"]
            return self._halt(self.stop_signal) if self.phase != HALTING else []
        elif what == "daemon" and self.phase == RUNNING:
            return [(to, message) for to, m in self.members.items() if m.node_rank == message["node_rank"]]
        elif what == "stopped" and self.phase == HALTING:
            member.stopped = True
            member.failures = [Failure.from_dict(f) for f in message["failures"]]
            member.joined.update(main_port=message["main_port"], ports=message["ports"])
            return self._decide()
        return []

    def lost(self, peer: int) -> Outbox:
        """A node's connection broke: its ranks are gone, the others stop."""
        member = self.members.pop(peer, None)
        if member is None or self.phase in (GATHERING, FINISHED):
            return []
        host = member.joined["host"]
        self._gone.append(node_failure(member.node_rank, host, f"node {member.node_rank} ({host}) is gone"))
        return self._decide() if self.phase == HALTING else self._halt(0)

    def _join(self, peer: int, message: Message) -> Outbox:
        why = self._refusal(message)
        if why:
            return [(peer, {"do": "refuse", "why": why})]
        self.members[peer] = _Member(message)
        return self._start() if not self.missing else []

    def _refusal(self, message: Message) -> str:
        if self.phase != GATHERING or not self.missing:
            return "the job has all its nodes already"
        if message["nodes"] != self.nodes:
            return f"this node was started with --nnodes {message['nodes']}, node 0 with --nnodes {self.nodes}"
        for member in self.members.values():
            other = member.joined
            if message["version"] != other["version"]:
                return f"this node has paceline {message['version']}, {other['host']} has {other['version']}"
            if message["node_rank"] is not None and message["node_rank"] == other["node_rank"]:
                return (
                    f"node rank {message['node_rank']} is taken by {other['host']}; give each node its own --node-rank"
                )
        return ""

    def _start(self) -> Outbox:
        """Number the nodes (those that asked for a number get it) and start the attempt."""
        if self.attempt == 0:
            asked = {m.joined["node_rank"] for m in self.members.values()}
            free = iter(sorted(set(range(self.nodes)) - asked))
            for _, member in sorted(self.members.items()):
                wanted = member.joined["node_rank"]
                member.node_rank = next(free) if wanted is None else wanted
        self.phase = RUNNING
        order = sorted(self.members.values(), key=lambda m: m.node_rank)
        nodes = [{key: m.joined[key] for key in ("host", "address", "slots", "ports")} for m in order]
        for member in order:
            member.done = member.stopped = False
            member.failures = []
        start: Message = {
            "do": "start",
            "attempt": self.attempt,
            "nodes": nodes,
            "main_address": order[0].joined["address"],
            "main_port": order[0].joined["main_port"],
            "job": order[0].joined["job"],
        }
        return [(peer, {**start, "node_rank": member.node_rank}) for peer, member in self.members.items()]

    def _halt(self, number: int) -> Outbox:
        if self.phase == GATHERING:
            return self._finish("STOPPED", 128 + number, [])
        if self.phase != RUNNING:
            return []
        self.phase = HALTING
        return self._to_all({"do": "halt", "signal": number})

    def _decide(self) -> Outbox:
        """Once no rank is left anywhere: again, or the end."""
        if not all(m.stopped for m in self.members.values()):
            return []
        failures = self._gone + [f for m in self.members.values() for f in m.failures]
        if self.stop_signal:
            return self._finish("STOPPED", 128 + self.stop_signal, [])
        if self.preempted and not failures:
            if self.final:
                return self._finish("STOPPED", RESUME_CODE, [])
        elif self._gone or self.restarts >= self.max_restarts:
            return self._finish("FAILED", culprit(failures).exit_code if failures else 1, failures)
        else:
            self.restarts += 1
        self.preempted = self.final = False
        self.attempt += 1
        return (
            self._to_all({"do": "restart", "attempt": self.attempt, "restarts": self.restarts, **_told(failures)})
            + self._start()
        )

    def _finish(self, state: str, exit_code: int, failures: list[Failure]) -> Outbox:
        self.phase = FINISHED
        return self._to_all({"do": "finish", "state": state, "exit_code": exit_code, **_told(failures)})

    def _to_all(self, message: Message) -> Outbox:
        return [(peer, message) for peer in self.members]


def _told(failures: list[Failure]) -> dict[str, Any]:
    """The culprit in full, the others by rank and what they said."""
    if not failures:
        return {"failure": None, "others": []}
    first = culprit(failures)
    others = [{"rank": f.rank, "node": f.node, "message": f.message} for f in failures if f is not first]
    return {"failure": first.to_dict(), "others": sorted(others, key=lambda o: (o["rank"] is None, o["rank"]))}
