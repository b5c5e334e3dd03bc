"""Jobs as objects of operators' kinds, from submit to delete."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from paceline.job.errors import UserError
from paceline.job.spec import JobSpec

from .user import Silence, User

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fake_kubernetes.cluster import Cluster
    from tests.conftest import Paceline


WAIT = "import threading; print('here', flush=True); threading.Event().wait()"


@pytest.fixture
def make_user(
    make_cluster: Callable[..., Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., User]:
    """A user of a cluster that has these operators."""

    def make(*operators: str, **options: Any) -> User:
        return User(make_cluster(operators=operators, **options), tmp_path, monkeypatch)

    return make


OPERATORS = {
    "pytorchjob": "training-operator", "tfjob": "training-operator", "paddlejob": "training-operator",
    "mpijob": "mpi-operator", "jobset": "jobset", "trainjob": "trainer",
}  # fmt: skip
HOSTS = {
    "pytorchjob": ("master-0", "worker-0"), "tfjob": ("chief-0", "worker-0"), "paddlejob": ("worker-0", "worker-1"),
    "mpijob": ("launcher", "worker-0"), "jobset": ("node-0-0", "node-0-1"), "trainjob": ("node-0-0", "node-0-1"),
}  # fmt: skip
TWO_ROLES = ("pytorchjob", "tfjob", "mpijob")
MEET = """
    import os, socket
    host, rank = os.environ["MASTER_ADDR"], int(os.environ["RANK"])
    if rank == 0:
        server = socket.create_server(("", int(os.environ["MASTER_PORT"])))
        server.accept()
    elif rank == 2:
        import time
        until = time.monotonic() + 60
        while True:
            try:
                socket.create_connection((host, int(os.environ["MASTER_PORT"])), 5)
                break
            except OSError:
                assert time.monotonic() < until
    print("met", rank, "of", os.environ["WORLD_SIZE"], flush=True)
