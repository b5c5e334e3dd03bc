"""What was tried on a Slurm cluster, and what would go wrong with a job there: `paceline check`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paceline.backends.check.findings import software_findings
from paceline.backends.check.report import Finding, Report, errors_first
from paceline.job.errors import UserError
from paceline.job.text import a_few, counted, printable
from paceline.node.machine.software import FRAMEWORKS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backends.base import ProgressReporter
    from paceline.contract.facts import PackageFacts, PartitionFacts, RouteFacts, SlurmFacts
    from paceline.contract.messages import SlurmCheck

    from .login import Login
    from .options import Options

    Rows = list[tuple[str, str]]

_PATIENCE = 4  # times as long as for a change, the short job may wait for its start
_LEAST = (3, 9)
_LEAST_SLURM = (22, 5)  # of those that paceline is tried with
_UNTRIED = "not tried"
_SHARED = (
    'set root = "FOLDER" in the target\'s settings to a folder that the login node and all nodes share; if there is'
    " none, make the nodes a target of backend ssh"
)
_MUNGE_DO = "ask the cluster's administrator; as root: systemctl status munge"
_NODE_REPORT = re.compile(r"paceline-check (\S+) (folder|python|failed)([^;]*)")


def check(login: Login, options: Options, target: str, progress: ProgressReporter) -> Report:
    """Try what a job needs, by a short job."""
    seconds = _PATIENCE * login.limits.act
    request: SlurmCheck = {"do": "slurm_check", "slurm": options.slurm, "seconds": seconds}
    facts: SlurmFacts | None = None
    with login.listen(request) as answers:
        for answer in answers:
            if "facts" in answer:
                facts = answer["facts"]
                break
            progress(answer["doing"], 0, None)
    if facts is None:
        raise UserError(f"{login.says}paceline there has ended before it could say anything; try again")
    found = _Found(facts, target)
    sections = {"Slurm": found.slurm(), "Short job": found.job()}
    return Report({title: _printable(rows) for title, rows in sections.items() if rows}, errors_first(found.findings))


def _printable(rows: Rows) -> Rows:
    return [(printable(label), printable(text)) for label, text in rows]


class _Found:
    """The rows, and what would go wrong."""

    def __init__(self, facts: SlurmFacts, target: str) -> None:
        self.findings: list[Finding] = []
        self._facts, self._target = facts, target
        self._job = facts.get("job", {})
        self._by_name = {it["name"]: it for it in self._job.get("facts", ())}
        self._problems = {it[1]: (it[2], it[3].strip()) for it in _NODE_REPORT.finditer(self._job.get("comment") or "")}

    def _error(self, where: str, what: str, do: str) -> None:
        self.findings.append(Finding("error", where, printable(what), do))

    def _warn(self, where: str, what: str, do: str) -> None:
        self.findings.append(Finding("warning", where, printable(what), do))

    # -- Slurm ---------------------------------------------------------------------------------------------------------

    def slurm(self) -> Rows:
        """What was tried without a job."""
        rows = [
            ("commands", self._commands()), ("version", self._version()),
            ("munge", self._munge()), ("controller", self._controller()), ("accounting", self._accounting()),
        ]  # fmt: skip
        return [*rows, *self._partitions()]

    def _version(self) -> str:
        """What sbatch says of its version."""
        version = str(self._facts.get("version") or "")
        if (found := re.search(r"(\d+)\.(\d+)", version)) and (int(found[1]), int(found[2])) < _LEAST_SLURM:
            least = ".".join(f"{part:02}" for part in _LEAST_SLURM)
            what = f"is {version}, and paceline is tried from {least} on"
            self._warn("Slurm", what, "expect refused options and unknown states; the short job shows the first")
        return version or _UNTRIED

    def _commands(self) -> str:
        missing = [name for name, is_there in self._facts["commands"].items() if not is_there]
        if not missing:
            return f"{', '.join(self._facts['commands'])}: on PATH"
        do = f'name a login node of the cluster with ssh = "HOST" in [targets.{self._target}], or load Slurm\'s module'
        self._error("Slurm's commands", f"are missing here: {', '.join(missing)}", do)
        return f"missing: {', '.join(missing)}"

    def _munge(self) -> str:
        munge = self._facts.get("munge")
        if munge is None:
            return _UNTRIED
        if not munge["socket"]:
            return "not used, or Slurm's configuration cannot be read here"
        if munge.get("problem"):
            what = (
                f"does not answer at {munge['socket']} ({munge['problem']}), so nobody can prove to Slurm who they are"
            )
            self._error("munge", what, _MUNGE_DO)
            return f"does not answer: {munge['problem']}"
        return f"answers at {munge['socket']}"

    def _controller(self) -> str:
        controller = self._facts.get("controller")
        if controller is None:
            return _UNTRIED
        if controller["problem"]:
            do = "wait until it is back; as an administrator: systemctl status slurmctld on its machine"
            self._error("Slurm's controller", f"does not answer: {controller['problem']}", do)
            return f"does not answer: {controller['problem']}"
        return str(controller["up"])

    def _accounting(self) -> str:
        accounting, config = self._facts.get("accounting"), self._facts.get("config") or {}
        if accounting is None:
            return _UNTRIED
        if accounting["problem"]:
            self._warn(
                "accounting", f"is on, but sacct fails: {accounting['problem']}",
                "paceline does not need it; ask the administrator if sacct and sreport matter to you",
            )  # fmt: skip
            return f"on, but sacct fails: {accounting['problem']}"
        age = config.get("MinJobAge") or "unknown"
        return (
            "on, sacct answers" if accounting["on"] else f"off; Slurm forgets a job after its end: MinJobAge is {age}"
        )

    def _partitions(self) -> Rows:
        partitions, chosen = self._facts.get("partitions"), self._facts.get("partition")
        if partitions is None:
            return [("partitions", _UNTRIED)]
        rows = [("partition " + it["name"] + " (default)" * it["is_default"], _partition(it)) for it in partitions]
        if chosen is None:
            return rows
        known = [it["name"] for it in partitions]
        there = f"there are {a_few(known)}" if known else "there is none"
        setting = f"set slurm = {{partition = …}} in [targets.{self._target}] to one that exists"
        for name in chosen["unknown"]:
            self._error(f"partition {name}", f"does not exist; {there}", setting)
        if not chosen["names"]:
            self._error("the cluster", f"has no default partition; {there}", setting)
        elif not chosen["up"] and not chosen["unknown"]:
            what = "has no node that is up"
            self._error(f"partition {','.join(chosen['names'])}", what, "see why with sinfo -R, or name another one")
        used = ", ".join(chosen["names"]) or "none"
        source = "as the target says" if chosen["given"] else "the default"
        problem = ", which does not exist" if chosen["unknown"] else ""
        return [*rows, ("used", f"{used}, {source}{problem}")]

    # -- the short job -------------------------------------------------------------------------------------------------

    def job(self) -> Rows:
        """What was tried by the job."""
        if not self._job:
            return [("submit", f"{_UNTRIED}: {self._facts.get('untried') or 'Slurm does not answer'}")]
        rows = [("submit", self._submitted())]
        if "id" in self._job:
            rows.append(("start", self._start()))
            if self._by_name or self._problems:
                rows += [("shared disk", self._disk()), ("Python", self._python()), *self._frameworks()]
                rows += [("GPUs", self._gpus()), ("names", self._names()), *self._routes()]
            rows.append(("cleaned up", self._cleanup()))
        return rows

    def _submitted(self) -> str:
        nodes = self._job["nodes"]
        what = f"{counted(nodes, 'node')} of {self._job['partition']}, for {self._limit} at most"
        problem = self._job.get("problem")
        if problem is None:
            return f"Slurm took it as job {self._job['id']}: {what}"
        do = f"see what there is with paceline top node --on {self._target}, and correct slurm = {{…}} of the target"
        self._error("the short job", f"could not be tried: {problem}", do)
        return f"{what}: {problem}"

    @property
    def _limit(self) -> str:
        return f"{self._job['limit'] / 60:g} min"

    def _start(self) -> str:
        job = self._job
        if "took" in job:
            self._find_lost()
            return f"after {job['took']:.1f} s, on {a_few(sorted(self._by_name))}"
        if "late" in job:
            why = job.get("waiting") or "Slurm does not say why"
            what = f"did not start within {job['late']:g} s, and was cancelled: {why}"
            do = "try again later, or choose another partition or QOS; PACELINE_ACT_TIMEOUT=1m lets it wait 4 minutes"
            self._warn("the short job", what, do)
            return f"not within {job['late']:g} s; {why}"
        if "problem" in job:
            return _UNTRIED
        self._find_lost()
        return f"{self._ended()}; no node wrote anything"

    def _find_lost(self) -> None:
        """A finding if nodes have neither written nor reported anything."""
        count = self._job["nodes"] - len(self._by_name) - len(set(self._problems) - set(self._by_name))
        if count <= 0:
            return
        comment = (self._job.get("comment") or "").strip(" ;")
        why = comment if comment and not self._problems else self._ended()
        where = self._job.get("nodelist") or "the short job"
        what = f"ran the short job, but {count} of {self._job['nodes']} nodes wrote nothing: {why}"
        self._error(where, what, "see slurmd's log on these nodes, or leave them out with slurm = {exclude = …}")

    def _ended(self) -> str:
        if "endless" in self._job:
            return f"it did not end within {self._job['endless']:g} s, and was cancelled"
        return str(self._job.get("ended") or "it ended")

    def _disk(self) -> str:
        root, blind = self._facts["root"], [name for name, (what, _) in self._problems.items() if what == "folder"]
        for name in blind:
            self._error(name, f"does not see {root} of the login node, so that disk is not shared", _SHARED)
        seen = f"{a_few(sorted(self._by_name))} see{'s' * (len(self._by_name) == 1)} {root}"
        if not blind:
            return seen if self._by_name else _UNTRIED
        return f"{a_few(blind)} {'do' if len(blind) > 1 else 'does'} not see {root}"

    def _python(self) -> str:
        python = self._facts["python"]
        do = f'set python = "PROGRAM" in [targets.{self._target}] to a Python 3.9 or newer that all nodes have'
        for name, (what, why) in self._problems.items():
            if what == "python":
                self._error(name, f"has no {python}", do)
            elif what == "failed":
                self._error(name, f"cannot run paceline with {python}: {why or 'it ended without a word'}", do)
        versions = {name: str(it["python"]["version"]) for name, it in self._by_name.items()}
        for name, version in versions.items():
            if tuple(map(int, re.findall(r"\d+", version)[:2])) < _LEAST:
                self._error(name, f"has Python {version}, which is too old", do)
        self.findings += software_findings(self._by_name)
        return f"{_by_value(versions)}; {python} runs paceline" if versions else _UNTRIED

    def _frameworks(self) -> Rows:
        if not self._by_name:
            return [("framework", _UNTRIED)]
        rows = []
        for framework in FRAMEWORKS:
            found = {name: it["packages"].get(framework) for name, it in self._by_name.items()}
            if any(found.values()):
                rows.append((framework, _by_value({name: _build(it) for name, it in found.items()})))
        if not rows:
            do = f"install one for it, such as torch, or set python in [targets.{self._target}]"
            self._warn(self._facts["python"], f"has no framework on the nodes: none of {', '.join(FRAMEWORKS)}", do)
        return rows or [("framework", "none")]

    def _gpus(self) -> str:
        gpus = self._job["gpus"]
        if not gpus["most"]:
            return "the partition has none"
        if not gpus["asked"]:
            return f"{_UNTRIED}: too few nodes have a free one now"
        if not self._by_name:
            return _UNTRIED
        shown = {}
        for name, it in self._by_name.items():
            devices, granted = it["devices"], it["granted"]
            seen = len(devices["nvidia"]) + len(devices["amd"])
            shown[name] = f"{granted} granted, {seen} seen"
            if not granted:
                self._warn(name, "got no GPU, though one was asked for", "see GresTypes and gres.conf of Slurm")
            elif seen < granted:
                problem = f" ({devices['problem']})" if devices["problem"] else ""
                what = f"was granted {granted} GPU by Slurm, but the job sees {seen}{problem}"
                self._warn(name, what, "see nvidia-smi, or rocm-smi, on that node")
        return _by_value(shown)

    def _names(self) -> str:
        tried = self._job["routes"]
        if not tried:
            return _UNTRIED
        problems = [(it["name"], name, why) for it in tried for name, why in it["names"].items() if why]
        for here, name, why in problems:
            what = f"cannot resolve the name {name} ({why}), and frameworks meet by names"
            self._warn(here, what, f"add {name} to the cluster's DNS, or to /etc/hosts of all nodes")
        if problems:
            return "; ".join(f"{here} cannot resolve {name}" for here, name, _ in problems)
        return f"{a_few([it['name'] for it in tried])} resolve{'s' * (len(tried) == 1)} all names of the job's nodes"

    def _routes(self) -> Rows:
        tried = self._job["routes"]
        pairs = [(it["name"], name, route) for it in tried for name, route in it["routes"].items()]
        if not pairs:
            return [("routes", f"{_UNTRIED}: " + ("one node" if self._job["nodes"] == 1 else "a node is missing"))]
        return [(f"{source} → {target}", self._route(source, target, route)) for source, target, route in pairs]

    def _route(self, source: str, target: str, route: RouteFacts) -> str:
        if route.get("untried"):
            return f"{_UNTRIED}: {route['untried']}"
        if route.get("problem"):
            what = f"cannot connect to {target} at {route.get('address') or 'any address'}: {route['problem']}"
            self._error(
                source, what, "let the nodes connect to each other on every port: see the firewalls between them"
            )
            return str(route["problem"])
        rate = f"{route['bandwidth'] * 8 / 1e6:,.0f} Mbit/s with one connection"
        return f"{route['seconds'] * 1e3:.2f} ms there and back, {rate}"

    def _cleanup(self) -> str:
        why = self._job.get("uncancelled")
        if why is None:
            return "the job is not in Slurm's queue any more, and its folder is removed"
        do = f"scancel {self._job.get('id') or ''}".strip()
        self._warn("the short job", f"could not be cancelled: {why}; it ends by itself in {self._limit}", do)
        return f"its folder is removed; the job ends by itself in {self._limit}: {why}"


def _partition(it: PartitionFacts) -> str:
    return f"{it['state']}, {it['up']} of {it['total']} nodes up, time limit {it['limit']}"


def _build(package: PackageFacts | None) -> str:
    if package is None:
        return "none"
    version = package["version"] or "version unknown"
    return f"{version}, {package['build']} build" if package["build"] else version


def _by_value(values: Mapping[str, str]) -> str:
    """Values that nodes have, each with the nodes that have it."""
    found: dict[str, list[str]] = {}
    for name, value in sorted(values.items()):
        found.setdefault(value, []).append(name)
    return "; ".join(f"{value} on {a_few(those)}" for value, those in found.items())
