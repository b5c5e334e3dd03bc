"""paceline in a pod: the cluster is that of its service account."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

from fake_kubernetes import images
from tests.conftest import eventually

if TYPE_CHECKING:
    from fake_kubernetes.cluster import Cluster

SCRIPT = """
    folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT  # what is beside the script is sent
    mkdir "$folder/work" && cd "$folder/work" && export PACELINE_HOME="$folder/home"
    unset KUBECONFIG
    echo 'print("from within", flush=True)' > inner.py
    paceline submit --on kubernetes --image usual --name inner inner.py || exit 1
    paceline logs -f inner || exit 2
    paceline delete inner && paceline list --on kubernetes -o json
    paceline list --on kubernetes --namespace kube-system
    echo "code $?"
"""


def test_a_pod_with_an_account_submits_jobs(cluster: Cluster) -> None:
    usual = images.usual()
    cluster.images["client"] = replace(usual, hidden=tuple(path for path in usual.hidden if "paceline" not in path))
    every = ["get", "list", "watch", "create", "patch", "delete"]
    api = "rbac.authorization.k8s.io/v1"
    cluster.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "launcher"}})
    cluster.create({"apiVersion": api, "kind": "Role", "metadata": {"name": "r"}, "rules": [
        {"apiGroups": ["", "batch"], "verbs": every,
         "resources": ["jobs", "pods", "pods/log", "services", "configmaps", "secrets", "events"]},
    ]})  # fmt: skip
    cluster.create({
        "apiVersion": api, "kind": "RoleBinding", "metadata": {"name": "r"},
        "subjects": [{"kind": "ServiceAccount", "name": "launcher"}],
        "roleRef": {"kind": "Role", "name": "r", "apiGroup": "x"},
    })  # fmt: skip
    container = {"name": "main", "image": "client", "command": ["sh", "-c", textwrap.dedent(SCRIPT)]}
    cluster.create({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "launcher"},
        "spec": {"restartPolicy": "Never", "serviceAccountName": "launcher", "containers": [container]},
    })  # fmt: skip

    def phase() -> str:
        (pod,) = (it for it in cluster.all("Pod") if it["metadata"]["name"] == "launcher")
        return str(pod["status"].get("phase"))

    def read() -> str:
        lines = cluster.runner("launcher").logs["main"][-1].path.read_text().splitlines(keepends=True)
        return "".join(line.partition(" ")[2] for line in lines)

    try:
        eventually(lambda: phase() in ("Succeeded", "Failed"), "the pod ends")
    except AssertionError:
        raise AssertionError(f"{phase()}: {read()}") from None
    log = read()
    assert "from within" in log and log.startswith("inner\n"), log
    assert log.count("[]") == 1, log
    assert "cannot list resource" in log and log.rstrip().endswith("code 2"), log
