"""A connection of `paceline run` to a host breaks: the client connects again, or that host alone is lost."""

from __future__ import annotations

import re
import signal
import threading
from typing import IO, TYPE_CHECKING

import pytest
from tests.conftest import GENEROUS, eventually

from .lab import kill

if TYPE_CHECKING:
    from .lab import Client

# Prints a line each time that there are more bytes in a file, and ends with the last of these lines.
TALKS = """
    import os, time
    rank, file, last = os.environ["RANK"], os.environ["FILE"], int(os.environ["LAST"])
    print("world", os.environ["WORLD_SIZE"], "of", rank, flush=True)
    said = 0
    while said < last:
        if os.path.getsize(file) > said:
            said += 1
            print("line", said, "of", rank, flush=True)
        else:
            time.sleep(0.01)
"""
TIMES = ("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=60")


class Run:
    """`paceline run` on two hosts, whose ranks print a line each time that they are told to."""

    def __init__(self, client: Client, nodes: str, seconds: str, last: int = 30) -> None:
        self.client, self.hosts = client, client.lab.hosts[:2]
        self.file = client.folder / "lines"
        self.file.touch()
        client.settings(hosts=[host.name for host in self.hosts])
        client.env["PACELINE_RECONNECT_TIMEOUT"] = seconds
        told = ("--env", f"FILE={self.file}", "--env", f"LAST={last}")
        self.process = client.start(
            "run", "--on", "lab", "--nnodes", nodes, "--name", "it", "--tee", "3", *TIMES, *told, client.script(TALKS)
        )
        self.out: list[str] = []
        self.err: list[str] = []
        self._readers = [self._read(self.process.stdout, self.out), self._read(self.process.stderr, self.err)]
        self.shows("world 2 of 0")
        self.shows("world 2 of 1")

    def _read(self, stream: IO[str] | None, lines: list[str]) -> threading.Thread:
        assert stream is not None
        reader = threading.Thread(target=lambda: lines.extend(iter(stream.readline, "")))
        reader.start()
        return reader

    def shows(self, line: str) -> None:
        """Wait until a rank's line is on the screen."""
        eventually(lambda: any(shown.endswith(f"{line}\n") for shown in self.out), f"it prints {line}")

    def says(self, text: str) -> None:
        """Wait until paceline says this."""
        eventually(lambda: text in "".join(self.err), f"it says {text}")

    def tell(self, lines: int) -> None:
        """Have every rank print so many more lines."""
        with self.file.open("ab") as file:
            file.write(bytes(lines))

    def ends(self) -> int:
        """Wait until it has ended; its exit code."""
        code = self.process.wait(GENEROUS)
        for reader in self._readers:
            reader.join()
        return code

    def lines_of(self, rank: int) -> list[int]:
        """The numbers of the lines of a rank, in the order in which they are on the screen."""
        return [int(number) for number in re.findall(rf"line (\d+) of {rank}\n", "".join(self.out))]


@pytest.mark.parametrize("nodes", ["1:2", pytest.param("2", marks=pytest.mark.nightly)])
def test_a_broken_session_is_replaced(client: Client, nodes: str) -> None:
    run = Run(client, nodes, "60s")
    for part in range(1, 4):
        run.tell(5)
        run.hosts[part % 2].end_sessions()
        run.tell(5)
        for rank in (0, 1):
            run.shows(f"line {part * 10} of {rank}")
    assert run.ends() == 0, run.err
    assert run.lines_of(0) == run.lines_of(1) == list(range(1, 31))
    said = "".join(run.err)
    for host, times in (("h1", 1), ("h2", 2)):
        assert said.count(f"paceline: the connection to {host} broke; trying again for 60 s\n") == times
        assert said.count(f"paceline: {host} is connected again\n") == times
    assert "starting again" not in said


def test_a_path_that_is_cut_for_a_while_ends_nothing(client: Client) -> None:
    run = Run(client, "1:2", "60s")
    lab, (first, second) = client.lab, run.hosts
    lab.part_from_client(second)
    run.tell(15)
    run.says("the connection to h2 broke; trying again for 60 s")
    run.tell(15)  # the ranks end
    run.shows("line 30 of 0")
    lab.join()
    lab.forget_neighbours()
    assert run.ends() == 0, run.err
    assert "h2 is connected again\n" in "".join(run.err)
    assert run.lines_of(0) == run.lines_of(1) == list(range(1, 31))
    eventually(lambda: not (first.processes() or second.processes()), "nothing runs any more")


def test_an_elastic_job_goes_on_without_a_host_that_the_client_does_not_reach_again(client: Client) -> None:
    run = Run(client, "1:2", "2s")
    run.hosts[1].refuse_logins()
    run.says("; it leaves the job")
    run.says("h2 leaves; starting again with 1 node")
    run.shows("world 1 of 0")
    run.tell(30)
    assert run.ends() == 0, run.err
    assert "h2 was not reached again within 2 s (cannot reach h2: " in "".join(run.err)
    assert run.lines_of(0) == list(range(1, 31))
    eventually(lambda: not run.hosts[1].processes(), "nothing runs on h2 any more")


def test_a_job_of_fixed_size_ends_with_a_host_that_the_client_does_not_reach_again(client: Client) -> None:
    run = Run(client, "2", "2s")
    run.hosts[1].refuse_logins()
    assert run.ends() == 129
    assert "; the job is stopped\n" in "".join(run.err)
    eventually(lambda: not any(host.processes() for host in run.hosts), "nothing runs any more")


@pytest.mark.parametrize("nodes", [pytest.param("1:2", marks=pytest.mark.nightly), "2"])
def test_a_job_ends_whose_client_is_gone_without_a_word(client: Client, nodes: str) -> None:
    run = Run(client, nodes, "2s")
    for host in run.hosts:
        client.lab.part_from_client(host)
    kill([run.process.pid])
    run.ends()
    client.hang_up()
    for host in run.hosts:
        host.end_sessions()
    eventually(lambda: not any(host.processes() for host in run.hosts), "nothing runs any more")


def test_ctrl_c_reaches_the_job_while_a_host_is_not_connected(client: Client) -> None:
    run = Run(client, "2", "600s")
    run.hosts[1].refuse_logins()
    run.says("the connection to h2 broke")
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130
    eventually(lambda: not run.hosts[0].processes(), "nothing runs on h1 any more")
    run.hosts[1].repair()
    kill(run.hosts[1].processes())


def test_ctrl_c_twice_ends_a_client_that_reaches_no_host(client: Client) -> None:
    run = Run(client, "2", "5s")
    for host in run.hosts:
        host.refuse_logins()
    run.says("the connection to h1 broke")
    run.says("the connection to h2 broke")

    def interrupted() -> bool:  # two signals that come at once are one
        run.process.send_signal(signal.SIGINT)
        return run.process.poll() is not None

    eventually(interrupted, "it ends")
    run.ends()
    assert "no host reported how the job ended" in run.err[-1]
    eventually(lambda: not any(host.processes() for host in run.hosts), "nothing runs any more")
