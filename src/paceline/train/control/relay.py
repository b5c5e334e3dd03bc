"""What rank 0 relays between the ranks, apart from the training; pure state.

rank → relay   {"do": "failed", "why"}                   this rank ends, and how: "failed (…)", "exited with code 3"
               {"do": "left", "count", "step", "place", "waits"}  this rank leaves in good order; "waits": once it
                                                           knows whether replicas were equal
               {"do": "loop", "loop", "step"}            it has left a loop over training batches
               {"do": "left_early", "rank", "why"}       that rank left a loop in which this one goes on
               {"do": "stop", "signal"}                  it got a signal to stop
               {"do": "meet", "number"}                  it waits for all to have come here so many times
               {"do": "at", "step", "passed"}            answer to "hold": the step begun last, and whether it
                                                           has passed the place where it could have stopped after it
               {"do": "ask"}                             it is in a collective for long, or one failed: where are all?
               {"do": "here", "round", "place"}          answer to "where", see `collective_trace`
               {"do": "saw", "inputs", "data", "line"}   checksums of what it has trained on first, see `Watch.compare`
               {"do": "sum"}, {"do": "parts"}            see `paceline.train.replicas.judging`, also for the answers
relay → rank   {"do": "met", "number"}                   all have
               {"do": "same", "why"}                     to rank 0: all have trained on the same
               {"do": "where", "round"}
               {"do": "mismatch", "why"}                 the ranks are in collectives that can never end
               {"do": "alike"}                           to one whose collective has failed: that is not why
               {"do": "late", "ranks"}                   to the one that is farthest: whom it waits for, and the line
                                                           where each is, or None if it does not answer;
                                                           to rank 0 also, with "rank" and its "place"
               {"do": "lost", "rank", "why"}, {"do": "left", "rank", …}, {"do": "loop", "rank", …}
               {"do": "left_early", "why"}               to the rank that has
               {"do": "hold"}                            begin no other step until "stop" comes
               {"do": "stop", "after", "late", "signal", "rank"}   stop after this step, the last that any rank has
                                                           begun; "late": some have passed its end, so all stop
                                                           where the next one would begin
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from paceline.train import collective_trace
from paceline.train.replicas import judging

if TYPE_CHECKING:
    from collections.abc import Sequence


class Message(judging.Message, total=False):
    """A message in either direction; `do` says which of the other keys it has."""

    rank: int
    count: int
    loop: int
    place: collective_trace.Place
    passed: bool
    number: int
    round: int
    ranks: list[tuple[int, str | None]]
    signal: int
    after: int
    late: bool
    inputs: list[int]
    data: int | None
    line: str


EVERYBODY = -1
Outbox = list[tuple[int, Message]]  # to whom: a rank or `EVERYBODY`


class Relay:
    """What rank 0 knows of all ranks; its methods return the messages to be sent.

    Attributes:
        replicas: what it knows of the parameters of all ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._active = set(range(world_size))
        self._stop: Message | None = None
        self._places: dict[int, tuple[int, bool]] = {}
        self._decided = False
        self._meetings = dict.fromkeys(range(world_size), 0)
        self._met = 0
        self._round = 0  # of asking where all are
        self._here: dict[int, collective_trace.Place] = {}  # the answers
        self._is_asking = False
        self._departed: dict[int, collective_trace.Place] = {}
        self._seen: dict[int, Message] = {}
        self.replicas = judging.Comparisons(world_size)

    def receive(self, rank: int, message: Message) -> Outbox:
        """Handle a message of a rank."""
        if message["do"] in ("sum", "parts"):
            return _to_everybody(self.replicas.receive(rank, message))
        return self._receive(rank, message)

    def _receive(self, rank: int, message: Message) -> Outbox:
        """Handle one that is not about replicas."""
        what = message["do"]
        if what == "left_early":
            return [(message["rank"], {"do": "left_early", "why": message["why"]})]
        if what == "stop":
            if self._stop is not None:
                return []
            self._stop = {**message, "rank": rank}
            return [(EVERYBODY, {"do": "hold"})]
        if what == "at":
            self._places[rank] = message["step"], message["passed"]
            return self._decide()
        if what == "meet":
            self._meetings[rank] = message["number"]
            return self._gather()
        if what == "ask":
            return self._ask(rank)
        if what == "saw":
            self._seen[rank] = message
            return self._compare()
        if what == "here":
            if message["round"] == self._round:
                self._here[rank] = message["place"]
            return self._judge()
        if what == "left":
            message = message.copy()
            self._departed[rank] = message.pop("place")  # the ranks do not need it
        outbox: Outbox = [(EVERYBODY, {**message, "rank": rank})]
        if what == "loop":
            return outbox
        self._active.discard(rank)  # it failed or left
        if what == "failed":
            outbox = [(EVERYBODY, {"do": "lost", "rank": rank, "why": message["why"]})]
        compared = self.replicas.gone(rank, answers=message.get("waits", False))
        return outbox + self._decide() + self._gather() + self._judge() + _to_everybody(compared)

    def disconnected(self, rank: int, why: str = "it is gone") -> Outbox:
        """A rank's connection has ended; it is lost unless it has left in good order."""
        if rank in self._active:
            return self.receive(rank, {"do": "failed", "why": f"failed ({why})"})
        return _to_everybody(self.replicas.gone(rank))

    def _ask(self, rank: int) -> Outbox:
        """Ask all where they are, unless the rank that asks has not answered the last question itself."""
        if self._is_asking and rank not in self._here:
            return []
        silent = sorted(self._active - self._here.keys()) if self._is_asking else []
        late: Outbox = [(rank, {"do": "late", "ranks": [(other, None) for other in silent]})] if silent else []
        self._round += 1
        self._here, self._is_asking = {}, True
        return [*late, (EVERYBODY, {"do": "where", "round": self._round})]

    def _judge(self) -> Outbox:
        """Once every rank has answered where it is: whether they can come together, and who is late."""
        if not self._is_asking or not self._active or not self._active <= self._here.keys():
            return []
        self._is_asking = False
        here = {rank: self._here[rank] for rank in self._active}
        if why := collective_trace.mismatch(here, self._departed):
            return [(EVERYBODY, {"do": "mismatch", "why": why})]
        waits, late = collective_trace.waiting(here)
        outbox: Outbox = [(rank, {"do": "alike"}) for rank, place in here.items() if place["failed"]]
        if late:
            outbox.append((waits, {"do": "late", "ranks": [*late]}))
            if waits:  # what rank 0 prints is what people see
                outbox.append((0, {"do": "late", "ranks": [*late], "rank": waits, "place": here[waits]}))
        return outbox

    def _gather(self) -> Outbox:
        """Once every rank has come: send them that."""
        least = min((self._meetings[rank] for rank in self._active), default=0)
        if least <= self._met:
            return []
        self._met = least
        return [(EVERYBODY, {"do": "met", "number": least})]

    def _compare(self) -> Outbox:
        """Once every rank has sent what it has trained on first: whether it is the same."""
        if len(self._seen) < len(self._meetings):
            return []
        first = self._seen[0]
        same = [
            key for key in ("inputs", "data") if first[key] and all(m[key] == first[key] for m in self._seen.values())
        ]
        if not same:
            return []
        what = "trains on the same batches" if same[0] == "inputs" else "takes its batches from the whole data set"
        why = (
            f"each rank {what} ({first['line']}), so the data is not divided among them; "
            "take the batches from run.dataloader(dataset, batch_size, shuffle=True)"
        )
        return [(0, {"do": "same", "why": why})]

    def _decide(self) -> Outbox:
        """Once every rank has answered where it is: the step to stop after."""
        if self._stop is None or self._decided or not self._active or not self._active <= self._places.keys():
            return []
        self._decided = True
        after, late = max(self._places[rank] for rank in self._active)
        return [(EVERYBODY, {**self._stop, "after": after, "late": late})]


def _to_everybody(messages: Sequence[judging.Message]) -> Outbox:
    return [(EVERYBODY, cast("Message", message)) for message in messages]
