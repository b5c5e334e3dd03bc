"""The command lines of README.md, kubernetes.md and from-cube-studio.md that need a cluster."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tests.docs.pages import DOCS, README, blocks
from tests.docs.test_blocks import commands

if TYPE_CHECKING:
    from fake_kubernetes.cluster import Cluster
    from tests.conftest import Paceline

LINES = {
    line: None
    for page in (README, DOCS / "kubernetes.md", DOCS / "from-cube-studio.md")
    for block in blocks(page)
    if block.reason.endswith(__name__.rpartition(".")[2] + ".py")
    for line in commands(block)
    if line.startswith("paceline ")
}


def test_the_lines_of_the_pages(paceline: Paceline, cluster: Cluster) -> None:
    paceline.env["KUBECONFIG"] = str(cluster.kubeconfig)
    cluster.claim("kubeflow-user-workspace")
    name = paceline.script("print('hello')", "train.py")
    paceline.succeeds("submit", "--on", "kubernetes", "--image", "usual", "--name", "train-7kq2w", name)
    for line in LINES:
        _, verb, *words = shlex.split(line)
        done = paceline(verb, *(["--dry-run"] if verb == "submit" else []), *words)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    assert {line.split()[1] for line in LINES} == {"check", "submit", "logs"}
