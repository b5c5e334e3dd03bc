"""What the verbs do with a job, whatever backend it is on: every backend passes these tests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.conftest import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.conftest import Paceline

USUAL = frozenset(
    {"run", "checks", "functions", "metered", "volumes", "watched", "profiled", "setup", "suspends"}
)  # of `Place.can`
FOREVER = """
    import threading
    print("here", flush=True)
    threading.Event().wait()
"""
SECRETIVE = """
    import hashlib, os, threading
    print(hashlib.sha256(os.environ["SECRET"].encode()).hexdigest(), flush=True)
    threading.Event().wait()
"""
ASKED = """
    import os, signal
    signal.signal(signal.SIGUSR1, lambda number, _: (os.write(1, b"got %d\\n" % number), os._exit(0)))
    print("here", flush=True)
    while True:
        signal.pause()
"""
COUNT = """
    import os
    for number in range(3):
        print("line", number, "of", os.environ["RANK"], flush=True)
"""
MEET = """
    import os, socket, sys, threading, time
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt, where = os.environ["PACELINE_ATTEMPT"], (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(("", where[1])) as server:
            others = [server.accept()[0] for _ in range(1, world)]
        total = sum(other.recv(1)[0] for other in others)
        for other in others:
            other.sendall(bytes([total]))
    else:
        while True:
            try:
                other = socket.create_connection(where)
                break
            except OSError:
                time.sleep(0.05)
        other.sendall(bytes([rank]))
        total = other.recv(1)[0]
    print("sum", total, "of", world, "in", attempt, flush=True)
    if rank == 0:
        all(other.recv(1) for other in others)  # they have printed
        sys.exit(9 if attempt == "0" else 0)
    other.sendall(b"!")
    while attempt == "0":
        threading.Event().wait()
"""
SAVES = """
    import signal, threading, time
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    print("here", flush=True)
    asked.wait()
    time.sleep(1)  # a second signal would end it meanwhile
    print("saved", flush=True)
"""
STUBBORN = """
    import os, signal
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os.write(1, b"asked\\n"))
    print("here", flush=True)
    while True:
        signal.pause()
"""
FUNCTION = """
    import sys
    from paceline import jobs

    class Steep(Exception):
        pass

    def climb(height, by=1):
        import os
        rank = int(os.environ["RANK"])
        if height < 0 and rank == 1:
            raise Steep("too steep")
        print("at", height, flush=True)
        return rank, height * by, base

    on, base = sys.argv[1], 7
    job = jobs.submit(climb, (2,), {"by": 10}, nproc=2, on=on)
    assert job.results() == [(0, 20, 7), (1, 20, 7)] and job.state == "SUCCEEDED"
    assert b"".join(it.text for it in jobs.logs(job.name)).split() == [b"at", b"2"], "results are no lines for people"
    assert jobs.get(job.name).result() == (0, 20, 7), "the job is found where it was submitted to"
    bad = jobs.submit(climb, (-1,), nproc=2, on=on)
    try:
        bad.result()
    except Steep as error:
        assert str(error) == "too steep" and "in climb" in str(error.__cause__)
        print(job.name.rpartition("-")[0], jobs.get(bad.name).state)
    for job in jobs.list_jobs(on):
        jobs.delete(job.name)
