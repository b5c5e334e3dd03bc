"""Jobs take turns on the devices of a machine: who gets what, and what becomes of it when somebody is killed."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests import journals
from tests.conftest import GENEROUS, eventually
from tests.late import job_spec
from tests.tiers import examples

from paceline.contract.nodejob import Order, StoredJob
from paceline.node.devicequeue.policy import Entry, explain, impossible, turn
from paceline.node.devicequeue.ticket import POLL_SECONDS, Ticket, Watch, overview
from paceline.node.machine.processes import descendants
from paceline.node.planning import node_part
from paceline.node.planning.fitting import Fitted
from paceline.node.ranks.placement import shell_of
from paceline.node.rundir.directory import RunDirectory
from paceline.node.rundir.staging import Staging
from paceline.node.spec import NodeSpec, Request
from paceline.node.store import lifecycle
from paceline.node.watching.live import stands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Paceline

DEVICES = ("0", "1", "2", "3")
NEEDS = st.integers(1, 4) | st.sets(st.sampled_from(DEVICES), min_size=1).map(lambda s: tuple(sorted(s)))


def names_of(entry: Entry) -> list[tuple[str, ...]]:
    """Every choice of devices that would do for a job."""
    return list(combinations(entry.of, entry.need)) if isinstance(entry.need, int) else [entry.need]


def get_along(a: Entry, b: Entry) -> bool:
    return not set(a.devices) & set(b.devices) or (a.share and b.share)


# -- who gets what -----------------------------------------------------------------------------------------------------


@st.composite
def queues(draw: st.DrawFn) -> list[Entry]:
    """Some jobs that hold devices, rightly, and some that wait."""
    entries: list[Entry] = []
    for number in draw(st.permutations(range(8))):
        entry = Entry(f"job-{number}", draw(st.integers(-1, 1)), number, 0.0, draw(NEEDS), DEVICES, draw(st.booleans()))
        held = replace(entry, devices=draw(st.sampled_from(names_of(entry))))
        fits = draw(st.booleans()) and all(get_along(held, other) for other in entries)
        entries.append(held if fits else entry)
    return entries


@given(queues())
def test_the_first_in_the_line_gets_what_it_may_have_as_soon_as_it_can(entries: list[Entry]) -> None:
    waiting = [e for e in entries if not e.devices]
    holding = [e for e in entries if e.devices]
    if not waiting:
        assert turn(entries) is None
        return
    first = sorted(waiting, key=lambda e: (-e.priority, e.number))[0]
    choices = [replace(first, devices=names) for names in names_of(first)]
    possible = [c for c in choices if all(get_along(c, holder) for holder in holding)]
    found = turn(entries)
    assert found == turn([*holding, first])  # those behind it have no say
    if found is None:
        assert not possible
        return

    def others(names: tuple[str, ...]) -> int:
        return len([d for d in chain.from_iterable(h.devices for h in holding) if d in names])

    assert found[0] == first
    assert set(found[1]) in [set(c.devices) for c in possible]
    assert others(found[1]) == min(others(c.devices) for c in possible)


@given(queues())
def test_everybody_who_waits_is_told_what_for(entries: list[Entry]) -> None:
    for entry in entries:
        told = explain(entries, entry.job)
        if entry.devices:
            assert told is None
        else:
            assert told is not None
            assert told.startswith("waits for ")
            assert "\n" not in told
    assert explain(entries, "unknown") is None


def test_what_is_told() -> None:
    a = Entry("a", 0, 1, 0.0, 2, DEVICES, False, ("0", "1"))
    b = Entry("b", 0, 2, 0.0, ("3",), DEVICES, False, ("3",))
    c = Entry("c", 0, 3, 0.0, 2, DEVICES, False)
    d = Entry("d", 0, 4, 0.0, ("3",), DEVICES, False)
    assert explain([a, b, c, d], "c") == "waits for 2 devices; held by: a, b"
    assert explain([a, b, c, d], "d") == "waits for device 3; 1 job ahead; held by: b"


# -- tickets in a folder, and death at any moment ----------------------------------------------------------------------


def order(ticket: Ticket) -> tuple[int, int]:
    return -ticket.request.priority, int(ticket.job.removeprefix("job-"))


class Blind(Watch):
    """As where the kernel has no inotify."""

    def begin(self) -> None:
        self._lost = False


class Tickets(RuleBasedStateMachine):
    """Jobs come, look, go and die in any order, with tickets in a real folder."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp()) / "queue"
        self.waiting: list[Ticket] = []
        self.holding: dict[Ticket, tuple[str, ...]] = {}
        self.count = 0

    def teardown(self) -> None:
        for ticket in [*self.waiting, *self.holding]:
            ticket.release()
        shutil.rmtree(self.folder.parent)

    def look(self, ticket: Ticket) -> None:
        devices = ticket.look()
        if devices is not None:
            self.waiting.remove(ticket)
            assert not any(order(other) < order(ticket) for other in self.waiting)
            for other, theirs in self.holding.items():
                assert not set(theirs) & set(devices) or (other.request.share and ticket.request.share)
            need = ticket.request.need
            assert len(set(devices)) == need if isinstance(need, int) else devices == need
            self.holding[ticket] = devices

    def any_of(self, data: st.DataObject, tickets: list[Ticket]) -> Ticket:
        return data.draw(st.sampled_from(tickets))

    @rule(need=NEEDS, share=st.booleans(), priority=st.integers(-1, 1), works=st.booleans(), settles=st.booleans())
    def come(self, need: int | tuple[str, ...], share: bool, priority: int, works: bool, settles: bool) -> None:
        self.count += 1
        ticket = Ticket(Request(str(self.folder), need, DEVICES, share, priority), f"job-{self.count}")
        if not works:
            ticket.watch = Blind(self.folder)
        self.waiting.append(ticket)
        self.look(ticket)
        if settles:
            self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def look_again(self, data: st.DataObject) -> None:
        self.look(self.any_of(data, self.waiting))

    @precondition(lambda self: self.waiting or self.holding)
    @rule(data=st.data(), killed=st.booleans(), settles=st.booleans())
    def go(self, data: st.DataObject, killed: bool, settles: bool) -> None:
        ticket = self.any_of(data, [*self.waiting, *self.holding])
        if killed:
            os.close(ticket.fd)  # all that the kernel does for a dead process
            ticket.fd = -1
        ticket.release()
        self.holding.pop(ticket, None)
        if ticket in self.waiting:
            self.waiting.remove(ticket)
        if settles:
            self.settle()

    @rule(name=st.sampled_from(["holding.0.1", "waiting.7.2", "holding.0.99", "new", "what is this"]), text=st.binary())
    def litter(self, name: str, text: bytes) -> None:
        """Leave files as a process may that is killed in the middle of an action, or a user by mistake."""
        path = self.folder / "tickets" / name
        if path.parent.exists() and not path.exists():
            path.write_bytes(text)

    def settle(self) -> None:
        """Every ticket that gets an event looks at the queue, until nothing changes any more."""
        told = [t for t in self.waiting if not t.watch.works or select.select([t.watch.fd], [], [], 0)[0]]
        while told:
            before = os.listdir(self.folder / "tickets")
            for ticket in told:
                self.look(ticket)
            told = [t for t in self.waiting if t.watch.works and select.select([t.watch.fd], [], [], 0)[0]]
            if before != os.listdir(self.folder / "tickets"):
                told += [t for t in self.waiting if not t.watch.works]
        held = [Entry(t.job, 0, 0, 0.0, t.request.need, DEVICES, t.request.share, d) for t, d in self.holding.items()]
        line = [e for e in overview(self.folder) if not e.devices]
        assert [e.job for e in line] == [t.job for t in sorted(self.waiting, key=order)]
        assert turn([*held, *line]) is None  # nobody waits for what is free
        for ahead, entry in enumerate(line):
            ticket = next(t for t in self.waiting if t.job == entry.job)
            assert ticket.ahead == ahead or (ticket.ahead > ahead and not ticket.watch.works)

    @invariant()
    def all_is_known(self) -> None:
        entries = {e.job: e for e in overview(self.folder)}
        assert set(entries) == {t.job for t in [*self.waiting, *self.holding] if t.fd >= 0}
        for ticket, devices in self.holding.items():
            assert entries[ticket.job].devices == devices


