"""PaddleJob of the Kubeflow Training Operator: workers."""

from __future__ import annotations

from .replicas import Replicated


class PaddleJob(Replicated):
    """The operator gives each pod PADDLE_MASTER and PADDLE_NNODES; the first worker is the master."""

    name = "paddlejob"
    title = "PaddleJob"
    plural = "paddlejobs"
    field = "paddleReplicaSpecs"
    container = "paddle"
    main_role = None
