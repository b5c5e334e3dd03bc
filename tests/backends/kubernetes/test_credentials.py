"""The cluster and the credentials are found as kubectl finds them."""

from __future__ import annotations

import base64
import json
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import trustme
import yaml
from tests.conftest import GENEROUS

from paceline.backends.kubernetes.api.client import Cluster
from paceline.backends.kubernetes.api.credentials import connect
from paceline.backends.kubernetes.options import Options
from paceline.backends.limits import Limits
from paceline.job.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Server(ThreadingHTTPServer):
    """Answers with the credentials that a request has; accepts only some of them."""

    accepted: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "none")
        server = self.server
        assert isinstance(server, Server)
        is_accepted = not server.accepted or given in server.accepted
        body = json.dumps({"given": given, "message": "Unauthorized"}).encode()
        self.send_response(200 if is_accepted else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    Thread(target=one.serve_forever, daemon=True).start()
    yield one
    one.shutdown()
    one.server_close()


def kubeconfig(path: Path, url: str, user: dict[str, Any], name: str = "one", **more: Any) -> str:
    content = {
        "clusters": [{"name": name, "cluster": {"server": url}}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": f"of-{name}"}}],
        "current-context": name, **more,
    }  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return str(path)


def given(cluster: Cluster) -> str:
    return str(cluster.get("/version")["given"])


def cluster(**options: Any) -> Cluster:
    return Cluster("it", Options.validated(options), " --on it")


def test_tokens_passwords_and_nobody(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("from-file\n")
    for user, header in {
        '{"token": "abc"}': "Bearer abc",
        '{"tokenFile": "token"}': "Bearer from-file",
        '{"username": "u", "password": "p"}': "Basic dTpw",
        "{}": "none",
    }.items():
        monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path / "config", server.url, json.loads(user)))
        assert given(cluster()) == header
        assert cluster().namespace == "of-one"
        assert cluster(namespace="mine").namespace == "mine"


def test_several_kubeconfigs_are_one(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = kubeconfig(tmp_path / "a" / "config", server.url, {"tokenFile": "token"})
    two = kubeconfig(tmp_path / "b" / "config", server.url, {"token": "second"}, "two")
    (tmp_path / "a" / "token").write_text("first")
    monkeypatch.setenv("KUBECONFIG", f"{one}:{tmp_path / 'missing'}:{two}")
    assert given(cluster()) == "Bearer first"
    assert given(cluster(context="two")) == "Bearer second"
    with pytest.raises(UserError, match=r"no context 'tow' in the kubeconfig; did you mean two\?"):
        given(cluster(context="tow"))
    assert given(cluster(kubeconfig=two)) == "Bearer second"


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_plugin_is_asked_again_when_its_credentials_are_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    count = tmp_path / "count"
    program = f"""
import json, os, pathlib
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
count = pathlib.Path({str(count)!r})
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
print(json.dumps({{**info, "status": {{"token": os.environ["WHO"] + str(number)}}}}))
"""
    plugin = {
        "apiVersion": f"client.authentication.k8s.io/{version}", "command": sys.executable, "args": ["-c", program],
        "env": [{"name": "WHO", "value": "me"}],
    }  # fmt: skip
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path / "config", server.url, {"exec": plugin}))
    it = cluster()
    assert [given(it), given(it)] == ["Bearer me0", "Bearer me0"]
    server.accepted = ("Bearer me1",)
    assert given(it) == "Bearer me1"
    server.accepted = ("nobody",)
    with pytest.raises(UserError, match=r"does not accept your credentials .*; log in there again"):
        given(it)


def test_a_plugin_that_fails(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for command, args, said in (
        ("no-such-plugin", [], "the kubeconfig needs no-such-plugin for its credentials, which is not on PATH; get it"),
        (
            "sh",
            ["-c", "echo log in first >&2; exit 1"],
            r"^sh, which the kubeconfig names, gave no credentials \(exit code 1\)$",
        ),
        ("echo", ["hello"], "echo, which the kubeconfig names, printed no ExecCredential"),
    ):
        plugin = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": command,
            "args": args,
            "installHint": "get it",
        }
        monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path / "config", server.url, {"exec": plugin}))
        with pytest.raises(UserError, match=said):
            given(cluster())
    assert capfd.readouterr().err == "log in first\n"


