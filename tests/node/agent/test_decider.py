"""What an agent decides, in virtual time: without a clock, processes and sockets."""

from __future__ import annotations

import copy
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.node.agent import attempt, decider, decision
from paceline.node.agent.attempt import FAILURE_GRACE, ORDER_WAIT, SYMPTOM_WAIT
from paceline.node.agent.decider import decide
from paceline.node.agent.decision import ANSWER_SECONDS, View
from paceline.node.agent.state import begin
from paceline.node.failure import TIMED_OUT, node_failure
from paceline.node.lifeline import ALL_STARTED, CLIENT_LOST, DOUBT_SECONDS, IN_DOUBT, KEPT, TOGETHER
from paceline.node.ranks.launcher import SERVER_SECONDS, SWEEP_GRACE
from paceline.node.signals import EXIT_REPLACED, HANDLED, LEAVE, RESUME, SUSPEND
from paceline.node.spec import NodeSpec, Program, Request

if TYPE_CHECKING:
    from paceline.node.agent.messages import Action, Event

GRACE, JOIN = 7.0, 60.0


def node(**changes: Any) -> NodeSpec:
    values: dict[str, Any] = {
        "job": "it", "job_id": "id", "program": Program("script", "train.py", ()), "framework": "torch", "nproc": 2,
        "python": ("python",), "working_dir": "/", "grace": GRACE, "join_timeout": JOIN,
    }  # fmt: skip
    return NodeSpec(**{**values, **changes})


