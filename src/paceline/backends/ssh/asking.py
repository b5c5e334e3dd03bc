"""One request to several hosts at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.backends.remote.connection import Silent
from paceline.backends.remote.crowd import AT_ONCE, Crowd, need_files
from paceline.backends.remote.engine import run
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    from paceline.backends.remote.connection import Answer, Host
    from paceline.backends.remote.patience import Patience
    from paceline.contract.messages import Request

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
    few = _LATE * len(requests) if len(requests) >= MANY and all(it.prompt for _, it in requests.values()) else 0.0
    crowd = Crowd(requests, lambda host: host.answer(*requests[host]), notice, few, brief)
    run(crowd.work())

    def outcome(host: Host) -> Outcome:
        seconds = crowd.seconds[host]
        if host in crowd.found:
            return Outcome(crowd.found[host], seconds)
        late = f"no answer within {seconds:.1f} s, and {len(crowd.found)} others have answered"
        is_late = host not in brief
        why = Silent(f"cannot reach {host.name}: {late if is_late else 'it is silent'}; see {host.by_hand}")
        return Outcome(why, seconds if is_late else 0.0, is_late)

    return {host: outcome(host) for host in requests}
