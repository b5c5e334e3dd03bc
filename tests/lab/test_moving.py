"""Jobs go on from their checkpoints on other machines: from here to hosts, between targets, and back."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

from .test_checkpoints import TRAIN, checkpoints, used, waits

if TYPE_CHECKING:
    from pathlib import Path

    from .lab import Client

torch = pytest.importorskip("torch")

from paceline.train.checkpoint.store import CheckpointStore, SingleExchange  # noqa: E402

pytestmark = pytest.mark.torch


def submitted(client: Client, *args: str) -> str:
    done = client.succeeds(*args)
    return done.stdout.strip()


def job(client: Client, name: str) -> dict[str, Any]:
    return client.json("get", name)


def stopped_at_its_last_step(client: Client, name: str, ranks: int) -> str:
    """The log of a job that was killed when all its ranks had come to their last step."""
    waits(client, name, ranks)
    assert client("stop", "--now", name).returncode == 0
    assert job(client, name)["state"] == "STOPPED"
    return client.logs(name)


def test_a_job_goes_on_from_here_to_hosts_to_other_hosts_and_back(client: Client) -> None:
    client.env["GLOO_SOCKET_IFNAME"] = "lo"  # of jobs here: this machine's own name is unknown in the lab's network
    hosts = {"lab": {"hosts": ["h1", "h2"]}, "far": {"hosts": ["h3"]}}
    client.write_settings({name: {**options, "python": sys.executable} for name, options in hosts.items()})
    script = client.script(TRAIN)
    first = submitted(client, "submit", "--sync-mode", "snapshot", "--name", "moves", script, "10")
    before = stopped_at_its_last_step(client, first, 1)
    (client.folder / script).write_text("raise SystemExit('the code of the job, not this, goes on')")

    plan = client.succeeds("resubmit", "--dry-run", "--on", "lab", "--nnodes", "2", first, "--", "17")
    assert json.loads(plan.stdout)["job"]["backend"] == "lab"
    assert len(json.loads(plan.stdout)["ranks"]) == 2
    second = submitted(client, "resubmit", "--on", "lab", "--nnodes", "2", first, "--", "17")
    assert second == "moves-2"
    on_lab = stopped_at_its_last_step(client, second, 2)
    assert "resuming after step 8 in epoch" in on_lab
    assert {rank["node"] for rank in job(client, second)["instances"]} == {"h1", "h2"}
    own = client.home / "jobs" / first / "checkpoints"
    assert [path.name for path in sorted(own.glob("step-*"))] == ["step-000004", "step-000008"]

    shutil.rmtree(checkpoints(client, client.lab.hosts[0], second) / "step-000016")  # only h2 has the newest
    named = ("-H", "h3:1", "--ssh-root", f"~/{client.root}", "--ssh-python", sys.executable)
    third = submitted(client, "resubmit", *named, second, "--", "26")
    alone = stopped_at_its_last_step(client, third, 1)
    assert "resuming after step 16 in epoch" in alone
    assert [rank["node"] for rank in job(client, third)["instances"]] == ["h3"]

    assert client("delete", second).returncode == 0  # the folders of the new job are its own
    fourth = submitted(client, "resubmit", "--on", "local", "-n", "2", third, "--", "30")
    after = stopped_at_its_last_step(client, fourth, 2)
    assert "resuming after step 24 in epoch" in after
    parts = [(before, range(1, 9)), (on_lab, range(9, 17)), (alone, range(17, 25)), (after, range(25, 31))]
    samples = [it for log, steps in parts for it in used(log, steps)]
    assert len(samples) == len(set(samples)) == 30 * 4
    assert {n for epoch, n in samples if epoch == 0} == set(range(80))


LISTS = """
    import os
    from pathlib import Path
    folder = Path(os.environ.get("PACELINE_CHECKPOINT_DIR") or os.environ["PACELINE_RUN_DIR"] + "/checkpoints")
    print(folder, *sorted(path.name for path in folder.glob("*")) if folder.exists() else ())