def test_what_a_plugin_is_told(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
import json, os, sys
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
print(json.dumps({"status": {"token": json.dumps([info["spec"], sys.stdin.read()])}}))
"""
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "lab"}}
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": ["-c", program],
        "provideClusterInfo": True, "interactiveMode": "IfAvailable",
    }  # fmt: skip
    clusters = [{"name": "one", "cluster": {"server": server.url, "extensions": [extension]}}]
    path = kubeconfig(tmp_path / "config", server.url, {"exec": plugin}, clusters=clusters)
    monkeypatch.setenv("KUBECONFIG", path)
    told = {"interactive": False, "cluster": {"server": server.url, "config": {"audience": "lab"}}}
    assert json.loads(given(cluster()).removeprefix("Bearer ")) == [told, ""]
    plugin["interactiveMode"] = "Always"
    kubeconfig(tmp_path / "config", server.url, {"exec": plugin})
    with pytest.raises(UserError, match="asks for credentials in a terminal; run this in one"):
        given(cluster())


def test_who_acts_as_another_user_and_another_name_of_the_server(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = {"token": "abc", "as": "carl", "as-groups": ["a", "b"], "as-user-extra": {"x/y": ["1"]}}
    clusters = [{"name": "one", "cluster": {"server": server.url, "tls-server-name": "other"}}]
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path / "config", server.url, user, clusters=clusters))
    http = connect(Options.validated({}), Limits(GENEROUS, GENEROUS)).http
    sent = http.get("/version").request
    found = [(key, value) for key, value in sent.headers.multi_items() if key.startswith("impersonate")]
    groups = [("impersonate-group", "a"), ("impersonate-group", "b")]
    assert found == [("impersonate-user", "carl"), *groups, ("impersonate-extra-x%2fy", "1")]
    assert sent.extensions["sni_hostname"] == "other"


@pytest.mark.parametrize("within", [False, True])
def test_certificates(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: bool) -> None:
    """The server's authority and the user's certificate, in files or within the kubeconfig."""
    authority, user = trustme.CA(), trustme.CA()
    context, mine = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), user.issue_cert("user@lab")
    authority.issue_cert("127.0.0.1").configure_cert(context)
    user.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
    content = {
        "certificate-authority": authority.cert_pem, "client-certificate": mine.cert_chain_pems[0],
        "client-key": mine.private_key_pem,
    }  # fmt: skip
    given_as: dict[str, str] = {}
    for key, blob in content.items():
        (tmp_path / key).write_bytes(blob.bytes())
        given_as[f"{key}-data" if within else key] = base64.b64encode(blob.bytes()).decode() if within else key
    address = {"server": server.url.replace("http:", "https:")}
    trusts = {key: it for key, it in given_as.items() if "authority" in key}
    for known, cluster_has in ((given_as, address | trusts), ({}, address | trusts), (given_as, address)):
        clusters = [{"name": "one", "cluster": cluster_has}]
        monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path / "config", "", known, clusters=clusters))
        http = connect(Options.validated({}), Limits(GENEROUS, GENEROUS)).http
        if known is given_as and cluster_has != address:
            assert http.get("/version").json()["given"] == "none"
        else:
            with pytest.raises(httpx2.TransportError):
                http.get("/version")


def test_what_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"no kubeconfig .*none; set KUBECONFIG"):
        connect(Options.validated({}), Limits(1.0, 1.0))
    (tmp_path / "none").write_text("- a list")
    with pytest.raises(UserError, match="is not a kubeconfig that can be read"):
        connect(Options.validated({}), Limits(1.0, 1.0))
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(UserError, match=r"pip install 'httpx2\[ws\]'"):
        connect(Options.validated({}), Limits(1.0, 1.0))
