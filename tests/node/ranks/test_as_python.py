"""A script under paceline sees what it sees under `python`."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Paceline

PROBE = """
    import json, os, sys, warnings
    import __main__
    facts = {
        "argv": sys.argv,
        "path": sys.path,
        "name": __name__,
        "file": __file__,
        "package": __package__,
        "spec": None if __spec__ is None else [__spec__.name, __spec__.origin],
        "doc": __doc__,
        "globals": sorted(k for k in globals() if k not in ("json", "os", "sys", "warnings", "__main__", "facts")),
        "main": __main__.__dict__ is globals(),
        "loader": type(__loader__).__name__,
        "builtins": type(__builtins__).__name__,
        "cached": __cached__ and os.path.basename(__cached__),
        "flags": str(sys.flags),
        "xoptions": sys._xoptions,
        "warnoptions": sys.warnoptions,
        "cwd": os.getcwd(),
        "executable": sys.executable,
        "encoding": [sys.stdout.encoding, sys.stdout.errors, sys.stderr.encoding, sys.stderr.errors],
        "write_through": sys.stdout.write_through,
        "signals": [str(__import__("signal").getsignal(n)) for n in (2, 15, 17, 13)],
        "threads": __import__("threading").active_count(),
        "main_thread": __import__("threading").current_thread() is __import__("threading").main_thread(),
        "code": sys._getframe().f_code.co_filename,
        "annotations": __annotations__ if sys.version_info < (3, 14) else {},
    }
    print(json.dumps(facts))
