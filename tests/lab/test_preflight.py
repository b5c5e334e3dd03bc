"""What is tried on all hosts before a job starts there, and `paceline check --on`, which tells of it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import eventually

from paceline.backends.check.findings import clock_finding, differing
from paceline.backends.check.report import Clock, Finding
from paceline.backends.limits import Limits
from paceline.backends.remote import connection
from paceline.backends.ssh.survey import MOST_FOR_PAIRS, rounds
from paceline.node.host import routes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .lab import Client, Host

PRINT = "import socket; print(socket.gethostname())"
TINY_KIB = 8192  # of a tiny disk


@pytest.fixture
def pair(client: Client) -> Client:
    """A client of the first two hosts."""
    client.settings(hosts=["h1", "h2"])
    return client


def submit(client: Client, *flags: str) -> tuple[int, list[str]]:
    """The exit code, and what was said but for the last two lines of a job that was started."""
    done = client("submit", "--on", "lab", "--name", "job", *flags, client.script(PRINT))
    lines = done.stderr.splitlines()
    assert all(line.startswith("paceline: ") for line in lines), done.stderr
    if done.returncode == 0:
        assert client("wait", "--on", "lab", "job").returncode == 0
        lines = lines[:-2]
    lines = [line for line in lines if not line.endswith("…")]  # how far it is
    return done.returncode, [line.removeprefix("paceline: ") for line in lines]


def check(client: Client) -> tuple[int, dict[str, Any]]:
    done = client("check", "--on", "lab", "-o", "json")
    return done.returncode, json.loads(done.stdout)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def wrapper(client: Client, name: str, text: str) -> str:
    """An interpreter of its own for the hosts; `$HOST` is the host that runs it."""
    path = client.folder / name
    path.write_text(f"#!/bin/sh\nHOST=$(hostname)\n{text}\n")
    path.chmod(0o755)
    return str(path)


@contextlib.contextmanager
def without_route(source: Host, target: Host) -> Iterator[None]:
    """What is sent from a host to another one gets lost."""
    route = ("ip", "-n", source.namespace, "route")
    run(*route, "add", "blackhole", target.address)
    try:
        yield
    finally:
        run(*route, "del", "blackhole", target.address)


@contextlib.contextmanager
def tiny_disk(folder: Path) -> Iterator[None]:
    """A disk at a folder: paceline's own file takes 2.1 MiB of it."""
    folder.mkdir(parents=True, exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={TINY_KIB}k,mode=700", "paceline-test", str(folder))
    try:
        yield
    finally:
        run("umount", "--lazy", str(folder))


# A job


def test_a_host_that_cannot_be_reached_is_told_and_left_out(pair: Client) -> None:
    pair.lab.hosts[0].lose_route()
    code, said = submit(pair)
    assert code == 0
    assert len(said) == 1
    assert said[0].startswith("cannot reach h1: ")
    assert said[0].endswith("; try: ssh h1")
    code, said = submit(pair, "--nnodes", "2", "--name", "two")
    assert (code, len(said)) == (2, 1)
    assert said[0].startswith("cannot reach h1: ")


def test_all_that_is_wrong_with_the_hosts_is_told_at_once(pair: Client) -> None:
    python = wrapper(
        pair,
        "python",
        '[ "$HOST" = h1 ] && exec python3 -c "import sys; sys.version_info = (3, 8, 1); $2"\nexit 127',
    )
    pair.settings(hosts=["h1", "h2", "nowhere"], python=python)
    code, said = submit(pair)
    assert code == 2
    assert len(said) == 3
    assert "is Python 3.8.1, too old; name Python 3.9 or newer" in said[0]
    assert said[0].startswith("h1: ")
    assert said[1].startswith("no Python on h2 (")
    assert said[2].startswith("cannot reach nowhere: ")


FRAMEWORK = """
if [ "$HOST" = h2 ]; then shift; exec python3 -c "
import sys
sys.path.insert(0, '$FOLDER')
$1"; fi
exec python3 "$@"
"""


def test_a_host_without_the_framework_is_left_out(pair: Client) -> None:
    pair.script("", "site/jax/__init__.py")
    text = FRAMEWORK.replace("$FOLDER", str(pair.folder / "site"))
    pair.settings(hosts=["h1", "h2"], python=wrapper(pair, "python", text))
    code, said = submit(pair, "--framework", "jax", "--nnodes", "2")
    assert (code, len(said)) == (2, 1)
    assert said[0].startswith("h1: jax is not installed for /")
    assert "--ssh-python" in said[0]
    code, seen = check(pair)
    assert code == 0
    assert [host["packages"]["jax"] for host in seen["hosts"]] == [None, {"version": None, "build": None}]
    texts = [f"{finding['what']}; {finding['do']}" for finding in seen["findings"]]
    assert "jax is not the same everywhere: none on h1, unknown on h2; install the same version on all of them" in texts
    assert any(text.startswith("h1: ") and "has no framework" in text for text in texts)
    assert not any(text.startswith("h2: ") for text in texts)


EACH_ITS_OWN = """
shift; exec python3 -c "
import sys
sys.path.insert(0, '$FOLDER/$HOST')
$1"
"""


def test_other_versions_of_a_framework_are_refused(pair: Client) -> None:
    for number, name in enumerate(("h1", "h2"), 1):
        pair.script("", f"site/{name}/jax/__init__.py")
        about = f"Metadata-Version: 2.1\nName: jax\nVersion: 0.{number}\n"
        pair.script(about, f"site/{name}/jax-0.{number}.dist-info/METADATA")
    text = EACH_ITS_OWN.replace("$FOLDER", str(pair.folder / "site"))
    pair.settings(hosts=["h1", "h2"], python=wrapper(pair, "python", text))
    why = "jax is not the same everywhere: 0.1 on h1, 0.2 on h2; install the same version on all of them"
    code, said = submit(pair, "--framework", "jax", "--nnodes", "2")
    assert (code, said) == (2, [f"{why}, or name the packages with --environment"])
    assert pair("get", "--on", "lab", "job").returncode == 2
    _, seen = check(pair)
    assert ("warning", why) in [(it["level"], f"{it['what']}; {it['do']}") for it in seen["findings"]]
    assert submit(pair, "--framework", "jax", "--nnodes", "1")[0] == 0
    # Which Python a setup chooses is not known yet.
    code, said = submit(pair, "--name", "other", "--framework", "jax", "--nnodes", "2", "--setup", "true")
    assert (code, said) == (0, [])


def test_a_full_disk_is_told(pair: Client) -> None:
    home = pair.lab.hosts[1].home / pair.root
    with tiny_disk(home):
        code, said = submit(pair, "--nnodes", "2")
        assert code == 0, said
        assert len(said) == 1
        assert said[0].startswith(f"h2: {home} is on a disk with ")
        with contextlib.suppress(OSError), open(home / "full", "wb") as file:
            file.write(bytes(TINY_KIB << 10))
        code, said = submit(pair, "--name", "late", "--nnodes", "2")
        do = "make room, or choose another root in the target's settings"
        assert (code, said) == (2, [f"h2: {home} is on a full disk; {do}"])
        code, seen = check(pair)
        assert code == 1
        assert [finding["where"] for finding in seen["findings"] if finding["level"] == "error"] == ["h2"]
    with tiny_disk(home):  # where not even paceline's own file fits
        (home / "full").write_bytes(bytes((TINY_KIB - 32) << 10))
        code, said = submit(pair, "--name", "later", "--nnodes", "2")
        assert (code, len(said)) == (2, 1)
        assert said[0].startswith("h2: cannot write to ")
        assert not list(home.glob("paceline-*"))


def test_hosts_between_which_there_is_no_route_are_not_put_together(pair: Client) -> None:
    one, two = pair.lab.hosts[:2]
    with without_route(one, two):
        code, said = submit(pair, "--nnodes", "2")
        assert code == 2
        assert [line.partition(";")[0] for line in sorted(said)] == [
            f"h1 cannot reach h2 at {two.address}: invalid argument",  # what Linux says of such a route
            f"h2 cannot reach h1 at {one.address}: timed out",
        ]
        assert not any(pair.run_directory(host, "job").exists() for host in (one, two))
        assert submit(pair) == (0, [])  # one host needs no route
        code, seen = check(pair)
        assert code == 1
        assert [(link["source"], link["target"], link["latency"]) for link in seen["links"]] == [
            ("h1", "h2", None), ("h2", "h1", None),
        ]  # fmt: skip
        assert "no route" in pair("check", "--on", "lab").stdout


def test_another_host_takes_the_place_of_one_without_a_route(client: Client) -> None:
    if len(client.lab.hosts) < 3:
        pytest.skip("it takes three hosts")
    one, two, three = client.lab.hosts[:3]
    client.settings(hosts=["h1", "h2", "h3"])
    with without_route(one, two):
        code, said = submit(client, "--nnodes", "2")
    assert code == 0
    assert len(said) == 2
    assert all("cannot reach h" in line for line in said)
    assert [client.run_directory(host, "job").exists() for host in (one, two, three)] == [True, False, True]


# check --on


def test_check_tells_what_hosts_have_and_how_they_reach_each_other(pair: Client) -> None:
    code, seen = check(pair)
    assert code == 0
    assert set(seen) == {"hosts", "links", "findings"}
    assert [host["name"] for host in seen["hosts"]] == ["h1", "h2"]
    for host, there in zip(seen["hosts"], pair.lab.hosts[:2], strict=True):
        assert set(host) == {
            "name", "address", "clock", "python", "packages", "devices", "cores", "memory", "disks",
        }  # fmt: skip
        assert host["address"] == there.address
        assert abs(host["clock"]["offset"]) <= host["clock"]["uncertainty"]  # it is this machine's clock
        assert host["disks"][0]["path"] == str(there.home / pair.root)
    for link in seen["links"]:
        assert set(link) == {"source", "target", "problem", "latency", "bandwidth"}
        assert link["problem"] is None
        assert link["latency"] > 0
        assert link["bandwidth"] > 0
    shown = pair("check", "--on", "lab")
    assert shown.returncode == 0
    parts = [part.partition("\n")[0].partition(" (")[0] for part in shown.stdout.split("\n\n")]
    assert parts == ["Hosts", "Latency", "Bandwidth", "What would go wrong"]
    assert pair.lab.hosts[0].address in shown.stdout


def test_check_names_a_host_that_is_not_there_and_shows_the_others(pair: Client) -> None:
    pair.settings(hosts=["h1", "nowhere"])
    code, seen = check(pair)
    assert code == 1
    assert [host["address"] is None for host in seen["hosts"]] == [False, True]
    (finding,) = [finding for finding in seen["findings"] if finding["level"] == "error"]
    assert finding["where"] == "nowhere"
    assert finding["what"].startswith("cannot reach nowhere: ")
    assert finding["do"] == "try: ssh nowhere"


def test_the_bandwidth_is_what_a_link_gives(pair: Client) -> None:
    namespace = pair.lab.hosts[0].namespace
    limit = ("tc", "-n", namespace, "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", "100mbit")
    run(*limit, "burst", "64kb", "latency", "50ms")

    def is_found() -> bool:
        found = {(link["source"], link["target"]): link["bandwidth"] for link in check(pair)[1]["links"]}
        return 40 < found["h1", "h2"] < min(130, found["h2", "h1"])

    try:
        eventually(is_found, "it is measured while nothing else takes the machine")
    finally:
        run("tc", "-n", namespace, "qdisc", "del", "dev", "eth0", "root")


def test_a_clock_is_measured_with_its_uncertainty(pair: Client) -> None:
    """A host whose Python adds 40 s to what the clock says."""
    pair.script("import time; _true = time.time; time.time = lambda: _true() + 40", "fast/usercustomize.py")
    text = f'[ "$HOST" = h2 ] && export PYTHONPATH={pair.folder}/fast\nexec python3 "$@"'
    pair.settings(hosts=["h1", "h2"], python=wrapper(pair, "python", text))
    _, seen = check(pair)
    clocks = [host["clock"] for host in seen["hosts"]]
    assert abs(clocks[1]["offset"] - 40) <= clocks[1]["uncertainty"] + 0.001
    (finding,) = [finding for finding in seen["findings"] if "clock" in finding["what"]]
    assert (finding["level"], finding["where"]) == ("warning", "h2")


def test_a_check_that_is_killed_leaves_nothing_on_the_hosts(pair: Client) -> None:
    checking = pair.start("check", "--on", "lab")
    eventually(lambda: any(host.processes() for host in pair.lab.hosts), "the hosts are asked")
    checking.kill()
    checking.communicate()
    eventually(lambda: not any(host.processes() for host in pair.lab.hosts), "the hosts have noticed")


# What it is made of


def test_a_host_that_hangs_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 600\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path) if len(str(tmp_path)) < 32 else "")
    host = connection.Host("h1", 0, None, None, "python3", "~/state", Limits(0.1, 0.2))
    for verb, seconds in (("describe", 0.1), ("stop", 0.2)):
        with pytest.raises(connection.Silent) as caught, host.listen({"do": verb}) as answers:
            next(answers)  # its time may be over before the request is sent
        said = (
            f"cannot reach h1: no answer within {seconds:g} s; it may be busy or hang, or a start-up file of its shell"
        )
        more = (
            "; if its login only takes long, set look_timeout below [defaults]; the login goes on for the next command"
            if verb == "describe"
            else ""
        )
        assert str(caught.value) == f"{said} wait for input: ssh h1{more}"


