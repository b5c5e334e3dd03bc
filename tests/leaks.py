"""A test that leaves a process, a descriptor, a temporary file or a network namespace fails, and names them.

What is left when all fixtures of a test have ended is waited for, as processes and threads need a moment to end. What
fixtures of a module or of the whole run start may stay, and what is started within `kept()`. Not noticed: a process
that is no child of the tests any more and has not inherited the variable with which pytest names the test.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

Thing = tuple[str, str]  # its kind and its name
_SECONDS = 60.0  # until what is left counts; machines are noisy
_NETWORKS = Path("/run/netns")
# Names of temporary files begin so that chromium, Open MPI, torchrun and TensorBoard leave, and multiprocessing and
# torch until the end.
_OF_OTHERS = (
    ".tensorboard-info", "org.chromium.Chromium.", "ompi.", "pymp-", "pytorch-errorfile-", "torchelastic_",
    "torchinductor_",
)  # fmt: skip
_NOT_YET = (
    "tests/frameworks/",  # in an environment of its own, and not looked through
    "tests/lab/",  # not looked through; its hosts use the temporary folder of the machine, not the one made here
    "tests/train/parallel/",  # looked through by four fifths: no test of these left anything
)
_kept: set[Thing] = set()
_failed = pytest.StashKey[bool]()


def _names(folder: str | Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def _now() -> set[Thing]:
    """All processes of the machine, and what else there is now that may be of this process."""
    found = {("process", name) for name in _names("/proc") if name.isdigit()}
    for number in _names("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.add(("descriptor", f"{number} ({os.readlink(f'/proc/self/fd/{number}')})"))
    found.update(("temporary file", name) for name in _names(tempfile.gettempdir()))
    found.update(("network namespace", name) for name in _names(_NETWORKS) if name.startswith(f"pl{os.getpid()}"))
    return found


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """What begins in this block may outlive the test: something that all tests of this process use."""
    before = _now()
    try:
        yield
    finally:
        _kept.update(_now() - before)


def _helpers() -> Iterator[Thing]:
    """What libraries have for this process until its end."""
    if (torch := sys.modules.get("torch.distributed.nn.jit.instantiator")) and hasattr(torch, "_TEMP_DIR"):
        yield "temporary file", Path(torch._TEMP_DIR.name).name  # torch 2.6 makes it when it is imported
    if (engine := sys.modules.get("paceline.backends.remote.engine")) and (loop := engine._engine._loop):
        for number in (loop._selector.fileno(), loop._ssock.fileno(), loop._csock.fileno()):
            yield "descriptor", f"{number} ({os.readlink(f'/proc/self/fd/{number}')})"
    # The processes of multiprocessing, and how it knows that these live.
    pairs = (
        (resource_tracker._resource_tracker, "_pid", "_fd"),
        (forkserver._forkserver, "_forkserver_pid", "_forkserver_alive_fd"),
    )
    for helper, pid, descriptor in pairs:
        yield "process", str(getattr(helper, pid))
        with contextlib.suppress(OSError):
            number = getattr(helper, descriptor)
            yield "descriptor", f"{number} ({os.readlink(f'/proc/self/fd/{number}')})"


def _read(pid: str, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path("/proc", pid, name).read_bytes()
    return b""


def _is_of(pid: str, test: str) -> bool:
    """Whether a process lives that this test has started: it is below this process, or an orphan with the test's name.

    One with that name below somebody else is of another run of the same test.
    """
    marker = f"PYTEST_CURRENT_TEST={test} (".encode()
    marked = is_orphan = marker in _read(pid, "environ")
    above = pid
    while (fields := _read(above, "stat").rpartition(b") ")[2].split()) and fields[0] not in (b"Z", b"X"):
        if ("process", above) in _kept and (not marked or marker in _read(above, "environ")):
            return False
        is_orphan = is_orphan and marker in _read(above, "environ")
        above = fields[1].decode()
        if above == str(os.getpid()):
            return ("process", pid) not in _kept
        if above in ("0", "1"):
            return is_orphan
    return False


def _left(before: set[Thing], test: str) -> set[Thing]:
    """What a test has left until now."""
    _kept.update(_helpers())
    new = _now() - before - _kept
    return {
        (kind, name)
        for kind, name in new
        if not name.startswith(_OF_OTHERS) and (kind != "process" or _is_of(name, test))
    }


def _described(thing: Thing) -> str:
    kind, name = thing
    if kind == "process":
        name += ": " + " ".join(_read(name, "cmdline").replace(b"\0", b" ").decode(errors="replace").split())
    if kind == "descriptor" and "socket:" in name:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name.split()[0]))) as it:
            name += f" {it.family.name} {it.getsockname()}"
    return f"{kind} {name}"


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    """What a fixture of more than a test starts is not the test's."""
    with contextlib.nullcontext() if fixturedef.scope == "function" else kept():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Know which tests fail: their frames are kept, with all that these have opened."""
    if call.excinfo is not None:
        item.stash[_failed] = True
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[None]:
    """A folder for temporary files in which no other process of tests has any, unless no test is looked at."""
    if all(item.nodeid.startswith(_NOT_YET) for item in request.session.items):
        yield
        return
    tmp_path_factory.getbasetemp()  # it stays where it was
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    own = tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="pl-")
    yield
    tempfile.tempdir = before
    os.environ.pop("TMPDIR")
    if variable is not None:
        os.environ["TMPDIR"] = variable
    Finalize(None, shutil.rmtree, (own, True), exitpriority=-200)  # when multiprocessing has removed its own there


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest, _own_temporary_folder: None) -> Iterator[None]:
    """The first fixture of a test, so it ends last."""
    before, test = _now(), request.node.nodeid
    yield
    if _failed in request.node.stash or test.startswith(_NOT_YET) or not _left(before, test):
        return
    gc.collect()
    deadline = time.monotonic() + _SECONDS
    while left := _left(before, test):
        if time.monotonic() > deadline:
            lines = sorted(map(_described, left))
            for pid in (int(name) for kind, name in left if kind == "process"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pytest.fail("the test leaves\n" + "\n".join(lines), pytrace=False)
        time.sleep(0.02)
