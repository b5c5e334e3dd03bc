"""The schemas of operators' kinds, read from the packages that their makers publish, or written down here."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import defaults, resources, schema

if TYPE_CHECKING:
    from .api import Api
    from .errors import Object
    from .resources import Resource

_OPEN = {"x-kubernetes-preserve-unknown-fields": True}
_PLAIN = {
    "str": "string", "int": "integer", "bool": "boolean", "float": "number", "datetime": "string",
    "StrictStr": "string", "StrictInt": "integer", "StrictBool": "boolean", "StrictFloat": "number",
}  # fmt: skip


def schemas(operator: str, minor: int) -> dict[str, Any]:
    """Schemas by group/version/kind and, for what those refer to, by name."""
    found: dict[str, Any] = {}
    reader = _Reader(minor, found)
    for one in resources.CUSTOM[operator]:
        key = f"{one.api_version}/{one.kind}"
        if key in _OF_ARENA and operator == "arena":
            found[key] = _object(metadata=_OPEN, status=_OPEN, spec=_OF_ARENA[key])
        elif one.api_version in ("kubeflow.org/v1", "trainer.kubeflow.org/v1alpha1", "jobset.x-k8s.io/v1alpha2"):
            prefix = {"kubeflow": "KubeflowOrgV1", "trainer": "TrainerV1alpha1", "jobset": "JobsetV1alpha2"}
            found[key] = {"$ref": f"#/{reader.read(prefix[one.group.partition('.')[0]] + one.kind)}"}
        elif key in _WRITTEN:
            found[key] = _object(metadata=_OPEN, status=_OPEN, spec=_WRITTEN[key])
    if operator == "arena":
        of_pod = schema.definitions(minor)["io.k8s.api.core.v1.PodSpec"]
        found["OldPodSpec"] = {**of_pod, "properties": {name: of_pod["properties"][name] for name in _OLD_POD}}
    if operator == "trainer-2.2":  # kubeflow-trainer-api 2.2.1 has this field less than 2.3.0
        found["TrainerV1alpha1PodSpecPatch"]["properties"].pop("terminationGracePeriodSeconds")
    return found


class _Reader:
    """Reads the generated classes of kubeflow-training and kubeflow-trainer-api, without importing them."""

    def __init__(self, minor: int, found: dict[str, Any]) -> None:
        self.found = found
        self._core = {
            "".join(part[:1].upper() + part[1:] for part in re.split(r"[.\-]", name)): name
            for name in schema.definitions(minor)
        }
        # kubeflow-training calls them V1PodSpec.
        self._short: dict[str, str] = {}
        for name in schema.definitions(minor):
            *_, group, version, kind = name.split(".")
            if group in ("core", "meta", "autoscaling"):
                self._short.setdefault(f"{version[:1].upper()}{version[1:]}{kind}", name)

    def read(self, name: str) -> str:
        """The name of a class's schema; it is read if need be."""
        name = self._core.get(name) or self._short.get(name) or name
        if "." in name or name in self.found:
            return name
        source = _sources().get(name)
        if source is None:
            self.found[name] = _OPEN
            return name
        self.found[name] = {}
        text = source.read_text()
        (found,) = [one for one in ast.parse(text).body if isinstance(one, ast.ClassDef) and one.name == name]
        self.found[name] = self._pydantic(found) if "pydantic" in text else self._swagger(found, text)
        return name

    def _swagger(self, found: ast.ClassDef, text: str) -> Any:
        values = {
            target.id: ast.literal_eval(one.value)
            for one in found.body
            if isinstance(one, ast.Assign)
            for target in one.targets
            if isinstance(target, ast.Name) and target.id in ("openapi_types", "attribute_map")
        }
        names = values["attribute_map"]
        properties = {names[key]: self._type(kind) for key, kind in values["openapi_types"].items()}
        required = re.findall(r"Invalid value for `(\w+)`, must not be `None`", text)
        return {"type": "object", "properties": properties, "required": [names[key] for key in required]}

    def _pydantic(self, found: ast.ClassDef) -> Any:
        properties, required = {}, []
        for one in found.body:
            if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
                continue
            if one.target.id.startswith("_") or not isinstance(one.value, ast.Call):
                continue
            options = {word.arg: ast.unparse(word.value) for word in one.value.keywords}
            name = ast.literal_eval(options.get("alias", repr(one.target.id)))
            properties[name] = self._type(ast.unparse(one.annotation))
            if "default" not in options:
                required.append(name)
        return {"type": "object", "properties": properties, "required": required}

    def _type(self, text: str) -> Any:
        text = text.strip()
        if text in _PLAIN:
            return {"type": _PLAIN[text]}
        inner = re.fullmatch(r"Optional\[(.*)\]", text)
        if inner:
            return self._type(inner[1])
        inner = re.fullmatch(r"(?:list|List)\[(.*)\]", text)
        if inner:
            return {"type": "array", "items": self._type(inner[1])}
        inner = re.fullmatch(r"(?:dict\(|Dict\[)str, (.*)[\])]", text)
        if inner:
            return {"type": "object", "additionalProperties": self._type(inner[1])}
        if not re.fullmatch(r"[A-Z]\w+", text) or text == "Any":
            return _OPEN
        return {"$ref": f"#/{self.read(text)}"}


