"""Looks from time to time where the ranks of this node are, and says it when none of them has gone on for long."""

from __future__ import annotations

import contextlib
import socket
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING, Callable

from paceline.contract.stands import SHORT
from paceline.node.eventloop.loop import Loop
from paceline.node.watching.asking import Asked, ask, ask_nccl, question
from paceline.node.watching.hang import grouped
from paceline.node.watching.outside import Activity, Moment, Process, look, look_at_children
from paceline.node.watching.slowness import reads_slowly
from paceline.node.watching.spent import Samples
from paceline.node.watching.typical import ENDED
from paceline.node.watching.unjoined import Unjoined

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.contract.stands import Answer, Place, Spent, Stand
    from paceline.node.ranks.launcher import Rank
    from paceline.node.telemetry.recorder import Recorder

_TICK = 5.0  # seconds between two looks; less if ranks hang after less
_LEAST = 0.25  # seconds between two looks
_SOON = 1.0  # seconds between the first ones, so that short jobs are sampled too
_LEAST_LOOKS = 20  # before it is said what ranks spend their time on
_FEW = 120  # of these
_LAST_SECONDS = 0.3  # for the ranks to say where they are, before they are stopped
_MOST_TICKS = 4.0  # between two looks
_STILL = 2.5  # ticks in which no rank has moved, from which on answers are kept until one does


