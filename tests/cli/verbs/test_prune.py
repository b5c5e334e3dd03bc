"""Jobs that are deleted while others work with them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

from tests import recorded
from tests.conftest import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Paceline


class Held:
    """A command of paceline that stops at a function, says so with a file, and goes on once another file is there."""

    def __init__(self, paceline: Paceline, place: str, when: str, *args: str) -> None:
        self.reached, self.go_on = paceline.folder / "reached", paceline.folder / "go on"
        module, _, function = place.rpartition(":")
        text = f"""
            import importlib, sys, time
            from pathlib import Path

            module = importlib.import_module({module!r})
            *path, name = {function!r}.split(".")
            owner = getattr(module, path[0]) if path else module
            original = getattr(owner, name)

            def stop():
                if not Path({str(self.reached)!r}).exists():
                    Path({str(self.reached)!r}).touch()
                    while not Path({str(self.go_on)!r}).exists():
                        time.sleep(0.01)

            def held(*args, **kwargs):
                if {when == "before"}:
                    stop()
                found = original(*args, **kwargs)
                if {when == "after"}:
                    stop()
                return found

            setattr(owner, name, held)
            sys.argv[1:3] = []
            from paceline.cli.main import main
            sys.exit(main())
        """
        # `-m paceline` is in the command line too, and is dropped there.
        self.process = paceline.start(*args, python=(sys.executable, "-c", textwrap.dedent(text)))
        eventually(lambda: self.reached.exists() or self.process.poll() is not None, f"it comes to {place}")

    def end(self) -> subprocess.CompletedProcess[str]:
        """Let it go on, to its end."""
        self.go_on.touch()
        out, err = self.process.communicate(timeout=120)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)


def jobs(paceline: Paceline) -> Path:
    return paceline.home / "jobs"


def test_a_job_that_is_pruned_before_its_submit_is_over(paceline: Paceline) -> None:
    paceline.script("")
    submit = Held(paceline, "paceline.backends.local.start:start", "after", "submit", "--name", "it", "script.py")
    assert paceline("wait", "it").returncode == 0
    assert paceline("prune", "-s", "0s").returncode == 0
    assert not (jobs(paceline) / "it").exists()
    done = submit.end()
    assert (done.returncode, done.stdout) == (0, "it\n"), done.stderr


def test_a_new_job_of_the_name_is_not_removed_in_place_of_the_old_one(paceline: Paceline) -> None:
    """Also where it comes at the last moment, after all was looked at."""
    paceline.script("import threading; print('here', flush=True); threading.Event().wait()")
    recorded.ended(paceline, "it")
    delete = Held(paceline, "paceline.node.store.lifecycle:remove", "before", "delete", "it")
    assert paceline("delete", "it").returncode == 0
    assert paceline("submit", "--name", "it", "script.py").returncode == 0
    done = delete.end()
    assert (done.returncode, done.stderr) == (1, "paceline: job it has changed since it was looked at, and stays\n")
    assert paceline.json("get", "it")["state"] in ("PENDING", "STARTING", "RUNNING")
    assert paceline("stop", "--now", "it").returncode == 0


def test_a_job_whose_checkpoints_are_being_taken_is_not_removed(paceline: Paceline) -> None:
    paceline.script("import os, time\nwhile not os.path.exists('end'): time.sleep(0.01)\n")
    recorded.ended(paceline, "old")
    (jobs(paceline) / "old" / "checkpoints" / "step-1").mkdir(parents=True)
    (jobs(paceline) / "old" / "checkpoints" / "step-1" / "data").write_text("x")
    resubmit = Held(paceline, "paceline.node.store.lifecycle:take_checkpoints", "before", "resubmit", "old")
    prune = paceline.start("prune", "-s", "0s")
    done = resubmit.end()
    assert done.returncode == 0, done.stderr
    new = done.stdout.strip()
    _, err = prune.communicate(timeout=120)
    assert prune.returncode == 0, err
    assert not (jobs(paceline) / "old").exists()
    (paceline.folder / "end").touch()
    assert paceline("wait", new).returncode == 0
    assert (jobs(paceline) / new / "checkpoints" / "step-1" / "data").read_text() == "x"
