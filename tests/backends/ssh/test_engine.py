"""The thread in which all connections are: at the end of the interpreter, in a fork, and for the garbage collector."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

from paceline.backends.remote.engine import call, close, in_thread, own_loop, run

AT_THE_END = """
import atexit, threading
from paceline.backends.remote.engine import in_thread, run

def ask(who):
    async def work():
        return await in_thread(lambda: who)
    print(run(work()), flush=True)

def later():
    threading.main_thread().join()
    ask("thread")

ask("script")
atexit.register(ask, "exit")
threading.Thread(target=later).start()
"""


def test_it_works_until_the_interpreter_has_ended() -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("script\nthread\nexit\n", "")


async def noted(where: threading.Event) -> None:
    where.set()


def test_its_own_thread_waits_for_nothing_that_is_closed_there() -> None:
    closed = threading.Event()
    call(lambda: close(noted(closed), own_loop()))
    assert closed.wait(60)
    run(asyncio.sleep(0))


def test_a_fork_leaves_the_connections_of_its_parent_alone() -> None:
    closed, loop = threading.Event(), own_loop()
    child = os.fork()
    if child == 0:
        close(noted(closed), loop)
        os._exit(int(closed.is_set() or run(in_thread(lambda: 5)) != 5))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    close(noted(closed), loop)
    assert closed.is_set()
