"""Many hosts for one client: an `ssh` in front of PATH that answers as hosts do, at the cost of one small shell each.

A host is a name. It says that it has started its part of a job, and what it was asked about it; nothing runs anywhere.
`python -m tests.backends.ssh.many COUNT` prints what verbs cost the client.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.backends.remote.bootstrap import BEGINS

if TYPE_CHECKING:
    from collections.abc import Sequence

_FACTS = {
    "address": "@HOST@", "names": [], "free": 1, "machine": "@HOST@", "port": 29500, "has_checkpoint": False,
    "notes": [], "python": {"version": "3.11.7"}, "packages": {}, "disks": [], "listens": 40000,
}  # fmt: skip
_JOB: dict[str, Any] = {
    "name": "it", "backend": "local", "framework": None, "nodes": 0, "ranks": 0, "created": 0.0, "max_restarts": 0,
    "devices_asked": None, "resume_from": None, "priority": 0, "queue": None, "labels": {}, "options": {}, "ttl": None,
    "grace": 30.0, "command": "/bin/sleep 30", "working_dir": "/", "folder": "/jobs/it", "code": None, "data": [],
    "tensorboard": None, "environment": None,
}  # fmt: skip
_PART: dict[str, Any] = {
    "state": "@STATE@", "alive": "@ALIVE@", "why": "", "host": "@HOST@", "node_rank": "@RANK@", "has_begun": True,
    "is_in_attempt": True,
    "nodes": 0, "ranks": 0, "job_id": "@ID@", "hosts": [], "is_elastic": False, "attempt": 0, "restarts": 0,
    "exit_code": None, "started": 0.0, "finished": None, "noticed": None, "instances": [
        {"name": "it-worker-@RANK@", "node": "@HOST@", "rank": "@RANK@", "state": "@STATE@", "pid": 4711,
         "exit_code": None},
    ], "failing_rank": None, "error": None, "cause": None, "advice": None, "fault": None, "traceback": None,
    "waiting": None, "devices": [], "progress": None, "checkpoint": None, "slow": [], "pace": None,
}  # fmt: skip
_NODE: dict[str, Any] = {
    "name": "@HOST@", "devices": ["slot 0"], "allocated": {}, "cores": 2.0, "load": 0.1, "memory": 8 << 30,
    "memory_used": 4 << 30, "disk": 0, "disk_used": 0, "gpus": [],
}  # fmt: skip
_SSH = """#!/bin/sh
case " $* " in *" -O "*) exit 0;; esac
for last; do host=$name; name=$last; done
rank=$((${{host##*[!0-9]}} - 1)); cd {folder}
if [ -e silent/$host ]; then exec sleep 600; fi
read -r program; read -r order; read -r request
say() {{ printf '%s\\n' "$1"; }}
write() {{
    line=0
    while [ $line -lt {lines} ]; do
        text="$host $line"
        say "{{$1, \\"bytes\\": $((${{#text}} + 1))}}
$text"
        line=$((line + 1))
    done
}}
now() {{ read -r up rest < /proc/uptime; say "{{\\"now\\": $(({booted} + ${{up%.*}})).${{up#*.}}}}"; }}
say {begins}
say '{{"need": false}}'
while :; do
id=none; [ -e id ] && read -r id < id
case $request in *'"do": "start"'*) id=${{request#*'"job_id": "'}}; id=${{id%%'"'*}}; say "$id" > id;; esac
facts={facts}
state=RUNNING; alive=true
if [ -e stopped/$host ]; then state=STOPPED alive=null; fi
report={report}
node={node}
case $request in
*'"do": "preflight"'*)
    say "$facts"
    while read -r order; do
        case $order in
        *clock*) now;;
        *) say "$order" > asked/$host; say '{{"reached": {{}}}}';;
        esac
    done;;
*'"do": "start"'*)
    say "{{\\"started\\": \\"it\\", \\"ranks\\": 1, \\"host\\": \\"$host\\", \\"report\\": $report}}"
    read -r order
    case $order in
    keep) say "{{\\"kept\\": $report}}"; read -r order;;
    hold)
        write "\\"output\\": [0, $rank, 0, \\"out\\"]"
        while [ ! -e over ] && [ {lines} = 0 ]; do read -r order || exit; done
        say '{{"event": "finished", "details": {{"time": 1.0, "state": "SUCCEEDED", "exit_code": 0, "failure": null, "others": [], "took": 0.1}}}}'
        say '{{"gone": 0, "pid": 4711, "log": "/log"}}';;
    esac
    say '{{"end": true}}'; while read -r order; do :; done;;