"""


def save(folder: Path, step: int, *, large: bool = False) -> None:
    """Save a checkpoint as a job does."""
    store = CheckpointStore(folder, rank=0, world_size=1, exchange=SingleExchange())
    store.save(step, {"model": torch.full((3_000_000 if large else 3,), float(step))}, None, block=True)
    store.close()


def ended(client: Client, *args: str) -> tuple[str, str]:
    """The name of a job that has run to its end, and its log."""
    name = submitted(client, *args)
    assert client("wait", name).returncode == 0
    return name, client("logs", name).stdout


def test_folders_for_checkpoints_that_others_see_or_do_not(client: Client) -> None:
    client.write_settings({"lab": {"hosts": ["h1"]}, "far": {"hosts": ["h3"]}})
    seen, other, third = client.folder / "seen", client.folder / "other", client.folder / "third"
    script = client.script(LISTS)
    first, _ = ended(client, "submit", "--on", "lab", "--name", "it", "--checkpoint-dir", str(seen), script)
    (client.run_directory(client.lab.hosts[0], first) / "saved.json").write_text(
        json.dumps({"step": 9, "folder": str(seen)})
    )
    lost = client("resubmit", "--on", "far", first)
    assert (lost.returncode, lost.stderr.count("\n")) == (2, 1)
    assert f"job it has saved step 9 in {seen} on h1, and no whole checkpoint is there any more" in lost.stderr
    save(seen, 7)
    save(seen, 9, large=True)
    inode = (seen / "step-000009").stat().st_ino

    second, log = ended(client, "resubmit", "--on", "far", first)  # all hosts of the lab have the same disk
    assert log.split() == [str(seen), "step-000007", "step-000009"]
    assert (seen / "step-000009").stat().st_ino == inode

    model = seen / "step-000009" / "model.pt"
    model.write_bytes(model.read_bytes()[:-1] + b"x")  # damaged: the one before is the newest
    _, log = ended(client, "resubmit", "--on", "far", "--checkpoint-dir", str(other), first)
    assert log.split() == [str(other), "step-000007"]
    assert CheckpointStore(other, rank=0, world_size=1, exchange=SingleExchange()).load() is not None

    save(third, 100)
    for more in ((), ("--dry-run",)):
        done = client("resubmit", *more, "--on", "far", "--checkpoint-dir", str(third), first)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"h3: {third} has checkpoints of something else; name another folder" in done.stderr
    assert [path.name for path in third.glob("step-*")] == ["step-000100"]
    here, log = ended(
        client, "resubmit", "--on", "local", "--fresh", "--checkpoint-dir", str(client.folder / "x"), second
    )
    assert log.split() == [str(client.folder / "x")]
    assert here == "it-4"


def test_a_checkpoint_that_cannot_be_copied_leaves_nothing(client: Client) -> None:
    client.write_settings({"lab": {"hosts": ["h1"]}, "far": {"hosts": ["h2", "h3"]}})
    first, _ = ended(client, "submit", "--on", "lab", "--name", "it", client.script(LISTS))
    client.hang_up()
    client.lab.hosts[0].lose_route()
    done = client("resubmit", "--on", "far", first)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot reach h1" in done.stderr
    assert "what job it has left is there" in done.stderr
    client.lab.hosts[0].find_route()
    save(checkpoints(client, client.lab.hosts[0], first), 5, large=True)
    taken = client.script("raise SystemExit(0)", "other.py")
    assert ended(client, "submit", "--on", "far", "--name", "busy", taken)
    refused = client("resubmit", "--on", "far", "--name", "busy", first)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "a job named busy is on h2" in refused.stderr
    again, log = ended(client, "resubmit", "--on", "far", first)
    assert log.split()[1:] == ["step-000005"]
    assert [path.name for path in checkpoints(client, client.lab.hosts[0], first).glob("step-*")] == ["step-000005"]
    assert again == "it-2"
