"""What is done again and again: when, until when, and that it may be woken."""

from __future__ import annotations

import math
import threading

from tests.conftest import GENEROUS

from paceline.backends.repeated import Repeated


def test_it_is_done_until_it_says_that_this_was_the_last_time() -> None:
    pauses = iter([0.0, 0.001, None])
    done = []

    def do() -> float | None:
        done.append(threading.current_thread())
        return next(pauses)

    repeated = Repeated(do)
    repeated.join()
    assert len(done) == 3 and len(set(done)) == 1 and done[0].daemon and done[0] is not threading.current_thread()
    repeated.wake()
    repeated.stop()


def test_it_is_woken_also_while_it_is_done_and_stopped_while_it_waits() -> None:
    begun, go = threading.Semaphore(0), threading.Semaphore(0)

    def do() -> float:
        begun.release()
        assert go.acquire(timeout=GENEROUS)
        return math.inf

    repeated = Repeated(do, math.inf)
    repeated.wake()
    assert begun.acquire(timeout=GENEROUS)
    repeated.wake()  # it is being done, and may have missed what is new
    go.release()
    assert begun.acquire(timeout=GENEROUS)
    go.release()
    assert not repeated.is_over
    repeated.stop()
    repeated.join()
    assert repeated.is_over and not begun.acquire(blocking=False)
