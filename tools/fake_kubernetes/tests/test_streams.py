"""Logs, commands and ports of pods in the lab."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import aiohttp

from fake_kubernetes.client import Http

from .support import eventually, job
from .test_pods import LOG, log, pod, runs, state

if TYPE_CHECKING:
    from collections.abc import Callable

    from fake_kubernetes.cluster import Cluster

# Prints a line for each that it gets through the pipe of a volume.
SCRIPT = "mkfifo /data/in; exec 3<>/data/in; echo ready; while read line <&3; do echo $line; done"
DATA = {"volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "d"}}], "mounts": {"d": "/data"}}


def say(cluster: Cluster, text: str) -> None:
    """Let the container print something."""
    path = cluster.folder / "claims" / "default-d" / "in"
    eventually(path.is_fifo, "it reads")
    path.write_text(text)


def test_logs(cluster: Cluster) -> None:
    cluster.claim("d")
    cluster.create(job(SCRIPT, **DATA))
    name = pod(cluster, runs, "it runs")["metadata"]["name"]
    stream = Http(cluster).open("GET", LOG.format(name) + "?follow=true&timestamps=true")
    assert next(stream).endswith(b"Z ready\n")
    say(cluster, "".join(f"line {number}\n" for number in range(5)))
    lines = [next(stream).decode() for _ in range(5)]
    stamp, _, words = lines[2].partition(" ")
    assert words == "line 2\n" and len(stamp) == len("2026-11-21T20:04:19.340454292Z")
    assert log(cluster, name, "?tailLines=2") == "line 3\nline 4\n"
    assert log(cluster, name, "?tailLines=0") == ""
    assert log(cluster, name, f"?sinceTime={stamp}").endswith("line 2\nline 3\nline 4\n")
    assert log(cluster, name, "?sinceSeconds=100").startswith("ready\n")
    assert log(cluster, name, "?limitBytes=8") == "ready\nli"
    # It is rotated: a follow ends, and the lines of before are gone.
    cluster.rotate_log(name)
    assert list(stream) == []
    say(cluster, "after\n")
    stream = Http(cluster).open("GET", LOG.format(name) + "?follow=true")
    assert next(stream) == b"after\n"
    # The connection to the node breaks: it ends without a word.
    cluster.cut(cluster.get("Pod", name)["spec"]["nodeName"])
    assert list(stream) == []
    assert Http(cluster)("GET", LOG.format(name))[0] == 500
    cluster.back(cluster.get("Pod", name)["spec"]["nodeName"])
    assert log(cluster, name) == "after\n"
    code, status = Http(cluster)("GET", LOG.format(name) + "?previous=true")
    assert (code, status["message"]) == (400, f'previous terminated container "main" in pod "{name}" not found')
    assert Http(cluster)("GET", LOG.format("nobody"))[0] == 404


def test_logs_of_the_run_before(cluster: Cluster) -> None:
    one = job("echo run; test -e /data/x || { touch /data/x; exit 1; }; sleep 1000", backoffLimit=3, **DATA)
    one["spec"]["template"]["spec"]["restartPolicy"] = "OnFailure"
    cluster.claim("d")
    cluster.create(one)
    again = pod(
        cluster,
        lambda one: runs(one) and state(one, "running") and one["status"]["containerStatuses"][0]["restartCount"],
        "again",
    )
    name = again["metadata"]["name"]
    assert again["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 1
    assert log(cluster, name, "?previous=true") == "run\n"


class Channels:
    """A WebSocket of a pod."""

    def __init__(self, cluster: Cluster, path: str, protocols: tuple[str, ...] = ("v4.channel.k8s.io",)) -> None:
        self.http, self.path, self.protocols = Http(cluster), path, protocols
        self.out: dict[int, bytes] = {}

    def run(self, talk: Callable[[Any], Any]) -> int | None:
        """Talk until the server closes; returns the code."""
        return asyncio.run(asyncio.wait_for(self._run(talk), 60))

    async def _run(self, talk: Callable[[Any], Any]) -> int | None:
        headers = {"Authorization": f"Bearer {self.http.token}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            socket = await session.ws_connect(
                self.http.url + self.path, ssl=self.http.context, protocols=self.protocols
            )
            async with socket:
                self.protocol = socket.protocol
                self.first = (await socket.receive()).data
                await talk(socket)
                async for message in socket:
                    self.out[message.data[0]] = self.out.get(message.data[0], b"") + message.data[1:]
            return socket.close_code


async def nothing(socket: Any) -> None:
    """Say nothing."""


def test_commands_in_pods(make_cluster: Callable[..., Cluster]) -> None:
    cluster = make_cluster(minor=31)
    cluster.create(job("sleep 1000", container={"env": [{"name": "A", "value": "b"}]}))
    name = pod(cluster, runs, "it runs")["metadata"]["name"]
    start = f"/api/v1/namespaces/default/pods/{name}/exec?stdout=true&stderr=true"
    one = Channels(cluster, f"{start}&command=sh&command=-c&command=echo+$A+$(hostname);echo+bad+>%262;exit+3")
    assert one.run(nothing) == 1000 and one.first == b"\x01"
    assert (one.out[1], one.out[2]) == (b"b t-0\n", b"bad\n")
    status = json.loads(one.out[3])
    assert (status["status"], status["reason"]) == ("Failure", "NonZeroExitCode")
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "3"}]

    async def talk(socket: Any) -> None:
        await socket.send_bytes(b"\x00some input\n")
        await socket.send_bytes(b"\xff\x00")

    one = Channels(cluster, f"{start}&stdin=true&command=cat", ("v5.channel.k8s.io", "v4.channel.k8s.io"))
    assert one.run(talk) == 1000 and one.protocol == "v5.channel.k8s.io"
    assert one.out[1] == b"some input\n" and json.loads(one.out[3])["status"] == "Success"

    async def resize(socket: Any) -> None:
        await socket.send_bytes(b'\x04{"Width":80,"Height":24}')
        await socket.send_bytes(b"\x00stty size; exit\n")

    one = Channels(cluster, f"{start}&stdin=true&tty=true&command=sh")
    assert one.run(resize) == 1000 and b"24 80" in one.out[1]

    one = Channels(cluster, f"{start}&command=no-such-program")
    one.run(nothing)
    assert "executable file not found in $PATH" in json.loads(one.out[3])["message"]


def test_an_old_server_does_not_know_v5(cluster: Cluster) -> None:
    cluster.create(job("sleep 1000"))
    name = pod(cluster, runs, "it runs")["metadata"]["name"]
    path = f"/api/v1/namespaces/default/pods/{name}/exec?stdout=true&command=true"
    one = Channels(cluster, path, ("v5.channel.k8s.io",))
    try:
        one.run(nothing)
    except aiohttp.WSServerHandshakeError as error:
        assert error.status == 403
    both = Channels(cluster, path, ("v5.channel.k8s.io", "v4.channel.k8s.io"))
    assert both.run(nothing) == 1000 and both.protocol == "v4.channel.k8s.io"


def test_kubectl_reaches_ports(cluster: Cluster, kubectl: None) -> None:
    script = """python3 -c "
