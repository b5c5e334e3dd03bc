"""Bad input: one line that says what, where and what to do; exit code 2; nothing started, nothing left behind."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from tests.typed import refusal

if TYPE_CHECKING:
    from tests.conftest import Paceline

CASES = {
    "IPv6 address without brackets": (
        ["-H", "fd77::11", "ok.py"],
        "-H 'fd77::11': 'fd77::11' is not a host",
        "[fd77::11]",
    ),
    "quotation marks of a web page": (
        ["--devices", "\u20180,1\u2018", "ok.py"],
        "\u20180,1\u2018 has the quotation mark \u2018 of a printed text",
        "type '",
    ),
    "quotation marks of a web page in a variable": (
        ["--env", "KEY=\u201csecret\u201d", "ok.py"],
        "KEY=\u2026 has the quotation mark \u201c of a printed text",
        "type '",
    ),
    "a dash of a web page": (
        ["\u2013np", "2", "ok.py"],
        "\u2013np begins with the dash \u2013 of a printed text",
        "type - or --",
    ),
    "missing script": (["missing.py"], "no script missing.py in ", "check the name"),
    "program without --no-python": (["ls"], "no script ls in ", "--no-python"),
    "folder": (["folder"], "folder is a folder, not a script", "-m"),
    "shell script that is not executable": (
        ["script.sh"],
        "script.sh is neither a Python script nor executable",
        "chmod +x",
    ),
    "no module": (["-m", "no_such_module"], "no module no_such_module in ", "check the name"),
    "no module in package": (["-m", "no_such.module"], "no module no_such.module in ", "check the name"),
    "no program": (["--no-python", "no-such-program"], "no program no-such-program on PATH", "check the name"),
    "module and no python": (["-m", "--no-python", "json"], "--module and --no-python contradict", "give one"),
    "no ranks": (["-n", "0", "ok.py"], "-n 0 starts no rank", "take 1 or more"),
    "negative ranks": (["-n", "-3", "ok.py"], "-n -3 starts no rank", "take 1 or more"),
    "ranks that are no number": (["-n", "many", "ok.py"], "-n many is neither a number nor auto, gpu or cpu", ""),
    "an empty number of ranks": (["-n", "", "ok.py"], "--nproc-per-node is empty", "give a value, or leave"),
    "a number that is too small": (
        ["--max-restarts", "-1", "ok.py"],
        "Invalid value for '--max-restarts': -1 is less than 0",
        "",
    ),
    "a device as a script": (["/dev/null"], "/dev/null is a device or a socket, not a script", "name a file"),
    "a hang after no time": (["--hang-after", "0", "ok.py"], "--hang-after: '0' is no time", "write --hang off"),
    "a hang after 0s": (["--hang-after", "0s", "ok.py"], "--hang-after: '0s' is no time", "write --hang off"),
    "an output of run": (["-o", "xml", "ok.py"], "-o: paceline get JOB -o json shows the job", ""),
    "seconds without a unit": (
        ["--start-timeout", "5", "ok.py"],
        "--start-timeout: '5' has no unit",
        "did you mean 5s?",
    ),
    "grace without a unit": (["--grace", "5", "ok.py"], "--grace: '5' has no unit", "did you mean 5s?"),
    "gpus where there are none": (["-n", "gpu", "ok.py"], "no GPU that a process may use", "-n cpu"),
    "devices that are not there": (
        ["-n", "gpu", "--devices", "0,1", "ok.py"],
        "it needs device 0, 1, and this machine has none",
        "[local] devices = N",
    ),
    "names of devices for their number": (
        ["--gpus", "0,1", "ok.py"],
        "'0,1' names devices",
        "write --devices 0,1",
    ),
    "empty device": (["--devices", "0,,1", "ok.py"], "--devices '0,,1' is not a list", "--devices 0,1"),
    "total and per node": (["-np", "4", "-n", "2", "ok.py"], "-np counts the ranks of all nodes", "give one"),
    "total that cannot be shared": (
        ["-np", "3", "--nnodes", "2", "--master-addr", "h", "ok.py"],
        "-np 3 cannot be shared by 2",
        "multiple of 2",
    ),
    "env without value": (["--env", "LR", "ok.py"], "--env 'LR' is not NAME=VALUE", "--env LR=0.1"),
    "env without name": (["--env", "=1", "ok.py"], "--env '=…' is not NAME=VALUE", "--env LR=0.1"),
    "env with a bad name": (["--env", "A B=1", "ok.py"], "--env 'A B=…': a variable's name has letters", "rename it"),
    "unknown framework": (["--framework", "pytroch", "ok.py"], "unknown framework 'pytroch'", "did you mean torch?"),
    "unknown framework like none": (
        ["--framework", "zzz", "ok.py"],
        "unknown framework 'zzz'",
        "choose one of horovod, ",
    ),
    "framework not installed": (["--framework", "paddle", "ok.py"], "paddle is not installed for ", "install it"),
    "imported framework not installed": (["paddled.py"], "paddle is not installed for ", "install it"),
    "several nodes without an address": (["--nnodes", "2", "ok.py"], "--nnodes 2 needs to know where", "--master-addr"),
    "an address of no host": (
        ["--nnodes", "2", "--node-rank", "1", "--master-addr", "nosuch.invalid", "ok.py"],
        "no host is named nosuch.invalid",
        "--master-addr",
    ),
    "a role of TensorFlow for which there is no rank": (
        ["-n", "2", "--framework", "tensorflow", "--env", "PACELINE_TF_ROLES=chief,evaluator", "--no-python", "true"],
        "--env PACELINE_TF_ROLES=chief,evaluator needs 3 ranks or more, and the job has 2",
        "",
    ),
    "no nodes": (["--nnodes", "0", "ok.py"], "--nnodes '0' is not a number of machines", "--nnodes 2"),
    "nodes that change": (
        ["--nnodes", "1:4", "--framework", "indexed", "--master-addr", "h", "ok.py"],
        "--nnodes '1:4': with --framework indexed",
        "give one",
    ),
    "node rank too high": (
        ["--nnodes", "2", "--node-rank", "2", "--master-addr", "h", "ok.py"],
        "--node-rank 2 with --nnodes 2",
        "0 … 1",
    ),
    "standalone on several nodes": (["--standalone", "--nnodes", "2", "ok.py"], "--standalone is one machine", "leave"),
    "foreign rendezvous": (["--rdzv-backend", "etcd", "ok.py"], "--rdzv-backend etcd", "c10d"),
    "bad endpoint": (
        ["--nnodes", "2", "--rdzv-endpoint", "a:b:c", "ok.py"],
        "--rdzv-endpoint 'a:b:c' is not HOST",
        "node0:29400",
    ),
    "port that is none": (["--master-port", "70000", "ok.py"], "70000", "--help"),
    "bad name": (["--name", "a/b", "ok.py"], "--name 'a/b': a job name has", "letters"),
    "tee of a rank that is not there": (["-n", "2", "--tee", "5:3", "ok.py"], "--tee names local rank 5", "numbered"),
    "tee that is none": (["--tee", "everything", "ok.py"], "--tee 'everything' is not all", "--tee 0:3"),
    "index without independent processes": (["--pass-index", "ok.py"], "--pass-index needs independent", "indexed"),
    "unknown flag": (["--nproc-per-nod", "2", "ok.py"], "--nproc-per-nod", "--nproc-per-node"),
    "no script at all": ([], "SCRIPT", "--help"),
    "log folder that is a file": (["--log-dir", "ok.py", "ok.py"], "cannot write to ", "--log-dir"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_nothing_left(paceline: Paceline, case: str) -> None:
    args, what, remedy = CASES[case]
    paceline.script("open('ran', 'w')", "ok.py")
    paceline.script("import paddle\nopen('ran', 'w')", "paddled.py")
    paceline.script("#!/bin/sh\ntouch ran\n", "script.sh")
    (paceline.folder / "folder").mkdir()
    before = sorted(p.name for p in paceline.folder.iterdir())
    line = refusal(paceline, "run", *args)
    assert what in line
    assert remedy in line
    assert sorted(p.name for p in paceline.folder.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--on", "", "ok.py"), "--on is empty; give a value, or leave the flag out"),
        (("submit", "--tee", "all", "ok.py"), "--tee is a flag of paceline run, which shows the job; leave it out"),
        (("run", "-n"), "Option '-n' requires an argument; see "),
        (("run", "--checkpoint-dir=", "ok.py"), "--checkpoint-dir is empty; give a value, or leave the flag out"),
        (("run", "--name", "", "ok.py"), "--name is empty; give a value, or leave the flag out"),
        (("top", "it"), "top it: write paceline top job it for a job of that name, or paceline top node"),
        (
            ("requeue", "it"),
            "paceline has no verb 'requeue'; write paceline resubmit JOB",
        ),
        (("tensorboard", "--port", "99999", "it"), "Invalid value for '--port': 99999 is more than 65535"),
        (("explain", "none.yaml"), "no file none.yaml in "),
        (("run", "python3.99", "ok.py"), "no program python3.99"),
        (
            ("run", "--framework", "torch", "--pass-index", "ok.py"),
            "--pass-index needs independent processes; change it to --framework indexed",
        ),
        (("run", "--pass-index", "ok.py"), "--pass-index needs independent processes; add --framework indexed"),
    ],
)
def test_what_is_said(paceline: Paceline, words: tuple[str, ...], said: str) -> None:
    paceline.script("open('ran', 'w')", "ok.py")
    assert refusal(paceline, *words).startswith(said)
    assert not (paceline.folder / "ran").exists()


def test_port_in_use(paceline: Paceline) -> None:
    paceline.script("open('ran', 'w')")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for more in ((), ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1")):
            assert refusal(paceline, "run", "--master-port", str(port), *more, "script.py") == (
                f"port {port} is in use on this machine; choose another --master-port, or none"
            )
    assert not paceline.home.exists()


def test_name_that_is_taken(paceline: Paceline) -> None:
    paceline.script("print('ran')")
    assert paceline.run("--name", "mine", "script.py").returncode == 0
    done = paceline.run("--name", "mine", "script.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "a job named mine has its files in" in done.stderr


def test_log_folder_that_cannot_be_written(paceline: Paceline) -> None:
    paceline.script("open('ran', 'w')")
    said = refusal(paceline, "run", "--log-dir", "/proc/paceline", "script.py")  # not even root may write there
    assert said.startswith("cannot write to /proc/paceline: ")


def test_more_ranks_than_devices(paceline: Paceline) -> None:
    paceline.script("open('ran', 'w')")
    paceline.env["CUDA_VISIBLE_DEVICES"] = "0,1"
    said = refusal(paceline, "run", "-n", "3", "--devices", "0,1", "script.py")
    assert "-n 3 is more than the 2 devices of --devices 0,1" in said


def test_unknown_verb_names_the_nearest(paceline: Paceline) -> None:
    done = paceline("rum", "script.py")
    assert (done.returncode, done.stderr) == (2, "paceline: paceline has no verb 'rum'; did you mean run?\n")


def test_flags_of_horovodruns_elastic_jobs(paceline: Paceline) -> None:
    paceline.script("open('ran', 'w')")
    ranges = ("--blacklist-cooldown-range", "20", "10")
    for flags, what in (
        (ranges, "--blacklist-cooldown-range: hosts come back only to a job with --min-np; add that"),
        (("--min-np", "1", *ranges), "--blacklist-cooldown-range 20s 10s: MIN comes first, then MAX"),
        (("--reset-limit", "1", "--max-restarts", "2"), "--reset-limit and --max-restarts say the same; give one of"),
    ):
        assert what in refusal(paceline, "horovodrun", "-np", "1", *flags, "script.py")
