"""`--environment` on hosts that are this machine, and here: what is installed, once, and what is refused."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import all_end, eventually, processes_with

from .wheels import wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Paceline

SHOWS = """
    import os, shutil, sys
    import first
    print(first.VERSION, sys.prefix == os.environ["VIRTUAL_ENV"], shutil.which("say-first") is not None, flush=True)
"""


@pytest.fixture
def there(paceline: Paceline) -> Paceline:
    """paceline with a home of its own, also on hosts that are this machine, and a script that needs a package."""
    paceline.home = paceline.folder / ".local/state/paceline"
    paceline.env.update(HOME=str(paceline.folder), PACELINE_HOME=str(paceline.home))
    paceline.script(SHOWS)
    return paceline


def environments(there: Paceline) -> list[Path]:
    """The folders of environments."""
    return sorted(path for path in (there.home / "environments").glob("*") if path.is_dir())


@pytest.mark.parametrize("where", [(), ("-H", "localhost:2")], ids=["here", "hosts"])
def test_it_is_installed_once_and_jobs_run_with_it(there: Paceline, where: tuple[str, ...]) -> None:
    wheel(there.folder / "wheels", "first", "1.5", needs=("second",))
    wheel(there.folder / "wheels", "second")
    asked = (*where, *(() if where else ("-n", "2")), "--environment", "wheels", "--name", "it-")
    foreseen = there.succeeds("run", *asked, "--dry-run", "script.py")
    assert foreseen.stderr == "paceline: wheels is installed on localhost before it starts\n"
    done = there.succeeds("run", *asked, "script.py")
    assert done.stdout == "1.5 True True\n"
    assert "installing wheels on localhost" in done.stderr
    [folder] = environments(there)
    before = (folder / "environment.json").read_bytes()
    foreseen = there.succeeds("run", *asked, "--dry-run", "script.py")
    assert foreseen.stderr == ""
    assert json.loads(foreseen.stdout)["python"] == [str(folder / "bin/python")]
    again = there.succeeds("run", *asked, "script.py")
    assert (again.stdout, "installing" in again.stderr) == ("1.5 True True\n", False)
    assert (folder / "environment.json").read_bytes() == before

    [look] = there.json("check", *where, "--environment", "wheels")
    assert (look["host"], look["origin"], look["builder"]) == ("localhost", "", "pip")
    (there.folder / "wheels/second-1.0-py3-none-any.whl").unlink()
    (there.folder / "wheels/first-1.5-py3-none-any.whl").unlink()
    wheel(there.folder / "wheels", "first", "2.0")
    [look] = there.json("check", *where, "--environment", "wheels")
    assert look["origin"] == "wheels from here"
    # A job that is submitted again has what it had, whatever the folder has by now.
    assert there.succeeds("submit", *where, "--environment", "wheels", "--name", "old", "script.py").returncode == 0
    there.succeeds("wait", *where, "old")
    assert there.json("get", *where, "old")["environment"] == "wheels"
    wheel(there.folder / "wheels", "first", "3.0")
    name = there.succeeds("resubmit", *where, "old").stdout.strip()
    there.succeeds("wait", *where, name)
    assert there.succeeds("logs", *where, name).stdout.startswith("2.0 ")
    name = there.succeeds("resubmit", *where, "--environment", "wheels", "old").stdout.strip()
    there.succeeds("wait", *where, name)
    assert there.succeeds("logs", *where, name).stdout.startswith("3.0 ")

    assert len(environments(there)) == 3
    assert there.json("prune", *where, "--environments", "--dry-run") == []  # each was used a moment ago
    listed = there.json("prune", *where, "--environments", "--since", "0s", "--dry-run")
    assert sorted(it["source"] for it in listed) == ["wheels"] * 3 + ["wheels, kept for resubmit"] * 3
    there.succeeds("prune", *where, "--environments", "--since", "0s", "-y")
    assert environments(there) == []
    assert "are not kept here any more" in there("resubmit", *where, "old").stderr


@pytest.mark.parametrize("where", [(), ("-H", "localhost")], ids=["here", "hosts"])
def test_a_job_is_checked_before_anything_is_installed(there: Paceline, where: tuple[str, ...]) -> None:
    wheel(there.folder / "wheels", "first")
    done = there("run", *where, "--environment", "wheels", "nope.py")
    assert (done.returncode, "nope.py" in done.stderr) == (2, True)
    assert environments(there) == []


def test_one_that_a_job_uses_stays(there: Paceline) -> None:
    wheel(there.folder / "wheels", "first")
    there.script("import first, threading\nprint('up', flush=True)\nthreading.Event().wait()")
    there.succeeds("submit", "--environment", "wheels", "--name", "it", "script.py")
    eventually(lambda: there("logs", "it").stdout == "up\n", "the job runs", 0.5)
    done = there.succeeds("prune", "--environments", "--since", "0s", "-y")
    assert "wheels on localhost is in use, and stays" in done.stderr
    assert len(environments(there)) == 1
    there.succeeds("stop", "--now", "it")


def test_what_an_interpreter_has(there: Paceline) -> None:
    environment = there.folder / "own"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    made = wheel(there.folder / "made", "first", "1.0+local")
    into = next(environment.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--target", str(into), str(made)]
    subprocess.run(pip, check=True)
    made.unlink()
    done = there.succeeds("run", "--environment", "own", "script.py")
    assert done.stdout == "1.0+local True True\n"


def test_requirements_with_files_of_their_own(there: Paceline) -> None:
    made = wheel(there.folder / "made", "first", "1.1", needs=("second>=1",))
    wheel(there.folder / "made", "second", "1.2")
    (there.folder / "more.txt").write_text("--find-links made\n")
    (there.folder / "requirements.txt").write_text(f"-r more.txt  # and others\n./{made.relative_to(there.folder)}\n")
    there.env["PIP_NO_INDEX"] = "1"
    done = there.succeeds("run", "--environment", "auto", "--no-python", "say-first")
    assert done.stdout == "first 1.1\n"
    assert "installing requirements.txt on localhost" in done.stderr


def test_machines_without_an_index_get_the_wheels(there: Paceline) -> None:
    wheel(there.folder / "made", "first", "1.4", needs=("second",))
    wheel(there.folder / "made", "second")
    (there.folder / "needs.txt").write_text("first==1.4\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Nobody listens there; this machine has another place to look.
    there.env.update(
        PIP_INDEX_URL=f"http://127.0.0.1:{port}/simple", PIP_RETRIES="0", PIP_FIND_LINKS=str(there.folder / "made")
    )
    [look] = there.json("check", "-H", "localhost", "--environment", "needs.txt")
    assert look["origin"] == "wheels from here"
    done = there.succeeds("run", "-H", "localhost", "--environment", "needs.txt", "script.py")
    assert done.stdout == "1.4 True True\n"


@pytest.fixture
def silent_index() -> Iterator[tuple[str, threading.Event]]:
    """An index that takes connections and never answers; and what is set once one has come with a request."""
    asked = threading.Event()
    kept: list[socket.socket] = []
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            kept.append(connection)
            if connection.recv(1):
                asked.set()

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}/simple", asked
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()
    for connection in kept:
        connection.close()


class _Refuses(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(401)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("collects", [False, True], ids=["there", "here"])
def test_an_index_that_refuses(there: Paceline, collects: bool) -> None:
    (there.folder / "needs.txt").write_text("first\n")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refuses) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}/simple"
        there.env["PIP_INDEX_URL"] = url
        if collects:  # for a machine that reaches none of its own
            there.env.update(PIP_INDEX_URL="http://127.0.0.1:1/simple", PIP_EXTRA_INDEX_URL=url, PIP_RETRIES="0")
        done = there("run", "-H", "localhost", "--environment", "needs.txt", "script.py")
        server.shutdown()
    assert done.returncode == 2
    assert f"{url}/first/ answers: 401 " in done.stderr.splitlines()[-1]
    without_half(there)


def test_a_client_that_is_killed_leaves_nothing(there: Paceline, silent_index: tuple[str, threading.Event]) -> None:
    url, asked = silent_index
    (there.folder / "needs.txt").write_text("first\n")
    there.env["PIP_INDEX_URL"] = url
    process = there.start("run", "-H", "localhost", "--environment", "needs.txt", "script.py")
    assert asked.wait(120)
    process.kill()
    process.communicate()
    all_end(lambda: processes_with(f"PIP_INDEX_URL={url}"), "the build")
    assert environments(there) == []


def test_two_jobs_share_one_installation(there: Paceline) -> None:
    wheel(there.folder / "wheels", "first")
    asked = ("run", "-H", "localhost", "--environment", "wheels", "--name", "it-", "script.py")
    both = [there.start(*asked) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out) == (0, "1.0 True True\n"), err
    assert len(environments(there)) == 1


def without_half(there: Paceline) -> None:
    """Nothing is left of an environment that could not be installed."""
    assert environments(there) == []
    assert not [path for path in (there.home / "environments").glob(".files-*")]


def test_a_builder_that_fails(there: Paceline) -> None:
    wheel(there.folder / "wheels", "first", needs=("nowhere>=2",))
    done = there("run", "-H", "localhost", "--environment", "wheels", "script.py")
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("paceline: localhost: environment wheels: pip failed: ")
    assert "nowhere" in line
    assert "all of it is in " in line
    without_half(there)
    assert there("list", "-A").stdout.count("\n") <= 1


def test_a_wheel_for_another_platform(there: Paceline) -> None:
    wheel(there.folder / "wheels", "first", tag="cp311-cp311-manylinux_2_17_s390x")
    done = there("run", "--environment", "wheels", "script.py")
    assert (done.returncode, "first" in done.stderr.splitlines()[-1]) == (2, True)
    without_half(there)


@pytest.mark.parametrize(
    ("files", "source", "said"),
    [
        ({}, "nope.txt", "--environment nope.txt: no such file or folder; name "),
        ({}, "auto", "--environment auto: "),
        ({"folder/readme": ""}, "folder", "--environment folder: the folder has no wheels and is no virtual "),
        ({"r.txt": "first ==\n"}, "r.txt", "'first ==' is no requirement: "),
        ({"r.txt": "-r r.txt\n"}, "r.txt", "includes itself; remove that line"),
        ({"r.txt": "-r other.txt\n"}, "r.txt", "cannot read "),
        ({"r.txt": "-e ./gone\n"}, "r.txt", "'-e ./gone': no such file or folder; correct the path"),
        ({"r.txt": b"\xff\x00"}, "r.txt", "--environment r.txt: is no text; name "),
        ({"pyproject.toml": "[tool.x]\n"}, "pyproject.toml", "it lists no dependencies below [project]"),
        ({"pyproject.toml": "[project\n"}, "pyproject.toml", "--environment pyproject.toml: "),
        (
            {"pyproject.toml": '[project]\ndependencies = []\nrequires-python = "<3.5"\n'},
            "pyproject.toml",
            "localhost: --environment pyproject.toml: it needs Python <3.5, and there is 3.",
        ),
        ({"uv.lock": "version = 1\n"}, "uv.lock", "--environment uv.lock: it has no project; make it with uv lock"),
        ({"pylock.toml": 'lock-version = "9.0"\n'}, "pylock.toml", "make the lock anew"),
        ({"environment.yml": "dependencies: []\n"}, "environment.yml", "there is no micromamba, mamba or conda"),
    ],
)  # fmt: skip
def test_refused(there: Paceline, files: dict[str, str | bytes], source: str, said: str) -> None:
    for name, content in files.items():
        path = there.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    there.env["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = there("run", "--environment", source, "script.py")
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert said in line
    without_half(there)


def test_conda_makes_one(there: Paceline) -> None:
    """With a stand-in, which makes a virtual environment: no package index of ours has conda."""
    programs = there.folder / "programs"
    programs.mkdir()
    said = there.folder / "said"
    (programs / "micromamba").write_text(
        f'#!/bin/sh\necho "$1 $2 $3 $4" >{said}\ncp "$7" {said}.yml\nexec {sys.executable} -m venv --without-pip "$5"\n'
    )
    (programs / "micromamba").chmod(0o755)
    (there.folder / "environment.yml").write_text("dependencies: [python=3.11]\n")
    there.env["PATH"] = f"{programs}:{os.environ['PATH']}"
    there.script("import sys; print(sys.prefix)")
    done = there.succeeds("run", "--environment", "environment.yml", "script.py")
    assert done.stdout == f"{environments(there)[0]}\n"
    assert said.read_text() == "create --yes --quiet --prefix\n"
    assert (there.folder / "said.yml").read_text() == "dependencies: [python=3.11]\n"
