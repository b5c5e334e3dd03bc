"""A Kubernetes cluster does what every backend does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml
from tests.backends.contract import USUAL, Contract, Place

if TYPE_CHECKING:
    from fake_kubernetes.cluster import Cluster
    from tests.conftest import Paceline

pytestmark = pytest.mark.usefixtures("kubectl")


def ranks_of(shown: str) -> tuple[str, int]:
    """The name and the ranks of a dry run in YAML."""
    job, *_ = yaml.safe_load_all(shown)
    spec = json.loads(job["metadata"]["annotations"]["paceline.dev/spec"])
    return job["metadata"]["name"], job["spec"]["completions"] * spec["ranks"]


class TestKubernetes(Contract):
    @pytest.fixture
    def place(self, paceline: Paceline, new_cluster: Cluster) -> Place:
        paceline.env["KUBECONFIG"] = str(new_cluster.kubeconfig)
        settings = '[targets.lab]\nbackend = "kubernetes"\nimage = "usual"\n'
        (paceline.folder / "paceline.toml").write_text(settings)
        return Place(
            paceline, ("--on", "lab"), "lab",
            USUAL | {"elastic", "tensorboards"},
            (new_cluster.folder,),
            frozenset({"--image", "--queue"}), keeps_shells=False, dry=ranks_of, nodes=2,
        )  # fmt: skip