Tickets.TestCase.settings = settings(max_examples=examples(20, 600), stateful_step_count=30, deadline=None)
TestTickets = pytest.mark.soak(Tickets.TestCase)


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Callable[..., Ticket]]:
    made: list[Ticket] = []

    def ask(job: str = "job", need: int | tuple[str, ...] = 1, folder: Path | None = None, **more: Any) -> Ticket:
        made.append(Ticket(Request(str(folder or tmp_path / "queue"), need, ("0",), **more), job))
        return made[-1]

    yield ask
    for ticket in made:
        ticket.release()


def test_a_holder_whose_ticket_makes_no_sense_may_hold_anything(tmp_path: Path, ask: Callable[..., Ticket]) -> None:
    holder, waiter = ask("a", share=True), ask("b", share=True)
    assert holder.look() == ("0",)
    for text in (b"", b"{", b"[]", b"null", b'{"job": 1, "devices": 5}', b"\xff\xfe"):
        (tmp_path / "queue" / "tickets" / f"holding.0.{holder.place}").write_bytes(text)
        assert waiter.look() is None
        assert [(e.job, e.devices) for e in overview(tmp_path / "queue")] == [("?", ("?",)), ("b", ())]
    holder.release()
    assert waiter.look() == ("0",)


def test_who_waits_comes_back_when_somebody_empties_the_folder(tmp_path: Path, ask: Callable[..., Ticket]) -> None:
    holder, first, second = ask("a"), ask("b"), ask("c")
    assert [t.look() for t in (holder, first, second)] == [("0",), None, None]
    shutil.rmtree(tmp_path / "queue")
    second.place = holder.place
    assert second.look() == ("0",)
    assert first.look() is None
    holder.release()  # a ticket of its name is another's now
    assert [e.job for e in overview(tmp_path / "queue")] == ["c", "b"]
    second.release()
    assert first.look() == ("0",)
    assert first.patience is None


