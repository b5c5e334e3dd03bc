"""`python -m benchmarks` itself."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from fake_kubernetes.machine import missing
from tests.needs import need

ROOT = Path(__file__).resolve().parents[2]


def benchmarks(*args):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *args], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    "name",
    [
        "resume",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("ddp-chargpt-log", "stall-chargpt-torch.save", "stall-chargpt-async_save")
        ),
    ],
)
def test_a_row_of_the_library(name, tmp_path):
    pytest.importorskip("torch")
    done = benchmarks("--only", name, "--pairs", "1", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    [written] = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert written["error"] is None
    assert len(written["ratios"]) == 1


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_a_row_of_kubernetes_counts_requests(tmp_path):
    need(missing())
    done = benchmarks("--only", "kubernetes-submit-1", "--pairs", "1", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    [written] = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert all(5 < sample["requests"] < 30 for sample in (*written["paceline"], *written["other"])), written


def test_one_row_from_end_to_end(tmp_path):
    pytest.importorskip("torchx")
    done = benchmarks("--only", "help", "--pairs", "1", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    machine, _header, _rule, row = done.stdout.splitlines()
    assert "cores" in machine
    assert "Python" in machine
    assert row.startswith("| help ")
    assert "torchx --help" in row
    assert row.split("|")[-2].strip() == "1"
    [written] = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert written["error"] is None
    assert len(written["ratios"]) == 1


def test_an_unknown_row_is_refused():
    done = benchmarks("--only", "nonsense")
    assert done.returncode == 1
    assert "nonsense" in done.stderr
    assert "restart-2" in done.stderr


def in_lab(body):
    """Run code that has a `lab`, in a process of its own: a lab ends all children of its process."""
    code = "import sys\nfrom benchmarks.sample import Failed\nfrom benchmarks.lab import Lab\nwith Lab() as lab:\n"
    code += textwrap.indent(textwrap.dedent(body), "    ")
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_failed_command_says_why():
    process = in_lab("""
        try:
            lab.timed([sys.executable, "-c", "raise SystemExit('no GPU')"])
        except Failed as failure:
            print(failure)
    """)
    out, err = process.communicate(timeout=60)
    assert out.strip() == "exit code 1: no GPU", err


def test_nothing_is_left_behind():
    process = in_lab("""
        import subprocess
        escape = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
        lab.timed([sys.executable, "-c", escape])
        print((lab.folder / "out").read_text().strip(), lab.folder)
    """)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    pid, folder = out.split()
    assert not Path(folder).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_an_interrupt_ends_what_runs():
    process = in_lab("""
        with lab.started([sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"]) as job:
            print(job._process.pid, lab.folder, flush=True)
            job.finish()
    """)
    pid, folder = process.stdout.readline().split()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert not Path(folder).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
