"""Credentials for git reach git and nothing else, whichever way they come; other secrets in `--env` are pointed out."""

from __future__ import annotations

import json
import subprocess
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from tests.backends.slurm.fake import Login
from tests.job.code.git_server import PASSWORD, GitServer
from tests.needs import missing, need
from tests.typed import refusal

from paceline import jobs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Paceline

SEEN = "import os\nprint(*(name for name in os.environ if name.startswith('GIT_SYNC')), 'end', flush=True)\n"
USER, SECRET = "GIT_SYNC_USERNAME=me", f"GIT_SYNC_PASSWORD={PASSWORD}"
HOSTS = ("-H", "localhost")
WAYS = ["flags", "file", "environment", "secret", "url"]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GitServer]:
    """A server with the repository `private`."""
    need(missing("git"))
    root = tmp_path_factory.mktemp("served")
    (root / "private").mkdir()
    (root / "private" / "train.py").write_text(SEEN)
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *identity, *words], cwd=root / "private", check=True)
    it = GitServer(root)
    thread = threading.Thread(target=it.serve_forever)
    thread.start()
    yield it
    it.shutdown()
    thread.join()
    it.server_close()


def given(paceline: Paceline, way: str, url: str) -> list[str]:
    """The end of a command line that has the credentials in one of the ways."""
    source = f"{url}/private/.git"
    if way == "url":
        source = source.replace("://", f"://me:{quote(PASSWORD, safe='')}@")
    flags = ["--sync-mode", "git", "--sync-source", source]
    if way in ("environment", "secret"):
        paceline.env.update(GIT_SYNC_USERNAME="me", GIT_SYNC_PASSWORD=PASSWORD)
    if way == "secret":
        flags += ["--secret", "GIT_SYNC_USERNAME", "--secret", "GIT_SYNC_PASSWORD"]
    if way == "flags":
        flags += ["--env", USER, f"--env={SECRET}"]
    if way != "file":
        return [*flags, "train.py"]
    job = {
        "script": "train.py", "env": {"GIT_SYNC_USERNAME": "me", "GIT_SYNC_PASSWORD": PASSWORD},
        "code": {"mode": "git", "source": source},
    }  # fmt: skip
    (paceline.folder.parent / f"{paceline.folder.name}.json").write_text(json.dumps(job))
    return [f"../{paceline.folder.name}.json"]


def stored(folder: Path) -> list[Path]:
    """The files that have the password."""
    parts = (PASSWORD.encode(), json.dumps(PASSWORD)[1:-1].encode(), quote(PASSWORD, safe="").encode())
    return [path for path in folder.rglob("*") if path.is_file() and any(part in path.read_bytes() for part in parts)]


@pytest.mark.parametrize(
    ("way", "where"),
    [
        *((way, ()) for way in WAYS),
        ("flags", HOSTS),
        *(pytest.param(way, HOSTS, marks=pytest.mark.nightly) for way in WAYS if way != "flags"),
    ],
)
def test_git_alone_gets_its_credentials(
    paceline: Paceline, server: GitServer, way: str, where: tuple[str, ...]
) -> None:
    command = given(paceline, way, server.url)
    paceline.env["HOME"] = str(paceline.folder)  # where a host would have its jobs
    planned = paceline("submit", "--dry-run", *where, *command)
    done = paceline("submit", *where, "--name", "it", *command)
    assert (planned.returncode, done.returncode) == (0, 0), (planned.stderr, done.stderr)
    assert paceline("wait", "it").returncode == 0
    assert f"me:{PASSWORD}" in server.asked
    assert paceline("logs", "it").stdout == "end\n"
    told = [paceline("get", "it", "-o", "yaml").stdout, planned.stdout, planned.stderr, done.stdout, done.stderr]
    assert not [text for text in told if PASSWORD in text or json.dumps(PASSWORD)[1:-1] in text or "GIT_SYNC" in text]
    assert stored(paceline.folder) == []
    assert paceline("resubmit", "it").returncode == 0, "its code is copied, so none are needed"
    assert paceline("wait", "it-2").returncode == 0


@pytest.mark.parametrize("way", ["flags", "environment"])
def test_slurm_gets_no_credentials_for_git(tmp_path: Path, server: GitServer, way: str) -> None:
    login = Login(tmp_path)
    login.command("sbatch", 'env >> "$FAKE/given"; cat >> "$FAKE/given"; echo 7')
    done = login("submit", "--on", "lab", "--name", "it", *given(login, way, server.url))
    assert done.returncode == 0, done.stderr
    assert f"me:{PASSWORD}" in server.asked
    assert "GIT_SYNC" not in (tmp_path / "given").read_text() and stored(tmp_path) == []


