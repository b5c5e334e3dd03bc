"""The history of a job on Kubernetes: of pods that run, and of those that have ended, from their logs."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.backends.kubernetes.look import events as looked
from paceline.backends.kubernetes.look.events import history
from paceline.backends.kubernetes.look.pod_log import Parser
from paceline.node.host.pod import KeptLog, _Relay
from paceline.node.host.pod_format import HISTORY
from paceline.node.logs.following import Event


def node(rank: int, *times: float) -> Any:
    return {"host": f"it-{rank}", "node_rank": rank, "telemetry": [{"time": time} for time in times], "metrics": None,
            "software": {}, "missing": []}  # fmt: skip


def logged(*nodes: Any) -> list[Any]:
    """The entries of pods' logs, as their programs write them and clients read them."""
    out = io.BytesIO()
    relay = _Relay(out, KeptLog(None, 0))
    relay.event(Event("started", {"attempt": 0, "time": 1.0}))
    for each in nodes:
        relay.event(Event(HISTORY, {"node": each}))
    parser = Parser(None, is_plain=False)
    return [parser.entry(b"2026-01-01T00:00:00.0Z " + line) for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("phases", "answers", "logs", "since", "found"),
    [
        (["Running", "Running"], [0, 1], [], 0.0, [0, 1]),
        (["Running", "Succeeded"], [0], [node(1, 5.0)], 0.0, [0, 1]),
        (["Succeeded", "Failed"], [], [node(1, 5.0), node(0, 9.0), node(0)], 0.0, [0, 0, 1]),
        (["Succeeded", "Failed"], [], [node(1, 5.0), node(0, 9.0)], 7.0, [0]),
    ],
)
def test_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, phases: list[str], answers: list[int], logs: list[Any], since: float,
    found: list[int],
) -> None:  # fmt: skip
    running = [phase for phase in phases if phase == "Running"]
    job: Any = SimpleNamespace(name="it", is_plain=False, pods=phases, running=running, python="python")

    def asked(cluster: Any, pods: Any, request: Any, python: str, silent: dict[int, Exception]) -> Any:
        assert (pods, request["since"]) == (running, since)
        return {rank: {"nodes": [node(rank, 20.0)]} for rank in answers}

    def events(cluster: Any, job: Any, silent: dict[str, Exception]) -> list[Any]:
        assert len(answers) < len(phases), "logs are read only where a pod does not answer"
        silent["it-9"] = Exception("its log is gone")
        return logged(*logs)

    monkeypatch.setattr(looked, "asked", asked)
    monkeypatch.setattr(looked.logs, "events", events)
    nodes, warnings = history(SimpleNamespace(), job, since)  # type: ignore[arg-type]
    assert [it["node_rank"] for it in nodes] == found
    assert warnings == (() if len(answers) == len(phases) else ("its log is gone",))


def test_a_plain_job_has_none() -> None:
    nodes, (why,) = history(SimpleNamespace(), SimpleNamespace(is_plain=True), 0.0)  # type: ignore[arg-type]
    assert (nodes, "plain" in why) == ([], True)
