"""Training in pods: jobs without an agent, what kubectl takes, and stopping with a checkpoint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from paceline.job.errors import UserError
from paceline.job.spec import JobSpec

from .board import with_board
from .user import Silence

if TYPE_CHECKING:
    from fake_kubernetes.cluster import Cluster
    from tests.conftest import Paceline

    from .user import User


def test_a_plain_job_needs_no_agent_and_no_python(user: User) -> None:
    script = (
        "echo $RANK of $WORLD_SIZE at $MASTER_ADDR:$MASTER_PORT with $NCCL_DEBUG; echo '$(RANK) $$' $TEXT; exit $RANK"
    )
    there = user.backend(plain=True, image="no-python")
    spec = JobSpec.validated({
        "name": "it", "command": "sh", "args": ["-c", script], "nodes": 2,
        "env": {"NCCL_DEBUG": "INFO", "TEXT": "$(RANK)$$$"},
    })  # fmt: skip
    there.start(there.prepare(spec), Silence())
    job = user.ended("it")
    assert (job.state, job.exit_code) == ("FAILED", 1)
    assert user.lines("it", (1,)) == ["1 of 2 at it-0.it:29500 with INFO", "$(RANK) $$ $(RANK)$$$"]


def test_the_dry_run_is_what_kubectl_takes(paceline: Paceline, cluster: Cluster, kubectl: None) -> None:
    paceline.env["KUBECONFIG"] = str(cluster.kubeconfig)
    script = paceline.script("print('hello')")
    shown = paceline.succeeds("submit", "--on", "kubernetes", "--image", "usual", "--name", "it", "--dry-run", script)
    assert cluster.all("Job") == []
    cluster.kubectl("apply", "-f", "-", input=shown.stdout)
    cluster.wait(lambda: cluster.ended("it"), "it ends")
    (pod,) = cluster.all("Pod")
    assert "[rank 0] hello" in cluster.kubectl("logs", pod["metadata"]["name"]).stdout.splitlines()


LIBRARY = """
    import time, torch, paceline
    run = paceline.init(seed=0)
    time.sleep(run.rank / 5)
    print("rank", run.rank, "begins", flush=True)
    data = torch.utils.data.TensorDataset(torch.arange(400.0).reshape(-1, 1))
    loader = run.dataloader(data, global_batch_size=2, shuffle=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    for epoch in run.epochs(1000):
        for (batch,) in loader:
            optimizer.zero_grad()
            run.backward(model(batch).mean())
            optimizer.step()
            if run.step == 5:
                print("five steps", flush=True)
            time.sleep(0.05)
"""


def test_progress_while_it_runs_and_a_checkpoint_when_it_is_stopped(user: User) -> None:
    claim = user.cluster.claim("work")
    user.cluster.images["board"] = with_board()
    given = {"nodes": 2, "data": ["work:/saved"], "checkpoint_dir": "/saved/checkpoints", "image": "board"}
    user.submit(LIBRARY, name="train", **given)
    user.wrote("train", "five steps", 2)
    job = user.until(
        "train", lambda job: (job.progress or {}).get("step", 0) > 3 and all(rank.pid for rank in job.instances)
    )
    assert (job.state, [rank.state for rank in job.instances]) == ("RUNNING", ["RUNNING", "RUNNING"])
    url = user.backend().open_tensorboard("train", None, print)
    assert user.backend().reach_tensorboard("train", url) == "reach it with: paceline tensorboard train"
    assert user.get("train").tensorboard == url
    assert user.backend().close_tensorboard("train")
    assert user.backend().stop(["train"]) == {}
    stopped = user.ended("train")
    assert (stopped.state, stopped.exit_code) == ("STOPPED", 143)
    assert list(claim.glob("checkpoints/step-*")), "it has saved a checkpoint"
    (volume,) = user.backend().volumes(print)
    assert (volume.name, volume.access, volume.size) == ("work", ("ReadWriteMany",), 1 << 30)
    assert "checkpoint" in {event["event"] for event in user.backend().events("train")}, "known without its pods"
    listing = user.backend().describe(["train"])
    assert listing.warnings == (
        "the pods of job train on nodes 0, 1 are gone; paceline logs reads what they wrote on volume work",
    )
    assert re.fullmatch(r"kept on volume work, in /saved/paceline-logs/train-\w{8}", listing.jobs[0].logs)
    begun = [line for line in user.lines("train", None) if "begins" in line]
    assert sorted(begun) == ["rank 0 begins", "rank 1 begins"]


def test_a_job_that_would_lose_what_it_has_saved_is_not_suspended(user: User) -> None:
    user.submit(LIBRARY, name="train")
    job = user.until("train", lambda job: (job.progress or {}).get("step", 0) > 3)
    assert job.checkpoint is None, "it saves as it ends"
    with pytest.raises(UserError, match=r"^job train saves in a folder of its pods, which go when it is suspended"):
        user.backend().suspend(["train"])
    assert user.get("train").state == "RUNNING"
    assert user.backend().stop(["train"], now=True) == {}
    user.ended("train")
