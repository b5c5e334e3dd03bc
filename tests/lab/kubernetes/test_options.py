"""The options of a job are kept with it, and those of the target are its own business."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from paceline.job.errors import UserError
from paceline.job.spec import JobSpec

from .user import Silence

if TYPE_CHECKING:
    from .user import User

OPTIONS = {
    "selector": "disk=ssd", "tolerations": "gpu=true:NoSchedule", "shm": "1Gi", "priority_class": "high",
    "annotations": "team=vision", "resources": "rdma/hca=1", "pod_template": "pod.yaml", "gpu_resource": "amd.com/gpu",
}  # fmt: skip


def pod(manifests: str) -> dict[str, Any]:
    (job,) = [it for it in yaml.safe_load_all(manifests) if it["kind"] == "Job"]
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


def test_options_come_back_when_a_job_is_run_again(user: User) -> None:
    Path("pod.yaml").write_text("spec: {terminationGracePeriodSeconds: 77}\n")
    Path("it.py").write_text("pass\n")
    there = user.backend(selector={"disk": "old"}, service_account="me")
    spec = JobSpec(script="it.py", name="it", options=OPTIONS, devices=1, queue="vision", ttl="1h")
    there.start(there.prepare(spec), Silence())
    Path("pod.yaml").unlink()
    kept = user.get("it").options
    assert {name: kept[name] for name in ("selector", "shm", "annotations")} == {
        "selector": {"disk": "ssd"}, "shm": "1Gi", "annotations": {"team": "vision"},
    }  # fmt: skip
    stored = there.spec("it")
    again = pod(there.prepare(stored.changed({"name": "again", "resume_from": "it"})).text())
    assert again["nodeSelector"] == {"disk": "ssd"} and again["serviceAccountName"] == "me"
    assert {"key": "gpu", "operator": "Equal", "value": "true", "effect": "NoSchedule"} in again["tolerations"]
    assert (again["priorityClassName"], again["terminationGracePeriodSeconds"]) == ("high", 77)
    limits = again["containers"][0]["resources"]["limits"]
    assert (limits["amd.com/gpu"], limits["rdma/hca"]) == ("1", "1")
    changes = {"name": "other", "resume_from": "it", "options": {**stored.options, "selector": "disk=new"}}
    assert pod(there.prepare(stored.changed(changes)).text())["nodeSelector"] == {"disk": "new"}


def test_unknown_options_are_refused(user: User) -> None:
    for option, said in {"shn": "did you mean shm?", "namespace": "choose one of annotations, capabilities"}.items():
        with pytest.raises(UserError, match=rf"^--option {option}: kubernetes has no such option; {said}"):
            user.backend().prepare(JobSpec(command="true", options={option: "x"}))


def test_a_namespace_that_is_restricted_takes_jobs_that_do_not_run_as_root(user: User) -> None:
    def enforce(level: str | None) -> None:
        labels = {"pod-security.kubernetes.io/enforce": level}
        user.cluster.patch("Namespace", "default", {"metadata": {"labels": labels}}, "")

    enforce("restricted")
    try:
        said = [finding.what for finding in user.backend().check(Silence()).findings]
        assert "admits no pods that may run as root (pod security: restricted)" in said
        Path("it.py").write_text("pass\n")
        (warning,) = user.backend().prepare(JobSpec(script="it.py", name="it", image="usual")).warnings
        assert warning.startswith(
            'the cluster warns: would violate PodSecurity "restricted:latest": runAsNonRoot != true'
        )
        assert warning.endswith("; add --run-as UID:GID, or --run-as image for an image with a user")
        there = user.backend(run_as="1000:1000")
        report = there.check(Silence())
        assert ("pods: enforce", "restricted") in report.sections["Cluster"]
        assert not [it for it in report.findings if "pod security" in it.what]
        Path("it.py").write_text("import getpass, os\nprint(os.getuid(), os.getgid(), getpass.getuser())\n")
        prepared = there.prepare(JobSpec(script="it.py", name="it", image="usual"))
        assert prepared.warnings == ()
        there.start(prepared, Silence())
        assert user.ended("it").state == "SUCCEEDED"
        assert user.lines("it") == ["1000 1000 paceline"]
    finally:
        enforce(None)
