"""Two jobs of one name on different hosts: one ended there while the other was submitted elsewhere."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from paceline.backends.ssh.backend import Ssh
from paceline.backends.ssh.target import Hosts, Options
from paceline.backends.submission import names
from paceline.job.errors import UserError
from paceline.job.spec import JobSpec

from .many import _JOB, _PART

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paceline.backends.remote.connection import Host

DAY = 86400.0


class Answering:
    """Hosts that have one job each, and what they were told to do: verb, host, names."""

    def __init__(self, **states: str) -> None:
        self.states = states
        self.told: list[tuple[str, str, list[str]]] = []

    def ask(
        self, hosts: Sequence[Host], request: Callable[[Host], dict[str, Any]]
    ) -> tuple[dict[Host, Any], dict[Host, UserError]]:
        return {host: self._answer(host, request(host)) for host in hosts}, {}

    def _answer(self, host: Host, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] != "describe":
            self.told.append((request["do"], host.name, list(request["names"])))
            return {"names": request["names"]}
        jobs = [
            self._report(host.name, name) for name in request["names"] or ["it"] if name == "it" or host.name == "b"
        ]
        return {"jobs": jobs, "names": [report["job"]["name"] for report in jobs]}

    def _report(self, host: str, name: str) -> dict[str, Any]:
        state, created = self.states[host], DAY * "abc".index(host)
        return {
            "job": {**_JOB, "name": name, "nodes": 1, "ranks": 1, "created": created},
            "part": {
                **_PART, "state": state, "alive": True if state == "RUNNING" else None, "host": host, "node_rank": 0,
                "nodes": 1, "ranks": 1, "hosts": [host], "job_id": f"{name} on {host}", "instances": [],
                "exit_code": None if state == "RUNNING" else 0,
            },
        }  # fmt: skip


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Ssh, Answering]]:
    """A target with a job `it` on each host, that of b newer than that of a; b has a job `other`, too."""

    def made(**states: str) -> tuple[Ssh, Answering]:
        answering = Answering(**states)
        monkeypatch.setattr(Hosts, "ask", lambda _, hosts, request: answering.ask(hosts, request))
        options = Options.validated({"hosts": list(states), "root": "/jobs of ada"})
        return Ssh("lab", options), answering

    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return made


def said(state: str, host: str, verb: str) -> str:
    there = f"paceline {verb} -H {host} --ssh-root '/jobs of ada' it"
    return f"another job it ({state}) is on {host} and is not shown; {verb} it there with {there}"


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        ({"a": "RUNNING", "b": "SUCCEEDED"}, "a"),
        ({"b": "RUNNING", "a": "SUCCEEDED"}, "b"),
        ({"a": "SUCCEEDED", "b": "FAILED"}, "b"),
        ({"b": "FAILED", "a": "SUCCEEDED"}, "b"),
    ],
)
def test_the_one_that_has_not_ended_is_known_or_else_the_newest(
    target: Callable[..., tuple[Ssh, Answering]], states: dict[str, str], shown: str
) -> None:
    there, answering = target(**states)
    (hidden,) = states.keys() - {shown}
    for asked in ["it"], None:
        found = there.describe(asked)
        assert [job.state for job in found.jobs] == [states[shown]]
        assert found.warnings == (said(states[hidden], hidden, "delete"),)
    there.stop(["it"])
    assert answering.told == [("stop", shown, ["it"])]


def test_one_that_was_stopped_is_known_also_after_it_has_ended(
    target: Callable[..., tuple[Ssh, Answering]],
) -> None:
    there, answering = target(a="RUNNING", b="SUCCEEDED")
    there.describe(["it"])
    answering.states["a"] = "STOPPED"
    assert [job.state for job in there.describe(["it"]).jobs] == ["STOPPED"]


def test_a_job_that_has_not_ended_is_told_of_when_one_elsewhere_gets_its_name(
    target: Callable[..., tuple[Ssh, Answering]],
) -> None:
    there, _ = target(a="RUNNING", b="RUNNING")
    jobs = there._jobs
    (job,) = there.describe(["other"]).jobs
    jobs._submitted.add(job, ["b"])
    assert jobs.replaces("other", ["a"]).startswith("another job other was started on b and not seen to end; ")
    assert [jobs.replaces("other", ["a", "b"]), jobs.replaces("it", ["a"])] == ["", ""]
    jobs._submitted.has_ended(dataclasses.replace(job, state="SUCCEEDED"))
    assert jobs.replaces("other", ["a"]) == ""


def test_a_number_that_a_job_elsewhere_has_is_not_free(target: Callable[..., tuple[Ssh, Answering]]) -> None:
    there, _ = target(b="RUNNING")
    (job,) = there.describe(["it"]).jobs
    there._jobs._submitted.add(dataclasses.replace(job, name="it-1"), ["b"])
    assert next(names(JobSpec.validated({"name": "it-", "script": "x.py"}))) == "it-2"


def test_delete_leaves_the_other_one_alone(target: Callable[..., tuple[Ssh, Answering]]) -> None:
    there, answering = target(b="SUCCEEDED", c="SUCCEEDED")
    (job,) = there.describe(["it"]).jobs
    there._jobs._submitted.add(job, ["b"])  # as if that of b had been submitted last from here
    there.delete(["other", "it"])
    assert answering.told == [("delete", "b", ["other"]), ("delete", "c", ["it"])]
    assert there._jobs.submitted_to("it", ["b"]) == ["b"]


def test_neither_of_two_that_have_not_ended_is_changed(target: Callable[..., tuple[Ssh, Answering]]) -> None:
    there, answering = target(b="RUNNING", a="RUNNING")
    line = said("RUNNING", "a", "stop")
    found = there.describe(["it"])
    assert found.warnings == (line,)
    changes: list[Callable[[], object]] = [
        lambda: there.stop(["it"]), lambda: there.suspend(["it"]), lambda: there.resume(["it"]),
        lambda: there.forget("it"), lambda: there.scaleout("it", 1), lambda: there.scalein("it", 1),
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(UserError, match="job it is not changed, since it is not clear which one: ") as refused:
            change()
        assert str(refused.value).endswith(line)
    with pytest.raises(UserError, match="has not ended"):
        there.delete(["it"])
    assert not answering.told
