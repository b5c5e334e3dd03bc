"""A host whose logins hang after authentication: every verb goes on without it, names it, and keeps its time."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import pytest
from tests.conftest import GENEROUS, eventually

from .test_faults import FOREVER, submitted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .lab import Client

LOOK, ACT = 20.0, 25.0  # seconds; a host that is well has to log in and answer within that on a busy machine
SILENT = "cannot reach h2: no answer within"


@pytest.fixture
def silent(client: Client) -> Iterator[Client]:
    """A client with a job on h1 and h2 that runs; then logins hang on h2."""
    client.settings(hosts=["h1", "h2"])
    client.script(FOREVER)
    submitted(client, "2", "script.py")
    eventually(lambda: client.json("get", "it")["state"] == "RUNNING", "it runs")
    client.hang_up()
    client.lab.hosts[1].hang_logins()
    client.env.update(PACELINE_LOOK_TIMEOUT=f"{LOOK}s", PACELINE_ACT_TIMEOUT=f"{ACT}s")
    yield client
    client.lab.hosts[1].heal_logins()
    client.env.update(PACELINE_LOOK_TIMEOUT="60s", PACELINE_ACT_TIMEOUT="60s")
    client.hang_up()
    forget(client)
    client("delete", "--force", "--on", "lab", "it")


def forget(client: Client) -> None:
    """Let the next verb know nothing of the hosts that were silent."""
    (client.home / "silent.json").unlink(missing_ok=True)


def test_every_look_shows_the_others_and_names_it(silent: Client) -> None:
    for args in (
        ("list", "--on", "lab"),
        ("get", "it"),
        ("logs", "it"),
        ("logs", "--all", "it"),
        ("events", "it"),
        ("top", "node", "--on", "lab"),
        ("top", "job", "--on", "lab"),
        ("check", "--on", "lab"),
        ("data", "list", "--on", "lab"),
    ):
        if args[0] in ("list", "logs", "check"):  # the others know of it from these
            forget(silent)
        done = silent(*args)
        assert SILENT in done.stderr + done.stdout, (args, done)
        assert done.returncode == (1 if args[0] == "check" else 0), (args, done)
        if args[0] in ("list", "get"):
            assert "LOST" in done.stdout
        if args[0] == "logs":
            assert "here 2" in done.stdout
        if args[:2] in (("top", "node"), ("check", "--on")):
            assert "h1" in done.stdout
        if args[0] == "events":
            assert "started" in done.stdout


def test_its_second_silence_costs_nothing_and_a_look_finds_it_again(silent: Client) -> None:
    began = time.monotonic()
    silent("list", "--on", "lab")
    assert time.monotonic() - began >= LOOK
    done = silent("list", "--on", "lab")
    assert f"no answer within {LOOK:g} s " in done.stderr and "none now; it is waited for again" in done.stderr
    assert "s ago" in done.stderr
    silent.lab.hosts[1].heal_logins()
    silent.hang_up()
    eventually(
        lambda: [job["state"] for job in silent.json("list", "--on", "lab")] == ["RUNNING"],
        "it is seen again",
    )
    assert json.loads((silent.home / "silent.json").read_text()) == {}


def test_a_login_that_takes_longer_than_a_look_is_there_for_the_next_verb(client: Client) -> None:
    client.settings(hosts=["h1"])
    submitted(client, "1", client.script("pass"))
    assert client("wait", "it").returncode == 0
    client.hang_up()
    client.lab.hosts[0].delay_logins(4)  # each of them, also where a connection is kept
    client.env["PACELINE_LOOK_TIMEOUT"] = "2s"
    said = client("list", "--on", "lab").stderr
    assert "within 2 s" in said and "set look_timeout below [defaults]; the login goes on for the next command" in said
    for _ in range(2):
        eventually(lambda: [job["state"] for job in client.json("list", "--on", "lab")] == ["SUCCEEDED"], "it is seen")
    assert client("wait", "it").returncode == 0


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_job_that_can_use_it_waits_for_it_when_it_is_back(client: Client, nodes: str) -> None:
    client.settings(hosts=["h1", "h2"])
    second = client.lab.hosts[1]
    second.power_off()
    client("list", "--on", "lab")
    assert list(json.loads((client.home / "silent.json").read_text())) == ["h2"]
    second.power_on()
    second.delay_logins(3)  # which is longer than a job waits for it that the other hosts can take
    submitted(client, nodes, client.script("pass"))
    assert client.run_directory(second, "it").exists()
    assert json.loads((client.home / "silent.json").read_text()) == {}  # no verb waits for it only briefly any more
    done = client("wait", "it")
    assert (done.returncode, "h2" in done.stderr) == (0, False), done.stderr


def test_an_elastic_job_asks_a_host_that_is_still_down_only_whether_it_is_back(client: Client) -> None:
    client.settings(hosts=["h1", "h2"])
    client.env.update(PACELINE_LOOK_TIMEOUT="8s", PACELINE_ACT_TIMEOUT="8s")
    client.lab.hosts[1].hang(logins=False)
    assert "no answer within 8 s" in client("list", "--on", "lab").stderr
    done = client("submit", "--on", "lab", "--nnodes", "1:2", "--name", "it", client.script("pass"))
    assert done.returncode == 0 and re.search(r"cannot reach h2: .* timed out", done.stderr), done.stderr
    assert client("wait", "it").returncode == 0


def test_a_job_that_is_run_again_while_a_host_is_away(client: Client) -> None:
    script = client.script("pass")
    for name, flags in (("it", ()), ("own", ("--sync-mode", "snapshot"))):
        client.succeeds("submit", "--on", "lab", "--nnodes", "2", "--name", name, *flags, script)
        assert client("wait", name).returncode == 0
    wider = client("resubmit", "--on", "lab", "--nnodes", "3", "own")
    assert (wider.returncode, wider.stderr) == (
        2, "paceline: --nnodes 3, but the code of own is on h1, h2 alone; ask for fewer\n",
    )  # fmt: skip
    client.hang_up()
    client.lab.hosts[1].power_off()
    refused = client("resubmit", "--on", "lab", "own")
    assert refused.returncode == 2
    assert "h2 may have checkpoints of own and cannot take the job now; try later" in refused.stderr
    again = client("resubmit", "--on", "lab", "it")
    assert "h2 cannot take the job now; what it has of it is not looked at" in again.stderr
    assert (client("wait", again.stdout.strip()).returncode, again.returncode) == (0, 0), again.stderr


def test_wait_keeps_its_time(silent: Client) -> None:
    silent.env["PACELINE_LOOK_TIMEOUT"] = f"{2 * GENEROUS:g}s"  # which is longer than a command may take here
    done = silent("wait", "--timeout", "2s", "it")
    assert done.returncode == 124
    assert "did not end within 2s" in done.stderr


@pytest.mark.parametrize("verb", [("stop",), ("stop", "--now"), ("delete", "--force")])
def test_what_can_be_reached_is_ended(silent: Client, verb: tuple[str, ...]) -> None:
    done = silent(*verb, "it")
    assert SILENT in done.stderr or "what h2 has of it is left there" in done.stderr
    # h2 is told by h1, although nobody can log in there
    eventually(lambda: not any(host.processes() for host in silent.lab.hosts[:1]), "nothing runs on h1")


def test_the_limits_of_the_settings(client: Client) -> None:
    client.lab.hosts[1].hang_logins()
    for name in ("PACELINE_LOOK_TIMEOUT", "PACELINE_ACT_TIMEOUT"):
        del client.env[name]
    client.write_settings({"lab": {"hosts": ["h1", "h2"]}}, defaults={"look_timeout": "15m"})
    done = client("list", "--on", "lab", env={**client.env, "PACELINE_LOOK_TIMEOUT": "2s"})
    assert "no answer within 2 s" in done.stderr
    forget(client)
    client.write_settings({"lab": {"hosts": ["h1", "h2"]}}, defaults={"look_timeout": "3s", "act_timeout": "4s"})
    assert "no answer within 3 s" in client("list", "--on", "lab").stderr
    assert "no answer within 4 s" in client("check", "--on", "lab").stdout
    forget(client)
    client.write_settings({"lab": {"hosts": ["h1", "h2"]}})
    assert "no answer within 5 s" in client("list", "--on", "lab").stderr
    client.lab.hosts[1].heal_logins()  # the connection of the one that hung is not used again
    forget(client)
    client.env["PACELINE_LOOK_TIMEOUT"] = "60s"
    done = client("list", "--on", "lab")
    assert (done.returncode, done.stderr.count("cannot reach")) == (0, 0), done.stderr
    del client.env["PACELINE_LOOK_TIMEOUT"]
    client.write_settings({"lab": {"hosts": ["h1", "h2"]}}, defaults={"look_timeout": "soon"})
    done = client("list", "--on", "lab")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "defaults.look_timeout" in done.stderr
