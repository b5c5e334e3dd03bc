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
    from collections.abc import Mapping, Set

    from paceline.backends.remote.connection import Answer, Answers, Host, Request
    from paceline.backends.remote.patience import Patience

_BRIEFLY = 0.5  # seconds that a host that was silent a moment ago is waited for longer than the others
_MANY = 32  # hosts of which a few do not hold up the others
_LATE = 0.05  # share of them that are few
_LEAST_LATE = 1.0  # seconds


class Outcome(NamedTuple):
    """What a host has answered or why it has not, after so many seconds.

    Attributes:
        is_late: whether it was waited for no longer because nearly all others had answered.
    """

    answer: Answer | UserError
    seconds: float
    is_late: bool = False


def ask_all(requests: Mapping[Host, tuple[Request, Patience]], brief: Set[Host]) -> dict[Host, Outcome]:
    """The answers or errors of hosts.

    When nearly all of many hosts have answered, the others get half as much time again, if the request is one that
    hosts answer at once.

    Args:
        requests: what is asked of each host, and how long it is waited for.
        brief: hosts that are waited for only until the others have answered, and a moment longer.
    """
    if not requests:
        return {}
    need_files(min(len(requests), AT_ONCE))
    begin = time.monotonic()
    open_: dict[Host, Answers] = {}

    def ask(host: Host) -> Answer:
        def opened(answers: Answers) -> None:
            open_[host] = answers
            answers.when_silent(lambda error: crowd.put(host, error))

        request, patience = requests[host]
        return host.ask(request, opened=opened, patience=patience)

    crowd: Crowd[Host, Answer] = Crowd(requests, ask)
    found: dict[Host, Outcome] = {}
    missing = dict.fromkeys(requests)
    few = _LATE * len(requests) if len(requests) >= _MANY and all(it.prompt for _, it in requests.values()) else 0.0
    until = math.inf
    while missing:
        now = time.monotonic()
        if until == math.inf and len(missing) <= few:
            until = now + max(_LEAST_LATE, (now - begin) / 2)
        left = min(until - now, _BRIEFLY if brief >= missing.keys() else math.inf)
        try:
            host, answer = crowd.take(None if left == math.inf else max(0.0, left))
        except queue.Empty:
            break
        if isinstance(answer, BaseException) and not isinstance(answer, UserError):
            raise answer
        if missing.pop(host, 0) is None:
            found[host] = Outcome(answer, time.monotonic() - begin)
    seconds, others = time.monotonic() - begin, len(found)
    for host in missing:
        if host in open_:
            open_[host].abandon()
        late = f"no answer within {seconds:.1f} s, in which {others} others have answered"
        why = "it is silent" if host in brief else late
        found[host] = Outcome(
            Silent(f"cannot reach {host.name}: {why}; see {host.by_hand}"), seconds if host not in brief else 0.0,
            is_late=host not in brief,
        )  # fmt: skip
    return {host: found[host] for host in requests}