import socket
server = socket.create_server(('127.0.0.1', 9999))
print('listening', flush=True)
while True:
    one, _ = server.accept()
    one.sendall(b'got ' + one.recv(100))
    one.close()
" """
    cluster.create(job(script))
    name = pod(cluster, runs, "it runs")["metadata"]["name"]
    assert next(Http(cluster).open("GET", LOG.format(name) + "?follow=true")) == b"listening\n"

    with cluster.forward(name, 9999) as port:
        for word in (b"hello", b"again"):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as one:
                one.sendall(word)
                assert one.recv(100) == b"got " + word
                assert one.recv(100) == b""
    with cluster.forward(name, 9) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as one:
        one.sendall(b"hello")
        with contextlib.suppress(ConnectionError):
            assert one.recv(100) == b""


def test_kubectl_follows_and_enters(make_cluster: Callable[..., Cluster], kubectl: None) -> None:
    cluster = make_cluster(minor=31)
    cluster.claim("d")
    cluster.create(job(SCRIPT, **DATA))
    name = pod(cluster, runs, "it runs")["metadata"]["name"]
    node = cluster.nodes[cluster.get("Pod", name)["spec"]["nodeName"]]

    def end() -> None:
        eventually(lambda: node.streams, "it is followed")
        say(cluster, "more\n")
        eventually(lambda: "more" in log(cluster, name), "it has said so")
        cluster.delete("Job", "t", propagationPolicy="Background")

    threading.Thread(target=end).start()
    assert cluster.kubectl("logs", "-f", name).stdout == "ready\nmore\n"
    cluster.create(job("sleep 1000", "other"))
    name = pod(cluster, lambda one: runs(one) and one["metadata"]["name"].startswith("other"), "it runs")["metadata"][
        "name"
    ]
    done = cluster.kubectl("exec", name, "--", "sh", "-c", "hostname; exit 3", check=False)
    assert (done.stdout, done.returncode) == ("other-0\n", 3)
    done = cluster.kubectl("exec", "-i", name, "--", "cat", input="from here")
    assert done.stdout == "from here"
