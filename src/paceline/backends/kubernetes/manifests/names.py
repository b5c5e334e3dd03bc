"""Names in a cluster: a job's objects, and what its users' labels become there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

GROUP = "paceline.dev"  # of annotations and labels
MANAGER = "paceline"
OWNER = "app.kubernetes.io/managed-by"
INSTANCE = "app.kubernetes.io/instance"
SELECTOR = f"{OWNER}={MANAGER}"
SPEC, STOPPED, CODE, JOB_ID = (f"{GROUP}/{name}" for name in ("spec", "stopped-at", "code", "job-id"))
STARTED = f"{GROUP}/started-at"  # of a job that was stopped or suspended, and maybe resumed
SUSPENDED = f"{GROUP}/suspended-at"
LABELS, LOGS = f"{GROUP}/labels", f"{GROUP}/logs"
FIRST_NODE = f"{GROUP}/first-node"  # label of pods: the node rank of the first pod with their template
INJECT = "sidecar.istio.io/inject"
QUEUE = "kueue.x-k8s.io/queue-name"
KUEUE = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")  # the API versions of Kueue, newest first
CONTAINERS = ("main", "pytorch", "tensorflow", "paddle", "mpi", "node")  # as kinds call that of the ranks
LONGEST = 63  # letters of a host name, and of a label's value
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_HOST = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\]"
_PATH = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
# As container runtimes read names, by distribution/reference: [HOST[:PORT]/]PATH[/PATH…][:TAG][@DIGEST].
_IMAGE = re.compile(
    rf"(({_HOST})(:[0-9]+)?/)?{_PATH}(/{_PATH})*(:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
    r"(@[A-Za-z][A-Za-z0-9]*([+._-][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?"
)
_PREFIX = re.compile(r"(?=.{1,253}/)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*/")


def check_name(name: str, nodes: int, margin: int = 0) -> None:
    """Check that a job of so many nodes can have a name: its pods are hosts called NAME-0, NAME-1, …"""
    most = LONGEST - 1 - len(str(nodes - 1)) - margin
    if len(name) > most:
        raise UserError(f"--name {name}: a job of {nodes} pods has a name of up to {most} letters on Kubernetes")
    if not _NAME.fullmatch(name):
        raise UserError(
            f"--name {name}: on Kubernetes a name has lower-case letters, digits and '-', and begins with a letter; "
            f"take for example {valid_name(name, nodes, margin)}"
        )


def valid_name(name: str, nodes: int = 1, margin: int = 0) -> str:
    """The closest name that a job can have."""
    name = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"job-{name}".strip("-")
    most = LONGEST - 1 - len(str(nodes - 1)) - margin
    if len(name) > most:  # what makes it unlike others is at its end
        end = name[-6:]
        name = name[: most - len(end)].rstrip("-") + end
    return name


def check_image(flag: str, image: str) -> None:
    """Check that an image can have this name, as the nodes read it."""
    if not _IMAGE.fullmatch(image):
        raise UserError(
            f"{flag} {image}: not the name of an image: it has lower-case letters, digits, '.', '_' and '-' between "
            "slashes, perhaps behind HOST:PORT/, and may end with :TAG or @sha256:DIGEST"
        )


def label_value(text: str) -> str | None:
    """The text if it can be the value of a label."""
    return text if _LABEL.fullmatch(text) else None


def users_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """What the labels of a job become on its objects: NAME as `paceline.dev/label-NAME`, PREFIX/NAME as it is.

    Without a prefix they are for `paceline list`, and left out here if they cannot be a label of Kubernetes.
    """
    found = {}
    for name, value in labels.items():
        if "/" not in name:
            if name and label_value(f"label-{name}") is not None and label_value(value) is not None:
                found[f"{GROUP}/label-{name}"] = value
            continue
        flag, prefix = f"--label {name}={value}", _PREFIX.match(name)
        if prefix is None or not label_value(name[prefix.end() :]):
            raise UserError(
                f"{flag}: Kubernetes takes no label of that name; it is PREFIX/NAME, as in example.com/team"
            )
        if label_value(value) is None:
            raise UserError(f"{flag}: a label's value has up to 63 letters, digits, '-', '_' and '.' on Kubernetes")
        if name == QUEUE:
            raise UserError(f"{flag}: the queue of a job is named with --queue {value}")
        if name.startswith(f"{GROUP}/") or name in labels_of(""):
            raise UserError(f"{flag}: paceline sets this label itself; choose another name")
        found[name] = value
    return found


def labels_of(name: str) -> dict[str, str]:
    """The labels of all objects of a job."""
    return {"app.kubernetes.io/name": "paceline-job", INSTANCE: name, OWNER: MANAGER}


def role_of(rank: int) -> str:
    """How a rank is called: master-0, worker-0, worker-1, …"""
    return "master-0" if rank == 0 else f"worker-{rank - 1}"
