"""What happened to a job: what its nodes recorded, and what only the record of the job has."""

from __future__ import annotations

import json
import signal
from string import Formatter
from typing import TYPE_CHECKING, Any

from paceline.job.quantities import duration_text
from paceline.node.watching.hang import stood
from paceline.node.watching.slowness import in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.contract.records import EventRecord, Failure
    from paceline.job.job import Job

_MOST_DEPTH = 3  # nested lists that are shown
_OF_ATTEMPTS = ("started", "restarting", "requeued", "reopened")


def story(job: Job, recorded: Sequence[EventRecord]) -> list[EventRecord]:
    """The events of a job in the order of time.

    A node may have recorded no end, if its agent was killed; and what a pod recorded goes with the pod.
    """
    asked: EventRecord = {
        "time": job.created, "event": "submitted",
        "ranks": job.ranks, "nodes": job.nodes, "devices": job.devices_asked or None, "resume_from": job.resume_from,
    }  # fmt: skip
    found = [asked, *(it.copy() for it in recorded)]
    started = next((it for it in found if it["event"] == "started"), None)
    if started is None and job.started is not None:
        started = {"time": job.started, "event": "started"}
        found.append(started)
    if started is not None and "host" not in started:
        started["on"] = list(dict.fromkeys(rank.node for rank in job.instances if rank.node))
    found.sort(key=lambda event: float(event["time"]))
    last = next((it["event"] for it in reversed(found) if it["event"] in (*_OF_ATTEMPTS, "finished")), "")
    if job.is_over and job.finished is not None and last != "finished":
        time = max(job.finished, found[-1]["time"])  # the job's is that of its last file, by a coarser clock
        found.append(
            {"time": time, "event": "finished", "state": job.state, "exit_code": job.exit_code, "why": job.error}
        )
    return found


# -- in words ----------------------------------------------------------------------------------------------------------


def failed(failure: Failure) -> str:
    """Which rank failed, where, and why, in one line."""
    where = f" on {failure['host']}" if failure.get("host") else ""
    who = f"node {failure.get('node')}" if failure.get("rank") is None else f"rank {failure['rank']}"
    what = f" (what to do: {failure['advice']})" if failure.get("advice") else ""
    return f"{who}{where}: {failure['message']}{what}"


def details(event: EventRecord) -> str:
    """What an event says beside its time and name, in one line."""
    if event["event"] == "hang":
        return str(event["why"])
    if event["event"] == "stacks":
        return "; ".join(map(stood, event["places"]))
    if event["event"] == "spent":
        return in_words(event["spent"])
    left_out, failure = {"time", "event", "host", "logs", "failure", "others"}, event.get("failure")
    if failure and failure["message"] == f"exit code {event.get('exit_code')}":  # it has said that
        left_out.add("exit_code")
    shown = dict(event)
    if "signal" in event:
        shown["signal"] = signal.Signals(event["signal"]).name
    if event.get("grace") is not None:
        shown["grace"] = duration_text(event["grace"])
    parts = [
        f"{key}={_value(value)}" for key, value in shown.items() if key not in left_out and value not in (None, "", [])
    ]
    return " ".join([*([f"failure: {failed(failure)};"] if failure else []), *parts])


# Event → a sentence about it, for the page, which translates it: with values of the event.
_SENTENCES = {
    "submitted": "submitted: {ranks}, {nodes}", "queued": "waits for {need}, {ahead} ahead",
    "granted": "has devices {devices}", "importing": "imports {what}", "imported": "imported, in {seconds} s",
    "cold": "begins in a new process: {why}", "warm": "begins in a process that was kept warm",
    "started": "{world_size} began", "checkpoint": "saved step {step}", "waiting": "waits: {why}",
    "restarting": "begins again, restart {restarts}: {why}", "stopping": "is asked to stop by {signal}",
    "suspended": "is suspended", "resuming": "goes on", "finished": "ended: {state}",
    "resumed": "has loaded the checkpoint of step {step}", "unjoined": "the ranks do not work together: {why}",
    "stacks": "where its ranks were before they were stopped: {places}", "spent": "time: {spent}",
    "hang": "hangs {why}", "requeued": "is queued again: {why}", "exec": "its ranks start one by one: {why}",
}  # fmt: skip
_COUNTED = {"ranks": "rank", "world_size": "rank", "nodes": "node", "need": "device", "ahead": "job"}


def sentence(event: EventRecord) -> tuple[str, dict[str, str]] | None:
    """A sentence about an event with places for values, and the values; None if its details say it."""
    template = _SENTENCES.get(event["event"])
    failure = event.get("failure")
    given = {**event, **({"why": failed(failure)} if failure else {})}
    if "signal" in event:
        given["signal"] = signal.Signals(event["signal"]).name
    for name in ("places", "spent"):
        if name in event:
            given[name] = details(event)
    for name, what in _COUNTED.items():
        if isinstance(count := event.get(name), int):
            given[name] = f"{count} {what}{'' if count == 1 else 's'}"
    if template is None or any(given.get(name) is None for _, name, _, _ in Formatter().parse(template) if name):
        return None
    texts = {key: it if isinstance(it, str) else _value(it) for key, it in given.items() if f"{{{key}}}" in template}
    return template, texts


def _value(value: Any, depth: int = 0) -> str:
    """A detail in a readable form: `0,1`, `true`, `"no node"`."""
    if isinstance(value, (list, tuple, dict)) and depth >= _MOST_DEPTH:
        return "…"
    if isinstance(value, (list, tuple)):
        return ",".join(_value(inner, depth + 1) for inner in value)
    if isinstance(value, dict):
        return ",".join(f"{key}:{_value(inner, depth + 1)}" for key, inner in value.items())
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if " " in value else value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
