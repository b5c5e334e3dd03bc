"""What is kept of a pod (a list has thousands, and of each only this is needed), and why it waits or has died."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from paceline.backends.kubernetes.api.times import moment
from paceline.backends.kubernetes.manifests.names import CONTAINERS, FIRST_NODE, INSTANCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backends.kubernetes.api.object import Object
    from paceline.node.host.pod_format import PodReport

TAKEN_AWAY = (
    "it was told to end (SIGTERM): a pod of the job was deleted, evicted or preempted; submit it again, with "
    "--max-restarts to have such pods replaced"
)
# The number of a pod among those with the same template, as the controllers of the kinds say it.
_INDEXES = ("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index")


@dataclass(frozen=True)
class Pod:
    """A pod of a job."""

    name: str
    job: str
    index: int  # the node rank
    node: str  # where it runs; "" before it has a node
    phase: str  # Pending, Running, Succeeded, Failed or Unknown
    container: str  # the name of its container
    created: float  # seconds since the epoch
    started: float | None  # when its program began; None before
    finished: float | None  # when it ended; None before
    restarts: int
    exit_code: int | None  # of its program; None before its end
    report: PodReport  # the termination message of paceline's program; empty if there is none
    waiting: str | None  # what it waits for; None if it runs or nothing is known
    error: str | None  # why it failed, if its program could not say it
    is_leaving: bool
    is_out_of_memory: bool  # its program was killed because it used more than it may

    @property
    def is_over(self) -> bool:
        """Whether its program has ended, or never will begin."""
        return self.phase in ("Succeeded", "Failed") or self.finished is not None

    @property
    def runs(self) -> bool:
        """Whether its program runs."""
        return self.phase == "Running" and not self.is_over

    @property
    def has_log(self) -> bool:
        """Whether its container has begun."""
        return self.started is not None


def seen(pod: Object, events: Sequence[Object] = ()) -> Pod:
    """What is kept of a pod."""
    meta, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    # What admits pods may put a container before ours.
    main = next((it for it in spec["containers"] if it["name"] in CONTAINERS), spec["containers"][0])
    entry = next((it for it in status.get("containerStatuses") or () if it["name"] == main["name"]), None)
    state = (entry or {}).get("state") or {}
    ended = state.get("terminated") or {}
    begun = (state.get("running") or ended).get("startedAt")
    report = _report(ended.get("message"))
    marks = {**meta.get("labels", {}), **meta.get("annotations", {})}
    command = main.get("command") or [""]
    error = report.get("refused") or report.get("error") or why_ended(pod, entry, command[0])
    if report.get("state") == "STOPPED" and status.get("reason") is None:
        error = TAKEN_AWAY
    phase = str(status.get("phase") or "Pending")
    return Pod(
        name=meta["name"], job=marks.get(INSTANCE) or marks.get("job-name", ""), index=_index(meta["name"], marks),
        node=spec.get("nodeName") or "", phase=phase, container=main["name"],
        created=moment(meta["creationTimestamp"]) or 0.0, started=moment(begun),
        finished=moment(ended.get("finishedAt")),
        restarts=int((entry or {}).get("restartCount") or 0), exit_code=ended.get("exitCode"), report=report,
        waiting=why_waiting(pod, events) if phase == "Pending" else is_gone(pod) if phase == "Running" else None,
        error=error if phase == "Failed" or ended.get("exitCode") else None,
        is_leaving=bool(meta.get("deletionTimestamp")), is_out_of_memory=ended.get("reason") == "OOMKilled",
    )  # fmt: skip


def _index(name: str, marks: Mapping[str, str]) -> int:
    """The node rank: by the name of a pod NAME-worker-3, as operators do not number them alike; else by its marks."""
    worker = name.partition(f"{marks.get(INSTANCE)}-worker-")[2]
    number = worker if worker.isdecimal() else next((marks[key] for key in _INDEXES if marks.get(key)), "0")
    return int(marks.get(FIRST_NODE) or 0) + int(number)


def _report(message: str | None) -> PodReport:
    """The report in a termination message; empty if something else is in it."""
    try:
        found = json.loads(message or "")
    except ValueError:
        return {}
    if not isinstance(found, dict) or "exit_code" not in found:
        return {}
    failure = found.get("failure")  # a program of the user may write there, too
    is_ours = failure is None or (isinstance(failure, dict) and {"cause", "message"} <= failure.keys())
    return cast("PodReport", found) if is_ours else {}


# -- why a pod waits or has died, in plain words, with what to do ------------------------------------------------------


_PULL = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError", "ErrImageNeverPull")
_BY_NODE = ("Evicted", "Preempting", "NodeLost", "NodeShutdown", "Terminated", "UnexpectedAdmissionError")
_NO_PYTHON = re.compile(r'exec: "(?P<program>[^"]+)": (.*no such file|executable file not found|.*not found)')
_LACKS = re.compile(r"Insufficient ([\w./-]*\w)")
_TAINT = re.compile(r"untolerated taint \{([^}]*)\}")
_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')


def why_waiting(pod: Object, events: Sequence[Object] = ()) -> str | None:
    """What a pod that does not run yet waits for, in one line; None if there is nothing to say."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _unscheduled(str(condition.get("message") or condition.get("reason") or ""))
    for entry in status.get("initContainerStatuses") or ():
        if ended := (entry.get("state") or {}).get("terminated"):
            if ended.get("exitCode"):
                return f"its init container {entry['name']} failed: {_ended(ended)}"
        elif waiting := (entry.get("state") or {}).get("waiting"):
            return _waiting(waiting, entry, events)
    for entry in status.get("containerStatuses") or ():
        if waiting := (entry.get("state") or {}).get("waiting"):
            return _waiting(waiting, entry, events)
    return None