class World:
    """An agent whose actions change nothing but what this object shows: its ranks, and the other nodes.

    Attributes:
        done: the actions so far, without those that record.
        records: what was recorded.
        stubborn: the actions that have no effect, as on a machine that hangs.
    """

    def __init__(self, spec: NodeSpec, *, lifeline: bool = False, leads: bool = True, stubborn: Any = ()) -> None:
        self.state = begin(spec, has_lifeline=lifeline)
        self.now = 100.0
        self.done: list[str] = []
        self.sent: list[dict[str, Any]] = []
        self.records: list[dict[str, Any]] = []
        self.stubborn = stubborn
        self.status: dict[str, Any] = {
            "state": "STARTING", "started": None, "start": None, "waiting": None, "node_rank": 0,
            "agent": {"host": "here"}, "nodes": spec.nodes,
        }  # fmt: skip
        self.running: list[int] = []
        self.ended: list[int] = []
        self.has_server = self.is_ready = self.resumes = self.is_over = self.has_met = self.leads = False
        self.is_swept = self.has_reported = False
        self.failed: list[dict[str, Any]] = []
        self.server_failure, self.server_cause, self.missing = "", "agent", "1"
        self.awaited = 0.0
        self.last_call_until: float | None = None
        self.is_closing = self.claims = False
        self._leads = leads
        self.happens({"on": "begin"})

    @property
    def current(self) -> list[int]:
        return self.running + self.ended

    @property
    def have_started(self) -> bool:
        return True

    @property
    def has_live_ranks(self) -> bool:
        return bool(self.running)

    def view(self) -> View:
        me = cast("Any", self)
        return View(me, me, me.status)

    def failures(self) -> list[dict[str, Any]]:
        return self.failed

    def happens(self, event: Event) -> None:
        """As `Agent` does it."""
        more = True
        while more:
            before, view = copy.deepcopy(self.state), self.view()
            self.state, actions = decide(before, event, view, self.now)
            assert decide(before, event, view, self.now) == (self.state, actions), "it depends on nothing else"
            stops = [action for action in actions if action["do"] == "send" and action["message"]["do"] == "stop"]
            assert not stops or before.finish is None, "a job whose end is known is not stopped"
            for action in actions:
                self._carry_out(action)
            more, event = bool(actions) or self.state.may_go_on, {"on": "go on"}
        if self.state.may_close and not self.is_closing:
            self.is_closing = True
            self.happens({"on": "close"})

    def hears(self, do: str, **more: Any) -> None:
        self.happens(cast("Event", {"on": "message", "message": {"do": do, **more}}))

    def halts(self, **more: Any) -> None:
        self.hears("halt", **{"signal": 0, "save": False, "grace": None, "gone": [], **more})

    def waits(self) -> bool:
        """Let time pass until the next deadline; returns whether there is one."""
        deadlines = self.state.counting.values()
        if not deadlines or self.state.phase == "closed":
            return False
        self.now = max(self.now, min(deadlines))
        self.happens({"on": "time"})
        return True

    def ends(self, *ranks: int, **failure: Any) -> None:
        """Ranks end; with a failure if there is one."""
        for rank in ranks:
            self.running.remove(rank)
            self.ended.append(rank)
        if failure:
            known = node_failure(0, "here", "exception", "a rank has failed")
            self.failed.append({**known, "age": 1.0, **failure})
        self.happens({"on": "ranks changed"})

    def runs(self) -> World:
        """Its first attempt begins."""
        self.hears("start", attempt=0)
        self.hears("go")
        self.is_ready = True
        self.happens({"on": "ranks changed"})
        assert self.status["state"] == "RUNNING"
        self.done.clear()
        self.sent.clear()
        return self

    def _carry_out(self, action: Action) -> None:
        do = action["do"]
        assert "close" not in self.done or do == "write", "nothing happens after the end"
        if action["do"] == "write":
            self.records += cast("list[dict[str, Any]]", action["records"])
            self.status.update(action["changes"])
            return
        if action["do"] == "send stopped":
            assert not (self.has_reported and action["failures"]), "failures of an attempt count once"
            self.has_reported = True
        if action["do"] == "send" or action["do"] == "send stopped":
            self.sent.append(cast("dict[str, Any]", action.get("message", {"do": "stopped"})))
            return
        self.done.append(do)
        self.is_swept = self.is_swept and do != "sweep"
        if do in self.stubborn:
            return
        if do == "warm up":
            self.has_server = True
        elif do in ("meet", "search"):
            self.has_met, self.leads = True, self._leads
            self.happens({"on": "met"})
        elif do == "launch":
            self.running, self.ended, self.failed, self.server_failure = [0, 1], [], [], ""
            self.has_server, self.resumes, self.has_reported, self.status["start"] = True, False, False, {}
        elif do == "terminate" and not self.is_ready:
            self.has_server, self.running = False, []
        elif do in ("terminate", "kill"):
            self.ended, self.running = self.ended + self.running, []
        elif do == "end server":
            self.has_server = self.is_ready = False
            self.ended, self.running = self.ended + self.running, []
        elif do == "sweep":
            self.is_swept = True
        elif do == "claim":
            self.claims = True
        elif do == "release":
            self.claims = False

    @property
    def end(self) -> tuple[str, int]:
        assert self.state.phase == "closed"
        assert self.state.finish is not None
        return self.state.finish["state"], self.state.finish["exit_code"]


@pytest.mark.parametrize(
    ("ranks", "end", "waits", "then", "sent"),
    [
        ((0,), {"symptom": False}, {}, "time", ["failed"]),
        ((0,), {"symptom": True}, {"cause": SYMPTOM_WAIT}, "time", ["failed"]),
        ((0,), {"symptom": True}, {"cause": SYMPTOM_WAIT}, "cause", ["failed"]),
        ((0, 1), {"symptom": True}, {"elsewhere": SYMPTOM_WAIT}, "time", ["symptom", "failed"]),
        ((0, 1), {"symptom": True}, {"elsewhere": SYMPTOM_WAIT}, "halt", ["symptom", "failed", "stopped"]),
        # A scheduler may send SIGTERM to all processes of a job at once.
        ((0,), {"symptom": True, "signal": "SIGTERM"}, {"order": ORDER_WAIT}, "halt", ["stopped"]),
        ((0,), {"symptom": False, "signal": "SIGTERM"}, {"order": ORDER_WAIT}, "time", ["failed"]),
        ((0,), {"resumes": True}, {"saved": GRACE}, "time", ["preempted"]),
        ((0,), {"resumes": True}, {"saved": GRACE}, "end", ["preempted"]),
    ],
)
def test_what_is_waited_for_before_the_end_of_ranks_is_reported(
    ranks: tuple[int, ...], end: dict[str, Any], waits: dict[str, float], then: str, sent: list[str]
) -> None:
    one = World(node(nodes=2)).runs()
    one.resumes = "resumes" in end
    one.ends(*ranks, **({} if one.resumes else end))
    assert one.state.deadlines == {name: one.now + seconds for name, seconds in waits.items()}
    assert [message["do"] for message in one.sent] == [do for do in sent if do == "symptom" or not waits]
    if then == "halt":
        one.halts()
    elif then == "time":
        while one.waits():
            pass
    else:
        one.ends(1, **({"symptom": False} if then == "cause" else {}))
    one.happens({"on": "ranks changed"})
    assert [message["do"] for message in one.sent] == sent, "it is reported once"


