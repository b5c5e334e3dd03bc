"""What is kept of a pod: a list has thousands, and of each only this is needed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.backends.kubernetes.api.times import moment
from paceline.backends.kubernetes.manifests.names import CONTAINERS, FIRST_NODE, INSTANCE

from .reasons import is_gone, why_ended, why_waiting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TAKEN_AWAY = (
    "it was told to end (SIGTERM): a pod of the job was deleted, evicted or preempted; submit it again, with "
    "--max-restarts to have such pods replaced"
)
# The number of a pod among those with the same template, as the controllers of the kinds say it.
_INDEXES = ("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index")


@dataclass(frozen=True)
class Pod:
    """A pod of a job.

    Attributes:
        index: the node rank.
        node: where it runs; "" before it has a node.
        phase: Pending, Running, Succeeded, Failed or Unknown.
        container: the name of its container.
        created: seconds since the epoch.
        started: when its program began; None before.
        finished: when it ended; None before.
        exit_code: of its program; None before its end.
        report: the termination message of paceline's program; empty if there is none.
        waiting: what it waits for; None if it runs or nothing is known.
        error: why it failed, if its program could not say it.
        is_out_of_memory: its program was killed because it used more than it may.
    """

    name: str
    job: str
    index: int
    node: str
    phase: str
    container: str
    created: float
    started: float | None
    finished: float | None
    restarts: int
    exit_code: int | None
    report: Mapping[str, Any]
    waiting: str | None
    error: str | None
    is_leaving: bool
    is_out_of_memory: bool

    @property
    def is_over(self) -> bool:
        """Whether its program has ended, or never will begin."""
        return self.phase in ("Succeeded", "Failed") or self.finished is not None

    @property
    def has_log(self) -> bool:
        """Whether its container has begun."""
        return self.started is not None


def seen(pod: Mapping[str, Any], events: Sequence[dict[str, Any]] = ()) -> Pod:
    """What is kept of a pod."""
    found = dict(pod)
    meta, spec, status = found["metadata"], found["spec"], found.get("status") or {}
    # What admits pods may put a container before ours.
    main = next((it for it in spec["containers"] if it["name"] in CONTAINERS), spec["containers"][0])
    entry = next((it for it in status.get("containerStatuses") or () if it["name"] == main["name"]), None)
    state = (entry or {}).get("state") or {}
    ended = state.get("terminated") or {}
    begun = (state.get("running") or ended).get("startedAt")
    report = _report(ended.get("message"))
    marks = {**meta.get("labels", {}), **meta.get("annotations", {})}
    command = main.get("command") or [""]
    error = report.get("refused") or report.get("error") or why_ended(found, entry, command[0])
    if report.get("state") == "STOPPED" and status.get("reason") is None:
        error = TAKEN_AWAY
    phase = str(status.get("phase") or "Pending")
    return Pod(
        name=meta["name"], job=marks.get(INSTANCE) or marks.get("job-name", ""), index=_index(meta["name"], marks),
        node=spec.get("nodeName") or "", phase=phase, container=main["name"],
        created=moment(meta["creationTimestamp"]) or 0.0, started=moment(begun),
        finished=moment(ended.get("finishedAt")),
        restarts=int((entry or {}).get("restartCount") or 0), exit_code=ended.get("exitCode"), report=report,
        waiting=why_waiting(found, events) if phase == "Pending" else is_gone(found) if phase == "Running" else None,
        error=error if phase == "Failed" or ended.get("exitCode") else None,
        is_leaving=bool(meta.get("deletionTimestamp")), is_out_of_memory=ended.get("reason") == "OOMKilled",
    )  # fmt: skip


def _index(name: str, marks: Mapping[str, str]) -> int:
    """The node rank: by the name of a pod NAME-worker-3, as operators do not number them alike; else by its marks."""
    worker = name.partition(f"{marks.get(INSTANCE)}-worker-")[2]
    number = worker if worker.isdecimal() else next((marks[key] for key in _INDEXES if marks.get(key)), "0")
    return int(marks.get(FIRST_NODE) or 0) + int(number)


def _report(message: str | None) -> dict[str, Any]:
    """The report in a termination message; empty if something else is in it."""
    try:
        found = json.loads(message or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "exit_code" in found else {}
