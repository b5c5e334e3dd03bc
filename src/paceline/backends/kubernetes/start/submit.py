"""Starts a job: its object first, then all that it owns, then the word that it stays.

A client may be killed at any moment. So a Job is made without pods (a parallelism of 0), and with a deadline and a
time to live that are short; all three are changed when everything else is there. If the client is gone before, the
cluster ends the job at the deadline and removes it, with everything that it owns.

Other kinds, and Jobs with a queue, have no deadline before their first pod. So such a Job without pods is made for them
too, and owns the object until everything is there. One patch takes the object from it and lets it have pods; see
`holding`.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import os
import secrets
import tempfile
import time
import uuid
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from paceline.backends.base import MOST_RANKS, Prepared
from paceline.backends.kubernetes.api.errors import ApiError, Gone, with_run_as
from paceline.backends.kubernetes.look.jobs import find, taken
from paceline.backends.kubernetes.manifests import cloning, kept, objects, replacing
from paceline.backends.kubernetes.manifests import manifest as manifests
from paceline.backends.kubernetes.manifests.gang import GROUPS
from paceline.backends.kubernetes.manifests.kinds.job import BatchJob
from paceline.backends.kubernetes.manifests.kinds.served import KINDS, chosen, discover
from paceline.backends.kubernetes.manifests.manifest import PLURALS
from paceline.backends.kubernetes.manifests.names import CODE, INSTANCE, QUEUE, SELECTOR, check_name, valid_name
from paceline.backends.kubernetes.manifests.order import Order
from paceline.backends.packing import archive
from paceline.backends.submission import NameTaken, check_script, checked, is_known, names, packed
from paceline.contract import TOKEN
from paceline.job.errors import UserError
from paceline.job.spec import Code
from paceline.node.readers import Begun

from . import claims, dry_run, holding

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.backends.base import ProgressReporter
    from paceline.backends.kubernetes.api.client import Cluster
    from paceline.backends.kubernetes.api.object import Object
    from paceline.backends.kubernetes.look.jobs import Found
    from paceline.backends.kubernetes.manifests.kinds.base import Kind
    from paceline.backends.kubernetes.options import Options
    from paceline.contract.records import CodeRecord
    from paceline.job.spec import JobSpec

_OLD_SECONDS = 30.0  # for what a deleted job of this name has left to be collected
_PAUSE = 0.3
_TAKEN = "a job named {} is in this namespace; choose another --name, or delete that job"
_TOO_LONG = (
    f"sending the job took longer than {holding.DEADLINE} s, and the cluster has ended what was there; name files that "
    "it does not need in .pacelineignore, or submit it over a faster connection"
)
_CONFIRMED = ("parallelism", "activeDeadlineSeconds", "ttlSecondsAfterFinished")


@dataclass(frozen=True)
class KubePrepared(Prepared):
    """A job for a cluster."""

    order: Order | None = None  # the job, under a name that was free, without its code
    shown: Callable[[], str] | None = None  # returns the manifests, with the code
    warnings: tuple[str, ...] = ()  # what the server says of the job, which it takes all the same

    def text(self) -> str:
        """The manifests, in YAML that `kubectl apply` takes."""
        assert self.shown is not None
        return self.shown()


def prepare(cluster: Cluster, options: Options, spec: JobSpec, *, detached: bool, target: str) -> KubePrepared:
    """Check a job, also by a trial on the server; makes nothing."""
    cluster.pod_template = options.pod_template
    _refuse(cluster, spec, options)
    # It is packed while the server is found and asked.
    packing = Begun(lambda: b"" if options.plain else archive().solid)
    spec = _with_code(spec, options)
    spec, _, source = checked(spec, detached=detached)
    check_script(spec, source)
    spec = spec.changed({"backend": target})
    nodes = spec.node_range[1]
    kind = chosen(cluster, options.kind)
    name = spec.name or valid_name(spec.new_name(), nodes, kind.margin)
    check_name(f"{name}1" if name.endswith("-") else name, nodes, kind.margin)
    cloning.check(cluster, options, spec, _record_of(cluster, spec))
    (_, minor), _ = cluster.at_once(lambda: cluster.version, lambda: discover(cluster))
    order = Order(
        name, spec, options, cluster.namespace, uuid.uuid4().hex, archive=packing.result(),
        secrets={it: os.environ[it] for it in spec.secrets}, kind=kind, minor=minor,
    )  # fmt: skip
    order = replace(order, spec=replacing.patient(order))
    order.check()
    kind.check(order)
    if nodes > 1 and not options.plain:
        order = replace(order, secrets={**order.secrets, TOKEN: secrets.token_hex(16)})
    if name.endswith("-"):
        order = replace(order, name=_free(cluster, spec))
    cluster.warnings.clear()
    with _taken():  # of its own kind, the trial says so
        cluster.at_once(
            lambda: claims.check(cluster, spec),
            lambda: claims.check_queue(cluster, order),
            lambda: _refuse_taken(cluster, order.name, kind),
            lambda: cluster.create(kind.path(cluster), _provisional(order), dryRun="All"),
        )
    warnings = tuple(f"the cluster warns: {with_run_as(line)}" for line in cluster.warnings)
    ranks = spec.ranks if isinstance(spec.ranks, int) else MOST_RANKS

    def shown() -> str:
        whole = order if spec.code is None else _with_files(cluster, order, _Silence())
        return dry_run.printed(cluster, whole, warnings)

    return KubePrepared(spec, (), ranks, order=order, shown=shown, warnings=warnings)


class _Silence:
    """Progress of a dry run, which only prints the manifests."""

    def __call__(self, what: str, done: int, total: int | None, now: str = "") -> None:
        pass

    def say(self, line: str) -> None:
        pass


def _refuse(cluster: Cluster, spec: JobSpec, options: Options) -> None:
    """Refuse what pods cannot have."""
    least, most = spec.node_range
    has_policy = options.plain and options.kind == "pytorchjob"  # its operator knows what an elastic job is
    if least < most and not has_policy and (options.plain or options.kind != "job" or options.gang is not None):
        other = "--plain" if options.plain else "--gang" if options.gang is not None else f"--kind {options.kind}"
        raise UserError(f"--nnodes {spec.nodes}: with {other} a job keeps its number of pods; give one number")
    if isinstance(spec.devices, tuple):
        raise UserError("--devices: the cluster chooses the devices; say how many with --gpus")
    if options.gang is not None and not cluster.serves(GROUPS[options.gang], "PodGroup"):
        raise UserError(f"--gang {options.gang}: the cluster has no PodGroup {GROUPS[options.gang]}; is it installed?")
    for flag, what, does in (("--sync-mode", spec.code, "fetches the code"), ("--setup", spec.setup, "runs the setup")):
        if options.plain and what:
            raise UserError(f"--plain: without an agent nothing {does}; leave {flag} out")
    paths = [mount.path for mount in spec.data]
    for path in paths:
        if paths.count(path) > 1:
            raise UserError(f"--data: two volumes would be at {path}; leave one out")


def _with_code(spec: JobSpec, options: Options) -> JobSpec:
    """A script of this folder is not in the image, so it is sent with the folder."""
    if spec.code is not None or options.plain or spec.script is None:
        return spec
    here = Path.cwd()
    with contextlib.suppress(OSError, ValueError):
        path = (here / spec.script).resolve()
        if path.is_file() and path.relative_to(here.resolve()):
            return spec.changed({"code": Code(mode="snapshot", source=None)})
    return spec


def _free(cluster: Cluster, spec: JobSpec) -> str:
    """The next free number for a name that ends in '-'."""
    there = taken(cluster, None)
    number = 2 if spec.resume_from else 1
    while (name := f"{spec.name}{number}") in there or is_known(name):
        number += 1
    return name


def _refuse_taken(cluster: Cluster, name: str, but: Kind | None = None) -> None:
    """Refuse the name of a job, of whatever kind but this one: what it owns is named after it."""
    if taken(cluster, [name], but):
        raise NameTaken(_TAKEN.format(name))


@contextlib.contextmanager
def _taken() -> Any:
    try:
        yield
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise
        name = str(error).partition('"')[2].partition('"')[0]
        raise NameTaken(_TAKEN.format(name)) from None


# -- start -------------------------------------------------------------------------------------------------------------


def start(cluster: Cluster, prepared: KubePrepared, progress: ProgressReporter) -> tuple[Object, Kind]:
    """Start a prepared job; returns its object, and of which kind it is."""
    assert prepared.order is not None
    order, spec = prepared.order, prepared.spec
    for line in prepared.warnings:
        progress.say(line)
    if spec.code is not None:
        order = _with_files(cluster, order, progress)
    goes_on = spec.resume_from is not None and not spec.fresh and not order.options.plain
    if goes_on and kept.volume_of(spec.checkpoint_dir or "", spec) is None:
        progress.say(
            f"checkpoints of job {spec.resume_from} went with its pods, and the new job begins anew; "
            "--checkpoint-dir on a volume (--data) keeps them"
        )

    make = _make_below if holding.is_held(order) else _make
    for name in names(spec) if spec.name.endswith("-") else (order.name,):
        progress(f"starting {name}", 0, None)
        try:
            return make(cluster, replace(order, name=name)), order.kind
        except NameTaken as error:
            refused = error
    raise refused


def _with_files(cluster: Cluster, order: Order, progress: ProgressReporter) -> Order:
    """The job with its code: a copy of this folder or of a repository, or that of the job that it resumes."""
    spec = order.spec
    if cloning.is_fetched_there(spec):
        progress("asking for the commit", 0, None)
        clone = cloning.clone(cluster, order.name, order.image, order.options, spec, record=_record_of(cluster, spec))
        return replace(order, clone=clone, record=clone.record)
    if spec.resume_from is not None:
        return _with_code_of(cluster, order, spec.resume_from)
    with tempfile.TemporaryFile() as file, gzip.GzipFile(fileobj=_Limited(file), mode="wb", mtime=0) as compressed:
        record = packed(spec, compressed, progress)
        compressed.close()
        file.seek(0)
        return replace(order, code=file.read(), record=record)


class _Limited:
    """A file that takes as much code as pods get, so that packing ends as soon as there is more."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._room = file, objects.MOST_CODE

    def write(self, data: bytes) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise UserError(
                f"the code has more than {objects.MOST_CODE / (1 << 20):.1f} MiB when packed, which is what pods get; "
                "name what the job does not need in .pacelineignore, have the pods fetch a repository with --sync-mode "
                "git --sync-source URL, or put it into the image"
            )
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _with_code_of(cluster: Cluster, order: Order, name: str) -> Order:
    """The job with the code of another one, from its ConfigMaps."""
    found = _job(cluster, name)
    maps = cluster.items(cluster.path("v1", "configmaps"), labelSelector=f"{SELECTOR},{INSTANCE}={name}")
    files = [file for item in maps for file in (item.get("binaryData") or {}).items()]
    pieces = {key: base64.b64decode(text) for key, text in files if key.startswith("code-")}
    if not pieces:
        raise UserError(f"the code of job {name} went with its pods; submit the job again")
    return replace(order, code=b"".join(pieces[key] for key in sorted(pieces)), record=_record(found))


