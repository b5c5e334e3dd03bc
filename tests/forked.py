"""`python -m paceline …` forked from a process that has it imported already, for a tenth of what a start costs.

`Popen` is a `subprocess.Popen`: the process is a child of this one, with its own streams, variables, folder, signals
and exit code, as after an exec. Where a fork would differ (another interpreter, `preexec_fn`, variables that Python
reads when it starts, a folder that hides modules), it is started anew, and where the kernel lacks what this needs.
PACELINE_TESTS_COLD=1 starts all anew.

One template for each process that uses this, single-threaded, ends when its socket closes: with its user, however that
ends. It makes the children with clone(CLONE_PARENT), so that they are not its own; `man 2 clone`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import os
import pickle
import pkgutil
import re
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Python, the loader and the C library read these when a process starts.
_READ_AT_START = re.compile("PYTHON|LD_|LC_|LANG|TZ$|MALLOC_|GLIBC_|PYDANTIC_|OPENSSL_")
_SPACE = 48 << 10  # bytes in the template for the variables of a child, and again for its arguments
_MESSAGE = 160 << 10
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
_CALLS = {"x86_64": (56, ("tid", "tls")), "aarch64": (220, ("tls", "tid"))}  # clone: its number, its last arguments
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_SPACES = {"net": 0x40000000, "uts": 0x4000000, "mount": 0x20000}  # what setns calls them
_PR_GET_TID_ADDRESS = 40
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_PLAIN = {  # arguments of subprocess.Popen and what they must be: a fork cannot do otherwise
    "preexec_fn": None,
    "executable": None,
    "shell": False,
    "close_fds": True,
    "restore_signals": True,
    "uid": None,
    "gid": None,
    "gids": None,
    "process_group": -1,
}


class Process(subprocess.Popen[Any]):
    """A process of which `communicate` returns what is left after `readline`, what that has read ahead included."""

    _rest: dict[Any, tuple[threading.Thread, list[Any]]] | None = None  # by stream: who reads it, and what was read

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Write to it, and return the rest of both streams at its end. After a timeout it may be called again."""
        until = None if timeout is None else time.monotonic() + timeout
        if self._rest is None:
            self._rest = {}
            for stream in filter(None, (self.stdout, self.stderr)):
                read: list[Any] = []
                thread = threading.Thread(target=_read_rest, args=(stream, read), daemon=True)
                self._rest[stream] = (thread, read)
                thread.start()
        if self.stdin is not None and not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                self.stdin.writelines([input] if input else [])
        for thread, _ in self._rest.values():
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        out, err = (self._rest[it][1][0] if it is not None else None for it in (self.stdout, self.stderr))
        return out, err


def _read_rest(stream: Any, read: list[Any]) -> None:
    """Read a stream to its end and close it; nothing is left of one that is closed."""
    if stream.closed:
        read.append(None)
    else:
        with stream:
            read.append(stream.read())


class Popen(Process):
    """A process that is forked if it is `python -m MODULE …`, in other namespaces too (`nsenter --net=…`)."""

    forked = False

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        pid = _forked(given)
        if pid is None:
            super()._execute_child(*args, **kwargs)  # type: ignore[misc]
            return
        self.pid = pid
        self.forked = self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in ends))  # type: ignore[attr-defined]


# -- the side of the tests ---------------------------------------------------------------------------------------------


def _forked(given: Mapping[str, Any]) -> int | None:
    """The process for these arguments of `_execute_child`; None: it has to be started anew."""
    args = given["args"]
    if any(given.get(name, value) != value for name, value in _PLAIN.items()) or isinstance(args, str | bytes):
        return None
    words = [os.fsdecode(word) for word in args]
    spaces, words = _nsenter(words)
    cwd = spaces.pop("wdns", None)
    if words[:2] != [sys.executable, "-m"] or os.environ.get("PACELINE_TESTS_COLD"):
        return None
    env = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if given["env"] is None else given["env"]).items()}
    streams = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
    streams = {target: target if source == -1 else source for target, source in streams.items()}
    files = {target: source for target, source in streams.items() if _is_open(source)}
    files.update((int(number), int(number)) for number in given["pass_fds"])
    try:
        request = {
            "words": words,
            "env": env,
            "cwd": cwd or os.path.abspath(os.fsdecode(given["cwd"] or os.getcwd())),
            "umask": _umask() if given["umask"] < 0 else given["umask"],
            "new_session": bool(given["start_new_session"]),
            "targets": list(files),
            "spaces": spaces,
            "limits": {which: resource.getrlimit(which) for which in _LIMITS},
            "processors": os.sched_getaffinity(0),
            "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
            "ignored": {it for it in _signals() if signal.getsignal(it) == signal.SIG_IGN} - _IGNORED_BY_PYTHON,
        }
        return _Template.of_this_process(env).fork(request, list(files.values()))
    except OSError:  # the folder is gone, the message is too long, the template was killed: a real start says which
        return None


