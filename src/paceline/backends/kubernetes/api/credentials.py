"""Where the cluster is, and who asks there: as kubectl finds it out."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from paceline.backends.base import Shell
from paceline.job.errors import UserError, nearest

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Generator, Iterator, Mapping

    import httpx2

    from paceline.backends.kubernetes.api.object import Object
    from paceline.backends.kubernetes.options import Options
    from paceline.backends.limits import Limits


_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_EXTENSION = "client.authentication.k8s.io/exec"  # of a cluster, for plugins
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of a pod
_INSTALL = "the Kubernetes backend needs httpx2; pip install 'httpx2[ws]'"


class Access(NamedTuple):
    """How to reach a cluster."""

    http: httpx2.Client  # a client for its API server
    context: str  # the name of the context, for messages
    namespace: str  # where jobs go
    server: str  # the address of the API server


class Config(NamedTuple):
    """A context of the kubeconfig."""

    context: str
    namespace: str
    cluster: Mapping[str, Any]  # as it is written, with absolute paths
    user: Mapping[str, Any]  # the same

    @property
    def server(self) -> str:
        """The address of the API server; without one, that of kubectl proxy."""
        return str(self.cluster.get("server") or "http://localhost:8080")


def connect(options: Options, within: Limits) -> Access:
    """A client for the cluster that the options name; makes no connection yet."""
    try:
        import httpx2
    except ImportError:
        raise UserError(_INSTALL) from None
    config = _config(options)
    cluster, user = config.cluster, config.user
    try:
        verify = _trust(cluster, user)
        auth = _credentials(config, verify)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(f"context {config.context} of the kubeconfig cannot be used: {why}") from None

    def name_server(request: httpx2.Request) -> None:
        request.extensions = {**request.extensions, "sni_hostname": cluster["tls-server-name"]}

    http = httpx2.Client(
        base_url=config.server.rstrip("/"), verify=verify, auth=auth, proxy=cluster.get("proxy-url"),
        timeout=httpx2.Timeout(within.act, connect=within.connect),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
        headers=_impersonation(user),
        event_hooks={"request": [name_server] if cluster.get("tls-server-name") else []},
    )  # fmt: skip
    return Access(http, config.context, options.namespace or config.namespace, config.server)


def _trust(cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
    """The context for TLS: whom it trusts, and the certificate of the user."""
    import ssl

    if data := cluster.get("certificate-authority-data"):
        with _as_file(base64.b64decode(data)) as path:
            found = ssl.create_default_context(cafile=path)
    elif file := cluster.get("certificate-authority"):
        found = ssl.create_default_context(cafile=file)
    else:
        import httpx2

        found = httpx2.create_ssl_context(verify=not cluster.get("insecure-skip-tls-verify"))
    certificate, key = (_content_of(user, key) for key in ("client-certificate", "client-key"))
    if certificate:
        _add_certificate(found, certificate, key)
    return found


def _content_of(user: Mapping[str, Any], key: str) -> bytes:
    """What a user has as a file or within the kubeconfig; b"" for nothing."""
    if data := user.get(f"{key}-data"):
        return base64.b64decode(data)
    return Path(user[key]).read_bytes() if user.get(key) else b""


def _add_certificate(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Give a context for TLS a certificate with its key."""
    with _as_file(certificate + b"\n" + key) as path:
        context.load_cert_chain(path)


@contextlib.contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """The path of a file with this content, which only this user can read: contexts for TLS read no other way."""
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:
        file.write(content)
        file.flush()
        yield file.name


def _credentials(config: Config, verify: ssl.SSLContext) -> Any:
    """How requests are signed; None if the certificate is enough, or there is nothing."""
    user = config.user
    if user.get("exec"):
        import httpx2

        return _plugin(httpx2.Auth, _exec_of(config.cluster, user["exec"]), verify)
    if path := user.get("tokenFile"):
        return _bearer(lambda: _token_in(path))  # what writes it changes it from time to time
    if token := user.get("token"):
        return _bearer(lambda: str(token))
    if user.get("username") and user.get("password"):
        return str(user["username"]), str(user["password"])
    if user.get("auth-provider"):
        raise ValueError("kubectl knows no auth-provider any more; have its exec plugin written there")
    return None


