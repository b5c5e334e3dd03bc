"""The requests of a client elsewhere that only read this machine and its jobs."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING

from paceline.node.errors import Refused
from paceline.node.files import read_json
from paceline.node.journal.fold import fold, is_recent
from paceline.node.journal.state import FINAL
from paceline.node.store import records

from .protocol import end_with_stdin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.contract import messages
    from paceline.contract.records import JobRecord
    from paceline.node.store.home import Home


def describe(home: Home, request: messages.Describe) -> messages.Described:
    """Reports of jobs here, but of those that ended before a time. Removes jobs whose time to live is over, or not."""
    queue = records.queue_of(home.root)
    runs = home.runs(list(records.names(home.jobs)) if request["names"] is None else request["names"])
    found = []
    for run in runs:
        report = records.look(run.path, queue)
        if report is None:
            continue
        if request["names"] is None:
            report["part"]["traceback"] = None  # a list has none
        if is_shown(fold(report["job"], [report["part"]]), request, functools.partial(home.remove, run)):
            found.append(report)
    return {"jobs": found, "names": [run.path.name for run in runs]}


def is_shown(record: JobRecord, request: messages.Describe, remove: Callable[[], object]) -> bool:
    """Whether a job is in the answer; it is removed if its time to live is over, unless such jobs are to be kept."""
    is_over, now = record["state"] in FINAL, time.time()
    has_expired = is_over and record["ttl"] is not None and now - (record["kept_since"] or now) >= record["ttl"]
    if not has_expired or request.get("keeps"):
        return is_recent(record, request["since"] or 0.0)
    with contextlib.suppress(Refused):  # it is tried again at the next call
        remove()
    return False


def spec(home: Home, request: messages.OfJob) -> messages.SpecAnswer:
    """What the user of a job asked for."""
    return {"spec": (read_json(home.run(request["name"]).job) or {})["spec"]}


def events(home: Home, request: messages.OfJob) -> messages.Events:
    """The events of a job here."""
    return {"events": records.events(home.run(request["name"]))}


def wait(home: Home, request: messages.OfJobs) -> Iterator[messages.Ended]:
    """One line per job here when it has ended, and a last line."""
    end_with_stdin()
    for run in home.runs(request["names"]):
        run.wait_until_free()
        yield {"ended": run.path.name}
    yield {"end": True}


def logs(home: Home, request: messages.Logs) -> Iterator[messages.LogAnswer]:
    """What ranks wrote: lines, each followed by the bytes."""
    from paceline.node.logs.query import LogQuery
    from paceline.node.logs.reader import check, read

    end_with_stdin()
    run = home.run(request["name"])
    query = LogQuery(**request["query"])
    if request.get("checked"):
        check(run.path, query)
    yield {"begin": True}
    for lines in read(run.path, query):
        yield {"lines": lines[:4], "data": lines.text}
    yield {"end": True}


def nodes(home: Home, request: messages.Nodes) -> messages.NodeAnswer:
    """This machine, and what of it is in use."""
    from paceline.node.machine.nvml import gpus
    from paceline.node.store.plan import this_machine
    from paceline.node.store.usage import node

    devices, slots = this_machine(home, request["slots"]).devices
    return {"node": node(home.root, home.jobs, devices, gpus, slots=slots)}


def usage(home: Home, request: messages.OfJobs) -> messages.Usages:
    """What jobs use here."""
    from paceline.node.store.usage import of_jobs

    return {"usage": of_jobs(home.runs(request["names"]))}


def stands(home: Home, request: messages.OfJob) -> messages.StandsAnswer:
    """Where the ranks of a job here are."""
    from paceline.node.watching import live

    return {"stands": live.stands(home.run(request["name"]))}


def history(home: Home, request: messages.HistoryOf) -> messages.Histories:
    """What a job has used and logged here."""
    from paceline.node.telemetry.history import history as history_of_run

    return {"nodes": [history_of_run(home.run(request["name"]), request["since"])]}


def losses(home: Home, request: messages.OfJobs) -> messages.Losses:
    """Some of the losses that jobs have logged here."""
    from paceline.node.telemetry.history import losses as losses_of_run

    return {"losses": {run.path.name: found for run in home.runs(request["names"]) if (found := losses_of_run(run))}}


def contents(home: Home, request: messages.OfJobs) -> messages.Contents:
    """What the removal of jobs would remove here."""
    from paceline.node.store.usage import contents as contents_of_run

    return {"contents": {run.path.name: contents_of_run(run) for run in home.runs(request["names"])}}


def volumes(home: Home, request: messages.Volumes) -> messages.VolumeLooks:
    """Whether paths can be read here, and how large their file systems are."""
    from paceline.node.machine.volumes import look

    return {"volumes": {name: look(path) for name, path in request["paths"].items()}}