def test_a_credential_that_is_not_set_is_refused(paceline: Paceline) -> None:
    said = refusal(paceline, "submit", "--secret", "GIT_SYNC_PASSWORD", paceline.script(SEEN))
    assert said == "secret GIT_SYNC_PASSWORD is not set in your environment; export it, then submit again"


def test_credentials_without_a_repository_reach_no_rank_and_that_is_said(paceline: Paceline) -> None:
    done = paceline("run", "--env", USER, "--env", SECRET, paceline.script(SEEN))
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert done.stderr.splitlines()[0] == (
        "paceline: GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD are for --sync-mode git alone; the ranks do not get them"
    )
    assert stored(paceline.folder) == []


def lines(*names: str, stored: str = "values of --env") -> str:
    """The line about variables that look like secrets."""
    what, them = ("looks like a secret", "it") if len(names) == 1 else ("look like secrets", "them")
    return (
        f"{', '.join(names)} {what}, and {stored} are stored and shown with the job; export {them}, and type "
        f"{' '.join(f'--secret {name}' for name in names)} instead"
    )


def test_what_looks_secret_is_pointed_out_and_the_line_says_what_to_type(paceline: Paceline) -> None:
    script = paceline.script("import os; print(os.environ['HF_TOKEN'])")
    harmless = ("--env", "AWS_REGION=eu", "--env", "TOKENIZERS_PARALLELISM=false", "--env", "WANDB_API_KEY=")
    done = paceline("submit", "--name", "it", "--env", "HF_TOKEN=abc123", "--env", "SIGNING_KEY=x", *harmless,
                    script)  # fmt: skip
    assert done.stdout == "it\n" and "abc123" not in done.stderr
    assert done.stderr.splitlines()[0] == f"paceline: {lines('HF_TOKEN', 'SIGNING_KEY')}"
    assert paceline("wait", "it").returncode == 0
    paceline.env.update(HF_TOKEN="def456", SIGNING_KEY="y")
    done = paceline("resubmit", "--secret", "HF_TOKEN", "--secret", "SIGNING_KEY", "it")
    assert done.stdout == "it-2\n" and "look" not in done.stderr, done.stderr
    assert paceline("wait", "it-2").returncode == 0
    assert paceline("logs", "it-2").stdout == "def456\n"
    spec: dict[str, Any] = json.loads((paceline.home / "jobs/it-2/job.json").read_text())["spec"]
    assert (spec["secrets"], sorted(spec["env"])) == (
        ["HF_TOKEN", "SIGNING_KEY"], ["AWS_REGION", "TOKENIZERS_PARALLELISM", "WANDB_API_KEY"],
    )  # fmt: skip


def test_secrets_in_job_files_and_from_python_are_pointed_out(paceline: Paceline) -> None:
    paceline.script("pass")
    job = paceline.script("script: script.py\nenv: {DB: 'postgres://me:abc123@host/x'}", "job.yaml")
    done = paceline("submit", "--dry-run", job)
    assert (done.returncode, done.stderr) == (0, f"paceline: {lines('DB')}\n")
    with pytest.warns(UserWarning, match=f"^{lines('MY_PASSWORD')}$"):
        jobs.prepare(jobs.JobSpec(command="true", env={"MY_PASSWORD": "abc123"}))


def test_secrets_in_setup_commands_are_pointed_out(paceline: Paceline) -> None:
    script = paceline.script("pass")
    harmless = 'export MY_KEY=$MY_KEY A_TOKEN="$(cat token)" A=1; python x.py --api_key=1'
    done = paceline("submit", "--dry-run", "--setup", "true; export HF_TOKEN='abc123'", "--setup", harmless, script)
    assert (done.returncode, done.stderr) == (0, f"paceline: {lines('HF_TOKEN', stored='commands of --setup')}\n")


def test_no_refusal_shows_the_value_of_a_variable(paceline: Paceline) -> None:
    for pair in ("HF-TOKEN=abc123", "=abc123"):
        assert "abc123" not in refusal(paceline, "submit", "--env", pair, paceline.script("pass"))
    with pytest.raises(ValueError, match="nothing to run") as caught:
        jobs.JobSpec(env={"HF_TOKEN": "abc123"})
    assert "abc123" not in str(caught.value)
