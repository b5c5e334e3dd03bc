"""Running paceline as a user does, and seeing to it that nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests import costs, forked, journals, leaks, needs, tiers, warm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# A shell without job control ignores SIGINT in what it starts in the background, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# So does nohup with SIGHUP; what is executed with a handler here takes it as usual.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# A machine may be slow for a while: how long an example takes says nothing.
settings.register_profile("paceline", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """The options and hooks of the tests."""
    for plugin in (costs, leaks, needs, tiers, warm):
        pluginmanager.register(plugin)


_LOG_BYTES = 4000  # of the end of each log, where processes are left
GENEROUS = 120.0  # seconds until a test gives up waiting; machines are noisy
# A test that is about these limits sets them itself.
os.environ.update(PACELINE_LOOK_TIMEOUT="60s", PACELINE_ACT_TIMEOUT="60s", PACELINE_TRUST="1")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
OTHERS = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "COLUMNS")  # of whoever runs the tests; users do not set them


_ports = itertools.count(random.randrange(12000))
_given = os.open(f"/tmp/paceline-test-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600)


def free_port() -> int:
    """A port for a process that is started later: one that the kernel gives to nobody, nor another process of tests."""
    while True:
        port = 20000 + next(_ports) % 12000  # the kernel's own begin at 32768
        with contextlib.suppress(OSError):
            fcntl.lockf(_given, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)  # until this process ends
            with socket.create_server(("", port)):
                return port


def eventually(condition: Callable[[], object], what: str | Callable[[], str], pause: float = 0.01) -> None:
    """Wait until something outside of our reach has happened; `what` is asked for when it did not.

    Each look that starts a command costs what a test costs: give it a longer `pause`, in seconds.
    """
    deadline = time.monotonic() + GENEROUS
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what if isinstance(what, str) else what()}"
        time.sleep(pause)


def why_says(paceline: Paceline, name: str, text: str) -> str:
    """Wait until `paceline why` says something of a job; returns all that it says then."""
    said = ""

    def is_said() -> bool:
        nonlocal said
        said = paceline("why", name).stdout
        return text in said

    eventually(is_said, lambda: said, 1.0)
    return said


def takes_signals(process: subprocess.Popen[str]) -> None:
    """Wait until a client handles the signals for its job, which may run before: then it says what it has started."""
    assert process.stderr is not None
    assert process.stderr.readline().startswith("paceline: job ")


def processes_with(variable: str) -> list[int]:
    """The processes that live and were started with a variable, given as NAME=value."""
    marker = f"{variable}\0".encode()
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if marker in (path / "environ").read_bytes() + b"\0":
                    found.append(int(path.name))
    return found


def all_end(processes: Callable[[], Sequence[int]], what: str, logs: Path | None = None) -> None:
    """Wait until these have ended. If they do not, print what each of them does, and kill them.

    Args:
        processes: the pids of those that are left.
        what: whose they are.
        logs: a folder whose log files are printed too.

    Raises:
        AssertionError: some did not end.
    """
    try:
        eventually(lambda: not processes(), f"all processes of {what} have ended")
    finally:
        pids = processes()
        for pid in pids:
            print(_describe(pid))
        for path in sorted(logs.rglob("*.log")) if pids and logs is not None else ():
            print(f"-- {path}\n{path.read_bytes()[-_LOG_BYTES:].decode(errors='replace')}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _describe(pid: int) -> str:
    """A process's command line, and the stacks of its threads if it is Python."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return f"-- {pid} has ended"
    spy = [Path(sys.executable).with_name("py-spy"), "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(spy, capture_output=True, text=True, timeout=60, check=False)
        stacks = done.stdout or done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        stacks = str(error)
    return f"-- {pid}, state {state[0]}, child of {state[1]}: {command}\n{stacks}"


class Paceline:
    """`paceline` with a home of its own, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cold = False  # whether each command line is a new interpreter, as for users
        self.home = folder / "home"
        self.env = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES + OTHERS}
        self.env = {k: v for k, v in self.env.items() if not k.startswith("PET_")}
        self.env.update(PACELINE_HOME=str(self.home), XDG_CONFIG_HOME=str(folder / "config"))
        self.env["PACELINE_WARM_DIR"] = warm.keep(self.env)

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script; returns its name."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    def start(self, *args: str, python: tuple[str, ...] = (sys.executable,), **kwargs: object) -> subprocess.Popen[str]:
        """Start a command line and go on."""
        options: dict[str, object] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
            "text": True,
            "cwd": self.folder,
            "env": self.env,
            **kwargs,
        }
        popen = forked.Process if self.cold else forked.Popen
        return popen([*python, "-m", "paceline", *args], **options)  # type: ignore[call-overload,no-any-return]

    def __call__(self, *args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run a command line to its end; lines that name what takes longer than a second are left out."""
        process = self.start(*args, **kwargs)  # type: ignore[arg-type]
        out, err = process.communicate(timeout=GENEROUS)
        said = err and re.sub(r"^paceline: .*…\n", "", err, flags=re.M)
        return subprocess.CompletedProcess(process.args, process.returncode, out, said)

    def succeeds(self, *args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run a command line to its end, which is success."""
        done = self(*args, **kwargs)
        assert done.returncode == 0, done.stderr
        return done

    def json(self, *args: str) -> Any:
        """What a command line shows with `-o json`."""
        done = self(*args, "-o", "json")
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def on_terminal(self, *args: str, **kwargs: object) -> tuple[int, bytes]:
        """Run a command line on a terminal that does not know its size; its exit code, and all that is shown.

        With `typed`, it reads from there as well.
        """
        ours, theirs = os.openpty()
        if kwargs.pop("typed", False):
            kwargs["stdin"] = theirs
        process = self.start(*args, **{"stdout": theirs, "stderr": theirs, **kwargs})  # type: ignore[arg-type]
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # what reading a terminal ends with once nobody writes to it
            while data := os.read(ours, 4096):
                seen += data
        os.close(ours)
        return process.wait(GENEROUS), seen

    def run(self, *args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
        """`paceline run …`."""
        return self("run", *args, **kwargs)

    def job(self) -> Path:
        """The run directory of the only job."""
        (path,) = (self.home / "jobs").iterdir()
        return path

    def newest_job(self) -> Path:
        """The run directory of the job that was made last; an older one may be written to as long as its agent ends."""
        jobs = [path for path in (self.home / "jobs").iterdir() if not path.name.startswith(".")]
        return max(jobs, key=lambda path: json.loads((path / "job.json").read_text())["created"])

    def processes(self) -> list[int]:
        """Everything that lives and was started, however indirectly, by this paceline."""
        return processes_with(f"PACELINE_HOME={self.home}")


@pytest.fixture
def paceline(tmp_path: Path) -> Iterator[Paceline]:
    """paceline in an empty folder; after the test none of its processes may be left."""
    it = Paceline(tmp_path)
    yield it
    all_end(it.processes, "the job", it.home / "jobs")
    journals.check(it.home / "jobs")


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    """What a test changes for this process, all that later tests start would inherit: ignored and blocked signals."""

    def now() -> tuple[dict[int, object], set[int]]:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        return handlers, signal.pthread_sigmask(signal.SIG_BLOCK, [])

    before = now()
    yield
    assert now() == before, "the test changes how this process takes signals"


@pytest.fixture(autouse=True)
def _cpu_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not about GPUs is tested without them, on machines that have some too."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """The tests compute little: threads of torch would wait for each other, busily where the machine is."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