def _record_of(cluster: Cluster, spec: JobSpec) -> CodeRecord | None:
    """The record of the code of the job that this one resumes; None if it resumes none."""
    return None if spec.resume_from is None else _record(_job(cluster, spec.resume_from))


def _record(job: Found) -> CodeRecord:
    """The record of a job's code."""
    try:
        found: CodeRecord = json.loads(job.annotations.get(CODE, "{}"))
        if isinstance(found, dict):
            return found
    except ValueError:
        pass
    raise UserError(f"the annotation {CODE} of job {job.name} is damaged; submit the job again")


def _job(cluster: Cluster, name: str) -> Found:
    """The job of this name."""
    found = find(cluster, [name]).get(name)
    if found is None:
        raise UserError(f"no job {name!r} to resume from; see paceline list{cluster.where} -A")
    return found


def _provisional(order: Order) -> Object:
    """The job's object, which has no pods; a Job ends soon unless it is confirmed."""
    manifest: Object = order.kind.manifest(order)
    if holding.is_held(order):
        manifest["metadata"]["labels"].pop(QUEUE, None)  # what manages the queue would start it
        if not order.kind.can_suspend(manifest):  # its pods wait for what is not there yet
            return manifest
        return {**manifest, "spec": manifests.merged(manifest["spec"], order.kind.suspension(manifest, True))}
    changes = {
        "parallelism": 0, "activeDeadlineSeconds": holding.DEADLINE, "ttlSecondsAfterFinished": holding.LEFTOVER,
    }  # fmt: skip
    return {**manifest, "spec": {**manifest["spec"], **changes}}