"""


def test_script_sees_what_python_shows_it(paceline: Paceline, start_method: str) -> None:
    paceline.script(PROBE, "folder/probe.py")
    args = ("folder/probe.py", "--lr", "0.1", "a b", "")
    expected = as_python(paceline, *args)
    under = paceline.run("--start-method", start_method, *args)
    assert json.loads(under.stdout) == expected


def test_module_sees_what_python_shows_it(paceline: Paceline, start_method: str) -> None:
    paceline.script("", "pkg/__init__.py")
    paceline.script(PROBE, "pkg/probe.py")
    expected = as_python(paceline, "-m", "pkg.probe", "--lr", "0.1")
    under = paceline.run("--start-method", start_method, "-m", "pkg.probe", "--lr", "0.1")
    assert json.loads(under.stdout) == expected


def test_package_with_main_runs_as_module(paceline: Paceline) -> None:
    paceline.script("", "pkg/__init__.py")
    paceline.script(PROBE, "pkg/__main__.py")
    expected = as_python(paceline, "-m", "pkg")
    assert json.loads(paceline.run("-m", "pkg").stdout) == expected


def test_link_to_a_script_puts_the_real_folder_on_the_path(paceline: Paceline) -> None:
    paceline.script(PROBE, "real/probe.py")
    (paceline.folder / "link.py").symlink_to("real/probe.py")
    assert json.loads(paceline.run("link.py").stdout) == as_python(paceline, "link.py")


@pytest.mark.parametrize(
    "options", [("-X", "dev", "-W", "error", "-u", "-s"), ("-O", "-E", "-X", "utf8=1")], ids=" ".join
)
def test_options_of_the_interpreter_reach_the_ranks(paceline: Paceline, options: tuple[str, ...]) -> None:
    paceline.script(PROBE)
    expected = as_python(paceline, *options, "script.py")
    under = paceline.run("script.py", python=(sys.executable, *options))
    assert json.loads(under.stdout) == expected, under.stderr


def as_python(paceline: Paceline, *args: str) -> object:
    done = subprocess.run(
        [sys.executable, *args], cwd=paceline.folder, env=paceline.env, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


ENDINGS = {
    "falls off the end": ("pass", 0),
    "exit code": ("import sys; sys.exit(7)", 7),
    "exit with text": ("import sys; sys.exit('enough')", 1),
    "exit with nothing": ("import sys; sys.exit()", 0),
    "exception": ("raise ValueError('no')", 1),
    "keyboard interrupt": ("raise KeyboardInterrupt", 130),
    "syntax error": ("def f(:", 1),
    "os._exit": ("import os; os._exit(9)", 9),
    "killed": ("import os; os.kill(os.getpid(), 9)", 137),
    "segmentation fault": ("import os; os.kill(os.getpid(), 11)", 139),
    "own excepthook": ("import sys; sys.excepthook = lambda *a: print('hooked', a[0].__name__); 1/0", 1),
    "atexit": ("import atexit; atexit.register(print, 'at exit'); print('first')", 0),
    "atexit after exception": ("import atexit; atexit.register(print, 'at exit'); 1/0", 1),
    "exception in a thread": ("import threading; t = threading.Thread(target=lambda: 1/0); t.start(); t.join()", 0),
    "thread that goes on": (
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('later'))).start()",
        0,
    ),
    "not utf-8": ("\\xff", 1),
}


@pytest.fixture(params=["fork", "exec"])
def start_method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("ending", ENDINGS)
def test_ends_as_under_python(paceline: Paceline, start_method: str, ending: str) -> None:
    code, exit_code = ENDINGS[ending]
    name = paceline.script(code + "\n")
    alone = subprocess.run(
        [sys.executable, name], cwd=paceline.folder, env=paceline.env, capture_output=True, text=True, check=False
    )
    under = paceline.run("--start-method", start_method, name)
    assert under.returncode == exit_code, under.stderr
    assert alone.returncode in (exit_code, 128 - exit_code - 256 + 128, -(exit_code - 128))
    assert under.stdout == alone.stdout
    log = paceline.job() / "logs" / "0"
    written = (log / "rank-0.err.log").read_text()
    assert written == alone.stderr


def test_processes_spawned_by_a_rank_find_its_functions(paceline: Paceline, start_method: str) -> None:
    paceline.script("""
        import multiprocessing as mp

        def double(x):
            return 2 * x

        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                with mp.get_context(method).Pool(2) as pool:
                    print(method, pool.map(double, [1, 2, 3]))
    """)
    under = paceline.run("--start-method", start_method, "script.py")
    assert under.stdout.splitlines() == [f"{m} [2, 4, 6]" for m in ("spawn", "fork", "forkserver")], under.stderr


@pytest.mark.torch
def test_each_rank_has_random_numbers_of_its_own(paceline: Paceline) -> None:
    paceline.script("""
        import numpy, random, torch
        print(random.random(), numpy.random.rand(), torch.rand(1).item())
    """)
    under = paceline.run("-n", "2", "--tee", "all", "--preload", "numpy.random", "--start-method", "fork", "script.py")
    numbers = {number for line in under.stdout.splitlines() for number in line.split()[-3:]}
    assert len(numbers) == 6, under.stdout


def test_thread_count_is_set_before_the_framework_is_imported(paceline: Paceline) -> None:
    paceline.script("import os\nSEEN = os.environ.get('OMP_NUM_THREADS'), os.environ.get('GREETING')\n", "framework.py")
    paceline.script("import framework\nprint(framework.SEEN)\n")
    under = paceline.run(
        "-n", "1", "--preload", "framework", "--env", "OMP_NUM_THREADS=3", "--env", "GREETING=hi", "script.py"
    )
    assert under.stdout == "('3', 'hi')\n"


def test_ranks_fork_from_one_import(paceline: Paceline) -> None:
    paceline.script("import os\nPID = os.getpid()\n", "framework.py")
    paceline.script("import framework, os\nprint(framework.PID != os.getpid(), framework.PID)\n")
    under = paceline.run("-n", "3", "--preload", "framework", "--tee", "all", "script.py")
    seen = {line.split("] ")[-1] for line in under.stdout.splitlines()}
    assert len(seen) == 1
    assert seen.pop().startswith("True")


def test_import_that_leaves_a_thread_is_not_forked(paceline: Paceline) -> None:
    paceline.script(
        "import os, threading\nPID = os.getpid()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
        "framework.py",
    )
    paceline.script("import framework, os\nprint(framework.PID == os.getpid())\n")
    under = paceline.run("--preload", "framework", "script.py")
    assert under.stdout == "True\n"


def test_folder_beside_the_script_does_not_shadow_paceline(paceline: Paceline) -> None:
    for name in ("json", "selectors", "signal", "spec", "channel", "socket"):
        paceline.script("raise RuntimeError('shadowed')", f"folder/{name}.py")
    paceline.script("print('fine')", "folder/script.py")
    assert paceline.run("folder/script.py").stdout == "fine\n"


@pytest.mark.torch
def test_a_group_that_a_model_holds_is_not_dropped(paceline: Paceline) -> None:
    """Its thread may need the interpreter's lock, with which torch waits for the thread: a rank would never end."""
    (paceline.folder / "later.py").write_text(
        textwrap.dedent("""
            class Last:
                def __del__(self):
                    import os
                    names = [open(f"/proc/self/task/{it}/comm").read().strip() for it in os.listdir("/proc/self/task")]
                    print("pt_gloo_runloop" in names, flush=True)
        """)
    )
    paceline.script("""
        import threading, torch, torch.distributed as dist
        import later

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
        dist.destroy_process_group()
        threading.later, later.last = later, later.Last()  # it is dropped after the modules that nothing holds
    """)
    assert paceline.succeeds("run", "script.py").stdout == "True\n"