def _bearer(token: Callable[[], str]) -> Callable[[httpx2.Request], httpx2.Request]:
    def sign(request: httpx2.Request) -> httpx2.Request:
        request.headers["Authorization"] = f"Bearer {token()}"
        return request

    return sign


def _token_in(path: str) -> str:
    """The token in a file."""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise UserError(f"the kubeconfig names the token file {path}: {error.strerror}") from None


# -- the kubeconfig ----------------------------------------------------------------------------------------------------


def _config(options: Options) -> Config:
    """The chosen context; in a pod without a kubeconfig its service account."""
    given = options.kubeconfig or os.environ.get("KUBECONFIG")
    paths = [Path(path).expanduser() for path in (given or "~/.kube/config").split(os.pathsep) if path]
    files = [path for path in paths if path.is_file()]
    if not files:
        found = _of_pod()
        if found is None:
            where = ", ".join(map(str, paths))
            raise UserError(f"no kubeconfig {where}; set KUBECONFIG, or name a file with kubeconfig = …")
        return found
    merged = _merged(files)
    contexts = {context.get("name"): context.get("context") or {} for context in merged["contexts"]}
    name = options.context or merged["current-context"]
    if name is None:
        raise UserError("the kubeconfig has no current context; name one with --context")
    if name not in contexts:
        raise UserError(f"no context {name!r} in the kubeconfig; {nearest(name, contexts)}")
    parts = []
    for kind in ("cluster", "user"):
        wanted = contexts[name].get(kind)
        part = next((it for it in merged[f"{kind}s"] if it.get("name") == wanted), None)
        if part is None and (kind == "cluster" or wanted):
            raise UserError(f"context {name} names a {kind} that is not in the kubeconfig; correct it")
        parts.append((part or {}).get(kind) or {})
    return Config(name, contexts[name].get("namespace") or "default", *parts)


def _of_pod() -> Config | None:
    """How a pod reaches its cluster, by its service account; None if this is none."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{it}") for it in ("HOST", "PORT"))
    try:
        namespace = (_ACCOUNT / "namespace").read_text()
    except OSError:
        return None
    if not host or not port:
        return None
    address = f"[{host}]" if ":" in host else host
    cluster = {"server": f"https://{address}:{port}", "certificate-authority": str(_ACCOUNT / "ca.crt")}
    return Config("default", namespace, cluster, {"tokenFile": str(_ACCOUNT / "token")})


def _impersonation(user: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The headers with which somebody acts as another user.

    Source: https://kubernetes.io/docs/reference/access-authn-authz/authentication/#user-impersonation
    """
    if not user.get("as"):
        return []
    found = [("Impersonate-User", str(user["as"]))]
    if user.get("as-uid"):
        found.append(("Impersonate-Uid", str(user["as-uid"])))
    found += [("Impersonate-Group", str(group)) for group in user.get("as-groups") or ()]
    extra = user.get("as-user-extra") or {}
    return found + [
        (f"Impersonate-Extra-{quote(key, safe='')}", str(it)) for key, values in extra.items() for it in values
    ]


def _merged(files: list[Path]) -> Object:
    """Several kubeconfigs as one: of two entries of a name the first one counts."""
    import yaml

    from paceline.job.yaml_files import load

    found: Object = {"clusters": [], "contexts": [], "users": [], "current-context": None}
    for file in files:
        try:
            content = load(file.read_text()) or {}
            current = content.get("current-context") or None
        except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
            raise UserError(f"{file} is not a kubeconfig that can be read: {str(error).splitlines()[0]}") from None
        found["current-context"] = found["current-context"] or current
        for kind, key in (("clusters", "cluster"), ("contexts", "context"), ("users", "user")):
            known = {entry["name"] for entry in found[kind]}
            for entry in content.get(kind) or ():
                if entry.get("name") not in known:
                    found[kind].append({**entry, key: _absolute(entry.get(key) or {}, file.parent)})
    return found


def _absolute(entry: Object, folder: Path) -> Object:
    """An entry whose paths, which are relative to its file, are absolute."""
    paths: Object = {key: str(folder.absolute() / entry[key]) for key in _FILES if entry.get(key)}
    plugin = entry.get("exec")
    if plugin and os.sep in plugin.get("command", ""):
        paths["exec"] = {**plugin, "command": str(folder.absolute() / plugin["command"])}
    return {**entry, **paths}


# -- credentials of plugins --------------------------------------------------------------------------------------------