"""


def _job_and_ranks(shown: str) -> tuple[str, int]:
    """The name and the ranks of a dry run in JSON."""
    found = json.loads(shown)
    return found["job"]["name"], len(found["ranks"])


def _reported(page: str) -> Any:
    """The view of the first job in a report."""
    found = re.search('<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])["jobs"][0]


def _commit(folder: Path, script: str) -> str:
    """Make a repository of a script; returns its commit."""
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder))
    for command in (("init", "-q"), ("add", script), ("commit", "-qm", "first")):
        subprocess.run([*git, *command], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True)
class Place:
    """A backend, and what it can do beside what all can.

    Attributes:
        can: of `run`, `elastic`, `checks`, `functions`, `metered`, `tensorboards`, `volumes`, `watched`,
            `profiled`, `setup` and `suspends`; `sizes` if it says what a job has, `held` if what runs ends soon after
            its client.
        folders: where it keeps files, beside the folder of the client.
        takes: flags that only some backends take.
        keeps_shells: whether a shell can be opened where a rank ran that has ended.
        dry: what a dry run says: the job's name, and how many ranks it has.
        nodes: how many nodes a job of several ranks is given.
    """

    paceline: Paceline
    where: tuple[str, ...] = ()
    name: str = "local"
    can: frozenset[str] = field(default_factory=frozenset)
    folders: tuple[Path, ...] = ()
    takes: frozenset[str] = field(default_factory=frozenset)
    keeps_shells: bool = True
    dry: Callable[[str], tuple[str, int]] = _job_and_ranks
    nodes: int = 1

    def ranks(self, count: int) -> tuple[str, ...]:
        """The flags of a job with so many ranks, which are on all of its nodes."""
        nodes = ("--nnodes", str(self.nodes)) if self.nodes > 1 else ()
        return (*nodes, "-n", str(count // self.nodes))

    def __call__(self, verb: str, *args: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        """Run a verb there."""
        *group, last = verb.split()
        return self.paceline(*group, last, *self.where, *args, **kwargs)

    def works(self, verb: str, *args: str, **kwargs: Any) -> str:
        """Run a verb there that works; returns what it prints."""
        done = self(verb, *args, **kwargs)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
        return done.stdout

    def refuses(self, verb: str, *args: str, **kwargs: Any) -> str:
        """Run a verb there that cannot work; returns the line that says why."""
        done = self(verb, *args, **kwargs)
        lines = [line for line in done.stderr.splitlines() if not line.endswith("…")]  # what it does, if that is long
        assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), done.stderr
        assert lines[0].startswith("paceline: ")
        return lines[0].removeprefix("paceline: ")

    def json(self, verb: str, *args: str) -> Any:
        """What a verb prints with -o json."""
        return json.loads(self.works(verb, *args, "-o", "json"))

    def typed(self, words: str) -> subprocess.CompletedProcess[str]:
        """Type what a hint says."""
        program, *args = shlex.split(words)
        assert program == "paceline"
        return self.paceline(*args)


def files_with(text: str, folders: Iterable[Path]) -> list[Path]:
    """The files below some folders that have a text in them, or in their name."""
    found = []
    for path in (path for folder in folders for path in folder.rglob("*")):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            if text in path.name or (path.is_file() and text.encode() in path.read_bytes()):
                found.append(path)
    return found


@contextlib.contextmanager
def command_lines() -> Iterator[set[str]]:
    """The command lines of all processes of the machine that there are meanwhile, also of those that end soon."""
    found: set[str] = set()
    looks: dict[str, int] = {}  # at each process, which has another command line once it has executed a program
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(0.01):
            for pid in filter(str.isdigit, os.listdir("/proc")):
                looks[pid] = looks.get(pid, 0) + 1
                if looks[pid] < 50:
                    with contextlib.suppress(OSError):
                        found.add(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


class Contract:
    """The tests. A subclass has a fixture `place`."""

    def test_from_submit_to_delete(self, place: Place) -> None:
        script = place.paceline.script(COUNT)
        done = place("submit", "-n", "2", "--label", "team=vision", "--name", "it-", script)
        assert (done.returncode, done.stdout) == (0, "it-1\n"), done.stderr
        follow, see, stop = re.findall(r"paceline (?:logs|get|stop)[^;\n]*", done.stderr)
        followed = place.typed(follow)
        assert (followed.returncode, len(followed.stdout.splitlines())) == (0, 3), followed.stderr
        assert place.works("wait", "it-1") == ""
        assert place.typed(see).returncode == 0
        assert "had ended already" in place.typed(stop).stderr

        (job,) = place.json("list")
        alone = place.json("get", "it-1")
        assert alone == {**job, "facts": alone["facts"]}
        assert alone["facts"]["diagnosis"] is None
        assert (job["name"], job["state"], job["exit_code"], job["ranks"]) == ("it-1", "SUCCEEDED", 0, 2)
        assert (job["backend"], job["labels"]) == (place.name, {"team": "vision"})
        assert job["user"] or not place.can, "who submitted it"
        assert [rank["name"] for rank in job["instances"]] == ["it-1-master-0", "it-1-worker-0"]
        assert yaml.safe_load(place.works("list", "-o", "yaml")) == [job]
        assert yaml.safe_load(place.works("get", "it-1", "-o", "yaml")) == alone
        heading, row = place.works("list").splitlines()
        assert (heading.split()[:2], row.split()[:2]) == (["NAME", "STATE"], ["it-1", "SUCCEEDED"])
        heading, row = place.works("list", "-o", "wide").splitlines()
        assert "LABELS" in heading.split() and "team=vision" in row.split()
        assert place.json("list", "--label", "team=speech") == []
        shown = place.works("get", "it-1")
        for text in ("it-1", "SUCCEEDED (exit code 0)", job["external_id"], job["url"]):
            assert text in shown
        assert ("url" in shown) == bool(job["url"])

        assert place.works("logs", "it-1") == "line 0 of 0\nline 1 of 0\nline 2 of 0\n"
        assert place.works("logs", "it-1", "--tail", "1", "-i", "worker-0") == "line 2 of 1\n"
        assert len(place.works("logs", "it-1", "--all").splitlines()) == 6
        assert place.works("logs", "it-1", "-f") == "line 0 of 0\nline 1 of 0\nline 2 of 0\n"
        events = place.json("events", "it-1")
        now_and_then = {"warm", "importing", "imported"}  # the latter two where an import takes longer than a second
        happened = [event["event"] for event in events if event["event"] not in now_and_then]
        assert happened == ["submitted", "started", "finished"], events
        assert place.works("events", "it-1").split()[0] == "TIME"
        view = _reported(place.works("report", "it-1", "-o", "-"))
        assert view["job"] == job
        assert {"rank": 1, "lines": ["line 0 of 1", "line 1 of 1", "line 2 of 1"]} in view["logs"]
        assert view["use"] or view["missing"], "what is missing is said"
        if place.keeps_shells:
            assert place.works("attach", "it-1", "-i", "1", "--", "sh", "-c", "echo $RANK") == "1\n"
        else:
            assert "does not run" in place.refuses("attach", "it-1", "-i", "1")

        (would_go,) = place.json("prune", "-s", "0s", "--dry-run")
        assert (would_go["name"], would_go["state"], would_go["finished"]) == ("it-1", "SUCCEEDED", job["finished"])
        assert ((would_go["size"] or 0) > 0, would_go["checkpoints"]) == (
            (True, 0) if "sizes" in place.can else (False, None)
        )
        assert "it-1" in place.works("prune", "-s", "0s", "--dry-run")
        assert place.works("delete", "it-1") == ""
        assert place.json("list") == []
        assert place.refuses("get", "it-1").startswith(
            "no job 'it-1'; there is none yet; start one with paceline submit"
        )

    def test_setup_commands_run_once_on_a_node_before_its_ranks(self, place: Place) -> None:
        script = place.paceline.script("import os; print(os.environ['A'], flush=True)")
        submit = ("submit", *place.ranks(2), "--setup", 'echo "setup"; export A=1', "--setup", "A=$A-2; cd /")
        if "setup" not in place.can:
            assert place.refuses(*submit, script).startswith("--setup: ")
            return
        place.works(*submit, "--name", "set", script)
        assert place.works("wait", "set") == ""
        assert place.works("logs", "set", "--all").split().count("1-2") == 2
        place.works("submit", "--name", "bad", "--setup", "true", "--setup", "false || (exit 3)", script)
        assert place("wait", "bad").returncode == 1
        job = place.json("get", "bad")
        assert re.search(r"setup failed on \S+ with exit code 3: \( ?exit 3 ?\)$", job["error"]), job["error"]
        place.works("delete", "set", "bad")

    def test_a_job_that_runs_is_stopped(self, place: Place) -> None:
        script = place.paceline.script(FOREVER)
        commit = _commit(place.paceline.folder, script)
        place.works("submit", "--name", "long", "--sync-mode", "snapshot", script)
        follower = place.paceline.start("logs", *place.where, "-f", "long")
        assert follower.stdout is not None
        assert follower.stdout.readline() == "here\n"
        assert place("wait", "long", "--timeout", "1s").returncode == 124
        assert place.works("attach", "long", "--", "sh", "-c", "echo $RANK") == "0\n"
        if "watched" in place.can:
            told = place.works("why", "long", "--live")
            assert "in 2 s: 0 of 1 ranks busy, 0 entered a collective" in told
            assert "threading.py" in told
            views: list[Any] = []

            def is_recorded() -> Any:
                views[:] = [_reported(place.works("report", "long", "-o", "-"))]
                return views[0]["use"] and views[0]["origin"]

            eventually(is_recorded, "what it uses and runs with is known", 0.5)
            (view,) = views
            assert (view["use"]["ranks"]["rank"], view["origin"]["commit"]) == ([0], commit)
            assert "use in the last" in place.works("why", "long")
        else:
            assert "its ranks cannot be asked" in place.refuses("why", "long", "--live")
        if "profiled" in place.can:
            assert "rank 0: it has not imported torch, " in place.refuses("profile", "long")
        else:
            assert "cannot be profiled there" in place.refuses("profile", "long")
        hint = re.search(r"paceline stop[^,]*", place.refuses("delete", "long"))
        assert hint is not None
        again = place.refuses("resubmit", "long")
        assert again.endswith(f"stop it first: {hint[0]}")
        stopped = place.typed(hint[0])
        assert stopped.returncode == 0, stopped.stderr
        assert "job long stopped" in stopped.stderr
        assert follower.wait() != 0
        follower.communicate()
        assert place.json("get", "long")["state"] == "STOPPED"
        assert [job["name"] for job in place.json("list", "--state", "stopped")] == ["long"]
        heading, gone = place.works("prune", "-s", "0s").splitlines()
        assert (heading.split()[:2], gone.split()[:2]) == (["NAME", "STATE"], ["long", "STOPPED"])
        assert place.json("list", "-A") == []

    def test_a_job_is_suspended_and_goes_on(self, place: Place) -> None:
        """It has no process then, keeps its name and its place, and may be stopped."""
        place.works("submit", "--name", "idle", *place.ranks(2), place.paceline.script(FOREVER))

        def runs() -> bool:
            found = place.json("get", "idle")
            return [rank["state"] for rank in found["instances"]] == ["RUNNING"] * 2 and found["state"] == "RUNNING"

        eventually(runs, "its ranks run", 0.5)
        if "suspends" not in place.can:
            assert "its jobs cannot be suspended" in place.refuses("suspend", "idle")
        else:
            said = place("suspend", "idle").stderr
            assert said.startswith("paceline: job idle is suspended; no checkpoint of the library is known"), said
            found = place.json("get", "idle")
            assert found["state"] == "SUSPENDED", found
            assert not [rank for rank in found["instances"] if rank["state"] == "RUNNING"]
            assert place("suspend", "idle").returncode == 0
            assert "has not ended" in place.refuses("delete", "idle")
            hint = found["waiting"].removesuffix(" lets it go on")
            assert hint == "paceline resume idle"
            assert f"{hint} lets it go on, or stop it first" in place.refuses("resubmit", "idle")
            resumed = place.typed(hint)
            assert (resumed.returncode, "job idle goes on" in resumed.stderr) == (0, True), resumed.stderr
            eventually(runs, "its ranks run again", 0.5)
            assert "job idle is not suspended; it is " in place("resume", "idle").stderr
            place.works("suspend", "idle")
        stopped = place("stop", "idle")
        assert (stopped.returncode, "job idle stopped" in stopped.stderr) == (0, True), stopped.stderr
        for verb in ("suspend", "resume"):
            if "suspends" in place.can:
                assert "has ended (STOPPED); paceline resubmit" in place.refuses(verb, "idle")
        place.works("delete", "idle")

    def test_what_would_be_pruned_stays(self, place: Place) -> None:
        """Also a job whose time to live is over, which `list` would remove."""
        if "sizes" not in place.can:
            return
        place.works("submit", "--name", "brief", "--ttl", "0.001s", place.paceline.script("pass"))
        for _ in range(2):
            eventually(lambda: [it["name"] for it in place.json("prune", "--dry-run")] == ["brief"], "it is listed")
        assert place("delete", "brief").returncode == 0
        assert place.json("list", "-A") == []

    def test_a_job_that_fails_is_run_again(self, place: Place) -> None:
        script = place.paceline.script("import sys; sys.exit(3)")
        place.works("submit", "--name", "bad", script)
        assert place("wait", "bad").returncode == 3
        assert place("logs", "bad", "-f").returncode == 3
        assert place.json("get", "bad")["state"] == "FAILED"
        assert place.works("resubmit", "bad") == "bad-2\n"
        assert place("wait", "bad-2").returncode == 3
        older, newer = (place.json("get", name)["created"] for name in ("bad", "bad-2"))
        gone = re.findall(r"job (\S+) deleted", place("delete", "bad", "bad-2").stderr)
        assert gone == ["bad-2", "bad"] or older == newer, "the newer one may need the older one's folder"

    def test_the_traceback_of_a_failed_job_is_shown(self, place: Place) -> None:
        script = place.paceline.script("""
            import sys
            print("it begins", flush=True)
            sys.stdout.write("steep: ")
            sys.stdout.flush()
            def climb(remaining):
                if not remaining:
                    raise ValueError("too \\x1b[1msteep: Too many open files")
                climb(remaining - 1)
            climb(9)
        """)
        place.works("submit", "--name", "bad", script)
        assert place("wait", "bad").returncode == 1
        for flags in ((), ("-f",)):
            done = place("logs", "bad", *flags)
            first, begin, *_, last = done.stdout.splitlines()
            assert (first, begin) == ("it begins", "steep: Traceback (most recent call last):"), done.stdout
            assert last == "ValueError: too \x1b[1msteep: Too many open files"
        found, got = place.json("get", "bad")["traceback"], place.works("get", "bad").splitlines()
        assert (found["rank"], found["text"].count("\n")) == (0, 7), found
        assert done.stdout.endswith(f"{found['text']}\n"), "these are its last lines"
        assert got[-8:] == found["text"].replace("\x1b", "\\x1b").split("\n")
        assert place.typed(got[-9].partition("see all of it with: ")[2]).stdout == done.stdout
        assert "Traceback" not in place.works("events", "bad")
        known = place.json("get", "bad")["facts"]
        assert (known["steps"]["is_stepping"], known["diagnosis"]["kind"], known["diagnosis"]["rank"]) == (
            False, "exception", 0
        )  # fmt: skip
        assert re.search(r"\.py:\d+$", known["diagnosis"]["place"])
        assert (known["mend"]["action"], known["mend"]["first"]) == ("edit", None)
        if command := known["mend"]["command"]:
            assert place.typed(command.replace(" resubmit", " resubmit --dry-run")).returncode == 0
        assert place.json("list")[0]["traceback"] is None, "get reads it"
        if "run" in place.can:
            shown = place("run", "--name", "seen", script)
            assert (shown.stdout + shown.stderr).count("Traceback") == 1, "the report has it"
            advice = place.json("get", "bad")["advice"]
            assert "ulimit -n" in advice
            assert f"what to do: {advice}" in shown.stderr
            assert all(advice in place.works(verb, "bad") for verb in ("get", "events"))
            place.works("delete", "seen")
        place.works("delete", "bad")

    def test_a_secret_reaches_the_ranks_and_nothing_else(self, place: Place) -> None:
        secret, public = secrets.token_hex(16), secrets.token_hex(16)
        env = {**place.paceline.env, "SECRET": secret}
        flags = ("--secret", "SECRET", "--env", f"PUBLIC={public}", place.paceline.script(SECRETIVE))
        folders = (place.paceline.folder, *place.folders)
        digest = hashlib.sha256(secret.encode()).hexdigest()
        with command_lines() as lines:
            shown = [place("submit", "--dry-run", *flags, env=env), place("submit", "--name", "it", *flags, env=env)]
            follower = place.paceline.start("logs", *place.where, "-f", "it")
            assert follower.stdout is not None
            assert follower.stdout.readline() == f"{digest}\n", "the rank has it"
            assert files_with(public, folders), "this is where files would be found"
            assert files_with(secret, folders) == []
            shown += [place(verb, "it") for verb in ("get", "events")]
            shown += [place("list", "-o", form) for form in ("wide", "json", "yaml")]
            shown += [place("attach", "it", "--", "true"), place("stop", "it")]
            follower.communicate()
            again = place("resubmit", "it", env=env)
            shown += [again, place("stop", "it-2"), place("wait", "it", "it-2")]
        assert files_with(secret, folders) == []
        failed = [(done.args, done.stdout, done.stderr) for done in shown[:-1] if done.returncode]
        assert not failed, failed
        assert not any(secret in done.stdout + done.stderr for done in shown)
        assert any(public in line for line in lines), "this is where command lines would be found"
        assert not any(secret in line for line in lines)
        place.works("delete", "it", "it-2")

    def test_a_dry_run_refuses_what_submit_refuses(self, place: Place) -> None:
        script = place.paceline.script("pass")
        shown = place.works("submit", "--dry-run", "--name", "taken", "-n", "2", script)
        assert place.dry(shown) == ("taken", 2)
        assert place.json("list") == []
        place.works("submit", "--name", "taken", script)
        place.works("wait", "taken")
        for said, flags in {
            "secret NOT_THERE is not set": ["--secret", "NOT_THERE"],
            "job named taken": ["--name", "taken"],
            "--image: ": ["--image", "some/image"],
            "--queue: ": ["--queue", "fast"],
            "no target 'nowhere'": ["--on", "nowhere"],
        }.items():
            if flags[0] in place.takes:
                continue
            refused = place.refuses("submit", *flags, script)
            assert said in refused
            assert place.refuses("submit", "--dry-run", *flags, script) == refused
        assert [job["name"] for job in place.json("list")] == ["taken"]
        place.works("delete", "taken")

    def test_what_a_function_returns_and_raises_comes_back(self, place: Place) -> None:
        if "functions" not in place.can:
            return
        script = place.paceline.script(FUNCTION)
        out, err = place.paceline.start(python=(sys.executable, script, place.name)).communicate()
        assert out == "climb FAILED\n", err

    def test_what_is_unknown_is_told_in_a_line(self, place: Place) -> None:
        place.works("submit", "--name", "known", place.paceline.script("pass"))
        place.works("wait", "known")
        for verb in ("get", "logs", "wait", "stop", "delete", "events", "attach", "resubmit"):
            assert place.refuses(verb, "knwon") == "no job 'knwon'; did you mean known?"
        hint = place.refuses("get", "something-else")
        assert place.typed(hint.partition("see ")[2]).stdout.splitlines()[1].startswith("known")
        assert "it has rank 0 (master-0)" in place.refuses("logs", "known", "-i", "1")
        assert "no such state" in place.refuses("list", "--state", "lots")
        place.works("delete", "known")

    def test_run_in_the_foreground(self, place: Place) -> None:
        script = place.paceline.script(COUNT)
        if "run" not in place.can:
            assert place.refuses("run", script).startswith(
                f"{place.name} cannot run jobs in the foreground; start it with "
            )
            return
        done = place("run", "--name", "watched", script)
        assert (done.returncode, done.stdout) == (0, "line 0 of 0\nline 1 of 0\nline 2 of 0\n"), done.stderr
        place.works("delete", "watched")
        running = place.paceline.start("run", *place.where, "--name", "asked", place.paceline.script(ASKED))
        assert running.stdout is not None
        assert running.stdout.readline() == "here\n"
        running.send_signal(signal.SIGUSR1)
        out, err = running.communicate()
        assert (running.returncode, out) == (0, f"got {int(signal.SIGUSR1)}\n"), err
        place.works("delete", "asked")

    def test_ranks_meet_and_are_started_again(self, place: Place) -> None:
        if "run" not in place.can:
            return
        flags = ("--name", "sum", "--max-restarts", "1", "--tee", "3")
        done = place("run", *flags, *place.ranks(4), place.paceline.script(MEET))
        assert done.returncode == 0, done.stderr
        said = done.stdout.splitlines()
        for attempt, lines in enumerate((said[:4], said[4:])):
            others = [f"[rank {rank}] sum 6 of 4 in {attempt}" for rank in (1, 2, 3)]
            assert sorted(lines) == [*others, f"sum 6 of 4 in {attempt}"]
            logs = place.works("logs", "sum", "--all", "--attempt", str(attempt)).splitlines()
            assert sorted(logs) == [f"[rank 0] sum 6 of 4 in {attempt}", *others]
        assert done.stderr.count("starting again: attempt 1 of 1") == 1
        found = place.json("get", "sum")
        assert (found["state"], found["ranks"], found["nodes"]) == ("SUCCEEDED", 4, place.nodes)
        assert (found["restarts"], found["attempt"]) == (1, 1)
        nodes = [rank["node"] for rank in found["instances"]]
        assert nodes == sorted(nodes) and [nodes.count(node) for node in {*nodes}] == [4 // place.nodes] * place.nodes
        events = [event["event"] for event in place.json("events", "sum")]
        counts = [events.count(event) for event in ("started", "restarting", "finished")]
        assert counts[0] == 2 * counts[1] == 2 * counts[2] > 0, events
        place.works("delete", "sum")

    def test_the_rank_that_fails_first_is_named_last_and_once(self, place: Place) -> None:
        if "run" not in place.can:
            return
        script = place.paceline.script("""
            import os, threading
            if os.environ["RANK"] == "3":
                raise ValueError("no good")
            threading.Event().wait()
        """)
        done = place("run", "--name", "bad", "--tee", "3", *place.ranks(4), script)
        assert (done.returncode, done.stderr.count("ValueError: no good\n")) == (1, 1), done.stderr
        *_, line, culprit = [line for line in done.stderr.splitlines() if not line.startswith("paceline: job bad")]
        assert line == "ValueError: no good"
        assert culprit.startswith(f"paceline: rank 3 failed first: ValueError: no good (node {place.nodes - 1} on "), (
            culprit
        )
        assert "ValueError" not in done.stdout
        assert not re.search(r"\.pyz|it waits", done.stderr), "none of our frames, and the nodes were free"
        found = place.json("get", "bad")
        assert found["state"] == "FAILED" and "ValueError: no good" in found["error"], found["error"]
        place.works("delete", "bad")

    def test_an_interrupt_lets_ranks_save(self, place: Place) -> None:
        if "run" not in place.can:
            return
        flags = ("--name", "it", "--grace", "120s", *place.ranks(2), place.paceline.script(SAVES))
        running = place.paceline.start("run", *place.where, *flags, start_new_session=True)
        assert running.stdout is not None
        assert running.stdout.readline() == "here\n"
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        out, err = running.communicate()
        assert (running.returncode, out) == (128 + signal.SIGINT, "saved\n"), err
        assert re.search(r"stopping \(SIG(INT|TERM)\); ranks have 120 s", err), err
        assert place.json("get", "it")["state"] == "STOPPED"
        place.works("delete", "it")

    def test_a_second_interrupt_ends_ranks_at_once(self, place: Place) -> None:
        if "run" not in place.can:
            return
        flags = ("--name", "it", "--grace", "1000s", *place.ranks(2), place.paceline.script(STUBBORN))
        running = place.paceline.start("run", *place.where, *flags, start_new_session=True)
        assert running.stdout is not None
        for line in ("here\n", "asked\n"):
            assert running.stdout.readline() == line
            os.killpg(running.pid, signal.SIGINT)
        _, err = running.communicate()
        assert running.returncode == 128 + signal.SIGINT, err
        assert err.splitlines()[-1].startswith("paceline: job it stopped"), err
        assert place.json("get", "it")["state"] == "STOPPED"
        place.works("delete", "it")

    @pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)])
    def test_a_client_that_is_gone_ends_its_job(self, place: Place, number: int) -> None:
        if "held" not in place.can:
            return
        flags = ("--name", "it", "--tee", "3", *place.ranks(2), place.paceline.script(FOREVER))
        running = place.paceline.start("run", *place.where, *flags)
        assert running.stdout is not None
        assert sorted(running.stdout.readline() for _ in range(2)) == ["[rank 1] here\n", "here\n"]
        running.send_signal(number)
        running.communicate()
        eventually(lambda: place.json("get", "it")["state"] == "STOPPED", "its job is stopped", 0.5)
        place.works("delete", "it")

    def test_values_arrive_as_they_are(self, place: Place) -> None:
        """Also what shells would obey, and bytes that are no UTF-8."""
        odd = os.fsdecode("\u4f60".encode("gbk"))
        nasty = """a,b 'say "x"' "$(touch /no/pwned)`id`$HOME\\;&|*~ %j ü \n<>#"""
        source = """
            import os, sys
            print(ascii([os.fsencode(it) for it in (*sys.argv[1:], os.environ["ODD"], os.environ["NASTY"])]))
        """
        script = place.paceline.script(source, "it's $HOME.py")
        flags = ("--env", f"ODD={odd}", "--env", f"NASTY={nasty}", "--label", f"why={nasty}")
        place.works("submit", "--name", "odd", *flags, script, odd, nasty, "--x")
        place.works("wait", "odd")
        arrived = [os.fsencode(it) for it in (odd, nasty, "--x", odd, nasty)]
        assert place.works("logs", "odd") == f"{arrived!a}\n"
        for form in ("wide", "json", "yaml"):
            place.works("get", "odd", "-o", form)
        assert place.json("get", "odd")["labels"] == {"why": nasty}
        if place.keeps_shells:
            assert place.works("attach", "odd", "--", "printf", "%s|%s", nasty, "$RANK") == f"{nasty}|$RANK"
        place.works("delete", "odd")

    def test_what_not_every_backend_can_do(self, place: Place) -> None:
        script = place.paceline.script("pass")
        place.works("submit", "--name", "done", script)
        place.works("wait", "done")
        for ability, commands in {
            "metered": ["top job", "top node"],
            "checks": ["check"],
            "tensorboards": ["tensorboard done --stop"],
            "volumes": ["data list"],
        }.items():
            for command in commands:
                verb, *args = command.split(" done") if " done" in command else (command,)
                words = ["done", *args[0].split()] if args else []
                if ability in place.can:
                    done = place(verb, *words)
                    assert done.returncode in ((0, 1) if verb == "check" else (0,)), done.stderr
                else:
                    assert place.refuses(verb, *words).startswith(f"{place.name}: it ")
        for verb, args in (("scaleout", ()), ("scalein", ("--nnodes", "1"))):
            refused = place.refuses(verb, "done", *args)
            assert (
                ("has ended" in refused) if "elastic" in place.can else refused.startswith(f"{place.name}: its jobs ")
            )
        place.works("delete", "done")
