"""Files of other tools that say what a job is, each read as a line of `paceline submit`.

Source: SkyPilot 0.10 (task YAML), dstack 0.19 (task), kubeflow training-operator 1.9 (PyTorchJob), mpi-operator 0.6
(MPIJob), kubeflow trainer 2 (TrainJob), accelerate 1.15 (`accelerate config`), Arena v2 (keps/arena-v2/yaml-schema.md),
`man sbatch`.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.job.errors import UserError
from paceline.job.text import printable

from .engine import Document, Line, parse
from .script import line_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_MOST_BYTES = 1 << 20
SCRIPTS = (".sh", ".sbatch", ".slurm", ".bash")
_BATCH = re.compile(r"#SBATCH\s+(.*)")
_GPU = re.compile(r"[\w.-]+/(gpu|mig-.*)")
_MAIN = ("pytorch", "mpi", "node")  # the names of the container of training, where a pod has others
_QUEUE = "kueue.x-k8s.io/queue-name"
_OF_ENV = ("--env", "--secret")
Flags = list[tuple[str, ...]]


class Foreign(NamedTuple):
    """A job as a file of another tool says it."""

    what: str  # the file is, as "a task of SkyPilot"
    line: Line


def read(path: str) -> Foreign | None:
    """The job of a file of another tool; None for other files, and where there is none."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8-sig")  # Windows puts a mark before it
    except (OSError, ValueError):
        return None
    if path.lower().endswith(SCRIPTS):
        return _read(path, "a batch script of Slurm", _sbatch, text) if _directives(text) else None
    import yaml

    from paceline.job.yaml_files import load_all

    try:
        documents = [it for it in load_all(text) if isinstance(it, dict)]
    except (yaml.YAMLError, ValueError):
        return None
    jobs = [(it, kind) for it in documents if (kind := next((one for one in _KINDS if one[0](it)), None)) is not None]
    if len(jobs) > 1:
        raise UserError(printable(f"{path} holds {len(jobs)} jobs; write each into a file of its own"))
    for document, (_, what, reader) in jobs:
        found = _read(path, what.format(kind=_named(document.get("kind"))), reader, document)
        if others := [_called(it) for it in documents if it is not document]:
            found.line.notes.append(f"left out: {', '.join(others)}, of the same file")
        return found
    return None


def _called(document: Document) -> str:
    """What another document of a file is called: its kind and name."""
    metadata = document.get("metadata")
    words = (document.get("kind"), metadata.get("name") if isinstance(metadata, dict) else document.get("name"))
    return " ".join(str(it) for it in words if it) or "a document without a kind"


def _named(kind: Any) -> str:
    return f"{'an' if kind == 'MPIJob' else 'a'} {kind}"


def _read(path: str, what: str, reader: Callable[[Any], Line], content: Any) -> Foreign:
    try:
        return Foreign(what, reader(content))
    except (
        AttributeError,
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
    ):  # its parts are not what they should be
        raise UserError(
            printable(f"{path} is {what}, and cannot be read as one; write a job file: paceline init")
        ) from None
    except UserError as error:
        raise UserError(printable(f"{path} is {what}: {error}")) from None


class _Keys:
    """The keys of a mapping, of which those that nobody has taken are named in the end."""

    def __init__(self, content: Mapping[str, Any] | None, name: str = "") -> None:
        self._left, self._name, self._inner = dict(content or {}), name, list[_Keys]()

    def take(self, key: str, usual: Any = None) -> Any:
        """A value; the usual one for a key that is not there, or empty."""
        found = self._left.pop(key, None)
        return usual if found is None else found

    def inside(self, key: str) -> _Keys:
        """The keys of an inner mapping."""
        return self.beside(f"{self._name}{key}", self.take(key))

    def beside(self, name: str, content: Mapping[str, Any] | None) -> _Keys:
        """The keys of another mapping, of which those that nobody has taken are named with these."""
        self._inner.append(_Keys(content, f"{name}."))
        return self._inner[-1]

    def note(self, name: str) -> None:
        """Name something else that has no counterpart."""
        self._left[name] = True

    def left(self) -> Iterator[str]:
        """The names of those that nobody has taken, and that say something."""
        yield from (f"{self._name}{key}" for key, value in self._left.items() if value not in (None, {}, [], "", False))
        for inner in self._inner:
            yield from inner.left()