class Watch:
    """Watches the ranks of this node, while they run.

    It asks each rank for the numbers of its collectives, and once none has gone on for long enough, for its stacks.
    """

    def __init__(
        self, loop: Loop, job_id: str, after: float, found: Callable[[list[Stand]], None], spent: Callable[[], None],
        *, unjoined: Callable[[str], None], telemetry: Recorder, others: Callable[[], Sequence[str]],
    ) -> None:  # fmt: skip
        """Watch nothing yet."""
        self._loop, self._job_id, self._after = loop, job_id, after
        self._found, self._spent, self._telemetry, self._others = found, spent, telemetry, others
        self._tick = max(_LEAST, min(_SOON, after / 4))
        self._samples, self._unjoined = Samples(), Unjoined(unjoined)
        self._numbers: set[int] = set()  # the ranks of these samples
        self._kept: list[tuple[Asked, Answer, Process, float]] = []  # answers since a rank has moved: a hang maybe
        self._counted = 0  # looks since which a rank has moved
        self._quiet = 0.0  # seconds for which none has moved
        self._ranks: Mapping[int, Rank] = {}
        self._activities: dict[int, Activity] = {}
        self._looked = 0.0  # when the ranks were looked at last
        self._turn = 0  # counts the calls of `start`: timers of an attempt before do nothing
        self._looks = 0
        self._tell_at = _LEAST_LOOKS  # looks after which `spent` is called
        self._started = self._busy = 0.0  # when the ranks started, and what the machine's cores had done by then
        self._used: Spent = {}  # how many cores there are, and the ranks have used
        self._local: Spent = {}  # how fast the local temporary folder is, if that matters
        self._is_asking = False  # for all that the ranks know
        self._error = ""  # in watching, that was written to the log last
        self._said_at: float | None = None  # when the ranks' places were said last, in this stall

    def start(self, ranks: Mapping[int, Rank]) -> None:
        """Watch these ranks of a new attempt."""
        self._ranks, self._said_at = ranks, None
        self._activities, self._started, self._kept = {}, 0.0, []
        numbers = {rank.placement.rank for rank in ranks.values()}
        if numbers != self._numbers:  # nodes have come or gone, and these ranks are new here
            self._numbers, self._samples, self._used = numbers, Samples(), {}
            self._counted, self._tell_at = 0, self._looks + _LEAST_LOOKS
        self._turn += 1
        self._after_a_while(self._look)

    def places(self) -> list[Place]:
        """Where the ranks are now that have not ended; the agent waits for that, for a moment."""
        live, loop = self._live(), Loop()
        found: list[Stand] = []
        activities = {number: self._activities.get(number) or Activity(time.monotonic()) for number in live}
        with contextlib.closing(loop):
            ask(loop, live, activities, found.extend, _LAST_SECONDS, looks=False)
            loop.run_until(lambda: len(found) == len(live))
        return [place for place in grouped(found) if place["why"] != ENDED]

    def of_ranks(self) -> dict[int, tuple[dict[str, int], dict[str, float]]]:
        """What is known of each rank so far; see `Samples.of_ranks`."""
        return self._samples.of_ranks()

    def spent(self) -> Spent | None:
        """What the ranks have spent their time on; None if they were seen too seldom to say so.

        Time in which they hang is not counted: a step that never ends is not a slow one.
        """
        self._count()
        if self._counted < _LEAST_LOOKS:
            return None
        more = self._telemetry.known(gpus=self._samples.uses_gpu)
        return {"host": socket.gethostname(), **self._samples.spent(), **self._used, **self._local, **more}

    def _after_a_while(self, then: Callable[[], None]) -> None:
        turn = self._turn
        self._loop.after(self._tick, lambda: then() if turn == self._turn else None)

    def _live(self) -> dict[int, Asked]:
        return {
            number: Asked(self._job_id, it.attempt, it.rank, it.node_rank, rank.pid, rank.device)
            for number, rank in self._ranks.items() if rank.status is None and rank.pid for it in (rank.placement,)
        }  # fmt: skip

    def _look(self) -> None:
        """Look, and look again later; an error in watching must not end what is watched, nor the watching."""
        try:
            self._see()
        except Exception as error:
            if repr(error) != self._error:  # each look may have the same one
                self._error = repr(error)
                with contextlib.suppress(OSError):  # a full disk
                    traceback.print_exc()  # into the agent's log
        finally:
            if any(rank.status is None for rank in self._ranks.values()):  # also if they have not started
                self._after_a_while(self._look)

    def _see(self) -> None:
        """See and ask each rank; what they answer is judged a tick later."""
        live, now = self._live(), time.monotonic()
        if now - self._looked > _MOST_TICKS * self._tick:  # this process did not run meanwhile, and saw nothing
            self._activities = {}
        self._looked, self._looks = now, self._looks + 1
        if self._looks > _FEW:
            self._tick = max(_LEAST, min(_TICK, self._after / 4))
        if not live:
            return
        moment = Moment([rank.pid for rank in live.values()], self._others())
        for number, rank in live.items():
            activity = self._activities.setdefault(number, Activity(now))
            activity.see(look(rank.pid), now, partial(look_at_children, rank.pid, moment))
        self._quiet = min(min(it.idle(now), it.still(now)) for it in map(self._activities.__getitem__, live))
        self._counted += self._quiet < _STILL * self._tick
        self._count()
        self._unjoined.look(live.values())
        for number, rank in live.items():
            question(self._loop, rank, SHORT, partial(self._heard, rank, self._activities[number], self._quiet))
        self._judge(live, now)
        if not self._started:
            from paceline.node.machine.hardware import busy_seconds  # jobs that are over at once do not need it

            self._started, self._busy = now, busy_seconds()
        if self._looks >= self._tell_at:
            self._tell_at = 2 * self._looks
            self._used = _used(self._samples.pids, now - self._started, self._busy)
            self._measure_local()
            self._spent()

    def _measure_local(self) -> None:
        """Measure the local temporary folder once, if the ranks wait for what they read."""
        spent = self.spent()
        if self._local or spent is None or not reads_slowly(spent):
            return
        from paceline.node.machine.hardware import read_rate  # few jobs need it

        self._local = {"local": read_rate() or 0.0}

    def _heard(self, rank: Asked, activity: Activity, quiet: float, answer: Answer | None) -> None:
        if answer is not None:
            now = time.monotonic()
            activity.hear(answer, now)
            self._unjoined.hear(rank, answer, self._live().values())
            if quiet < self._after:
                self._kept.append((rank, answer, activity.process, now))

    def _count(self) -> None:
        """Count the answers that are kept, if a rank moves: that was no hang."""
        if self._quiet < _STILL * self._tick:
            for rank, answer, process, now in self._kept:
                self._samples.add(rank, answer, process, now)
            self._kept = []

    def _judge(self, live: Mapping[int, Asked], now: float) -> None:
        stands_still = all(self._activities[number].still(now) >= self._after for number in live)
        if not stands_still:
            if self._said_at is not None:
                self._said_at = None
                self._found([])
            return
        shortest = min(self._activities[number].still(now) for number in live)
        # Without collectives, ranks stand still since they began, whatever they do.
        if self._said_at is not None and now - self._said_at < min(shortest / 4, self._after):
            return
        if self._is_asking:
            return
        self._said_at, self._is_asking = now, True
        ask(self._loop, live, self._activities, partial(self._answered, (self._turn, now)))

    def _answered(self, asked: tuple[int, float], stands: list[Stand]) -> None:
        if self._samples.uses_gpu:
            ask_nccl(self._loop, {stand["pid"] for stand in stands}, partial(self._complete, asked, stands))
        else:
            self._complete(asked, stands, [])

    def _complete(self, asked: tuple[int, float], stands: list[Stand], nccl: list[str]) -> None:
        self._is_asking = False
        if asked != (self._turn, self._said_at):  # a rank has gone on meanwhile, or all have started again
            return
        for stand in stands:
            stand["machine"] = {**self._telemetry.lately(stand["still"]), "nccl": nccl}
        self._found(stands)


def _used(pids: Sequence[int], seconds: float, busy: float) -> Spent:
    """How many cores these processes and their descendants have kept busy so far, and how many nobody has."""
    from paceline.node.machine import devices, hardware, processes

    seen, now, cores = processes.Snapshot(), hardware.busy_seconds(), devices.cores()
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    trees = [seen.tree(pid) for pid in pids]
    spent = sum(process.cpu + process.reaped for tree in trees for process in tree.values())
    return {
        "cores": cores, "free": round(max(0.0, cores - (now - busy) / max(seconds, 1e-9)), 2),
        "used": round(spent / max(seconds, 1e-9), 2),
        "rate": sum(
            look(child).read / max(uptime - process.start_time / processes.TICKS, 1.0)
            for tree in trees for child, process in tree.items() if child not in pids
        ),
    }  # fmt: skip
