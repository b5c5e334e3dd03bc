"""mpirun (mpiexec, orterun) of Open MPI.

Source: `mpirun --help` of Open MPI 4 and 5.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from paceline.job.errors import UserError

from .engine import BINDING, PYTHON, Ignored, Line, Refused, Tool, say_program

UNSET = "-x {} has no effect: it is not set here"
_IMPORT = re.compile(r"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)


def _variable(line: Line, value: str) -> None:
    """-x NAME passes a variable on, -x NAME=VALUE sets it."""
    if "=" in value:
        line.add("--env", value)
    elif value in os.environ:
        line.add("--secret", value)
    else:
        line.notes.append(UNSET.format(value))


def _limit(line: Line, value: str) -> None:
    line.add("--time-limit", f"{value}s" if value.isdecimal() else value)


def _stdin(line: Line, value: str) -> None:
    """One rank reads the standard input; none does without the flag."""
    if value == "all":
        raise UserError("--stdin all: one rank reads standard input, as with --stdin 0; let the others open a file")
    if value != "none":
        line.add("--stdin", value)


def _parameter(line: Line, value: str) -> None:
    """A parameter of Open MPI is a variable of the ranks; the port of sshd is one of paceline's flags."""
    name, _, text = value.partition(" ")
    port = re.fullmatch(r"-p\s*(\d+)", text.strip())
    if name == "plm_rsh_args" and port is not None:
        line.add("-p", port[1])
    elif name.startswith(("plm_", "orte_", "prte_", "ras_", "rmaps_")):
        line.notes.append(f"-mca {name} has no effect: paceline starts the ranks itself")
    else:
        line.add("--env", f"OMPI_MCA_{name}={text}")


def _map_by(line: Line, value: str) -> None:
    """ppr:N:node is N ranks on each host; `node` gives ranks to hosts by turns, which `finish` looks at."""
    kind, count, where = (*value.lower().split(":"), "", "")[:3]
    if kind == "ppr" and where != "node":
        raise UserError(f"--map-by {value}: {_EACH}")
    if kind == "ppr":
        line.add("-n", count)
    else:
        line.notes.append(f"--map-by has no effect: {_NUMBERED}")


