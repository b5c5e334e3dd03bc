"""Which tests run: each target of the Makefile is complete for what it needs; docs/testing.md lists them."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
NIGHTLY = Path(__file__).with_name("nightly.txt")
_quick = threading.Event()  # a test is running that is to start no process


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--quick`."""
    parser.addoption(
        "--quick", action="store_true", help="only tests that start no process; others skip at their first"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Watch for processes that are started."""
    if config.getoption("--quick"):
        sys.addaudithook(_watch)


def _watch(event: str, args: tuple[object, ...]) -> None:
    if event in _STARTS and _quick.is_set() and threading.current_thread() is threading.main_thread():
        pytest.skip("starts a process, so it is not quick")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Know when a test runs."""
    if item.config.getoption("--quick"):
        _quick.set()
    try:
        return (yield)
    finally:
        _quick.clear()


def examples(by_day: int, at_night: int) -> int:
    """How many random examples a test with the marker `soak` takes."""
    return at_night if "PACELINE_SOAK" in os.environ else by_day


def nightly() -> tuple[str, ...]:
    """How the names of tests begin that are nightly without the marker."""
    return tuple(line for line in NIGHTLY.read_text().splitlines() if line and not line.startswith("#"))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for: nightly tests, unless named or marked; with `--quick` the command line."""
    beginnings = nightly()
    for item in items:
        if item.nodeid.startswith(beginnings):
            item.add_marker("nightly")
    named = any("::" in argument or argument.endswith(".py") for argument in config.args)
    asked = "nightly" in config.option.markexpr or named
    left_out = [
        item
        for item in items
        if (not asked and item.get_closest_marker("nightly"))
        or (config.getoption("--quick") and "paceline" in getattr(item, "fixturenames", ()))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]
