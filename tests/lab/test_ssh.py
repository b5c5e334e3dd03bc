"""Jobs on other machines: `--on` a target whose hosts ssh reaches, which have Python and nothing of ours."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from tests.conftest import eventually

from paceline import __version__

if TYPE_CHECKING:
    from .lab import Client

FOREVER = """
    import os, threading
    print("here", os.environ["RANK"], flush=True)
    threading.Event().wait()
"""


def get(client: Client, name: str) -> dict[str, Any]:
    return client.json("get", "--on", "lab", name)


def submit(client: Client, *args: str) -> str:
    done = client.succeeds("submit", "--on", "lab", *args)
    return done.stdout.strip()


def test_a_follower_that_goes_away_leaves_nothing_on_the_host(client: Client) -> None:
    client.settings(hosts=["h1"])
    name = submit(client, "--name", "watched", client.script(FOREVER))
    host = client.lab.hosts[0]
    client.are("RUNNING", 1, name=name)
    alone = len(host.processes())
    follower = client.start("logs", "--on", "lab", "-f", name)
    assert follower.stdout is not None
    assert follower.stdout.readline() == "here 0\n"
    follower.kill()
    follower.communicate()
    eventually(lambda: len(host.processes()) <= alone, "the follower's end on the host is gone")
    follower = client.start("logs", "--on", "lab", "-f", name)
    assert client("stop", "--on", "lab", name).returncode == 0
    assert follower.wait() == 143
    follower.communicate()
    events = client.json("events", "--on", "lab", name)
    assert [event["event"] for event in events] == ["submitted", "started", "stopping", "stacks", "finished"]
    assert not any("host" in event for event in events)


def test_hosts_may_share_a_home(client: Client) -> None:
    client.settings(root=str(client.folder / "shared"), hosts=["h1", "h2"])
    script = client.script("import os; print(*map(os.environ.get, ('RANK', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME')))")
    name = submit(client, "--nnodes", "2", "--name", "one", script)
    assert client("wait", "--on", "lab", name).returncode == 0
    (job,) = client.json("list", "--on", "lab")
    assert (job["name"], job["state"], [rank["node"] for rank in job["instances"]]) == (name, "SUCCEEDED", ["h1", "h2"])
    logs = client("logs", "--on", "lab", "--all", name).stdout.splitlines()
    assert sorted(logs) == [f"[rank {rank}] {rank} {client.lab.hosts[0].address} eth0" for rank in range(2)]
    events = client.json("events", "--on", "lab", name)
    assert events[0]["event"] == "submitted"
    assert sorted((event["host"], event["event"]) for event in events[1:]) == [
        (host, event) for host in ("h1", "h2") for event in ("finished", "started")
    ]
    heading, *rows = client("events", "--on", "lab", name).stdout.splitlines()
    assert heading.split() == ["TIME", "HOST", "EVENT", "DETAILS"]
    assert sorted(row.split()[1] for row in rows) == ["-", "h1", "h1", "h2", "h2"]
    taken = client("submit", "--on", "lab", "--name", "one", client.script("pass"))
    assert (taken.returncode, taken.stdout) == (2, "")
    assert "a job named one is on h" in taken.stderr
    assert client("delete", "--on", "lab", name).returncode == 0
    assert not list((client.folder / "shared").glob("hosts/*/jobs/*"))


def test_the_library_is_there_however_a_rank_is_started(client: Client) -> None:
    client.settings(hosts=["h1"])
    script = client.script("""
        import multiprocessing, os, subprocess, sys
        import paceline.contract
        def version(_):
            import paceline.contract
            return paceline.__version__
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(version, [0]))
            subprocess.run([sys.executable, "-c", "import paceline; print(paceline.__version__)"], check=True)
    """)
    for method in ("fork", "exec"):
        name = submit(client, "--start-method", method, "--name", method, script)
        logs = client("logs", "--on", "lab", "-f", name)
        assert logs.returncode == 0, logs.stdout
        assert logs.stdout == f"['{__version__}']\n['{__version__}']\n{__version__}\n"


def test_another_paceline_on_a_host_does_no_harm(client: Client) -> None:
    client.settings(hosts=["h1"])
    host = client.lab.hosts[0]
    installed = client.lab.ssh(host, "python3 -m site --user-site").stdout.strip()
    other = Path(installed, "paceline", "__init__.py")
    other.parent.mkdir(parents=True)
    try:
        other.write_text("raise ImportError('the wrong one')")
        for method in ("fork", "exec"):
            name = submit(client, "--start-method", method, client.script("import paceline; print(paceline.__file__)"))
            assert client("logs", "--on", "lab", "-f", name).stdout.endswith(".pyz/paceline/__init__.pyc\n")
    finally:
        shutil.rmtree(other.parent)


def test_a_job_whose_host_is_gone_for_good_is_given_up(client: Client) -> None:
    client.settings(hosts=["h2", "h3"])
    name = submit(client, "--name", "gone", client.script(FOREVER))
    client.are("RUNNING", 2, name=name)
    client.hang_up()
    client.lab.hosts[1].lose_route()
    job = get(client, name)
    assert (job["state"], job["error"].startswith("cannot reach h2: ")) == ("LOST", True), job
    refused = client("delete", "--on", "lab", name)
    assert refused.returncode == 2
    assert "cannot reach h2" in refused.stderr
    assert f"to give it up: paceline delete --force {name}" in refused.stderr
    done = client.succeeds("delete", "--on", "lab", "--force", name)
    assert done.stderr.splitlines()[-1] == f"paceline: job {name} is forgotten; what h2 has of it is left there"
    assert client.json("list", "--on", "lab") == []
    client.lab.hosts[1].power_off()


def test_where_nobody_lets_us_in_what_was_submitted_from_here_is_lost(client: Client) -> None:
    name = submit(client, "--name", "both", "--nnodes", "2", client.script(FOREVER))
    client.are("RUNNING", 1, 2, name=name)
    client.hang_up()
    client.settings(port=23)  # nobody listens there
    listed = client("list", "--on", "lab", "-o", "json")
    assert [(job["name"], job["state"]) for job in json.loads(listed.stdout)] == [("both", "LOST")]
    assert [line.split(": ")[1] for line in listed.stderr.splitlines()] == [
        f"cannot reach h{number}" for number in (1, 2, 3)
    ]
    for verb in ("stop", "events", "logs"):
        done = client(verb, "--on", "lab", name)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "cannot reach h" in done.stderr
    client.settings()
    assert client("stop", "--on", "lab", "--now", name).returncode == 0


def test_a_client_killed_while_it_sends_the_code_leaves_nothing(client: Client) -> None:
    client.settings(hosts=["h1"])
    client.script("print(1)", "source/main.py")
    (client.folder / "source" / "large").write_bytes(os.urandom(64 << 20))
    flags = ("--name", "half", "--sync-mode", "snapshot", "--sync-source", "source", "main.py")
    submitting = client.start("submit", "--on", "lab", *flags)
    jobs = client.run_directory(client.lab.hosts[0], "half").parent
    eventually(lambda: list(jobs.glob(".half.*/code/half/large")) or submitting.poll() is not None, "it arrives")
    submitting.kill()
    submitting.communicate()
    eventually(lambda: not client.lab.hosts[0].processes(), "the host has noticed")
    assert not list(jobs.glob(".half.*"))
    if (jobs / "half").exists():  # it was too fast for us
        assert get(client, "half")["state"] in ("STARTING", "RUNNING", "SUCCEEDED")


def test_volumes_are_mounted_on_hosts(client: Client) -> None:
    data = client.folder / "data"
    data.mkdir()
    (data / "train.bin").touch()
    client.write_settings({"lab": {"hosts": ["h1"]}}, volumes={"digits": str(data)})
    script = client.script("""
        import os, sys
        print(os.listdir("/mnt"), os.path.isdir(sys.argv[1]))
    """)
    name = submit(client, "--data", "digits:/mnt", script, "/mnt")
    assert client("wait", "--on", "lab", name).returncode == 0
    assert client("logs", "--on", "lab", name).stdout == "['train.bin'] True\n"
    done = client("submit", "--on", "lab", "--data", "digits:/", script, "/")
    assert done.returncode == 0
    assert "h1: volume digits cannot be mounted at /: it would hide " in done.stderr
    assert client("wait", "--on", "lab", done.stdout.strip()).returncode == 0


def test_hosts_may_share_the_folder_of_the_code(client: Client) -> None:
    client.script("import os, threading; print(os.getcwd(), flush=True); threading.Event().wait()", "source/main.py")
    shared = client.folder / "shared"
    shared.mkdir()
    place = ("--name", "mine", "--working-dir", str(shared), "--sync-mode", "snapshot", "--sync-source", "source")
    (shared / "code" / "mine").mkdir(parents=True)
    refused = client("submit", "--on", "lab", "--nnodes", "2", *place, "main.py")
    there = f"{shared}/code/mine is there already; remove it, or choose another --name or --working-dir"
    told = [line for line in refused.stderr.splitlines() if not line.endswith("…")]
    assert (refused.returncode, told) == (2, [f"paceline: h1, h2: {there}"])
    (shared / "code" / "mine").rmdir()
    name = submit(client, "--nnodes", "2:3", *place, str(client.folder / "source" / "main.py"))
    client.are("RUNNING", 1, 2, name=name)
    assert client("scaleout", "--on", "lab", name).returncode == 0
    client.are("RUNNING", 1, 2, 3, name=name)
    assert client("scalein", "--on", "lab", name, "h3").returncode == 0
    client.nothing_runs(3)
    client.are("RUNNING", 1, 2, name=name)
    assert client("stop", "--on", "lab", "--now", name).returncode == 0
    logs = client("logs", "--on", "lab", name, "--all").stdout
    assert {line.partition("] ")[2] for line in logs.splitlines()} == {f"{shared}/code/mine"}
    assert (shared / "code" / "mine" / "main.py").exists()
    assert client("delete", "--on", "lab", name).returncode == 0
    assert not list((shared / "code").iterdir())


def test_code_without_the_script_is_sent_nowhere(client: Client) -> None:
    client.settings(hosts=["h1", "h2"])
    client.script("pass", "source/left_out.py")
    client.script("left_out.py\n", "source/.pacelineignore")
    source = client.folder / "source"
    for script, folder in (("missing.py", f"{source}"), ("left_out.py", f"the copy of {source}")):
        done = client(
            "submit", "--on", "lab", "--nnodes", "2", "--sync-mode", "snapshot", "--sync-source", "source", script
        )
        told = [line for line in done.stderr.splitlines() if not line.endswith("…")]
        assert (done.returncode, told) == (
            2,
            [f"paceline: no script {script} in {folder}; check the name and the folder"],
        )


def test_a_job_that_has_not_begun_is_suspended_on_all_its_hosts(client: Client) -> None:
    client.settings(hosts=["h1:1", "h2:1"], exact=True)
    second = client.lab.hosts[1]
    client.script(FOREVER)
    for name, nodes in (("busy", "1"), ("it", "2")):
        client.succeeds("submit", "--on", "lab", "--name", name, "--nnodes", nodes, "--gpus", "1", "script.py")
    eventually(lambda: client.status(second).get("devices") == ["0"], "it waits there for the first host")
    assert "job it is suspended; it had not begun; " in client.succeeds("suspend", "it").stderr
    client.are("SUSPENDED", 1, 2)
    assert client.status(second)["devices"] == []
    client.succeeds("resume", "it")
    eventually(lambda: client.status(second)["devices"] == ["0"], "it waits as before")
    client.succeeds("stop", "busy")
    client.are("RUNNING", 1, 2)
    client.succeeds("stop", "it")


def test_slots_make_jobs_go_to_a_free_host_and_then_wait(client: Client) -> None:
    client.settings(hosts=["h1:1", "h2:1"])
    names = [submit(client, "--name", "s-", "--gpus", "1", client.script(FOREVER)) for _ in range(3)]
    client.are("RUNNING", 1, name=names[0])
    client.are("RUNNING", 2, name=names[1])
    client.are("PENDING", 1, name=names[2])
    assert get(client, names[2])["waiting"] == "waits for 1 device; held by: s-1"
    nodes = client.json("top", "node", "--on", "lab")
    assert [(node["name"], node["allocated"]) for node in nodes] == [("h1", {"0": ["s-1"]}), ("h2", {"0": ["s-2"]})]

    def are_measured() -> bool:
        used = client.json("top", "job", "--on", "lab")
        return all(row["processes"] for row in used if row["state"] == "RUNNING")

    eventually(are_measured, "their first lines of telemetry are there")
    assert client("stop", "--on", "lab", "--now", *names).returncode == 0


@pytest.mark.parametrize(
    ("settings", "flags", "said"),
    [
        ({"hosts": ["nowhere"]}, [], "cannot reach nowhere: "),
        ({"hosts": ["h1"], "python": "/no/python3"}, [], "no Python on h1 ("),
        ({"root": "/proc/nothing"}, [], "h1, h2, h3: cannot write to /proc/nothing: "),
        ({"hosts": ["h1", "h1"]}, [], "targets.lab.hosts: h1 is named twice"),
        ({"hosts": ["-oProxyCommand=id"]}, [], "targets.lab.hosts: '-oProxyCommand=id' is not a host"),
        ({"hots": ["h1"]}, [], "did you mean hosts?"),
        ({}, ["--framework", "jax"], "h1, h2, h3: jax is not installed for /"),
        ({}, ["--working-dir", "/not/there"], "h1, h2, h3: no folder /not/there to run in"),
        ({}, ["--nnodes", "4"], "lab has 3 hosts"),
        ({}, ["--cpus", "5000"], "h1, h2, h3: --cpus 5000: this machine lets a job use"),
        ({}, ["--data", "set:/set"], "no volume 'set'"),
    ],
)
def test_what_cannot_work_is_told_in_a_line(
    client: Client, settings: dict[str, object], flags: list[str], said: str
) -> None:
    client.settings(**settings)
    done = client("submit", "--on", "lab", *flags, client.script("print(1)"))
    lines = [line for line in done.stderr.splitlines() if not line.endswith("…")]  # what it does, if that takes long
    assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), done.stderr
    assert said in lines[0]
    assert not any(list((host.home / client.root).glob("hosts/*/jobs/*")) for host in client.lab.hosts)


def test_get_says_how_to_reach_a_tensorboard(client: Client) -> None:
    pytest.importorskip("tensorboard")
    key = str(client.lab.folder / "key")
    client.settings(hosts=["h1"], python=sys.executable, port=22, identity_file=key)
    name = submit(client, "--tensorboard", "--name", "board", client.script(FOREVER))
    eventually(lambda: "://" in str(get(client, name)["tensorboard"]), "its TensorBoard runs", pause=1.0)
    url = get(client, name)["tensorboard"]
    port = urlsplit(url).port
    how = f"reach it with: ssh -p 22 -i {key} -N -L {port}:127.0.0.1:{port} h1"
    assert f"tensorboard  {url} ({how})\n" in client("get", "--on", "lab", name).stdout
    done = client("tensorboard", "--on", "lab", name)
    assert done.stdout == f"{url}\n"
    assert done.stderr.splitlines()[-1] == f"paceline: it is on h1; {how}"
    assert client("stop", "--on", "lab", "--now", name).returncode == 0


def test_jobs_are_found_wherever_they_were_submitted_to(client: Client) -> None:
    client.write_settings({"lab": {"hosts": ["h1"]}, "far": {"hosts": ["h3"]}})
    name = submit(client, "--name", "there", client.script(FOREVER))
    assert client("submit", "--name", "here", client.script(FOREVER, "own.py")).returncode == 0
    client.succeeds("submit", "-H", "h2:1", "--ssh-python", sys.executable, "--name", "named", client.script(FOREVER))
    for job in ("there", "here", "named"):
        eventually(lambda job=job: '"RUNNING"' in client("get", job, "-o", "json").stdout, f"{job} runs", 0.5)
        assert client("logs", job).stdout == "here 0\n"
    listed = client("list")
    heading, *rows = listed.stdout.splitlines()
    assert heading.split()[:3] == ["NAME", "TARGET", "STATE"]
    assert sorted(row.split()[:2] for row in rows) == [["here", "local"], ["named", "h2:1"], ["there", "lab"]]
    assert client.json("get", "named")["backend"] == "h2:1"
    assert "TARGET" not in client("list", "--on", "lab").stdout
    both = client("stop", "here", "there")
    assert (both.returncode, both.stderr.count("\n")) == (2, 1)
    assert "name the jobs of one target, or add --on" in both.stderr
    client.hang_up()
    assert client("get", "there").returncode == 0  # its connection is kept: it has the time for the answer alone
    for host in client.lab.hosts[1:]:
        host.cut()
    listed = client("list", env={**client.env, "PACELINE_LOOK_TIMEOUT": "20s"})
    assert listed.returncode == 0
    rows = sorted(row.split()[:3] for row in listed.stdout.splitlines()[1:])
    assert rows == [["here", "local", "RUNNING"], ["named", "h2:1", "LOST"], ["there", "lab", "RUNNING"]]
    assert [listed.stderr.count(f"cannot reach {host}: ") for host in ("h2", "h3")] == [1, 1]
    assert listed.stderr.count("\n") == 2
    for host in client.lab.hosts[1:]:
        host.heal()
    (client.home / "silent.json").unlink()  # else they are tried only briefly for a minute
    for job in ("there", "here", "named"):
        client.succeeds("stop", "--now", job)
        assert client("wait", job).returncode == 131
        if job == "named":
            client.lab.hosts[
                1
            ].cut()  # a job that has ended long ago is worth no connection, and neither is one that is gone
            note = client.home / "targets" / "ssh" / "named"
            ended = json.loads(note.read_text())
            ended["record"]["finished"] -= 8 * 86400
            note.write_text(json.dumps(ended))
            assert "h2" not in client("list").stderr
            client.lab.hosts[1].heal()
            shutil.rmtree(client.lab.hosts[1].home / ".local/state/paceline/hosts/h2/jobs/named")
            assert "named" not in client("list", "-A").stdout
            assert not note.exists()
            continue
        assert client("delete", job).returncode == 0
    assert name == "there"


def test_a_default_target(client: Client) -> None:
    client.write_settings({"lab": {"hosts": ["h1"]}}, defaults={"on": "lab"})
    script = client.script("import socket; print(socket.gethostname())")
    name = client("submit", "--name", "one", script).stdout.strip()
    assert client("wait", name).returncode == 0
    assert client("logs", name).stdout == "h1\n"
    assert client("run", script).stdout == "h1\n"
    assert client("run", "--on", "local", script).stdout != "h1\n"
    client.write_settings({}, defaults={"on": "leb"})
    done = client("submit", script)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no target 'leb'" in done.stderr
