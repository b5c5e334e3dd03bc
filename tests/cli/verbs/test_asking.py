"""`delete` and `prune` say what goes, ask on a terminal, and remove only what was shown."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests import recorded
from tests.conftest import eventually
from tests.typed import refusal

from paceline.contract.checkpoint import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Paceline

QUESTION = r"\[y/N\] "


class Terminal:
    """A command of paceline whose standard input and error are a terminal."""

    def __init__(self, paceline: Paceline, *args: str) -> None:
        self.ours, theirs = os.openpty()
        os.set_blocking(self.ours, False)
        self.screen = ""
        env = {**paceline.env, "NO_COLOR": "1"}
        self.process = paceline.start(*args, stdin=theirs, stderr=theirs, start_new_session=True, env=env)
        os.close(theirs)

    def until(self, pattern: str) -> str:
        """Read until the screen shows this; returns the screen."""
        eventually(lambda: re.search(pattern, self.screen) or (self._read() and False), lambda: self.screen)
        return self.screen

    def type(self, keys: str) -> None:
        os.write(self.ours, keys.encode())

    def end(self) -> tuple[int, str, str]:
        """Its exit code, its output, and the screen."""
        out, _ = self.process.communicate(timeout=120)
        while self._read():
            pass
        return self.process.returncode, out, self.screen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        os.close(self.ours)

    def _read(self) -> bool:
        """Read what is there; returns whether there was something."""
        try:
            text = os.read(self.ours, 4096).decode()
        except OSError:  # nothing yet, or the process has closed the terminal
            return False
        self.screen += text.replace("\r\n", "\n")
        return bool(text)


@pytest.fixture
def two(paceline: Paceline) -> Iterator[Paceline]:
    """Two jobs that have ended, one with two checkpoints."""
    recorded.ended(paceline, "empty", "trained")
    for step in (1, 2):
        folder = paceline.home / "jobs" / "trained" / "checkpoints" / f"step-00000{step}"
        folder.mkdir(parents=True)
        (folder / MANIFEST).write_text("{}")
        (folder / "model.pt").write_bytes(bytes(50 << 20))
    (paceline.home / "jobs" / "trained" / "checkpoints" / ".saving-step-000003-0123abcd").mkdir()
    yield paceline


def there(paceline: Paceline) -> list[str]:
    return sorted(path.name for path in (paceline.home / "jobs").iterdir())


def listed(paceline: Paceline, *flags: str) -> list[dict[str, Any]]:
    return paceline.json("prune", "--dry-run", "-s", "0s", *flags)


def test_a_dry_run_lists_what_would_go(two: Paceline) -> None:
    found = {job["name"]: job for job in listed(two)}
    assert list(found) == ["trained", "empty"]
    assert {name: job["checkpoints"] for name, job in found.items()} == {"trained": 2, "empty": 0}
    assert 100 << 20 < found["trained"]["size"] < 101 << 20
    assert 0 < found["empty"]["size"] < 1 << 20
    assert (found["empty"]["state"], found["empty"]["folder"]) == ("SUCCEEDED", str(two.home / "jobs" / "empty"))
    done = two("prune", "--dry-run", "-s", "0s")
    heading, trained, empty = done.stdout.splitlines()
    assert heading.split() == ["NAME", "STATE", "ENDED", "CHECKPOINTS", "SIZE"]
    assert re.fullmatch(r"trained  SUCCEEDED  \d+ s ago +2 +100 MiB", trained)
    assert empty.startswith("empty ")
    assert done.stderr == "paceline: 2 jobs would be deleted (2 checkpoints, 100 MiB)\n"
    assert "FOLDER" in two("prune", "--dry-run", "-o", "wide").stdout
    assert there(two) == ["empty", "trained"]


def test_only_states_that_there_are(two: Paceline) -> None:
    said = refusal(two, "prune", "-s", "0s", "--state", "fialed")
    assert said == "--state FIALED: no such state; did you mean FAILED?"
    done = two("prune", "-s", "0s", "--state", "stopped,succeeded", "--dry-run", "-o", "json")
    assert len(json.loads(done.stdout)) == 2, done.stderr


def test_without_a_terminal_it_says_what_went(two: Paceline) -> None:
    done = two("delete", "empty")
    assert done.returncode == 0
    assert re.fullmatch(r"paceline: job empty deleted \(0 checkpoints, .* KiB\)\n", done.stderr)
    done = two("prune", "-s", "0s", "-o", "json")
    assert [(job["name"], job["checkpoints"]) for job in json.loads(done.stdout)] == [("trained", 2)]
    assert done.stderr == "paceline: 1 job deleted (2 checkpoints, 100 MiB)\n"
    assert there(two) == []


@pytest.mark.parametrize("verb", [("prune", "-s", "0s"), ("delete", "trained", "empty")], ids=lambda verb: verb[0])
def test_on_a_terminal_it_asks(two: Paceline, verb: tuple[str, ...]) -> None:
    for keys, code in (("n\n", 1), ("\n", 1), ("yess\n", 1), ("\x04", 1), ("\x03", 130)):
        terminal = Terminal(two, *verb)
        try:
            screen = terminal.until(QUESTION)
            assert re.search(r"trained +SUCCEEDED .* 2 +100 MiB\n", screen)
            assert screen.endswith("paceline: delete 2 jobs (2 checkpoints, 100 MiB)? [y/N] ")
            if keys == "\x03":  # the terminal is not the one that controls the process
                terminal.process.send_signal(signal.SIGINT)
            else:
                terminal.type(keys)
            exit_code, out, screen = terminal.end()
        finally:
            terminal.close()
        assert (exit_code, out) == (code, ""), screen
        assert ("nothing was deleted" in screen) is (code == 1)
        assert there(two) == ["empty", "trained"]
    terminal = Terminal(two, *verb)
    try:
        terminal.until(QUESTION)
        terminal.type("y\n")
        code, out, screen = terminal.end()
    finally:
        terminal.close()
    assert code == 0, screen
    assert "deleted (" in screen.partition("[y/N]")[2]
    assert there(two) == []


def test_yes_skips_the_question(two: Paceline) -> None:
    for verb in (("delete", "-y", "empty"), ("prune", "--yes", "-s", "0s")):
        terminal = Terminal(two, *verb)
        try:
            code, _, screen = terminal.end()
        finally:
            terminal.close()
        assert (code, "[y/N]" in screen) == (0, False), screen
    assert there(two) == []


@pytest.mark.parametrize("verb", [("prune", "-s", "0s"), ("delete", "--force", "it", "other")], ids=lambda v: v[0])
def test_what_has_changed_while_it_asked_stays(paceline: Paceline, verb: tuple[str, ...]) -> None:
    running = paceline.script("import threading; print('here', flush=True); threading.Event().wait()", "running.py")
    recorded.ended(paceline, "it", "other")
    terminal = Terminal(paceline, *verb)
    try:
        terminal.until(QUESTION)
        assert paceline("delete", "it").returncode == 0
        assert paceline("submit", "--name", "it", running).returncode == 0
        terminal.type("y\n")
        code, _, screen = terminal.end()
    finally:
        terminal.close()
    assert "job it has changed since it was looked at, and stays" in screen
    assert code == (0 if verb[0] == "prune" else 1)
    assert there(paceline) == ["it"]
    assert paceline.json("get", "it")["state"] in ("PENDING", "STARTING", "RUNNING")
    assert paceline("stop", "--now", "it").returncode == 0


def keeps(paceline: Paceline, user: str, owner: str) -> None:
    """Note that a job keeps its checkpoints in the folder of another one."""
    path = paceline.home / "jobs" / user
    job_id = json.loads((path / "spec.json").read_text())["job_id"]
    (paceline.home / "jobs" / owner / "users").mkdir()
    mark = {"path": str(path), "job_id": job_id}
    (paceline.home / "jobs" / owner / "users" / job_id).write_text(json.dumps(mark))


def test_a_job_goes_before_the_older_one_whose_folder_it_uses(two: Paceline) -> None:
    keeps(two, "trained", "empty")
    done = two("delete", "empty", "trained")
    assert (done.returncode, there(two)) == (0, []), done.stderr


def test_a_job_that_cannot_go_keeps_no_other(two: Paceline) -> None:
    keeps(two, "empty", "trained")
    done = two("prune", "-s", "0s")
    assert done.returncode == 1
    assert "job empty keeps its checkpoints in the folder of job trained" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["NAME", "empty"]
    assert "1 job deleted (0 checkpoints, " in done.stderr
    assert there(two) == ["trained"]


def test_the_copy_of_the_code_goes_too(paceline: Paceline) -> None:
    paceline.script("print('hello')", "src/script.py")
    place = ("--working-dir", "user", "--sync-mode", "snapshot", "--sync-source", "src", "--name", "job")
    assert paceline.run(*place, "script.py").returncode == 0
    (before,) = listed(paceline)
    copy: Path = paceline.folder / "user" / "code" / "job" / "runs" / "step-000001"
    copy.mkdir(parents=True)
    (copy / MANIFEST).write_bytes(bytes(1000))
    os.link(copy / MANIFEST, copy / "again")
    (after,) = listed(paceline)
    assert (after["checkpoints"] - before["checkpoints"], after["size"] - before["size"]) == (1, 1000)
    assert paceline("delete", "job").returncode == 0
    assert not copy.exists()
