"""Mends jobs as SKILL.md says: it reads nothing but `paceline get JOB -o json`, and the files that this names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Paceline

Found = dict[str, Any]


class Mender:
    """Mends one job after the other. `mended` has the kind of each diagnosis that was mended."""

    def __init__(self, paceline: Paceline, project: Path, where: tuple[str, ...] = ()) -> None:
        """`project` is the folder with the script; `where` has the flags that select the backend."""
        self._paceline, self._project, self._where = paceline, project, where
        self.mended: list[str] = []

    def look(self, job: str) -> str | None:
        """Look at a job, and mend it if something is wrong; the job that goes on then, or None once all is well."""
        found = self._paceline.json("get", *self._where, job)
        facts = found["facts"]
        if facts["mend"] is None:
            return None if found["state"] == "SUCCEEDED" else job
        kind, mend = facts["diagnosis"]["kind"], facts["mend"]
        if mend["action"] == "wait":
            return job
        if mend["first"]:
            self._do(mend["first"])
        more = self._rules[mend["action"]](self, found) if mend["do"] else []
        command = mend["command"]
        if kind == "stopped":  # whoever runs the test wants it to go on
            command = mend["do"][mend["do"].index("paceline resubmit") :]
        assert command, mend
        before, job_name = command.rsplit(" ", 1)
        flags = [it for it in more if it.startswith("--env")]
        rest = [it for it in more if it not in flags]
        line = shlex.join([*shlex.split(before), *flags, job_name, *(["--", *rest] if rest else [])])
        self.mended.append(kind)
        return self._do(line)

    def _do(self, line: str) -> str:
        """Run a command line of paceline; what it prints."""
        program, *words = shlex.split(line)
        assert program == "paceline"
        done = self._paceline(*words)
        assert done.returncode in (0, 1) if words[0] == "stop" else done.returncode == 0, done.stderr
        return done.stdout.strip()

    def _args(self, found: Found) -> list[str]:
        return shlex.split(found["command"])[1:]

    def _path(self, found: Found) -> list[str]:
        """The file of that name that there is."""
        about = found["facts"]["diagnosis"]["about"]
        (there,) = self._project.rglob(Path(about).name)
        return [str(there) if it == about else it for it in self._args(found)]

    def _install(self, found: Found) -> list[str]:
        """A folder of the project that has the module; the environment whose Python is missing."""
        about = found["facts"]["diagnosis"]["about"]
        if found["facts"]["diagnosis"]["kind"] == "missing program":
            folder = Path(about).parents[1]
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
            return []
        (there,) = self._project.rglob(f"{about}.py")
        return [f"--env=PYTHONPATH={there.parent}"]

    def _disk(self, found: Found) -> list[str]:
        """Another folder: whatever argument is one."""
        other = self._project / "other"
        other.mkdir()
        return [str(other) if Path(it).is_dir() else it for it in self._args(found)]

    def _edit(self, found: Found) -> list[str]:
        diagnosis = found["facts"]["diagnosis"]
        if diagnosis["kind"] == "loss not finite":
            args = self._args(found)
            args[args.index("--lr") + 1] = str(float(args[args.index("--lr") + 1]) / 1e6)
            return args
        file, _, number = diagnosis["place"].rpartition(":")
        script = self._project / file
        lines = script.read_text().splitlines(keepends=True)
        if diagnosis["kind"] == "slow":
            (setting,) = re.findall(r"num_workers=\d+", diagnosis["evidence"])
            lines = [re.sub(r"num_workers=\d+", setting, line) for line in lines]
        else:  # a lock that is taken twice, in our script
            assert ".acquire()" in lines[int(number) - 1]
            lines[int(number) - 1] = re.sub(r"\S.*", "pass", lines[int(number) - 1])
        script.write_text("".join(lines))
        return []

    _rules: ClassVar[dict[str, Callable[[Mender, Found], list[str]]]] = {
        "correct the path": _path, "install": _install, "free the disk": _disk, "edit": _edit,
        "none": lambda _mender, _found: [],
    }  # fmt: skip
