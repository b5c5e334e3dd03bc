"""Arena, the command line for training on Kubernetes.

Source: Arena 0.15, `pkg/argsbuilder/submit*.go` and `pkg/commands/`; the CLI reference of v2.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paceline.job.errors import UserError

from .cluster import CLUSTER, place, placed
from .engine import Ignored, Line, Refused, Tool, later, split_command
from .tools import unwrap

if TYPE_CHECKING:
    from .engine import Meaning

_WORKING_DIR = "/root"  # Arena's default
_LISTS = ("--selector", "--toleration", "--annotation", "--pull-secret", "--resources")
_SERVING = Refused("paceline trains, and serves no models")
_ROLES = Refused(
    "all nodes of a job run with the same image and resources; give them by --image, --cpu, --memory, --gpus"
)
_OF_TRAINING = Ignored("a name is that of one job, whatever its kind")


def _cores(line: Line, value: str) -> None:
    """Cores as Kubernetes counts them; paceline counts whole ones."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", value)
    if match is None:
        raise UserError(f"--cpu {value} is no number of cores; write for example --cpu 4")
    cores = float(match[1]) / (1000 if match[2] else 1)
    line.add("--cpus", str(max(1, -int(-cores // 1))))


_GLOBAL: dict[str, Meaning] = {
    "--loglevel LEVEL": Ignored("paceline's own lines have one level"),
    "--log-level LEVEL": Ignored("paceline's own lines have one level"),
    "-n --namespace NAME": "--namespace",
    "--arena-namespace --arenaNamespace NAME": Ignored("paceline installs nothing in the cluster"),
    "--config FILE": lambda line, value: line.before.append(f"KUBECONFIG={value}"),
    "--kubeconfig FILE": lambda line, value: line.before.append(f"KUBECONFIG={value}"),
    "--context NAME": "--context",
    "--debug": "",
    "--pprof": Ignored("paceline records no profile of its own; paceline profile JOB records one of a job"),
    "--trace": Ignored("paceline records no trace of its own"),
}
_COMMON: dict[str, Meaning] = {
    "--name NAME": "--name",
    "--image IMAGE": "--image",
    "--gpus N": "--gpus",
    "--workers N": "--nnodes",
    "--retry N": "--max-restarts",
    "--working-dir --workingDir DIR": "--working-dir",
    "-e --env NAME=VALUE": "--env",
    "-d --data CLAIM:/PATH": "--data",
    "--data-dir --dataDir PATH": Refused("name it as a volume of the job, with --data CLAIM:/PATH or --pod-template"),
    "-a --annotation NAME=VALUE": "--annotation",
    "-l --label NAME=VALUE": "--label",
    "--rdma": "--resources rdma/hca=1",
    "--gang": "--gang coscheduling",
    "-p --priority CLASS": "--priority-class",
    "--queue": Refused("name the Kueue queue, with --queue NAME of paceline submit"),
    "--toleration KEY=VALUE:EFFECT": "--toleration",
    "--selector NAME=VALUE": "--selector",
    "--device NAME=N": "--resources",
    "--config-file FILE:PATH": Refused("put the file into the code that is copied, or into a volume of --pod-template"),
    "--image-pull-secret NAME": "--pull-secret",
    "--image-pull-policy POLICY": "--pull-policy",
    "--shell SHELL": later,
    "--scheduler NAME": Refused("set schedulerName with --pod-template"),
    "--hostNetwork --host-network": "--host-network",
    "--hostIPC": Refused("set hostIPC with --pod-template"),
    "--hostPID": Refused("set hostPID with --pod-template"),
    "--sync-mode --syncMode MODE": "--sync-mode",
    "--sync-source --syncSource URL": "--sync-source",
    "--sync-image --syncImage IMAGE": "--git-image",
    "--tensorboard": "--tensorboard",
    "--tensorboard-image --tensorboardImage IMAGE": Ignored("the TensorBoard runs in the job's image"),
    "--logdir DIR": "--logdir",
    "--cpu N": _cores,
    "--memory SIZE": "--memory",
    "--share-memory SIZE": "--share-memory",
    "--running-timeout TIME": "--time-limit",
    "--ttl-after-finished TIME": "--ttl",
    "--clean-task-policy --cleanTaskPolicy POLICY": lambda line, value: line.add("--clean-pods", value.lower()),
    "--nproc-per-node N": "-n",
    "--job-restart-policy POLICY": Ignored("--max-restarts says how often ranks start again"),
    "--job-backoff-limit --backoff-limit N": "--max-restarts",
    "--model-name NAME": _SERVING,
    "--model-source URL": _SERVING,
}
_ET: dict[str, Meaning] = {
    **_COMMON,
    "--min-workers N": later,
    "--max-workers N": later,
    "--spot-instance": Ignored("ranks go on without nodes that are lost"),
    "--max-wait-time SECONDS": Ignored("a job waits until there is room; paceline stop ends that"),
    "--worker-restart-policy POLICY": Ignored("--max-restarts says how often ranks start again"),
    "--launcher-* NAME=VALUE": Ignored("no pod is a launcher"),
    "--worker-annotation NAME=VALUE": "--annotation",
    "--ssh-secret NAME": Ignored("nodes need no sshd"),
}
_MPI: dict[str, Meaning] = {
    **_COMMON,
    "--gputopology": Ignored("--placement pack prefers few nodes"),
    "--mounts-on-launcher": "",
    "--slots-per-worker N": "-n",
    "--ssh-port --sshPort PORT": Ignored("nodes need no sshd"),
    "--ssh-secret NAME": Ignored("nodes need no sshd"),
}
_TF: dict[str, Meaning] = {
    **_COMMON,
    "--worker-image --workerImage IMAGE": "--image",
    "--worker-cpu --workerCpu N": _cores,
    "--worker-cpu-limit N": _cores,
    "--worker-memory --workerMemory SIZE": "--memory",
    "--worker-memory-limit SIZE": "--memory",
    "--worker-port --workerPort PORT": Ignored("a free port is found"),
    "--worker-selector NAME=VALUE": "--selector",
    "--chief": "--chief 1",
    "--chief-port --chiefPort PORT": Ignored("a free port is found"),
    "--chief-cpu --ChiefCpu N": _ROLES,
    "--chief-cpu-limit N": _ROLES,
    "--chief-memory --ChiefMemory SIZE": _ROLES,
    "--chief-memory-limit SIZE": _ROLES,
    "--chief-selector NAME=VALUE": _ROLES,
    "--evaluator": "--evaluator 1",
    "--evaluator-cpu --evaluatorCpu N": _ROLES,
    "--evaluator-cpu-limit N": _ROLES,
    "--evaluator-memory --evaluatorMemory SIZE": _ROLES,
    "--evaluator-memory-limit SIZE": _ROLES,
    "--evaluator-selector NAME=VALUE": _ROLES,
    "--ps N": "--ps",
    "--ps-image --psImage IMAGE": _ROLES,
    "--ps-port --psPort PORT": Ignored("a free port is found"),
    "--ps-cpu --psCpu N": _ROLES,
    "--ps-cpu-limit N": _ROLES,
    "--ps-gpus N": _ROLES,
    "--ps-memory --psMemory SIZE": _ROLES,
    "--ps-memory-limit SIZE": _ROLES,
    "--ps-selector NAME=VALUE": _ROLES,
    "--role-sequence ROLES": Ignored("the order is chief, workers, parameter servers, evaluator"),
    "--success-policy POLICY": Ignored("a job succeeds when all ranks have, with --ps when rank 0 has"),
    "--starting-timeout TIME": Ignored("a job waits until there is room; paceline stop ends that"),
}


def _submitted(framework: str | None, flags: dict[str, Meaning]) -> Tool:
    """`arena submit KIND`."""

    def finish(line: Line) -> None:
        for flag in _LISTS:
            values = [words[1] for words in line.flags if words[0] == flag]
            if len(values) > 1:
                line.take(flag)
                line.add(flag, ",".join(values))
        _branch(line)
        if line.get("--gpus") == "0":
            line.take("--gpus")
        if "--min-workers" in line.given or "--max-workers" in line.given:
            workers = line.take("--nnodes") or "1"
            bounds = (line.given.get(flag, workers) for flag in ("--min-workers", "--max-workers"))
            line.add("--nnodes", ":".join(bounds))
        if framework is not None and line.get("--framework") is None:
            line.add("--framework", framework)
        split_command(line)
        if line.program[:2] == ["sh", "-c"]:
            line.program[0] = line.given.get("--shell") or "sh"
        unwrap(line)
        if line.get("--working-dir") is None and any(f"{_WORKING_DIR}/code/" in word for word in line.program):
            line.add("--working-dir", _WORKING_DIR)
        placed(line)

    return Tool("arena submit", flags, "submit", finish, is_mixed=True)


def _branch(line: Line) -> None:
    """The branch is a variable of Arena's container, and here a part of the source."""
    for words in [words for words in line.flags if words[0] == "--env"]:
        name, _, value = words[1].partition("=")
        if name in ("GIT_SYNC_BRANCH", "GIT_SYNC_REV") and (source := line.take("--sync-source")) is not None:
            line.flags.remove(words)
            line.add("--sync-source", f"{source}@{value}")


def _where(line: Line) -> None:
    """Arena's jobs are in the cluster, if there is one; so is a namespace."""
    if place(line) != CLUSTER and line.get("--namespace") is not None:
        line.take("--namespace")
        line.notes.append("--namespace has no effect: this machine knows no cluster; KUBECONFIG names its file")


def _cluster(line: Line) -> None:
    place(line)


def _got(line: Line) -> None:
    """`get`; with -e the events follow, with -g what the job uses."""
    _where(line)
    output = line.get("-o")
    for flag, verb in (("-e", "events"), ("-g", "top job")):
        if flag in line.given and output in ("json", "yaml"):
            line.notes.append(f"{flag} has no effect with -o {output}; see paceline {verb} {' '.join(line.program)}")
        elif flag in line.given:
            last = line
            while last.also is not None:
                last = last.also
            kept = [words for words in line.flags if words[0] in ("--on", "--namespace")]
            last.also = Line(verb, kept, line.program, before=line.before)


def _of_file(line: Line, value: str) -> None:
    """A file of v2 as a line."""
    from .files import read

    if (found := read(value)) is None:
        raise UserError(f"--file {value}: no file of Arena v2 is there; check its name")
    line.flags += found.line.flags
    line.program, line.notes = found.line.program, line.notes + found.line.notes


def _scaled(line: Line) -> None:
    _where(line)
    name = line.take("--name")
    if name is not None:
        line.program = [name]


_OUTPUT: dict[str, Meaning] = {"-o --output FORMAT": "-o", "-T --type KIND": _OF_TRAINING}
_SCALE: dict[str, Meaning] = {
    "--name NAME": "--name",
    "--count N": "--nnodes",
    "-t --timeout TIME": Ignored("paceline waits until the hosts have joined or left"),
    "--retry N": "",
    "--script FILE": Refused("the ranks save their state themselves before a host leaves"),
}
_LOGS: dict[str, Meaning] = {
    "-T --type KIND": _OF_TRAINING,
    "-f --follow": "-f",
    "-i --instance --pod NAME": "-i",
    "-c --container NAME": Ignored("the ranks of a job are in one container"),
    "-t --tail N": lambda line, value: line.add("-t", value) if value != "-1" else None,
    "--since TIME": "--since",
    "--since-time TIME": "--since",
    "--timestamps": "--timestamps",
}
_LIST = Tool(
    "arena list",
    {
        "-A --all-namespaces --allNamespaces": "-A",
        "-o --output FORMAT": "-o",
        "-T --type KIND": Refused("paceline list shows all kinds, with the column FRAMEWORK; leave it out"),
        "--all-users --allUsers": "",
    },
    "list",
    _where,
    is_mixed=True,
)
_TOP_NODE = Tool(
    "arena top node",
    {"-d --details": "-o wide", "-o --output FORMAT": "-o", "-r --refresh": "-w", "-m --mode MODE": ""},
    "top node",
    _cluster,
    is_mixed=True,
)
_TOP_JOB = Tool(
    "arena top job",
    {
        **_OUTPUT,
        "-r --refresh": "-w",
        "-A --all-namespaces": "",
        "-i --instance NAME": Ignored("all ranks are shown"),
        "-m --metrics": "",
    },
    "top job",
    _where,
    is_mixed=True,
)
_SUBMITTED = {
    **dict.fromkeys(("pytorch", "pytorchjob", "py", "deepspeed", "deepspeedjob"), _submitted(None, _COMMON)),
    **dict.fromkeys(("et", "etjob"), _submitted(None, _ET)),
    **dict.fromkeys(("tf", "tfjob", "tensorflow"), _submitted("tensorflow", _TF)),
    **dict.fromkeys(("mpi", "mpijob"), _submitted("mpi", _MPI)),
    **dict.fromkeys(("horovod", "horovodjob", "hj"), _submitted("horovod", _MPI)),
}
_GET = Tool("arena job get", {**_OUTPUT, "--details": ""}, "get", _where, is_mixed=True)
_V2 = {
    "run": Tool(
        "arena job run",
        {
            "-f --file FILE": _of_file,
            "--dry-run": "--dry-run",
            "--set KEY=VALUE": Refused("change the file, or write a flag of paceline submit"),
        },
        "submit",
    ),
    "submit": Tool("arena job submit", tools=_SUBMITTED),
    "list": _LIST,
    "get": _GET,
    "status": _GET,
    "logs": Tool("arena job logs", _LOGS, "logs", _where, is_mixed=True),
    "suspend": Tool("arena job suspend", {}, "suspend", _where, is_mixed=True),
    "resume": Tool("arena job resume", {}, "resume", _where, is_mixed=True),
    "delete": Tool("arena job delete", {}, "delete --force", _where, is_mixed=True),
}

ARENA = Tool(
    "arena",
    _GLOBAL,
    tools={
        "submit": Tool("arena submit", tools=_SUBMITTED),
        "list": _LIST,
        "ls": _LIST,
        "get": Tool("arena get", {**_OUTPUT, "-e --events": "", "-g --gpu": ""}, "get", _got, is_mixed=True),
        "logs": Tool("arena logs", _LOGS, "logs", _where, is_mixed=True),
        "job": Tool("arena job", tools=_V2),
        "check": Tool("arena check", {}, "check", _cluster),
        "attach": Tool("arena attach", {**_OUTPUT, "-i --instance NAME": "-i"}, "attach", _where, is_mixed=True),
        "delete": Tool("arena delete", {"-T --type KIND": _OF_TRAINING}, "delete --force", _where, is_mixed=True),
        "prune": Tool(
            "arena prune",
            {"-s --since TIME": "-s", "-A --all-namespaces": Refused("name one namespace after the other, with -n")},
            "prune",
            _where,
            is_mixed=True,
        ),
        "top": Tool("arena top", tools={"node": _TOP_NODE, "nodes": _TOP_NODE, "job": _TOP_JOB, "jobs": _TOP_JOB}),
        "data": Tool("arena data", tools={"list": Tool("arena data list", {}, "data list", _cluster, is_mixed=True)}),
        "scaleout": Tool(
            "arena scaleout", tools={"etjob": Tool("arena scaleout", _SCALE, "scaleout", _scaled, is_mixed=True)}
        ),
        "scalein": Tool(
            "arena scalein", tools={"etjob": Tool("arena scalein", _SCALE, "scalein", _scaled, is_mixed=True)}
        ),
        "logviewer": Refused("paceline logs JOB shows all lines, and paceline get JOB how a job stands"),
        "cron": Refused("paceline has no timer; put paceline submit into a CronJob or a crontab"),
        "serve": _SERVING,
        "model": _SERVING,
        "evaluate": Refused("submit the evaluation as a job of its own"),
        "version": Refused("write paceline --version"),
        "whoami": Refused("kubectl auth whoami says it"),
        "completion": Refused("see paceline --help"),
    },
)