def _nsenter(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The options of `nsenter`, if that starts the command, and the command."""
    spaces = {}
    if words[0] == "nsenter":
        words = words[1:]
        while (found := re.fullmatch("--(net|uts|mount|wdns)=(.*)", words[0])) is not None:
            spaces[found[1]] = found[2]
            words = words[1:]
    return spaces, words


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _umask() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))


def _signals() -> Iterator[signal.Signals]:
    """The signals that a process can handle."""
    for it in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if isinstance(it, signal.Signals):
            yield it


def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that only a new process takes over."""
    return {name: value for name, value in env.items() if _READ_AT_START.match(name)}


class _Template:
    """The process that has the imports."""

    _current: _Template | None = None
    _unusable = False  # the kernel lacks something, or what it imports does not work
    _lock = threading.Lock()

    def __init__(self, env: Mapping[str, str]) -> None:
        self.user = os.getpid()
        self.read_at_start = read_at_start(env)
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A child's variables and arguments are written over these, where /proc shows them.
        variables = {"SPACE": "-" * _SPACE, "PATH": env.get("PATH", os.defpath), **self.read_at_start}
        with there:
            self.process = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), str(there.fileno()), "-" * _SPACE],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                env=variables,
                cwd="/",
            )
        atexit.register(self.end)

    @classmethod
    def of_this_process(cls, env: Mapping[str, str]) -> _Template:
        """The one that this process uses; the first call, which starts it, says with which variables."""
        with cls._lock:
            it = cls._current
            if cls._unusable:
                raise OSError("no template")
            if it is None or it.user != os.getpid() or it.process.poll() is not None:
                from tests import leaks  # not in the template, which executes this file

                with leaks.kept():
                    it = cls._current = cls(env)
            return it

    def fork(self, request: dict[str, Any], files: Sequence[int]) -> int | None:
        """Make a child; None: it cannot."""
        if read_at_start(request["env"]) != self.read_at_start:
            return None
        with self._lock:
            socket.send_fds(self._socket, [pickle.dumps(request)], files)
            answer = self._socket.recv(1 << 10)
        if not answer:
            _Template._unusable = self.process.wait() > 0
        return int(answer or 0) or None

    def end(self) -> None:
        """End it and wait for its end."""
        if self.user == os.getpid():
            self._socket.close()
            self.process.wait()


# -- the template ------------------------------------------------------------------------------------------------------


def _import_all() -> None:
    """What the command line and its verbs import, except the command line's `__main__`."""
    for room in ("cli", "backends", "job", "jobs", "contract"):
        package = importlib.import_module(f"paceline.{room}")
        for it in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{package.__name__}."):
            with contextlib.suppress(ImportError):  # an optional package is missing
                importlib.import_module(it.name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("an import starts a thread, and the children would miss it")


class _Memory:
    """Where the kernel finds what /proc/<pid>/environ or cmdline shows; in a child it is the same place."""

    def __init__(self, begin: int, end: int) -> None:
        self._begin, self._size = begin, end - begin

    def write(self, strings: Sequence[str]) -> bool:
        data = b"".join(os.fsencode(it) + b"\0" for it in strings)
        if len(data) > self._size:
            return False
        ctypes.memmove(self._begin, data.ljust(self._size, b"\0"), self._size)
        return True


class _Cloning:
    """fork(2) whose child is a child of this process's parent."""

    def __init__(self) -> None:
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long
        self._number, names = _CALLS[os.uname().machine]
        address = ctypes.c_void_p()
        if self._libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) != 0 or not address.value:
            raise OSError(ctypes.get_errno(), "prctl")
        # The C library's own note of the thread's id has to become the child's.
        flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
        last = {"tid": address.value, "tls": 0}
        self._arguments = [ctypes.c_long(it) for it in (flags, 0, 0, *(last[name] for name in names))]

    def __call__(self) -> int:
        """The child's pid, 0 in the child."""
        ctypes.pythonapi.PyOS_BeforeFork()
        pid = int(self._libc.syscall(ctypes.c_long(self._number), *self._arguments))
        if pid == 0:
            ctypes.pythonapi.PyOS_AfterFork_Child()
        else:
            ctypes.pythonapi.PyOS_AfterFork_Parent()
        return pid

    def enter(self, spaces: Mapping[str, str]) -> None:
        """Go into namespaces; in another one of mounts the folder is its root."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path)) for path in spaces.values()]
            for file, kind in zip(files, spaces, strict=True):
                if self._libc.setns(file.fileno(), _SPACES[kind]) != 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), file.name)


def _serve() -> dict[str, Any]:
    """Make children until the user ends; returns in each child, with its request."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ours = socket.socket(fileno=int(sys.argv[1]))
    sys.path.pop(0)  # the folder of this file
    with open("/proc/self/stat") as stat:
        begin_args, end_args, begin_env, end_env = map(int, stat.read().rpartition(") ")[2].split()[45:49])
    arguments, variables = _Memory(begin_args, end_args), _Memory(begin_env, end_env)
    with open("/proc/self/environ", "rb") as file:
        given = {pair.partition(b"=")[0] for pair in file.read().split(b"\0")}
    added = {name: value for name, value in os.environ.items() if os.fsencode(name) not in given}  # LC_CTYPE, by Python
    before = dict(os.environ)
    os.environ.clear()  # its own variables lie in that memory too
    os.environ.update(before)
    variables.write([])
    arguments.write(["template of the command lines of tests"])
    standard = set(sys.modules)
    _import_all()
    hidden_by = {name.partition(".")[0] for name in set(sys.modules) - standard}
    clone = _Cloning()
    gc.collect()
    gc.freeze()
    while True:
        data, files, *_ = socket.recv_fds(ours, _MESSAGE, 250)
        if not data:
            os._exit(0)
        request = pickle.loads(data)
        pid = 0
        ready, done = os.pipe()
        try:
            for space in request["spaces"].values():
                os.stat(space)
            os.chdir(request["cwd"])
            os.umask(request["umask"])
            shown = [f"{name}={value}" for name, value in request["env"].items()]
            if not _hides(hidden_by) and arguments.write(request["words"]) and variables.write(shown):
                pid = clone()
                if pid == 0:
                    ours.detach()
                    _become(request, files, done, clone)
                    os.environ.update(added)
                    return request
        except OSError:
            pid = 0
        os.close(done)
        os.read(ready, 1)  # the child is what it should be, or has ended
        os.close(ready)
        for number in files:
            os.close(number)
        variables.write([])
        arguments.write(["template of the command lines of tests"])
        os.chdir("/")
        ours.send(b"%d" % max(pid, 0))


