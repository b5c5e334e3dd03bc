"""What `paceline check` sees of a sound machine, of hosts and of a cluster: for tests of what it finds and shows."""

from __future__ import annotations

from dataclasses import asdict, replace

from paceline.backends.check.findings import findings
from paceline.backends.check.inspect import Inspected, Inspection
from paceline.backends.check.report import Clock, Finding, HostReport, Link, Report, Survey
from paceline.contract.memory import Memory
from paceline.node.machine import gpus, hardware, network, software

GIB = 1 << 30
LO = network.Interface("lo", True, True, "127.0.0.1", ("::1",))
ETH = network.Interface("eth0", True, False, "10.0.0.2")
H200 = gpus.Gpu(0, name="NVIDIA H200", memory=140 * GIB, memory_used=0)
SOUND = Inspection(
    paceline="0.1.0",
    python=software.Python("3.12.1", "/usr/bin/python3", None),
    packages={"torch": software.Package("2.8.0", "CUDA 12.8"), "numpy": software.Package("2.0")},
    devices=gpus.Gpus(nvidia=(H200,), driver="570.86.15", nvidia_on_bus=1),
    cores=hardware.Cores(16, 16),
    memory=Memory(64 * GIB, 60 * GIB),
    shared_memory=hardware.Space("/dev/shm", True, True, 32 * GIB, 32 * GIB),
    jobs=hardware.Space("/home/you/jobs", True, True, 100 * GIB, 50 * GIB, 1000),
    interfaces=(LO, ETH),
    host=network.HostName("node0", ("10.0.0.2",), "10.0.0.2"),
    gloo=network.Choice("eth0", "10.0.0.2", "node0 resolves to it"),
    ports=network.PortRange(32768, 60999),
    limits=hardware.Limits(65536, 65536, None, False),
)

_BAD = replace(SOUND, shared_memory=hardware.Space("/dev/shm", True, True, GIB // 16, GIB // 16))
MACHINE = Inspected(_BAD, findings(_BAD, {"OMP_NUM_THREADS": "17"}))

_NAMES = ("gpu-01", "gpu-02.cluster.example", "gpu-03")
_HAS = {
    "python": asdict(SOUND.python), "packages": {name: asdict(it) for name, it in SOUND.packages.items() if it},
    "devices": SOUND.devices.to_dict(), "cores": asdict(SOUND.cores), "memory": asdict(SOUND.memory),
    "disks": [asdict(SOUND.jobs)] if SOUND.jobs else [],
}  # fmt: skip
HOSTS = Survey(
    [
        *(HostReport(name, f"10.0.0.{number}", Clock(0.0021 * number, 0.0004), **_HAS)
          for number, name in enumerate(_NAMES[:2], 1)),
        HostReport(_NAMES[2]),
    ],
    [Link(source, target, None, 0.21, 9412.5) for source in _NAMES[:2] for target in _NAMES[:2] if source != target],
    [
        Finding("error", "gpu-03", "gpu-03: cannot connect: ssh: connect to host gpu-03 port 22: No route to host",
                "check that it is switched on, and its name in the target"),
        Finding("warning", "gpu-01", "torch on gpu-01 is 2.8.0, and on gpu-02.cluster.example 2.7.1",
                "install one version on all hosts"),
    ],
)  # fmt: skip
CLUSTER = Report(
    {
        "Cluster": [("context", "team-a"), ("server", "https://10.4.0.1:6443"), ("namespace", "team-a"),
                    ("version", "v1.28.4")],
        "Permissions": [("jobs.batch", "create, get, list, watch, delete"), ("pods/exec", "nothing; not create")],
        "Nodes": [("node-1", "8 x nvidia.com/gpu, 96 CPUs, 1.0 TiB"), ("node-2", "not ready")],
        "Volumes": [("training-data", "200 GiB, ReadWriteMany, bound")],
    },
    [Finding("warning", "namespace team-a", "does not let you create pods/exec: attach and logs of copies do not work",
             "apply the Role below")],
    "apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\n", "What grants the rest (kubectl apply -f)",
)  # fmt: skip
