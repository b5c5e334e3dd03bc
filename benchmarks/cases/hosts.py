"""Several hosts over ssh: the time until they work together, `list` and `top`, and the output of their ranks.

The hosts are those of the tests, network namespaces of this machine, so they share its cores and its clock.
"""

from __future__ import annotations

import itertools
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence

from tests.backends.environments.wheels import wheel

from ..case import Case, Goal, Side
from ..lab import HOSTS, SCRIPTS, TARGETS, TIMEOUT, Lab, installed
from ..lines import check, gates, reading
from ..sample import Failed, Sample

PACELINE = installed("paceline")
ALLREDUCE, SUM, NOTHING = (str(SCRIPTS / f"{name}.py") for name in ("first_allreduce", "first_sum", "nothing"))
LINES = 10_000  # of each host
_SHARED = "-o ControlMaster=auto -o ControlPersist=60 -o ControlPath=$XDG_RUNTIME_DIR/%C"
_PORTS = itertools.count(20_000)  # nothing else listens in the hosts' network

Launcher = Callable[[Lab, int, Sequence[str]], list[str]]  # the command line that runs a script on the first hosts


# -- launchers: one rank per host --------------------------------------------------------------------------------------


def _submit(lab: Lab, count: int, script: Sequence[str]) -> list[str]:
    return paceline(lab, "submit", "--on", f"lab{count}", "--nnodes", str(count), *script)


def _torchrun(lab: Lab, count: int, script: Sequence[str]) -> list[str]:
    port = next(_PORTS)

    def remote(rank: int) -> list[str]:
        meeting = ["--master-addr", lab.hosts().hosts[0].address, "--master-port", str(port)]
        nodes = ["--nnodes", str(count), "--node-rank", str(rank), "--nproc-per-node", "1"]
        return ["env", "GLOO_SOCKET_IFNAME=eth0", installed("torchrun"), *nodes, *meeting, *script]

    return each(lab, count, remote)


def _plain(lab: Lab, count: int, script: Sequence[str]) -> list[str]:
    port = next(_PORTS)

    def remote(rank: int) -> list[str]:
        return ["env", f"RANK={rank}", f"WORLD_SIZE={count}", *_meeting(lab, port), sys.executable, *script]

    return each(lab, count, remote)


def _mpirun(lab: Lab, count: int, script: Sequence[str], *flags: str) -> list[str]:
    hosts = ",".join(host.address for host in lab.hosts().hosts[:count])
    network = list(
        itertools.chain.from_iterable(("--mca", f"{part}_tcp_if_include", "10.77.0.0/24") for part in ("oob", "btl"))
    )
    variables = ["env", *_meeting(lab, next(_PORTS))]
    place = ["--allow-run-as-root", "-np", str(count), "-H", hosts, "--map-by", "ppr:1:node", *network]
    return [*lab.hosts().enter(), "mpirun", *place, *flags, *variables, sys.executable, *script]


def _meeting(lab: Lab, port: int) -> list[str]:
    return [f"MASTER_ADDR={lab.hosts().hosts[0].address}", f"MASTER_PORT={port}", "GLOO_SOCKET_IFNAME=eth0"]


def paceline(lab: Lab, *args: str) -> list[str]:
    return [*lab.hosts().enter(), PACELINE, *args]


def each(lab: Lab, count: int, remote: Callable[[int], Sequence[str]], options: str = "", after: str = "") -> list[str]:
    """A shell that runs ssh for each of the first hosts in parallel; it fails if one of them does."""
    lines = []
    for rank, host in enumerate(lab.hosts().hosts[:count]):
        command = shlex.quote(shlex.join(remote(rank)))
        lines.append(f'ssh {options} -o BatchMode=yes {host.name} {command} {after.format(rank)} & pids="$pids $!"')
    return [*lab.hosts().enter(), "sh", "-c", "\n".join([*lines, "for pid in $pids; do wait $pid || exit; done"])]


# -- until the first all-reduce ----------------------------------------------------------------------------------------


def _first(launcher: Launcher, count: int, script: str) -> Callable[[Lab], Sample]:
    """From the command until the last rank has the sum; with new connections, but with files copied before."""

    def measure(lab: Lab) -> Sample:
        address = lab.folder / "reports"
        address.unlink(missing_ok=True)
        command = launcher(lab, count, [script, str(address)])
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
            reports.bind(str(address))
            began = time.monotonic()
            with lab.started(command) as job:
                if launcher is _submit:
                    job.finish()
                    reports.settimeout(TIMEOUT)
                    times = [_report(reports) for _ in range(count)]
                else:
                    times = [float(job.receive(reports)) for _ in range(count)]
                    job.finish()
        return Sample(max(times) - began)

    return measure


def _report(reports: socket.socket) -> float:
    try:
        return float(reports.recv(64))
    except TimeoutError:
        raise Failed(f"a rank reported nothing for {TIMEOUT:g} s") from None


def _allreduce(count: int, label: str, other: Launcher) -> Case:
    name, work = f"hosts-{count}-{label}", f"{count} hosts: from the command to the first all-reduce"
    sides = Side("paceline submit", _first(_submit, count, ALLREDUCE)), Side(label, _first(other, count, ALLREDUCE))
    return Case(name, work, *sides, once=count == HOSTS)


def _sum(count: int, label: str, other: Launcher) -> Case:
    name, work = f"hosts-{count}-sum-{label}", f"{count} hosts: from the command to a sum, without a framework"
    return Case(
        name, work, Side("paceline submit", _first(_submit, count, SUM)), Side(label, _first(other, count, SUM))
    )


