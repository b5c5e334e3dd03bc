"""The manifests of a job: what Kubernetes takes, and what the pods find."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import tarfile
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.kubernetes.look.pods import seen
from paceline.backends.kubernetes.manifests import manifest as manifests
from paceline.backends.kubernetes.manifests import names, objects, replacing
from paceline.backends.kubernetes.manifests.kinds.base import Kind
from paceline.backends.kubernetes.manifests.kinds.job import BatchJob
from paceline.backends.kubernetes.manifests.kinds.kubeflow import PyTorchJob
from paceline.backends.kubernetes.manifests.order import Order
from paceline.backends.kubernetes.options import Options
from paceline.backends.kubernetes.start import dry_run
from paceline.backends.packing import archive
from paceline.contract import TOKEN
from paceline.job.errors import UserError
from paceline.job.spec import JobSpec

VERSIONS = ("1.25", "1.30", "1.37")


def order(
    code: bytes | None = None, secrets: dict[str, str] | None = None, kind: type[Kind] = BatchJob, **given: Any
) -> Order:
    options = Options.validated({key: given.pop(key) for key in [*given] if key in Options.__struct_fields__})
    spec = JobSpec.validated({"script": "train.py", "image": "training:1", **given})
    record = None if code is None else {"mode": "snapshot", "source": "/there"}
    return Order(
        "it", spec, options, "ml", "1234", b"" if options.plain else archive().data, code,
        record=record, secrets=secrets or {}, kind=kind(),
    )  # fmt: skip


def job_of(code: bytes | None = None, **given: Any) -> dict[str, Any]:
    it = order(code, **given)
    found: dict[str, Any] = it.kind.manifest(it)  # type: ignore[attr-defined]
    return found


def check(manifest: dict[str, Any], version: str) -> None:
    """Check a manifest by the schemas of a version of Kubernetes."""
    import kubernetes_validate  # takes long to import

    kubernetes_validate.validate(manifest, version, strict=True)


def container(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["template"]["spec"]["containers"][0]


ALL = {
    "nodes": 3, "devices": 2, "cpus": 4, "memory": "16Gi", "env": {"A": "1"}, "labels": {"team": "vision", "x": "a b"},
    "data": ["training-data:/mnist_data", "training-data:/again"], "ttl": "60s", "queue": "fast", "shm": "8Gi",
    "selector": {"disk": "ssd"}, "tolerations": "gpu=true:NoSchedule,all", "placement": "spread",
    "priority_class": "high", "service_account": "trainer", "annotations": {"a/b": "c"}, "host_network": True,
    "ports": "8080", "pull_policy": "Always", "pull_secrets": "registry", "resources": "rdma/hca=1",
    "pod_template": {"spec": {"schedulerName": "other", "containers": [{"name": "main", "tty": True}]}},
}  # fmt: skip

MORE = {"run_as": "7:8", "capabilities": "chown", "work_size": "9Gi", "topology": "zone"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("given", [{}, {**ALL, **MORE}, {"plain": True, "script": "start.py", "nodes": 2}])
def test_kubernetes_knows_every_field(given: dict[str, Any], version: str) -> None:
    it = order(b"x" * 2_000_000, {"HF": "s"}, **given) if not given.get("plain") else order(**given)
    for manifest in [it.kind.manifest(it), *it.kind.dependents(it)]:
        check(manifest, version)


@pytest.mark.parametrize(("given", "limits"), [
    ({"nodes": 2}, (0, 0)), ({"nodes": 3, "max_restarts": 5}, (2, 15)), ({"nodes": 1, "max_restarts": 2}, (0, 2)),
    ({"plain": True, "nodes": 2, "max_restarts": 2}, (0, 0)), ({"nodes": "2:4"}, (1, 40)),
])  # fmt: skip
def test_what_becomes_of_failed_pods(given: dict[str, Any], limits: tuple[int, int]) -> None:
    orders = (replace(order(**given), minor=minor) for minor in (25, 30))
    old, new = (it.kind.manifest(it) for it in orders)  # type: ignore[attr-defined]
    check(new, "1.30")
    assert (old["spec"]["backoffLimit"], new["spec"]["backoffLimit"]) == limits
    assert "podFailurePolicy" not in old["spec"]
    rules = new["spec"].get("podFailurePolicy", {}).get("rules", [])
    assert [rule["action"] for rule in rules] == (["Ignore", "Ignore", "FailJob"] if limits[1] else [])


def test_a_job_of_min_to_max_pods_ends_with_pod_0_where_the_server_can_end_it() -> None:
    old, new = (replace(order(nodes="1:2"), minor=minor) for minor in (30, 31))
    fixed = replace(order(nodes=2, max_restarts=1), minor=31)
    for it, wanted in ((old, None), (new, {"rules": [{"succeededIndexes": "0"}]}), (fixed, None)):
        job = it.kind.manifest(it)  # type: ignore[attr-defined]
        check(job, "1.31")
        assert job["spec"].get("successPolicy") == wanted
        assert objects.request(it).ends_with_first == (wanted is not None)


@pytest.mark.parametrize(
    ("given", "minor", "seconds"),
    [
        ({"nodes": 2, "max_restarts": 1}, 24, 1200.0),
        ({"nodes": 2, "max_restarts": 1, "join_timeout": "600s"}, 24, 600.0),
        ({"nodes": 2}, 24, 600.0),
        ({"nodes": "1:2"}, 30, 600.0),
        ({"nodes": "1:2"}, 31, 1200.0),
    ],
)
def test_pods_outwait_the_pause_before_a_lost_one_is_made_again(
    given: dict[str, Any], minor: int, seconds: float
) -> None:
    assert replacing.patient(replace(order(**given), minor=minor)).join_timeout == seconds


def test_a_pod_may_end_longer_than_its_ranks() -> None:
    pod = job_of(grace="90s")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 90, "its agent reports what became of them"


def test_what_a_user_sets_is_in_the_pods() -> None:
    job = job_of(**ALL)
    pod, main = job["spec"]["template"]["spec"], container(job)
    wanted = {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "2", "rdma/hca": "1"}
    assert main["resources"] == {"limits": wanted, "requests": wanted}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod["volumes"]
    mounted = {it["mountPath"]: it["name"] for it in main["volumeMounts"]}
    assert mounted["/dev/shm"] == "shm" and mounted["/mnist_data"] == mounted["/again"] == "data-0"
    assert {"name": "data-0", "persistentVolumeClaim": {"claimName": "training-data"}} in pod["volumes"]
    assert pod["nodeSelector"] == {"disk": "ssd"}
    assert pod["tolerations"] == [
        {"key": "gpu", "operator": "Equal", "value": "true", "effect": "NoSchedule"}, {"operator": "Exists"},
    ]  # fmt: skip
    assert "podAntiAffinity" in pod["affinity"]
    assert (pod["schedulerName"], main["tty"], main["image"]) == ("other", True, "training:1")
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert [port["containerPort"] for port in main["ports"]] == [29500, 8080]
    assert main["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    labels = job["metadata"]["labels"]
    assert labels["app.kubernetes.io/instance"] == "it" and labels["paceline.dev/label-team"] == "vision"
    assert labels["kueue.x-k8s.io/queue-name"] == "fast" and "paceline.dev/label-x" not in labels
    assert json.loads(job["metadata"]["annotations"]["paceline.dev/labels"]) == {"team": "vision", "x": "a b"}
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["backoffLimit"]) == ("Indexed", 3, 0)


def test_labels_with_a_prefix_are_those_of_the_cluster() -> None:
    named = {"kueue.x-k8s.io/priority-class": "high", "example.com/cost": "", "team": "vision", "a b": "c"}
    it = order(labels=named, annotations={"sidecar.istio.io/inject": "true"})
    job = it.kind.manifest(it)  # type: ignore[attr-defined]
    check(job, VERSIONS[0])
    for labels in (job["metadata"]["labels"], job["spec"]["template"]["metadata"]["labels"]):
        assert (labels["kueue.x-k8s.io/priority-class"], labels["example.com/cost"]) == ("high", "")
        assert labels["paceline.dev/label-team"] == "vision" and "a b" not in " ".join(labels)
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in (job, job_of())]
    assert [labels["sidecar.istio.io/inject"] for labels in pods] == ["true", "false"]
    for label, words in (
        (("example.com/a", "b c"), "--label example.com/a=b c: a label's value has up to 63 letters"),
        (("Example/a", "b"), "--label Example/a=b: Kubernetes takes no label of that name"),
        (("example.com/", "b"), "takes no label of that name"), (("a.b/c/d", "e"), "takes no label of that name"),
        (("kueue.x-k8s.io/queue-name", "q"), "the queue of a job is named with --queue q"),
        (("app.kubernetes.io/instance", "x"), "paceline sets this label itself"),
    ):  # fmt: skip
        with pytest.raises(UserError) as refused:
            order(labels=dict([label])).check()
        assert words in str(refused.value)


def test_a_container_that_was_put_before_that_of_the_ranks() -> None:
    def entry(name: str, code: int) -> dict[str, Any]:
        ended = {"exitCode": code, "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:01:00Z"}
        return {"name": name, "restartCount": 0, "state": {"terminated": ended}}

    spec = {"containers": [{"name": "proxy"}, {"name": "main", "command": ["python3"]}]}
    status = {"phase": "Failed", "containerStatuses": [entry("proxy", 0), entry("main", 3)]}
    meta = {"name": "it-0", "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {}}
    pod = seen({"metadata": meta, "spec": spec, "status": status})
    assert (pod.container, pod.exit_code, pod.error) == ("main", 3, "exit code 3")


def test_pods_have_no_permission_unless_they_are_given_an_account() -> None:
    assert job_of()["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert job_of(**ALL)["spec"]["template"]["spec"]["automountServiceAccountToken"] is True


def test_a_plain_job_runs_the_users_command_in_its_environment() -> None:
    job = job_of(plain=True, nodes=2, script="start.py", args=["--lr", "1"], env={"NCCL_DEBUG": "INFO"})
    main = container(job)
    assert main["command"] == ["python3", "start.py", "--lr", "1"]
    env = {it["name"]: it.get("value") for it in main["env"]}
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["WORLD_SIZE"]) == ("it-0.it", "29500", "2")
    assert env["NCCL_DEBUG"] == "INFO" and "RANK" in env
    assert objects.config_maps(order(plain=True)) == []


@pytest.mark.parametrize("more", [0, 700_000, 3_500_000])
def test_code_goes_in_pieces_that_fit_and_come_together_again(more: int) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("train.py"))
    data = packed.getvalue() + bytes(more)
    maps = objects.config_maps(order(data))
    job = job_of(data)
    pieces: dict[str, bytes] = {}
    for manifest in maps:
        files = {key: base64.b64decode(text) for key, text in manifest["binaryData"].items()}
        size = sum(map(len, files.values())) + sum(len(text.encode()) for text in manifest.get("data", {}).values())
        assert size <= 1_048_576
        if more < 2_000_000:
            assert len(json.dumps(manifest)) <= 262_144, "kubectl apply takes it"
        pieces.update(files)
    for name, whole in (("archive", archive().data), ("code", data)):
        parts = {key: piece for key, piece in pieces.items() if key.startswith(f"{name}-")}
        assert b"".join(parts[key] for key in sorted(parts)) == whole
    volume = next(it for it in job["spec"]["template"]["spec"]["volumes"] if it["name"] == "job")
    used = {it["configMap"]["name"] for it in volume["projected"]["sources"]}
    assert used == {manifest["metadata"]["name"] for manifest in maps}


@given(st.binary(max_size=50), st.binary(max_size=50), st.integers(0, 30), st.integers(1, 20), st.integers(1, 20))
def test_splitting_loses_nothing(one: bytes, two: bytes, taken: int, applied: int, most: int) -> None:
    before = objects.MOST_BYTES, objects.MOST_APPLIED
    objects.MOST_BYTES, objects.MOST_APPLIED = most, applied
    try:
        bins = objects.split({"a": one, "b": two}, taken)
    finally:
        objects.MOST_BYTES, objects.MOST_APPLIED = before
    pieces = {name: piece for files in bins for name, piece in files.items()}
    for name, whole in (("a", one), ("b", two)):
        assert b"".join(pieces[key] for key in sorted(pieces) if key.startswith(name)) == whole
    assert all(sum(map(len, files.values())) <= max(most, applied) for files in bins)


@pytest.mark.parametrize("kind", [BatchJob, PyTorchJob])
def test_what_a_dry_run_says_above_the_manifests(kind: type[Kind]) -> None:
    large = "Some objects are too large for kubectl apply alone: kubectl apply --server-side -f FILE"
    for code, is_large in ((b"x" * 700_000, False), (b"x" * 3_500_000, True)):
        it = order(code, {"HF": "s"}, kind=kind, nodes=2)
        made = [it.kind.manifest(it), *it.kind.dependents(it)]
        said = dry_run.comments(it, it.kind, made, hides=True)  # type: ignore[arg-type]
        assert (large in said) == is_large
        assert "Before, write the values of the secrets in place of <secret>." in said
        kinds = f"{it.kind.plural}.{it.kind.api_version.partition('/')[0]},"
        kinds += "services," if kind is BatchJob else ""
        assert said[-1] == f"  kubectl delete -n ml {kinds}configmaps,secrets -l app.kubernetes.io/instance=it"


def test_a_dry_run_prints_no_token_and_says_what_takes_its_place() -> None:
    it = order(secrets={"HF": "s", TOKEN: "abc"})
    shown = yaml.safe_load_all(manifests.text(it.kind.dependents(it)))
    assert [*shown][-1]["stringData"] == {"HF": "<secret>", TOKEN: "<secret>"}
    made = [it.kind.manifest(it), *it.kind.dependents(it)]  # type: ignore[attr-defined]
    assert any(line.startswith(f"{TOKEN} is any text") for line in dry_run.comments(it, it.kind, made, hides=True))


def security(**given: Any) -> tuple[Any, Any]:
    """The security context of a pod and of its container."""
    pod = job_of(**given)["spec"]["template"]["spec"]
    return pod.get("securityContext"), pod["containers"][0].get("securityContext")


def test_containers_get_what_restricted_asks_for_unless_more_is_asked_for() -> None:
    pod = {"seccompProfile": {"type": "RuntimeDefault"}}
    none = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert security() == (pod, none)
    user = {"runAsUser": 7, "runAsGroup": 8, "fsGroup": 8, "runAsNonRoot": True}
    assert security(run_as="7:8") == ({**pod, **user}, none)
    assert security(run_as="image") == ({**pod, "runAsNonRoot": True}, none)
    assert security(run_as="0") == ({**pod, "runAsUser": 0, "runAsNonRoot": False}, none)
    some = {**none, "capabilities": {"add": ["CHOWN", "IPC_LOCK"], "drop": ["ALL"]}}
    assert security(capabilities="cap_chown", resources="rdma/hca=1") == (pod, some)
    assert security(capabilities="default") == (pod, None)
    assert security(plain=True) == (None, None)


def test_folders_have_a_limit_where_one_is_known() -> None:
    def sizes(**given: Any) -> list[Any]:
        volumes = {it["name"]: it.get("emptyDir", {}) for it in job_of(**given)["spec"]["template"]["spec"]["volumes"]}
        return [volumes[name].get("sizeLimit") for name in ("shm", "work")]

    assert sizes() == [None, None]
    assert sizes(memory="16Gi", work_size="20Gi") == ["16Gi", "20Gi"]
    assert sizes(memory="16Gi", shm="1Gi") == ["1Gi", None]
    assert container(job_of(work_size="20Gi"))["resources"]["requests"] == {"ephemeral-storage": "20Gi"}


def test_pods_are_spread_and_packed_over_hosts_zones_and_racks() -> None:
    def spec(**given: Any) -> dict[str, Any]:
        found: dict[str, Any] = job_of(nodes=4, **given)["spec"]["template"]["spec"]
        return found

    near = spec(placement="pack", topology="example.org/rack")["affinity"]["podAffinity"]
    assert near["preferredDuringSchedulingIgnoredDuringExecution"][0]["podAffinityTerm"]["topologyKey"].endswith("rack")
    (apart,) = spec(placement="spread", topology="zone")["topologySpreadConstraints"]
    assert apart["topologyKey"] == "topology.kubernetes.io/zone" and apart["whenUnsatisfiable"] == "ScheduleAnyway"
    assert "podAntiAffinity" in spec(placement="spread")["affinity"]
    with pytest.raises(UserError, match=r"--topology: .* add --placement spread"):
        order(options={"topology": "zone"}, topology="zone").check()


@pytest.mark.parametrize(("option", "value", "why"), [
    ("topology", "rack", "for racks, name their label of nodes"), ("run_as", "me", "neither UID, UID:GID nor image"),
    ("capabilities", "chown,default", "default goes with no other"), ("capabilities", "a b", "is no capability"),
])  # fmt: skip
def test_what_is_no_user_capability_or_label_is_refused(option: str, value: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Options.validated({option: value})


def test_secrets_are_in_the_secret_alone() -> None:
    it = order(secrets={"HF_TOKEN": "very-secret"})
    manifests_ = [it.kind.manifest(it), *it.kind.dependents(it)]
    hidden = base64.b64encode(b"very-secret").decode()
    assert [one["kind"] for one in manifests_ if hidden in json.dumps(one)] == ["Secret"]
    shown = manifests.text(manifests_)
    assert "very-secret" not in shown and hidden not in shown
    assert list(yaml.safe_load_all(shown))[-1]["stringData"] == {"HF_TOKEN": "<secret>"}
    (variable,) = [it for it in container(manifests_[0])["env"] if it["name"] == "HF_TOKEN"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "it", "key": "HF_TOKEN"}}


@given(st.text(max_size=80), st.integers(1, 2000))
def test_every_name_has_a_valid_one_beside_it(text: str, nodes: int) -> None:
    name = names.valid_name(text, nodes)
    names.check_name(name, nodes)
    assert len(f"{name}-{nodes - 1}") <= 63


@pytest.mark.parametrize(("name", "take"), [("My_Train", "my-train"), ("1st", "job-1st"), ("a.b", "a-b")])
def test_a_name_that_no_host_can_have_is_refused(name: str, take: str) -> None:
    with pytest.raises(UserError, match=f"take for example {take}$"):
        names.check_name(name, 1)


@pytest.mark.parametrize("text", ["a", "=b", ","])
def test_pairs_are_checked(text: str) -> None:
    if text == ",":
        assert Options.validated({"selector": text}).selector == {}
    else:
        with pytest.raises(ValueError, match="is not NAME=VALUE"):
            Options.validated({"selector": text})


def test_the_value_of_an_annotation_may_have_commas() -> None:
    given = "k8s.v1.cni.cncf.io/networks=rdma0,rdma1,x=y,"
    found = Options.validated({"annotations": given}).annotations
    assert found == {"k8s.v1.cni.cncf.io/networks": "rdma0,rdma1", "x": "y"}
    with pytest.raises(ValueError, match="is not NAME=VALUE"):
        Options.validated({"annotations": "a,b=c"})


def test_a_pod_template_is_merged() -> None:
    base = {"a": {"b": 1, "c": 2}, "list": [{"name": "x", "v": 1}, {"name": "y"}], "plain": [1]}
    patch = {"a": {"b": None, "d": 3}, "list": [{"name": "x", "w": 2}, {"name": "z"}], "plain": [2]}
    assert manifests.merged(base, patch) == {
        "a": {"c": 2, "d": 3}, "list": [{"name": "x", "v": 1, "w": 2}, {"name": "y"}, {"name": "z"}], "plain": [2],
    }  # fmt: skip


def test_a_pod_template_takes_no_mount_away() -> None:
    more = {
        "command": ["sh"], "ports": [{"containerPort": 29500, "name": "agents"}],
        "volumeMounts": [
            {"name": "data-0", "mountPath": "/same", "subPath": "a"}, {"name": "shm", "mountPath": "/tmp"},
        ],
    }  # fmt: skip
    template = {"spec": {"containers": [{"name": "main", **more}]}}
    main = container(job_of(nodes=2, data=["claim:/data", "claim:/same"], pod_template=template))
    assert {it["mountPath"]: it["name"] for it in main["volumeMounts"]} == {
        "/dev/shm": "shm", "/tmp": "shm", "/data": "data-0", "/same": "data-0",
        objects.HERE: "job", objects.WORK: "work",
    }  # fmt: skip
    assert main["volumeMounts"][-2]["subPath"] == "a"
    assert main["ports"] == [{"containerPort": 29500, "name": "agents"}]
    assert main["command"] == ["sh"]


@pytest.mark.parametrize(
    ("image", "is_valid"),
    [
        ("a", True), ("registry/training:1", True), ("Host:5000/a__b/c-d.e:V1_x", True), ("[::1]:5000/a", True),
        ("a/b@sha256:" + "0" * 64, True), ("a:1@sha256:" + "0" * 64, True), ("UPPER CASE", False), ("Ubuntu", False),
        ("a/B", False), ("a:", False), ("a//b", False), ("a_", False), ("a@sha256:0", False), (" a", False),
    ],
)  # fmt: skip
def test_names_of_images(image: str, is_valid: bool) -> None:
    with contextlib.nullcontext() if is_valid else pytest.raises(UserError, match=r"^--image "):
        names.check_image("--image", image)
