"""What is forked is as it would be after an exec."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import forked
from tests.conftest import GENEROUS, OTHERS, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# All that a process sees of how it was started.
REPORT = """
import contextlib, json, locale, os, random, resource, signal, sys, tempfile
def stream(it):
    names = ("encoding", "errors", "newlines", "line_buffering", "write_through", "name", "mode")
    return None if it is None else [getattr(it, name) for name in names] + [it.isatty(), it.buffer.name]
def status():
    return [line for line in open("/proc/self/status") if line.startswith(("Sig", "Shd", "Umask", "Cpus_allowed:"))]
files = {}
for name in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):
        files[int(name)] = [os.readlink(f"/proc/self/fd/{name}").partition(":")[0], os.get_inheritable(int(name))]
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": list(sys.flags), "main": __name__,
    "package": __package__, "file": __file__, "is_main": sys.modules["__main__"].__dict__ is globals(),
    "env": dict(os.environ), "cwd": os.getcwd(), "files": files, "status": [it for it in status() if "SigQ" not in it],
    "environ": open("/proc/self/environ").read().rstrip(chr(0)),
    "cmdline": open("/proc/self/cmdline").read().rstrip(chr(0)),
    "comm": open("/proc/self/comm").read(), "session": os.getsid(0) == os.getpid(), "parent": os.getppid(),
    "group": os.getpgid(0) if os.getsid(0) != os.getpid() else 0, "locale": locale.getlocale(),
    "limits": [resource.getrlimit(it) for it in range(16)], "nice": os.nice(0),
    "streams": [stream(it) for it in (sys.stdin, sys.stdout, sys.stderr)], "same": sys.stdout is sys.__stdout__,
    "int": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "term": repr(signal.getsignal(signal.SIGTERM)),
}
print(json.dumps(seen), file=open("seen", "w"))
"""
# With what Python reads when it starts as in the tests of jobs: one template serves both.
AT_START = {name: value for name, value in forked.read_at_start(os.environ).items() if name not in OTHERS}
ENV = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "A": "b=c", "EMPTY": "", "WIDE": "ä", **AT_START}


@pytest.fixture(autouse=True)
def _possible() -> None:
    with forked.Popen([sys.executable, "-m", "paceline", "--version"], stdout=subprocess.DEVNULL, env=ENV) as process:
        pass
    if not process.forked:
        pytest.skip("this machine cannot fork a sibling, or shows no place of arguments")


@pytest.fixture
def module(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Write a module; returns arguments of Popen for it, but `args`."""

    def write(text: str) -> dict[str, Any]:
        (tmp_path / "it.py").write_text(text)
        return {"cwd": tmp_path, "env": ENV, "text": True}

    return write


IT = [sys.executable, "-m", "it"]