def _created(cluster: Cluster, kind: Kind, manifest: Object) -> Object:
    """The object made from a manifest."""
    with _taken():
        return {"apiVersion": kind.api_version, "kind": kind.title, **cluster.create(kind.path(cluster), manifest)}


@contextlib.contextmanager
def _removed_on_failure(cluster: Cluster, kind: Kind, made: Object) -> Any:
    try:
        yield
    except BaseException:
        with contextlib.suppress(UserError):
            meta = made["metadata"]
            cluster.delete(kind.path(cluster, meta["name"]), preconditions={"uid": meta["uid"]})
        raise


@contextlib.contextmanager
def _in_time() -> Any:
    """The confirmation of a job that the cluster may have removed because its parts took too long to arrive."""
    try:
        yield
    except Gone:
        raise UserError(_TOO_LONG) from None


def _make_below(cluster: Cluster, order: Order) -> Object:
    """Make all objects of a job whose object another Job owns meanwhile."""
    check_name(order.name, order.nodes, order.kind.margin)
    _refuse_taken(cluster, order.name)
    kind, holder_kind = order.kind, BatchJob()
    holder = _created(cluster, holder_kind, holding.manifest(order))
    with _removed_on_failure(cluster, holder_kind, holder):
        made = _created(cluster, kind, objects.owned(_provisional(order), holder))
        with _removed_on_failure(cluster, kind, made):
            _make_dependents(cluster, order, made)
            go: Object = {"spec": kind.suspension(made, False)} if kind.can_suspend(made) else {}
            if order.is_queued:
                go = {"metadata": {"labels": {QUEUE: order.spec.queue}}}
            with _in_time():
                if order.spec.detached:
                    return holding.let_go(cluster, kind, order.name, holding.name_of(order), go)
                # `Kubernetes.run` lets it go when it has ended.
                return cluster.patch(kind.path(cluster, order.name), go)


