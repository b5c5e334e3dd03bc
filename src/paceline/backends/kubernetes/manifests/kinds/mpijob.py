"""MPIJob: v2beta1 of the MPI Operator, v1 of the Training Operator, v1alpha1 of Arena's charts.

With agents the launcher is node 0, and the workers are the others: they run agents, which start mpirun's daemons, so
that no image needs sshd. With `--plain` the launcher runs the command, such as mpirun, besides the workers, which run
what the operator lets mpirun connect to: sshd (v2beta1), or `sleep` for `kubectl exec`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backends.kubernetes.api.times import moment
from paceline.backends.kubernetes.manifests import objects
from paceline.backends.kubernetes.manifests.names import FIRST_NODE, INSTANCE
from paceline.backends.kubernetes.manifests.objects import ranks
from paceline.backends.kubernetes.manifests.order import Role

from .base import Ending, service
from .kubeflow import WORKER_NUMBER, Replicated, replica

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.api.object import Object
    from paceline.backends.kubernetes.manifests.order import Order

_NEWEST, _FIRST = "v2beta1", "v1alpha1"
_AS_WORKER = "runLauncherAsWorker"
# What paceline sets in the spec of the first version, which has little more.
_OF_FIRST = ("backoffLimit", "cleanPodPolicy", "replicas", "template")


class MPIJob(Replicated):
    """A Launcher and workers. A Service of ours is the name of node 0: operators name launchers differently."""

    name = "mpijob"
    title = "MPIJob"
    plural = "mpijobs"
    versions = (_NEWEST, "v1", _FIRST)
    brought_by = "the MPI Operator or the Kubeflow Training Operator"
    field = "mpiReplicaSpecs"
    main_role = "Launcher"
    hosts = ("-launcher", "-worker-{before}")
    margin = len("-launcher-xxxxx")
    ranks_field = "slotsPerWorker"
    _has_launcher_as_worker = True

    def learn(self, cluster: Cluster) -> None:
        super().learn(cluster)
        self._has_launcher_as_worker = self._schema is not None and self._schema.has("spec", _AS_WORKER)

    def knows(self, *path: str) -> bool:
        return path[-1] in _OF_FIRST if self.version == _FIRST else super().knows(*path)

    def check(self, order: Order) -> None:
        super().check(order)
        if self.version != _FIRST:
            asked = objects.resources(order.spec, order.options).get("limits", {})
            lacks = self.version == _NEWEST and not self._has_launcher_as_worker
            # The operator hides these resources from a launcher that is no worker.
            if not order.options.plain and lacks and any(it.startswith("nvidia.com/") for it in asked):
                raise self.refusal("--gpus", (
                    f"of {self.api_version} here has no {_AS_WORKER}, so node 0, its launcher, has no GPU; add --plain"
                ))  # fmt: skip
            return
        if not order.options.plain:
            raise self.refusal("--kind mpijob", f"of {self.api_version} runs nothing but sleep in workers; add --plain")
        if order.options.worker_image is not None:
            raise self.refusal("--worker-image", f"of {self.api_version} has one template for all pods; leave it out")

    def spec(self, order: Order) -> Object:
        if self.version == _FIRST:
            template = self._launcher(order, keeps_gpus=True)
            return {"replicas": order.nodes, **self.policy(order), "template": template}
        spec = {self.ranks_field: ranks(order.spec), **super().spec(order)}
        if self.version == _NEWEST:
            if not order.options.plain and self._has_launcher_as_worker:
                spec[_AS_WORKER] = True
            spec["launcherCreationPolicy"] = "WaitForWorkersReady" if order.options.plain else "AtStartup"
        return spec

    def replicas(self, order: Order) -> Object:
        if not order.options.plain:
            found = super().replicas(order)
            launcher = found["Launcher"]["template"]
            launcher["metadata"]["labels"][FIRST_NODE] = "0"
            if self.version != _NEWEST:
                _allow_operators_account(order, launcher)
            return found
        worker = objects.template(order, Role(1, WORKER_NUMBER))
        del worker["spec"]["containers"][0]["command"]
        return {"Launcher": replica(1, self._launcher(order)), "Worker": replica(order.nodes, worker)}

    def _launcher(self, order: Order, keeps_gpus: bool = False) -> Object:
        """The template of a launcher that runs the command, and gets no GPUs."""
        template = objects.template(order)
        _allow_operators_account(order, template)
        for amounts in template["spec"]["containers"][0]["resources"].values() if not keeps_gpus else ():
            amounts.pop(order.options.gpu_resource, None)
        return template

    def services(self, order: Order) -> list[Object]:
        """The name of node 0."""
        if order.options.plain or order.nodes == 1:
            return []
        return [service(order, self.address(order.name, 0), {INSTANCE: order.name, FIRST_NODE: "0"})]

    def address(self, name: str, number: int) -> str:
        return f"{name}-main" if number == 0 else f"{name}-worker-{number - 1}.{name}"

    def ending(self, found: Object) -> Ending | None:
        if self.version != _FIRST:
            return super().ending(found)
        status = found.get("status") or {}
        state = status.get("launcherStatus")
        if state not in ("Succeeded", "Failed"):
            return None
        return Ending(state == "Succeeded", moment(status.get("completionTime")), str(state), "its launcher failed")

    def nodes(self, found: Object) -> int:
        return int(found["spec"]["replicas"]) + 1 if self.version == _FIRST else super().nodes(found)

    def main_container(self, found: Object) -> Object:
        if self.version != _FIRST:
            return super().main_container(found)
        container: Object = found["spec"]["template"]["spec"]["containers"][0]
        return container

    def parts(self, name: str) -> Sequence[tuple[str, str]]:
        return [(self.title, name), ("Job", f"{name}-launcher")]


def _allow_operators_account(order: Order, template: Object) -> None:
    """Give a launcher the token of the operator's own account, by which it reaches the workers."""
    if order.options.service_account is None:
        template["spec"].pop("automountServiceAccountToken", None)