def _finished(line: Line, *keys: _Keys) -> Line:
    """The line, with a note about the keys that have no counterpart."""
    if names := [name for one in keys for name in one.left()]:
        line.notes.append(f"left out: {', '.join(names)}")
    return line


def _flags(pairs: Mapping[str, Any]) -> Flags:
    """Flags with their values; those without one are left out."""
    return [
        (flag,) if value is True else (flag, str(value))
        for flag, value in pairs.items()
        if value not in (None, False, "")
    ]


def _variables(given: Any) -> Flags:
    """Variables: of a mapping or a list; those without a value, or with one that is kept elsewhere, are secrets."""
    if isinstance(given, dict):
        given = [name if it is None or isinstance(it, dict) else f"{name}={_text(it)}" for name, it in given.items()]
    return [("--env", it) if "=" in it else ("--secret", it) for it in map(str, given or ())]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _command(words: Any) -> str:
    """The text of a command that a shell would read, of the words with which a container starts."""
    words = [words] if isinstance(words, str) else [str(it) for it in words or ()]
    if len(words) > 2 and Path(words[0]).name in ("sh", "bash") and re.fullmatch(r"-\w*c", words[-2]):
        return str(words[-1])
    return shlex.join(words)


def _size(value: Any) -> str | None:
    """Memory as SkyPilot and dstack write it: GB, a least number with + or .. behind it."""
    found = re.match(r"(\d+(?:\.\d+)?)\s*([GMT]?)", str(value).upper().lstrip("."))
    return None if found is None else f"{found[1]}{found[2] or 'G'}i"


def _least(value: Any) -> str | None:
    """The least number of `8`, `8+` or `8..16`."""
    found = re.match(r"\d+", str(value))
    return None if found is None else found[0]


# -- the shell's -------------------------------------------------------------------------------------------------------


def _directives(text: str) -> list[str]:
    """The options in a batch script; like Slurm, none behind its first command."""
    head = itertools.takewhile(lambda line: not line.strip() or line.startswith("#"), text.splitlines())
    return [found[1] for line in head if (found := _BATCH.match(line))]


def _sbatch(text: str) -> Line:
    from .srun import SBATCH

    words = [word for it in _directives(text) for word in shlex.split(it, comments=True)]
    outer = parse(SBATCH, [*words, "SCRIPT"])
    outer.take("--no-python")
    line, is_launched = line_of(text, outer.flags)
    line.notes[:0] = outer.notes
    if not is_launched:  # the script itself runs once
        nodes = line.take("--nnodes") or "1"
        line.take("-n", "-np")
        if nodes != "1":
            line.notes.append(f"without srun, one of the {nodes} nodes runs it, so the job has one; see --nnodes")
    return line


# -- other clients -----------------------------------------------------------------------------------------------------


def _accelerators(given: Any) -> tuple[str, str]:
    """The name and the number of `A100:4`, of {A100: 4}, or of the first of a list of these."""
    first = given[0] if isinstance(given, list) and given else given or ""
    name, count = next(iter(first.items())) if isinstance(first, dict) else str(first).partition(":")[::2]
    return str(name), str(count or 1) if name else ""


def _sky(content: Document) -> Line:
    keys = _Keys(content)
    resources = keys.inside("resources")
    name, count = _accelerators(resources.take("accelerators"))
    image = str(resources.take("image_id", ""))
    folder = keys.take("workdir")
    flags = _flags(
        {
            "--name": keys.take("name"),
            "--nnodes": keys.take("num_nodes"),
            "--gpus": count,
            "--cpus": _least(resources.take("cpus", "")),
            "--memory": _size(resources.take("memory", "")),
            "--image": image.removeprefix("docker:"),
            "--sync-mode": folder and "snapshot",
            "--sync-source": None if folder == "." else folder,
            "--setup": str(keys.take("setup", "")).strip(),
        }
    )
    variables = _variables(keys.take("envs")) + [("--secret", str(it)) for it in keys.take("secrets", ())]
    line, _ = line_of(str(keys.take("run", "")), [*flags, *variables])
    _set_up_at_start(line)
    if name:
        line.notes.append(f"left out: {name} of its accelerators; --on says which machines")
    return _finished(line, keys)


