"""A user of a cluster, who submits scripts from a folder; in this process, which is faster than the command line."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.conftest import eventually

from paceline.backends import registry
from paceline.backends.base import LogQuery
from paceline.job.spec import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from fake_kubernetes.cluster import Cluster

    from paceline.backends.kubernetes.backend import Kubernetes
    from paceline.job.job import Job


class Silence:
    """Progress that nobody sees.

    Attributes:
        said: the lines that would be shown.
    """

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, what: str, done: int, total: int | None, now: str = "") -> None:
        pass

    def say(self, line: str) -> None:
        self.said.append(line)


class User:
    """What a user does with a cluster."""

    def __init__(self, cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch, context: str = "admin") -> None:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        monkeypatch.setenv("PACELINE_HOME", str(folder / "home"))
        (folder / "work").mkdir(exist_ok=True)
        monkeypatch.chdir(folder / "work")
        self.cluster, self.context = cluster, context

    def backend(self, **options: Any) -> Kubernetes:
        found = registry.load("kubernetes", {"image": "usual", "context": self.context, **options})
        return found  # type: ignore[return-value]

    def submit(self, script: str, **given: Any) -> Job:
        """Submit a script; keywords are fields of the job, or options of the backend."""
        from paceline.backends.kubernetes.backend import Kubernetes
        from paceline.backends.kubernetes.options import Options

        given["options"] = {key: given.pop(key) for key in [*given] if key in Kubernetes.job_options()}
        options = {key: given.pop(key) for key in [*given] if key in Options.__struct_fields__ and key != "image"}
        name = f"{given.get('name', 'script')}.py"
        Path(name).write_text(textwrap.dedent(script))
        there = self.backend(**options)
        return there.start(there.prepare(JobSpec.validated({"script": name, **given})), Silence())

    def get(self, name: str) -> Job:
        (job,) = self.backend().describe([name]).jobs
        return job

    def ended(self, name: str) -> Job:
        assert self.backend().wait([name], 120), self.get(name)
        return self.get(name)

    def wrote(self, name: str, line: str, times: int = 1) -> None:
        """Wait until ranks of a job have written a line so often; the files of the nodes are read, nobody is asked."""
        eventually(
            lambda: self.written(name, line) >= times, lambda: f"{times} of {line!r} in {self.cluster.written(name)}"
        )

    def written(self, name: str, line: str) -> int:
        """How often ranks of a job have written a line."""
        return sum(found.endswith(f"] {line}") for found in self.cluster.written(name))

    def until(self, name: str, condition: Callable[[Job], object]) -> Job:
        """Wait until something is true of a job; each look starts a program in each of its pods that run."""
        seen: list[Job] = []

        def look() -> object:
            seen[:] = [self.get(name)]
            return condition(seen[0])

        try:
            eventually(look, f"of job {name}")
        except AssertionError:
            raise AssertionError(str(seen)) from None
        return seen[0]

    def lines(self, name: str, ranks: tuple[int, ...] | None = None, **query: Any) -> list[str]:
        found = self.backend().logs(name, LogQuery(ranks, **query))
        return [line.text.decode().rstrip("\n") for line in found]

    def deadlines_pass(self) -> None:
        """Let the time be over after which the cluster ends Jobs; what has no deadline goes on."""
        for job in self.cluster.all("Job"):
            if job["spec"].get("activeDeadlineSeconds"):
                self.cluster.patch("Job", job["metadata"]["name"], {"spec": {"activeDeadlineSeconds": 1}})

    def nothing_left(self, name: str) -> None:
        """Wait until nothing of a job is in the cluster."""

        def left() -> list[str]:
            kinds = ("Job", "Pod", "Service", "ConfigMap", "Secret", *self.cluster.custom())
            every = [(kind, it["metadata"]["name"]) for kind in kinds for it in self.cluster.all(kind)]
            return [f"{kind} {found}" for kind, found in every if found.startswith(name)]

        eventually(lambda: not left(), f"nothing is left of {name}: {left()}")
