"""A job that starts from a process that was kept warm is as one that starts cold, or starts cold and says why."""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import Paceline, all_end, eventually, takes_signals
from tests.journals import events

from paceline.backends.local import at_hand
from paceline.node.errors import Refused
from paceline.node.machine import devices
from paceline.node.ranks.seed import Child
from paceline.node.warm import folder, imports, leave, start

if TYPE_CHECKING:
    from collections.abc import Iterator

TELL = """
    import json, os, resource, signal, sys
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    print(json.dumps({
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "argv": sys.argv,
        "path": sys.path,
        "flags": repr(sys.flags),
        "status": {name: status[name] for name in ("Umask", "SigBlk", "SigIgn", "SigCgt", "CapEff", "Threads")},
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
        "cgroup": open("/proc/self/cgroup").read(),
        "open": sorted(os.readlink(f"/proc/self/fd/{fd}").partition("[")[0] for fd in os.listdir("/proc/self/fd")
                       if os.path.exists(f"/proc/self/fd/{fd}")),
        "leads its session": os.getsid(0) == os.getpid(),
        "title": open("/proc/self/cmdline").read().rstrip("\\0"),
        "shown": [it for it in open("/proc/self/environ").read().split("\\0\\0")[0].split("\\0") if "MARK" in it],
        "handlers": [str(signal.getsignal(number)) for number in (1, 2, 13, 15, 17)],
        "stdin": os.readlink("/proc/self/fd/0"),
        "sum": sum(map(ord, sys.stdout.encoding + str(sys.stdout.line_buffering) + str(sys.stdin.encoding))),
    }))
"""


class Warm:
    """paceline with a folder of warm servers of its own."""

    def __init__(self, paceline: Paceline) -> None:
        self.paceline = paceline
        self.folder = paceline.folder / "warm"
        paceline.env["PACELINE_WARM_DIR"] = str(self.folder)

    def keep(self, *modules: str, seconds: float = 600.0, **variables: str) -> int:
        """Start a server for jobs in this environment; returns its pid."""
        env = {**self.paceline.env, **variables}
        said = leave.start_server((sys.executable,), modules, env, str(self.paceline.folder), seconds, wait=True)
        return int(said["pid"])

    def events(self) -> list[dict[str, Any]]:
        """How the newest job has started."""
        return [event for event in events(self.paceline.newest_job()) if event["event"] in ("warm", "cold")]

    def pids(self) -> list[int]:
        """The servers that live."""
        return [answer["pid"] for answer in start.ask("describe")]


