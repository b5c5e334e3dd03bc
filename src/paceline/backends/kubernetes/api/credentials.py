"""Where the cluster is, and who asks there: as kubectl finds it out."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from paceline.job.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    import httpx2
    from lightkube.config.kubeconfig import SingleConfig

    from paceline.backends.kubernetes.options import Options
    from paceline.backends.limits import Limits

_FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
_EXTENSION = "client.authentication.k8s.io/exec"  # of a cluster, for plugins
_INSTALL = "the Kubernetes backend needs lightkube; pip install lightkube 'httpx2[ws]'"


class Access(NamedTuple):
    """How to reach a cluster.

    Attributes:
        http: a client for its API server.
        context: the name of the context, for messages.
        namespace: where jobs go.
        server: the address of the API server.
    """

    http: httpx2.Client
    context: str
    namespace: str
    server: str


def connect(options: Options, within: Limits) -> Access:
    """A client for the cluster that the options name; makes no connection yet.

    Args:
        options: of the target.
        within: how long it is waited for.

    Raises:
        UserError: the client library is missing, or the kubeconfig cannot be used.
    """
    try:
        import httpx2
        from lightkube.config import client_adapter
        from lightkube.core.exceptions import ConfigError
    except ImportError:
        raise UserError(_INSTALL) from None
    config, cluster, user = _config(options)
    assert config.user is not None
    try:
        # Credentials of plugins are our own: the library knows only old versions of their interface.
        verify = client_adapter.verify_cluster(config.cluster, config.user, config.abs_file)
        auth: Any = None
        if config.user.exec is None:
            auth = client_adapter.user_auth(config.user)
        else:
            auth = _plugin(httpx2.Auth, _exec_of(config, cluster, user["exec"]), verify)
    except (ConfigError, OSError, ValueError) as error:
        raise UserError(f"context {config.context_name} of the kubeconfig cannot be used: {error}") from None

    def name_server(request: httpx2.Request) -> None:
        request.extensions = {**request.extensions, "sni_hostname": cluster["tls-server-name"]}

    http = httpx2.Client(
        base_url=config.cluster.server.rstrip("/"), verify=verify, auth=auth, proxy=cluster.get("proxy-url"),
        timeout=httpx2.Timeout(within.act, connect=within.connect),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
        headers=_impersonation(user),
        event_hooks={"request": [name_server] if cluster.get("tls-server-name") else []},
    )  # fmt: skip
    namespace = options.namespace or config.namespace
    return Access(http, config.context_name, namespace, config.cluster.server)


# -- the kubeconfig ----------------------------------------------------------------------------------------------------


def _config(options: Options) -> tuple[SingleConfig, dict[str, Any], dict[str, Any]]:
    """The chosen context, and its cluster and its user as they are written: the library leaves out some keys.

    Raises:
        UserError: there is none.
    """
    from lightkube.config.kubeconfig import KubeConfig
    from lightkube.config.models import User
    from lightkube.core.exceptions import ConfigError

    given = options.kubeconfig or os.environ.get("KUBECONFIG")
    paths = [Path(path).expanduser() for path in (given or "~/.kube/config").split(os.pathsep) if path]
    files = [path for path in paths if path.is_file()]
    if not files:
        try:  # as kubectl in a pod
            found = KubeConfig.from_service_account().get()
            assert found is not None
            return found, {}, {}
        except (ConfigError, KeyError):
            where = ", ".join(map(str, paths))
            raise UserError(f"no kubeconfig {where}; set KUBECONFIG, or name a file with kubeconfig = …") from None
    merged = _merged(files)
    contexts = {context.get("name"): context.get("context") or {} for context in merged["contexts"]}
    name = options.context or merged["current-context"]
    if name is None:
        raise UserError("the kubeconfig has no current context; name one with --context")
    if name not in contexts:
        raise UserError(f"no context {name!r} in the kubeconfig; {nearest(name, contexts)}")
    cluster = next((it for it in merged["clusters"] if it.get("name") == contexts[name].get("cluster")), None)
    if cluster is None:
        raise UserError(f"context {name} names a cluster that is not in the kubeconfig; correct it")
    try:
        config = KubeConfig.from_dict(merged).get(name)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"context {name} of the kubeconfig cannot be used: {error}") from None
    assert config is not None
    if config.user is None:
        config = config._replace(user=User())
    user: dict[str, Any] = next((it for it in merged["users"] if it.get("name") == contexts[name].get("user")), {})
    return config, cluster.get("cluster") or {}, user.get("user") or {}


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


def _merged(files: list[Path]) -> dict[str, Any]:
    """Several kubeconfigs as one: of two entries of a name the first one counts.

    Raises:
        UserError: one cannot be read.
    """
    import yaml

    found: dict[str, Any] = {"clusters": [], "contexts": [], "users": [], "current-context": None}
    for file in files:
        try:
            content = yaml.safe_load(file.read_text()) or {}
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


def _absolute(entry: dict[str, Any], folder: Path) -> dict[str, Any]:
    """An entry whose paths, which are relative to its file, are absolute."""
    paths: dict[str, Any] = {key: str(folder.absolute() / entry[key]) for key in _FILES if entry.get(key)}
    plugin = entry.get("exec")
    if plugin and os.sep in plugin.get("command", ""):
        paths["exec"] = {**plugin, "command": str(folder.absolute() / plugin["command"])}
    return {**entry, **paths}


# -- credentials of plugins --------------------------------------------------------------------------------------------


def _exec_of(config: SingleConfig, cluster: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """How a plugin is run.

    Args:
        config: the chosen context.
        cluster: as it is written.
        written: the plugin, as it is written.
    """
    plugin = config.user.exec if config.user is not None else None
    assert plugin is not None
    return {
        "apiVersion": plugin.apiVersion, "command": plugin.command, "args": list(plugin.args or ()),
        "env": {it.name: it.value for it in plugin.env or ()}, "hint": plugin.installHint,
        "mode": written.get("interactiveMode") or "IfAvailable",
        "cluster": _told(cluster) if written.get("provideClusterInfo") else None,
    }  # fmt: skip


def _told(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """What a plugin is told of the cluster."""
    keys = ("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority-data", "proxy-url")
    found = {key: cluster[key] for key in keys if cluster.get(key)}
    if cluster.get("certificate-authority") and "certificate-authority-data" not in found:
        data = Path(cluster["certificate-authority"]).read_bytes()
        found["certificate-authority-data"] = base64.b64encode(data).decode()
    for it in cluster.get("extensions") or ():
        if it.get("name") == _EXTENSION:
            found["config"] = it.get("extension")
    return found


def _plugin(base: Any, plugin: dict[str, Any], verify: Any) -> Any:
    """Credentials that a program prints, as client-go has them; they are asked for again when they are refused.

    Source: https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins

    Args:
        base: the class of the library's credentials.
        plugin: the program; see `_exec_of`.
        verify: the context for TLS, which gets a client certificate.
    """

    class Credentials(base):  # type: ignore[misc]  # its base is known only once the library is there
        token: str | None = None
        has_asked = False

        def sync_auth_flow(self, request: Any) -> Generator[Any, Any, None]:
            if self.has_asked:
                self._sign(request)
                response = yield request
                if response.status_code != 401:
                    return
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
                with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:  # readable by this user alone
                    file.write(f"{status['clientCertificateData']}\n{status.get('clientKeyData', '')}\n")
                    file.flush()
                    verify.load_cert_chain(file.name)

    return Credentials()


def _run_plugin(plugin: dict[str, Any]) -> dict[str, Any]:
    """The status that a credential plugin prints.

    Raises:
        UserError: it is not installed, fails, or prints something else.
    """
    name = plugin["command"]
    if shutil.which(name) is None:
        hint = f"; {plugin['hint'].strip().splitlines()[0]}" if plugin["hint"] else ""
        raise UserError(f"the kubeconfig needs {name} for its credentials, which is not on PATH{hint}")
    is_interactive = plugin["mode"] != "Never" and sys.stdin is not None and sys.stdin.isatty()
    if plugin["mode"] == "Always" and not is_interactive:
        raise UserError(f"{name}, which the kubeconfig names, asks for credentials in a terminal; run this in one")
    asked: dict[str, Any] = {"interactive": is_interactive}
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