@functools.cache
def _sources() -> dict[str, Path]:
    """The file of each class."""
    found: dict[str, Path] = {}
    for package, folder in (("kubeflow", "training/models"), ("kubeflow_trainer_api", "models")):
        there = importlib.util.find_spec(package)
        for place in (there.submodule_search_locations or []) if there else []:
            for path in Path(place, folder).glob("*.py"):
                if path.name.startswith(("kubeflow_org", "jobset", "trainer_v1")):
                    found.update({name: path for name in re.findall(r"^class (\w+)\(", path.read_text(), re.M)})
    return found


def _object(*required: str, **properties: Any) -> Any:
    return {"type": "object", "properties": properties, "required": list(required)}


_INT, _TEXT, _BOOL = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
_TEMPLATE = {"$ref": "#/io.k8s.api.core.v1.PodTemplateSpec"}
_AMOUNTS = {"type": "object", "additionalProperties": {"$ref": "#/io.k8s.apimachinery.pkg.api.resource.Quantity"}}
_REPLICAS = {
    "type": "object", "additionalProperties": _object(replicas=_INT, restartPolicy=_TEXT, template=_TEMPLATE)
}  # fmt: skip


# The pod of Kubernetes 1.11, without enableServiceLinks, as Arena's TFJob has it.
_OLD_POD = (
    "activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "containers", "dnsConfig", "dnsPolicy",
    "hostAliases", "hostIPC", "hostNetwork", "hostPID", "hostname", "imagePullSecrets", "initContainers", "nodeName",
    "nodeSelector", "priority", "priorityClassName", "readinessGates", "restartPolicy", "schedulerName",
    "securityContext", "serviceAccount", "serviceAccountName", "shareProcessNamespace", "subdomain",
    "terminationGracePeriodSeconds", "tolerations", "volumes",
)  # fmt: skip
_OLD_REPLICAS = {
    "type": "object", "additionalProperties": _object(
        replicas=_INT, restartPolicy=_TEXT, template=_object(metadata=_OPEN, spec={"$ref": "#/OldPodSpec"}),
    ),
}  # fmt: skip


def _one_of(*values: str) -> Any:
    return {"type": "string", "enum": list(values)}