@pytest.fixture
def warm(paceline: Paceline, monkeypatch: pytest.MonkeyPatch) -> Iterator[Warm]:
    """No server yet; at the end those that there are are ended."""
    it = Warm(paceline)
    monkeypatch.setenv("PACELINE_WARM_DIR", str(it.folder))
    yield it
    pids = {answer["pid"] for answer in start.ask("stop")}
    all_end(lambda: [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and _lives(pid)], "the warm servers")


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def test_a_rank_is_the_same_cold_and_warm(warm: Warm) -> None:
    """Variables, folder, paths, flags, umask, signals, limits, niceness, cores, cgroup, files: all are the job's."""
    paceline = warm.paceline
    paceline.script(TELL)
    paceline.env["MARK"] = "of the job"

    def told(**kwargs: object) -> dict[str, Any]:
        done = paceline.succeeds("run", "script.py", "an argument", **kwargs)
        found: dict[str, Any] = json.loads(done.stdout)
        for name in list(found["env"]):
            if name in (
                "PACELINE_JOB",
                "PACELINE_JOB_ID",
                "PACELINE_RUN_DIR",
                "MASTER_PORT",
                "PACELINE_MAIN_PORT",
                "PACELINE_RANK_KEY",
            ):
                del found["env"][name]
        job = paceline.newest_job().name
        return json.loads(json.dumps(found).replace(job, "JOB"))  # type: ignore[no-any-return]

    cold = told()
    warm.keep()
    assert not warm.events()
    again = told()
    assert {k: v for k, v in again["env"].items() if cold["env"].get(k) != v} == {}
    assert again == cold
    assert [event["event"] for event in warm.events()] == ["warm"]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.umask(0o027), os.sched_getaffinity(0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        os.sched_setaffinity(0, {min(before[1])})
        other = told(cwd=paceline.folder, env={**paceline.env, "MARK": "of another job", "NICER": "yes"})
        assert [event["event"] for event in warm.events()] == ["warm"]
    finally:
        os.umask(before[0])
        os.sched_setaffinity(0, before[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert other["status"]["Umask"].strip() == "0027"
    assert other["limits"]["RLIMIT_NOFILE"] == [soft - 1, hard]
    assert other["cores"] == [min(before[1])]
    assert other["env"]["NICER"] == "yes"
    assert other["shown"] == ["MARK=of another job"]


def test_ends_of_a_job_reach_its_client(warm: Warm) -> None:
    """Exit codes, tracebacks and Ctrl-C are as without a server, and a job outlives the server."""
    paceline = warm.paceline
    server = warm.keep()
    paceline.script("raise SystemExit(7)")
    assert paceline.run("script.py").returncode == 7
    paceline.script("raise ValueError('no such thing')")
    done = paceline.run("-n", "2", "script.py")
    assert done.returncode == 1
    assert "ValueError: no such thing" in done.stderr
    paceline.script("import signal; signal.pause()")
    process = paceline.start("run", "script.py")
    takes_signals(process)
    os.kill(server, signal.SIGKILL)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert [event["event"] for event in warm.events()] == ["warm"]


def test_a_killed_client_ends_its_job(warm: Warm) -> None:
    """The lifeline goes through the server."""
    paceline = warm.paceline
    warm.keep()
    paceline.script("import signal; signal.pause()")
    process = paceline.start("run", "script.py")
    takes_signals(process)
    process.kill()
    process.communicate()
    all_end(paceline.processes, "the job")


def test_killed_agent_and_guard(warm: Warm) -> None:
    """Whoever is killed, the kernel ends the ranks, and the client says what has happened."""
    paceline = warm.paceline
    warm.keep()
    paceline.script("import signal; print('runs', flush=True); signal.pause()")
    process = paceline.start("run", "script.py")
    takes_signals(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    status = json.loads((paceline.job() / "status.json").read_text())
    os.kill(status["agent"]["pid"], signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 137
    assert "ended without a report (SIGKILL)" in err
    all_end(paceline.processes, "the job")
    assert len(warm.pids()) == 1


def test_what_differs_starts_cold_and_is_named(warm: Warm) -> None:
    """A variable that the interpreter reads, and a module that the job would not import."""
    paceline = warm.paceline
    paceline.env["OMP_NUM_THREADS"] = "1"
    warm.keep("statistics")
    paceline.script("print('ran')")

    def reason(*flags: str, **variables: str) -> str:
        done = paceline.run("-v", *flags, "script.py", env={**paceline.env, **variables})
        assert done.stdout == "ran\n"
        (event,) = warm.events()
        if event["event"] == "cold":
            assert f"paceline: started cold: {event['why']}" in done.stderr
        return str(event.get("why", ""))

    assert "PYTHONHASHSEED is '1', and was not set" in reason("--preload", "statistics", PYTHONHASHSEED="1")
    assert "the warm process has imported statistics, which the job does not" in reason()
    assert not reason("--preload", "statistics")


def test_one_process_serves_any_number_of_ranks(warm: Warm) -> None:
    """Whatever number its import has read: torch, in all threads, and numpy use that of the job."""
    pytest.importorskip("torch")
    paceline = warm.paceline
    paceline.succeeds("warm")
    paceline.script("""
        import os, threading
        import numpy, torch
        begun, counts = len(os.listdir("/proc/self/task")), [torch.get_num_threads()]
        other = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        other.start()
        other.join()
        for ones in torch.ones(400, 400), numpy.ones((400, 400)):
            ones @ ones
        print(os.environ["OMP_NUM_THREADS"], *counts, len(os.listdir("/proc/self/task")) - begun)
    """)
    several = str(2 * devices.cores())
    assert paceline.succeeds("run", "-n", several, "script.py").stdout == "1 1 1 0\n"
    assert [event["event"] for event in warm.events()] == ["warm"]
    paceline.succeeds("run", "script.py")
    assert [event["event"] for event in warm.events()] == ["warm"]
    done = paceline.succeeds("run", "script.py", env={**paceline.env, "OMP_NUM_THREADS": "999"})
    assert "paceline: started cold: OMP_NUM_THREADS is '999', and was" in done.stderr
    assert "such a process is already kept warm" in paceline("warm", "-n", several).stderr


@pytest.mark.parametrize(
    ("modules", "variables", "serves"),
    [
        (["torch"], {}, True),
        (["torch", "torch.distributed", "numpy.linalg"], {}, True),
        (["torch", "sklearn"], {}, False),  # which has an OpenMP of its own
        (["jax"], {}, False),
        (["torch"], {"MKL_NUM_THREADS": "2"}, False),
    ],
)
def test_whose_threads_are_known(modules: list[str], variables: dict[str, str], serves: bool) -> None:
    assert imports.serves_fewer_threads(modules, variables) is serves


def test_a_progress_bar_is_as_wide_as_the_terminal(warm: Warm) -> None:
    pytest.importorskip("tqdm")
    warm.paceline.env["OMP_NUM_THREADS"] = "1"
    warm.keep("tqdm")
    warm.paceline.script("import tqdm\nfor _ in tqdm.tqdm(range(2), ascii=True): pass")
    _, seen = warm.paceline.on_terminal("run", "--preload", "tqdm", "script.py")
    assert [event["event"] for event in warm.events()] == ["warm"]
    assert max(len(line) for line in seen.decode().splitlines() if "2/2" in line) == 80, seen


@pytest.mark.parametrize("change", ["touched", "replaced"])
def test_a_changed_file_ends_a_server(warm: Warm, change: str) -> None:
    """An upgraded package is imported anew."""
    paceline = warm.paceline
    module = paceline.folder / "packages" / "upgraded.py"
    module.parent.mkdir()
    module.write_text("VALUE = 1\n")
    server = warm.keep("upgraded", PYTHONPATH=str(module.parent))
    if change == "touched":
        os.utime(module, (1, 1))
    else:
        module.with_suffix(".new").write_text("VALUE = 2\n")
        module.with_suffix(".new").rename(module)
    paceline.script("print('ran')")
    assert paceline.run("script.py", env={**paceline.env, "PYTHONPATH": str(module.parent)}).stdout == "ran\n"
    for event in warm.events():  # there is none if the server has ended by itself before
        assert event["event"] == "cold"
        assert "upgraded.py has changed since it was imported" in event["why"]
    eventually(lambda: not _lives(server), "the server ends")


def test_a_package_that_is_installed_later_is_seen(warm: Warm) -> None:
    """An editable one is a file that the interpreter reads when it begins."""
    paceline = warm.paceline
    packages = paceline.folder / "user/lib/python{}.{}/site-packages".format(*sys.version_info)
    packages.mkdir(parents=True)
    paceline.env.update(PYTHONUSERBASE=str(paceline.folder / "user"), OMP_NUM_THREADS="1")
    paceline.env.pop("PYTHONNOUSERSITE", None)
    server = warm.keep()
    source = paceline.folder / "source"
    source.mkdir()
    (source / "editable.py").write_text("")
    (packages / "editable.pth").write_text(f"{source}\n")
    paceline.script("import sys; print(sys.path)")
    paceline.succeeds("run", "script.py")
    for event in warm.events():  # there is none if the server has ended by itself before
        assert event["event"] == "cold"
        assert "site-packages has changed since it was imported" in event["why"]
    eventually(lambda: not _lives(server), "the server ends")


def test_processes_belong_to_the_folder_of_jobs_that_they_were_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_WARM_DIR", raising=False)
    monkeypatch.setenv("PACELINE_HOME", "/one")
    assert folder.folder() == folder.folder("/one/.") != folder.folder("/other")
    monkeypatch.delenv("PACELINE_HOME")
    assert folder.folder() not in (folder.folder("/one"), folder.folder("/other"))


def test_a_new_module_before_an_imported_one(warm: Warm) -> None:
    """A folder of PYTHONPATH gets a module that would be imported first."""
    paceline = warm.paceline
    first, second = (paceline.folder / name for name in ("first", "second"))
    for path in (first, second):
        path.mkdir()
    (second / "of_both.py").write_text("")
    paceline.env.update(PYTHONPATH=f"{first}:{second}", OMP_NUM_THREADS="1")
    warm.keep("of_both")
    paceline.script("import of_both; print(of_both.__file__)")
    assert paceline.run("--preload", "of_both", "script.py").stdout == f"{second}/of_both.py\n"
    assert [event["event"] for event in warm.events()] == ["warm"]
    (first / "of_both.py").write_text("")
    assert paceline.run("--preload", "of_both", "script.py").stdout == f"{first}/of_both.py\n"
    (event,) = warm.events()
    assert f"{first} holds of_both.py" in event["why"]


def test_a_server_that_does_not_answer(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended server starts nothing, then or later, and holds no job."""
    server = warm.keep()
    os.kill(server, signal.SIGSTOP)
    try:
        with monkeypatch.context() as impatient:
            impatient.setattr(start, "_ANSWER_SECONDS", 0.2)
            agent, why = start.start_agent("/nowhere", {}, [], ())
    finally:
        os.kill(server, signal.SIGCONT)
    assert agent is None
    assert why == "the warm process does not answer"
    assert warm.pids() == [server]


def test_a_folder_of_others_is_not_used(warm: Warm) -> None:
    """Somebody else may have made it, and would get the job's variables."""
    warm.folder.mkdir(mode=0o755)
    with pytest.raises(Refused, match="does not belong to you alone"):
        warm.keep()
    agent, why = start.start_agent("/nowhere", {}, [], ())
    assert agent is None and "does not belong to you alone" in why
    assert start.ask("describe") == []


def test_a_job_leaves_a_server_for_the_next_one(warm: Warm) -> None:
    """`keep_warm` in the settings; the secrets of the job do not stay with the server, and there is only one."""
    paceline = warm.paceline
    paceline.folder.joinpath("paceline.toml").write_text('[defaults]\nkeep_warm = "10m"\n')
    paceline.script("print('ran')")
    paceline.script("print('ran')", "below/script.py")
    env = {**paceline.env, "KEY_OF_THE_JOB": "a secret value", "OF_THIS_JOB": "not a secret value"}
    done = paceline.run("-v", "--secret", "KEY_OF_THE_JOB", "script.py", env=env)
    assert "started cold: no process is kept warm" in done.stderr
    eventually(warm.pids, "a server is left")
    (server,) = warm.pids()
    eventually(lambda: b"secret value" not in Path(f"/proc/{server}/environ").read_bytes(), "it has forgotten the job")
    done = paceline.run("-v", "script.py", env={**paceline.env, "ANOTHER": "of the job"}, cwd=paceline.folder / "below")
    assert "started from a process that was kept warm" in done.stderr
    submitted = paceline("submit", "-v", "script.py")
    assert "started from a process that was kept warm" in submitted.stderr
    assert paceline("wait", submitted.stdout.strip()).returncode == 0
    assert warm.pids() == [server]
    with pytest.raises(Refused, match="such a process is already kept warm"):
        warm.keep(IRRELEVANT="to what it imports")


def test_a_server_ends_when_it_is_not_used(warm: Warm) -> None:
    """Its files go too."""
    server = warm.keep(seconds=0.1)
    eventually(lambda: not _lives(server), "the server ends")
    assert list(warm.folder.iterdir()) == []


def test_the_verb(warm: Warm) -> None:
    """`paceline warm` starts, shows and ends; of one kind there is one."""
    paceline = warm.paceline
    assert paceline("warm", "--list", "-o", "json").stdout == "[]\n"
    preload = ("--preload", "statistics", "--framework")
    assert "take one of jax, paddle, tensorflow, torch" in paceline("warm", *preload, "indexed").stderr
    done = paceline("warm", "--framework", "torch", "--preload", "no_such_module")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--preload: no_such_module is not installed" in done.stderr
    assert "--list and --for contradict each other" in paceline("warm", "--list", "--for", "1h").stderr
    assert "'10' has no unit; did you mean 10m?" in paceline("warm", "--for", "10").stderr
    server = warm.keep()
    (listed,) = paceline.json("warm", "--list")
    assert (listed["pid"], listed["jobs"], listed["preload"]) == (server, 0, [])
    with pytest.raises(Refused, match="such a process is already kept warm"):
        warm.keep()
    assert paceline("warm", "--stop").stdout == f"process {server} on local has ended\n"
    assert paceline("warm", "--stop").stdout == "none was kept warm\n"


def test_a_module_that_cannot_be_kept(warm: Warm) -> None:
    """Threads do not survive a fork."""
    module = warm.paceline.folder / "threads.py"
    module.write_text("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    with pytest.raises(Refused, match="the imports left 1 threads running"):
        warm.keep("threads", PYTHONPATH=str(module.parent))
    with pytest.raises(Refused, match="importing no_such_module failed"):
        warm.keep("no_such_module")


def test_an_import_that_asks_for_gpus_cannot_be_kept(warm: Warm) -> None:
    """torch starts the driver then, but not what `torch.cuda.is_initialized` tells; only a fork knows."""
    package = warm.paceline.folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("from . import cuda\n")
    (package / "cuda.py").write_text("""if True:
        import os
        pid, is_initialized = os.getpid(), lambda: False
        _is_in_bad_fork = lambda: os.getpid() != pid
    """)
    with pytest.raises(Refused, match=r"an import initialised CUDA, as torch\.cuda\.is_available\(\) does"):
        warm.keep("torch", PYTHONPATH=str(package.parent))


def _imported(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...] = ()
) -> imports.Imported:
    tmp_path.joinpath("of_this_test.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "of_this_test", raising=False)
    return imports.Imported(["of_this_test"], before)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"READ": "2"}, "READ"),
        ({"READ": None}, "READ"),
        ({"LD_PRELOAD": "x.so"}, "LD_PRELOAD"),
        ({"OMP_NUM_THREADS": "7"}, "OMP_NUM_THREADS"),
        ({"UNSEEN": "1"}, ""),
        ({"ABSENT": "1"}, "ABSENT"),
        ({"PACELINE_HOME": "/elsewhere"}, ""),
    ],
)
def test_variables_that_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str | None], named: str
) -> None:
    """Those that a module reads one by one, and those that C libraries read; a loop over all does not count."""
    monkeypatch.setenv("READ", "1")
    monkeypatch.delenv("PACELINE_HOME", raising=False)
    text = "import os\nos.environ.get('ABSENT'); os.environ['READ']; dict(os.environ); list(os.environ.items())\n"
    found = _imported(tmp_path, text, monkeypatch)
    env = {**os.environ, **change}
    assert found.other_variable({k: v for k, v in env.items() if v is not None}).partition(" ")[0] == named
    assert type(os.environ).__name__ == "_Environ"


def test_variables_that_an_import_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are set for a job as well."""
    monkeypatch.setenv("GOES", "1")
    monkeypatch.setenv("COMES", "")
    monkeypatch.delenv("COMES")
    found = _imported(tmp_path, "import os\nos.environ['COMES'] = 'new'\ndel os.environ['GOES']\n", monkeypatch)
    assert found.changes == {"of_this_test": {"COMES": "new", "GOES": None}}


@pytest.mark.parametrize(
    ("name", "is_shadow"),
    [("of_this_test.py", True), ("of_this_test", False), ("other.py", False), ("of_this_test.txt", False)],
)
def test_modules_of_the_scripts_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_shadow: bool
) -> None:
    """One that would be imported instead of what the server has imported."""
    (tmp_path / "packages").mkdir()
    found = _imported(tmp_path / "packages", "", monkeypatch)
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    if "." in name:
        (scripts / name).write_text("")
    else:
        (scripts / name).mkdir()  # without __init__.py, a package elsewhere comes first
    assert found.shadowed(str(scripts)) == (name if is_shadow else "")


def test_one_lock(tmp_path: Path) -> None:
    """The next one gets it when its holder is gone, also if that has removed its files."""
    held = folder.locked(tmp_path, "key")
    assert held is not None
    assert folder.locked(tmp_path, "key") is None
    folder.remove(tmp_path, "key")
    other = folder.locked(tmp_path, "key")
    assert other is not None
    os.close(held)
    os.close(other)


def test_the_socket_of_a_server_that_begins_is_not_removed(tmp_path: Path) -> None:
    """It refuses connections until it listens, as that of a killed server does."""
    held = folder.locked(tmp_path, "key")
    assert held is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(tmp_path / "key.sock"))
        assert folder.connect(tmp_path, "key", 60) is None
        assert folder.keys(tmp_path) == ["key"]
    os.close(held)
    assert folder.connect(tmp_path, "key", 60) is None
    assert folder.keys(tmp_path) == [], "it is gone"
    free = folder.locked(tmp_path, "key")
    assert free is not None
    os.close(free)


def test_processes_with_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the agent has that coordinates a job of many nodes."""
    open_pid, limits = os.pidfd_open, resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with socket.socket(fileno=_high(ours.detach())) as connection, theirs:
            agent = start.WarmAgent(0, connection)
            assert agent.poll() is None
            theirs.close()
            assert agent.poll() == -signal.SIGKILL
        monkeypatch.setattr(os, "pidfd_open", lambda pid: _high(open_pid(pid)))
        child = Child(os.posix_spawnp("sleep", ["sleep", "60"], os.environ))
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.01)
        child.kill()
        assert child.wait() == -signal.SIGKILL
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_python_without_pidfd_open_waits_for_a_process_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    child = Child(os.posix_spawnp("sleep", ["sleep", "60"], os.environ))
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.kill()
    assert child.wait() == -signal.SIGKILL


