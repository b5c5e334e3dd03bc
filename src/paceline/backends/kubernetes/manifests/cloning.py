"""Code from a git repository that the pods fetch themselves, in an init container.

So the credentials, files of a Secret, are never in the container of the ranks. All pods fetch the commit that the
client found, if it can reach the repository; otherwise each finds it itself.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.backends.kubernetes.api.errors import ApiError, Gone
from paceline.contract import GIT_CREDENTIALS
from paceline.job.code import git, git_source
from paceline.job.errors import UserError

from .manifest import literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.api.object import Object
    from paceline.backends.kubernetes.options import Options
    from paceline.contract.records import CodeRecord
    from paceline.job.spec import JobSpec


FOLDER = "git"  # in the pods' folder
SECRET = "/paceline/git"
_KEYS = ("password", "ssh-privatekey")
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@dataclass(frozen=True)
class Clone:
    """A repository that pods fetch."""

    source: git_source.Source  # its URL and the ref
    commit: str | None  # that all pods fetch; None if the client does not know it
    image: str
    secret: str | None  # the name of the Secret with the credentials; None without any
    credentials: Mapping[str, str]  # what that Secret is made of; empty if it is there already
    env: Mapping[str, str]

    @property
    def record(self) -> CodeRecord:
        found: CodeRecord = {
            "mode": "git", "source": self.source.url, "ref": self.source.ref, "commit": self.commit,
        }  # fmt: skip
        if self.credentials:
            found["secret"] = self.secret
        return found


def is_fetched_there(spec: JobSpec) -> bool:
    """Whether the pods fetch the job's code: a repository on this machine comes from here."""
    return spec.code is not None and spec.code.mode == "git" and not _source(spec).is_local


def _source(spec: JobSpec) -> git_source.Source:
    """The repository that a job's code is in."""
    assert spec.code is not None
    return git_source.resolve(spec.code.source or "", Path.cwd())


def check(cluster: Cluster, options: Options, spec: JobSpec, record: CodeRecord | None) -> None:
    """Refuse a repository whose credentials are missing, as far as that can be seen without asking its host."""
    if not is_fetched_there(spec):
        return
    source = _source(spec)
    name = options.git_secret
    if name is None:
        if source.url.startswith("ssh://") or "://" not in source.url:
            raise UserError(
                f"--sync-source {source.url}: pods have no ssh key; name a Secret that has one with --git-secret "
                "(kubectl create secret generic NAME --from-file=ssh-privatekey=FILE), or write an https:// address"
            )
        _credentials(cluster, options, spec, source, record)
        return
    try:
        keys = cluster.get(cluster.path("v1", "secrets", name)).get("data") or {}
    except Gone:
        raise UserError(
            f"--git-secret {name}: no such Secret in namespace {cluster.namespace}; make it with: kubectl create "
            f"secret generic {name} --from-literal=username=… --from-literal=password=…"
        ) from None
    except ApiError:
        return  # it may be read by pods alone
    if not any(key in keys for key in _KEYS):
        raise UserError(f"--git-secret {name}: that Secret has no key named {' or '.join(_KEYS)}; add one")


def clone(
    cluster: Cluster, job: str, image: str, options: Options, spec: JobSpec, *, record: CodeRecord | None
) -> Clone:
    """What the pods of a job fetch."""
    source = _source(spec)
    commit = record.get("commit") if record is not None else git.commit_of(source, spec.git_credentials)
    credentials = _credentials(cluster, options, spec, source, record)
    secret = options.git_secret or (f"{job}-git" if credentials else None)
    env = {name: value for name, value in spec.env.items() if name.lower() in _PROXIES}
    return Clone(source, commit, options.git_image or image, secret, credentials, env)


def _credentials(
    cluster: Cluster, options: Options, spec: JobSpec, source: git_source.Source, record: CodeRecord | None
) -> dict[str, str]:
    """What the job's own Secret for git is made of: what it was given, or what the job had that it resumes."""
    if options.git_secret is not None or source.origin is None:
        return {}
    name, password = map(spec.git_credentials.get, GIT_CREDENTIALS)
    if password:
        return {"username": (name or source.user or "git").strip(), "password": password.strip()}
    old = (record or {}).get("secret")
    if old is None:
        return {}
    try:
        data = cluster.get(cluster.path("v1", "secrets", old)).get("data") or {}
    except ApiError as error:
        if error.code not in (403, 404):
            raise
        why = "you may not read it" if error.code == 403 else "it is gone"
        raise UserError(
            f"the credentials for git of job {spec.resume_from} were in Secret {old}, but {why}; export"
            " GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD, or name a Secret that has them with --git-secret"
        ) from None
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


# -- manifests ---------------------------------------------------------------------------------------------------------


