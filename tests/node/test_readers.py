"""Several things at once: their order, their bound, their errors, and whom nobody waits for."""

from __future__ import annotations

import sys
import threading

import pytest
from tests.conftest import GENEROUS

from paceline.node.readers import Begun, at_once


def test_answers_come_in_the_order_of_the_questions_and_so_many_at_a_time() -> None:
    there, lock, most, active = threading.Barrier(3, timeout=GENEROUS), threading.Lock(), 0, 0

    def do(number: int) -> int:
        nonlocal most, active
        with lock:
            active += 1
            most = max(most, active)
        there.wait()  # three of them are here, or it is broken
        with lock:
            active -= 1
        return -number

    assert at_once(do, range(9), 3) == [-number for number in range(9)]
    assert (most, active) == (3, 0)


def test_the_first_error_is_raised_when_all_are_done() -> None:
    done = []

    def do(number: int) -> None:
        done.append(number)
        if number % 2:
            raise ValueError(number)

    with pytest.raises(ValueError, match=r"^1$"):
        at_once(do, range(100), 4)
    assert sorted(done) == list(range(100))
    assert at_once(do, [], 4) == []


def test_what_ends_a_thread_is_raised_too() -> None:
    with pytest.raises(SystemExit):
        at_once(sys.exit, [1, 2], 2)
    with pytest.raises(SystemExit):
        Begun(sys.exit).result()


def test_a_single_question_takes_no_thread() -> None:
    assert at_once(lambda _: threading.current_thread(), [None], 4) == [threading.current_thread()]
    assert threading.current_thread() not in at_once(lambda _: threading.current_thread(), [None, None], 4)


def test_an_interrupt_leaves_what_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, silence = threading.Semaphore(0), threading.Event()
    asked, threads = [], []

    def do(number: int) -> None:
        asked.append(number)
        threads.append(threading.current_thread())
        begun.release()
        silence.wait()

    def interrupt(*_: object) -> None:
        for _ in range(2):
            assert begun.acquire(timeout=GENEROUS)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("paceline.node.readers.Readers.take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            at_once(do, range(3), 2)
    assert sorted(asked) == [0, 1] and all(thread.daemon and thread.is_alive() for thread in threads)
    silence.set()
    for thread in threads:
        thread.join(GENEROUS)
    assert sorted(asked) == [0, 1], "nothing else is asked"


def test_what_was_begun_is_taken_when_it_is_there() -> None:
    go = threading.Event()
    begun = Begun(lambda: go.wait(GENEROUS))
    with pytest.raises(TimeoutError):
        begun.result(0.01)
    go.set()
    assert begun.result() is True
    with pytest.raises(ZeroDivisionError):
        Begun(lambda: 1 // 0).result()
