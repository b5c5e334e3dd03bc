"""Plant faults in a copy of the source, one at a time, and see whether the tests find them.

`tests/faults.toml` has the faults. The text of each is looked for in all of `src`, so that it may move to another file;
where it occurs several times, the one in the function named counts. The same holds for the tests.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import venv
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

import tomllib

_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
HERE = Path(__file__).parents[1]
_LEFT_OUT = [f"-pno:{name}" for name in ("cacheprovider", "anyio", "xdist")]  # plugins that take long to import
RESULTS = ("found", "missed", "not plantable", "unsound")  # the last: the tests fail without the fault as well
_WITH_TORCH = ("tests/train/", "tests/horovod/")
# Each run of pytest is forked from a process that has imported what takes long, and nothing of paceline.
_SERVER = """
import json, os, sys
import hypothesis, pytest, pytest_timeout
for name in sys.argv[1:]:
    __import__(name)
for line in sys.stdin:
    out, *args = json.loads(line)
    if pid := os.fork():
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    os.setsid()
    written = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (written, 1), (written, 2)):
        os.dup2(source, target)
    sys.argv = ["pytest"]
    code = pytest.main(args)
    sys.stdout.flush()
    os._exit(code)
"""


class Fault(TypedDict):
    """A line of the list."""

    room: str
    what: str
    where: str  # the function
    old: str
    new: str
    tests: list[str]  # FILE::TEST, the cheapest first


class Result(TypedDict):
    """What came of it."""

    room: str
    what: str
    result: str
    why: str
    seconds: float


class Copy:
    """A copy of a working tree, with an environment of its own that imports paceline from there."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.root, self.python = folder, folder / ".venv/bin/python"
        self._servers: dict[tuple[str, ...], subprocess.Popen[str]] = {}
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, stdout=subprocess.PIPE, check=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (tree / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, folder / name)
        venv.create(folder / ".venv")
        packages = [it for it in sys.path if it.endswith("site-packages")]
        purelib = sysconfig.get_path("purelib", vars={"base": str(folder / ".venv")})
        Path(purelib, "copy.pth").write_text("\n".join([str(folder / "src"), *packages]), encoding="utf-8")
        script = self.python.with_name("paceline")
        script.write_text(f"#!{self.python}\nimport sys\nfrom paceline.cli.main import main\nsys.exit(main())\n")
        script.chmod(0o755)

    def test(self, tests: list[str], limit: float, *more: str) -> tuple[int, str]:
        """Run tests; returns the exit status of pytest, that of SIGKILL if it takes too long, and what it wrote."""
        preload = ("torch",) if any(it.startswith(_WITH_TORCH) for it in tests) else ()
        if preload not in self._servers:
            command = [str(self.python), "-c", _SERVER, *preload]
            env = {**os.environ, "PATH": f"{self.python.parent}:{os.environ['PATH']}"}
            pipe = subprocess.PIPE
            self._servers[preload] = subprocess.Popen(
                command, cwd=self.root, env=env, stdin=pipe, stdout=pipe, text=True
            )
        server, out = self._servers[preload], self.root.with_suffix(".out")
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([str(out), "-q", *_LEFT_OUT, *more, *tests]) + "\n")
        server.stdin.flush()
        timer = threading.Timer(limit, os.killpg, (int(server.stdout.readline()), signal.SIGKILL))
        timer.start()
        code = int(server.stdout.readline())
        timer.cancel()
        return code, out.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End the processes that tests are forked from."""
        for server in self._servers.values():
            server.communicate()

    def tests_of(self, fault: Fault) -> list[str]:
        """Its tests where they are now: in their file or another one; the whole file if a test is gone."""
        found: list[str] = []
        for test in fault["tests"]:
            file, _, name = test.partition("::")
            files = [self.root / file, *sorted((self.root / "tests").rglob("test_*.py"))]
            has = [it for it in files if it.exists() and name and f"def {name}(" in it.read_text(encoding="utf-8")]
            if has:
                found.append(f"{has[0].relative_to(self.root)}::{name}")
            elif (self.root / file).exists():
                found.append(file)
        return found

    def place(self, fault: Fault) -> tuple[Path, re.Match[str]] | None:
        """The file and the text that a fault replaces; None unless there is exactly one."""
        pattern = re.compile(r"[ ]*\n\s*".join(re.escape(line.strip()) for line in fault["old"].strip().split("\n")))
        files = [(path, path.read_text(encoding="utf-8")) for path in sorted((self.root / "src").rglob("*.py"))]
        found = [(path, match) for path, text in files for match in pattern.finditer(text)]
        if len(found) > 1:
            found = [it for it in found if _function(it[1]) == fault["where"]]
        return found[0] if len(found) == 1 else None

    def plant(self, fault: Fault, limit: float) -> tuple[str, str]:
        """Whether the tests find a fault, and why it is believed."""
        tests, place = self.tests_of(fault), self.place(fault)
        if place is None or not tests:
            return "not plantable", "no tests" if place else "the text is not there, or not once"
        path, match = place
        line = match.string[match.string.rfind("\n", 0, match.start()) + 1 :]
        margin = line[: len(line) - len(line.lstrip())]
        new = fault["new"].strip("\n").replace("\n", "\n" + margin)
        self._write(path, match.string[: match.start()] + new + match.string[match.end() :])
        try:
            code, out = self.test(tests, limit, "-x")
        finally:
            self._write(path, match.string)
        failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", out, re.MULTILINE)
        why = (
            failed[0][:160]
            if failed
            else "no answer within the limit"
            if code == -signal.SIGKILL
            else f"exit status {code}"
        )
        return "missed" if code == 0 else "found", "" if code == 0 else why

    def _write(self, path: Path, text: str) -> None:
        """Write a source file; what Python has compiled of it in the same second does not count."""
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()


def _function(match: re.Match[str]) -> str:
    """The qualified name of the function, or class, that a text is in."""
    names: list[str] = []
    line = match.string.count("\n", 0, match.start()) + 1
    body: list[ast.stmt] = ast.parse(match.string).body
    while inside := [it for it in body if isinstance(it, _NAMED) and it.lineno <= line <= (it.end_lineno or 0)]:
        names.append(inside[0].name)
        body = inside[0].body
    return ".".join(names)


def main() -> int:
    """Plant the faults, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="ROOM", default="", help="the faults of this room")
    parser.add_argument("--again", metavar="FILE", type=Path, help="those that a result file of another time has found")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="so many at a time")
    parser.add_argument("--limit", metavar="SECONDS", type=float, default=120.0, help="for one; a hang counts as found")
    parser.add_argument("--list", metavar="FILE", type=Path, default=HERE / "tests/faults.toml")
    parser.add_argument("--tree", metavar="FOLDER", type=Path, default=HERE, help="the working tree to copy")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("faults.json"), help="the result file")
    parser.add_argument("--unchecked", action="store_true", help="believe that the tests pass without a fault")
    options = parser.parse_args()
    faults: list[Fault] = tomllib.loads(options.list.read_text(encoding="utf-8"))["fault"]
    faults = [it for it in faults if it["room"].startswith(options.only)]
    if options.again:
        before: list[Result] = json.loads(options.again.read_text(encoding="utf-8"))
        known = {it["what"] for it in before if it["result"] == "found"}
        faults = [it for it in faults if it["what"] in known]
    with tempfile.TemporaryDirectory(prefix="paceline-faults-") as folder:
        copies = [Copy(options.tree, Path(folder, str(number))) for number in range(options.jobs)]
        unsound = set() if options.unchecked else _unsound(copies[0], faults)
        try:
            results = _plant_all(faults, copies, options.limit, unsound, options.out)
        finally:
            for copy in copies:
                copy.close()
    return _tell(results)