def _set_up_at_start(line: Line) -> None:
    """Let the setup of a file run in the folder that its script leaves by `cd`."""
    at, first = line.get("--working-dir"), next((it for it in line.flags if it[0] == "--setup"), None)
    if at is None or first is None or os.path.abspath(at) == os.getcwd():
        return
    place = line.flags.index(first)
    follows = any(words[0] == "--setup" for words in line.flags[place + 1 :])
    entered = [("--setup", f"cd {shlex.quote(at)}")] * follows
    line.flags[place : place + 1] = [("--setup", f"cd {shlex.quote(os.getcwd())}"), first, *entered]


def _dstack(content: Document) -> Line:
    keys = _Keys(content)
    kind = keys.take("type")
    if kind != "task":
        raise UserError(f"type {kind}: a job of paceline trains; its tasks have a counterpart")
    resources = keys.inside("resources")
    gpu = resources.take("gpu", "")
    last = str(gpu.get("count", 1) if isinstance(gpu, dict) else gpu).rpartition(":")[2]  # of NAME:MEMORY:COUNT
    count = _least(last) if re.fullmatch(r"\d+(\.\.\d*)?", last) else last and "1"
    cpu = str(resources.take("cpu", "")).rpartition(":")[2]
    flags = _flags(
        {
            "--name": keys.take("name"),
            "--nnodes": keys.take("nodes"),
            "--image": keys.take("image"),
            "--working-dir": keys.take("working_dir"),
            "--gpus": count,
            "--cpus": _least(cpu),
            "--memory": _size(resources.take("memory", "")),
            "--time-limit": keys.take("max_duration"),
            "--priority": keys.take("priority"),
        }
    )
    commands = keys.take("commands", [])
    if not isinstance(commands, list):
        raise UserError("commands is one text; write it as a list, with - before each command")
    line, _ = line_of("\n".join(map(str, commands)), [*flags, *_variables(keys.take("env"))])
    return _finished(line, keys)


def _accelerate(content: Document) -> Line:
    from .accelerate import with_settings

    line = with_settings(content)
    line.verb, line.program = "submit", ["train.py"]
    line.notes.append("the file names no script; write yours in the place of train.py")
    return line


# -- Kubernetes --------------------------------------------------------------------------------------------------------


def _resources(given: Mapping[str, Any]) -> Flags:
    """What a container, or a worker of Arena's, asks for."""
    import math

    cores = str(given.get("cpu") or "")
    others = [f"{name}={it}" for name, it in given.items() if "/" in name and not _GPU.fullmatch(name)]
    count = float(cores.removesuffix("m")) / (1000 if cores.endswith("m") else 1) if cores else 0.0
    return _flags(
        {
            "--gpus": next((it for name, it in given.items() if _GPU.fullmatch(name)), None),
            "--cpus": math.ceil(count) or None,
            "--memory": given.get("memory"),
            "--resources": ",".join(others),
        }
    )


_REFERENCE = re.compile(r"\$(\$)?\(([\w.-]+)\)")


def _replaced(text: Any, values: Mapping[str, str]) -> str:
    """A text in which $(NAME) is replaced by a value that is known, and $$(NAME) is $(NAME), as in Kubernetes."""
    return _REFERENCE.sub(
        lambda it: it[0][1:] if it[1] else values.get(it[2], it[0]), text if isinstance(text, str) else _text(text)
    )


def _environment(keys: _Keys, given: Any) -> tuple[Flags, dict[str, str]]:
    """The variables of a container: flags, and the values that are known."""
    values: dict[str, str] = {}
    secrets = []
    for it in given or ():
        name, source = it["name"], it.get("valueFrom")
        if source is None:
            values[name] = _replaced(it.get("value") or "", values)
        elif "secretKeyRef" in source:
            secrets.append(name)
            keys.note(f"the Secret of {name} (paceline submit takes your own variable of that name)")
        else:
            keys.note(f"{name} (its value is from {', '.join(source)})")
    return [("--env", f"{name}={it}") for name, it in values.items()] + [("--secret", it) for it in secrets], values