def _high(descriptor: int) -> int:
    """The same file with a number that `select` does not know."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 1024)
    os.close(descriptor)
    return moved


# A container is nobody's own machine, and tests may run in one.
AT_HAND = """
    import pathlib, sys
    import paceline.backends.local.at_hand as at_hand
    at_hand.ROOT, at_hand._FREE = pathlib.Path("none"), 0
    del sys.argv[1:3]
    from paceline.__main__ import main
    main()
"""


def test_what_a_typed_run_leaves_is_said_once(warm: Warm) -> None:
    paceline = warm.paceline
    paceline.cold = True
    paceline.env = {name: value for name, value in paceline.env.items() if name not in at_hand._ELSEWHERE}
    paceline.script("print('trained')")
    python = (sys.executable, paceline.script(AT_HAND, "at_hand.py"))

    def typed(*flags: str, typed: bool = True) -> str:
        code, seen = paceline.on_terminal("run", *flags, "--preload", "tqdm", "script.py", python=python, typed=typed)
        assert code == 0, seen
        return seen.decode()

    assert "stays" not in typed(typed=False) + typed("--keep-warm", "off")
    paceline.folder.joinpath("paceline.toml").write_text('[defaults]\nkeep_warm = "off"\n')
    assert "stays" not in typed()
    paceline.folder.joinpath("paceline.toml").unlink()
    assert not warm.pids()
    assert "after this run, a process stays for 10 minutes" in typed()
    eventually(warm.pids, "the run has left a process")
    [pid] = warm.pids()
    again = typed()
    assert re.search(r"a process that stayed after an earlier run takes [0-9.]+ [KM]iB of memory, and starts th", again)
    assert [event["event"] for event in warm.events()] == ["warm"]
    assert "stay" not in typed()
    assert warm.pids() == [pid]


@pytest.mark.parametrize("what", ["a pipe", "a scheduler", "a container", "no memory"])
def test_nothing_stays_where_nobody_has_typed_or_others_need_the_memory(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(ours), os.fdopen(theirs, "rb", 0) as terminal, open(os.devnull) as nothing:
        monkeypatch.setattr(at_hand, "_FREE", 0)
        for stream in ("stdin", "stderr"):
            monkeypatch.setattr(sys, stream, terminal)
        assert at_hand.is_at_hand({}, tmp_path)
        if what == "a pipe":
            monkeypatch.setattr(sys, "stdin", nothing)
        elif what == "a container":
            tmp_path.joinpath(".dockerenv").touch()
        elif what == "no memory":
            monkeypatch.setattr(at_hand, "_FREE", 1 << 60)
        env = {"SLURM_JOB_ID": "4"} if what == "a scheduler" else {}
        assert not at_hand.is_at_hand(env, tmp_path)
        monkeypatch.undo()