def _exec_of(cluster: Mapping[str, Any], plugin: Mapping[str, Any]) -> Object:
    """How a plugin is run."""
    return {
        "apiVersion": plugin["apiVersion"], "command": plugin["command"], "args": list(plugin.get("args") or ()),
        "env": {it["name"]: it["value"] for it in plugin.get("env") or ()}, "hint": plugin.get("installHint"),
        "mode": plugin.get("interactiveMode") or "IfAvailable",
        "cluster": _cluster_info(cluster) if plugin.get("provideClusterInfo") else None,
    }  # fmt: skip


def _cluster_info(cluster: Mapping[str, Any]) -> Object:
    """What a plugin gets to know of the cluster."""
    keys = ("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority-data", "proxy-url")
    found = {key: cluster[key] for key in keys if cluster.get(key)}
    if cluster.get("certificate-authority") and "certificate-authority-data" not in found:
        data = Path(cluster["certificate-authority"]).read_bytes()
        found["certificate-authority-data"] = base64.b64encode(data).decode()
    for it in cluster.get("extensions") or ():
        if it.get("name") == _EXTENSION:
            found["config"] = it.get("extension")
    return found


def _plugin(base: Any, plugin: Object, verify: ssl.SSLContext) -> Any:
    """Credentials that a program prints, as client-go has them; they are asked for again when they are refused.

    Source: https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
    """

    class Credentials(base):  # type: ignore[misc]  # its base is known only once the library is there
        token: str | None = None
        has_asked = False
        lock = threading.Lock()

        def sync_auth_flow(self, request: Any) -> Generator[Any, Any, None]:
            with self.lock:  # of several requests at once the first one asks, for all
                is_new = not self.has_asked
                if is_new:
                    self._ask()
            self._sign(request)
            response = yield request
            if response.status_code == 401 and not is_new:
                self._ask()
                self._sign(request)
                yield request

        def _sign(self, request: Any) -> None:
            if self.token:
                request.headers["Authorization"] = f"Bearer {self.token}"

        def _ask(self) -> None:
            status = _run_plugin(plugin)
            self.token, self.has_asked = status.get("token"), True
            if status.get("clientCertificateData"):
                certificate, key = status["clientCertificateData"], status.get("clientKeyData", "")
                _add_certificate(verify, certificate.encode(), key.encode())

    return Credentials()


def _run_plugin(plugin: Object) -> Object:
    """The status that a credential plugin prints."""
    name = plugin["command"]
    if shutil.which(name) is None:
        hint = f"; {plugin['hint'].strip().splitlines()[0]}" if plugin["hint"] else ""
        raise UserError(f"the kubeconfig needs {name} for its credentials, which is not on PATH{hint}")
    is_interactive = plugin["mode"] != "Never" and sys.stdin is not None and sys.stdin.isatty()
    if plugin["mode"] == "Always" and not is_interactive:
        raise UserError(f"{name}, which the kubeconfig names, asks for credentials in a terminal; run this in one")
    asked: Object = {"interactive": is_interactive}
    if plugin["cluster"] is not None:
        asked["cluster"] = plugin["cluster"]
    info = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": asked}
    env = {**os.environ, **plugin["env"], "KUBERNETES_EXEC_INFO": json.dumps(info)}
    stdin = None if is_interactive else subprocess.DEVNULL
    # What it asks, and why it fails, is on stderr, which is this terminal.
    done = subprocess.run([name, *plugin["args"]], env=env, stdin=stdin, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError(f"{name}, which the kubeconfig names, gave no credentials (exit code {done.returncode})")
    try:
        status = json.loads(done.stdout)["status"]
        assert isinstance(status, dict)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UserError(f"{name}, which the kubeconfig names, printed no ExecCredential") from None
    return status


# -- kubectl, for what needs a terminal or a port of this machine ------------------------------------------------------


def kubectl(verb: str, options: Options, namespace: str, *words: str) -> Shell:
    """A command line of kubectl, with the cluster and the user of a target."""
    program = shutil.which("kubectl")
    if program is None:
        raise UserError(f"paceline {verb} needs kubectl on Kubernetes, which is not on PATH; install it")
    env = {**os.environ, **({"KUBECONFIG": options.kubeconfig} if options.kubeconfig else {})}
    context = ("--context", options.context) if options.context else ()
    return Shell((program, *context, "--namespace", namespace, *words), env, os.getcwd())