def test_ranks_that_the_signal_to_give_way_ends_before_they_can_save_do_not_start_again() -> None:
    one = World(node()).runs()
    one.happens({"on": "signal", "signal": signal.SIGUSR2})
    one.ends(0, signal="SIGUSR2", symptom=False)
    one.ends(1, signal="SIGUSR2", symptom=False)
    assert one.sent == [{"do": "preempted", "final": True}]


@pytest.mark.parametrize(
    ("stubborn", "expected", "seconds"),
    [
        ((), ["terminate", "sweep", "stopped"], 0.0),
        (("terminate",), ["terminate", "kill", "sweep", "stopped"], GRACE),
        (("terminate", "kill"), ["terminate", "kill", "end server", "stopped"], GRACE + SERVER_SECONDS),
        (("sweep",), ["terminate", "sweep", "end server", "stopped"], SWEEP_GRACE + SERVER_SECONDS),
    ],
)
def test_a_stop_ends_the_ranks_step_by_step(stubborn: Any, expected: list[str], seconds: float) -> None:
    one = World(node(), stubborn=stubborn).runs()
    before = one.now
    one.happens({"on": "signal", "signal": signal.SIGTERM})
    while one.state.phase != "open":
        assert one.waits()
    assert (one.done, one.now - before) == (expected, seconds)
    assert one.sent == [{"do": "stop", "signal": signal.SIGTERM}, {"do": "stopped"}]
    assert one.state.deadlines == {"answer": one.now + ANSWER_SECONDS + GRACE}
    one.waits()
    assert one.end == ("STOPPED", 143)


def test_the_peers_of_a_failed_rank_get_less_time() -> None:
    one = World(node(), stubborn=("terminate",)).runs()
    one.ends(0, symptom=False)
    one.halts()
    assert one.state.deadlines == {"terminate": one.now + FAILURE_GRACE}


def test_a_newcomer_whose_ranks_could_start_at_once() -> None:
    one = World(node(nodes=2, least=1))
    one.is_ready = True
    one.hears("prepare", nodes=[])
    assert one.sent == [{"do": "prepared"}]


def test_a_suspended_job_holds_nothing_and_its_time_limit_stands_still() -> None:
    one = World(node(time_limit=100.0, request=Request("", 1, ("0",))))
    one.happens({"on": "granted", "devices": ["0"]})
    one.runs()
    one.now += 30.0
    one.happens({"on": "signal", "signal": SUSPEND})
    assert one.sent == [{"do": "suspend"}]
    one.halts(grace=1000.0)
    assert one.done == ["terminate", "sweep", "stopped"]
    one.hears("suspend", attempt=1, restarts=0, failure=None, others=[])
    assert (one.has_server, one.claims, one.state.deadlines) == (False, False, {})
    assert (one.status["state"], one.status["devices"], one.status["attempt"]) == ("SUSPENDED", [], 1)
    one.happens({"on": "granted", "devices": ["0"]})  # it came too late
    assert not one.has_server
    one.now += 1000.0
    one.hears("resume")
    assert one.claims and not one.has_server and one.status["waiting"] is None
    one.happens({"on": "granted", "devices": ["0"]})
    assert one.has_server
    one.runs()
    assert one.state.deadlines == {"limit": one.now + 70.0}