def container(it: Clone, here: str, work: str, resources: Object, pull_policy: str | None) -> Object:
    """The init container."""
    source = it.source
    arguments = [source.url, source.ref or "", it.commit or "", source.origin or "", source.user or "git", work, SECRET]
    mounts: list[Object] = [
        {"name": "job", "mountPath": here, "readOnly": True},
        {"name": "work", "mountPath": work},
        {"name": "git-tmp", "mountPath": "/tmp"},  # its root may be read-only
    ]
    if it.secret is not None:
        mounts.append({"name": "git", "mountPath": SECRET, "readOnly": True})
    found: Object = {
        "name": "git",
        "image": it.image,
        "command": ["sh", f"{here}/git.sh", *map(literal, arguments)],
        "env": [{"name": name, "value": literal(value)} for name, value in it.env.items()],
        "resources": resources,
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if pull_policy is not None:
        found["imagePullPolicy"] = pull_policy
    return found


def volumes(it: Clone) -> list[Object]:
    """What the init container has besides: a folder to write to, and the credentials, which any user there can read."""
    found: list[Object] = [{"name": "git-tmp", "emptyDir": {}}]
    if it.secret is not None:
        found.append({"name": "git", "secret": {"secretName": it.secret, "defaultMode": 0o444}})
    return found


def secrets(it: Clone, meta: Object) -> list[Object]:
    """The Secret with the credentials of the client, if it has some."""
    if not it.credentials:
        return []
    data = {key: base64.b64encode(value.encode()).decode() for key, value in it.credentials.items()}
    return [{"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "kubernetes.io/basic-auth", "data": data}]


# -- what the init container runs: it needs git and a POSIX shell, and no Python ---------------------------------------


# Arguments: the URL, the ref ("" for the default branch), the commit ("" if it is not known), the origin that gets the
# password, the user there, the folder for the result, the folder of the Secret. Credentials are read from files only.
GIT = r"""
url=$1 ref=$2 commit=$3 origin=$4 user=$5 work=$6 secret=$7
fail() { echo "paceline: $1" >&2; exit 2; }
command -v git >/dev/null 2>&1 || fail "the image of this container has no git; name one that has it with --git-image"
HOME=$(umask 077; mktemp -d) || fail "cannot make a folder in /tmp"
trap 'rm -rf "$HOME"' EXIT
export HOME GIT_TERMINAL_PROMPT=0 GIT_ALLOW_PROTOCOL=https:http:ssh:git LC_ALL=C XDG_CONFIG_HOME=$HOME
set_option() { git config --global "$1" "$2"; }
set_option core.hooksPath /dev/null
set_option advice.detachedHead false
set_option gc.auto 0
set_option http.lowSpeedLimit 1
set_option http.lowSpeedTime 120
if [ -n "$origin" ] && [ -s "$secret/password" ]; then
    cp "$secret/password" "$HOME/password"
    printf %s "$user" >"$HOME/username"
    [ -s "$secret/username" ] && cat "$secret/username" >"$HOME/username"
    set_option "credential.$origin.helper" '!f() { test "$1" != get || {
        printf "username=%s\npassword=%s\n" "$(cat "$HOME/username")" "$(cat "$HOME/password")"; }; }; f'
fi
if [ -s "$secret/ssh-privatekey" ]; then
    (umask 077; cat "$secret/ssh-privatekey" >"$HOME/key"; echo >>"$HOME/key")
    checks="-o StrictHostKeyChecking=accept-new -o UserKnownHostsFile=$HOME/known_hosts"
    if [ -s "$secret/known_hosts" ]; then
        checks="-o StrictHostKeyChecking=yes -o UserKnownHostsFile=$secret/known_hosts"
    fi
    export GIT_SSH_COMMAND="ssh -o BatchMode=yes -o IdentitiesOnly=yes -i $HOME/key $checks"
fi

rm -rf "$work/git" "$work/commit"
mkdir "$work/git" && cd "$work/git" || fail "cannot write to $work"
set_option safe.directory "$work/git"
found=
format=
[ ${#commit} -eq 64 ] && format=--object-format=sha256
git init --quiet --template= $format && git remote add -- origin "$url" || fail "cannot make a repository in $work"
get() { git fetch --quiet --no-tags "$@" 2>"$HOME/errors"; }
whole() { get origin '+refs/heads/*:refs/remotes/origin/*' '+refs/tags/*:refs/tags/*'; }
parse() { git rev-parse --verify --quiet "$1^{commit}" >"$HOME/found" && found=$(cat "$HOME/found"); }
fetch() {
    if [ -n "$commit" ]; then
        get --depth=1 origin "$commit" && parse FETCH_HEAD && return
        whole && parse "$commit" && return
        return 1
    fi
    for name in ${ref:+"refs/heads/$ref"} ${ref:+"refs/tags/$ref"} "${ref:-HEAD}"; do
        get --depth=1 origin "$name" && parse FETCH_HEAD && return
        grep -qi "find remote ref" "$HOME/errors" || break
    done
    [ -n "$ref" ] && whole && parse "$ref"
}
for pause in 2 8 0; do
    fetch && break
    why=$(grep -E '^(fatal|error):' "$HOME/errors" | tail -n 1)
    [ -z "$why" ] && fail "cannot fetch $url: no branch, tag or commit ${commit:-$ref}"
    refusals='authentication failed|could not read (username|password)|error: 40[13]|permission denied'
    if grep -qiE "$refusals" "$HOME/errors"; then
        fail "cannot fetch $url: access is refused; name a Secret that allows it with --git-secret (${why#*: })"
    fi
    if grep -qiE 'not found|error: 404|does not exist' "$HOME/errors"; then break; fi
    sleep $pause
done
[ -n "$found" ] || fail "cannot fetch $url: ${why#*: }"
git checkout --quiet --detach --force "$found" || fail "cannot check out $found of $url"
if [ -e .gitmodules ]; then
    git submodule --quiet update --init --recursive --checkout --depth=1 ||
        git submodule --quiet update --init --recursive --checkout || fail "cannot fetch a submodule of $url"
fi
echo "$found" >"$work/commit"
echo "paceline: fetched $found of $url"
"""
