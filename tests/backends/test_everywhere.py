"""Python finds the jobs of all targets, as the verbs do."""

from __future__ import annotations

import json
import signal
import socket
from typing import TYPE_CHECKING

import pytest
from tests.cli.screens import cases
from tests.conftest import GENEROUS

from paceline import jobs
from paceline.backends import everywhere

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Paceline


def test_the_jobs_of_all_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [everywhere.Place(it.name, lambda it=it: it) for it in cases.EVERYWHERE]  # type: ignore[misc]
    monkeypatch.setattr(everywhere, "places", lambda since=None: places)
    found = jobs.list_jobs()
    assert {job.backend for job in found} == {"local", "lab", "slurm", "k8s"}
    assert [job.created for job in found] == sorted((job.created for job in found), reverse=True)


def test_a_target_that_fails_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> cases.Recorded:
        raise jobs.UserError("no such host")

    places = [everywhere.Place("local", lambda: cases.HERE), everywhere.Place("lab", fails)]
    monkeypatch.setattr(everywhere, "places", lambda since=None: places)
    with pytest.warns(UserWarning, match="lab: no such host; its jobs are not shown"):
        assert {job.backend for job in jobs.list_jobs()} == {"local"}


def test_a_job_is_found_where_it_was_submitted_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    (tmp_path / "paceline.toml").write_text('[targets.lab]\nbackend = "ssh"\nhosts = ["h1"]\n')
    notes = {"targets/lab/there": "{}", "targets/ssh/named": '{"options": {"hosts": ["h2:1"], "port": 2222}}'}
    for name, text in notes.items():
        (tmp_path / "home" / name).parent.mkdir(parents=True)
        (tmp_path / "home" / name).write_text(text)
    found = {name: everywhere.backend_with(name) for name in ("there", "named", "other")}
    assert {name: (it.name, it.where) for name, it in found.items()} == {
        "there": ("lab", " --on lab"), "named": ("ssh", " -H h2:1 --ssh-port 2222"), "other": ("local", ""),
    }  # fmt: skip
    (tmp_path / "home" / "jobs" / "named").mkdir(parents=True)
    assert (everywhere.backend_with("named").name, everywhere.backend_with("named", "ssh").name) == ("local", "ssh")
    with open(tmp_path / "paceline.toml", "a") as file:
        file.write('[targets.ssh]\nbackend = "ssh"\nhosts = ["h3"]\n')
    assert everywhere.backend_with("it", "ssh").where == " --on ssh"
    assert everywhere.backend_with("named", "ssh").where == " -H h2:1 --ssh-port 2222"  # not on the target of that name


def test_jobs_on_hosts_that_flags_named_are_looked_for_on_the_hosts_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    (tmp_path / "targets" / "ssh").mkdir(parents=True)
    noted = {"a": {"hosts": ["h1:2", "h2:1"]}, "b": {"hosts": ["h2:1", "h3:1"]}, "c": {"hosts": ["h3:1"], "port": 2222}}
    for name, options in noted.items():
        (tmp_path / "targets" / "ssh" / name).write_text(json.dumps({"options": options}))
    assert everywhere.hosts_named_for(["a", "b"], "ssh") == {"hosts": ["h1:2", "h2:1", "h3:1"]}
    with pytest.raises(jobs.UserError, match="job a is not where c is"):
        everywhere.hosts_named_for(["a", "c"], "ssh")
    (tmp_path / "targets" / "ssh" / "a").write_text("{")
    with pytest.raises(jobs.UserError, match="ssh/a is damaged"):
        everywhere.hosts_named_for(["a"], "ssh")


def test_a_fault_of_one_target_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> cases.Recorded:
        return {}["jobs"]  # type: ignore[no-any-return]

    places = [everywhere.Place("local", lambda: cases.HERE), everywhere.Place("lab", fails)]
    monkeypatch.setattr(everywhere, "places", lambda since=None: places)
    with pytest.warns(UserWarning, match="lab: KeyError: 'jobs'; its jobs are not shown"):
        assert {job.backend for job in jobs.list_jobs()} == {"local"}


def test_ctrl_c_ends_a_list_of_targets_one_of_which_is_silent(paceline: Paceline) -> None:
    paceline.env.update(PACELINE_LOOK_TIMEOUT="1h")
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = f'hosts = ["127.0.0.1"]\nport = {server.getsockname()[1]}\n'
        (paceline.folder / "paceline.toml").write_text(f'[targets.lab]\nbackend = "ssh"\n{options}')
        listing = paceline.start("list")
        try:
            server.settimeout(GENEROUS)
            with server.accept()[0] as login:
                assert login.recv(4) == b"SSH-"
                listing.send_signal(signal.SIGINT)
                out, err = listing.communicate(timeout=GENEROUS)
        finally:
            listing.kill()
            listing.communicate()
    assert (listing.returncode, out, err.strip()) == (130, "", "")
