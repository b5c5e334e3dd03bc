"""The kinds that the server knows: of Kubernetes, and of operators whose definitions a test switches on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Resource:
    """A kind as it is served."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True
    short: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    custom: bool = False
    categories: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As errors name it: jobs.batch."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def store(self) -> str:
        """Where its objects are: the same for all its versions."""
        return self.qualified

    @property
    def singular(self) -> str:
        return self.kind.lower()

    @property
    def virtual(self) -> bool:
        """Whether it is only ever created, and stored nowhere."""
        return self.group in ("authorization.k8s.io", "authentication.k8s.io")


def _core(
    kind: str, plural: str, short: str = "", subs: str = "", namespaced: bool = True, all_: bool = False
) -> Resource:
    return Resource(
        "", "v1", kind, plural, namespaced, tuple(short.split()), tuple(subs.split()), False, ("all",) if all_ else ()
    )  # fmt: skip


NAMESPACES = _core("Namespace", "namespaces", "ns", "status finalize", False)
NODES = _core("Node", "nodes", "no", "status", False)
PODS = _core("Pod", "pods", "po", "status log exec portforward eviction attach binding", all_=True)
SERVICES = _core("Service", "services", "svc", "status", all_=True)
CONFIGMAPS = _core("ConfigMap", "configmaps", "cm")
SECRETS = _core("Secret", "secrets")
EVENTS = _core("Event", "events", "ev")
CLAIMS = _core("PersistentVolumeClaim", "persistentvolumeclaims", "pvc", "status")
ACCOUNTS = _core("ServiceAccount", "serviceaccounts", "sa", "token")
LIMIT_RANGES = _core("LimitRange", "limitranges", "limits")
QUOTAS = _core("ResourceQuota", "resourcequotas", "quota", "status")
JOBS = Resource("batch", "v1", "Job", "jobs", subresources=("status",), categories=("all",))
DEPLOYMENTS = Resource(
    "apps", "v1", "Deployment", "deployments", True, ("deploy",), ("status", "scale"), False, ("all",)
)  # fmt: skip
REPLICASETS = Resource(
    "apps", "v1", "ReplicaSet", "replicasets", True, ("rs",), ("status", "scale"), False, ("all",)
)  # fmt: skip
RBAC = "rbac.authorization.k8s.io"
ROLES = Resource(RBAC, "v1", "Role", "roles")
BINDINGS = Resource(RBAC, "v1", "RoleBinding", "rolebindings")
CLUSTER_ROLES = Resource(RBAC, "v1", "ClusterRole", "clusterroles", False)
CLUSTER_BINDINGS = Resource(RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", False)
REVIEWS = Resource("authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", False)
SUBJECT_REVIEWS = Resource("authentication.k8s.io", "v1", "SelfSubjectReview", "selfsubjectreviews", False)
RULES_REVIEWS = Resource("authorization.k8s.io", "v1", "SelfSubjectRulesReview", "selfsubjectrulesreviews", False)
PRIORITIES = Resource("scheduling.k8s.io", "v1", "PriorityClass", "priorityclasses", False, ("pc",))
DEFINITIONS = Resource(
    "apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions", False, ("crd", "crds"),
    ("status",),
)  # fmt: skip

FROM_28 = (SUBJECT_REVIEWS,)  # from this minor version on
BUILT_IN = (
    NAMESPACES, NODES, PODS, SERVICES, CONFIGMAPS, SECRETS, EVENTS, CLAIMS, ACCOUNTS, QUOTAS,
    _core("PersistentVolume", "persistentvolumes", "pv", "status", False),
    LIMIT_RANGES,
    _core("Endpoints", "endpoints", "ep"),
    JOBS,
    Resource("batch", "v1", "CronJob", "cronjobs", True, ("cj",), ("status",)),
    DEPLOYMENTS, REPLICASETS,
    Resource("apps", "v1", "StatefulSet", "statefulsets", True, ("sts",), ("status", "scale")),
    Resource("apps", "v1", "DaemonSet", "daemonsets", True, ("ds",), ("status",)),
    ROLES, BINDINGS, CLUSTER_ROLES, CLUSTER_BINDINGS, REVIEWS, RULES_REVIEWS, PRIORITIES, DEFINITIONS,
    Resource("coordination.k8s.io", "v1", "Lease", "leases"),
    Resource("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", True, ("pdb",), ("status",)),
    Resource("storage.k8s.io", "v1", "StorageClass", "storageclasses", False, ("sc",)),
    Resource("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", True, ("netpol",)),
)  # fmt: skip


def _custom(group: str, version: str, kind: str, plural: str = "", namespaced: bool = True) -> Resource:
    return Resource(group, version, kind, plural or f"{kind.lower()}s", namespaced, (), ("status",), True)


# By the operator that brings them, older releases of one first.
CUSTOM = {
    "arena": (
        _custom("kubeflow.org", "v1alpha1", "MPIJob"),
        *(_custom("kubeflow.org", "v1", kind) for kind in ("PyTorchJob", "TFJob")),
    ),
    "trainer-2.2": (_custom("trainer.kubeflow.org", "v1alpha1", "TrainJob"),),
    "training-operator": (
        *(_custom("kubeflow.org", "v1", kind) for kind in ("PyTorchJob", "MPIJob", "TFJob", "PaddleJob", "JAXJob")),
        _custom("kubeflow.org", "v1", "XGBoostJob"),
    ),
    "mpi-operator": (_custom("kubeflow.org", "v2beta1", "MPIJob"),),
    "trainer": (
        _custom("trainer.kubeflow.org", "v1alpha1", "TrainJob"),
        _custom("trainer.kubeflow.org", "v1alpha1", "TrainingRuntime"),
        _custom("trainer.kubeflow.org", "v1alpha1", "ClusterTrainingRuntime", namespaced=False),
    ),
    "jobset": (_custom("jobset.x-k8s.io", "v1alpha2", "JobSet"),),
    "volcano": (
        _custom("scheduling.volcano.sh", "v1beta1", "PodGroup"),
        _custom("scheduling.volcano.sh", "v1beta1", "Queue", namespaced=False),
    ),
    "coscheduling": (_custom("scheduling.x-k8s.io", "v1alpha1", "PodGroup"),),
    "metrics-server": (
        Resource("metrics.k8s.io", "v1beta1", "PodMetrics", "pods", custom=True),
        Resource("metrics.k8s.io", "v1beta1", "NodeMetrics", "nodes", False, custom=True),
    ),
    "kueue": (
        _custom("kueue.x-k8s.io", "v1beta1", "LocalQueue"),
        _custom("kueue.x-k8s.io", "v1beta1", "ClusterQueue", namespaced=False),
        _custom("kueue.x-k8s.io", "v1beta1", "Workload"),
    ),
}
