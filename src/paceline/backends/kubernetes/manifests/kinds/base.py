"""What every kind of object answers: how a job is made as one, and where it says how the job is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from paceline.backends.kubernetes.api.schema import fields_of
from paceline.backends.kubernetes.api.times import moment
from paceline.backends.kubernetes.manifests import objects
from paceline.backends.kubernetes.options import PORT
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.api.object import Object
    from paceline.backends.kubernetes.api.schema import Schema
    from paceline.backends.kubernetes.manifests.order import Order


# What paceline sets unasked, and leaves out where a cluster's own kind does not have it.
UNASKED = frozenset(("enableServiceLinks", "terminationGracePeriodSeconds", "nprocPerNode", "slotsPerWorker"))


class Ending(NamedTuple):
    """How a job has ended, as its object says."""

    is_success: bool
    time: float | None  # when, in seconds since the epoch; None if the object does not say so
    reason: str = ""  # such as BackoffLimitExceeded
    message: str = ""
    is_late: bool = False  # whether a deadline ended it


class Kind(ABC):
    """A kind of object that runs a job's pods, in a version that a server has.

    Attributes:
        sets_variables: whether its controller gives the pods of a plain job the variables by which ranks meet.
        replaces: whether its controller makes another pod for one that is lost, of the same number and name.
    """

    name: ClassVar[str]  # as `--kind` calls it
    title: ClassVar[str]  # as manifests call it
    group: ClassVar[str]
    versions: ClassVar[tuple[str, ...]]  # those that paceline can make, the best one first
    plural: ClassVar[str]  # its name in paths
    brought_by: ClassVar[str]  # what has to be installed for it
    container: ClassVar[str] = objects.CONTAINER  # the name that the container must have
    hosts: ClassVar[tuple[str, str]]  # what follows the job's name in the names of the pod of node 0, and of the others
    index_variable: ClassVar[str] = objects.POD  # the variable of a pod that has its number in its role
    sets_variables: ClassVar[bool] = True
    replaces: ClassVar[bool] = False
    makes_groups: ClassVar[bool] = False  # whether its controller makes the PodGroup of a gang
    margin: ClassVar[int] = 0  # letters that its objects have in their names besides the job's name and a number
    success: ClassVar[str] = "Complete"  # the condition that is true when it has succeeded

    def __init__(self, version: str | None = None) -> None:
        """Take a version; the best one by default."""
        self.version = version or self.versions[0]
        self._schema: Schema | None = None

    @property
    def api_version(self) -> str:
        """Group and version."""
        return f"{self.group}/{self.version}"

    def learn(self, cluster: Cluster) -> None:
        """Find out which fields the cluster's own one has, before a job is made as one."""
        self._schema = cluster.schema(self.api_version, self.title)

    def knows(self, *path: str) -> bool:
        """Whether it has a field, as far as that is known: `knows("spec", "runPolicy")`."""
        return self._schema is None or self._schema.has(*path)

    def path(self, cluster: Cluster, name: str = "") -> str:
        """The path of one object, or of all."""
        return cluster.path(self.api_version, self.plural, name)

    # -- how it is made ------------------------------------------------------------------------------------------------

    def manifest(self, order: Order) -> Object:
        """The object that owns all of a job."""
        meta = objects.metadata(order)
        made = {"apiVersion": self.api_version, "kind": self.title, "metadata": meta, "spec": self.spec(order)}
        if self._schema is None:
            return made
        pruned: Object = self._schema.without(made, UNASKED - fields_of(order.options.pod_template))
        return pruned

    def check(self, order: Order) -> None:
        """Refuse what this kind cannot do; every kind has one image, unless it says otherwise."""
        if order.options.worker_image is not None:
            raise self.refusal("--worker-image", "has one template for all pods; choose --kind pytorchjob or mpijob")
        if order.options.clean_pods not in (None, "running"):
            raise self.refusal("--clean-pods", "keeps the pods that have ended, and ends the others; leave it out")

    def refusal(self, flag: str, why: str) -> UserError:
        """Why this kind cannot do what a flag asks for."""
        article = "an" if self.title.startswith("MPI") else "a"
        return UserError(f"{flag}: {article} {self.title} {why}")

    @abstractmethod
    def spec(self, order: Order) -> Object:
        """Its spec as it is to be when all else is there."""

    def host(self, name: str, number: int) -> str:
        """What the pod of a node is called."""
        return name + self.hosts[number > 0].format(number=number, before=number - 1)

    def address(self, name: str, number: int) -> str:
        """The host name at which other pods find the pod of a node; here by the Service that has the job's name."""
        return f"{self.host(name, number)}.{name}"

    def services(self, order: Order) -> list[Object]:
        """The Services that the pods need and nobody else makes."""
        return []

    def dependents(self, order: Order) -> list[Object]:
        """What the object owns, without the references to it."""
        return [*self.services(order), *objects.dependents(order)]

    # -- what it says --------------------------------------------------------------------------------------------------

    def can_suspend(self, found: Object) -> bool:
        """Whether it can be there without pods."""
        return True

    def suspension(self, found: Object, value: bool) -> Object:
        """The patch of the spec that suspends or resumes it."""
        return {"suspend": value}

    def is_suspended(self, found: Object) -> bool:
        """Whether it is to have no pods."""
        return bool(found["spec"].get("suspend"))

    def ending(self, found: Object) -> Ending | None:
        """How it has ended, by its conditions; None if it has not."""
        status = found.get("status") or {}
        if done := condition(found, self.success):
            return Ending(True, moment(status.get("completionTime")) or moment(done.get("lastTransitionTime")))
        # From 1.31 on a Job has failed when its pods have ended, which those of a lost node may never do.
        if failed := condition(found, "Failed") or condition(found, "FailureTarget"):
            reason, message = str(failed.get("reason") or ""), " ".join(str(failed.get("message") or "").split())
            is_late = reason == "DeadlineExceeded" or "active longer than specified deadline" in message
            return Ending(False, moment(failed.get("lastTransitionTime")), reason, message, is_late)
        return None

    @abstractmethod
    def nodes(self, found: Object) -> int:
        """How many pods it has."""

    @abstractmethod
    def main_container(self, found: Object) -> Object:
        """The container of node 0, as far as its manifest has it."""

    def ttl(self, found: Object) -> int | None:
        """Seconds for which it is kept after its end."""
        value = found["spec"].get("ttlSecondsAfterFinished")
        return None if value is None else int(value)

    def parts(self, name: str) -> Sequence[tuple[str, str]]:
        """Kind and name of the objects whose events are about a job, besides pods."""
        return [(self.title, name)]


def service(order: Order, name: str, selector: dict[str, str]) -> Object:
    """A Service that gives pods a name, also before they are ready."""
    ports = [{"name": "agents", "port": PORT}]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": objects.meta(order, name), "spec": spec}


def condition(found: Object, kind: str) -> Object | None:
    """A condition that is true."""
    conditions = (found.get("status") or {}).get("conditions") or ()
    return next((it for it in conditions if it["type"] == kind and it["status"] == "True"), None)


def run_policy(order: Order) -> Object:
    """Time limits as most kinds call them."""
    found: Object = {}
    if order.spec.ttl is not None:
        found["ttlSecondsAfterFinished"] = int(order.spec.ttl)
    if order.options.plain and order.spec.time_limit is not None:  # else the agent sees to it, from the first start on
        found["activeDeadlineSeconds"] = max(1, int(order.spec.time_limit))
    return found
