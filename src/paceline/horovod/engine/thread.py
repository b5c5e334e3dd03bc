"""The one background thread of a rank: it negotiates with the others, and starts what all have submitted.

The thread of rank 0 is the coordinator too. It sleeps in `select` until something is submitted or comes from another
rank. Collectives end in threads of the process group, which copy the results and wake whoever waits.

A thread that waits for a small sum leads meanwhile: it does itself what the engine's thread would, and no other thread
is woken for it. It leaves everything but small sums to the engine's thread.
"""

from __future__ import annotations

import json
import logging
import selectors
import threading
import time
from typing import TYPE_CHECKING, Any, TypedDict

from paceline.train.control.errors import ReplicaMismatch
from paceline.train.control.exit_report import has_failed
from paceline.train.control.star import WAKEUP, Star
from paceline.train.group.forks import forget_in_children

from . import carried
from .buffers import Buffers
from .errors import HorovodInternalError
from .execution import Members, zeros
from .fusion import batches
from .mixed import execute
from .negotiation import Negotiator, Request, Response, numbers_of
from .replicas import Replicas
from .stall import StallCheck

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.contract.links import Link
    from paceline.train.control.star import Ready
    from paceline.train.replicas.judging import Message

    from .entries import Entry
    from .negotiation import Key
    from .timeline import Timeline
    from .variables import Settings

log = logging.getLogger("paceline")
_END = 20.0  # seconds that shutdown waits for collectives that other ranks are still in
_ENOUGH = 8 << 20  # bytes that are sent without waiting for more
_PLANS = 1000  # sets of operations that become ready together, for which batches are kept
_CYCLES = 20  # cycles for which fewer are collected while no thread waits in `synchronize`
_COMPARED = 1.0  # seconds that shutdown waits for ranks that may still send what is compared
_LAST = 1.0  # seconds for what other ranks have not taken yet when the engine ends
_LOOK = 1.0  # seconds after which a thread that leads looks whether it still does: a signal handler may have ended that
_SHUT_DOWN = "Horovod has been shut down"


class _Message(TypedDict, total=False):
    """A message to or from the coordinator; its requests and responses are lists of their fields when they come."""

    m: str  # which operations that all ranks know, as a mask of bits; with it come q or r, and d
    q: list[Any]  # requests
    r: list[Any]  # responses
    d: carried.Numbers
    c: Message
    end: str  # who has asked to shut down
    drained: int
    close: int
    abort: str  # why