def _mounted(keys: _Keys, own: _Keys, volumes: Any) -> Flags:
    """The volumes of a pod that a container mounts."""
    flags: Flags = []
    mounts = list(own.take("volumeMounts", ()))
    for volume in volumes:
        name = volume["name"]
        paths = [it["mountPath"] for it in mounts if it["name"] == name]
        if "persistentVolumeClaim" in volume and paths:
            flags += [("--data", f"{volume['persistentVolumeClaim']['claimName']}:{path}") for path in paths]
            ways = [
                key
                for it in mounts
                if it["name"] == name
                for key in ("subPath", "subPathExpr", "readOnly")
                if it.get(key)
            ]
            for key in dict.fromkeys(
                [*ways, *(["readOnly"] if volume["persistentVolumeClaim"].get("readOnly") else [])]
            ):
                keys.note(f"{key} of volume {name}")
        elif "/dev/shm" in paths:
            flags += _flags({"--share-memory": (volume.get("emptyDir") or {}).get("sizeLimit")})
        else:
            keys.note(f"volume {name}")
    return flags


def _container(keys: _Keys, template: Mapping[str, Any]) -> tuple[Flags, str]:
    """What the flags of a pod of a job are, and its command."""
    pod = keys.beside("template", template.get("spec"))
    containers = pod.take("containers", [{}])
    first = next((it for it in containers if it.get("name") in _MAIN), containers[0])
    own = keys.beside("container", first)
    for other in containers:
        if other is not first:
            keys.note(f"container {other.get('name')}")
    own.take("name")
    pod.take("restartPolicy")
    resources = own.take("resources", {})
    flags = _flags(
        {
            "--image": own.take("image"),
            "--working-dir": own.take("workingDir"),
            "--selector": ",".join(f"{name}={it}" for name, it in pod.take("nodeSelector", {}).items()),
            "--pull-secret": ",".join(it["name"] for it in pod.take("imagePullSecrets", ())),
            "--pull-policy": own.take("imagePullPolicy"),
            "--priority-class": pod.take("priorityClassName"),
            "--host-network": pod.take("hostNetwork"),
        }
    )
    flags += _resources({**(resources.get("requests") or {}), **(resources.get("limits") or {})})
    variables, values = _environment(keys, own.take("env"))
    flags += variables + _mounted(keys, own, pod.take("volumes", ()))
    command = own.take("command", ())
    words = [command] if isinstance(command, str) else [*command]
    return flags, _command([_replaced(it, values) for it in (*words, *own.take("args", ()))])


def _note_role(keys: _Keys, role: str, of_role: _Keys, own: Flags, common: Flags) -> None:
    """Name what stands only in a role whose pods are like the others here; values of variables are not shown."""
    left = set(keys.left())
    for name in of_role.left():
        if name not in left:
            keys.note(f"{name} of the {role}")
    for words in own:
        if words not in common:
            flag, value = words[0].removeprefix("--"), " ".join(words[1:])
            keys.note(f"{flag} {value.partition('=')[0] if flag == 'env' else value}".strip() + f" of the {role}")


def _metadata(keys: _Keys) -> Flags:
    """The name of an object, where it is, and its labels; it goes to the cluster."""
    metadata = keys.inside("metadata")
    labels = dict(metadata.take("labels", {}))
    flags = _flags(
        {
            "--on": "kubernetes",
            "--name": metadata.take("name") or metadata.take("generateName"),
            "--namespace": metadata.take("namespace"),
            "--queue": labels.pop(_QUEUE, None),
        }
    )
    return flags + [("--label", f"{name}={it}") for name, it in labels.items()]


def _policy(spec: _Keys) -> Flags:
    """How a job of kubeflow.org ends."""
    policy = spec.inside("runPolicy")
    limit, ttl = policy.take("activeDeadlineSeconds"), policy.take("ttlSecondsAfterFinished")
    return _flags(
        {
            "--time-limit": limit and f"{limit}s",
            "--ttl": ttl and f"{ttl}s",
            "--max-restarts": policy.take("backoffLimit"),
            "--clean-pods": str(policy.take("cleanPodPolicy", "")).lower(),
        }
    )


