"""What a client does with many hosts: stand-ins of ssh answer for them."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from paceline.backends.remote import crowd as crowds
from paceline.backends.remote.engine import run
from paceline.backends.ssh.preflight import routes_of
from paceline.job.errors import UserError

from .many import ManyHosts, cost

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/uptime"), reason="the stand-ins read /proc")

COUNT = 40
SILENT = 2
LOGS = ("logs", "--all", "--on", "many", "it")
SUBMIT = ("submit", "--on", "many", "--nnodes", str(COUNT), "--name", "it", "--", "/bin/true")


@pytest.fixture
def hosts(tmp_path: Path) -> ManyHosts:
    return ManyHosts(tmp_path, COUNT)


def test_hosts_that_hang_are_named_as_soon_as_nearly_all_others_have_answered(hosts: ManyHosts) -> None:
    submitted = cost(hosts, *SUBMIT)
    assert submitted.exit_code == 0, submitted.said
    assert {host: set(asked) for host, asked in hosts.asked_routes().items()} == {
        host: set(asked) for host, asked in routes_of(hosts.names).items()
    }
    silent = hosts.names[10 : 10 + SILENT]
    hosts.silence(silent)
    refused = cost(hosts, "resubmit", "--on", "many", "it")
    assert refused.exit_code == 2, refused.said
    said = f"job it is LOST, and has not ended on {hosts.names[0]} and {COUNT - SILENT - 1} more; wait for it, or stop"
    assert said in refused.said, refused.said
    for verb, code in (("list",), 0), (("top", "node", "--on", "many"), 0), (("stop", "--on", "many", "it"), 1):
        done = cost(hosts, *verb)
        assert done.exit_code == code, done.said
        for name in silent:  # the limits of tests are a minute
            assert f"cannot reach {name}: no answer within" in done.said
        assert f", and {COUNT - SILENT} others have answered" in done.said
    said = done.said.splitlines()
    assert said[0] == f"paceline: no answer yet from {', '.join(silent)}; waiting", (
        "before what stop has to say at its end"
    )
    assert done.said.count("no answer yet") == 1
    assert hosts.stopped() == set(hosts.names) - set(silent)


def test_stop_asks_each_host_where_the_job_is_and_how_it_has_ended_and_no_more(hosts: ManyHosts) -> None:
    submitted = cost(hosts, *SUBMIT)
    assert submitted.exit_code == 0, submitted.said
    before = sum(hosts.described())
    stopped = cost(hosts, "stop", "--on", "many", "it")
    assert "stopped" in stopped.said
    assert sum(hosts.described()) - before == 2 * COUNT


def test_too_few_open_files_are_told_before_anything_is_started(hosts: ManyHosts) -> None:
    def run(soft: int, hard: int, *verb: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "paceline", *verb], cwd=hosts.folder, env=hosts.env, text=True, check=False,
            capture_output=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        )  # fmt: skip

    refused = run(96, 128, *SUBMIT)
    assert refused.returncode == 2
    assert refused.stderr == (
        f"paceline: connections to {COUNT} hosts need 344 open files, and this process may have 128; "
        "raise its limit (ulimit -Hn), or name at most 9 hosts\n"
    )
    assert not hosts.asked_routes()
    for verb in SUBMIT, ("list",):
        done = run(96, 1024, *verb)
        assert done.returncode == 0, done.stderr
    refused = run(96, 128, "logs", "--on", "many", "it")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "need 344 open files" in refused.stderr


def test_a_bounded_number_of_things_is_done_at_once_and_more_if_these_do_not_come_on() -> None:
    begun: list[int] = []
    over = asyncio.Event()

    async def do(number: int) -> int:
        begun.append(number)
        if len(begun) > 2 * crowds.AT_ONCE:
            over.set()
        await over.wait()
        if number == 7:
            raise UserError("it is seven")
        return 2 * number

    async def look() -> list[int]:
        crowd = crowds.Crowd(range(200), do)
        working = asyncio.ensure_future(crowd.work())
        before = []
        while len(begun) <= 2 * crowds.AT_ONCE:
            await asyncio.sleep(0)
            before.append(len(begun))
        await working
        assert str(crowd.found.pop(7)) == "it is seven"
        assert crowd.found == {number: 2 * number for number in range(200) if number != 7}
        return before

    assert dict.fromkeys(run(look())).keys() >= {crowds.AT_ONCE, 2 * crowds.AT_ONCE}
    assert list(crowds.at_once([3, 7, 5], do)) == [3, 7, 5]


def test_who_takes_longer_than_the_others_is_told_while_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowds, "_NOTICE", 0.02)
    monkeypatch.setattr(crowds, "_LEAST_OVERDUE", 0.01)
    told: set[int] = set()
    is_told = asyncio.Event()

    async def do(number: int) -> int:
        if number in (3, 5):
            await is_told.wait()
        return number

    def notice(overdue: list[int]) -> None:
        told.update(overdue)
        if told >= {3, 5}:
            is_told.set()

    assert crowds.at_once(range(8), do, notice) == {number: number for number in range(8)}


def test_all_lines_of_all_hosts_come(tmp_path: Path) -> None:
    hosts = ManyHosts(tmp_path, COUNT, lines=20)
    run = ("run", "--tee", "all", "--on", "many", "--nnodes", str(COUNT), "--", "/bin/true")
    for verb in run, SUBMIT, (*LOGS, "-f"), LOGS:
        done = cost(hosts, *verb)
        assert done.exit_code == 0, done.said
        shown: dict[str, list[int]] = {}
        for line in done.said.splitlines():
            if found := re.search(r"(h[0-9]+) ([0-9]+)$", line):
                shown.setdefault(found[1], []).append(int(found[2]))
        expected = {name: list(range(20)) for name in hosts.names if verb != SUBMIT}
        assert shown == expected, "none is lost, and each host's keep their order"