"""


@pytest.mark.parametrize("kind", OPERATORS)
def test_from_submit_to_delete(make_user: Callable[..., User], kind: str) -> None:
    """Two pods with two ranks each, of which two connect over pods."""
    user = make_user(*{OPERATORS[kind], "jobset"} if kind == "trainjob" else {OPERATORS[kind]})
    given = {"worker_image": "other"} if kind in TWO_ROLES else {}
    user.submit(MEET, name="it", nodes=2, ranks=2, kind=kind, max_restarts=0, **given)
    job = user.ended("it")
    assert (job.state, job.ranks, job.exit_code) == ("SUCCEEDED", 4, 0), job
    pods = [it.node.partition("/")[2] for it in job.instances]
    assert all(pod.startswith(f"it-{HOSTS[kind][n // 2]}") for n, pod in enumerate(pods)), pods
    assert sorted(user.lines("it")) == [f"met {rank} of 4" for rank in range(4)]
    images = {it["metadata"]["name"]: it["spec"]["containers"][0]["image"] for it in user.cluster.all("Pod")}
    assert [images[pods[0]], images[pods[2]]] == ["usual", given.get("worker_image", "usual")]
    assert [it["metadata"]["name"] for it in user.cluster.all("Job") if it["metadata"]["name"] == "it"] == []
    assert [it.name for it in user.backend().describe().jobs] == ["it"]
    with pytest.raises(UserError, match="a job named it is in this namespace"):
        user.submit(MEET, name="it")
    assert user.backend().delete(["it"]) == []
    user.nothing_left("it")


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "jobset"])  # those of kubeflow.org are alike
def test_a_queue_a_stop_and_a_failure(make_user: Callable[..., User], kind: str) -> None:
    user = make_user(*{OPERATORS[kind], "jobset"} if kind == "trainjob" else {OPERATORS[kind]}, nodes=1)
    user.submit(WAIT, name="queued", kind=kind, queue="fast", grace="5s")
    job = user.get("queued")
    assert (job.state, job.waiting) == ("PENDING", "queue fast has not admitted it yet"), job
    found = user.backend()._find("queued")
    assert found.object["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "fast"
    user.cluster.patch(
        found.kind.title, "queued", {"spec": found.kind.suspension(found.object, False)}
    )  # as Kueue does
    user.wrote("queued", "here")
    assert user.get("queued").state == "RUNNING"
    assert user.backend().stop(["queued"]) == {}
    assert user.ended("queued").state == "STOPPED"
    user.submit("raise ValueError('no good')", name="fails", kind=kind)
    job = user.ended("fails")
    assert (job.state, job.exit_code) == ("FAILED", 1) and "no good" in str(job.error), job
    there = user.backend()  # the kind is that of the job that is submitted again
    spec = there.spec("fails").changed({"name": "fails-", "resume_from": "fails"})
    again = there.start(there.prepare(spec), progress := Silence())
    assert "checkpoints of job fails went with its pods" in progress.said[0]
    assert user.backend()._find(again.name).kind.name == kind
    user.ended(again.name)
    assert sorted(it.name for it in user.backend().describe().jobs) == ["fails", "fails-2", "queued"]
    assert user.backend().delete(["fails", "fails-2", "queued"]) == []
    for name in ("fails", "queued"):
        user.nothing_left(name)


def test_a_train_job_of_an_older_release(make_user: Callable[..., User]) -> None:
    user = make_user("trainer-2.2", "jobset")
    with pytest.raises(UserError, match=r"^--grace: a TrainJob of this cluster has it from its runtime \(torch-dist"):
        user.submit("pass", name="it", kind="trainjob", grace="60s")
    user.submit("print('hello')", name="it", kind="trainjob")
    assert (user.ended("it").state, user.lines("it")) == ("SUCCEEDED", ["hello"])


def test_kinds_of_arena(make_user: Callable[..., User]) -> None:
    """Its operators are older: no run policy, no suspension, other labels, and fields of pods and jobs that lack."""
    user = make_user("arena")
    user.submit(MEET, name="it", nodes=2, ranks=2, kind="tfjob", max_restarts=0, worker_image="other")
    job = user.ended("it")
    assert job.state == "SUCCEEDED" and sorted(user.lines("it")) == [f"met {rank} of 4" for rank in range(4)], job
    it = user.backend()._find("it")
    assert (it.object["spec"]["cleanPodPolicy"], "runPolicy" in it.object["spec"]) == ("None", False)
    with pytest.raises(UserError, match=r"^stop: a TFJob of kubeflow.org/v1 here cannot be suspended; delete it$"):
        it.kind.suspension(it.object, True)
    for kind, plain in (("pytorchjob", False), ("pytorchjob", True), ("mpijob", True)):
        there = user.backend(kind=kind, plain=plain)
        spec = JobSpec(script="it.py", name="other", nodes="2", devices=1, ttl="1h" if kind != "mpijob" else None)
        there.prepare(spec)  # the server has tried it, with strict validation
    for given, words in (
        ({"queue": "fast"}, r"^--queue: a PyTorchJob of kubeflow.org/v1 here has no suspend; leave it out$"),
        ({"gang": "volcano"}, r"^--gang: a PyTorchJob of kubeflow.org/v1 here has no schedulingPolicy; leave it out$"),
        ({"plain": True, "ranks": 2}, r"^-n: a PyTorchJob of kubeflow.org/v1 here has no nprocPerNode; leave it out$"),
    ):
        if "gang" in given:
            user.cluster.install("volcano")
        with pytest.raises(UserError, match=words):
            user.submit("pass", name="no", kind="pytorchjob", **given)


def test_node_0_of_an_mpijob_has_its_gpus(make_user: Callable[..., User]) -> None:
    """Its operator hides GPUs from a launcher, unless that is a worker too."""
    user = make_user("mpi-operator")
    user.submit("import os; print(os.environ.get('NVIDIA_VISIBLE_DEVICES'))", name="it", nodes=3, devices=1,
                kind="mpijob")  # fmt: skip
    job = user.ended("it")
    assert (job.state, user.lines("it")) == ("SUCCEEDED", ["None"] * 3), job
    assert [it.node.partition("/")[2] for it in job.instances] == ["it-launcher", "it-worker-0", "it-worker-1"]
    user.cluster.do(lambda: user.cluster.api.custom_schemas["kubeflow.org/v2beta1/MPIJob"]["properties"]["spec"][
        "properties"].pop("runLauncherAsWorker"))  # fmt: skip
    with pytest.raises(UserError, match="has no runLauncherAsWorker, so node 0, its launcher, has no GPU; add --plain"):
        user.submit("pass", name="other", nodes=2, devices=1, kind="mpijob")
    user.submit("pass", name="other", nodes=2, kind="mpijob")
    assert user.ended("other").state == "SUCCEEDED"


@pytest.mark.needs("mpirun")
def test_mpi_programs_in_an_mpijob(make_user: Callable[..., User]) -> None:
    """Its launcher's variables are for mpirun with ssh; agents start mpirun's daemons."""
    user = make_user("mpi-operator")
    script = "from mpi4py import MPI\nprint('rank', MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank), flush=True)"
    user.submit(script, name="it", nodes=2, ranks=1, kind="mpijob", framework="mpi", placement="spread")
    job = user.ended("it")
    assert job.state == "SUCCEEDED", (job, user.lines("it"))
    assert user.lines("it") == ["rank 1"] * 2


def test_what_a_cluster_does_not_serve_is_refused(make_user: Callable[..., User]) -> None:
    user = make_user()
    with pytest.raises(UserError, match=r"does not serve PyTorchJob kubeflow.org/v1, which .* brings; it serves job$"):
        user.submit("", name="it", kind="pytorchjob")
    user.cluster.install("training-operator")
    with pytest.raises(UserError, match=r"^--gang volcano: the cluster has no PodGroup scheduling.volcano.sh/v1beta1"):
        user.submit("", name="it", kind="pytorchjob", gang="volcano")
    with pytest.raises(UserError, match=r"^--worker-image: a Job has one template for all pods"):
        user.submit("", name="it", worker_image="other")
    user.nothing_left("it")


def test_in_the_foreground(paceline: Paceline, make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(operators=["training-operator"])
    paceline.env["KUBECONFIG"] = str(cluster.kubeconfig)
    where = ("--on", "kubernetes", "--image", "usual", "--kind", "pytorchjob")
    done = paceline("run", *where, "--name", "it", paceline.script("print('hello')"))
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    found = cluster.get("PyTorchJob", "it")
    assert found and "ownerReferences" not in found["metadata"] and cluster.all("Job") == []
    long = paceline.script("import time; print(1, flush=True); time.sleep(600)")
    running = paceline.start("run", *where, "--name", "long", long)
    assert running.stdout is not None and running.stdout.readline() == "1\n"
    (owner,) = cluster.get("PyTorchJob", "long")["metadata"]["ownerReferences"]  # type: ignore[index]
    assert owner["kind"] == "Job" and cluster.get("Job", "long"), "which ends when the client is killed"
    running.send_signal(signal.SIGINT)
    out = running.communicate(timeout=120)
    assert "stop" in out[1] and running.returncode == 130, (running.returncode, out)
    assert '"state": "STOPPED"' in paceline("get", "--on", "kubernetes", "long", "-o", "json").stdout