# What comes without a package, after the CRDs in these repositories:
# - MPIJob: kubeflow/mpi-operator, manifests/base/kubeflow.org_mpijobs.yaml (commit b302019), with runLauncherAsWorker,
#   which later releases have;
# - PodGroup: volcano-sh/volcano, config/crd/volcano/bases/scheduling.volcano.sh_podgroups.yaml (096235e), and
#   kubernetes-sigs/scheduler-plugins, config/crd/bases/scheduling.x-k8s.io_podgroups.yaml (3f8606c).
_WRITTEN = {
    "kubeflow.org/v2beta1/MPIJob": _object(
        "mpiReplicaSpecs", mpiReplicaSpecs=_REPLICAS, slotsPerWorker=_INT, sshAuthMountPath=_TEXT,
        launcherCreationPolicy=_one_of("AtStartup", "WaitForWorkersReady"),
        mpiImplementation=_one_of("OpenMPI", "Intel", "MPICH"), runLauncherAsWorker=_BOOL,
        runPolicy=_object(
            cleanPodPolicy=_TEXT, ttlSecondsAfterFinished=_INT, activeDeadlineSeconds=_INT, backoffLimit=_INT,
            suspend=_BOOL, managedBy=_TEXT, schedulingPolicy=_object(
                minAvailable=_INT, queue=_TEXT, minResources=_AMOUNTS, priorityClass=_TEXT, scheduleTimeoutSeconds=_INT,
            ),
        ),
    ),
    "scheduling.volcano.sh/v1beta1/PodGroup": _object(
        minMember=_INT, minTaskMember={"type": "object", "additionalProperties": _INT}, queue=_TEXT,
        priorityClassName=_TEXT, minResources=_AMOUNTS,
    ),
    "scheduling.x-k8s.io/v1alpha1/PodGroup": _object(minMember=_INT, minResources=_AMOUNTS, scheduleTimeoutSeconds=_INT),
}  # fmt: skip


# Those of kubeflow/arena 0.15, whose operators are older than the Training Operator, in arena-artifacts/all_crds:
# mpi-operator/kubeflow.org_mpijobs_v1.yaml (commit 0cc88e2), v1/pytorch-operator/kubeflow.org_pytorchjobs_v1.yaml
# (f4fceb5) and v1/tf-operator/kubeflow.org_tfjobs_v1.yaml (938037e).
_OF_ARENA = {
    "kubeflow.org/v1alpha1/MPIJob": _object(
        backoffLimit=_INT, cleanPodPolicy=_TEXT, gpus=_INT, launcherOnMaster=_BOOL,
        launcherResources=_object(limits=_AMOUNTS, requests=_AMOUNTS), mountsOnLauncher=_BOOL, replicas=_INT,
        template=_TEMPLATE,
    ),
    "kubeflow.org/v1/PyTorchJob": _object(
        "pytorchReplicaSpecs", pytorchReplicaSpecs=_REPLICAS, activeDeadlineSeconds=_INT, backoffLimit=_INT,
        cleanPodPolicy=_TEXT, ttlSecondsAfterFinished=_INT,
    ),
    "kubeflow.org/v1/TFJob": _object(
        "tfReplicaSpecs", tfReplicaSpecs=_OLD_REPLICAS, activeDeadlineSeconds=_INT, backoffLimit=_INT,
        cleanPodPolicy=_TEXT, ttlSecondsAfterFinished=_INT, startingDeadlineSeconds=_INT,
        successPolicy=_one_of("", "AllWorkers"),
    ),
}  # fmt: skip


def definition(api: Api, resource: Resource) -> Object:
    """The CustomResourceDefinition of a kind, as the server shows it."""
    versions = [
        {"name": one.version, "served": True, "storage": one.version == resource.version}
        for one in api.custom.values()
        if (one.group, one.plural) == (resource.group, resource.plural)
    ]
    names = {"kind": resource.kind, "plural": resource.plural, "singular": resource.singular,
             "listKind": f"{resource.kind}List"}  # fmt: skip
    spec = {"group": resource.group, "names": names, "versions": versions,
            "scope": "Namespaced" if resource.namespaced else "Cluster"}  # fmt: skip
    body: Object = {
        "apiVersion": resources.DEFINITIONS.api_version, "kind": "CustomResourceDefinition",
        "metadata": {"name": resource.qualified}, "spec": spec,
    }  # fmt: skip
    defaults.metadata(body)
    body["status"] = {"conditions": [{"type": "Established", "status": "True"}], "acceptedNames": names}
    return body
