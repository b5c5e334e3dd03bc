"""One rank's part in the agreement on steps, stops and failures with the other ranks.

The listener thread of every rank receives messages while the main thread may be in a collective that another rank never
enters. What ends the run is raised in the main thread at the next step or collective; a main thread that does not come
there within seconds is ended with the process. Rank 0 relays what the ranks send (`relay`). A rank that has been in a
collective for seconds asks where all the others are (`paceline.train.collective_trace`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from paceline.contract import RESUME_CODE
from paceline.train.collective_trace import LateRanks, Trace
from paceline.train.group.forks import forget_in_children

from . import connect
from .errors import CollectiveMismatch, LeftEarly, PeerLost, ReplicaMismatch
from .exit_report import Fatal
from .listener import Listener
from .process_hooks import ProcessHooks, die_by
from .relay import EVERYBODY, Message, Relay
from .star import Star

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.contract.records import ReplicasRecord
    from paceline.train.replicas import judging

log = logging.getLogger("paceline")
_PEER_GRACE = 3.0  # seconds for the main thread to notice by itself that a rank is lost
_OWN_GRACE = 1.0  # seconds for the main thread of the rank that is to blame
_CAUSE_SECONDS = 1.0  # to learn why a collective has failed
_ANSWER_SECONDS = 30.0  # until all have answered where they are; their machines may be busy
_AGAIN_SECONDS = 5.0  # after which another signal to stop means at once; schedulers send the first to many at a time
_LAST_SECONDS = 5.0  # at the end, for the comparison of what was trained last
_SEND_SECONDS = 1.0  # at the end, for what a rank has not taken yet


class Watch:
    """This rank's part in the agreement. All ranks make one at the same place.

    Attributes:
        parts: returns what this rank had at a moment whose sum it has sent, see `compare_replicas`.
    """

    def __init__(self, rank: int, world_size: int, share: connect.Share, *, local: bool, stops: bool) -> None:
        self.stops = stops
        self._rank = rank
        links = connect.connect(rank, world_size, share, "watch", local=local) if world_size > 1 else {}
        self._star, self._has_others = Star(links, accepted=rank == 0), world_size > 1
        self._relay = Relay(world_size) if rank == 0 else None
        self._condition = threading.Condition(threading.RLock())
        self._count = 0  # steps begun and collectives entered, the same on all ranks of a sound script
        self._step = 0  # the step begun last
        self._loop = 0  # the loop over training batches that it belongs to
        self._passed = False  # that step's end, where it could have stopped
        self._resting = True  # no step has begun, or the last one is over
        self._held = False
        self._stop: Message | None = None
        self._signal: int | None = None  # by which this rank was asked to stop
        self._signal_at = 0.0
        self._meetings = self._met = 0
        self._departed: dict[int, Message] = {}
        self._loops: dict[int, Message] = {}
        self._trace = Trace()
        self._late = LateRanks(self._trace)
        self._alike = False  # all have entered the same collectives as far as they have come
        self._exit: int | str | None = None  # what `sys.exit` was called with, other than success
        self.parts: Callable[[judging.Key], Sequence[judging.Part]] = lambda _: ()
        self._uncompared: set[judging.Key] = set()  # moments whose sums this rank has sent, and waits for
        self._has_warned = False  # of ranks that are different
        self._fatal = Fatal()
        self._has_failed = False  # an exception ends this rank
        self._leaving = self._closed = False
        self._is_alone = False  # rank 0, which relays, is gone
        self._listener = Listener(self, self._star)
        self._hooks = ProcessHooks(self, self._star.wakeup, signals=stops, terminate=self._has_others)
        forget_in_children(self)
        self._listener.start()

    # -- called by the main thread -------------------------------------------------------------------------------------

    def begin(self, loop: int, step: int, *, may_stop: bool) -> bool:
        """Begin a step, unless the run is to stop before it and the state can be resumed: then return False."""
        with self._condition:
            self._wait_while_held()
            if may_stop and self._stop is not None and step > self._stop["after"]:
                return False
            self._loop, self._step, self._passed, self._resting = loop, step, False, False
            self._exit = None
            self._enter()
            for rank, message in self._loops.items():
                if message["loop"] == loop and message["step"] < step:
                    self._send({"do": "left_early", "rank": rank, "why": self._describe(rank, message["step"])})
        return True

    def is_to_stop(self, step: int, *, may_stop: bool) -> bool:
        """Whether the run is to stop at the end of `step`; wait for the ranks where they are about to agree."""
        with self._condition:
            self._wait_while_held()
            if may_stop and self._stop is not None and (step, not self._stop["late"]) > (self._stop["after"], False):
                return True
            self._passed = True
            return False

    def rest(self) -> None:
        """Note that the training is over: until another step begins, signals have the same effect as without a run."""
        with self._condition:
            self._resting = True

    @property
    def stop_signal(self) -> str:
        """Name of the signal by which the run was asked to stop; "" if it was not."""
        return signal.Signals(self._stop["signal"]).name if self._stop else ""

    def meet(self) -> None:
        """Wait for all ranks to call this, before a collective that a rank which left a loop early must not enter."""
        with self._condition:
            self._meetings += 1
            number = self._meetings
            self._send({"do": "meet", "number": number})
            self._condition.wait_for(lambda: self._met >= number or self._fatal.error is not None)
            if self._met < number:
                self._check()

    def enter(self) -> None:
        """Enter a collective."""
        with self._condition:
            self._trace.enter()
            try:
                self._enter()
            except RuntimeError:
                self._trace.leave()
                raise

    def leave(self) -> None:
        """It is over."""
        self._trace.leave()

    def ends(self) -> None:
        """Note that the script has ended: until `close`, this rank may wait for the others."""
        with self._condition:
            self._trace.enter("close")

    def explain(self, error: RuntimeError | ConnectionError) -> None:
        """Raise what is known of the other ranks where that is why a collective has failed; called before `leave`."""
        if not self._has_others:
            return
        with self._condition:
            self._find_cause()
            cause = self._fatal.error or self._who_departed()
            if cause is not None:
                self._fatal.handed_over()
                raise cause from error

    def compare(self, inputs: list[int], data: int | None, line: str) -> None:
        """Send checksums of what this rank has trained on first; rank 0 warns if all are equal. Waits for nobody."""
        with self._condition:
            self._send({"do": "saw", "inputs": inputs, "data": data, "line": line})

    def compare_replicas(self, key: judging.Key, step: int, digest: str, *, waits: bool, warns: bool) -> None:
        """Send a digest of what this rank has after a step, for comparison with the other ranks; waits for nobody."""
        with self._condition:
            self._check()
            if waits:
                self._uncompared.add(key)
            self._send({"do": "sum", "key": key, "step": step, "sum": digest, "waits": waits, "warns": warns})

    def await_replicas(self) -> None:
        """Wait until it is known whether all ranks were equal at the moments for which this one waits."""
        with self._condition:
            self.enter()
            try:
                self._condition.wait_for(lambda: not self._uncompared or self._fatal.error is not None)
                self._check()
            finally:
                self._uncompared.clear()
                self.leave()

    def replicas_differ(self, why: str, *, warns: bool) -> None:
        """The ranks are different, as any thread has learned: end this one, or let rank 0 warn, once."""
        with self._condition:
            if not warns:
                self._give_up(ReplicaMismatch(why), _OWN_GRACE)
            elif self._rank == 0 and not self._has_warned:
                self._has_warned = True
                log.warning("%s", why)

    @property
    def compared(self) -> ReplicasRecord | None:
        """On rank 0, how often all ranks were equal; None before that."""
        if self._relay is None or not self._relay.replicas.equal:
            return None
        return {"compared": self._relay.replicas.equal, "step": self._relay.replicas.step}

    def exits(self, code: Any) -> None:
        """Note that `sys.exit` was called: a rank that ends this way has not left its loop too early."""
        if code not in (None, 0, RESUME_CODE):
            self._exit = code if isinstance(code, int) else str(code)

    def terminates(self) -> None:
        """C++ is about to end the process, from any thread. Ranks in different collectives may be the cause."""
        with self._condition:
            if self._closed:
                return
            self._find_cause()
            known = isinstance(self._fatal.error, CollectiveMismatch)
        if known:  # its message ends the process
            threading.Event().wait(_ANSWER_SECONDS)

    def loop_ended(self, loop: int) -> None:
        """Send that this rank has left a loop over training batches."""
        with self._condition:
            if self._exit is None:  # else the whole process ends
                self._send({"do": "loop", "loop": loop, "step": self._step})

    def failed(self, error: BaseException) -> None:
        """Send the other ranks the exception that ends this one."""
        if isinstance(error, SystemExit):
            self.exits(error.code)
            return
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        with self._condition:
            self._has_failed = True
            if not self._closed and not isinstance(error, PeerLost):
                self._send({"do": "failed", "why": f"failed ({why})"})

    def close(self) -> None:
        """Leave the others, once it is known whether all are equal where this rank waits for that."""
        with self._condition:
            if self._closed:
                return
            self._leaving = waits = bool(self._uncompared) and self.ends_well and not self._is_alone
            self._closed = not waits
            if self._exit is not None:
                code, why = (1, f" ({self._exit})") if isinstance(self._exit, str) else (self._exit, "")
                self._send({"do": "failed", "why": f"exited with code {code}{why}"})
            place = self._trace.place("")
            self._send({"do": "left", "count": self._count, "step": self._step, "place": place, "waits": waits})
            if waits:
                # Another rank may go on for long, as to evaluate what was trained.
                self._condition.wait_for(lambda: not self._uncompared or self._fatal.error is not None, _LAST_SECONDS)
            self._closed = True
            error = self._fatal.error
        self.parts = lambda _: ()  # what a model holds, such as an open file, is closed in time
        self._listener.stop()
        self._hooks.release()
        self._star.close(_SEND_SECONDS)
        self._hooks.release_exceptions()
        if isinstance(error, (LeftEarly, ReplicaMismatch)):
            raise error

    def forget(self) -> None:
        """In a forked child: it is no rank, so it must neither keep connections alive nor handle signals."""
        if self._closed:
            return
        self._closed = True
        self._condition = threading.Condition(threading.RLock())
        self._hooks.release()
        self._star.close()

    @property
    def ends_well(self) -> bool:
        """Whether this rank, if it ends now, does so without an error of its own or of another rank."""
        return not self._has_failed and self._exit is None and self._fatal.error is None

    @property
    def is_failing(self) -> bool:
        """Whether an exception or `sys.exit` ends this rank, so that its exit code says that it has failed."""
        return self._has_failed or self._exit is not None

    # -- called by the listener's thread -------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When the process ends, or when to look whether the others are late."""
        if self._fatal.deadline is not None:
            return self._fatal.deadline
        return self._late.due if self._has_others else None

    def deadline_passed(self) -> None:
        """End the process, or ask where the other ranks are if this one has waited for long."""
        with self._condition:
            if self._fatal.deadline is None:
                if self._late.is_time_to_ask() and self._fatal.error is None:
                    self._send({"do": "ask"})
            elif time.monotonic() >= self._fatal.deadline:
                self._fatal.end_process()

    def received(self, rank: int, message: Message) -> None:
        """Handle what came from a rank: on rank 0 a message to relay, elsewhere one from the relay."""
        with self._condition:
            if self._relay is not None:
                self._deliver(self._relay.receive(rank, message))
            else:
                self._handle(message)

    def disconnected(self, rank: int, why: str) -> None:
        """Handle a connection that has ended, or can no longer be trusted."""
        with self._condition:
            if self._relay is not None:
                self._deliver(self._relay.disconnected(rank, why))
                return
            self._is_alone = True
            if self._leaving:  # nobody can say any more whether ranks are equal
                self._uncompared.clear()
                self._condition.notify_all()
            elif 0 not in self._departed:
                self._lose(0, f"failed ({why})")

    def signalled(self, number: int) -> None:
        """Handle a signal to stop."""
        if not self._hooks.catches(number):
            return
        with self._condition:
            first, self._signal = self._signal is None, number
            again = not first and time.monotonic() > self._signal_at + _AGAIN_SECONDS
            self._signal_at = self._signal_at if not first else time.monotonic()
            if self._closed:
                return
            if self._resting or self._leaving or self._fatal.error is not None or again:
                die_by(number)  # there is nothing to save yet, or no way to
            elif first:
                self._send({"do": "stop", "signal": number})

    # -- what follows is called with the lock --------------------------------------------------------------------------

    def _wait_while_held(self) -> None:
        while self._held and self._fatal.error is None:
            self._condition.wait()
        self._check()

    def _enter(self) -> None:
        self._count += 1
        self._check()
        if (error := self._who_departed()) is not None:
            raise error

    def _who_departed(self) -> LeftEarly | None:
        """A rank that has left without what this one has entered last."""
        for rank, message in self._departed.items():
            if self._count > message["count"]:
                return LeftEarly(self._describe(rank, message["step"]))
        return None

    def _check(self) -> None:
        if self._fatal.error is not None and not self._closed:
            self._fatal.handed_over()
            raise self._fatal.error

    def _describe(self, rank: int, step: int) -> str:
        on = f"went on with step {self._step}"
        if self._step <= step and self._trace.seconds is not None:
            on = self._trace.last()
        return (
            f"rank {rank} left after step {step}, while rank {self._rank} {on}; "
            "all ranks must take the same number of steps and call the same collectives"
        )

    def _find_cause(self) -> None:
        """After a collective has failed: wait until the other ranks' state is known."""

        def is_known() -> bool:
            return self._fatal.error is not None or self._who_departed() is not None

        def is_explained() -> bool:
            return is_known() and (self._alike or not isinstance(self._fatal.error or self._who_departed(), LeftEarly))

        self._trace.failed, self._alike = True, False
        self._send({"do": "ask"})
        if not self._condition.wait_for(is_explained, _CAUSE_SECONDS):
            self._condition.wait_for(lambda: self._alike or is_known(), _ANSWER_SECONDS)

    def _send(self, message: Message) -> None:
        """Send to rank 0, which relays it."""
        if self._relay is not None:
            self._deliver(self._relay.receive(0, message))
        else:
            self._star.send(0, json.dumps(message).encode())

    def _deliver(self, outbox: list[tuple[int, Message]]) -> None:
        for to, message in outbox:
            if to in (0, EVERYBODY):
                self._handle(message)
            if to == EVERYBODY:
                self._star.send_to_all(json.dumps(message).encode())
            elif to:
                self._star.send(to, json.dumps(message).encode())

    def _handle(self, message: Message) -> None:
        """Handle a message of the relay."""
        if message["do"] in ("equal", "differ", "judged"):
            self._handle_replicas(message)
        elif not self._leaving:  # then only that is waited for
            self._handle_other(message)
        self._condition.notify_all()

    def _handle_other(self, message: Message) -> None:
        """Handle one that is not about replicas."""
        what, rank = message["do"], message.get("rank")
        if what == "hold":
            self._held = True
            self._send({"do": "at", "step": self._step, "passed": self._passed})
        elif what == "stop":
            self._held, self._stop = False, message
        elif what == "same":
            log.warning("%s", message["why"])
        elif what == "met":
            self._met = message["number"]
        elif what in ("where", "alike", "late", "mismatch"):
            self._handle_places(message)
        elif rank == self._rank:
            return  # what this rank itself has sent
        elif what == "loop":
            self._loops[message["rank"]] = message
            if message["loop"] == self._loop and message["step"] < self._step:
                why = self._describe(message["rank"], message["step"])
                self._send({"do": "left_early", "rank": message["rank"], "why": why})
        elif what == "left":
            self._departed[message["rank"]] = message
            if (error := self._who_departed()) is not None:
                self._give_up(error, _PEER_GRACE)
        elif what == "left_early":
            self._give_up(LeftEarly(message["why"]), _OWN_GRACE)
        elif what == "lost":
            self._lose(message["rank"], message["why"])

    def _handle_places(self, message: Message) -> None:
        """Handle a message about where the ranks are."""
        what = message["do"]
        if what == "where":
            self._send({"do": "here", "round": message["round"], "place": self._late.answer()})
        elif what == "alike":
            self._alike = True
        elif what == "late":
            self._late.warn(message["ranks"], message.get("rank"), message.get("place"))
        else:
            why = f"{message['why']}; all ranks must call the same collectives, in the same order"
            if self._fatal.explain(CollectiveMismatch(why), _OWN_GRACE):
                self._main_thread_is_to_raise()

    def _handle_replicas(self, message: Message) -> None:
        """Handle a message about what the ranks have."""
        of, waited, count = message["key"]
        if message["do"] == "differ":
            self._send({"do": "parts", "key": message["key"], "parts": self.parts((of, waited, count))})
        elif message["do"] == "equal":
            self._uncompared.discard((of, waited, count))
        else:
            self.replicas_differ(message["why"], warns=message["warns"])

    def _lose(self, rank: int, why: str) -> None:
        self._give_up(PeerLost(f"rank {rank} {why}; rank {self._rank} cannot go on without it"), _PEER_GRACE)
        if self._signal == signal.SIGTERM and not self._closed:
            die_by(self._signal)  # it cannot finish its step, so the stop need not wait

    def _give_up(self, error: Exception, grace: float) -> None:
        if self._fatal.set(error, grace):
            self._main_thread_is_to_raise()

    def _main_thread_is_to_raise(self) -> None:
        self._star.wake()
        self._condition.notify_all()


class Collective(contextlib.AbstractContextManager[None]):
    """Around each collective: others can ask about it, and where it fails, the error is what is known of them."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.enter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, (RuntimeError, ConnectionError)):
                self._watch.explain(error)
        finally:
            self._watch.leave()
