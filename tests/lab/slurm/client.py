"""`paceline` as a user of the cluster runs it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conftest import GENEROUS, Paceline, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from .cluster import Cluster

FOREVER = "import threading; print('here', flush=True); threading.Event().wait()"


class Client(Paceline):
    """`paceline` on the login machine of a cluster, with a home of its own, which the nodes see as well."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self.env.update(cluster.env)
        for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
            path = folder / "user" / name.lower()
            path.mkdir(parents=True, mode=0o700)
            self.env[name] = str(path)

    def start(self, *args: str, python: tuple[str, ...] = (sys.executable,), **kwargs: object) -> subprocess.Popen[str]:
        """Start a command line and go on; `env` are more variables."""
        env = {**self.env, **kwargs.pop("env", {})}  # type: ignore[dict-item]
        there = tuple(self.cluster.login.command(python, Path(str(kwargs.get("cwd", self.folder)))))
        return super().start(*args, python=there, env=env, **kwargs)

    def paceline(self, *args: str, check: bool = True, **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run a command line to its end, which is success unless `check` is false."""
        done = self(*args, **kwargs)
        assert not check or done.returncode == 0, f"{args}: exit {done.returncode}: {done.stderr}"
        return done

    def wait(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        """What a command that was started prints until its end; a failure tells all that is known of it."""
        try:
            return process.communicate(timeout=GENEROUS)
        except subprocess.TimeoutExpired as error:
            parts = [f"it has not ended; exit code {process.poll()}", f"printed {error.stdout!r} {error.stderr!r}"]
            for pid in (process.pid, *self.processes()):
                for name in ("cmdline", "status"):
                    with contextlib.suppress(OSError):
                        parts.append(Path(f"/proc/{pid}/{name}").read_text().replace("\0", " "))
            parts += [self.cluster.slurm("scontrol", "show", "job"), *self.cluster.calls, *self.cluster.calls_of_jobs]
            parts += [f"{path}: {path.read_text()}" for path in self.folder.rglob("slurm.out")]
            raise AssertionError("\n".join(parts)) from None

    def sh(self, script: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run a line of shell as this user, in the client's folder."""
        options = {"env": self.env, "cwd": self.folder, "capture_output": True, "text": True, **kwargs}
        return subprocess.run(self.cluster.login.command(["sh", "-c", script], self.folder), check=False, **options)

    def forget(self) -> None:
        """Let the next command ask Slurm and the nodes, and not use what they have said in the last ten seconds."""
        root = "user/home/.local/state/paceline"
        for pattern in (f"{root}/queue.json", "*/queue.json"):
            for kept in self.folder.glob(pattern):
                kept.unlink(missing_ok=True)


def job(user: Client, name: str = "it") -> dict[str, Any]:
    """What `get` says of a job on the target `lab`."""
    return user.json("get", "--on", "lab", name)


def submit(user: Client, script: str, *flags: str, name: str = "it", args: tuple[str, ...] = ()) -> None:
    """Submit a script, with its arguments, to the target `lab`."""
    user.paceline("submit", "--on", "lab", "--name", name, *flags, user.script(script), *args)


def until(user: Client, is_so: Callable[[dict[str, Any]], object], what: str, name: str = "it") -> dict[str, Any]:
    """Wait until what `get` says of a job is so, for which Slurm is asked each time; returns what it says then."""
    found: dict[str, Any] = {}

    def looks() -> object:
        user.forget()
        found.update(job(user, name))
        return is_so(found)

    eventually(looks, lambda: f"{what}; {name} is {found}", pause=0.3)
    return found


def reaches(user: Client, state: str, name: str = "it") -> dict[str, Any]:
    """Wait until a job is in a state; returns what `get` says then."""
    return until(user, lambda found: found["state"] == state, f"it is {state}", name)
