"""What would go wrong with a job: on a machine, from the result of `inspect`; on several, from what each reports."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from paceline.job.quantities import show_size
from paceline.job.text import a_few, printable
from paceline.node.machine.network import is_loopback
from paceline.node.machine.software import FRAMEWORKS, PACKAGES, virtual_environment_elsewhere

from .report import Finding, errors_first

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from paceline.contract.facts import DiskFacts, PreflightFacts, Software
    from paceline.job.errors import UserError

    from .inspect import Inspection
    from .report import Clock

GIB = 1 << 30
# CUDA's major version → the oldest major version of the driver that runs it. Source:
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LEAST_SPACE = 1 << 20  # bytes that the files of a job need
_CLOCK_SECONDS = 2.0


def findings(seen: Inspection, env: Mapping[str, str]) -> list[Finding]:
    """All findings, errors first."""
    checks = (
        _python,
        _torch,
        _devices,
        _cores,
        _memory,
        _disks,
        _interfaces,
        _exposure,
        _host,
        _proxies,
        _limits,
        _shadows,
    )
    found = [finding for check in checks for finding in check(seen, env)]
    return errors_first(found)


def _python(seen: Inspection, env: Mapping[str, str]) -> Iterator[Finding]:
    version, executable = seen.python.version, seen.python.executable
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < (3, 10):
        yield Finding("error", f"Python {version}", "is older than 3.10", "install paceline for a newer Python")
    active = virtual_environment_elsewhere(env)
    if active is not None:
        yield Finding(
            "warning",
            f"virtual environment {active}",
            f"is active, but paceline, and so the ranks, run on {executable}",
            f"install paceline in it: {active}/bin/python -m pip install -e FOLDER, its clone",
        )
    if not any(seen.packages.get(name) for name in FRAMEWORKS):
        yield Finding(
            "warning",
            executable,
            f"has no framework: none of {', '.join(FRAMEWORKS)}",
            f"install one, for example: {executable} -m pip install torch",
        )


def _torch(seen: Inspection, env: Mapping[str, str]) -> Iterator[Finding]:
    torch, devices = seen.packages.get("torch"), seen.devices
    if torch is None or torch.build is None:
        return
    where = f"torch {torch.version}"
    nvidia, (kind, _, version) = bool(devices.nvidia or devices.nvidia_on_bus), torch.build.partition(" ")
    if kind == "CPU" and (nvidia or devices.amd):
        what = f"is a CPU build, but there is an {'NVIDIA' if nvidia else 'AMD'} GPU: ranks compute on the CPU"
        yield Finding("warning", where, what, "install the build for it, as pytorch.org/get-started says")
    if kind == "ROCm" and not devices.amd:
        what = f"is a build for {torch.build}, but there is no AMD GPU: ranks compute on the CPU"
        yield Finding("warning", where, what, "install the build for this machine, or give the container /dev/kfd")
    if kind != "CUDA":
        return
    if devices.driver is None and not devices.nvidia:
        what = f"is a build for {torch.build}, but no NVIDIA driver is loaded: ranks compute on the CPU"
        do = "ignore this on a machine without GPUs; else load the driver, or give the container the GPUs (--gpus all)"
        yield Finding("warning", where, what, do)
    oldest = _OLDEST_DRIVER.get(_leading_number(version))
    if devices.driver is not None and oldest is not None and _leading_number(devices.driver) < oldest:
        what = f"is a build for {torch.build}, which needs NVIDIA driver {oldest} or newer; here is {devices.driver}"
        yield Finding("warning", where, what, "update the driver, or install a build for an older CUDA")


def _leading_number(text: str) -> int:
    found = re.match(r"\d{1,9}", text)
    return int(found.group()) if found else 0


def _devices(seen: Inspection, env: Mapping[str, str]) -> Iterator[Finding]:
    devices = seen.devices
    if devices.problem is not None and "no answer" in devices.problem:
        what = f"{devices.problem}: every job waits that long for its GPUs"
        yield Finding("warning", "nvidia-smi", what, "keep the driver loaded: start nvidia-persistenced as root")
    elif devices.problem is not None:
        do = "reload the driver, or restart the machine if the driver was updated"
        yield Finding("warning", "nvidia-smi", f"fails: {devices.problem.rstrip('.')}", do)
    if devices.nvidia or devices.amd:
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
            if env.get(name, "0").strip() in ("", "-1"):
                what = f"is set to {env[name]!r}, which hides every GPU"
                yield Finding("warning", name, what, f"unset {name}, or name devices")
    chosen = env.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    missing = [name for name in chosen if re.fullmatch(r"\d{1,9}", name) and int(name) >= len(devices.nvidia)]
    if devices.nvidia and missing:
        what = f"names {missing[0]}, but the last GPU here is {len(devices.nvidia) - 1}: CUDA stops reading there"
        yield Finding("warning", "CUDA_VISIBLE_DEVICES", what, "name devices that exist")
    for gpu in devices.nvidia:
        if (
            gpu.memory
            and gpu.memory_used
            and gpu.memory_used > gpu.memory / 4
            and (chosen == [""] or str(gpu.index) in chosen)
        ):
            what = f"has {show_size(gpu.memory_used)} of its {show_size(gpu.memory)} in use"
            yield Finding(
                "warning",
                f"GPU {gpu.index}",
                what,
                "find the processes with nvidia-smi, or use other GPUs with --devices",
            )


def _cores(seen: Inspection, env: Mapping[str, str]) -> Iterator[Finding]:
    quota, usable, threads = seen.cores.quota, seen.cores.usable, env.get("OMP_NUM_THREADS")
    if quota is not None and quota < usable:
        what = f"is {quota:g}, but a process sees {usable}: threads for all of them are stopped again and again"
        do = f"give -n, and OMP_NUM_THREADS such that the ranks' threads together are at most {max(1, int(quota))}"
        yield Finding("warning", "CPU quota", what, do)
    if threads is None:
        return
    if not re.fullmatch(r"\s*\d{1,9}\s*(,\s*\d{1,9}\s*)*", threads):
        yield Finding("warning", "OMP_NUM_THREADS", f"is {threads!r}, not a number", "unset it, and paceline sets it")
    elif int(threads.split(",")[0]) > usable:
        what = f"gives every rank {threads.split(',')[0].strip()} threads, but there are {usable} cores"
        yield Finding("warning", "OMP_NUM_THREADS", what, "unset it, and paceline shares the cores out among the ranks")


def _memory(seen: Inspection, env: Mapping[str, str]) -> Iterator[Finding]:
    total, available, limit = seen.memory.total, seen.memory.available, seen.memory.limit
    if limit is not None and limit < total / 2:
        what = f"is limited to {show_size(limit)} of the machine's {show_size(total)}: ranks that need more get SIGKILL"
        yield Finding(
            "warning", "memory", what, "raise the limit of this container or session, or load less data per rank"
        )
    if total and available < GIB:
        what = f"has {show_size(available)} left, and a rank with a framework takes about half a GiB"
        yield Finding("warning", "memory", what, "end other processes here")


def _disks(seen: Inspection, env: Mapping[str, str]) -> Iterator[Finding]:
    shm, jobs = seen.shared_memory, seen.jobs
    bus_error = "data loader workers that find no space there end with a bus error"
    larger = "docker: --shm-size=8g; Kubernetes: mount an emptyDir of medium Memory at /dev/shm"
    if shm is None:
        yield Finding("warning", "/dev/shm", "does not exist, so data loader workers cannot share batches", larger)
    elif shm.total < GIB:
        yield Finding("warning", "/dev/shm", f"holds {show_size(shm.total)}; {bus_error}", larger)
    elif shm.free < max(shm.total // 20, GIB // 16):
        what = f"has {show_size(shm.free)} of {show_size(shm.total)} left; {bus_error}"
        yield Finding("warning", "/dev/shm", what, "remove what ended jobs left there: ls -l /dev/shm")
    elsewhere = "choose another folder with PACELINE_HOME or --log-dir"
    if jobs is None:
        yield Finding(
            "error",
            "jobs' folder",
            "cannot be examined: its disk does not answer, or this user has no home",
            elsewhere,
        )
    elif not jobs.writable:
        yield Finding("error", f"jobs' folder {jobs.path}", "cannot be written", elsewhere)
    elif jobs.free == 0 or jobs.free_files == 0:
        yield Finding("error", f"jobs' folder {jobs.path}", "is on a full disk", f"make room, or {elsewhere}")
    elif jobs.free < GIB:
        what = f"is on a disk with {show_size(jobs.free)} left"
        yield Finding("warning", f"jobs' folder {jobs.path}", what, f"make room, or {elsewhere}")


def _interfaces(seen: Inspection, env: Mapping[str, str]) -> Iterator[Finding]:
    loopback = [interface for interface in seen.interfaces if interface.loopback]
    if seen.interfaces and not loopback:
        yield Finding("error", "loopback", "does not exist, and ranks meet there", "add the interface lo")
    elif loopback and all(interface.up is False for interface in loopback):
        yield Finding("error", "loopback", "is down, and ranks meet there", f"ip link set {loopback[0].name} up")
    if seen.gloo.interface is None and seen.gloo.address is None:
        known = ", ".join(interface.name for interface in seen.interfaces)
        what = f"cannot start: {seen.gloo.why}"
        yield Finding("error", "gloo", what, f"unset GLOO_SOCKET_IFNAME, or name one of {known}")
    nccl = env.get("NCCL_SOCKET_IFNAME", "")
    if nccl and not nccl.startswith("^") and not _any_of_nccl(nccl, [interface.name for interface in seen.interfaces]):
        what = f"is {nccl}, and no interface has such a name: NCCL cannot start"
        yield Finding("warning", "NCCL_SOCKET_IFNAME", what, "unset it, or name an interface that exists")


def _exposure(seen: Inspection, env: Mapping[str, str]) -> Iterator[Finding]:
    address = seen.gloo.address
    if address is None or not ipaddress.ip_address(address.partition("%")[0]).is_global:
        return
    inside = next((i.name for i in seen.interfaces if i.up and not i.loopback and i.ipv4 and _is_private(i.ipv4)), None)
    ports = "its ports" if seen.ports is None else f"TCP ports {seen.ports.first} to {seen.ports.last}"
    yield Finding(
        "warning",
        f"gloo on {address}",
        "listens at a public address, without a password: whoever connects can end a job, or take part in it",
        f"close {ports} to all but the machines of a job"
        + ("" if inside is None else f", or set GLOO_SOCKET_IFNAME={inside}"),
    )


def _is_private(address: str) -> bool:
    return ipaddress.ip_address(address).is_private


def _any_of_nccl(value: str, names: list[str]) -> bool:
    exact, wanted = value.startswith("="), [name.partition(":")[0] for name in value.lstrip("=").split(",")]
    return any(name == want if exact else name.startswith(want) for want in wanted for name in names)


def _host(seen: Inspection, env: Mapping[str, str]) -> Iterator[Finding]:
    host = seen.host
    where = f"host name {host.name}"
    other = next((i for i in seen.interfaces if i.up and not i.loopback and (i.ipv4 or _routable(i.ipv6))), None)
    do = "for --nnodes > 1 correct /etc/hosts"
    if other is not None:
        address = other.ipv4 or _routable(other.ipv6)
        do = f"for --nnodes > 1 give it {address} in /etc/hosts, or set GLOO_SOCKET_IFNAME={other.name}"
    if host.problem is not None:
        yield Finding("warning", where, f"does not resolve ({host.problem})", do)
    elif host.usable is None:
        what = f"resolves to {', '.join(host.addresses) or 'nothing'}, which is not this machine"
        yield Finding("warning", where, what, do)
    elif "GLOO_SOCKET_IFNAME" not in env and is_loopback(host.usable):
        yield Finding("warning", where, f"resolves to {host.usable}, which no other machine can reach", do)


def _routable(addresses: tuple[str, ...]) -> str | None:
    return next((address for address in addresses if not address.startswith("fe80:")), None)


def _proxies(seen: Inspection, env: Mapping[str, str]) -> Iterator[Finding]:
    name = next((name for lower in _PROXIES for name in (lower, lower.upper()) if env.get(name)), None)
    if name is None:
        return
    spared = env.get("no_proxy") or env.get("NO_PROXY") or ""
    missing = [host for host in ("localhost", "127.0.0.1", seen.host.name) if host and not bypasses(spared, host)]
    if missing:
        what = f"is set, and no_proxy does not name {', '.join(missing)}: requests between ranks go to the proxy"
        yield Finding("warning", name, what, f"export no_proxy=${{no_proxy:+$no_proxy,}}{','.join(missing)}")


def bypasses(no_proxy: str, host: str) -> bool:
    """Whether a list such as `localhost,.lab,10.0.0.0/8` excludes a host from the proxy."""
    for entry in re.split(r"[\s,]+", no_proxy.lower()):
        name = entry.lstrip("*").lstrip(".") if entry != "*" else entry
        if name == "*" or (name and (host.lower() == name or host.lower().endswith(f".{name}"))):
            return True
        try:
            if "/" in name and ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False):
                return True
        except ValueError:
            continue  # a name, not an address
    return False


def _limits(seen: Inspection, env: Mapping[str, str]) -> Iterator[Finding]:
    files, most, processes = seen.limits.open_files, seen.limits.open_files_most, seen.limits.processes
    if files is not None and files < 4096:
        what = f"at most {files}, and ranks with many data loader workers need more"
        wanted = 65536 if most is None else min(65536, most)
        do = f"ulimit -n {wanted}" if wanted >= 4096 else "ask the administrator for more (limits.conf, LimitNOFILE)"
        yield Finding("warning", "open files", what, do)
    if processes is not None and processes < 1024:
        what = f"at most {processes}, threads included: ranks end with: can't start new thread"
        yield Finding("warning", "processes", what, "ulimit -u 4096; in a container: --pids-limit")


def _shadows(seen: Inspection, env: Mapping[str, str]) -> Iterator[Finding]:
    for name, file in seen.shadows.items():
        if name in PACKAGES:
            what = f"in this folder is imported in place of {name} by the scripts beside it"
            yield Finding("error", file, what, "rename it")
        else:
            what = f"in this folder hides Python's own module {name} from the scripts beside it and all they import"
            yield Finding("warning", file, what, "rename it")


# -- of several hosts --------------------------------------------------------------------------------------------------


def line(finding: Finding) -> str:
    """A finding about hosts as one line. Its text already names the hosts."""
    return f"{finding.what}; {finding.do}" if finding.do else finding.what


def grouped(wrong: Iterable[tuple[str, str]]) -> list[str]:
    """Join lines with the same text about several hosts. Each line comes with the host that it is about."""
    found: dict[str, list[str]] = {}
    for host, text in wrong:
        is_about = text.startswith(f"{host}: ")
        found.setdefault(text[len(host) :] if is_about else text, []).append(host if is_about else "")
    return [f"{', '.join(hosts)}{text}" for text, hosts in found.items()]


def unreachable(host: str, error: UserError) -> Finding:
    """A host that does not answer, or cannot be used."""
    what, _, do = str(error).rpartition("; ")
    return Finding("error", host, what or do, do if what else "")


def disk_findings(host: str, found: Sequence[DiskFacts]) -> list[Finding]:
    """What is wrong with the disks of the folders for jobs."""
    findings = []
    do = "make room, or choose another root in the target's settings"
    for disk in found:
        where = f"{host}: {printable(disk['path'])}"
        if "total" not in disk:
            findings.append(Finding("error", host, f"{where} is on a disk that does not answer", do))
        elif not disk["writable"]:
            findings.append(Finding("error", host, f"{where} cannot be written", do.partition("or ")[2]))
        elif disk["free"] < _LEAST_SPACE or disk["free_files"] == 0:
            findings.append(Finding("error", host, f"{where} is on a full disk", do))
        elif disk["free"] < GIB:
            findings.append(Finding("warning", host, f"{where} is on a disk with {show_size(disk['free'])} left", do))
    return findings


def host_findings(answers: Mapping[str, PreflightFacts], clocks: Mapping[str, Clock]) -> list[Finding]:
    """What would go wrong on hosts that answer."""
    found: list[Finding] = []
    for host, answer in answers.items():
        found += disk_findings(host, answer["disks"])
        found += clock_finding(host, clocks[host])
    has_own = any("environment" in answer for answer in answers.values())  # then what is installed there is not used
    return found + ([] if has_own else software_findings(answers))


def software_findings(answers: Mapping[str, Software]) -> list[Finding]:
    """A finding for Python and for each framework that machines have in different versions."""
    found = differing("Python", {host: minor(answer["python"]["version"]) for host, answer in answers.items()})
    for name in FRAMEWORKS:
        packages = {host: answer["packages"].get(name) for host, answer in answers.items()}
        found += differing(name, {host: it and public(it["version"]) for host, it in packages.items()})
        builds = {host: it["build"] for host, it in packages.items() if it and it["build"]}
        found += differing(f"what {name} is built for", builds)
    others = {name for answer in answers.values() for name in answer.get("imports", ())}
    for name in sorted(others):
        found += differing(name, {host: answer.get("imports", {}).get(name) for host, answer in answers.items()})
    return found


def public(version: str | None) -> str:
    """A version without what is behind `+`, which says for what it was built."""
    return version.partition("+")[0] if version else "unknown"


def clock_finding(host: str, clock: Clock) -> list[Finding]:
    """Whether a host's clock is wrong by more than `_CLOCK_SECONDS`."""
    if abs(clock.offset) - clock.uncertainty <= _CLOCK_SECONDS:
        return []
    side = "ahead of" if clock.offset > 0 else "behind"
    far = f"{abs(clock.offset):.1f} s (± {max(clock.uncertainty, 0.1):.1f} s)"
    what = f"{host}: its clock is {far} {side} this machine's, and so are its times in logs and events"
    return [Finding("warning", host, what, "set both by NTP, for example with chrony")]


def minor(version: str) -> str:
    """The major and minor version: 3.11 for 3.11.7."""
    found = re.match(r"\d+\.\d+", version)
    return found.group() if found else version


def differing(what: str, versions: Mapping[str, str | None]) -> list[Finding]:
    """A finding if hosts have different versions of something; None means not installed."""
    found: dict[str | None, list[str]] = {}
    for host, version in versions.items():
        found.setdefault(version, []).append(host)
    if len(found) < 2:
        return []
    parts = [f"{version or 'none'} on {a_few(hosts)}" for version, hosts in found.items()]
    do = "install the same version on all of them"
    return [Finding("warning", what, printable(f"{what} is not the same everywhere: {', '.join(parts)}"), do)]