@pytest.fixture
def listener() -> Iterator[routes.RouteListener]:
    it = routes.RouteListener(b"token", "h1")
    yield it
    it.close()


def test_both_sides_authenticate(
    listener: routes.RouteListener,
) -> None:
    def told(name: str, token: bytes) -> str | None:
        return routes.reach([routes.Peer(name, "127.0.0.1", listener.port)], token)[name]

    assert told("h1", b"token") is None
    assert told("h2", b"token") == "another machine answers there"
    assert told("h1", b"other") == "another machine answers there"


def test_unauthenticated_connections_do_not_keep_hosts_out(listener: routes.RouteListener) -> None:
    peer = routes.Peer("h1", "127.0.0.1", listener.port)
    with contextlib.ExitStack() as stack:
        for number in range(2100):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
            with contextlib.suppress(OSError):
                stranger.sendall([b"", b"GET / HTTP/1.0\r\n\r\n", b"[1]\n", b"{}\n", bytes(9999)][number % 5])
        assert routes.reach([peer], b"token") == {"h1": None}


def test_a_peer_that_is_not_the_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        why = "connected, but nothing answered for 0.2 s"
        assert routes.reach([routes.Peer("h9", "127.0.0.1", port)], b"token") == {"h9": why}
    assert routes.reach([routes.Peer("h9", "127.0.0.1", port)], b"token") == {"h9": "connection refused"}