def _spread(line: Line) -> None:
    """How many ranks each host has: without -N, as many as it has slots, and the first hosts first."""
    ranks, each = line.get("-np"), line.get("-n")
    hosts = f"{line.get('-H') or ''}{',' if line.get('--hostfile') is not None else ''}"
    by_turns = "-bynode" in line.given or line.given.get("-map-by", "").lower().partition(":")[0] == "node"
    if by_turns and "," in hosts:
        raise UserError(f"--map-by node: {_NUMBERED}; leave it out, and write -N N for the ranks on each host")
    if ranks is None or each is None:
        return
    if not hosts:
        line.take("-n")
        line.notes.append("-N has no effect beside -np: -H HOST:SLOTS says how many ranks a host has")
        return
    if not (ranks + each).isdecimal() or int(ranks) % (int(each) or 1):
        raise UserError(f"-np {ranks} with {each} on each host: it does not divide them; write -H HOST:SLOTS,…")
    line.take("-np")
    line.add("--nnodes", str(int(ranks) // (int(each) or 1)))


def _finish(line: Line) -> None:
    """Say what the program is."""
    if ":" in line.program:
        raise UserError("mpirun A : B starts two programs; a job runs one program, so start one job for each")
    _spread(line)
    say_program(line)
    if line.get("--framework") is None and line.program and _needs_mpi(line):
        line.add("--framework", "mpi")


def _needs_mpi(line: Line) -> bool:
    """Whether Open MPI is to connect the ranks: for programs, and scripts that read its variables, or whose imports do.

    Scripts that import mpi4py get it in any case; those of Horovod and torch need none.
    """
    words = line.program[1:] if PYTHON.fullmatch(os.path.basename(line.program[0])) else line.program
    scripts = [word for word in words if word.endswith(".py")]
    if not scripts:
        return words == line.program and line.get("-m") is None
    script = Path(line.get("--working-dir") or ".", scripts[0])
    own = _text(script)
    beside = [script.with_name(name) for name in _IMPORT.findall(own)]
    imported = [path for module in beside for path in (module.with_suffix(".py"), *module.glob("*.py"))]
    return any("OMPI_COMM_WORLD" in text for text in (own, *map(_text, imported)))


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


_NUMBERED = Ignored("ranks are numbered host by host, as many on each as it has slots")
_EACH = Refused("-n N says how many ranks each host has")
_DEBUGGED = Refused("start it without; paceline attach JOB opens a shell in the place of a rank")
_OWN = Ignored("it is about Open MPI's own daemons, and paceline starts the ranks itself")
_SWITCHES = (
    "continuous", "d", "debug-daemons", "debug-daemons-file", "debug-devel", "disable-recovery",
    "display-devel-allocation", "display-devel-map", "display-diffable-map", "display-topo", "do-not-launch",
    "do-not-resolve", "enable-instant-on-support", "fwd-mpirun-port", "get-stack-traces", "index-argv-by-rank",
    "leave-session-attached", "noprefix", "novm", "output-proctable", "report-child-jobs-separately",
    "report-state-on-timeout", "set-cwd-to-session-dir", "show-progress", "use-regexp", "xml",
)  # fmt: skip
_OPTIONS = (
    "dvm", "hnp", "launch-agent", "max-vm-size", "ompi-server", "personality", "report-events", "report-pid",
    "report-uri", "xml-file",
)  # fmt: skip

MPIRUN = Tool(
    "mpirun",
    {
        "-np -n -c --np --n N": "-np",
        "-H -host --host HOST:SLOTS,…": "-H",
        "-hostfile --hostfile -machinefile --machinefile -default-hostfile --default-hostfile FILE": "--hostfile",
        "-N -npernode --npernode N": "-n",
        "-pernode --pernode": "-n 1",
        # of MPICH and Intel MPI
        "-ppn -perhost N": "-n",
        "-f FILE": "--hostfile",
        "-hosts HOSTS": "-H",
        "-env -genv NAME VALUE": lambda line, value: line.add("--env", value.replace(" ", "=", 1)),
        "-npersocket --npersocket -ppr --ppr N": _EACH,
        "-nolocal --nolocal": Refused("name the hosts with -H, without this one"),
        "-x NAME[=VALUE]": _variable,
        "-mca --mca -gmca --gmca --prtemca --pmixmca KEY VALUE": _parameter,
        "-wdir --wdir -wd --wd DIR": "--working-dir",
        "-bind-to --bind-to WHAT": BINDING,
        "-bind-to-core --bind-to-core -bind-to-socket --bind-to-socket": BINDING,
        "-cpu-set --cpu-set -cpu-list --cpu-list -cf -cartofile --cartofile WHAT": BINDING,
        "-map-by --map-by HOW": _map_by,
        "-bynode --bynode": _NUMBERED,
        "-byslot --byslot -bycore --bycore -bysocket --bysocket": _NUMBERED,
        "-rank-by --rank-by HOW": Ignored("ranks are numbered host by host"),
        "-cpus-per-rank --cpus-per-rank -cpus-per-proc --cpus-per-proc N": BINDING,
        "-report-bindings --report-bindings": BINDING,
        "-rf -rankfile --rankfile FILE": Refused("ranks are numbered host by host; give the hosts in this order"),
        "-allow-run-as-root --allow-run-as-root": "",
        "-oversubscribe --oversubscribe": Ignored("-H HOST:SLOTS says how many ranks a host has"),
        "-nooversubscribe --nooversubscribe": "",
        "-tag-output --tag-output -l": "--tee all",
        "-timestamp-output --timestamp-output": Ignored("times are kept; see paceline logs --timestamps"),
        "-merge-stderr-to-stdout --merge-stderr-to-stdout": Ignored("2>&1 behind the line does it"),
        "-output-filename --output-filename DIR": "--output-filename",
        "-stdin --stdin RANK|all|none": _stdin,
        "-display-map --display-map -display-allocation --display-allocation": Ignored("--dry-run shows it"),
        "-prefix --prefix DIR": Ignored("what is on PATH of a host is used"),
        "-use-hwthread-cpus --use-hwthread-cpus": BINDING,
        "-timeout --timeout SECONDS": _limit,
        "-enable-recovery --enable-recovery": Ignored("--max-restarts N starts all ranks again"),
        "-max-restarts --max-restarts N": "--max-restarts",
        "-s -preload-binary --preload-binary": Refused("--sync-mode snapshot copies a job's code"),
        "-preload-files --preload-files FILES": Refused("--sync-mode snapshot copies a job's code"),
        "-path --path DIRS": Refused("--env PATH=… sets it"),
        "-xterm --xterm RANKS": _DEBUGGED,
        "-tv --tv -debug --debug": _DEBUGGED,
        "-debugger --debugger COMMAND": _DEBUGGED,
        "-tune --tune -am FILE": Refused("give its parameters with -mca"),
        "-app --app FILE": Refused("a job runs one program; start one job for each"),
        "-q -quiet --quiet": "",
        "-v -verbose --verbose": "-v",
        "-V --version": Refused("write paceline --version"),
        **{f"-{name} --{name}": _OWN for name in _SWITCHES},
        **{f"-{name} --{name} VALUE": _OWN for name in _OPTIONS},
    },
    finish=_finish,
)