@pytest.mark.parametrize("then", [SUSPEND, RESUME])
def test_a_job_that_is_suspended_before_it_has_met_the_others_is_so_once_it_has(then: int) -> None:
    one = World(node(), lifeline=False, stubborn=("meet",))
    one.happens({"on": "signal", "signal": SUSPEND})
    one.happens({"on": "signal", "signal": then})
    assert not one.sent
    one.has_met = one.leads = True
    one.happens({"on": "met"})
    assert one.sent == ([{"do": "suspend"}] if then == SUSPEND else [])


@pytest.mark.parametrize("has_devices", [False, True])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_node_that_knows_no_other_is_suspended_by_itself(nodes: int, has_devices: bool) -> None:
    one = World(node(nodes=nodes, request=Request("", 1, ("0",))), stubborn=("meet",))
    if has_devices:
        one.happens({"on": "granted", "devices": ["0"]})
        assert (one.state.phase, one.has_server) == ("meeting", True)
    one.happens({"on": "signal", "signal": SUSPEND})
    assert (one.claims, one.has_server, one.sent, one.state.deadlines) == (False, False, [], {})
    assert (one.status["state"], one.status["devices"]) == ("SUSPENDED", [])
    one.happens({"on": "met"})  # it looks for the others no longer
    one.happens({"on": "signal", "signal": RESUME})
    one.happens({"on": "met"})
    assert one.claims and one.state.phase == "claiming"
    one.happens({"on": "granted", "devices": ["0"]})
    assert (one.state.phase, one.state.deadlines) == ("meeting", {"join": one.now + one.state.join_within})
    one.happens({"on": "signal", "signal": signal.SIGTERM})
    assert one.end == ("STOPPED", 128 + signal.SIGTERM)


def test_a_time_limit_waits_until_ranks_that_are_being_stopped_have_ended() -> None:
    one = World(node(time_limit=1.0), stubborn=("terminate",)).runs()
    assert one.state.deadlines == {"limit": one.now + 1.0}
    one.halts()
    one.waits()
    assert (one.done, one.state.timed_out) == (["terminate", "kill", "sweep", "stopped"], False)
    while one.waits():
        pass
    assert one.end == ("FAILED", TIMED_OUT)
    assert one.records[-1]["failure"]["cause"] == "time limit"


def test_other_nodes_that_are_missing() -> None:
    one = World(node(nodes=2, least=2))
    assert one.state.deadlines == {"join": one.now + JOIN}
    one.waits()
    assert one.end == ("FAILED", 1)
    assert [message["do"] for message in one.sent] == ["give up"]
    assert one.records[-1]["failure"]["cause"] == "nodes missing"


def test_a_node_that_leaves_waits_for_that_alone() -> None:
    one = World(node(nodes=2, least=2, peers=("a", "b"), time_limit=1.0)).runs()
    one.happens({"on": "signal", "signal": signal.SIGTERM})
    assert one.state.deadlines == {"leave": one.now + GRACE + ANSWER_SECONDS}
    one.happens({"on": "signal", "signal": signal.SIGTERM})
    assert [message["do"] for message in one.sent] == ["leave"]
    one.hears("wait", why="too few")
    assert list(one.state.deadlines) == ["leave"]
    one.halts(save=True)
    one.hears("finish", state="STOPPED", exit_code=0, failure=None, others=[])
    while one.waits():
        pass
    assert one.end == ("STOPPED", EXIT_REPLACED)


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_was_killed_before_all_knew_of_the_job(begun: bool) -> None:
    one = World(node(nodes=2, least=2), lifeline=True)
    if begun:
        one.runs()
    one.happens({"on": "word", "word": IN_DOUBT})
    one.happens({"on": "word", "word": b""})
    assert one.state.deadlines["doubt"] == one.now + DOUBT_SECONDS
    one.waits()
    if begun:
        assert one.state.finish is None
        assert one.state.deadlines == {}
    else:
        assert one.end == ("FAILED", 1)
        assert one.records[-1]["failure"]["cause"] == "client gone"