*'"do": "describe"'*)
    say once >> described/$host
    if [ $id = none ]; then say '{{"jobs": [], "names": []}}'; else say "{{\\"jobs\\": [$report], \\"names\\": [\\"it\\"]}}"; fi;;
*'"do": "plan"'*)
    say "{{\\"job\\": {{\\"name\\": \\"it\\", \\"framework\\": null, \\"script\\": \\"train.py\\"}}, \\"node\\": {{\\"address\\": \\"$host\\", \\"slots\\": 1}}, \\"ranks\\": []}}";;
*'"do": "nodes"'*) say "{{\\"node\\": $node}}";;
*'"do": "events"'*) say '{{"events": []}}';;
*'"do": "stop"'*) say it > stopped/$host; say '{{"names": ["it"]}}';;
*'"do": "logs"'*)
    say '{{"begin": true}}'
    write "\\"lines\\": [1.0, 0, $rank, \\"o\\"]"
    say '{{"end": true}}';;
*'"do": "wait"'*) say '{{"ended": "it"}}'; say '{{"end": true}}';;
*) say '{{"error": "a stand-in does not know this request"}}';;
esac
case $request in *'"stays": true'*) read -r request || exit 0;; *) exit 0;; esac
done
"""  # noqa: E501


def _quoted(value: Any) -> str:
    """A value as a word of the shell, in which each host puts in what is its own."""
    text = json.dumps(value).replace("\\", "\\\\").replace('"', '\\"')
    for name in ("rank", "alive"):  # no strings
        text = text.replace(f'\\"@{name.upper()}@\\"', f"${name}")
    for name in ("rank", "host", "id", "state"):
        text = text.replace(f"@{name.upper()}@", f"${name}")
    return f'"{text}"'


class ManyHosts:
    """Hosts h1, h2, …, and a home for clients.

    Attributes:
        folder: of all that they are made of.
        names: theirs.
        env: the environment in which a client has them as its target `many`.
    """

    def __init__(self, folder: Path, count: int, lines: int = 0) -> None:
        """Make them.

        Args:
            lines: how many lines each writes; with 0, jobs in the foreground run until they are told to end.
        """
        self.folder = folder
        self.names = [f"h{number}" for number in range(1, count + 1)]
        for name in ("silent", "asked", "described", "stopped", "bin", "run"):
            (folder / name).mkdir(mode=0o700)
        now = time.time()
        job = {**_JOB, "nodes": count, "ranks": count, "created": now}
        part = {**_PART, "nodes": count, "ranks": count, "started": now, "hosts": self.names}
        program = folder / "bin" / "ssh"
        program.write_text(
            _SSH.format(
                begins=BEGINS, folder=folder, lines=lines, booted=int(now - time.clock_gettime(time.CLOCK_BOOTTIME)),
                facts=_quoted(_FACTS), report=_quoted({"job": job, "part": part}), node=_quoted(_NODE),
            )
        )  # fmt: skip
        program.chmod(0o755)
        (folder / "paceline.toml").write_text(f'[targets.many]\nbackend = "ssh"\nhosts = {json.dumps(self.names)}\n')
        self.env = {
            **os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PACELINE_HOME": str(folder / "home"),
            "XDG_CONFIG_HOME": str(folder / "config"), "XDG_RUNTIME_DIR": "",
        }  # fmt: skip

    def silence(self, names: Sequence[str]) -> None:
        """Let these hosts accept a connection, and say nothing."""
        for name in names:
            (self.folder / "silent" / name).touch()

    def stopped(self) -> set[str]:
        """Those that were asked to stop the job."""
        return {path.name for path in (self.folder / "stopped").iterdir()}

    def described(self) -> list[int]:
        """How often each was asked for its jobs."""
        return [len(path.read_text().splitlines()) for path in (self.folder / "described").iterdir()]

    def asked_routes(self) -> dict[str, list[str]]:
        """Host → those that it was asked to connect to."""
        files = (self.folder / "asked").iterdir()
        return {path.name: [peer["name"] for peer in json.loads(path.read_text())["peers"]] for path in files}


class Cost(NamedTuple):
    """What a command has cost its client, at most.

    Attributes:
        named: seconds until the first line about hosts that do not answer; infinity if there was none.
        own: its part of the CPU seconds, without its processes.
    """

    verb: str
    seconds: float
    named: float
    cpu: float
    own: float
    threads: int
    processes: int
    descriptors: int
    megabytes: float
    exit_code: int
    said: str


def cost(hosts: ManyHosts, *verb: str, python: str = sys.executable) -> Cost:
    """Run a command of a client to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    process = subprocess.Popen(
        [python, "-m", "paceline", *verb], cwd=hosts.folder, env=hosts.env, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    most = dict.fromkeys(("threads", "processes", "descriptors", "kilobytes", "ticks"), 0)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            try:
                status = dict(
                    line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
                )
                stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
                tasks = os.listdir(f"/proc/{process.pid}/task")
                children = sum(
                    len(Path(f"/proc/{process.pid}/task/{task}/children").read_text().split()) for task in tasks
                )
                found = {
                    "threads": len(tasks), "processes": children,
                    "descriptors": len(os.listdir(f"/proc/{process.pid}/fd")),
                    "ticks": int(stat[11]) + int(stat[12]),
                    "kilobytes": int(status.get("VmHWM", "0 kB").split()[0]),
                }  # fmt: skip
            except OSError:
                continue
            for key, value in found.items():
                most[key] = max(most[key], value)

    watching = threading.Thread(target=watch)
    watching.start()
    said, named = "", math.inf
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if "no answer" in line:
                named = min(named, time.monotonic() - begin)
            said += line
    over.set()
    watching.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = time.monotonic() - begin
    own = most["ticks"] / os.sysconf("SC_CLK_TCK")
    counted = most["threads"], most["processes"], most["descriptors"], most["kilobytes"] / 1024
    return Cost(" ".join(verb), seconds, named, cpu, own, *counted, process.returncode, said)


def main() -> None:
    """Print the cost of verbs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("count", type=int, nargs="+")
    parser.add_argument("--silent", type=int, default=0, help="this many say nothing")
    parser.add_argument("--lines", type=int, default=100, help="that each host writes")
    given = parser.parse_args()
    head = ("s", 7), ("named", 7), ("CPU s", 7), ("own", 7), ("threads", 9), ("processes", 11), ("files", 8), ("MB", 6)
    print("hosts  " + "verb".ljust(20) + "".join(name.rjust(width) for name, width in head))
    for count in given.count:
        with tempfile.TemporaryDirectory() as folder:
            hosts = ManyHosts(Path(folder), count, given.lines)
            run = ("run", "--tee", "all", "--on", "many", "--nnodes", str(count), "--", "/bin/true")
            submit = ("submit", "--on", "many", "--nnodes", str(count), "--name", "it", "--", "/bin/true")
            logs = ("logs", "-f", "--all", "--on", "many", "it")
            verbs = (run, submit, ("list",), logs, ("top", "node", "--on", "many"), ("stop", "--on", "many", "it"))
            for verb in verbs:
                if verb[0] == "list" and given.silent:
                    hosts.silence(hosts.names[:: max(1, count // given.silent)][: given.silent])
                it = cost(hosts, *verb)
                values = it.seconds, it.named, it.cpu, it.own, it.threads, it.processes, it.descriptors, it.megabytes
                cells = (
                    f"{value:>{width}.{1 if width == 7 else 0}f}"
                    for (_, width), value in zip(head, values, strict=True)
                )
                row = f"{count:>5}  {' '.join(verb)[:18]:<20}{''.join(cells)}"
                print(row, f" {it.said.count(chr(10))} lines" if verb[0] in ("run", "logs") else "", flush=True)
                if it.exit_code:
                    print(it.said[-600:])
                for path in Path(folder, "home").glob("**/silent.json"):
                    path.unlink()


if __name__ == "__main__":
    main()
