"""Hears what happens to the other ranks, and tells them what happens to this one.

A thread of every rank listens, while the main thread may be stuck in a collective that somebody will never enter. What
it hears is raised in the main thread at the next step or collective; a main thread that does not come there within
seconds is ended with the process. Rank 0 passes on what a rank says (`hub`). A rank that has been in a collective for
seconds asks where all the others are (`places`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.contract import RESUME_CODE
from paceline.train.diagnosis import collective_trace

from . import connect
from .exit_report import last_words
from .relay import EVERYBODY, Hub, Message
from .signals import STOP_SIGNALS, die_by
from .terminate_hook import BeforeTerminate

if TYPE_CHECKING:
    from types import TracebackType

log = logging.getLogger("paceline")
_PEER_GRACE = 3.0  # seconds for the main thread to notice by itself that a rank is lost
_OWN_GRACE = 1.0  # seconds for the main thread of the rank that is to blame
_NEWS = 1.0  # seconds to learn why a collective has failed
_VERDICT = 5.0  # seconds until all have said where they are
_AGAIN = 5.0  # seconds after which another signal to stop means at once; schedulers send the first to many at a time
_SEND = 5.0  # seconds to hand a message to the kernel
ASK = 5.0  # seconds in a collective after which a rank asks where the others are; then ever more rarely
_ASK_SELDOM = 60.0  # seconds between two questions at most
LATE = 30.0  # seconds in a collective after which it says whom it waits for


class PeerLost(RuntimeError):
    """Another rank failed or is gone, so this one cannot go on."""


class LeftEarly(RuntimeError):
    """A rank left a training loop, or the job, while another one went on."""


class CollectiveMismatch(RuntimeError):
    """The ranks are in different collectives, which can never end."""


class Watch:
    """This rank's ear and voice. All ranks make one at the same place.

    Args:
        rank: this rank.
        world_size: number of ranks.
        share: hands what rank 0 passes to every rank; not used by a single process.
        local: all ranks are on this machine.
        stops: whether SIGTERM and SIGUSR2 let the step finish, see `begin`; where a script has handlers of its own for
            them, those stay.
    """

    def __init__(self, rank: int, world_size: int, share: connect.Share, *, local: bool, stops: bool) -> None:
        self._rank = rank
        links = connect.connect(rank, world_size, share, "watch", local=local) if world_size > 1 else {}
        self._links = {other: link.socket for other, link in links.items()}
        self._hub = Hub(world_size) if rank == 0 else None
        self._condition = threading.Condition(threading.RLock())
        self._count = 0  # steps begun and collectives entered, the same on all ranks of a sound script
        self._step = 0  # the step begun last
        self._loop = 0  # the loop over training batches that it belongs to
        self._passed = False  # that step's end, where it could have stopped
        self._resting = True  # no step has begun, or the last one is over
        self._held = False
        self._stop: Message | None = None
        self._told_at = 0.0
        self._told: int | None = None  # the signal that told this rank to stop
        self._meetings = self._met = 0
        self._left: dict[int, Message] = {}
        self._loops: dict[int, Message] = {}
        self._trace = collective_trace.Trace()
        self._ask_at = time.monotonic() + ASK
        self._alike = False  # all have entered the same collectives as far as they have come
        self._told_of: set[str] = set()  # collectives in which this rank has waited for long, and has said so
        self._exit: int | str | None = None  # what `sys.exit` was called with, other than success
        self._error: Exception | None = None
        self._deadline: float | None = None
        self._closed = False
        self._ear, self._wakeup = socket.socketpair()
        self._handlers: dict[int, Any] = {}
        for sock in (self._ear, self._wakeup):
            sock.setblocking(False)
        for link in self._links.values():
            link.settimeout(_SEND)
        self._old_wakeup: int | None = None
        if stops and threading.current_thread() is threading.main_thread():
            self._catch()
        self._old_hook = sys.excepthook
        sys.excepthook = self._hook
        self._old_exit = sys.exit
        sys.exit = self._on_exit
        self._terminate = BeforeTerminate(self._on_terminate) if self._links else None
        _watches.add(self)
        self._thread = threading.Thread(target=self._listen, name="paceline-watch", daemon=True)
        self._thread.start()

    # -- called by the main thread -------------------------------------------------------------------------------------

    def begin(self, loop: int, step: int, *, may_stop: bool) -> bool:
        """Begin a step, unless the run is to stop before it: then return False.

        Args:
            loop: number of the loop over training batches.
            step: number of the step, counted from 1 over all attempts.
            may_stop: whether the state is one that can be resumed, not in the middle of an accumulation.

        Raises:
            PeerLost: a rank is gone.
            LeftEarly: this rank or another one left the loop.
        """
        with self._condition:
            self._wait_while_held()
            if may_stop and self._stop is not None and step > self._stop["after"]:
                return False
            self._loop, self._step, self._passed, self._resting = loop, step, False, False
            self._exit = None
            self._enter()
            for rank, left in self._loops.items():
                if left["loop"] == loop and left["step"] < step:
                    self._say({"do": "accuse", "rank": rank, "why": self._describe(rank, left["step"])})
        return True

    def is_to_stop(self, step: int, *, may_stop: bool) -> bool:
        """Whether the run is to stop at the end of `step`; waits for the ranks where they are about to agree on that.

        Args:
            may_stop: as in `begin`.
        """
        with self._condition:
            self._wait_while_held()
            if may_stop and self._stop is not None and (step, not self._stop["late"]) > (self._stop["after"], False):
                return True
            self._passed = True
            return False

    def rest(self) -> None:
        """The training is over: until another step begins, signals do what they do without a run."""
        with self._condition:
            self._resting = True

    @property
    def stop_signal(self) -> str:
        """Name of the signal that some rank was told to stop with."""
        return signal.Signals(self._stop["signal"]).name if self._stop else ""

    def meet(self) -> None:
        """Wait for all ranks to come here: before a collective that one which left a loop early must not enter.

        Raises:
            PeerLost: a rank is gone.
            LeftEarly: a rank left a loop, or the job, too early.
        """
        with self._condition:
            self._meetings += 1
            number = self._meetings
            self._say({"do": "meet", "number": number})
            self._condition.wait_for(lambda: self._met >= number or self._error is not None)
            if self._met < number:
                self._check()

    def enter(self) -> None:
        """Enter a collective.

        Raises:
            PeerLost: a rank is gone.
            LeftEarly: a rank has left without it, or this one has left a loop too early.
            CollectiveMismatch: the ranks have called different collectives.
        """
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
        """What comes is the end: this rank may wait for the others until it closes."""
        with self._condition:
            self._trace.enter("close")

    def explain(self, error: RuntimeError) -> None:
        """Raise what is known of the other ranks where that is why a collective has failed; called before `leave`.

        Raises:
            PeerLost: a rank is gone.
            LeftEarly: a rank left the loop, or has left without this collective.
            CollectiveMismatch: the ranks have called different collectives.
        """
        if not self._links:
            return
        with self._condition:
            self._find_out()
            cause = self._error or self._who_left()
            if cause is not None:
                self._deadline = None
                raise cause from error

    def loop_ended(self, loop: int) -> None:
        """Tell that this rank is through with a loop over training batches."""
        with self._condition:
            if self._exit is None:  # or it is the process that ends
                self._say({"do": "loop", "loop": loop, "step": self._step})

    def failed(self, error: BaseException) -> None:
        """Tell the others what ends this rank."""
        if isinstance(error, SystemExit):
            self._note_exit(error.code)
            return
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        with self._condition:
            if not self._closed and not isinstance(error, PeerLost):
                self._say({"do": "failed", "why": f"failed ({why})"})

    def close(self) -> None:
        """Take leave of the others.

        Raises:
            LeftEarly: this rank has left a loop too early.
        """
        with self._condition:
            if self._closed:
                return
            self._closed = True
            if self._exit is not None:
                code, why = (1, f" ({self._exit})") if isinstance(self._exit, str) else (self._exit, "")
                self._say({"do": "failed", "why": f"left with exit code {code}{why}"})
            place = self._trace.place("")
            self._say({"do": "left", "count": self._count, "step": self._step, "place": place})
            error = self._error
        self._wake()
        self._thread.join()
        self._release()
        if sys.excepthook == self._hook:
            sys.excepthook = self._old_hook
        if isinstance(error, LeftEarly):
            raise error

    # -- what follows is called with the lock --------------------------------------------------------------------------

    def _wait_while_held(self) -> None:
        while self._held and self._error is None:
            self._condition.wait()
        self._check()

    def _enter(self) -> None:
        self._count += 1
        self._check()
        if (error := self._who_left()) is not None:
            raise error

    def _who_left(self) -> LeftEarly | None:
        """A rank that has left without what this one has entered last."""
        for rank, left in self._left.items():
            if self._count > left["count"]:
                return LeftEarly(self._describe(rank, left["step"]))
        return None

    def _check(self) -> None:
        if self._error is not None and not self._closed:
            self._deadline = None  # the main thread is not stuck
            raise self._error

    def _describe(self, rank: int, step: int) -> str:
        on = f"went on with step {self._step}"
        if self._step <= step and self._trace.seconds is not None:
            on = self._trace.last()
        return (
            f"rank {rank} left after step {step}, while rank {self._rank} {on}; "
            "all ranks must take the same number of steps and call the same collectives"
        )

    def _find_out(self) -> None:
        """Wait for what is known of the others where a collective has failed."""

        def is_known() -> bool:
            return self._error is not None or self._who_left() is not None

        def is_explained() -> bool:
            return is_known() and (self._alike or not isinstance(self._error or self._who_left(), LeftEarly))

        self._trace.failed, self._alike = True, False
        self._say({"do": "ask"})
        if not self._condition.wait_for(is_explained, _NEWS):
            self._condition.wait_for(lambda: self._alike or is_known(), _VERDICT)

    def _answer(self, number: int) -> None:
        """Say where this rank is, which serves it, too."""
        seconds = self._trace.seconds or 0.0
        self._ask_at = time.monotonic() + min(max(ASK, seconds / 2), _ASK_SELDOM)
        place = self._trace.place(collective_trace.current_line(threading.main_thread().ident or 0))
        self._say({"do": "here", "round": number, "place": place})

    def _ask(self) -> None:
        """Ask where the others are, if this rank has been in a collective for long."""
        seconds = self._trace.seconds
        if seconds is None or seconds < ASK:
            self._ask_at = time.monotonic() + ASK - (seconds or 0.0)
            return
        self._ask_at = time.monotonic() + min(max(ASK, seconds / 2), _ASK_SELDOM)
        if self._error is None:
            self._say({"do": "ask"})

    def _waits_for(self, late: list[list[Any]]) -> None:
        """Say once which ranks have not entered the collective that this one is in.

        Args:
            late: a rank each, and the line where it is, or None if it does not answer.
        """
        seconds, done = self._trace.seconds, self._trace.last()
        if seconds is None or seconds < LATE or done in self._told_of:
            return
        self._told_of.add(done)
        rank, line = late[0]
        more = f" and {len(late) - 1} more" if len(late) > 1 else ""
        where = "it does not answer" if line is None else f"it is at {line or 'no line of the script'}"
        log.warning("waiting %.0f s for rank %d%s, which has not %s; %s", seconds, rank, more, done, where)

    def _say(self, message: Message) -> None:
        if self._hub is not None:
            self._pass_on(self._hub.hear(0, message))
        else:
            self._send(0, message)

    def _pass_on(self, outbox: list[tuple[int, Message]]) -> None:
        for to, message in outbox:
            for rank in [0, *self._links] if to == EVERYBODY else [to]:
                if rank:
                    self._send(rank, message)
                else:
                    self._heed(message)

    def _send(self, rank: int, message: Message) -> None:
        link = self._links.get(rank)
        if link is not None:
            with contextlib.suppress(OSError):  # it is gone: reading tells
                link.sendall(json.dumps(message).encode() + b"\n")

    def _heed(self, message: Message) -> None:
        """Take what the hub says."""
        what, rank = message["do"], message.get("rank")
        if what == "hold":
            self._held = True
            self._say({"do": "at", "step": self._step, "passed": self._passed})
        elif what == "stop":
            self._held, self._stop = False, message
        elif what == "met":
            self._met = message["number"]
        elif what in ("where", "alike", "late", "mismatch"):
            self._heed_places(message)
        elif rank == self._rank:
            return  # what this rank itself has said
        elif what == "loop":
            self._loops[message["rank"]] = message
            if message["loop"] == self._loop and message["step"] < self._step:
                why = self._describe(message["rank"], message["step"])
                self._say({"do": "accuse", "rank": message["rank"], "why": why})
        elif what == "left":
            self._left[message["rank"]] = message
            if (error := self._who_left()) is not None:
                self._give_up(error, _PEER_GRACE)
        elif what == "accused":
            self._give_up(LeftEarly(message["why"]), _OWN_GRACE)
        elif what == "lost":
            self._lose(message["rank"], message["why"])
        self._condition.notify_all()

    def _heed_places(self, message: Message) -> None:
        """Take what the hub says of where all are."""
        what = message["do"]
        if what == "where":
            self._answer(message["round"])
        elif what == "alike":
            self._alike = True
        elif what == "late":
            self._waits_for(message["ranks"])
        else:
            if isinstance(self._error, LeftEarly):
                self._error = None  # this is why
            why = f"{message['why']}; all ranks must call the same collectives, in the same order"
            self._give_up(CollectiveMismatch(why), _OWN_GRACE)

    def _lose(self, rank: int, why: str) -> None:
        self._give_up(PeerLost(f"rank {rank} {why}; rank {self._rank} cannot go on without it"), _PEER_GRACE)
        if self._told == signal.SIGTERM and not self._closed:
            die_by(self._told)  # it cannot finish its step, and whoever stops the job need not wait

    def _give_up(self, error: Exception, grace: float) -> None:
        if self._error is None:
            self._error = error
            self._deadline = time.monotonic() + grace
            self._condition.notify_all()

    # -- the listening thread ------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        buffers = dict.fromkeys(self._links, b"")
        with selectors.DefaultSelector() as selector:
            selector.register(self._ear, selectors.EVENT_READ, None)
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while not self._closed:
                due = [self._deadline] if self._deadline is not None else [self._ask_at] if self._links else []
                ready = selector.select(max(0.0, due[0] - time.monotonic()) if due else None)
                if not ready and not self._closed:
                    with self._condition:
                        if self._deadline is None:
                            self._ask()
                        elif time.monotonic() >= self._deadline:
                            self._end_process()
                for key, _ in ready:
                    if key.data is None:
                        self._hear_signals()
                    elif not self._hear(key.data, buffers):
                        selector.unregister(key.fileobj)

    def _hear(self, rank: int, buffers: dict[int, bytes]) -> bool:
        """Read what came from a rank; returns whether more may come."""
        try:
            data = self._links[rank].recv(65536)
        except OSError:
            data = b""
        *lines, buffers[rank] = (buffers[rank] + data).split(b"\n")
        with self._condition:
            for line in lines:
                message = json.loads(line)
                if self._hub is not None:
                    self._pass_on(self._hub.hear(rank, message))
                else:
                    self._heed(message)
            if not data:
                if self._hub is not None:
                    self._pass_on(self._hub.gone(rank))
                elif 0 not in self._left:
                    self._lose(0, "failed (it is gone)")
        return bool(data)

    def _hear_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._ear.recv(4096):
                if number in self._handlers and signal.getsignal(number) == self._on_signal:
                    self._was_told(number)

    def _was_told(self, number: int) -> None:
        with self._condition:
            first, self._told = self._told is None, number
            again = not first and time.monotonic() > self._told_at + _AGAIN
            self._told_at = self._told_at if not first else time.monotonic()
            if self._closed:
                return
            if self._resting or self._error is not None or again:
                die_by(number)  # there is nothing to save yet, or no way to
            elif first:
                self._say({"do": "stop", "signal": number})

    def _end_process(self) -> None:
        """The main thread is stuck: say why, and where it stood."""
        error = self._error
        assert error is not None
        text = f"{type(error).__module__}.{type(error).__qualname__}: {error}\n"
        if isinstance(error, (LeftEarly, CollectiveMismatch)):
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame else ""
            text = f"Traceback (most recent call last):\n{stack}{text}"
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        last_words(type(error).__name__, str(error), text)
        os._exit(1)

    # -- signals and exceptions ----------------------------------------------------------------------------------------

    def _catch(self) -> None:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) == signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, self._on_signal)
        if self._handlers:
            self._old_wakeup = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)

    def _on_signal(self, number: int, _: object) -> None:
        """Python's own handler; where another library has taken the wakeup descriptor, it tells the thread."""
        with contextlib.suppress(OSError):
            self._wakeup.send(bytes([number]))

    def _release(self) -> None:
        """Give back signals and connections."""
        for number, old in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, old)
        self._handlers.clear()
        if self._old_wakeup is not None:
            current = signal.set_wakeup_fd(-1)
            if current != self._wakeup.fileno():
                signal.set_wakeup_fd(current)
            elif self._old_wakeup != -1:
                signal.set_wakeup_fd(self._old_wakeup)
        if sys.exit == self._on_exit:
            sys.exit = self._old_exit
        if self._terminate is not None:
            self._terminate.release()
        for sock in (self._ear, self._wakeup, *self._links.values()):
            sock.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wakeup.send(b"\0")

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.failed(error)
        self._old_hook(kind, error, trace)

    def _on_exit(self, code: Any = None, /) -> NoReturn:
        """`sys.exit` of this process: a rank that leaves by it does not leave a loop too early."""
        self._note_exit(code)
        self._old_exit(code)

    def _note_exit(self, code: Any) -> None:
        if threading.current_thread() is threading.main_thread() and code not in (None, 0, RESUME_CODE):
            self._exit = code if isinstance(code, int) else str(code)

    def _on_terminate(self) -> None:
        """C++ is about to end the process, from any thread: that may be since other ranks are in other collectives."""
        with self._condition:
            if self._closed:
                return
            self._find_out()
            known = isinstance(self._error, CollectiveMismatch)
        if known:  # whose message ends the process
            threading.Event().wait(2 * _OWN_GRACE)

    def forget(self) -> None:
        """In a forked child: it is no rank, and must neither keep connections alive nor swallow signals."""
        self._closed = True
        self._condition = threading.Condition(threading.RLock())
        self._release()


class Collective(contextlib.AbstractContextManager[None]):
    """Around each collective: others can ask about it, and where it fails, the error is what is known of them."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.enter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, RuntimeError):
                self._watch.explain(error)
        finally:
            self._watch.leave()


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_mask = threading.local()  # the signals that a thread had blocked before it forked


def _before_fork() -> None:
    """Keep signals away until the child has its own handlers: those of the rank would answer for the rank."""
    _mask.old = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.old)


def _forget_all() -> None:
    for watch in _watches:
        if not watch._closed:
            watch.forget()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget_all)
