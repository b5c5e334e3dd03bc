"""What is said of an API server's refusals."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.backends.kubernetes.api.errors import explained


@pytest.mark.parametrize(
    ("template", "advice"),
    [
        ({}, "the cluster's mpijobs.kubeflow.org is older than what asks for this: leave that out, or have it updated"),
        ({"spec": {"containers": [{"tty": True}]}}, "the cluster's mpijobs.kubeflow.org is older than what asks for"),
        ({"spec": {"containers": [{"colour": "red"}]}}, "correct --pod-template"),
    ],
)
def test_a_field_that_the_server_does_not_know(template: dict[str, Any], advice: str) -> None:
    message = 'strict decoding error: unknown field "spec.mpiReplicaSpecs.Launcher.template.spec.containers[0].colour"'
    path = "/apis/kubeflow.org/v2beta1/namespaces/ml/mpijobs"
    line = explained(400, {"message": message}, "POST", path, context="lab", where="", template=template)
    assert line.startswith(f"the API server refuses the manifest: {message}; {advice}") and "\n" not in line
