"""Decides what an agent does when something happens: (state, event, time) → (state, actions). Pure.

It has no clock, files, sockets or processes: `agent` brings the events, and carries the actions out; what is recorded
is among them. While the agent waits for something else than the next message (its `phase`), messages of the coordinator
and changes of the ranks wait in `inbox`; signals and the like never do. `_PHASES` says what each phase waits for, and
what follows, also at its deadline; `_REACHED` what happens at the other deadlines. A deadline is reached once.

    claiming → held → meeting → open ⇄ order | saved | cause | elsewhere                 how the attempt has ended here
                                open ⇄ save → programs → terminate → kill → sweep → stopped     its ranks are stopped
                                open ⇄ searching                                         for another coordinator
                                open → (stop what is left) → closed
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from paceline.node.failure import TIMED_OUT, node_failure
from paceline.node.journal.records import until_resumed
from paceline.node.lifeline import ALL_STARTED, CLIENT_LOST, DOUBT_SECONDS, IN_DOUBT, KEPT, TOGETHER
from paceline.node.rendezvous.coordinator import GONE_GRACE
from paceline.node.rendezvous.silence import PATIENCE
from paceline.node.signals import EXIT_REPLACED, LEAVE, PASSED_ON, RESUME, SUSPEND

from .attempt import Attempt
from .decision import ANSWER_SECONDS
from .state import STOPPING

if TYPE_CHECKING:
    from paceline.node.journal.records import Record, SuspendedRecord
    from paceline.node.journal.status import Status
    from paceline.node.rendezvous.messages import (
        Alone,
        Finish,
        Halt,
        Hung,
        Refuse,
        Restart,
        Search,
        Start,
        Suspend,
        ToCoordinator,
        ToNode,
    )

    from .decision import View
    from .messages import Action, Event, Granted, Queued, Signal, Stalled, Word
    from .state import State

AFTER_LAST_CALL = 1.0  # seconds from the end of a last call until the start is there


def decide(state: State, event: Event, view: View, now: float) -> tuple[State, list[Action]]:
    """What an agent does because of an event.

    When it has carried the actions out, "go on" follows: they may have changed what is in view.
    """
    step = _Step(state, view, now)
    if state.phase != "closed":
        step.take(event)
        step.progress()
    return step.state, step.actions


class _Step(Attempt):
    """One decision."""

    # -- events --------------------------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """Act on an event."""
        on = event["on"]
        if event["on"] == "message":
            self.set(inbox=(*self.state.inbox, event["message"]))
            self.hurry(event["message"])
        elif on == "ranks changed":
            self.notice_start()
            self.set(inbox=(*self.state.inbox, None))
        elif on == "time":
            self.reach()
        elif on == "go on":
            if self.state.may_go_on:
                self.act_on_next()
        elif on == "close":
            self.close()
        elif event["on"] == "broken":
            self.enter("open")
            self.fail(event["why"], event["cause"], event["exit_code"])
        elif self.state.finish is None or on == "signal":
            _EVENTS[on](self, event)

    def progress(self) -> None:
        """Leave the phase if what it waits for is there. What actions change is seen only when they are carried out."""
        phase = _PHASES.get(self.state.phase)
        if not self.actions and phase is not None and phase.is_over(self):
            phase.then(self)

    def reach(self) -> None:
        """Act on the deadlines that are reached, the earliest first."""
        for at, name in sorted((at, name) for name, at in self.state.counting.items()):
            if at <= self.now and name in self.state.counting:
                self.disarm(name)
                (_PHASES[name].then if name in _PHASES else _REACHED[name])(self)

    def act_on_next(self) -> None:
        """Act on the message that waits longest."""
        message, *rest = self.state.inbox
        self.set(inbox=tuple(rest))
        if message is None:
            self.check_ranks()
        elif message["do"] in _MESSAGES:
            _MESSAGES[message["do"]](self, message)
        self.await_answer()

    # -- the beginning -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Queue for devices if the job asks for some."""
        if self.spec.request is None:
            self.warm_up()
        else:
            self.enter("claiming")
            self.do({"do": "claim"})

    def queue(self, event: Queued) -> None:
        """The job waits for devices."""
        if self.state.is_suspended:  # it does no more
            return
        waiting = event["waiting"]
        queued: Record = {
            "event": "queued", "need": waiting["need"], "ahead": waiting["ahead"], "problem": waiting["problem"]
        }  # fmt: skip
        self.write(*([] if self.status["waiting"] else [queued]), waiting=waiting)

    def grant(self, event: Granted) -> None:
        """It has them."""
        if self.state.is_suspended:  # it has given them back
            return
        granted: Record = {"event": "granted", "devices": event["devices"]}
        self.write(granted, state="STARTING", waiting=None, devices=event["devices"])
        if self.others.has_met:
            self.prepare_again()
        else:
            self.warm_up()

    def warm_up(self) -> None:
        """Start the fork server."""
        self.do({"do": "warm up"})
        # A node that joins a running job is no part of it until its client keeps it: then it can still end alone.
        self.enter("held")

    def meet(self) -> None:
        """Find the other nodes."""
        self.enter("meeting")
        self.arm("join", self.state.join_within)
        self.do({"do": "meet"})

    def met(self) -> None:
        """A coordinator is found, or none; wait for its messages."""
        if self.state.phase not in ("meeting", "searching"):  # it was suspended meanwhile
            return
        if not self.others.leads:  # the coordinator decides how long it waits, and which nodes are missing
            self.disarm("join")
        self.enter("open")
        if self.state.is_to_be_suspended:
            self.set(is_to_be_suspended=False)
            self.send({"do": "suspend"})

    # -- messages of the coordinator -----------------------------------------------------------------------------------

    def agree(self, start: Start) -> None:
        """Agree to an attempt."""
        self.set(start=start, has_met_all=True)
        self.disarm("join")
        self.send({"do": "ready"})

    def go(self) -> None:
        """All have agreed."""
        if self.state.start is None:
            return
        self.do({"do": "launch", "start": self.state.start})
        self.disarm("answer")
        self.set(start=None, hung="", gone=(), reported=False, halted=False, is_newcomer=False, waited=frozenset())
        if self.state.has_no_client:  # another node may coordinate now
            self.lose_client()

    def prepare(self) -> None:
        """This node is to take part in the next attempt: a newcomer once the ranks of others have saved their state."""
        self.disarm("join")
        self.do({"do": "warm up"})
        self.set(is_newcomer=True, inbox=(None, *self.state.inbox))

    def restart(self, message: Restart) -> None:
        """Another attempt follows."""
        attempt, restarts, nodes = message["attempt"], message["restarts"], message["nodes"]
        restarting: Record = {
            "event": "restarting", "attempt": attempt, "restarts": restarts, "nodes": nodes, "why": message["why"],
            "failure": message["failure"], "others": message["others"],
        }  # fmt: skip
        self.write(restarting, state="RESTARTING", attempt=attempt, restarts=restarts, nodes=nodes)

    def suspend(self, message: Suspend) -> None:
        """No rank is left."""
        if "limit" in self.state.deadlines:
            self.set(limit_left=max(self.state.deadlines["limit"] - self.now, 0.0))
        self.rest({
            "event": "suspended", "attempt": message["attempt"], "restarts": message["restarts"],
            "failure": message["failure"], "others": message["others"],
        })  # fmt: skip

    def rest(self, suspended: SuspendedRecord) -> None:
        """Give back the devices and the memory, or leave the queue."""
        was_suspended = self.state.is_suspended  # and has searched for another coordinator since
        self.disarm("join", "limit")
        self.enter("open")
        self.set(is_suspended=True, is_to_be_suspended=False, is_newcomer=False)
        self.do({"do": "end server"})
        self.do({"do": "release"})
        changes: Status = {
            "state": "SUSPENDED", "attempt": suspended["attempt"], "restarts": suspended["restarts"],
            "waiting": {"problem": until_resumed(self.spec.job)},
        }  # fmt: skip
        if self.spec.request is not None:
            changes["devices"] = []
        self.write(*([] if was_suspended else [suspended]), **changes)

    def resume(self) -> None:
        """Get devices again, and start the fork server."""
        if not self.state.is_suspended:
            return
        self.set(is_suspended=False)
        is_new = self.status["start"] is None
        self.write(
            {"event": "resuming", "attempt": self.status["attempt"]}, waiting=None,
            state="RESTARTING" if not is_new else "PENDING" if self.spec.request else "STARTING",
        )  # fmt: skip
        if self.spec.request is not None:
            if not self.others.has_met:
                self.enter("claiming")
            self.do({"do": "claim"})
        else:
            self.prepare_again()

    def prepare_again(self) -> None:
        """Prepare for the next attempt; one that has never begun may still wait for other nodes."""
        self.prepare()
        if self.others.leads and not self.state.has_met_all:
            self.arm("join", self.state.join_within)

    def wait_for_others(self, why: str) -> None:
        """Do nothing until other nodes join; only the node that coordinates ends that."""
        if self.others.leads or self.state.phase == "searching":
            self.arm("join", self.spec.join_timeout)
        self.write({"event": "waiting", "why": why}, state="RESTARTING", waiting={"problem": why})

    def refused(self, message: Refuse) -> None:
        """The coordinator does not take this node."""
        self.fail(f"node 0 refused this node: {message['why']}", "refused", EXIT_REPLACED if self.spec.peers else 2)

    def finish(self, message: Finish) -> None:
        """The job has ended, or for this node."""
        has_left = (self.spec.peers or self.state.leaves) and message["state"] == "STOPPED" and not message["exit_code"]
        self.set(finish={**message, "exit_code": EXIT_REPLACED} if has_left else message)

    # -- deadlines -----------------------------------------------------------------------------------------------------

    def miss_others(self) -> None:
        """Other nodes are missing, unless there are enough: then they start soon."""
        until = self.others.last_call_until
        if until is not None:
            self.arm("join", max(until - self.now, 0.0) + AFTER_LAST_CALL)
            return
        spec = self.spec
        within = spec.join_timeout if self.state.has_met_all else self.state.join_within
        needed = f"{spec.nodes}" if spec.least == spec.nodes else f"at least {spec.least}"
        do = (
            ""
            if spec.hosts
            else "; start `paceline run` on each with the same --nnodes, --master-addr and --master-port"
        )
        why = f"{self.others.missing} of {needed} nodes did not come within {within:g} s{do}"
        self.send({"do": "give up", "why": why})
        self.fail(why, "nodes missing")

    def reach_limit(self) -> None:
        """The time limit is reached."""
        self.set(timed_out=True)
        self.ask_to_stop(signal.SIGTERM)

    def end_doubt(self) -> None:
        """End a job whose client was killed before it confirmed the job on all nodes, unless the job has begun."""
        if self.status["start"] is None:
            self.fail(
                "the command that submitted it ended before it had confirmed the job on all hosts, and the job did not"
                f" start within {DOUBT_SECONDS:g} s; submit it again",
                "client gone",
            )

    # -- no rank is left, or the coordinator is gone -------------------------------------------------------------------

    def stall(self, event: Stalled) -> None:
        """No rank here goes on, or they do again."""
        if not event["stands"] and self.status["state"] == "RUNNING":
            self.write(waiting=None)
        if not self.state.halted and not self.state.reported and self.spec.hang_after is not None:
            self.send({"do": "stands", "after": self.spec.hang_after, "stands": event["stands"]})

    def hang(self, message: Hung) -> None:
        """The ranks of the job hang, or no more; it may be a failure, of the node that keeps the others waiting."""
        found = message["hang"]
        if found is None:
            if self.status["state"] == "RUNNING":
                self.write(waiting=None)
            return
        why = f"for {found['seconds']:.0f} s {found['line']}"
        self.write({"event": "hang", "why": why, "hang": found}, waiting={"problem": f"it hangs: {found['line']}"})
        first = found["places"][0]["ranks"][0]
        if self.spec.restarts_when_hung and any(rank["rank"] == first for rank in self.status["ranks"]):
            self.set(hung=f"the ranks hung: {found['line']}")
            if not self.state.reported and not self.state.halted:
                self.reported({"do": "failed"})

    def hurry(self, message: ToNode) -> None:
        """Act at once on what changes how ranks are being stopped: nodes that are out of reach may go on soon."""
        if message["do"] == "halt":
            self.hear_of_stop(message)
        grace = GONE_GRACE if message["do"] == "search" else message["grace"] if message["do"] == "halt" else None
        if grace is not None and self.state.phase in STOPPING:
            self.set(grace=min(self.state.grace, grace))
            if self.state.phase == "terminate":
                self.enter("terminate", min(self.state.deadlines["terminate"] - self.now, grace))

    def lose_coordinator(self, message: Search | Alone) -> None:
        """Continue with the nodes that are left, whichever of them coordinates, if they may."""
        if self.state.halted:
            self.go_on_without(message)
        else:
            self.stop(message, GONE_GRACE, 0, save=False)

    def go_on_without(self, message: Search | Alone) -> None:
        """No rank is left here."""
        state = self.state
        if state.stop_signal or state.halted_by or state.leaves:  # the other nodes stop as well
            self.stop_alone()
        elif message["do"] == "alone":
            self.fail(message["why"], "node lost", before=(*state.gone, *self.ranks.failures()))
        else:
            self.enter("searching")
            self.wait_for_others(message["why"])
            self.set(start=None, is_newcomer=False)
            self.do({"do": "search", "dead": message["dead"], "until": self.now + self.spec.join_timeout})

    def after_stop(self) -> None:
        """No rank is left: do what they were stopped for."""
        because = self.state.stopping
        self.enter("open")
        self.set(stopping=None)
        if because is None:
            self.end()
        elif because["do"] == "halt":
            self.report_stopped(self.failures())
        else:
            self.go_on_without(because)

    # -- ends that this node decides -----------------------------------------------------------------------------------

    def on_signal(self, event: Signal) -> None:
        """A signal has come."""
        number = event["signal"]
        if number == LEAVE:
            self.send({"do": "leave"})
        elif number in (SUSPEND, RESUME):
            self.change_over(number)
        elif number in PASSED_ON:
            self.set(preempted=self.state.preempted or number == signal.SIGUSR2)
            self.do({"do": "signal", "signal": number})
        elif number == signal.SIGTERM and self.spec.peers and self.others.has_met:
            self.leave(number, {"do": "leave"})
        elif number == signal.SIGTERM or (number == signal.SIGHUP and not self.spec.detached):
            self.end_here(number)
        elif number != signal.SIGHUP:
            self.ask_to_stop(number)

    def change_over(self, number: int) -> None:
        """Have the job suspended or resumed, by the coordinator once there is one; until then each node by itself."""
        self.set(is_to_be_suspended=number == SUSPEND and not self.others.has_met)
        if self.others.has_met:
            self.send({"do": "suspend" if number == SUSPEND else "resume"})
        elif number == RESUME:
            self.resume()
        elif self.spec.request is not None and self.state.phase in ("claiming", "meeting"):
            self.rest({
                "event": "suspended", "attempt": self.spec.first_attempt, "restarts": self.spec.restarts,
                "failure": None, "others": [],
            })  # fmt: skip

    def end_here(self, number: int) -> None:
        """End the job on this machine: where each has a launcher of its own, others go on if they are enough."""
        spec = self.spec
        is_by_hand = spec.main_address is not None and not spec.hosts and not spec.peers
        if is_by_hand and spec.least < spec.nodes and self.others.has_met and not self.state.stop_signal:
            self.leave(number, {"do": "leave or stop", "signal": number})
        else:
            self.ask_to_stop(number)

    def leave(self, number: int, message: ToCoordinator) -> None:
        """Leave the job, which goes on or waits for another node in place of this one; all save their state before."""
        if not self.state.leaves:
            self.set(leaves=True)
            self.disarm("answer", "join", "limit")
            self.arm("leave", self.spec.grace + ANSWER_SECONDS)
            self.record_stop(number)
            self.send(message)

    def on_word(self, event: Word) -> None:
        """The process that waits for the job has sent a byte, or has ended."""
        word = event["word"]
        if word == IN_DOUBT:
            self.set(in_doubt=True)
        elif word in (ALL_STARTED, KEPT):
            self.set(may_join=True)
            self.expect_all()
        elif word == TOGETHER:
            self.set(ends_with_starter=True)
        elif not word and self.state.ends_with_starter:
            self.do({"do": "die"})
        elif word == CLIENT_LOST:
            self.lose_client()
        elif not self.state.in_doubt or not self.state.may_join:
            self.end_here(signal.SIGHUP)
        else:
            self.arm("doubt", DOUBT_SECONDS)

    def lose_client(self) -> None:
        """Let the job go on without this node, on which its client has no connection any more, or stop it."""
        self.set(has_no_client=True)
        if self.spec.least < self.spec.nodes and self.others.has_met:
            self.send({"do": "leave or stop", "signal": signal.SIGHUP})
        else:
            self.ask_to_stop(signal.SIGHUP)

    def expect_all(self) -> None:
        """All agents of the job run: those of other nodes join soon unless they wait for devices, or are lost."""
        spec = self.spec
        if self.others.has_met and not self.others.leads:
            return
        if spec.hosts and spec.nodes > 1 and not spec.joins and spec.request is None and not self.state.has_met_all:
            self.set(join_within=min(self.state.join_within, PATIENCE * spec.silence))
            if "join" in self.state.deadlines:
                self.arm("join", min(self.state.deadlines["join"] - self.now, self.state.join_within))

    def elsewhere(self) -> None:
        """End at once: the job runs elsewhere now."""
        self.set(at_once=True)
        self.fail("its scheduler has started the job elsewhere, and this node ends", "elsewhere")

    def ask_to_stop(self, number: int) -> None:
        """Stop the job on all nodes."""
        # Schedulers and users repeat their signals; only a second Ctrl-C, or SIGQUIT, stops at once. Slurm may signal
        # guard and agent, so that one Ctrl-C arrives twice; a second one ends the Slurm job.
        state = self.state
        is_second = number == signal.SIGINT and bool(state.stop_signal) and self.spec.stop_file is None
        self.set(at_once=state.at_once or number == signal.SIGQUIT or is_second)
        if state.stop_signal or state.finish is not None:
            return
        self.set(stop_signal=number)
        self.disarm("join", "limit")
        if not self.others.has_met:  # no other node knows of this one yet
            self.stop_alone()
        else:
            self.send({"do": "stop", "signal": number})
            halt: Halt = {"do": "halt", "signal": number, "save": False, "grace": None, "gone": []}
            self.set(inbox=(*self.state.inbox, halt))

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave nothing running."""
        self.enter("open")
        if self.state.halted:
            self.end()
        else:
            self.stop(None, 0.0, 0, save=False)

    def end(self) -> None:
        """Leave the job, and record how it ended."""
        finish = self.state.finish
        assert finish is not None
        if self.state.timed_out and finish["state"] == "STOPPED":
            why = f"stopped at its time limit of {self.spec.time_limit:g} s"
            failure = node_failure(self.node_rank, self.host, "time limit", why, TIMED_OUT)
            finish = {**finish, "state": "FAILED", "exit_code": TIMED_OUT, "failure": failure}
        self.do({"do": "close"})
        self.write({
            "event": "finished", "state": finish["state"], "exit_code": finish["exit_code"],
            "failure": finish["failure"], "others": finish["others"],
        })  # fmt: skip
        self.set(phase="closed", deadlines={}, inbox=(), finish=finish)


class _Phase(NamedTuple):
    """What a phase waits for, and what follows when that is there, or when its deadline is reached."""

    is_over: Callable[[_Step], bool]
    then: Callable[[_Step], None]


def _has_no_live_ranks(it: _Step) -> bool:
    return not it.ranks.has_live_ranks


def _is_to_end(it: _Step) -> bool:
    return it.state.finish is not None or it.is_to_halt


def _has_cause(it: _Step) -> bool:
    return not all(failure["symptom"] for failure in it.ranks.failures())


_PHASES = {
    # The client keeps the node.
    "held": _Phase(lambda it: it.state.may_join and it.state.finish is None, _Step.meet),
    # A scheduler may send SIGTERM to all processes of a job at once; then the ranks have not failed.
    "order": _Phase(_is_to_end, _Step.end_wait),
    # The other ranks save their state too.
    "saved": _Phase(lambda it: _has_no_live_ranks(it) or _is_to_end(it), _Step.end_wait),
    # A failure that does not look like the consequence of another one.
    "cause": _Phase(lambda it: _has_no_live_ranks(it) or _has_cause(it) or _is_to_end(it), _Step.end_wait),
    # Another node reports such a failure.
    "elsewhere": _Phase(_is_to_end, _Step.end_wait),
    "save": _Phase(
        lambda it: _has_no_live_ranks(it) or it.state.at_once or it.is_to_halt or not it.ranks.is_ready,
        _Step.await_programs,
    ),
    "programs": _Phase(lambda it: it.state.at_once or not it.ranks.awaited, _Step.terminate),
    "terminate": _Phase(lambda it: _has_no_live_ranks(it) or it.state.at_once, _Step.kill),
    "kill": _Phase(_has_no_live_ranks, _Step.sweep),
    "sweep": _Phase(lambda it: it.ranks.is_swept or not it.ranks.has_server, _Step.finish_stop),
    "stopped": _Phase(lambda it: True, _Step.after_stop),
}
_REACHED = {
    "leave": _Step.stop_alone,  # the coordinator has not answered
    "answer": _Step.stop_alone,
    "join": _Step.miss_others,
    "limit": _Step.reach_limit,
    "doubt": _Step.end_doubt,
}
_EVENTS: dict[str, Callable[[_Step, Any], None]] = {
    "begin": lambda it, _: it.begin(),
    "queued": _Step.queue,
    "granted": _Step.grant,
    "met": lambda it, _: it.met(),
    "signal": _Step.on_signal,
    "asked to stop": lambda it, event: None if it.state.stop_signal else it.ask_to_stop(event["signal"]),
    "word": _Step.on_word,
    "stalled": _Step.stall,
    "failed": lambda it, event: it.fail(event["why"], event["cause"], event["exit_code"]),
    "elsewhere": lambda it, _: it.elsewhere(),
}
_MESSAGES: dict[str, Callable[[_Step, Any], None]] = {
    "start": _Step.agree,
    "go": lambda it, _: it.go(),
    "prepare": lambda it, _: it.prepare(),
    "halt": _Step.halt,
    "daemon": lambda it, message: it.do({"do": "daemon", "order": message}),
    "hung": _Step.hang,
    "restart": _Step.restart,
    "suspend": _Step.suspend,
    "resume": lambda it, _: it.resume(),
    "wait": lambda it, message: it.wait_for_others(f"{message['why']}, and the job needs {it.spec.least} nodes"),
    "search": _Step.lose_coordinator,
    "alone": _Step.lose_coordinator,
    "refuse": _Step.refused,
    "finish": _Step.finish,
}