# -- list and top ------------------------------------------------------------------------------------------------------


def _once(command: Callable[[Lab], list[str]]) -> Callable[[Lab], Sample]:
    """A command with new connections."""

    def measure(lab: Lab) -> Sample:
        return Sample(lab.timed(command(_with_a_job(lab))).seconds)

    return measure


def _again(command: Callable[[Lab], list[str]]) -> Callable[[Lab], Sample]:
    """A command soon after the same one, which has left its connections open."""

    def measure(lab: Lab) -> Sample:
        line = command(_with_a_job(lab))
        return Sample(lab.answer([sys.executable, str(SCRIPTS / "again.py"), *line]))

    return measure


def _with_a_job(lab: Lab) -> Lab:
    """The lab after a job that has run on all hosts."""
    if not list(lab.hosts().hosts[-1].home.glob(".local/state/paceline/hosts/*/jobs/seed")):
        with lab.started(_submit(lab, HOSTS, ["--name", "seed", NOTHING])) as job:
            job.finish()
            with lab.started(paceline(lab, "wait", "--on", f"lab{HOSTS}", "seed")) as waiting:
                waiting.finish()
    return lab


def _look(name: str, *verb: str) -> list[Case]:
    def ours(lab: Lab) -> list[str]:
        return paceline(lab, *verb, "--on", f"lab{HOSTS}")

    def other(options: str) -> Callable[[Lab], list[str]]:
        return lambda lab: each(lab, HOSTS, lambda _: ["true"], options)

    work, label = f"paceline {' '.join(verb)} of {HOSTS} hosts", "ssh true in parallel"
    return [
        Case(f"{name}-cold", work, Side(name, _once(ours)), Side(label, _once(other("")))),
        Case(f"{name}-warm", f"{work}, connected", Side(name, _again(ours)), Side(label, _again(other(_SHARED)))),
    ]


# -- output of ranks ---------------------------------------------------------------------------------------------------


def _lines(command: Callable[[Lab, list[str]], Sequence[str]], lossy: bool = False) -> Callable[[Lab], Sample]:
    """The time until all lines of all hosts have arrived; if not `lossy`, none may be lost or torn."""

    def measure(lab: Lab) -> Sample:
        path = lab.folder / "gate"
        with gates(path) as gate:
            line = command(lab, [str(SCRIPTS / "write_lines.py"), str(path), str(LINES)])
            with reading(lab, line) as reader:
                seconds = gate.measure(reader, HOSTS, LINES, lossy)
        if not lossy:
            check(reader.text, HOSTS, LINES)
        return Sample(seconds)

    return measure


def _followed(lab: Lab, script: list[str]) -> list[str]:
    """Start a job, and then follow it."""
    name = f"lines-{time.monotonic_ns()}"
    submit = shlex.join(_submit(lab, HOSTS, ["--name", name, *script]))
    follow = shlex.join(paceline(lab, "logs", "--on", f"lab{HOSTS}", "-f", "--all", name))
    return ["sh", "-c", f"{submit} >&2 && exec {follow}"]


def _plainly(after: str = "") -> Callable[[Lab, list[str]], list[str]]:
    def command(lab: Lab, script: list[str]) -> list[str]:
        return each(lab, HOSTS, lambda rank: ["env", f"RANK={rank}", sys.executable, *script], after=after)

    return command


def _tagged(lab: Lab, script: list[str]) -> list[str]:
    return _mpirun(lab, HOSTS, script, "--tag-output")


# -- packages on the hosts ---------------------------------------------------------------------------------------------


def _with_packages(*flags: str) -> Callable[[Lab], Sample]:
    """Run a script that does nothing; the warm-up has installed the packages."""

    def measure(lab: Lab) -> Sample:
        folder = lab.folder / "wheels"
        if not folder.exists():
            wheel(folder, "first")
        given = [flag.format(folder) for flag in flags]
        return lab.timed(paceline(lab, "run", "--on", "lab2", "--nnodes", "2", *given, NOTHING))

    return measure


_WRITTEN = f"{HOSTS * LINES:,} lines of {HOSTS} hosts come through a pipe"
_FOLLOW = Side("logs -f --all", _lines(_followed))
CASES = [
    *(_allreduce(count, "torchrun", _torchrun) for count in TARGETS),
    *(_allreduce(count, "mpirun", _mpirun) for count in TARGETS),
    *(_sum(count, "ssh", _plain) for count in TARGETS),
    *(_sum(count, "mpirun", _mpirun) for count in TARGETS),
    *_look("hosts-list", "list"),
    *_look("hosts-top", "top", "node"),
    Case(
        "hosts-environment",
        "2 hosts: run of a script that does nothing, with packages that are installed there",
        Side("--environment", _with_packages("--environment", "{}")),
        Side("without", _with_packages()),
        Goal(beyond=0.3),
    ),
    Case("hosts-lines-ssh", _WRITTEN, _FOLLOW, Side("ssh, ranks not shown", _lines(_plainly(), lossy=True))),
    Case("hosts-lines-sed", _WRITTEN, _FOLLOW, Side("ssh and sed -u", _lines(_plainly("| sed -u 's/^/[rank {}] /'")))),
    Case(
        "hosts-lines-mpirun",
        _WRITTEN,
        _FOLLOW,
        Side("mpirun --tag-output, which loses and tears lines", _lines(_tagged, lossy=True)),
    ),
]
