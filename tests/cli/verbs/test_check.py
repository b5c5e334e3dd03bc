"""`paceline check`: what it tells of this machine, and what it finds wrong with others."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.inspected import ETH, GIB, H200, LO, SOUND

from paceline.backends.check.findings import bypasses, findings
from paceline.backends.check.inspect import Inspection, inspect_local
from paceline.job.quantities import show_size
from paceline.node.machine import gpus, network, software

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Paceline

KEYS = {
    "paceline", "python", "packages", "devices", "cores", "memory", "shared_memory", "jobs", "interfaces", "host",
    "gloo", "ports", "limits", "shadows", "variables", "findings",
}  # fmt: skip


@pytest.fixture
def checked(paceline: Paceline) -> Callable[..., tuple[int, dict[str, Any]]]:
    """`paceline check -o json` with more variables: its exit code and its answer."""

    def check(**env: str) -> tuple[int, dict[str, Any]]:
        done = paceline("check", "-o", "json", env={**paceline.env, **env})
        return done.returncode, json.loads(done.stdout)

    return check


# The command, on this machine


def test_json_has_its_keys_and_the_exit_code_says_whether_there_is_an_error(checked: Any) -> None:
    code, seen = checked()
    assert set(seen) == KEYS
    assert code == any(finding["level"] == "error" for finding in seen["findings"])
    assert seen["cores"]["usable"] == len(os.sched_getaffinity(0))
    assert seen["memory"]["total"] > 0
    assert "lo" in [interface["name"] for interface in seen["interfaces"]]
    assert all(set(finding) == {"level", "where", "what", "do"} for finding in seen["findings"])


def test_the_table_has_a_line_a_finding_and_no_colours_in_a_pipe(paceline: Paceline, checked: Any) -> None:
    _, seen = checked(OMP_NUM_THREADS="100000")
    done = paceline("check", env={**paceline.env, "OMP_NUM_THREADS": "100000"})
    assert "\x1b" not in done.stdout
    assert [line for line in done.stdout.splitlines() if re.match(r"\S", line)] == [
        "Python", "Frameworks", "Devices", "Cores and memory", "Network", "Limits", "What would go wrong",
    ]  # fmt: skip
    lines = done.stdout.partition("What would go wrong\n")[2].splitlines()
    assert len(lines) == len(seen["findings"]) > 0
    assert any("OMP_NUM_THREADS gives every rank 100000 threads" in line for line in lines)


def test_nothing_of_a_framework_is_imported(paceline: Paceline) -> None:
    done = paceline("check", python=(sys.executable, "-X", "importtime"))
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "paceline" in imported
    assert not imported & set(software.PACKAGES)


def test_a_jobs_folder_that_cannot_be_made_is_an_error(paceline: Paceline, checked: Any) -> None:
    (paceline.folder / "file").touch()
    code, seen = checked(PACELINE_HOME=str(paceline.folder / "file"))
    assert code == 1
    (finding,) = [finding for finding in seen["findings"] if "file/jobs" in finding["where"]]
    assert finding["level"] == "error"
    assert "PACELINE_HOME" in finding["do"]


def test_a_file_named_like_a_framework_is_an_error_and_one_like_the_library_a_warning(
    paceline: Paceline, checked: Any
) -> None:
    paceline.script("", "torch.py")
    paceline.script("", "colorsys.py")
    paceline.script("", "time.py")  # built into Python: no file can hide it
    code, seen = checked()
    assert code == 1
    assert seen["shadows"] == {"torch": "torch.py", "colorsys": "colorsys.py"}
    levels = {finding["where"]: finding["level"] for finding in seen["findings"]}
    assert levels["torch.py"] == "error"
    assert levels["colorsys.py"] == "warning"


def test_another_format_is_refused_in_one_line(paceline: Paceline) -> None:
    done = paceline("check", "-o", "xml")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "json" in done.stderr


def test_a_folder_that_is_gone_is_one_line(paceline: Paceline) -> None:
    gone = paceline.folder / "gone"
    gone.mkdir()
    done = paceline("check", python=("sh", "-c", f'rmdir "$PWD" && exec {sys.executable} "$@"', "sh"), cwd=gone)
    assert done.returncode == 2
    assert done.stderr == "paceline: the current folder no longer exists; go to another one\n"


def test_a_user_without_a_home_is_told(paceline: Paceline, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("PACELINE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    seen = inspect_local({}, paceline.folder)
    assert "this user has no home" in str(findings(seen, {}))


def test_a_reader_that_is_gone_is_no_traceback(paceline: Paceline) -> None:
    read, write = os.pipe()
    os.close(read)
    process = paceline.start("check", stdout=write)
    os.close(write)
    assert "Traceback" not in process.communicate(timeout=60)[1]


# What would go wrong


def changed(field: str, **changes: Any) -> Inspection:
    return replace(SOUND, **{field: replace(getattr(SOUND, field), **changes)})


def torch(build: str) -> dict[str, Any]:
    return {"torch": software.Package("2.8.0", build)}


def test_a_sound_machine_has_no_finding() -> None:
    assert findings(SOUND, {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "0"}) == []


@pytest.mark.parametrize(
    ("seen", "level", "words"),
    [
        (changed("python", version="3.9.18"), "error", "Python 3.9.18 is older than 3.10"),
        (replace(SOUND, packages={"numpy": software.Package("2")}), "warning", "no framework"),
        (replace(SOUND, packages=torch("CPU")), "warning", "CPU build, but there is an NVIDIA GPU"),
        (replace(SOUND, packages=torch("ROCm 6.2")), "warning", "no AMD GPU"),
        (replace(SOUND, packages=torch("CUDA 13.0")), "warning", "needs NVIDIA driver 580 or newer; here is 570"),
        (replace(SOUND, devices=gpus.Gpus()), "warning", "no NVIDIA driver is loaded"),
        (changed("devices", problem="gave no answer within 1.5 s"), "warning", "nvidia-persistenced"),
        (changed("devices", problem="Failed to initialize NVML."), "warning", "fails: Failed to initialize NVML;"),
        (
            changed("devices", nvidia=(replace(H200, memory_used=90 * GIB),)),
            "warning",
            "GPU 0 has 90.0 GiB of its 140 GiB",
        ),
        (changed("cores", quota=2.5), "warning", "CPU quota is 2.5, but a process sees 16"),
        (changed("memory", limit=8 * GIB), "warning", "limited to 8.0 GiB of the machine's 64.0 GiB"),
        (changed("memory", available=GIB // 2), "warning", "memory has 512 MiB left"),
        (replace(SOUND, shared_memory=None), "warning", "/dev/shm does not exist"),
        (changed("shared_memory", total=GIB // 16, free=GIB // 16), "warning", "/dev/shm holds 64.0 MiB; .*bus error"),
        (changed("shared_memory", free=GIB), "warning", "/dev/shm has 1.0 GiB of 32.0 GiB left"),
        (replace(SOUND, jobs=None), "error", "does not answer"),
        (changed("jobs", writable=False), "error", "/home/you/jobs cannot be written"),
        (changed("jobs", free_files=0), "error", "full disk"),
        (changed("jobs", free=GIB // 2), "warning", "512 MiB left"),
        (replace(SOUND, interfaces=(ETH,)), "error", "loopback does not exist"),
        (replace(SOUND, interfaces=(replace(LO, up=False), ETH)), "error", "ip link set lo up"),
        (replace(SOUND, gloo=network.Choice(None, None, "ib0 is no interface")), "error", "gloo cannot start: ib0"),
        (
            changed("gloo", address="8.8.4.4"),
            "warning",
            "gloo on 8.8.4.4 listens at a public .*; close TCP ports 32768 to 60999 .*, or set GLOO_SOCKET_IFNAME=eth0",
        ),
        (changed("host", usable=None, problem="not known"), "warning", r"does not resolve \(not known\)"),
        (changed("host", usable=None), "warning", "not this machine"),
        (changed("host", usable="127.0.1.1"), "warning", "127.0.1.1, which no other .* GLOO_SOCKET_IFNAME=eth0"),
        (changed("limits", open_files=1024), "warning", "ulimit -n 65536"),
        (changed("limits", open_files=1024, open_files_most=1024), "warning", "administrator"),
        (changed("limits", processes=100), "warning", "can't start new thread"),
        (replace(SOUND, shadows={"numpy": "numpy.py"}), "error", "numpy.py in this folder"),
        (replace(SOUND, shadows={"random": "random.py"}), "warning", "random.py in this folder hides Python's own"),
    ],
)
def test_one_thing_that_is_wrong_is_one_finding(seen: Inspection, level: str, words: str) -> None:
    (finding,) = findings(seen, {})
    assert finding.level == level
    line = f"{finding.where} {finding.what}; {finding.do}"
    assert re.search(words, line)
    assert "\n" not in line
    assert finding.do


@pytest.mark.parametrize("worse", ["numpy", "random"])
def test_errors_come_first(worse: str) -> None:
    both = {"numpy": "numpy.py", "random": "random.py"}  # an error and a warning
    found = findings(replace(SOUND, shadows={worse: both[worse], **both}), {})
    assert [finding.level for finding in found] == ["error", "warning"]


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"OMP_NUM_THREADS": "17"}, "17 threads, but there are 16 cores"),
        ({"OMP_NUM_THREADS": "all"}, "'all', not a number"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES is set to '', which hides every GPU"),
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, "names 3, but the last GPU here is 0"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "no interface has such a name"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "no interface has such a name"),
        ({"VIRTUAL_ENV": "/home/you/other"}, "virtual environment /home/you/other is active"),
        ({"HTTPS_PROXY": "http://u:secret@proxy:3128", "no_proxy": "127.0.0.0/8"}, "does not name localhost, node0"),
    ],
)
def test_one_variable_that_is_wrong_is_one_finding(env: dict[str, str], words: str) -> None:
    (finding,) = findings(SOUND, env)
    assert finding.level == "warning"
    assert words in f"{finding.where} {finding.what}; {finding.do}"
    assert "secret" not in str(finding)


@pytest.mark.parametrize(
    "env",
    [
        {"NCCL_SOCKET_IFNAME": "^docker"},
        {"NCCL_SOCKET_IFNAME": "ib,eth"},
        {"CUDA_VISIBLE_DEVICES": "GPU-8932f937"},
        {"OMP_NUM_THREADS": "4,2"},
        {"http_proxy": "http://proxy", "no_proxy": "localhost,127.0.0.1,node0"},
        {"http_proxy": "http://proxy", "NO_PROXY": "*"},
        {"http_proxy": ""},
    ],
)
def test_what_is_right_is_no_finding(env: dict[str, str]) -> None:
    assert findings(SOUND, env) == []


@pytest.mark.parametrize(
    ("no_proxy", "host", "spared"),
    [
        (".lab", "node0.lab", True),
        ("*.lab", "node0.lab", True),
        ("lab", "slab", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "node0", False),
        ("", "node0", False),
    ],
)
def test_no_proxy_is_read_as_programs_read_it(no_proxy: str, host: str, spared: bool) -> None:
    assert bypasses(no_proxy, host) is spared


@given(st.text(), st.text(min_size=1))
def test_no_list_of_hosts_is_too_odd(no_proxy: str, host: str) -> None:
    bypasses(no_proxy, host)


@given(st.integers(0, 2**60))
def test_every_size_can_be_read(count: int) -> None:
    assert re.fullmatch(r"\d+(\.\d)? (B|[KMGT]iB)", show_size(count))