def _unscheduled(message: str) -> str:
    """Why no node takes a pod."""
    nodes = message.partition(". preemption:")[0].rstrip(".")
    if claim := _CLAIM.search(message):
        return f"no PersistentVolumeClaim {claim[1]} in the namespace; see paceline data list ({nodes})"
    advice = []
    if lacks := [*dict.fromkeys(_LACKS.findall(message))]:
        advice.append(f"no node has enough {' and '.join(lacks)} free: ask for less, or wait")
    if taints := [*dict.fromkeys(_TAINT.findall(message))]:
        advice.append(f"nodes have the taint {taints[0]}: tolerate it with --toleration")
    if "node affinity/selector" in message or "node selector" in message:
        advice.append("nodes do not match --selector or the affinity: correct it, or label nodes")
    if "unbound immediate PersistentVolumeClaims" in message:
        advice.append("a PersistentVolumeClaim is not bound yet: see kubectl get pvc")
    return f"{'; '.join(advice) or 'no node takes it'} ({nodes})"


def _waiting(waiting: Object, entry: Object, events: Sequence[Object]) -> str | None:
    reason, message = str(waiting.get("reason") or ""), " ".join(str(waiting.get("message") or "").split())
    if reason in _PULL:
        why = next((_line(event) for event in reversed(events) if "pull image" in event.get("message", "")), message)
        return f"image {entry.get('image')} cannot be pulled: {why}; check its name, and --pull-secret if it is private"
    if reason == "InvalidImageName":
        return f"image {entry.get('image')} is not a valid name: {message}; correct --image"
    if reason in ("CreateContainerConfigError", "CreateContainerError"):
        return f"its container cannot be made: {message}"
    if reason in ("ContainerCreating", "PodInitializing", ""):
        if events and events[-1].get("reason") in _MOUNTS:  # what comes later says that it was mounted
            return f"a volume cannot be mounted: {_line(events[-1])}"
        return None
    return f"{reason}: {message}" if message else reason


_MOUNTS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")


def time_of(event: Object) -> float:
    """When an event happened last, in seconds since the epoch."""
    series = event.get("series") or {}
    times = (event.get("lastTimestamp"), series.get("lastObservedTime"), event.get("eventTime"))
    return moment(next(filter(None, times), event["metadata"].get("creationTimestamp"))) or 0.0


def _line(event: Object) -> str:
    return " ".join(str(event.get("message") or "").split())


def why_ended(pod: Object, container: Object | None, python: str) -> str | None:
    """Why a pod has failed, in one line, for one whose program could not say it; None if it did not fail."""
    status = pod.get("status") or {}
    if status.get("reason") in _BY_NODE:
        message = " ".join(str(status.get("message") or "").split()).rstrip(".")
        advice = ""
        if "low on resource" in message:
            advice = "; ask for what it needs with --memory, or keep data on a volume"
        elif "exceed" in message:  # its folders, or its containers, have more on disk than their limit
            advice = "; give it more with --work-size, or keep data on a volume"
        return f"{status['reason'].lower()} by its node: {message}{advice}"
    for entry in status.get("initContainerStatuses") or ():
        ended = (entry.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            return f"its init container {entry['name']} failed: {_ended(ended)}"
    ended = ((container or {}).get("state") or {}).get("terminated")
    if ended is None:
        return "its pod failed, and left no message" if status.get("phase") == "Failed" else None
    if not ended.get("exitCode"):
        return None
    return _died(ended, (container or {}).get("image"), python)


def _died(ended: Object, image: str | None, python: str) -> str:
    message = str(ended.get("message") or "")
    if ended.get("reason") == "OOMKilled":
        return "killed: out of memory; ask for more with --memory, or use less"
    missing = _NO_PYTHON.search(message)
    if ended.get("reason") in ("StartError", "ContainerCannotRun") or missing:
        program = missing["program"] if missing else ""
        if program == python:
            return (
                f"image {image} has no {python}; name its Python with --image-python, take an image with Python 3.9 or "
                "newer, or add --plain"
            )
        return f"image {image} cannot run {program or 'the command'}: {' '.join(message.split())}"
    return _ended(ended)


def _ended(ended: Object) -> str:
    last = next((line.strip() for line in reversed(str(ended.get("message") or "").splitlines()) if line.strip()), "")
    how = f"exit code {ended.get('exitCode')}"
    if ended.get("signal"):
        how = f"signal {ended['signal']}"
    return f"{how}: {last}" if last else how


def is_gone(pod: Object) -> str | None:
    """Why a pod that was running is not there any more, as far as its conditions say; None if they do not."""
    for condition in (pod.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return f"{condition.get('reason')}: {' '.join(str(condition.get('message') or '').split())}"
        if condition.get("type") == "Ready" and condition.get("status") == "Unknown":
            node = (pod.get("spec") or {}).get("nodeName")
            return f"node {node} does not answer; its pod is lost unless it comes back"
    return None
