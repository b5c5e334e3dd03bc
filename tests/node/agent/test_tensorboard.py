"""TensorBoards beside jobs: one that is quick to start stands in for the real one, which has a test of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import pytest
from tests.conftest import GENEROUS, eventually

from paceline.node import tensorboard
from paceline.node.machine.ports import Reservation
from paceline.node.machine.processes import start_time
from paceline.node.tensorboard import TensorBoard, TensorBoardError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Paceline

QUICK = """
    import http.server, os, sys
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    if os.environ.get("QUICK") == "fails":
        sys.exit("ImportError: no protobuf")
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path.startswith(flags["--path_prefix"] + "/") else 404)
            self.end_headers()
            self.wfile.write((flags["--logdir"] + " " + os.environ["CUDA_VISIBLE_DEVICES"]).encode())
        def log_message(self, *args):
            pass
    try:
        server = http.server.HTTPServer((flags["--host"], int(flags["--port"])), Handler)
    except OSError:
        sys.exit(f"TensorBoard could not bind to port {flags['--port']}, it was already in use")
    address = f"http://{flags['--host']}:{flags['--port']}{flags['--path_prefix']}/"
    print(f"TensorBoard 0 at {address} (Press CTRL+C to quit)", file=sys.stderr)
    server.serve_forever()
"""
WAIT = """
    import os, time
    while not os.path.exists("go on"):
        time.sleep(0.01)
"""


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TensorBoard that starts at once, found before the real one."""
    package = tmp_path / "quick" / "tensorboard"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "main.py").write_text(textwrap.dedent(QUICK))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))
    return package


@pytest.fixture
def job(quick: Path, paceline: Paceline) -> Paceline:
    paceline.env["PYTHONPATH"] = os.environ["PYTHONPATH"]
    paceline.script(WAIT)
    return paceline


