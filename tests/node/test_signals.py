"""A signal reaches a process that waits for something else."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.conftest import GENEROUS

# The main thread waits in a system call that no signal ends, as if the signal had come just before the call: another
# thread gets it.
WAITS = """
import os, signal
from paceline.node.signals import call_on

readable, writable = os.pipe()
call_on([signal.SIGINT, signal.SIGTERM], lambda number: os.write(writable, bytes([number])))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
print("waits", flush=True)
print(*os.read(readable, 1), flush=True)
print(*os.read(readable, 1), flush=True)
"""


def test_a_signal_is_heard_while_the_main_thread_waits() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for number, said in ((None, "waits"), (signal.SIGTERM, "15"), (signal.SIGINT, "2")):
            if number is not None:
                process.send_signal(number)
            assert process.stdout.readline() == f"{said}\n"
        assert process.wait(GENEROUS) == 0


def test_a_signal_is_heard_that_the_parent_process_has_blocked() -> None:
    begin = WAITS.replace("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])\n", "")
    old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        process = subprocess.Popen([sys.executable, "-c", begin], stdout=subprocess.PIPE, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "15\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(GENEROUS) == 0