def both(options: dict[str, Any], words: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the report says of a fork and of a new process."""
    seen = []
    for popen in (forked.Popen, subprocess.Popen):
        with popen([*IT, *words], **options) as process:
            assert process.wait(GENEROUS) == 0
        assert getattr(process, "forked", False) == (popen is forked.Popen)
        seen.append(json.loads((options["cwd"] / "seen").read_text()))
    return seen[0], seen[1]


def starting() -> dict[str, dict[str, Any]]:
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    return {
        "inherited": {},
        "nothing": {"stdin": null, "stdout": null, "stderr": null},
        "pipes": {"stdin": pipe, "stdout": pipe, "stderr": pipe},
        "one pipe": {"stdout": pipe, "stderr": subprocess.STDOUT},
        "session": {"start_new_session": True},
        "umask": {"umask": 0o27},
        "other variables": {"env": {"PATH": ENV["PATH"], "ONLY": "this", "LONG": "x" * 9000, **AT_START}},
    }


@pytest.mark.parametrize("how", starting())
def test_a_fork_is_like_a_new_process(module: Callable[[str], dict[str, Any]], how: str) -> None:
    there, new = both({**module(REPORT), **starting()[how]}, ("--flag", "two words", ""))
    assert there == new


def test_limits_ignored_and_blocked_signals_are_inherited(module: Callable[[str], dict[str, Any]]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[0] - 1, limits[1]))
    try:
        there, new = both(module(REPORT))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    assert there == new


def test_a_terminal(module: Callable[[str], dict[str, Any]]) -> None:
    master, slave = pty.openpty()
    try:
        there, new = both({**module(REPORT), "stdin": slave, "stdout": slave, "stderr": slave})
    finally:
        os.close(master)
        os.close(slave)
    assert there == new
    assert there["streams"][1][-2]


ENDS = {
    "returns": "print('out')",
    "a code": "import sys; print('out'); sys.exit(7)",
    "no code": "import sys; sys.exit()",
    "a large code": "import sys; sys.exit(256 + 3)",
    "a text": "import sys; sys.exit('no')",
    "an exception": "raise ValueError('it')",
    "interrupted": "print('out'); raise KeyboardInterrupt",
    "at exit": "import atexit; atexit.register(print, 'at exit'); print('out')",
    "a thread": "import threading; threading.Timer(0.1, print, ['thread']).start(); print('out')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "at once": "import os; print('lost'); os._exit(9)",
    "aborts": "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()",
    "a full disk": "import sys; sys.stdout = sys.__stdout__ = open('/dev/full', 'w'); print('out')",
}


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_like_a_process(module: Callable[[str], dict[str, Any]], how: str) -> None:
    ends = []
    for popen in (forked.Popen, subprocess.Popen):
        options = {**module(ENDS[how]), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with popen(IT, **options) as process:
            out, err = process.communicate(timeout=GENEROUS)
        ends.append((process.returncode, out, err.splitlines()[-1:]))
    assert ends[0] == ends[1]


WAITS = """
import signal, sys
print('here', flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGPIPE])
def test_signals_from_outside(module: Callable[[str], dict[str, Any]], number: signal.Signals) -> None:
    codes = []
    for popen in (forked.Popen, subprocess.Popen):
        options = {**module(WAITS), "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with popen(IT, **options) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            process.send_signal(number)
            if number == signal.SIGPIPE:  # which Python ignores
                process.communicate("", GENEROUS)
            codes.append(process.wait(GENEROUS))
    assert codes[0] == codes[1] == (0 if number == signal.SIGPIPE else -number)


def test_random_names_differ(module: Callable[[str], dict[str, Any]]) -> None:
    program = "import random, tempfile, uuid; print(random.random(), uuid.uuid4(), tempfile.mktemp())"
    seen = set[str]()
    for _ in range(3):
        with forked.Popen(IT, stdout=subprocess.PIPE, **module(program)) as process:
            seen.update(process.communicate(timeout=GENEROUS)[0].split())
    assert len(seen) == 9


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {**ENV, "PYTHONUNBUFFERED": "1"}},
        {"env": {**ENV, "LC_ALL": "C"}},
        {"env": {**ENV, "LONG": "x" * 100_000}},
        {"preexec_fn": lambda: None},
        {"close_fds": False},
        {"args": ["env", sys.executable, "-m", "it"]},
        {"args": [sys.executable, "it.py"]},
    ],
)
def test_otherwise_it_is_started_anew(module: Callable[[str], dict[str, Any]], changes: dict[str, Any]) -> None:
    options = {"args": IT, **module("print('out')"), "stdout": subprocess.PIPE, **changes}
    with forked.Popen(**options) as process:
        assert process.communicate(timeout=GENEROUS)[0] == "out\n"
    assert not process.forked


@pytest.fixture
def user(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has a template, and one process of it that waits."""
    program = f"""
        import subprocess, sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from tests import forked
        it = forked.Popen([sys.executable, "-m", "it"], stdin=subprocess.PIPE, stdout=-1, cwd={str(tmp_path)!r})
        it.stdout.readline()
        print(forked._Template._current.process.pid, it.pid, flush=True)
        sys.stdin.read()
    """
    (tmp_path / "it.py").write_text(WAITS)
    lines = "\n".join(line.strip() for line in program.splitlines())
    with subprocess.Popen(
        [sys.executable, "-c", lines], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV, text=True
    ) as it:
        yield it
        it.kill()


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "ended"])
def test_nothing_is_left_of_a_user(user: subprocess.Popen[str], killed: bool) -> None:
    assert user.stdout is not None
    pids = [int(word) for word in user.stdout.readline().split()]
    assert len(pids) == 2
    if killed:
        user.kill()
        user.wait(GENEROUS)
    else:
        user.communicate("", GENEROUS)

    def gone(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
        except OSError:
            return True

    eventually(lambda: all(gone(pid) for pid in pids), "the template and its child have ended")


def test_a_killed_template_is_replaced(module: Callable[[str], dict[str, Any]]) -> None:
    assert forked._Template._current is not None
    os.kill(forked._Template._current.process.pid, signal.SIGKILL)
    for _ in range(2):
        with forked.Popen(IT, stdout=subprocess.PIPE, **module("print('out')")) as process:
            assert process.communicate(timeout=GENEROUS)[0] == "out\n"
    assert process.forked