@pytest.fixture
def folder(quick: Path, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run"
    path.mkdir()
    yield path
    tensorboard.stop(path)


def answer(url: str) -> str:
    with urllib.request.urlopen(url, timeout=GENEROUS) as response:
        return str(response.read().decode())


def known(job: Paceline, name: str) -> Any:
    return job.json("get", name)["tensorboard"]


def runs(job: Paceline) -> str:
    """What is known of the TensorBoard of the only job, once something is."""
    eventually(lambda: tensorboard.describe(job.job()), "it is known whether it runs")
    return tensorboard.describe(job.job()) or ""


def settled(board: TensorBoard) -> TensorBoard:
    eventually(board.look, "it is known whether it runs")
    return board


# -- one ---------------------------------------------------------------------------------------------------------------


def test_one_is_started_shown_and_ended(folder: Path) -> None:
    assert tensorboard.describe(folder) is None
    url = tensorboard.open_for((sys.executable,), None, "/some where", folder)
    assert answer(url) == "/some where ", "and no GPU"
    assert tensorboard.describe(folder) == url
    record = json.loads((folder / "tensorboard.json").read_text())
    assert record == {"pid": record["pid"], "start_time": start_time(record["pid"]), "port": urlsplit(url).port,
                      "url": url, "logdir": "/some where"}  # fmt: skip
    assert os.getsid(record["pid"]) == record["pid"], "it outlives this terminal"
    token = urlsplit(url).path.strip("/")
    assert len(token) == 32
    assert token not in Path(f"/proc/{record['pid']}/cmdline").read_text(), "other users can read that"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        answer(urljoin(url, "/"))
    assert tensorboard.open_for((sys.executable,), None, "/elsewhere", folder) == url
    with pytest.raises(TensorBoardError, match="a running one shows /some where; end it first with --stop"):
        tensorboard.open_for((sys.executable,), "/elsewhere", "/some where", folder)
    assert tensorboard.stop(folder)
    assert start_time(record["pid"]) is None
    assert not tensorboard.stop(folder)
    assert tensorboard.describe(folder) is None


def test_another_process_with_its_number_is_left_alone(folder: Path) -> None:
    record = {"pid": os.getpid(), "start_time": 1, "port": 1, "url": "http://127.0.0.1:1/", "logdir": "/"}
    (folder / "tensorboard.json").write_text(json.dumps(record))
    assert tensorboard.describe(folder) is None
    assert not tensorboard.stop(folder)
    (folder / "tensorboard.json").write_text('{"pid": ')
    assert tensorboard.describe(folder) is None


def test_a_port_that_somebody_else_took_first_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        real, taken = Reservation.take, [other.getsockname()[1]]
        monkeypatch.setattr(Reservation, "take", lambda self, port=0: taken.pop() if taken else real(self, port))
        board = settled(TensorBoard((sys.executable,), "/", folder, detached=True))
        assert board.url is not None
        assert answer(board.url)
    board.end()


def test_it_is_not_tried_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(Reservation, "take", lambda self, port=port: port)
        with pytest.raises(TensorBoardError, match=f"could not bind to port {port}, it was already in use; see "):
            tensorboard.open_for((sys.executable,), None, "/", folder)
    assert "could not bind" in (tensorboard.describe(folder) or "")


@pytest.mark.parametrize("problem", ["it fails", "no such Python", "it is not installed"])
def test_why_it_cannot_be_started(folder: Path, quick: Path, monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    python = (sys.executable,)
    if problem == "it fails":
        monkeypatch.setenv("QUICK", "fails")
        expected = "ImportError: no protobuf"
    elif problem == "no such Python":
        python = ("/no/python",)
        expected = "No such file or directory"
    else:
        (quick / "main.py").unlink()
        expected = "No module named tensorboard.main"
    board = settled(TensorBoard(python, "/", folder, detached=True))
    assert board.url is None
    assert board.problem.endswith(expected)
    assert tensorboard.describe(folder) == f"not running: {board.problem}"


def test_it_is_not_waited_for_for_ever(folder: Path, quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (quick / "main.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setattr(tensorboard, "PATIENCE", 0.2)
    with pytest.raises(TensorBoardError, match=r"it did not start within 0\.2 s; see "):
        tensorboard.open_for((sys.executable,), None, "/", folder)
    assert tensorboard.describe(folder) is None, "and does not come later"


# -- with a job --------------------------------------------------------------------------------------------------------


def test_it_comes_and_goes_with_its_job(job: Paceline) -> None:
    assert job("submit", "--name", "a", "--tensorboard", "-n", "2", "script.py").returncode == 0
    url = runs(job)
    assert answer(url) == f"{job.job()} "
    assert job("tensorboard", "a").stdout == f"{url}\n"
    (job.folder / "go on").touch()
    assert job("wait", "a").returncode == 0
    (event,) = [e for e in map(json.loads, (job.job() / "journal.jsonl").open()) if e["event"] == "tensorboard"]
    assert (event["url"], event["problem"]) == (url, "")
    eventually(lambda: not job.processes(), "all has ended")
    assert known(job, "a") is None


def test_it_shows_what_the_user_says(job: Paceline) -> None:
    job.succeeds("submit", "--name", "a", "--tensorboard", "--logdir", "my runs", "script.py")
    assert answer(runs(job)) == f"{job.folder / 'my runs'} "
    assert job("stop", "--now", "a").returncode in (0, 130, 143)


def test_it_ends_with_an_agent_that_is_killed(job: Paceline) -> None:
    assert job("submit", "--name", "a", "--tensorboard", "script.py").returncode == 0
    runs(job)
    os.kill(json.loads((job.job() / "status.json").read_text())["agent"]["pid"], signal.SIGKILL)
    eventually(lambda: not job.processes(), "nothing is left")


def test_it_outlives_a_restart(job: Paceline) -> None:
    job.script("""
        import os, time
        while not os.path.exists("go on"):
            time.sleep(0.01)
        if os.environ["PACELINE_ATTEMPT"] == "0":
            os.unlink("go on")
            raise SystemExit(3)
    """)
    assert job("submit", "--name", "a", "--tensorboard", "--max-restarts", "1", "script.py").returncode == 0
    url = runs(job)
    (job.folder / "go on").touch()
    eventually(lambda: not (job.folder / "go on").exists(), "the first attempt has failed")
    status = job.job() / "status.json"
    eventually(
        lambda: '"RUNNING"' in (text := status.read_text()) and json.loads(text)["attempt"] == 1, "it runs again"
    )
    assert known(job, "a") == url
    (job.folder / "go on").touch()
    assert job("wait", "a").returncode == 0


def test_one_that_fails_does_not_fail_the_job(job: Paceline) -> None:
    job.env["QUICK"] = "fails"
    assert job("submit", "--name", "a", "--tensorboard", "script.py").returncode == 0
    assert runs(job) == "not running: ImportError: no protobuf"
    (job.folder / "go on").touch()
    assert job("wait", "a").returncode == 0
    (event,) = [e for e in map(json.loads, (job.job() / "journal.jsonl").open()) if e["event"] == "tensorboard"]
    assert (event["url"], event["problem"]) == (None, "ImportError: no protobuf")


def test_where_it_is_not_installed_the_job_is_refused(job: Paceline, quick: Path) -> None:
    (quick.parent / "sitecustomize.py").write_text("import sys; sys.modules['tensorboard'] = None")
    done = job("submit", "--tensorboard", "script.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (f"paceline: tensorboard is not installed for {sys.executable}; pip install tensorboard\n")
    assert not list((job.home / "jobs").glob("*"))


# -- for a job that has ended ------------------------------------------------------------------------------------------


@pytest.fixture
def ended(job: Paceline) -> Paceline:
    (job.folder / "go on").touch()
    assert job.run("--name", "a", "script.py").returncode == 0
    return job


def test_one_for_a_job_that_has_ended(ended: Paceline) -> None:
    first, second = ended.start("tensorboard", "a"), ended.start("tensorboard", "a")
    url, _ = first.communicate(timeout=GENEROUS)
    assert second.communicate(timeout=GENEROUS) == (url, ""), "both get the same one"
    assert answer(url.strip()) == f"{ended.job()} "
    assert known(ended, "a") == url.strip()
    other = ended("tensorboard", "a", "--logdir", "other")
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr == (
        f"paceline: no TensorBoard for a: a running one shows {ended.job()}; end it first with --stop\n"
    )
    assert ended("tensorboard", "a", "--stop").stdout == "the TensorBoard of a has ended\n"
    eventually(lambda: not ended.processes(), "it has ended")
    assert ended("tensorboard", "a", "--stop").stdout == "a has no TensorBoard\n"
    url = ended("tensorboard", "a", "--logdir", "other").stdout.strip()
    assert answer(url) == f"{ended.folder / 'other'} "
    assert ended("delete", "a").returncode == 0, "it goes with the job"
    eventually(lambda: not ended.processes(), "it has ended")


def test_bad_input(ended: Paceline) -> None:
    done = ended("tensorboard", "b")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("paceline: no job 'b'; ")
    done = ended("tensorboard", "a", "--stop", "--logdir", "x")
    assert done.returncode == 2
    assert done.stderr == "paceline: --stop and --logdir contradict each other; give one of them\n"
    done = ended("tensorboard", "a", "--port", "9090")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "paceline: --port: here a TensorBoard takes a free port, and its address is printed; "
    )


def test_whoever_interrupts_it_leaves_nothing_behind(ended: Paceline, quick: Path) -> None:
    (quick / "main.py").write_text("import pathlib, time; pathlib.Path(__file__ + '.up').touch(); time.sleep(1000)")
    process = ended.start("tensorboard", "a", start_new_session=True)
    eventually((quick / "main.py.up").exists, "it is coming up")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=GENEROUS)
    assert process.returncode == 130
    eventually(lambda: not ended.processes(), "it has ended")


# -- the real one ------------------------------------------------------------------------------------------------------


def test_the_real_one(paceline: Paceline) -> None:
    pytest.importorskip("tensorboard")
    paceline.script(WAIT)
    paceline.succeeds("submit", "--name", "a", "--tensorboard", "script.py")
    url = runs(paceline)
    assert json.loads(answer(url + "data/environment"))["data_location"] == str(paceline.job())
    for path in ("/", "/data/environment", f"/{'0' * 32}/data/environment"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            answer(urljoin(url, path))
    pid = json.loads((paceline.job() / "tensorboard.json").read_text())["pid"]
    assert Path(f"/proc/{pid}/task/{pid}/children").read_text() == "", "no data server listens beside it"
    (paceline.folder / "go on").touch()
    assert paceline("wait", "a").returncode == 0
    eventually(lambda: not paceline.processes(), "it has ended too")
    assert Path(paceline.job() / "tensorboard.log").exists()