def _pytorchjob(content: Document) -> Line:
    keys = _kubernetes(content)
    flags, spec = _metadata(keys), keys.inside("spec")
    roles = spec.take("pytorchReplicaSpecs", {})
    chosen = roles.get("Worker") or roles["Master"]
    elastic = spec.inside("elasticPolicy")
    for name in ("rdzvBackend", "rdzvHost", "rdzvPort", "rdzvId", "rdzvConf", "standalone"):
        elastic.take(name)  # agents find each other without them
    nodes: Any = sum(int(it.get("replicas", 1)) for it in roles.values())
    least, most = elastic.take("minReplicas"), elastic.take("maxReplicas")
    if least is not None and most is not None:
        nodes = f"{least}:{most}"
    each = elastic.take("nProcPerNode")
    flags += _flags({"--nnodes": nodes, "-n": spec.take("nprocPerNode") or each}) + _policy(spec)
    flags += _flags({"--max-restarts": elastic.take("maxRestarts")})
    inner, text = _container(keys, chosen.get("template") or {})
    if (master := roles.get("Master")) is not None and master is not chosen:
        of_master = _Keys({})
        own, other = _container(of_master, master.get("template") or {})
        if other != text:
            raise UserError("Master and Worker have other commands; a job runs one program, so give both the same")
        _note_role(keys, "Master", of_master, own, inner)
        counts = [{it[0]: it[1] for it in one if len(it) > 1}.get("--gpus") for one in (own, inner)]
        if counts[0] is None and counts[1] is not None:
            keys.note("that the Master has no GPU")
    line, _ = line_of(text, [*flags, *inner])
    return _finished(line, keys)


def _mpijob(content: Document) -> Line:
    keys = _kubernetes(content)
    flags, spec = _metadata(keys), keys.inside("spec")
    roles = spec.take("mpiReplicaSpecs", {})
    for name in ("sshAuthMountPath", "mpiImplementation", "launcherCreationPolicy", "cleanPodPolicy"):
        spec.take(name)  # nodes need no sshd, and no pod is a launcher
    slots = spec.take("slotsPerWorker")
    flags += _flags({"--nnodes": roles["Worker"].get("replicas", 1), "-n": slots, "--framework": "mpi"}) + _policy(spec)
    launcher = _Keys({})
    own, text = _container(launcher, roles["Launcher"].get("template") or {})
    inner, _ = _container(keys, roles["Worker"].get("template") or {})
    names = {words[1].partition("=")[0] for words in own if words[0] in _OF_ENV}
    inner = [it for it in inner if it[0] not in _OF_ENV or it[1].partition("=")[0] not in names]
    inner += [it for it in own if it[0] in _OF_ENV]  # mpirun starts the ranks, and its variables win
    inner += [it for it in own if it[0] == "--working-dir" and "--working-dir" not in {one[0] for one in inner}]
    needless = ("--gpus", "--cpus", "--memory", "--resources")  # no pod is a launcher
    _note_role(keys, "Launcher", launcher, [it for it in own if it[0] not in needless], inner)
    line, _ = line_of(text, [*flags, *inner])
    return _finished(line, keys)


def _trainjob(content: Document) -> Line:
    keys = _kubernetes(content)
    flags, spec = _metadata(keys), keys.inside("spec")
    trainer = spec.inside("trainer")
    resources = trainer.take("resourcesPerNode", {})
    flags += _flags(
        {
            "--image": trainer.take("image"),
            "--nnodes": trainer.take("numNodes"),
            "-n": trainer.take("numProcPerNode"),
        }
    )
    flags += _resources({**(resources.get("requests") or {}), **(resources.get("limits") or {})})
    variables, values = _environment(trainer, trainer.take("env"))
    words = [_replaced(it, values) for it in (*trainer.take("command", ()), *trainer.take("args", ()))]
    line, _ = line_of(_command(words), flags + variables)
    return _finished(line, keys)


def _kubernetes(content: Document) -> _Keys:
    return _Keys({name: it for name, it in content.items() if name not in ("apiVersion", "kind", "status")})


