"""What a client does with many hosts: stand-ins of ssh answer for them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from paceline.backends.ssh.sample import peers

from .many import ManyHosts, cost

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/uptime"), reason="the stand-ins read /proc")

COUNT = 100
SILENT = 4
SUBMIT = ("submit", "--on", "many", "--nnodes", str(COUNT), "--name", "it", "--", "/bin/true")


@pytest.fixture
def hosts(tmp_path: Path) -> ManyHosts:
    return ManyHosts(tmp_path, COUNT)


def test_hosts_that_hang_are_named_as_soon_as_nearly_all_others_have_answered(hosts: ManyHosts) -> None:
    submitted = cost(hosts, *SUBMIT)
    assert submitted.exit_code == 0, submitted.said
    assert {host: set(asked) for host, asked in hosts.asked_routes().items()} == {
        host: set(asked) for host, asked in peers(hosts.names).items()
    }
    silent = hosts.names[10 : 10 + SILENT]
    hosts.silence(silent)
    for verb, code in (("list",), 0), (("top", "node", "--on", "many"), 0), (("stop", "--on", "many", "it"), 1):
        done = cost(hosts, *verb)
        assert done.exit_code == code, done.said
        for name in silent:  # the limits of tests are a minute
            assert f"cannot reach {name}: no answer within" in done.said
        assert f", in which {COUNT - SILENT} others have answered" in done.said
        assert done.threads < COUNT, "they do not grow with the hosts"
    assert hosts.stopped() == set(hosts.names) - set(silent)


def test_too_few_open_files_are_told_before_anything_is_started(hosts: ManyHosts) -> None:
    def run(soft: int, hard: int, *verb: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "paceline", *verb], cwd=hosts.folder, env=hosts.env, text=True, check=False,
            capture_output=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        )  # fmt: skip

    refused = run(128, 256, *SUBMIT)
    assert refused.returncode == 2
    assert refused.stderr == (
        f"paceline: connections to {COUNT} hosts need 464 open files, and this process may have 256; "
        "raise its limit (ulimit -Hn), or name at most 48 hosts\n"
    )
    assert not hosts.asked_routes()
    for verb in SUBMIT, ("list",):
        done = run(128, 1024, *verb)
        assert done.returncode == 0, done.stderr
