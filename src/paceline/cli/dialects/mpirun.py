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


def _finish(line: Line) -> None:
    """Say what the program is."""
    if ":" in line.program:
        raise UserError("mpirun A : B starts two programs; a job runs one program, so start one job for each")
    if line.get("-np") is not None and line.take("-n") is not None:
        line.notes.append("-N has no effect beside -np: -H HOST:SLOTS says how many ranks a host has")
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
        "-npersocket --npersocket -ppr --ppr N": Refused("-n N says how many ranks each host has"),
        "-nolocal --nolocal": Refused("name the hosts with -H, without this one"),
        "-x NAME[=VALUE]": _variable,
        "-mca --mca -gmca --gmca --prtemca --pmixmca KEY VALUE": _parameter,
        "-wdir --wdir -wd --wd DIR": "--working-dir",
        "-bind-to --bind-to WHAT": BINDING,
        "-bind-to-core --bind-to-core -bind-to-socket --bind-to-socket": BINDING,
        "-cpu-set --cpu-set -cpu-list --cpu-list -cf -cartofile --cartofile WHAT": BINDING,
        "-map-by --map-by HOW": _NUMBERED,
        "-bynode --bynode -byslot --byslot -bycore --bycore -bysocket --bysocket": _NUMBERED,
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