def _unsound(copy: Copy, faults: list[Fault]) -> set[str]:
    """The tests that fail without a fault."""
    tests = sorted({test for fault in faults for test in copy.tests_of(fault)})
    out = copy.test(tests, 3600.0, "--tb=no", "-rfE")[1]
    return {it.partition("[")[0] for it in re.findall(r"^(?:FAILED|ERROR) (\S+)", out, re.MULTILINE)}


def _plant_all(faults: list[Fault], copies: list[Copy], limit: float, unsound: set[str], out: Path) -> list[Result]:
    """Plant them, one at a time in each copy; the result file has those that are done."""
    results: list[Result] = []
    free, lock = copies[:], threading.Lock()

    def plant(fault: Fault) -> None:
        with lock:
            copy = free.pop()
        begun = time.monotonic()
        result, why = copy.plant(fault, limit)
        if result == "found" and not unsound.isdisjoint(copy.tests_of(fault)):
            result = "unsound"
        with lock:
            free.append(copy)
            seconds = round(time.monotonic() - begun, 1)
            results.append(
                {"room": fault["room"], "what": fault["what"], "result": result, "why": why, "seconds": seconds}
            )
            out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"{result:14}{seconds:6.1f} s  {fault['room']}: {fault['what']}  {why}", flush=True)

    with ThreadPoolExecutor(len(copies)) as pool:
        list(pool.map(plant, faults))
    return results


def _tell(results: list[Result]) -> int:
    """Print how many of each room were found, and all others by name; returns 1 if there are such."""
    counts = Counter((it["room"], it["result"]) for it in results)
    print(f"\n{'room':32}" + "".join(f"{name:>15}" for name in RESULTS))
    for room in sorted({it["room"] for it in results}):
        print(f"{room:32}" + "".join(f"{counts[room, name]:15}" for name in RESULTS))
    totals = Counter(it["result"] for it in results)
    print(f"{'all':32}" + "".join(f"{totals[name]:15}" for name in RESULTS))
    print(f"{sum(it['seconds'] for it in results):.0f} seconds")
    return int(totals["found"] < len(results))


if __name__ == "__main__":
    sys.exit(main())
