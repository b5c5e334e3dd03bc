"""One request to several hosts at once."""

from __future__ import annotations

import math
import queue
import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.backends.remote.connection import Silent
from paceline.backends.remote.crowd import AT_ONCE, Crowd, need_files
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    from paceline.backends.remote.connection import Answer, Answers, Host
    from paceline.backends.remote.patience import Patience
    from paceline.contract.messages import Request

_BRIEFLY = 0.5  # seconds that a host that was silent a moment ago is waited for longer than the others
MANY = 32  # hosts of which a few do not hold up the others
_LATE = 0.05  # share of them that are few


class Outcome(NamedTuple):
    """What a host has answered or why it has not, after so many seconds.

    Attributes:
        is_late: whether it was waited for no longer because nearly all others had answered.
    """

    answer: Answer | UserError
    seconds: float
    is_late: bool = False


def ask_all(
    requests: Mapping[Host, tuple[Request, Patience]],
    brief: Set[Host],  # are waited for until the others have answered, and a moment longer
    notice: Callable[[list[Host]], None] | None = None,
) -> dict[Host, Outcome]:
    """The answers or errors of hosts.

    When nearly all of many hosts have answered, each other one is waited for half as long again as the slowest of
    them, if the request is one that hosts answer at once.
    """
    if not requests:
        return {}
    need_files(min(len(requests), AT_ONCE))
    open_: dict[Host, Answers] = {}

    def ask(host: Host) -> Answer:
        def opened(answers: Answers) -> None:
            open_[host] = answers
            answers.when_silent(lambda error: crowd.put(host, error))

        request, patience = requests[host]
        return host.ask(request, opened=opened, patience=patience)

    crowd: Crowd[Host, Answer] = Crowd(requests, ask, notice)
    found: dict[Host, Outcome] = {}
    left: dict[Host, float] = {}  # those that are not waited for, and how long they were
    missing = dict.fromkeys(requests)

    def leave(hosts: list[Host]) -> None:
        for host in hosts:
            del missing[host]
            left[host] = crowd.seconds(host)
            crowd.leave(host)
            if host in open_:
                open_[host].abandon()

    few = _LATE * len(requests) if len(requests) >= MANY and all(it.prompt for _, it in requests.values()) else 0.0
    while missing:
        until = crowd.overdue_at - time.monotonic() if len(missing) <= few else math.inf
        seconds = min(until, _BRIEFLY if brief >= missing.keys() else math.inf)
        try:
            host, answer = crowd.take(None if seconds == math.inf else max(0.0, seconds))
        except queue.Empty:
            leave(crowd.overdue() if seconds == until else list(missing))
            continue
        if isinstance(answer, BaseException) and not isinstance(answer, UserError):
            raise answer
        if missing.pop(host, 0) is None:
            found[host] = Outcome(answer, crowd.seconds(host))
    others = len(found)
    for host, seconds in left.items():
        late = f"no answer within {seconds:.1f} s, and {others} others have answered"
        why = "it is silent" if host in brief else late
        found[host] = Outcome(
            Silent(f"cannot reach {host.name}: {why}; see {host.by_hand}"), seconds if host not in brief else 0.0,
            is_late=host not in brief,
        )  # fmt: skip
    return {host: found[host] for host in requests}