@pytest.mark.parametrize(
    ("offset", "uncertainty", "said"),
    [
        (0.5, 0.1, None),
        (-2.5, 1.0, None),
        (40.12, 0.2, "h1: its clock is 40.1 s (± 0.2 s) ahead of this machine's"),
        (-3.0, 0.001, "h1: its clock is 3.0 s (± 0.1 s) behind this machine's"),
    ],
)
def test_a_clock_that_is_far_off_is_told(offset: float, uncertainty: float, said: str | None) -> None:
    found = clock_finding("h1", Clock(offset, uncertainty))
    assert [finding.level for finding in found] == (["warning"] if said else [])
    assert all(finding.what.startswith(said or "") for finding in found)


def test_versions_that_differ_are_told_with_a_few_hosts_each() -> None:
    assert differing("torch", {"h1": "2.6", "h2": "2.6"}) == []
    versions = {f"h{number}": "2.7" if number < 9 else "2.6" for number in range(1, 10)}
    (finding,) = differing("torch", versions)
    assert isinstance(finding, Finding)
    assert finding.what == "torch is not the same everywhere: 2.7 on h1, h2, h3 and 5 others, 2.6 on h9"


@given(st.integers(1, 40))
def test_no_host_has_two_partners_while_the_network_is_measured(count: int) -> None:
    hosts: Any = [f"h{number}" for number in range(count)]
    turns = rounds(hosts)
    for turn in turns:
        assert len({host for pair in turn for host in pair}) == 2 * len(turn)
    pairs = [pair for turn in turns for pair in turn]
    assert len(pairs) == len(set(pairs)) == (count * (count - 1) if count <= MOST_FOR_PAIRS else count)