@pytest.mark.parametrize(
    ("failed", "named"),
    [
        ("a node", "node 1 (h1) is gone"),
        ("a node, in the attempt before", "node 0 (h0) is gone"),
        ("a rank here", "a rank has failed"),
        ("a rank here, as a consequence", "node 0 (h0) is gone"),
    ],
)
def test_a_coordinator_that_is_gone_is_not_named_if_something_has_failed_before(failed: str, named: str) -> None:
    one = World(node(nodes=3), leads=False).runs()
    if "rank" in failed:
        one.ends(0, 1, symptom="consequence" in failed)
    one.halts(gone=[node_failure(1, "h1", "node lost", "node 1 (h1) is gone")] if "node" in failed else [])
    is_before = "before" in failed
    if is_before:
        one.runs()
    one.hears("alone", why="node 0 (h0) is gone")
    found = one.records[-1]
    assert (one.end, found["failure"]["message"], len(found["others"])) == (("FAILED", 1), named, int(not is_before))


def test_every_deadline_says_what_happens() -> None:
    """Those that are armed anywhere are in one of the two tables."""
    source = "\n".join(Path(it.__file__).read_text() for it in (attempt, decider, decision))
    armed = {line.split('"')[1] for line in source.splitlines() if "self.arm(" in line and '"' in line}
    assert armed == set(decider._REACHED)
    entered = {line.split('"')[1] for line in source.splitlines() if "self.enter(" in line and '", ' in line}
    assert entered <= set(decider._PHASES)


# -- anything in any order ---------------------------------------------------------------------------------------------

HALTS = st.fixed_dictionaries({
    "do": st.just("halt"), "signal": st.sampled_from([0, 2, 15]), "save": st.booleans(),
    "grace": st.sampled_from([None, 1.0]), "gone": st.just([]),
})  # fmt: skip
MESSAGES = st.one_of(
    HALTS,
    st.sampled_from([
        {"do": "start", "attempt": 0}, {"do": "go"}, {"do": "go"}, {"do": "prepare", "nodes": []},
        {"do": "restart", "attempt": 1, "restarts": 1, "why": "", "nodes": 1, "failure": None, "others": []},
        {"do": "wait", "why": "too few"}, {"do": "search", "why": "gone", "dead": []}, {"do": "alone", "why": "gone"},
        {"do": "refuse", "why": "full"}, {"do": "unknown"},
        {"do": "finish", "state": "SUCCEEDED", "exit_code": 0, "failure": None, "others": []},
    ]),
)  # fmt: skip
EVENTS = st.one_of(
    st.fixed_dictionaries({"on": st.just("signal"), "signal": st.sampled_from([*HANDLED])}),
    st.fixed_dictionaries({"on": st.just("asked to stop"), "signal": st.just(15)}),
    st.fixed_dictionaries({
        "on": st.just("word"), "word": st.sampled_from([b"", IN_DOUBT, ALL_STARTED, KEPT, CLIENT_LOST, TOGETHER]),
    }),
    st.fixed_dictionaries({"on": st.just("message"), "message": MESSAGES}),
    st.fixed_dictionaries({"on": st.just("message"), "message": MESSAGES}),
    st.sampled_from([
        {"on": "elsewhere"}, {"on": "granted", "devices": ["0"]}, {"on": "ranks changed"}, {"on": "time"},
        {"on": "queued", "waiting": {"need": 1, "ahead": 1, "problem": ""}},
        {"on": "failed", "why": "no", "cause": "refused", "exit_code": 2},
    ]),
    st.sampled_from(["rank ends", "rank fails", "symptom", "terminated", "resumes", "server ends", "begins", "waits"]),
)  # fmt: skip
SPECS = st.builds(
    node,
    framework=st.sampled_from(["torch", "indexed"]), nodes=st.just(3), least=st.sampled_from([1, 3]),
    time_limit=st.sampled_from([None, 30.0]), peers=st.sampled_from([(), ("a", "b", "c")]), detached=st.booleans(),
    joins=st.booleans(), request=st.sampled_from([None, Request("/q", 1, ("0",), 0, 1, True)]),
)  # fmt: skip


