"""Plant faults in a copy of the source, one at a time, and see whether the tests find them.

`tests/faults.toml` has the faults. Text that stands once in `src` is replaced in whatever file it is; text that stands
there more often, in the function named. A test counts in whatever file it is; if it is gone, its whole file is run.
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

HERE = Path(__file__).parents[1]
RESULTS = ("found", "missed", "not plantable", "unsound")  # the last: the tests fail without the fault as well
_LEFT_OUT = [f"-pno:{name}" for name in ("cacheprovider", "anyio", "xdist")]  # plugins that take long to import
_WITH_TORCH = ("tests/train/", "tests/horovod/")
# Each run of pytest is forked from a process that has imported what takes long, and nothing of paceline.
_SERVER = """
import json, os, sys
import pytest, pytest_timeout
from hypothesis import Phase, settings
settings.register_profile("first", phases=(Phase.explicit, Phase.reuse, Phase.generate))
settings.load_profile("first")  # the first example that fails is enough
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
    """An entry of the list."""

    room: str
    what: str
    where: str  # the qualified name of the function
    old: str
    new: str
    tests: list[str]  # FILE::TEST or FILE, the cheapest first


class Copy:
    """A copy of a working tree, with an environment of its own that imports paceline from there."""

    def __init__(self, tree: Path, root: Path) -> None:
        self._root, self._python = root, root / ".venv/bin/python"
        self._servers: dict[tuple[str, ...], subprocess.Popen[str]] = {}
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, stdout=subprocess.PIPE, check=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (tree / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / name, root / name)
        venv.create(root / ".venv")
        purelib = sysconfig.get_path("purelib", vars={"base": str(root / ".venv")})
        packages = [it for it in sys.path if it.endswith("site-packages")]
        Path(purelib, "copy.pth").write_text("\n".join([str(root / "src"), *packages]), encoding="utf-8")
        script = self._python.with_name("paceline")
        script.write_text(f"#!{self._python}\nimport sys\nfrom paceline.cli.main import main\nsys.exit(main())\n")
        script.chmod(0o755)
        self._source = {path: path.read_text(encoding="utf-8") for path in sorted((root / "src").rglob("*.py"))}
        self._tests = {path: path.read_text(encoding="utf-8") for path in sorted((root / "tests").rglob("test_*.py"))}

    def test(self, tests: list[str], limit: float, *more: str) -> tuple[int, str]:
        """Run tests; returns the exit status of pytest, that of SIGKILL if it takes too long, and what it wrote."""
        preload = ("torch",) if any(it.startswith(_WITH_TORCH) for it in tests) else ()
        if preload not in self._servers:
            env = {**os.environ, "PATH": f"{self._python.parent}:{os.environ['PATH']}"}
            self._servers[preload] = subprocess.Popen(
                [str(self._python), "-c", _SERVER, *preload], cwd=self._root, env=env, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        server, out = self._servers[preload], self._root.with_suffix(".out")
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps([str(out), "-q", *_LEFT_OUT, *more, *tests]), file=server.stdin, flush=True)
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
        """Its tests where they are now."""
        found: list[str] = []
        for test in fault["tests"]:
            file, _, name = test.partition("::")
            files = sorted(self._tests, key=lambda path: path != self._root / file)
            there = [path for path in files if name and f"def {name}(" in self._tests[path]]
            if there:
                found.append(f"{there[0].relative_to(self._root)}::{name}")
            elif self._root / file in self._tests:
                found.append(file)
        return list(dict.fromkeys(found))

    def plant(self, fault: Fault, limit: float) -> tuple[str, str]:
        """Whether the tests find a fault, and why it is believed."""
        lines = [re.escape(line.strip()) for line in fault["old"].strip().split("\n")]
        pattern, tests = re.compile(r"[ ]*\n\s*".join(lines)), self.tests_of(fault)
        found = [(path, match) for path, text in self._source.items() for match in pattern.finditer(text)]
        if len(found) > 1:
            found = [it for it in found if _function(it[1]) == fault["where"]]
        if len(found) != 1 or not tests:
            return "not plantable", f"the text is there {len(found)} times" if tests else "its tests are gone"
        path, match = found[0]
        text, (begin, end) = match.string, match.span()
        margin = re.match(r"[ ]*", text[text.rfind("\n", 0, begin) + 1 :])
        new = fault["new"].strip("\n").replace("\n", f"\n{margin.group() if margin else ''}")
        _write(path, text[:begin] + new + text[end:])
        try:
            code, out = self.test(tests, limit, "-x")
        finally:
            _write(path, text)
        failed = re.findall(r"^(?:FAILED|ERROR) (.*)$", out, re.MULTILINE)
        why = failed[0][:160] if failed else "no end within the limit" if code < 0 else f"exit status {code}"
        return ("missed", "") if code == 0 else ("found", why)


