"""Verbs on a cluster of the tests' lab: a real API server's answers, and pods that are processes of this machine.

The other side is kubectl, which is written in Go, or the other client library for Python.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ..case import Case, Side
from ..lab import SCRIPTS, Lab, timed
from ..sample import Failed, Sample

if TYPE_CHECKING:
    from fake_kubernetes.cluster import Cluster

NOTHING, TOUCHES = str(SCRIPTS / "nothing.py"), str(SCRIPTS / "touch.py")
STEPS = str(SCRIPTS / "steps_on_volume.py")
JOBS, PODS = 1000, 10  # of each job
TIMEOUT = 180.0  # seconds
_MANY = "many"  # the namespace with so many jobs
_NUMBERS = itertools.count()


def _submit(pods: int) -> Callable[[Lab], Sample]:
    """The time, the requests and the memory of `submit`; the pods have no room on a node."""

    def measure(lab: Lab) -> Sample:
        return _counted(lab, _without_room(lab, "submit", pods))

    return measure


def _apply(pods: int) -> Callable[[Lab], Sample]:
    """The same of kubectl, with the same objects."""

    def measure(lab: Lab) -> Sample:
        path = lab.folder / "objects.yaml"
        path.write_text(_output(lab, _without_room(lab, "apply", pods, "--dry-run")))
        return _counted(lab, [_kubectl(), "apply", "-f", str(path)])

    return measure


def _without_room(lab: Lab, prefix: str, pods: int, *flags: str) -> list[str]:
    """Submits a job whose pods need more GPUs than a node has."""
    lab.cluster()
    given = ["--image", "usual", "--name", f"{prefix}-{next(_NUMBERS)}", "--nnodes", str(pods), "--gpus", "99", *flags]
    return _paceline("submit", *given, NOTHING)


def _with_many_jobs(*command: str) -> Callable[[Lab], Sample]:
    """The time, the requests and the memory of a command while the cluster has 1,000 jobs with 10 pods each."""

    def measure(lab: Lab) -> Sample:
        cluster = lab.cluster()
        if not cluster.all("Job", _MANY):
            cluster.namespace(_MANY)
            line = _without_room(lab, "many", PODS, "--dry-run", "--namespace", _MANY)
            (job,) = [one for one in yaml.safe_load_all(_output(lab, line)) if one["kind"] == "Job"]
            cluster.fill(job, JOBS, PODS, _MANY)
        if command[0] == "kubectl":
            return _counted(lab, [_kubectl(), *command[1:]])
        return _counted(lab, _paceline(*command))

    return measure


def _until_it_runs(lab: Lab) -> Sample:
    """Seconds from `submit` until the script of a job does its first line."""
    cluster, name = lab.cluster(), f"runs-{next(_NUMBERS)}"
    touched = cluster.claim(name) / "touched"
    line = ["submit", "--image", "usual", "--name", name, "--data", f"{name}:/claim", TOUCHES, "/claim/touched"]
    return _until_touched(cluster, lab, _paceline(*line), name, touched)


def _until_an_empty_job_runs(lab: Lab) -> Sample:
    """The same of a Job with one container and nothing else."""
    cluster, name = lab.cluster(), f"empty-{next(_NUMBERS)}"
    touched = cluster.claim(name) / "touched"
    container = {
        "name": "main", "image": "usual", "command": ["touch", "/claim/touched"],
        "volumeMounts": [{"name": "claim", "mountPath": "/claim"}],
    }  # fmt: skip
    volumes = [{"name": "claim", "persistentVolumeClaim": {"claimName": name}}]
    template = {"spec": {"restartPolicy": "Never", "containers": [container], "volumes": volumes}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"template": template}}
    path = lab.folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return _until_touched(cluster, lab, [_kubectl(), "create", "-f", str(path)], name, touched)


def _until_touched(cluster: Cluster, lab: Lab, command: list[str], name: str, path: Path) -> Sample:
    began = time.monotonic()
    _output(lab, command)
    while not path.exists():
        if time.monotonic() - began > TIMEOUT:
            raise Failed(f"job {name} did not run in {TIMEOUT:g} s")
        time.sleep(0.005)
    seconds = time.monotonic() - began
    cluster.ended(name)
    return Sample(seconds)


def _until_a_pod_is_replaced(lab: Lab) -> Sample:
    """Seconds from the deletion of a pod until the job, with another one in its place, has done a step."""
    cluster, name = lab.cluster(), f"replaced-{next(_NUMBERS)}"
    path = cluster.claim(name) / "steps"
    line = ["submit", "--image", "usual", "--name", name, "--nnodes", "2", "--max-restarts", "1"]
    _output(lab, _paceline(*line, "--data", f"{name}:/claim", STEPS, "/claim/steps"))
    try:
        _until_attempt(0, path)
        pods = [pod["metadata"] for pod in cluster.all("Pod")]
        (pod,) = [it["name"] for it in pods if it["name"].startswith(f"{name}-1-")]
        began = time.monotonic()
        cluster.delete("Pod", pod)
        return Sample(_until_attempt(1, path) - began)
    finally:
        _output(lab, _paceline("delete", "--force", name))


def _until_attempt(attempt: int, path: Path) -> float:
    """Wait until this attempt has done a step; returns when it did its first."""
    began = time.monotonic()
    while time.monotonic() - began < TIMEOUT:
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            number, _, moment = line.partition(" ")
            if int(number) == attempt:
                return float(moment)
        time.sleep(0.01)
    raise Failed(f"attempt {attempt} did no step in {TIMEOUT:g} s")


def _counted(lab: Lab, command: list[str]) -> Sample:
    requests = lab.cluster().server.requests
    before = len(requests)
    answer = lab.answer([sys.executable, str(SCRIPTS / "peak.py"), *command])
    return Sample(answer["seconds"], megabytes=answer["bytes"] / 1e6, requests=len(requests) - before)


def _output(lab: Lab, command: list[str]) -> str:
    """What a command prints."""
    done = subprocess.run(command, env=lab.env, cwd=lab.folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(done.stderr.strip())
    return done.stdout


def _paceline(verb: str, *args: str) -> list[str]:
    return [sys.executable, "-m", "paceline", *verb.split(), "--on", "kubernetes", *args]


def _kubectl() -> str:
    found = shutil.which("kubectl")
    if found is None:
        raise Failed("kubectl is not installed")
    return found


CASES = [
    Case(
        "kubernetes-import",
        "import of the client library",
        Side("httpx2", timed(sys.executable, "-c", "import httpx2")),
        Side("kubernetes", timed(sys.executable, "-c", "import kubernetes.client")),
    ),
    *(
        Case(
            f"kubernetes-submit-{pods}",
            f"submit a job of {pods} pod{'s' * (pods > 1)}, until the prompt is back",
            Side("paceline submit", _submit(pods)),
            Side("kubectl apply", _apply(pods)),
        )
        for pods in (1, 10)
    ),
    Case(
        "kubernetes-start",
        "submit a job until its script runs",
        Side("paceline submit", _until_it_runs),
        Side("kubectl create, an empty Job", _until_an_empty_job_runs),
    ),
    Case(
        "kubernetes-replaced",
        "a pod of two is deleted → the job steps again",
        Side("paceline, --max-restarts 1", _until_a_pod_is_replaced),
        None,
    ),
    Case(
        "kubernetes-list",
        f"list {JOBS:,} jobs that have {JOBS * PODS:,} pods",
        Side("paceline list", _with_many_jobs("list", "--namespace", _MANY)),
        Side("kubectl get jobs,pods", _with_many_jobs("kubectl", "get", "jobs,pods", "-n", _MANY)),
    ),
    Case(
        "kubernetes-top",
        f"what is allocated of the nodes, with {JOBS * PODS:,} pods",
        Side("paceline top node", _with_many_jobs("top node")),
        Side("kubectl describe nodes", _with_many_jobs("kubectl", "describe", "nodes")),
    ),
]