def _arena(content: Document) -> Line:
    """Arena v2 counts workers without the master, which is one more like them; the flags of v1 count it among them."""
    keys = _Keys(content)
    framework, worker, master = keys.inside("framework"), keys.inside("worker"), keys.take("master", {})
    options, lifecycle, plan = framework.inside("options"), keys.inside("lifecycle"), keys.inside("scheduling")
    name = str(framework.take("name", ""))
    count = int(worker.take("replicas", 0))
    roles = {"--chief": bool(keys.take("chief")), "--evaluator": bool(keys.take("evaluator"))}
    servers = keys.take("ps", {})
    board = keys.inside("logging").inside("tensorboard")
    has_board = board.take("enabled", False)
    flags = _flags(
        {
            "--on": "kubernetes",
            "--name": keys.take("name"),
            "--namespace": keys.take("namespace"),
            "--image": keys.take("image"),
            "--working-dir": keys.take("working_dir"),
            "--nnodes": count + 1 if name == "pytorch" else count or None,
            "-n": options.take("nproc_per_node") or options.take("slots_per_worker"),
            "--framework": {"mpi": "mpi", "horovod": "horovod", "tensorflow": "tensorflow"}.get(name),
            "--chief": 1 if roles["--chief"] else None,
            "--ps": servers.get("replicas"),
            "--evaluator": 1 if roles["--evaluator"] else None,
            "--clean-pods": str(lifecycle.take("clean_pod_policy", "")).lower(),
            "--time-limit": lifecycle.take("active_deadline"),
            "--ttl": lifecycle.take("ttl_after_finished"),
            "--max-restarts": lifecycle.take("backoff_limit"),
            "--priority-class": plan.take("priority_class_name"),
            "--gang": plan.take("gang", {}).get("enabled") and "coscheduling",
            "--queue": plan.take("queue"),
            "--selector": ",".join(f"{label}={it}" for label, it in plan.take("node_selector", {}).items()),
            "--pull-policy": keys.take("image_pull_policy"),
            "--pull-secret": ",".join(keys.take("image_pull_secrets", ())),
            "--host-network": keys.take("host_network"),
            "--tensorboard": has_board,
            "--logdir": board.take("logdir") if has_board else None,
        }
    )
    for key in ("version", "description", "shell"):
        keys.take(key)
    options.take("mounts_on_launcher")  # no pod is a launcher
    flags += [("--label", f"{label}={it}") for label, it in keys.take("labels", {}).items()]
    flags += _resources(worker.take("resources") or master.get("resources") or {})
    flags += _variables({**keys.take("envs", {}), **worker.take("envs", {})})
    for storage in keys.take("storages", ()):
        if "pvc" in storage:
            flags.append(("--data", f"{storage['pvc']}:{storage['mount_path']}"))
        elif "shm" in storage:
            flags.append(("--share-memory", str(storage["shm"])))
        else:
            keys.note(f"storage {storage['name']}")
    for source in keys.take("sync", ())[:1]:
        mode = next((it for it in ("git", "rsync") if it in source), None)
        if mode is not None:
            at = f"@{source['branch']}" if source.get("branch") else ""
            flags += [("--sync-mode", mode), ("--sync-source", f"{source[mode]}{at}")]
    line, _ = line_of(str(keys.take("run", "")), flags)
    return _finished(line, keys)


_SKY = ("resources", "num_nodes", "setup", "envs", "secrets", "file_mounts", "workdir", "service")
_KUBEFLOW = {"PyTorchJob": _pytorchjob, "MPIJob": _mpijob, "TrainJob": _trainjob}
_KINDS: tuple[tuple[Callable[[Document], bool], str, Callable[[Any], Line]], ...] = (
    (
        lambda it: "apiVersion" in it and it.get("kind") in _KUBEFLOW,
        "{kind} of Kubeflow",
        lambda it: _KUBEFLOW[it["kind"]](it),
    ),
    (lambda it: isinstance(it.get("framework"), dict) and "run" in it, "a job of Arena v2", _arena),
    (lambda it: it.get("type") in ("task", "service", "dev-environment"), "a configuration of dstack", _dstack),
    (lambda it: "compute_environment" in it or "distributed_type" in it, "a configuration of accelerate", _accelerate),
    (lambda it: "run" in it and any(key in it for key in _SKY), "a task of SkyPilot", _sky),
)