def test_a_job_that_was_away_comes_before_those_that_came_meanwhile(ask: Callable[..., Ticket]) -> None:
    first = ask("first")
    assert first.look() == ("0",)
    first.release()
    second, third = ask("second"), ask("third")
    assert [second.look(), third.look()] == [("0",), None]
    again = ask("first")
    again.place = first.place
    assert again.look() is None
    second.release()
    assert [third.look(), third.ahead, again.look()] == [None, 1, ("0",)]


def test_without_inotify_it_looks_from_time_to_time(
    tmp_path: Path, ask: Callable[..., Ticket], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, waiter = ask("a"), ask("b")
    waiter.watch = Blind(tmp_path)
    assert holder.look() == ("0",)
    assert waiter.look() is None
    assert waiter.patience == POLL_SECONDS
    first = ask("c", priority=1)
    assert first.look() is None
    for killed in (holder, first):
        os.close(killed.fd)
        killed.fd = -1
    assert waiter.look() == ("0",)


def test_a_full_disk_is_waited_out(tmp_path: Path, ask: Callable[..., Ticket]) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        big = folder / "big"
        holder, waiter = ask("a", folder=folder), ask("b", folder=folder)
        assert holder.look() == ("0",)
        assert waiter.look() is None
        assert not waiter.problem
        with open(big, "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(1024))
        late = ask("c", folder=folder)
        assert late.look() is None
        assert late.problem == "No space left on device"
        holder.release()  # which makes some room
        big.write_bytes(big.read_bytes())
        with open(big, "ab", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(1024))
        assert waiter.look() is None
        assert waiter.problem == "No space left on device"
        assert waiter.patience is not None
        assert [e.job for e in overview(folder)] == ["b"]
        big.unlink()
        assert late.look() is None
        assert late.ahead == 1
        assert waiter.look() == ("0",)
        for ticket in (waiter, late):
            ticket.release()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_nobody_waits_for_what_can_never_be() -> None:
    request = Request("/queue", 2, ("0", "1"))
    assert impossible(request) == ""
    assert impossible(replace(request, need=("1",))) == ""
    assert impossible(replace(request, need=3)) == "it needs 3 devices, and this machine has 2 (0, 1)"
    assert impossible(replace(request, need=("1", "7"))) == "it needs device 7, and this machine has 2 (0, 1)"
    assert impossible(replace(request, of=())) == "it needs 2 devices, and this machine has none"
    assert impossible(replace(request, need=0)) == "it needs no device"


# -- agents ------------------------------------------------------------------------------------------------------------

# Says that it has its devices, each of which no other may have at the same time, and waits for a file of its name.
RANK = """
    import fcntl, os, sys, time
    job, free = sys.argv[1:]
    held = []
    for device in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
        held.append(open("device-" + device, "w"))
        try:
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            open("shared-" + device, "w").close()
    os.write(os.open("order", os.O_WRONLY | os.O_APPEND | os.O_CREAT), f"{job}\\n".encode())
    while free == "when-told" and not os.path.exists("go-" + job):
        time.sleep(0.01)
"""


class Started(NamedTuple):
    """A job's folder and its agent."""

    directory: RunDirectory
    process: subprocess.Popen[bytes]

    def status(self) -> dict[str, Any]:
        return self.directory.read_status() or {}


class Machine:
    """Starts jobs that ask for devices, and knows what became of them."""

    def __init__(self, paceline: Paceline) -> None:
        self.folder = paceline.folder
        self.home = paceline.home
        self.queue = paceline.home / "queue"
        self.runs: dict[str, Started] = {}
        paceline.script(RANK, "rank.py")

    def spec(
        self, job: str, need: int | tuple[str, ...], free: str = "when-told", **more: Any
    ) -> tuple[job_spec.JobSpec, NodeSpec]:
        from paceline.backends.local import prepare

        fields = {"script": "rank.py", "args": (job, free), "start_method": "exec", **more}
        share, of = fields.pop("share", False), fields.pop("of", ("0", "1", "2"))
        slots, priority = fields.pop("slots", False), fields.pop("priority", 0)
        spec = job_spec.JobSpec(name=job, framework="torch", working_dir=str(self.folder), detached=True, **fields)
        request = Request(str(self.queue), need, of, share, priority, slots)
        node = node_part.node_spec(Order(job=spec.for_node()), Fitted(spec.for_node()), prepare.here())
        return spec, replace(node, devices=None, request=request)

    def start(self, job: str, need: int | tuple[str, ...] = 1, *args: Any, **more: Any) -> Started:
        spec, node = self.spec(job, need, *args, **more)
        with Staging(self.home / "jobs" / job) as staging:
            record = StoredJob(spec.for_node(), None, time.time())
            lifecycle.write_down(staging.directory, record, node)
            run = staging.settle()
            self.runs[job] = Started(run, lifecycle.start_agent(staging, node.python, os.environ))
        return self.runs[job]

    def queued(self, job: str, *args: Any, **more: Any) -> Started:
        """Start a job that has to wait."""
        run = self.start(job, *args, **more)
        eventually(lambda: self.status(job).get("waiting"), f"{job} waits")
        return run

    def running(self, job: str, *args: Any, **more: Any) -> Started:
        """Start a job that runs at once."""
        run = self.start(job, *args, **more)
        eventually(lambda: job in self.order(), f"{job} runs")
        return run

    def go(self, job: str) -> None:
        (self.folder / f"go-{job}").touch()

    def end(self, job: str) -> dict[str, Any]:
        """Wait for the end of a job; its last status."""
        self.runs[job].process.wait(GENEROUS)
        return self.status(job)

    def status(self, job: str) -> dict[str, Any]:
        return self.runs[job].status()

    def events(self, job: str) -> list[dict[str, Any]]:
        return journals.events(self.home / "jobs" / job)

    def order(self) -> list[str]:
        """The jobs in the order in which they had their devices."""
        path = self.folder / "order"
        return path.read_text().split() if path.exists() else []

    def is_shared(self) -> bool:
        """Whether two jobs ever had the same device."""
        return bool(list(self.folder.glob("shared-*")))

    def holders(self) -> list[str]:
        return [e.job for e in overview(self.queue) if e.devices]


@pytest.fixture
def machine(paceline: Paceline, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("PACELINE_HOME", str(paceline.home))
    it = Machine(paceline)
    yield it
    for run in it.runs.values():
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()


def test_a_waiting_job_says_so_takes_little_memory_and_starts_nothing(machine: Machine) -> None:
    machine.running("a", 3)
    run = machine.queued("b", 2)
    machine.queued("c", 1)
    status = machine.status("b")
    assert status["state"] == "PENDING"
    assert status["waiting"] == {"need": 2, "ahead": 0, "problem": ""}
    assert status["devices"] == []
    assert machine.status("c")["waiting"] == {"need": 1, "ahead": 1, "problem": ""}
    agent = status["agent"]["pid"]  # below its guard
    assert descendants(run.process.pid) == [agent]
    assert descendants(agent) == []
    used = [Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() for pid in (run.process.pid, agent)]
    memory = [int(line.split()[1]) for lines in used for line in lines if line.startswith("Pss:")]
    assert sum(memory) <= 25 * 1024, memory
    assert explain(overview(machine.queue), "c") == "waits for 1 device; 1 job ahead; held by: a"
    for job in "abc":
        machine.go(job)
    for job in "abc":
        assert machine.end(job)["state"] == "SUCCEEDED"
    assert machine.status("b")["devices"] == ["0", "1"]
    assert machine.status("b")["waiting"] is None
    assert [e["event"] for e in machine.events("b")] == ["queued", "granted", "started", "finished"]
    assert [e["event"] for e in machine.events("a")] == ["granted", "started", "finished"]
    assert overview(machine.queue) == []


def test_first_come_first_served_within_a_priority_and_nobody_overtakes(machine: Machine) -> None:
    machine.running("a", 2)
    machine.queued("low", 1, "at-once", priority=-1, of=("0", "1"))
    machine.queued("big", 3, "at-once")
    machine.queued("small", 1, "at-once")  # device 2 is free, but it is not its turn
    machine.queued("high", 3, "at-once", priority=1)
    eventually(lambda: machine.status("low")["waiting"]["ahead"] == 3, "the last in the line")
    assert machine.holders() == ["a"]
    machine.go("a")
    for job in ("low", "big", "small", "high"):
        assert machine.end(job)["state"] == "SUCCEEDED"
    assert machine.order()[:3] == ["a", "high", "big"]
    assert not machine.is_shared()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_waiting_job_ends_at_once_when_told(machine: Machine, number: int) -> None:
    machine.running("a", 1, of=("0",))
    run = machine.queued("b", 1, of=("0",))
    machine.queued("c", 1, of=("0",))
    run.process.send_signal(number)
    status = machine.end("b")
    assert run.process.returncode == 128 + number
    assert (status["state"], status["exit_code"], status["waiting"]) == ("STOPPED", 128 + number, None)
    eventually(lambda: machine.status("c")["waiting"]["ahead"] == 0, "c has moved up")
    machine.go("a")
    machine.go("c")
    assert machine.end("c")["state"] == "SUCCEEDED"
    assert machine.order() == ["a", "c"]


@pytest.mark.parametrize("start_method", ["fork", "exec"])
@pytest.mark.parametrize("alone", [True, False], ids=["agent", "agent and fork server"])
def test_a_killed_holder_frees_its_devices_once_its_ranks_are_gone(
    machine: Machine, start_method: str, alone: bool
) -> None:
    run = machine.running("a", 3, start_method=start_method)
    machine.queued("b", 1, "at-once", start_method=start_method)
    agent, *_ = descendants(run.process.pid)
    run.process.kill()
    if not alone:
        with contextlib.suppress(ProcessLookupError):  # it ends with its guard
            os.kill(agent, signal.SIGKILL)
    assert machine.end("b")["state"] == "SUCCEEDED"
    if alone or start_method == "fork":
        assert not machine.is_shared()


def test_devices_are_kept_from_one_attempt_to_the_next(machine: Machine) -> None:
    text = (machine.folder / "rank.py").read_text()
    (machine.folder / "twice.py").write_text(text + "if os.environ['PACELINE_ATTEMPT'] == '0': sys.exit(1)\n")
    machine.running("a", 1, script="twice.py", max_restarts=1, of=("0",))
    machine.queued("b", 1, "at-once", of=("0",))
    machine.go("a")
    assert machine.end("a")["state"] == "SUCCEEDED"
    assert machine.end("b")["state"] == "SUCCEEDED"
    assert machine.order() == ["a", "a", "b"]
    assert not machine.is_shared()


def test_those_who_want_to_share_a_device_do(machine: Machine) -> None:
    machine.running("a", ("1",), share=True)
    machine.running("b", ("1",), share=True)
    machine.running("c", 1, share=True)
    machine.queued("alone", ("1",))
    entries = {e.job: e for e in overview(machine.queue)}
    assert [entries[job].devices for job in "abc"] == [("1",), ("1",), ("0",)]
    assert entries["a"].share
    for job in ("a", "b", "c", "alone"):
        machine.go(job)
        assert machine.end(job)["state"] == "SUCCEEDED"


def test_ranks_see_what_was_granted_and_slots_are_nothing_to_see(machine: Machine) -> None:
    (machine.folder / "tell.py").write_text(
        "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ['PACELINE_DEVICES'])"
    )
    for job, slots in (("gpus", False), ("slots", True)):
        machine.start(job, ("2",), script="tell.py", slots=slots, env={})
        assert machine.end(job)["devices"] == ["2"]
    logs = [(machine.home / "jobs" / job / "logs/0/rank-0.log").read_text() for job in ("gpus", "slots")]
    assert logs[0].split()[0] == "2"
    assert logs[1].split()[:1] != ["2"]
    visible = [shell_of(machine.runs[job].directory, 0, ())[1].get("CUDA_VISIBLE_DEVICES") for job in ("gpus", "slots")]
    assert visible == ["2", os.environ.get("CUDA_VISIBLE_DEVICES")], "attach sees what the ranks saw"


def test_where_ranks_are_names_no_slot_a_gpu(machine: Machine) -> None:
    for job, slots, said in (("gpus", False, "2"), ("slots", True, "")):
        machine.running(job, ("2",), slots=slots)
        (stand,) = stands(machine.runs[job].directory)
        assert stand["device"] == said
        machine.go(job)
        assert machine.end(job)["state"] == "SUCCEEDED"


def test_what_cannot_be_is_said(machine: Machine) -> None:
    machine.start("a", 4)
    status = machine.end("a")
    assert (status["state"], status["exit_code"]) == ("FAILED", 2)
    assert "it needs 4 devices, and this machine has 3 (0, 1, 2)" in status["failure"]["message"]
    machine.queue.write_text("no folder")
    machine.start("b", 1)
    status = machine.end("b")
    assert (status["state"], status["exit_code"]) == ("FAILED", 2)
    assert f"cannot queue for devices: {machine.queue}" in status["failure"]["message"]


@pytest.mark.parametrize("count", [10, pytest.param(30, marks=pytest.mark.nightly)])
def test_many_at_once_and_some_of_them_killed(machine: Machine, count: int) -> None:
    jobs = [f"job-{n}" for n in range(count)]
    for n, job in enumerate(jobs):
        machine.start(job, 1 + n % 2, "at-once", priority=n % 3)
    victims = jobs[::5]
    for n, job in enumerate(victims):
        eventually(lambda n=n: len(machine.order()) >= 3 * n, "some have run")
        machine.runs[job].process.kill()
    for job in jobs:
        machine.runs[job].process.wait(GENEROUS)
    assert not machine.is_shared()
    for job in set(jobs) - set(victims):
        assert machine.status(job)["state"] == "SUCCEEDED", job
        assert machine.order().count(job) == 1
    assert overview(machine.queue) == []
