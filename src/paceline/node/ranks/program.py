"""Inside a rank: run the user's program as `__main__`, the way `python script.py` or `python -m module` would."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.machinery
import os
import pkgutil
import runpy
import signal
import sys
import time
import traceback
import types
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.contract import HOROVOD, RESUME_CODE
from paceline.contract.rehearsal import FOLDER
from paceline.node.files import write_json

from . import answering, joining, stdin
from .ending import end

if TYPE_CHECKING:
    from paceline.contract.records import ErrorRecord
    from paceline.node.spec import Program


_rank_pid = 0


class ExitCode(Exception):
    """In the record of a rank: it has called `sys.exit` with this number. Only when that was counts."""


def run_program(program: Program, error_path: Path) -> None:
    """Run a script or module to its end; like Python itself, leave by SystemExit or by returning.

    An uncaught exception is recorded in `error_path` first, so that the agent knows of it before the peers do, and then
    printed by `sys.excepthook` as usual.
    """
    global _rank_pid  # noqa: PLW0603 - a child that the script forks gets here too, and is no rank
    _rank_pid = os.getpid()
    _buffer_by_line()
    sys.argv = [program.target, *program.args]
    stdin.explain_breakpoints()
    answering.listen()
    if FOLDER in os.environ:
        importlib.import_module("paceline.node.ranks.rehearsal.begin").begin()
    joining.watch()
    if HOROVOD in os.environ:
        importlib.import_module("paceline.horovod.aliases").install()
    code: Any = None
    try:
        if program.kind == "module":
            _new_main()
            runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]  # what `python -m` itself calls
        else:
            _run_script(program.target)
    except SystemExit as error:
        code = error.code
        _record_exit(error_path, error)
    except BaseException as error:
        _report(error, error_path)
        if isinstance(error, KeyboardInterrupt):
            if not _ends_as_python(1):
                end(-signal.SIGINT, error_path)
            sys.excepthook = lambda *_: None
            raise KeyboardInterrupt from None  # Python ends itself with SIGINT then, as the shell expects
        code = 1
    if code in (None, 0) and os.getpid() == _rank_pid:
        joining.report(error_path)
    # The exception is released here, and with it the objects of its frames.
    if not _ends_as_python(code):
        if code is not None and not isinstance(code, int):
            with contextlib.suppress(Exception):
                print(code, file=sys.stderr)
            code = 1
        end((code or 0) & 0xFF, error_path)  # as the kernel does; `end` takes a negative code for a signal
    if code is not None:
        raise SystemExit(code)


def _ends_as_python(code: object) -> bool:
    """Whether Python's own finalization may end this process: not with torch in it (see `ending`).

    Nor may it where mpi4py or JAX is in it and the rank has failed: they would wait for all other ranks, in
    MPI_Finalize, and for five minutes in the barrier of `jax.distributed.shutdown`.
    """
    failed = code not in (None, 0)
    return "torch" not in sys.modules and not (failed and {"mpi4py.MPI", "jax"} & sys.modules.keys())


def script_folder(script: str) -> str:
    """What `python script` puts first on sys.path: the folder of the file behind all links."""
    return os.path.dirname(os.path.realpath(script))


def _buffer_by_line() -> None:
    """Flush stdout after each line although it is a file, as Python does on a terminal; `-u` is not changed."""
    stream: Any = sys.stdout
    if stream is not None and not stream.write_through:
        stream.reconfigure(line_buffering=True)


def _new_main() -> types.ModuleType:
    """An empty `__main__`, as Python makes it."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if "__mp_main__" in sys.modules:  # the module name with which multiprocessing pickles the script's classes
        sys.modules["__mp_main__"] = main
    main.__dict__.update(__builtins__=builtins)
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    return main


def _run_script(script: str) -> None:
    path = os.path.abspath(script)
    main = _new_main()
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    if zipfile.is_zipfile(path):
        runpy.run_path(path, run_name="__main__")
        return
    with open(path, "rb") as file:
        code = pkgutil.read_code(file)  # compiled bytecode, or None for source
    if code is None:
        with open(path, "rb") as file:
            source = file.read()
        if FOLDER in os.environ:
            code = importlib.import_module("paceline.node.ranks.rehearsal.begin").compiled(source, path)
        code = code or compile(source, path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _report(error: BaseException, error_path: Path) -> None:
    """Print an uncaught exception through `sys.excepthook`, and record which part of the log holds it."""
    when = time.monotonic()
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == _report.__code__.co_filename:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have closed it
            stream.flush()
    lines = traceback.format_exception(type(error), error, trace)
    start = _log_size()
    _record(error_path, error, lines, when, (start, None))
    try:
        sys.excepthook(type(error), error, trace)
    except BaseException:
        sys.__excepthook__(type(error), error, trace)
    if hint := stdin.explanation(error):
        with contextlib.suppress(Exception):
            print(f"paceline: {hint}", file=sys.stderr)
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    _record(error_path, error, lines, when, (start, _log_size()))


def _record_exit(error_path: Path, error: SystemExit) -> None:
    """Record that the script has called `sys.exit`: others may end before this process, by what it tells them now."""
    if error.code is not None and not isinstance(error.code, int):
        _record(error_path, error, [str(error.code)], time.monotonic())
    elif error.code and error.code != RESUME_CODE:
        _record(error_path, ExitCode(int(error.code)), [], time.monotonic())


def _log_size() -> int:
    try:
        return os.fstat(2).st_size
    except OSError:  # the script has closed it
        return 0


def _record(
    path: Path,
    error: BaseException,
    lines: list[str],
    when: float,
    span: tuple[int | None, int | None] = (None, None),
) -> None:
    """Record what ended this rank and when; `span` is the part of the log that holds the traceback."""
    if os.getpid() != _rank_pid:
        return
    try:
        message = str(error)
    except Exception:
        message = "<str() of the exception failed>"
    record: ErrorRecord = {
        "type": type(error).__name__,
        "message": message,
        "traceback": "".join(lines),
        "time": when,
        "pid": os.getpid(),
        "log_start": span[0],
        "log_end": span[1],
    }
    if span[1] is not None:  # not before it is printed: that takes some time
        with contextlib.suppress(Exception):  # what torch records is no public interface
            record["collectives"] = answering.last_collectives()
    try:
        write_json(path, record)
    except OSError as failure:
        with contextlib.suppress(Exception):
            print(f"paceline: cannot record the exception in {path}: {failure}", file=sys.stderr)
