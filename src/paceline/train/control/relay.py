"""What rank 0 passes on between the ranks, apart from the training; pure state.

rank → hub   {"do": "failed", "why"}                   this rank ends, and how: "failed (…)", "left with exit code 3"
             {"do": "left", "count", "step", "place"}  this rank leaves in good order
             {"do": "loop", "loop", "step"}            it is through with a loop over training batches
             {"do": "accuse", "rank", "why"}           that rank left a loop in which this one goes on
             {"do": "stop", "signal"}                  it was told to stop
             {"do": "meet", "number"}                  it waits for all to have come here so many times
             {"do": "at", "step", "passed"}            answer to "hold": the step begun last, and whether it
                                                           has passed the place where it could have stopped after it
             {"do": "ask"}                             it is in a collective for long, or one has failed: where are all?
             {"do": "here", "round", "place"}          answer to "where", see `places`
hub → rank   {"do": "met", "number"}                   all have
             {"do": "where", "round"}
             {"do": "mismatch", "why"}                 the ranks are in collectives that can never end
             {"do": "alike"}                           to one whose collective has failed: that is not why
             {"do": "late", "ranks"}                   to the one that has come first: whom it waits for, and the line
                                                           where each is, or None if it does not answer
             {"do": "lost", "rank", "why"}, {"do": "left", "rank", …}, {"do": "loop", "rank", …}
             {"do": "accused", "why"}
             {"do": "hold"}                            begin no other step until "stop" comes
             {"do": "stop", "after", "late", "signal", "rank"}   stop after this step, the last that any rank has
                                                           begun; "late": some have passed its end, so all stop
                                                           where the next one would begin
"""

from __future__ import annotations

from typing import Any

from paceline.train.diagnosis import collective_trace

Message = dict[str, Any]
EVERYBODY = -1


class Hub:
    """What rank 0 knows of all ranks; `hear` returns (rank or `EVERYBODY`, message) pairs to be sent."""

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
        self._left: dict[int, collective_trace.Place] = {}

    def hear(self, rank: int, message: Message) -> list[tuple[int, Message]]:
        """Take what a rank says."""
        what = message["do"]
        if what == "accuse":
            return [(message["rank"], {"do": "accused", "why": message["why"]})]
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
        if what == "here":
            if message["round"] == self._round:
                self._here[rank] = message["place"]
            return self._judge()
        if what == "left":
            self._left[rank] = message["place"]
            message = {key: value for key, value in message.items() if key != "place"}  # for the hub alone
        told = [(EVERYBODY, {**message, "rank": rank})]
        if what == "loop":
            return told
        self._active.discard(rank)  # it failed or left
        if what == "failed":
            told = [(EVERYBODY, {"do": "lost", "rank": rank, "why": message["why"]})]
        return told + self._decide() + self._gather() + self._judge()

    def gone(self, rank: int) -> list[tuple[int, Message]]:
        """A rank's connection broke; it is lost unless it has taken its leave."""
        return self.hear(rank, {"do": "failed", "why": "failed (it is gone)"}) if rank in self._active else []

    def _ask(self, rank: int) -> list[tuple[int, Message]]:
        """Ask all where they are, unless the one that wants to know has not answered yet itself."""
        if self._is_asking and rank not in self._here:
            return []
        silent = sorted(self._active - self._here.keys()) if self._is_asking else []
        late = [(rank, {"do": "late", "ranks": [[other, None] for other in silent]})] if silent else []
        self._round += 1
        self._here, self._is_asking = {}, True
        return [*late, (EVERYBODY, {"do": "where", "round": self._round})]

    def _judge(self) -> list[tuple[int, Message]]:
        """Once every rank has said where it is: whether they can come together, and who is late."""
        if not self._is_asking or not self._active or not self._active <= self._here.keys():
            return []
        self._is_asking = False
        here = {rank: self._here[rank] for rank in self._active}
        if why := collective_trace.mismatch(here, self._left):
            return [(EVERYBODY, {"do": "mismatch", "why": why})]
        waits, late = collective_trace.waiting(here)
        told = [(rank, {"do": "alike"}) for rank, place in here.items() if place["failed"]]
        return [*told, (waits, {"do": "late", "ranks": late})] if late else told

    def _gather(self) -> list[tuple[int, Message]]:
        """Once every rank has come: tell them."""
        least = min((self._meetings[rank] for rank in self._active), default=0)
        if least <= self._met:
            return []
        self._met = least
        return [(EVERYBODY, {"do": "met", "number": least})]

    def _decide(self) -> list[tuple[int, Message]]:
        """Once every rank has said where it is: the step to stop after."""
        if self._stop is None or self._decided or not self._active or not self._active <= self._places.keys():
            return []
        self._decided = True
        after, late = max(self._places[rank] for rank in self._active)
        return [(EVERYBODY, {**self._stop, "after": after, "late": late})]