def _hides(modules: set[str]) -> bool:
    """Whether a module of the folder would be imported instead of one of these."""
    for name in os.listdir():
        stem, dot, _ = name.partition(".")
        if stem in modules and (
            name.endswith((".py", ".so", ".pyc")) or (not dot and os.path.exists(f"{name}/__init__.py"))
        ):
            return True
    return False


def _become(request: dict[str, Any], files: list[int], done: int, clone: _Cloning) -> None:
    """Make this child what an exec would have made it."""
    try:
        if request["new_session"]:
            os.setsid()
        clone.enter(request["spaces"])
        if "mount" in request["spaces"]:
            os.chdir(request["cwd"])
        for which, limits in request["limits"].items():
            if resource.getrlimit(which) != limits:
                resource.setrlimit(which, limits)
        if os.sched_getaffinity(0) != request["processors"]:
            os.sched_setaffinity(0, request["processors"])
        done = _take(dict(zip(request["targets"], files, strict=True)), done)
        os.environ.clear()
        os.environ.update(request["env"])
        ignored = request["ignored"] | _IGNORED_BY_PYTHON
        for it in _signals():
            wanted: Any = signal.default_int_handler if it == signal.SIGINT else signal.SIG_DFL
            wanted = signal.SIG_IGN if it in ignored else wanted
            if signal.getsignal(it) != wanted:
                signal.signal(it, wanted)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            stream = _stream(number, getattr(sys, f"__{name}__"))
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        os.close(done)
    except BaseException as error:
        os.write(2, f"the process could not be made: {error!r}\n".encode())
        os._exit(70)


def _take(files: dict[int, int], done: int) -> int:
    """Put descriptors where they belong and close all others, except `done`, whose new number this returns."""
    above = max(files, default=2) + 1
    done = fcntl.fcntl(done, fcntl.F_DUPFD_CLOEXEC, above)
    files = {target: fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, above) for target, source in files.items()}
    for target, source in files.items():
        os.dup2(source, target)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in files and int(name) != done:
            with contextlib.suppress(OSError):  # of the listing itself
                os.close(int(name))
    return done


def _stream(number: int, like: io.TextIOWrapper) -> io.TextIOWrapper | None:
    """A standard stream, as Python makes it when it starts."""
    if not _is_open(number):
        return None
    raw: Any = open(number, "rb" if number == 0 else "wb", closefd=False)  # noqa: SIM115 - as long as the process
    raw.raw.name = ("<stdin>", "<stdout>", "<stderr>")[number]
    lines = number == 2 or os.isatty(number)
    stream = io.TextIOWrapper(raw, like.encoding, like.errors, newline="\n", line_buffering=lines)
    stream.mode = "r" if number == 0 else "w"  # type: ignore[attr-defined]
    return stream


def _main() -> NoReturn:
    request = _serve()
    sys.orig_argv = request["words"]
    sys.argv = request["words"][2:]
    sys.path.insert(0, os.getcwd())
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = (end.code or 0) & 0xFF if isinstance(end.code, int | None) else 1
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    _end(code)


def _end(code: int) -> NoReturn:
    """End as Python does, but without freeing all that is imported, which takes longer than most commands.

    Args:
        code: the exit code, or the signal to end by, negative.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError as error:
            if stream is sys.stdout:
                print(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}", file=sys.stderr)
                code = 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _main()