@pytest.mark.torch
def test_loader_workers_and_collectives_of_torch(paceline: Paceline) -> None:
    paceline.script("""
        import torch, torch.distributed as dist
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, i):
                return torch.tensor(i * i)

        if __name__ == "__main__":
            dist.init_process_group("gloo")
            total = torch.zeros(1)
            for method in ("spawn", "fork"):
                loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context=method)
                total += sum(batch.sum() for batch in loader)
            dist.all_reduce(total)
            print(total.item())
            dist.destroy_process_group()
    """)
    under = paceline.run("-n", "2", "script.py")
    assert under.stdout == f"{2 * 2 * 140.0}\n", under.stderr


@pytest.mark.torch
@pytest.mark.parametrize(
    ("method", "ending", "exit_code", "last_words"),
    [
        pytest.param(
            method, ending, *rest, marks=[pytest.mark.nightly] if method == "exec" and "exit" in ending else []
        )
        for ending, *rest in (
            ("pass", 0, ""),
            ("sys.exit(7)", 7, ""),
            ("sys.exit('enough')", 1, "enough\n"),
            ("1/0", 1, None),
            ("threading.Thread(target=lambda: (time.sleep(0.2), print('thread', flush=True))).start()", 0, ""),
        )
        for method in ("fork", "exec")
    ],
)
def test_rank_with_torch_ends_in_good_order(
    paceline: Paceline, method: str, ending: str, exit_code: int, last_words: str | None
) -> None:
    paceline.script(f"""
        import atexit, gzip, sys, threading, time, torch

        class Thing:
            def __del__(self):
                print("dropped", flush=True)

        thing = Thing()
        thing.itself = thing
        plain, packed = open("plain", "w"), gzip.open("packed", "wt")
        plain.write("written")
        packed.write("written")
        atexit.register(print, "at exit")
        sys.stdout.write("no line end, ")
        {ending}
    """)
    done = paceline.run("--start-method", method, "script.py")
    assert done.returncode == exit_code, done.stderr
    thread = "thread\n" if "thread" in ending else ""
    assert done.stdout == f"no line end, {thread}at exit\ndropped\n"
    assert (paceline.folder / "plain").read_text() == "written"
    assert gzip.decompress((paceline.folder / "packed").read_bytes()) == b"written"
    if last_words is not None:
        assert (paceline.job() / "logs" / "0" / "rank-0.err.log").read_text() == last_words


@pytest.mark.parametrize("code", [0, -1])
def test_with_torch_a_script_ends_with_its_exit_code_also_if_it_has_wrapped_its_output(
    paceline: Paceline, code: int
) -> None:
    paceline.script("", "torch.py")  # Python does not end a process that has torch
    paceline.script(f"""
        import io, sys, torch
        sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="utf-8")
        print("é")
        sys.exit({code})
    """)
    done = paceline("run", "script.py")
    assert (done.stdout, done.returncode) == ("é\n", code & 0xFF), done.stderr
    assert not code or "exit code 255" in done.stderr
