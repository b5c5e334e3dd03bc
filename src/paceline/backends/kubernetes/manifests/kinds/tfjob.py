"""TFJob of the Kubeflow Training Operator: a Chief and workers."""

from __future__ import annotations

from .replicas import Replicated


class TFJob(Replicated):
    """The operator gives each pod TF_CONFIG, in which node 0 is the chief."""

    name = "tfjob"
    title = "TFJob"
    plural = "tfjobs"
    field = "tfReplicaSpecs"
    container = "tensorflow"
    main_role = "Chief"
