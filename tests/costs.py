"""What tests cost: with `--costs FILE`, CPU and wall seconds of each, and the processes that it started.

    python -m pytest -n 2 --costs costs.jsonl tests/cli
    python -m tests.costs costs.jsonl [PAGE]                the table again, or into this page of the docs

Each process of pytest enters a control group of its own, so all that a test starts is counted, detached processes too;
one that lives on is counted with later tests. That needs root and cgroups: without, what ended and was waited for is
counted, and the table says so. The processes are those that the test started itself, not what these start. Numbers of
all processes of the machine since the beginning are in the last line; on a quiet machine they are those of the tests.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}


class Group:
    """A control group that this process is in, of version 1 or 2; none where that is not allowed."""

    def __init__(self) -> None:
        self._left = self.path = None
        for line in _read("/proc/self/cgroup").splitlines():
            _, controllers, name = line.split(":", 2)
            root = Path("/sys/fs/cgroup", controllers if (first := "cpuacct" in controllers.split(",")) else "")
            if not first and controllers:
                continue
            path = root / name.lstrip("/") / f"paceline-tests-{os.getpid()}"
            try:
                path.mkdir()
                (path / "cgroup.procs").write_text(str(os.getpid()))
            except OSError:
                with contextlib.suppress(OSError):
                    path.rmdir()
                continue
            self.path, self._left = path, path.parent
            return

    def cpu(self) -> float:
        """Seconds of CPU until now."""
        if self.path is None:
            own, children = (resource.getrusage(it) for it in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
            return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
        if (self.path / "cpuacct.usage").exists():
            return int(_read(self.path / "cpuacct.usage")) / 1e9
        return int(_read(self.path / "cpu.stat").split()[1]) / 1e6

    def leave(self) -> None:
        """Go back, and remove it unless something still runs in it."""
        if self.path is not None and self._left is not None:
            with contextlib.suppress(OSError):
                (self._left / "cgroup.procs").write_text(str(os.getpid()))
                self.path.rmdir()


def _read(path: str | Path) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


def _forks() -> int:
    """Processes and threads that this machine has started since it is on."""
    return next((int(line.split()[1]) for line in _read("/proc/stat").splitlines() if line.startswith("processes")), 0)


class Costs:
    """The plugin: writes one line of JSON for each test."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.group = Group()
        self.started = 0
        self.outcome = ""
        self.forks = _forks()
        sys.addaudithook(self._watch)

    def _watch(self, event: str, args: tuple[object, ...]) -> None:
        self.started += event in _STARTS

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began, cpu, self.started, self.outcome = time.monotonic(), self.group.cpu(), 0, "passed"
        try:
            return (yield)
        finally:
            line = {"id": item.nodeid, "wall": time.monotonic() - began, "cpu": self.group.cpu() - cpu}
            line = {name: value if name == "id" else round(float(value), 3) for name, value in line.items()}
            more = {"started": self.started, "outcome": self.outcome, "load": round(os.getloadavg()[0], 1)}
            with self.out.open("a") as file:
                file.write(json.dumps({**line, **more, "all": self.group.path is not None}) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.outcome = report.outcome

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("costs")
        for line in table(self.out):
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"started on this machine meanwhile, threads too: {_forks() - self.forks}")

    def pytest_unconfigure(self) -> None:
        self.group.leave()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--costs FILE`."""
    parser.addoption("--costs", metavar="FILE", help="write what each test costs to this file, and print a table")


def pytest_configure(config: pytest.Config) -> None:
    """Begin; the process that only gives tests to workers empties the file and prints the table."""
    if given := config.getoption("--costs"):
        out = Path(config.invocation_params.dir, given)
        if not hasattr(config, "workerinput"):
            out.write_text("")
        config.pluginmanager.register(Costs(out), "costs of tests")


def table(path: Path, depth: int = 3) -> list[str]:
    """Sums by folder, the most expensive first, as a table of Markdown."""
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * 4)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for key in ("/".join(line["id"].partition("::")[0].split("/")[:-1][:depth]), "all"):
            for place, value in enumerate((1, line["cpu"], line["wall"], line["started"])):
                sums[key][place] += value
    rows = ["| folder | tests | CPU s | wall s | processes |", "|---|---:|---:|---:|---:|"]
    for key, (count, cpu, wall, started) in sorted(sums.items(), key=lambda it: -it[1][1]):
        rows.append(f"| {key} | {count:.0f} | {cpu:.0f} | {wall:.0f} | {started:.0f} |")
    if not all(line["all"] for line in lines):
        rows.append("\nCPU: without detached processes, as no control group could be made.")
    return rows


def write(rows: list[str], page: Path) -> None:
    """Put the table between the two marks of a page."""
    before, mark, rest = page.read_text().partition("<!-- costs -->\n")
    _, end, after = rest.partition("<!-- end of costs -->\n")
    page.write_text("".join([before, mark, *(f"{row}\n" for row in rows), end, after]))


if __name__ == "__main__":
    found = table(Path(sys.argv[1]))
    print(*found, sep="\n")
    if sys.argv[2:]:
        write(found, Path(sys.argv[2]))
