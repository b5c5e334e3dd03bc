"""One request to several hosts at once."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.backends.packing import archive
from paceline.backends.remote.connection import Silent
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from paceline.backends.remote.connection import Answer, Answers, Host, Request
    from paceline.backends.remote.patience import Patience

_BRIEFLY = 0.5  # seconds that a host that was silent a moment ago is waited for longer than the others


class Outcome(NamedTuple):
    """What a host has answered or why it has not, after so many seconds."""

    answer: Answer | UserError
    seconds: float


def ask_all(requests: Mapping[Host, tuple[Request, Patience]], brief: Set[Host]) -> dict[Host, Outcome]:
    """The answers or errors of hosts.

    Args:
        requests: what is asked of each host, and how long it is waited for.
        brief: hosts that are waited for only until the others have answered, and a moment longer.
    """
    if not requests:
        return {}
    archive()  # once, not in each thread
    begin = time.monotonic()
    news: queue.SimpleQueue[tuple[Host, Answer | UserError | BaseException]] = queue.SimpleQueue()
    open_: dict[Host, Answers] = {}

    def ask(host: Host, request: Request, patience: Patience) -> None:
        def opened(answers: Answers) -> None:
            open_[host] = answers
            answers.when_silent(lambda error: news.put((host, error)))

        try:
            news.put((host, host.ask(request, opened=opened, patience=patience)))
        except BaseException as error:  # raised below, in the thread that asks
            news.put((host, error))

    for host, (request, patience) in requests.items():  # not joined: a wrapper of ssh may not end with it
        threading.Thread(target=ask, args=(host, request, patience), daemon=True).start()
    found: dict[Host, Outcome] = {}
    while missing := [host for host in requests if host not in found]:
        try:
            host, answer = news.get(timeout=_BRIEFLY if brief >= set(missing) else None)
        except queue.Empty:
            break
        if isinstance(answer, BaseException) and not isinstance(answer, UserError):
            raise answer
        found.setdefault(host, Outcome(answer, time.monotonic() - begin))
    for host in requests:
        if host not in found:
            if host in open_:
                open_[host].abandon()
            found[host] = Outcome(Silent(f"cannot reach {host.name}: it is silent; see {host.by_hand}"), 0.0)
    return {host: found[host] for host in requests}