def disturb(world: World, event: Any) -> None:
    """Let an event happen."""
    if not isinstance(event, str):
        if event["on"] not in ("granted", "queued") or world.state.phase == "claiming":
            world.happens(event)
    elif event == "waits":
        world.waits()
    elif event == "begins":
        if world.state.phase == "claiming":
            world.happens({"on": "granted", "devices": ["0"]})
        world.happens({"on": "word", "word": KEPT})
        world.hears("start", attempt=0)
        world.hears("go")
        world.is_ready = world.has_server
        world.happens({"on": "ranks changed"})
    elif event == "server ends":
        world.has_server = world.is_ready = False
        world.server_failure = "it ended"
        world.ends(*world.running)
    elif world.running:
        failure = {
            "rank fails": {"symptom": False}, "symptom": {"symptom": True},
            "terminated": {"signal": "SIGTERM", "symptom": False},
        }.get(event, {})  # fmt: skip
        world.resumes = world.resumes or event == "resumes"
        world.ends(world.running[0], **failure)


def let_time_pass(world: World) -> None:
    """Until nothing has a deadline: each is reached once, and time goes on."""
    last, count = world.now, 0
    while world.waits():
        count = count + 1 if world.now == last else 0
        last = world.now
        assert count < 6, "a deadline is reached again and again"
    assert world.now < 100.0 + 40 * JOIN


@settings(max_examples=300)
@given(
    SPECS, st.booleans(), st.booleans(), st.booleans(), st.lists(EVENTS, max_size=25),
    st.sets(st.sampled_from(["terminate", "kill", "sweep", "save"])),
)  # fmt: skip
def test_whatever_happens_an_agent_ends_or_waits_for_something(
    spec: NodeSpec, lifeline: bool, leads: bool, begins: bool, events: list[Any], stubborn: set[str]
) -> None:
    world = World(spec, lifeline=lifeline, leads=leads, stubborn=stubborn)
    for event in ["begins"] * begins + events:
        disturb(world, event)
    let_time_pass(world)
    state = world.state
    if state.phase != "closed":
        assert state.phase in ("open", "claiming", "held"), "anything else has a deadline"
        assert not state.inbox or state.phase != "open", "every message was acted on"
        assert not state.stop_signal or not state.halted, "a stop ends"
        assert state.finish is None
        assert not state.leaves
    # Now the job is stopped, and nobody answers.
    world.happens({"on": "signal", "signal": signal.SIGQUIT})
    world.hears("halt", signal=3, save=False, grace=None, gone=[])
    let_time_pass(world)
    assert world.state.phase == "closed"
    assert [record["event"] for record in world.records].count("finished") == 1
    assert world.records[-1]["event"] == "finished"
    assert world.done.count("close") == 1
    assert world.done[-1] == "close"
    assert not world.running or "close" in world.done, "closing ends the fork server, and all with it"
    ended = world.state
    for event in events:
        if not isinstance(event, str):
            assert decide(ended, event, world.view(), world.now) == (ended, []), "it is over"


def test_a_hang_that_is_over_is_no_longer_waited_for() -> None:
    one = World(node(hang_after=60.0)).runs()
    one.hears("hung", hang={"seconds": 60.0, "line": "no rank works", "places": [{"ranks": [0]}]})
    assert one.status["waiting"] == {"problem": "it hangs: no rank works"}
    one.hears("hung", hang=None)
    assert one.status["waiting"] is None


def test_signals_that_ask_to_leave() -> None:
    one = World(node(nodes=2, least=1)).runs()
    one.happens({"on": "signal", "signal": LEAVE})
    assert [message["do"] for message in one.sent] == ["leave"]
