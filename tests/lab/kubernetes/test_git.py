"""Code that the pods fetch by git."""

from __future__ import annotations

import base64
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from fake_kubernetes import images, network
from tests import needs
from tests.job.code.git_server import PASSWORD, GitServer

from paceline.cli.main import cli
from paceline.job.errors import UserError
from paceline.job.spec import JobSpec

from .user import Silence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.job.job import Job

    from .user import User

SCRIPT = "import os\nprint({!r}, os.path.exists('/paceline/git'), flush=True)\n"


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main")
    folder.mkdir(parents=True, exist_ok=True)
    needs.need(needs.missing("git"))
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(SCRIPT.format(text))
    git(folder, "add", ".")
    git(folder, "commit", "-qm", text)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repositories(tmp_path: Path) -> Path:
    """Two repositories: `public/origin`, and `private` with a password."""
    for name in ("public/origin", "private"):
        git(tmp_path / "served" / name, "init", "-q")
        commit(tmp_path / "served" / name, "first")
    return tmp_path / "served"


@pytest.fixture
def url(user: User, repositories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where pods reach the repositories; this machine reaches them too, as git is told where they are for it."""
    with network.inside(user.cluster.network.hub):
        there = GitServer(repositories, user.cluster.network.address)
    here = GitServer(repositories)
    found = f"http://{user.cluster.network.address}:{there.server_port}"
    (tmp_path / "gitconfig").write_text(f'[url "{here.url}/"]\n\tinsteadOf = {found}/\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    for name in ("GIT_SYNC_USERNAME", "GIT_SYNC_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    threads = [threading.Thread(target=it.serve_forever) for it in (there, here)]
    for thread in threads:
        thread.start()
    yield found
    for it, thread in zip((there, here), threads, strict=True):
        it.shutdown()
        thread.join()
        it.server_close()


def submit(user: User, source: str, name: str = "it", **options: Any) -> Job:
    there = user.backend(**options)
    given = {"name": name, "script": "train.py", "code": {"mode": "git", "source": source}}
    return there.start(there.prepare(JobSpec.validated(given)), Silence())


def test_the_commit_of_the_submit_is_fetched_in_the_pod_by_git_of_another_image(
    user: User, url: str, repositories: Path
) -> None:
    first = git(repositories / "public/origin", "rev-parse", "HEAD")
    user.cluster.images["no-git"] = images.usual().without("/usr/bin/git")
    user.cluster.images["with-git"] = replace(images.without_python(), user=1234)
    job = submit(user, f"{url}/public/origin@main", image="no-git", git_image="with-git")
    assert (job.code or {})["commit"] == first
    commit(repositories / "public/origin", "second")
    assert user.ended("it").state == "SUCCEEDED", user.get("it").error
    assert user.lines("it") == ["first False"]
    assert user.cluster.all("ConfigMap") and not [
        it for it in user.cluster.all("Secret") if "it" in it["metadata"]["name"]
    ]
    # One that goes on from it has its commit.
    there = user.backend(git_image="with-git")
    spec = there.spec("it").changed({"name": "again", "resume_from": "it"})
    there.start(there.prepare(spec), Silence())
    submit(user, f"{url}/public/origin", "none", image="no-git")
    assert user.ended("again").state == "SUCCEEDED" and user.lines("again") == ["first False"]
    assert "has no git; name one that has it with --git-image" in (user.ended("none").error or "")


def test_a_private_repository_with_a_password_that_ranks_do_not_get(
    user: User, url: str, monkeypatch: pytest.MonkeyPatch, repositories: Path
) -> None:
    first = git(repositories / "private", "rev-parse", "HEAD")
    submit(user, f"{url}/private", "without")
    monkeypatch.setenv("GIT_SYNC_USERNAME", "me")
    monkeypatch.setenv("GIT_SYNC_PASSWORD", PASSWORD)
    submit(user, f"{url}/private")
    monkeypatch.delenv("GIT_SYNC_PASSWORD")
    user.cluster.create({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine"},
        "stringData": {"username": "me", "password": PASSWORD},
    })  # fmt: skip
    submit(user, f"{url}/private@{first[:10]}", "by-secret", git_secret="mine")
    for name in ("it", "by-secret"):
        job = user.ended(name)
        assert job.state == "SUCCEEDED", job.error
        assert user.lines(name) == ["first False"]
        assert (job.code or {})["commit"] == first, "the pods have found it"
    why = user.ended("without").error or ""
    assert "access is refused; name a Secret that allows it with --git-secret" in why
    assert PASSWORD not in str([user.cluster.all(kind) for kind in ("Job", "Pod", "ConfigMap")])
    user.backend().delete(["it"])
    user.nothing_left("it")


def private(url: str, way: str) -> JobSpec:
    """A job with the private repository, and its credentials in its variables or in the address."""
    source = f"{url}/private"
    if way == "url":
        source = source.replace("://", f"://me:{quote(PASSWORD, safe='')}@")
    env = {"GIT_SYNC_USERNAME": "me", "GIT_SYNC_PASSWORD": PASSWORD} if way == "env" else {}
    return JobSpec.validated(
        {"name": "it", "script": "train.py", "code": {"mode": "git", "source": source}, "env": env}
    )


@pytest.mark.parametrize("way", ["env", "url"])
def test_credentials_of_the_job_are_in_a_secret_alone_and_serve_those_that_resume_it(
    user: User, url: str, way: str
) -> None:
    there = user.backend()
    prepared = there.prepare(private(url, way))
    assert not [word for word in ("GIT_SYNC", PASSWORD, quote(PASSWORD, safe="")) if word in prepared.text()]
    there.start(prepared, Silence())
    assert user.ended("it").state == "SUCCEEDED", user.get("it").error
    (secret,) = [it for it in user.cluster.all("Secret") if it["metadata"]["name"] == "it-git"]
    assert base64.b64decode(secret["data"]["password"]).decode() == PASSWORD
    written = str([user.cluster.all(kind) for kind in ("Job", "Pod", "ConfigMap", "Service")])
    assert not [word for word in ("GIT_SYNC", PASSWORD, quote(PASSWORD, safe="")) if word in written]
    again = there.spec("it").changed({"name": "again", "resume_from": "it"})
    there.start(there.prepare(again), Silence())
    there.delete(["it"])  # and its Secret
    assert user.ended("again").state == "SUCCEEDED", user.get("again").error
    user.cluster.delete("Secret", "again-git")
    last = again.changed({"name": "last", "resume_from": "again"})
    with pytest.raises(
        UserError, match=r"^the credentials for git of job again were in Secret again-git, but it is gone"
    ):
        there.prepare(last)
    given = JobSpec.validated({**last.dumped(), "env": {"GIT_SYNC_USERNAME": "me", "GIT_SYNC_PASSWORD": "x"}})
    there.prepare(given)


def test_repositories_that_pods_cannot_fetch_are_refused(user: User, url: str) -> None:
    refused = {
        (f"{url}/public/origin@nope", None): r"has no branch, tag or commit 'nope'; check the part after '@'$",
        (
            "git@example.org:a/b",
            None,
        ): r"^--sync-source git@example.org:a/b: pods have no ssh key; .* with --git-secret",
        (
            "git@example.org:a/b",
            "gone",
        ): r"^--git-secret gone: no such Secret in namespace default; make it with: kubectl",
    }
    for (source, secret), words in refused.items():
        with pytest.raises(UserError, match=words):
            submit(user, source, git_secret=secret)
    assert user.cluster.all("Job") == []


def test_arenas_main_line_finds_the_script_below_the_working_dir(
    user: User, url: str, repositories: Path, tmp_path: Path
) -> None:
    code = tmp_path / "root/code/origin"
    (repositories / "public/origin/show.py").write_text(
        "import os, sys\nprint(os.getcwd(), os.path.isfile(sys.argv[1]))"
    )
    commit(repositories / "public/origin", "second")
    line = (
        "arena", "submit", "pytorch", "--name=it", "--workers=2", f"--working-dir={tmp_path}/root", "--image=usual",
        "--sync-mode=git", f"--sync-source={url}/public/origin", f"python {code}/show.py {code}/train.py",
    )  # fmt: skip
    assert not cli.main(line, "paceline", standalone_mode=False)
    assert user.ended("it").state == "SUCCEEDED", user.get("it").error
    assert user.lines("it") == [f"{tmp_path}/root/code/it True"] * 2
    assert (user.get("it").code or {})["path"] == f"{tmp_path}/root/code/it of the pods"