def _make(cluster: Cluster, order: Order) -> Object:
    """Make all objects of a job."""
    check_name(order.name, order.nodes, order.kind.margin)
    made = _created(cluster, order.kind, _provisional(order))
    with _removed_on_failure(cluster, order.kind, made):
        _make_dependents(cluster, order, made)
        wanted = order.kind.spec(order)
        confirmed = {key: wanted.get(key) for key in _CONFIRMED}  # it goes on, now that all that it owns is there
        if not order.spec.detached:  # from now on `Kubernetes.run` moves it on
            confirmed["activeDeadlineSeconds"] = holding.LEASE_SECONDS
        with _in_time():
            found = cluster.patch(order.kind.path(cluster, order.name), {"spec": confirmed})
        if order.kind.ending(found) is not None:  # it has no pods that could have ended
            raise UserError(_TOO_LONG)
        return found


def _make_dependents(cluster: Cluster, order: Order, owner: Object) -> None:
    """Make all that a job's object owns, several at once."""
    cluster.at_once(*(partial(_make_owned, cluster, objects.owned(it, owner)) for it in order.kind.dependents(order)))


def _make_owned(cluster: Cluster, manifest: Object) -> None:
    """Make an object of a job; one that a deleted job of this name has left is removed first."""
    path = cluster.path(manifest["apiVersion"], PLURALS[manifest["kind"]])
    name, (owner,) = manifest["metadata"]["name"], manifest["metadata"]["ownerReferences"]
    until = time.monotonic() + _OLD_SECONDS
    while True:
        try:
            cluster.create(path, manifest)
            return
        except ApiError as error:
            if error.reason != "AlreadyExists":
                raise
            exists = error
        try:
            old = cluster.get(f"{path}/{name}")["metadata"]
            owners = {it["uid"] for it in old.get("ownerReferences") or ()}
            if time.monotonic() > until:
                raise exists
            if not owners or (old.get("labels") or {}).get(INSTANCE) != owner["name"]:
                kind = manifest["kind"]
                raise UserError(f"{kind} {name} is there already, and belongs to no job; choose another --name")
            if any(_is_there(cluster, it) for it in old["ownerReferences"]):
                raise NameTaken(_TAKEN.format(owner["name"]))
            cluster.delete(f"{path}/{name}", preconditions={"uid": old["uid"]})
        except ApiError as error:
            if error is exists or error.code not in (404, 409):
                raise
        time.sleep(_PAUSE)


def _is_there(cluster: Cluster, reference: Object) -> bool:
    """Whether the owner that a reference names is there, and stays."""
    plural = next((kind.plural for kind in KINDS if kind.title == reference["kind"]), None)
    if plural is None:
        return False
    try:
        meta = cluster.get(cluster.path(reference["apiVersion"], plural, reference["name"]))["metadata"]
    except Gone:
        return False
    return bool(meta["uid"] == reference["uid"] and not meta.get("deletionTimestamp"))
