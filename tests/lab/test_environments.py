"""`--environment` on hosts over ssh, which reach no package index: wheels come from the client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.backends.environments.wheels import wheel
from tests.conftest import eventually

if TYPE_CHECKING:
    from .lab import Client

SHOWS = "import os, first; print(first.VERSION, os.environ['RANK'], os.environ['VIRTUAL_ENV'], flush=True)"


@pytest.fixture
def three(client: Client) -> Client:
    """A client of three hosts, in whose own index is a package."""
    client.settings(hosts=["h1", "h2", "h3"])
    wheel(client.folder / "made", "first", "1.4", needs=("second",))
    wheel(client.folder / "made", "second")
    (client.folder / "needs.txt").write_text("first\n")
    client.env.update(PIP_NO_INDEX="1", PIP_FIND_LINKS=str(client.folder / "made"))
    return client


def built(client: Client, host: int) -> list[str]:
    """The environments of a host that are whole."""
    folder = client.lab.hosts[host].home / client.root / "environments"
    return sorted(path.parent.name for path in folder.glob("*/environment.json"))


def test_all_hosts_get_it_at_once_and_keep_it(three: Client) -> None:
    asked = ("--on", "lab", "--nnodes", "2", "--environment", "needs.txt", "--name", "it-", three.script(SHOWS))
    looks = three.json("check", "--on", "lab", "--environment", "needs.txt")
    assert [(it["host"], it["origin"]) for it in looks] == [(f"h{n}", "wheels from here") for n in (1, 2, 3)]
    done = three.succeeds("run", *asked)
    assert done.stdout.splitlines()[0].startswith("1.4 0 ")
    assert "installing needs.txt on h1, h2" in done.stderr
    assert built(three, 0) == built(three, 1) != []
    assert built(three, 2) == []
    again = three.succeeds("run", *asked)
    assert "installing" not in again.stderr


def test_a_host_that_joins_gets_it_too(three: Client) -> None:
    script = three.script(f"{SHOWS}\nimport threading; threading.Event().wait()")
    three.settings(hosts=["h1"])
    three.succeeds("submit", "--on", "lab", "--nnodes", "1:2", "--environment", "needs.txt", "--name", "it", script)
    eventually(lambda: built(three, 0), "h1 has it")
    eventually(lambda: "1.4 0 " in three("logs", "--on", "lab", "it").stdout, "the job runs on h1", 0.5)
    three.settings(hosts=["h1", "h2"])
    three.succeeds("scaleout", "--on", "lab", "it", "h2")
    assert built(three, 1) == built(three, 0)
    eventually(lambda: "1.4 1 " in three("logs", "--on", "lab", "it", "-i", "1").stdout, "the job runs on h2", 0.5)
    three.succeeds("stop", "--on", "lab", "--now", "it")


def test_one_host_that_cannot_have_it(three: Client) -> None:
    """Nothing starts anywhere."""
    place = three.lab.hosts[1].home / three.root
    place.mkdir(parents=True, exist_ok=True)
    (place / "environments").write_text("in the way")
    script = three.script(SHOWS)
    done = three("run", "--on", "lab", "--nnodes", "2", "--environment", "needs.txt", "--name", "it", script)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("paceline: h2: ")
    assert three("get", "--on", "lab", "it").returncode == 2
    (place / "environments").unlink()