class Engine:
    """The operations of this rank that have not ended, and the thread that does them."""

    def __init__(
        self,
        rank: int,
        members: Members,
        links: dict[int, Link],  # on rank 0 to all others, elsewhere to rank 0 under 0
        settings: Settings,
        make_members: Callable[[int, tuple[int, ...]], Members],  # of a process set; its ranks call it at the same time
    ) -> None:
        self.rank = rank
        self.settings = settings
        self.sets: dict[int, tuple[int, ...]] = {0: members.ranks}
        self.timeline: Timeline | None = None
        self._members: dict[int, Members] = {0: members}
        self._make_members = make_members
        self._negotiator = Negotiator(members.size, settings.cache_capacity) if rank == 0 else None
        self._stall = StallCheck(settings)
        self._others = links.keys()
        self._star = Star(links, accepted=rank == 0)
        self._unattended = selectors.DefaultSelector()  # has the star, but while a thread leads
        self._unattended.register(self._star, selectors.EVENT_READ)
        self._turn = threading.Lock()  # of the thread that acts, or leads
        self._leader: int | None = None  # its ident
        self._is_acting = False
        self._changed = threading.Condition(threading.Lock())
        # Shared with the threads that submit, under the lock of `_changed`:
        self._entries: dict[Key, Entry] = {}
        self._numbers: dict[Key, tuple[int, Request]] = {}  # what this rank may submit as a bit
        self._mask = 0
        self._submitted: dict[int, int] = {}  # operations so far, by process set
        self._requests: list[Request] = []
        self._unsent: list[Entry] = []
        self._is_dirty = False
        self._pending = 0  # bytes that were submitted and not sent
        self._flush = False
        self._has_joined = False
        self._failure = ""
        self._in_flight = 0
        self._started: set[int] = set()  # ids of the entries in flight
        self._ending = ""  # who has asked to shut down; "" while nobody has
        # Of the thread whose turn it is:
        self._left: list[tuple[int, list[Response], carried.Numbers]] = []  # to the engine's thread, by one that leads
        self._cached: dict[int, Response] = {}
        self._carried: dict[Key, dict[int, carried.Numbers]] = {}  # on the coordinator: what ranks have sent
        self._plans: dict[int, list[list[Response]]] = {}
        self._buffers = Buffers(settings.fusion_threshold)
        self._deadline = 0.0
        self._drained: set[int] = set()
        self._is_drained = False
        self._ends_everywhere = False  # the coordinator has asked all ranks to shut down
        self._is_over = False
        self.replicas = Replicas(
            rank, members.size, settings.replicas, self._star.wake
        )  # compares what the ranks train
        self._thread = threading.Thread(target=self._run, name="paceline-horovod", daemon=True)
        forget_in_children(self)
        self._thread.start()

    # -- called by any thread ------------------------------------------------------------------------------------------

    def submit(self, entry: Entry, *, is_awaited: bool = False) -> None:
        """Submit an operation; `is_awaited` if `wait` follows at once. Then a small sum has mostly ended on return."""
        request = entry.request
        key = request.key
        if self._is_leading() and self._is_acting:
            raise HorovodInternalError("a signal handler has used Horovod in the middle of another operation")
        with self._changed:
            if self._failure:
                raise self._error(self._failure)
            if key in self._entries:
                raise ValueError(
                    f"Duplicate tensor name {request.name!r}: an earlier {request.kind} of this name has not ended; "
                    "synchronize it first, or take another name"
                )
            self._entries[key] = entry
            self._submitted[request.process_set] = self._submitted.get(request.process_set, 0) + 1
            self._unsent.append(entry)
            self._has_joined = self._has_joined or request.kind == "join"
            known = self._numbers.get(key)
            if known is not None and known[1] == request:
                self._mask |= 1 << known[0]
            else:
                self._requests.append(request)
            was_dirty, self._is_dirty = self._is_dirty, True
            was_enough = self._pending >= _ENOUGH
            self._pending += sum([tensor.nbytes for tensor in entry.inputs])
            becomes_enough = self._pending >= _ENOUGH and not was_enough
            was_awaited, self._flush = self._flush, self._flush or is_awaited
        leads = is_awaited and carried.fits(request) and self._lead(entry)
        if not leads and (not was_dirty or becomes_enough or self._flush != was_awaited):
            self._star.wake()

    def wait(self, entry: Entry) -> None:
        if not entry.is_done:
            if self._is_dirty and not self._flush:
                self._flush = True
                self._star.wake()
            with self._changed:
                while not entry.is_done:
                    self._changed.wait()
        if entry.error:
            raise self._error(entry.error)

    def _error(self, why: str) -> Exception:
        ends = self._failure and self.replicas.is_fatal
        return ReplicaMismatch(self.replicas.why) if ends else HorovodInternalError(why)

    def shutdown(self) -> None:
        """End on all ranks. What waits for other ranks fails there and here; what has begun is completed."""
        if not (self._failure or self._is_leading() or has_failed()):
            self.replicas.finish()
            self.replicas.settle(_COMPARED)
        self._shut_down()
        self.replicas.check()

    def _shut_down(self) -> None:
        with self._changed:
            self._ending = self._ending or f"rank {self.rank} has asked for it"
        self._star.wake()
        if self._is_leading():  # in a signal handler
            if self._is_acting:
                return  # the thread goes on when the handler has ended
            self._hand_over()
        self._thread.join(_END)

    def submitted(self, number: int) -> tuple[int, list[Request]]:
        """How many operations this rank has submitted in a process set, and those of them that have not ended."""
        entries = list(self._entries.values())  # no lock: whoever asks may not wait
        return self._submitted.get(number, 0), [it.request for it in entries if it.request.process_set == number]

    @property
    def failure(self) -> str:
        """Why nothing can be submitted any more; "" if it can."""
        return self._failure

    def forget(self) -> None:
        """In a child of this process, which is no rank: close what belongs to the rank."""
        self._star.close()

    # -- leading -------------------------------------------------------------------------------------------------------

    def _is_leading(self) -> bool:
        """Whether this thread leads, and is now in a signal handler."""
        return self._leader == threading.get_ident()

    def _lead(self, entry: Entry) -> bool:
        """Act in this thread until a small sum has ended, or there is something else to do; False if another acts."""
        if self._is_leading():
            self._hand_over()
        if not self._turn.acquire(blocking=False):
            return False
        if self._is_over:
            self._turn.release()
            return True
        self._leader = threading.get_ident()
        try:
            self._unattended.unregister(self._star)
            ready: Ready = []
            while self._is_leading():
                self._act_on(ready)
                if entry.is_done or self._left or self._is_over:
                    break
                timeout = self._timeout()
                ready = self._star.select(_LOOK if timeout is None else min(timeout, _LOOK))
        except (OSError, ValueError):  # the selector was closed
            if self._is_leading():
                raise
        finally:
            if self._is_leading():
                self._hand_over()
        return True

    def _hand_over(self) -> None:
        """Stop to lead; the engine's thread goes on."""
        try:
            self._unattended.register(self._star, selectors.EVENT_READ)
            if self._left or self._is_over or self._timeout() is not None:
                self._star.wake()
        finally:
            self._leader = None
            self._turn.release()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        timeout: float | None = None
        while not self._is_over:
            self._unattended.select(timeout)
            with self._turn:
                self._act_on(self._star.select(0))
                timeout = self._timeout()
        self.replicas.forget()
        with self._turn:
            self._star.close(_LAST)
            for members in self._members.values():
                members.close()
            self._unattended.close()

    def _act_on(self, ready: Ready) -> None:
        """Do what has come, and what has become due."""
        self._is_acting = True
        try:
            if self._left and self._leader is None:
                left, self._left = self._left, []
                for each in left:
                    self._do(*each)
            for rank, what in self._star.take(ready):
                if rank != WAKEUP:
                    self._received(rank, what)
            self._act()
        except Exception as error:
            log.exception("the thread of Horovod's API has failed")
            self._abort(f"rank {self.rank} has failed: {type(error).__name__}: {error}")
        except BaseException as error:  # a signal has interrupted a thread that leads
            self._abort(f"rank {self.rank} was interrupted: {type(error).__name__}")
            raise
        finally:
            self._is_acting = False

    def _timeout(self) -> float | None:
        waits = [] if self._negotiator is None else [self._stall.next_look(self._negotiator)]
        if self._is_dirty:
            if not self._deadline:
                self._deadline = time.monotonic() + _CYCLES * self.settings.cycle_time
            if self._flush or self._ending:
                waits.append(0.0)
            elif not self._in_flight:  # else its end wakes this thread
                waits.append(0.0 if self._pending >= _ENOUGH else self._deadline - time.monotonic())
        known = [wait for wait in waits if wait is not None]
        return max(0.0, min(known)) if known else None

    def _act(self) -> None:
        """What has become due."""
        if self._is_over:
            return
        while (report := self.replicas.next_report()) is not None:
            if self._negotiator is None:
                self._send({"c": report})
            else:
                self._compare(0, report)
        if self._is_dirty and (self._flush or self._is_due()):
            self._send_submissions()
        if self._negotiator is not None:
            self._coordinate(self._negotiator)
        if self._ending and not self._is_over and not self._left:
            self._end()

    def _is_due(self) -> bool:
        """Whether enough was collected; while a collective is under way, more is, for fewer and larger ones."""
        if self._in_flight or not self._deadline:
            return False
        return self._pending >= _ENOUGH or time.monotonic() >= self._deadline

    def _send_submissions(self) -> None:
        with self._changed:
            mask, requests, unsent = self._mask, self._requests, self._unsent
            self._mask, self._requests, self._unsent = 0, [], []
            self._is_dirty = self._flush = False
            self._pending = 0
        self._deadline = 0.0
        data = carried.packed(unsent[0]) if len(unsent) == 1 and carried.fits(unsent[0].request) else []
        if self._negotiator is not None:
            self._receive(self._negotiator, 0, mask, requests, data)
        else:
            self._send({"m": f"{mask:x}", "q": requests, "d": data})

    def _send(self, message: _Message) -> None:
        """Send to the coordinator, or from there to all."""
        self._star.send_to_all(json.dumps(message, separators=(",", ":")).encode())

    def _received(self, rank: int, what: bytes | OSError) -> None:
        if isinstance(what, bytes):
            if self._negotiator is not None:
                self._from_rank(self._negotiator, rank, json.loads(what))
            else:
                self._from_coordinator(json.loads(what))
        elif not self._is_drained or rank == 0:
            self._abort(f"rank {rank} is gone: {what}")
        else:
            self._drained.add(rank)

    def _from_rank(self, negotiator: Negotiator, rank: int, message: _Message) -> None:
        if "q" in message:
            requests = [Request.of(fields) for fields in message["q"]]
            self._receive(negotiator, rank, int(message["m"], 16), requests, message["d"])
        elif "c" in message:
            self._compare(rank, message["c"])
        elif "end" in message:
            self._ending = self._ending or message["end"]
        elif "drained" in message:
            self._drained.add(rank)
        elif "abort" in message:
            self._abort(message["abort"])

    def _from_coordinator(self, message: _Message) -> None:
        if "r" in message:
            self._do(int(message["m"], 16), [Response.of(fields) for fields in message["r"]], message["d"])
        elif "c" in message:
            self.replicas.hear(message["c"])
        elif "end" in message:
            self._ending = message["end"]
            self._ends_everywhere = True
        elif "close" in message:
            self._is_over = True
        elif "abort" in message:
            self._abort(message["abort"])

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def _receive(
        self, negotiator: Negotiator, rank: int, mask: int, requests: list[Request], data: carried.Numbers
    ) -> None:
        """What a rank has submitted; `data` is the tensor of an operation that came alone, see `carried`."""
        if data:
            for request in (*self._known(mask), *requests):
                self._carried.setdefault(request.key, {})[rank] = data
        if (timeline := self.timeline) is not None:
            timeline.received(rank, [*self._known(mask), *requests])
        negotiator.receive(rank, mask, requests)

    def _coordinate(self, negotiator: Negotiator) -> None:
        mask, responses = negotiator.responses()
        if mask or responses:
            data = self._added_up(mask, responses)
            self._send({"m": f"{mask:x}", "r": responses, "d": data})
            self._do(mask, responses, data)
        failure = self._stall.look(negotiator)
        if failure:
            self._abort(failure)

    def _compare(self, rank: int, report: Message) -> None:
        """A rank says what it trains, and all hear what follows from it."""
        for answer in self.replicas.comparisons.receive(rank, report):
            self._send({"c": answer})
            self.replicas.hear(answer)

    def _added_up(self, mask: int, responses: list[Response]) -> carried.Numbers:
        """The result of the only operation that is ready, if its ranks have sent their tensors; else none."""
        if not self._carried:
            return []
        ready = [*self._known(mask), *(response.request for response in responses)]
        parts = [self._carried.pop(request.key, {}) for request in ready]
        if mask.bit_count() + len(responses) != 1 or not ready or any(response.error for response in responses):
            return []
        ranks = self.sets[ready[0].process_set]
        return carried.added_up(ready[0], [parts[0][rank] for rank in ranks]) if parts[0].keys() == {*ranks} else []

    # -- doing what is ready -------------------------------------------------------------------------------------------

    def _known(self, mask: int) -> list[Request]:
        """The cached operations of these numbers."""
        return [self._cached[number].request for number in numbers_of(mask) if number in self._cached]

    def _do(self, mask: int, responses: list[Response], data: carried.Numbers) -> None:
        """Do what all have submitted; `data` is the result if that is one operation and has been done."""
        if self._leader is not None and (self._left or not data):
            self._left.append((mask, responses, data))
            return
        if data:
            mine = self._remembered(responses)
            for request in (*self._known(mask), *(response.request for response in mine)):
                self._take(request, data)
            return
        if mask:
            plan = self._plans.get(mask)
            if plan is None:
                if len(self._plans) >= _PLANS:
                    self._plans.clear()
                known = [self._cached[number] for number in numbers_of(mask) if number in self._cached]
                plan = self._plans[mask] = batches(known, self.settings.fusion_threshold)
            for batch in plan:
                self._start(batch)
        if not responses:
            return
        for batch in batches(self._remembered(responses), self.settings.fusion_threshold):
            self._start(batch)

    def _is_mine(self, response: Response) -> bool:
        return response.request.process_set in self._members

    def _remembered(self, responses: list[Response]) -> list[Response]:
        """Those of this rank's process sets; the cache is then as the coordinator has it."""
        mine = [response for response in responses if self._is_mine(response)]
        with self._changed:
            for response in mine:
                self._remember(response)
        return mine

    def _remember(self, response: Response) -> None:
        if response.evicted >= 0:
            old = self._cached.pop(response.evicted, None)
            if old is not None:
                self._numbers.pop(old.request.key, None)
            self._plans.clear()
        if response.number >= 0:
            key = response.request.key
            self._cached[response.number] = response
            self._plans.clear()
            if key in self._entries:
                self._numbers[key] = response.number, self._entries[key].request

    def _take(self, request: Request, result: carried.Numbers) -> None:
        entry = self._entries[request.key]
        carried.put(entry, result)
        if (timeline := self.timeline) is not None:
            timeline.ready([request])
            timeline.marker([request])("done")
        self._finish([entry], "")

    def _start(self, batch: list[Response]) -> None:
        first = batch[0]
        kind = first.request.kind
        entries = [self._entries.get(response.request.key) for response in batch]
        if (timeline := self.timeline) is not None:
            timeline.ready([response.request for response in batch])
        if first.error or kind in ("barrier", "join", "add_set", "remove_set"):
            self._finish([entry for entry in entries if entry is not None], self._without_data(first, entries[0]))
            return
        members = self._members[first.request.process_set]
        if None in entries and not self._has_joined:
            raise RuntimeError(f"{kind} of {first.request.name} was answered, but not submitted")
        parts = [entry or zeros(response) for entry, response in zip(entries, batch, strict=True)]
        mark = None if timeline is None else timeline.marker([response.request for response in batch])
        with self._changed:
            self._in_flight += 1
            self._started.update(map(id, parts))

        def done(error: str) -> None:
            if mark is not None:
                mark("done")
            self._finish(parts, error and f"{kind} of {first.request.name} failed: {error}", was_in_flight=True)

        try:
            execute(batch, parts, members, self._buffers, done, mark)
        except Exception as error:
            done(str(error) or type(error).__name__)

    def _without_data(self, response: Response, entry: Entry | None) -> str:
        """Do what needs no collective; returns the error of the operation."""
        request = response.request
        if not response.error and request.kind == "add_set":
            number = response.value
            self.sets[number] = request.extra
            if self.rank in request.extra:
                self._members[number] = self._make_members(number, request.extra)
        elif not response.error and request.kind == "remove_set" and response.value >= 0:
            self._remove(response.value)
        if request.kind == "join":
            self._has_joined = False
        if entry is not None:
            entry.received = response.value
        return response.error

    def _remove(self, number: int) -> None:
        self.sets.pop(number, None)
        members = self._members.pop(number, None)
        if members is not None:
            members.close()
        with self._changed:
            for kept in [kept for kept, known in self._cached.items() if known.request.process_set == number]:
                self._numbers.pop(self._cached.pop(kept).request.key, None)
            self._plans.clear()
            remaining = [entry for key, entry in self._entries.items() if key[0] == number]
        self._finish(remaining, f"process set {number} was removed")

    def _finish(self, entries: list[Entry], error: str, was_in_flight: bool = False) -> None:
        with self._changed:
            for entry in entries:
                if not entry.is_done:
                    entry.error = error
                    entry.is_done = True
                    if self._entries.get(entry.request.key) is entry:
                        del self._entries[entry.request.key]
            if was_in_flight:
                self._in_flight -= 1
                self._started.difference_update(map(id, entries))
            wakes = was_in_flight and not self._in_flight and (self._ending or self._is_dirty)
            self._changed.notify_all()
        if wakes:
            self._star.wake()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Go on with shutting down: ask all ranks to, complete what has begun, and close when all have."""
        if self._negotiator is None and not self._ends_everywhere:
            if not self._failure:  # what waits may begin until all ranks are asked, which is at the same place for all
                self._failure = f"{_SHUT_DOWN}: {self._ending}"
                self._send({"end": self._ending})
            return
        if self._negotiator is not None and not self._ends_everywhere:
            self._ends_everywhere = True
            self._send({"end": self._ending})
        self._fail_waiting(f"{_SHUT_DOWN}: {self._ending}")
        if not self._is_drained and not self._in_flight:
            self._is_drained = True
            if self._negotiator is None:
                self._send({"drained": 1})
        if self._negotiator is not None and self._is_drained and self._drained >= self._others:
            self._send({"close": 1})
            self._is_over = True

    def _fail_waiting(self, why: str) -> None:
        """Fail what has not begun, on all ranks alike: nothing else is begun from now on."""
        with self._changed:
            self._failure = why
            remaining = [entry for entry in self._entries.values() if id(entry) not in self._started]
        self._finish(remaining, why)

    def _abort(self, why: str) -> None:
        """A rank is gone, or has failed: everything fails, everywhere."""
        if self._is_over:
            return
        if not self._ending or not self._ends_everywhere:
            self._send({"abort": why})
        with self._changed:
            self._failure = self._failure or why
            remaining = list(self._entries.values())
        self._finish(remaining, self._failure)
        self._is_over = True
