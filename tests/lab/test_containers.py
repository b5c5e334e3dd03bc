"""`--image` on hosts over ssh: podman (of root, and of a user), docker and apptainer; see `containers.py`."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

from .containers import IMAGE, Containers, containers
from .lab import client_of, kill

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .lab import Client

ALL = ["h1", "h2", "h3", "h4"]
SHOWS = """
    import os, sys
    rank = os.environ["PACELINE_RANK"]
    system = dict(line.split("=") for line in open("/etc/os-release").read().split())["ID"]
    open(f"written-{rank}", "w").close()
    if sys.argv[1:]:
        open(f"/dev/shm/{sys.argv[1]}-{rank}", "w").close()
    print(rank, system, os.getuid(), os.path.basename(sys.executable), os.environ.get("PACELINE_LAB"), flush=True)
"""
FOREVER = """
    import os, threading
    print("here", os.environ["PACELINE_RANK"], flush=True)
    threading.Event().wait()
"""


@pytest.fixture(scope="module")
def images() -> Iterator[Containers]:
    with containers() as it:
        yield it


@pytest.fixture
def four(images: Containers, tmp_path: Path) -> Iterator[Client]:
    """A client of the four hosts, with a folder that all of their users may write to."""
    (images.images / "closed").unlink(missing_ok=True)
    with client_of(images.lab, tmp_path) as client:
        client.open = images.lab.folder / tmp_path.name  # type: ignore[attr-defined]  # only here
        client.open.mkdir()  # type: ignore[attr-defined]
        client.open.chmod(0o777)  # type: ignore[attr-defined]
        yield client
        assert images.running() == ""
        images.end_podman()


def asked(client: Client, text: str, *, nodes: int, image: str = IMAGE) -> list[str]:
    """The flags of a job."""
    folder: Path = client.open  # type: ignore[attr-defined]
    (folder / "it.py").write_text("".join(line[4:] + "\n" for line in text.splitlines()))
    common = ["--on", "lab", "--nnodes", str(nodes), "-n", "1", "--name", "it"]
    return [*common, "--image", image, "--working-dir", str(folder), "it.py"]


def test_the_ranks_run_in_the_image_as_the_user(four: Client, images: Containers) -> None:
    four.settings(hosts=ALL)
    mark = f"paceline-{os.getpid()}"
    four.succeeds("run", *asked(four, SHOWS, nodes=4), mark)
    names, users = [host.namespace for host in four.lab.hosts], images.users
    lines = four("logs", "--on", "lab", "--all", "it").stdout.splitlines()
    assert sorted(lines) == [f"[rank {n}] {n} lab-image {users[n]} python3 {names[n]}" for n in range(4)]
    written = [four.open / f"written-{rank}" for rank in range(4)]  # type: ignore[attr-defined]
    assert [path.stat().st_uid for path in written] == users
    for rank in range(4):  # it is the machine's own
        os.unlink(f"/dev/shm/{mark}-{rank}")
    job = four.json("get", "--on", "lab", "it")
    assert (job["state"], [it["node"] for it in job["instances"]]) == ("SUCCEEDED", ALL)


def test_the_exit_code_and_the_interrupt_are_those_of_the_job(four: Client) -> None:
    four.settings(hosts=ALL[:3])
    done = four("run", *asked(four, "    import sys; sys.exit(7)", nodes=1))
    assert done.returncode == 7
    assert "failed first: exit code 7" in done.stderr
    four.succeeds("delete", "--on", "lab", "it")
    run = four.start("run", *asked(four, FOREVER, nodes=3))
    assert run.stdout is not None
    assert run.stdout.readline() == "here 0\n"
    run.send_signal(signal.SIGINT)
    assert run.wait() == 130
    run.communicate()
    assert four.json("get", "--on", "lab", "it")["state"] == "STOPPED"
    four.nothing_runs(1, 3)


@pytest.mark.parametrize("number", [1, 2, 3, 4], ids=ALL)
def test_a_killed_agent_leaves_no_container(four: Client, images: Containers, number: int) -> None:
    four.settings(hosts=[f"h{number}"])
    host = four.lab.hosts[number - 1]
    four.succeeds("submit", *asked(four, FOREVER, nodes=1))
    four.are("RUNNING", number)
    agent = four.status(host)["agent"]["pid"]
    kill([agent])
    eventually(lambda: four.json("get", "--on", "lab", "it")["state"] == "FAILED", "the job has failed", 0.5)
    eventually(lambda: images.running() == "", "no container is left", 0.5)


def test_a_job_goes_on_without_what_has_started_its_container(four: Client, images: Containers) -> None:
    """And is stopped as any other; on another attempt the same image is used."""
    four.settings(hosts=["h3"])
    four.succeeds("submit", *asked(four, FOREVER, nodes=1))
    four.are("RUNNING", 3)
    words = ("--", "python3", "-c", "print(open('/etc/os-release').read())")
    assert four("attach", "--on", "lab", "it", *words).stdout == "ID=lab-image\n\n"
    assert images.running() != ""
    four.succeeds("stop", "--on", "lab", "it")
    eventually(lambda: images.running() == "", "no container is left", 0.5)
    again = four.succeeds("resubmit", "--on", "lab", "it").stdout.strip()
    four.are("RUNNING", 3, name=again)
    assert images.running() != ""
    four.succeeds("stop", "--on", "lab", "--now", again)


def test_the_client_is_killed_or_its_connection_breaks(four: Client, images: Containers) -> None:
    four.settings(hosts=["h1", "h3"])
    run = four.start("run", *asked(four, FOREVER, nodes=2))
    assert run.stdout is not None
    assert run.stdout.readline() == "here 0\n"
    four.lab.hosts[2].end_sessions()
    assert run.stderr is not None
    lines = iter(run.stderr.readline, "")
    assert any("h3 is connected again" in line for line in lines)
    four.are("RUNNING", 1, 3)
    run.kill()
    run.communicate()
    four.nothing_runs()
    assert images.running() == ""


def test_an_image_is_pulled_first_and_what_is_wrong_is_a_line_for_each_host(four: Client, images: Containers) -> None:
    four.settings(hosts=["h3", "h4"])
    looks = four.json("check", "--on", "lab", "--image", "lab/new")
    assert [(it["host"], it["program"], it["is_there"]) for it in looks] == [
        ("h3", "docker", False), ("h4", "apptainer", False)
    ]  # fmt: skip
    done = four.succeeds("run", *asked(four, SHOWS, nodes=2, image="lab/new"))
    assert "paceline: pulling lab/new on h3, h4" in done.stderr
    assert [it["is_there"] for it in four.json("check", "--on", "lab", "--image", "lab/new")] == [True, True]

    def fails(image: str, nodes: int = 2) -> list[str]:
        done = four("run", *asked(four, SHOWS, nodes=nodes, image=image))
        assert done.returncode == 2
        assert four("get", "--on", "lab", "it").returncode == 2
        return [line.removeprefix("paceline: ") for line in done.stderr.splitlines()]

    four.succeeds("delete", "--on", "lab", "it")
    assert [line for line in fails("lab/unknown") if "manifest unknown" in line and "; correct --image" in line]
    none = "image lab/none: it has no python3; choose an image with Python 3.9 or newer"
    four.settings(hosts=["h3"])
    assert fails("lab/none", 1) == [f"h3: {none}"]
    (images.images / "closed").touch()
    assert fails(IMAGE, 1) == [
        "h3: docker's socket is closed to root; add root to its group (sudo usermod -aG docker root) and log in again,"
        " or install podman"
    ]
    four.settings(hosts=["h4"], containers="docker")
    assert fails(IMAGE, 1) == ["h4: there is no docker on PATH; install docker there"]
    if images.why_no_podman:
        return
    four.settings(hosts=["h1"])
    (line,) = [line for line in fails("reg.invalid/none", 1) if line.startswith("h1: ")]
    assert line.startswith("h1: image reg.invalid/none: its registry is not reached (")
    assert line.endswith("); load the image there from a file: podman load -i FILE")


def test_a_host_that_joins_gets_the_image(four: Client) -> None:
    four.settings(hosts=["h1"])
    flags = asked(four, FOREVER, nodes=1)
    flags[3] = "1:2"
    four.succeeds("submit", *flags)
    four.are("RUNNING", 1)
    four.settings(hosts=["h1", "h3"])
    four.succeeds("scaleout", "--on", "lab", "it", "h3")
    four.are("RUNNING", 1, 3)
    four.succeeds("stop", "--on", "lab", "--now", "it")