def _write(path: Path, text: str) -> None:
    """Write a source file; what Python has compiled of it in the same second is not used."""
    path.write_text(text, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def _function(match: re.Match[str]) -> str:
    """The qualified name of the function, or class, that a text is in."""
    names, line = [], match.string.count("\n", 0, match.start()) + 1
    body: list[ast.stmt] = ast.parse(match.string).body
    named = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    while inside := [it for it in body if isinstance(it, named) and it.lineno <= line <= (it.end_lineno or 0)]:
        names.append(inside[0].name)
        body = inside[0].body
    return ".".join(names)


def _plant_all(faults: list[Fault], copies: list[Copy], limit: float, out: Path) -> Counter[tuple[str, str]]:
    """Plant faults, one at a time in each copy; returns how many of each room have which result."""
    tests = sorted({test for fault in faults for test in copies[0].tests_of(fault)})
    failing = re.findall(r"^(?:FAILED|ERROR) ([^ [\n]+)", copies[0].test(tests, 3600.0, "-rfE")[1], re.MULTILINE)
    results: list[dict[str, object]] = []
    free, lock = copies[:], threading.Lock()

    def plant(fault: Fault) -> None:
        with lock:
            copy = free.pop()
        begun = time.monotonic()
        result, why = copy.plant(fault, limit)
        result = "unsound" if result == "found" and {*failing} & {*copy.tests_of(fault)} else result
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
    return Counter((str(it["room"]), str(it["result"])) for it in results)


def main() -> int:
    """Plant the faults, and print a table; returns 1 if one is not found."""
    parser = argparse.ArgumentParser(description="See whether the tests find the faults of tests/faults.toml.")
    parser.add_argument("--only", metavar="ROOM", default="", help="those of rooms whose names begin so")
    parser.add_argument("--again", metavar="FILE", type=Path, help="those that a result file of another time has found")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="so many at a time")
    parser.add_argument("--limit", metavar="SECONDS", type=float, default=120.0, help="for each; a hang is found")
    parser.add_argument("--tree", metavar="FOLDER", type=Path, default=HERE, help="the working tree to copy")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("faults.json"), help="the result file")
    options = parser.parse_args()
    faults: list[Fault] = tomllib.loads((HERE / "tests/faults.toml").read_text(encoding="utf-8"))["fault"]
    faults = [it for it in faults if it["room"].startswith(options.only)]
    if options.again:
        before = json.loads(options.again.read_text(encoding="utf-8"))
        known = {it["what"] for it in before if it["result"] == "found"}
        faults = [it for it in faults if it["what"] in known]
    with tempfile.TemporaryDirectory(prefix="paceline-faults-") as folder:
        copies = [Copy(options.tree, Path(folder, str(number))) for number in range(options.jobs)]
        try:
            counts = _plant_all(faults, copies, options.limit, options.out)
        finally:
            for copy in copies:
                copy.close()
    print(f"{'':32}" + "".join(f"{name:>15}" for name in RESULTS))
    for room in [*sorted({room for room, _ in counts}), ""]:
        numbers = [sum(n for it, n in counts.items() if it[1] == name and room in ("", it[0])) for name in RESULTS]
        print(f"{room or 'all':32}" + "".join(f"{number:15}" for number in numbers))
    return int(any(result != "found" for _, result in counts))


if __name__ == "__main__":
    sys.exit(main())
