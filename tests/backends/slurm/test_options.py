"""What sbatch is asked for: flags, settings and the job together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.backends import registry
from paceline.job.errors import UserError

from .fake import Login

if TYPE_CHECKING:
    from pathlib import Path

NODES = "{name:64}{partition:64}{state:24}{cpus:32}{0:16}{memory:20}{0:20}{0:20}{gres:256}{none:256}{none:128}"


@pytest.fixture
def login(tmp_path: Path) -> Login:
    return Login(tmp_path)


def nodes(login: Login, *states: str) -> None:
    """Let sinfo list nodes with 8 CPUs and 2 GPUs in these states."""
    lines = [
        NODES.format(
            0, name=f"n{number}", partition="main*", state=state, cpus="0/8/0/8", memory=1000, gres="gpu:2", none=""
        )
        for number, state in enumerate(states)
    ]
    (login.folder / "nodes").write_text("\n".join(lines) + "\n")
    login.command("sinfo", 'cat "$FAKE/nodes"')


def test_flags_win_over_settings(login: Login) -> None:
    login.settings(
        'partition = "small", cpus-per-task = 2, mem-per-cpu = "1G", gres = "gpu:a100:1,nic:1", nice = 5,'
        'time = "1:00:00"'
    )
    own = login.directives()
    for line in ("--partition=small", "--cpus-per-task=2", "--mem-per-cpu=1G", "--gres=gpu:a100:1,nic:1", "--nice=5"):
        assert line in own
    flags = ("--queue", "big", "--cpus", "8", "--memory", "1Gi", "--gpus", "4", "--time-limit", "2h", "--slurm", "nice")
    shown = login.directives(*flags)
    for line in (
        "--partition=big", "--cpus-per-task=8", "--mem=1024M", "--gres=gpu:a100:4,nic:1", "--time=0-02:00:00", "--nice",
    ):  # fmt: skip
        assert line in shown
    assert len({line.partition("=")[0] for line in shown}) == len(shown), "each option is there once"
    assert not any(line.startswith("--mem-per-cpu") for line in shown)
    login.settings('gpus-per-node = "h100:8"')
    assert "--gpus-per-node=h100:8" in login.directives()
    assert "--gres=gpu:h100:2" in (shown := login.directives("--gpus", "2")) and "--gpus-per-node=h100:8" not in shown
    assert not any("gpu" in line for line in login.directives("--gpus", "0"))
    for setting in ('gres = "gpu:3090:1"', 'gpus-per-node = "3090:1"'):  # a kind, not a number
        login.settings(setting)
        assert "--gres=gpu:3090:4" in login.directives("--gpus", "4")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--queue", "a", "--slurm", "partition=b"), "--queue and --slurm partition say the same; give one"),
        (("--queue", "a", "--slurm", "p=b"), "--queue and --slurm partition say the same; give one"),
        (("--cpus", "1", "--slurm", "cpus-per-gpu=2"), "--cpus and --slurm cpus-per-gpu say the same; give one"),
        (("--gpus", "1", "--slurm", "gres=gpu:2"), "--gpus and --slurm gres say the same; give one"),
        (("--time-limit", "1h", "--slurm", "time=5"), "--time-limit and --slurm time say the same; give one"),
        (("--slurm", "hold=maybe"), "--slurm: hold is a switch of sbatch and has no value; leave =maybe out"),
        (("--slurm", "constraint"), "--slurm: constraint needs a value; write it as constraint=VALUE"),
        (
            ("--array", "0-9999"),
            "--array: '0-9999' names no array of up to 1000 jobs; write for example 0-3 or 1,5,7%2",
        ),
        (
            ("--array", "0-3", "--chain"),
            "--chain: the jobs of an array cannot go on in other jobs; leave it or --array out",
        ),
        (("--array", "0-3:0"), "--array: '0-3:0' names no array of up to 1000 jobs; write for example 0-3 or 1,5,7%2"),
    ],
)
def test_what_contradicts_itself(login: Login, flags: tuple[str, ...], said: str) -> None:
    login.settings('partition = "small"')
    assert login.refusal(*flags) == said


def test_what_is_said_twice_but_agrees(login: Login) -> None:
    shown = login.directives("--gpus", "2", "--slurm", "gres=gpu:a100:2", "--queue", "a", "--slurm", "partition=a")
    assert "--gres=gpu:a100:2" in shown and "--partition=a" in shown
    shown = login.directives("--gpus", "2", "--slurm", "gpus-per-node=a100:2")
    assert "--gpus-per-node=a100:2" in shown and not any(line.startswith("--gres") for line in shown)


def test_generic_resources_beside_gpus(login: Login) -> None:
    assert "--gres=gpu:2,nic:1" in login.directives("--gpus", "2", "--slurm", "gres=nic:1")


def test_words_are_values_of_options_that_have_one(login: Login) -> None:
    given = ("constraint=no", "reservation=true", "mail-user=yes", "account=false", "kill-on-invalid-dep=yes")
    shown = login.directives(*(word for option in given for word in ("--slurm", option)))
    assert {f"--{option}" for option in given} <= set(shown)
    switched = login.directives("--slurm", "hold=yes", "--slurm", "reboot=no", "--slurm", "exclusive=true")
    assert "--hold" in switched and "--exclusive" in switched
    assert not any(line.startswith("--reboot") for line in switched)
    login.settings("kill-on-invalid-dep = true, contiguous = true, spread-job = false, exclusive = false")
    shown = login.directives()
    assert "--kill-on-invalid-dep=yes" in shown and "--contiguous" in shown
    assert not any(line.startswith(("--spread-job", "--exclusive")) for line in shown)


@pytest.mark.parametrize(
    ("setting", "flags", "is_requeued"),
    [
        ("", (), True), ("", ("requeue=false",), False), ("", ("no-requeue",), False), ("", ("no-requeue=no",), True),
        ("", ("no-requeue", "requeue"), True), ("", ("requeue", "no-requeue"), False),
        ("no-requeue = true", ("requeue",), True), ("requeue = true", ("no-requeue", "requeue=no"), False),
        ("requeue = true", ("no-requeue", "requeue"), True),
    ],
)  # fmt: skip
def test_the_last_word_on_requeueing_counts(
    login: Login, setting: str, flags: tuple[str, ...], is_requeued: bool
) -> None:
    login.settings(setting)
    shown = login.directives(*(word for flag in flags for word in ("--slurm", flag)))
    assert ("--requeue" in shown, "--no-requeue" in shown) == (is_requeued, not is_requeued)


@pytest.mark.parametrize(
    ("flags", "partition", "seconds"),
    [
        ((), "MaxTime=UNLIMITED", 90),
        (("--time-limit", "2m"), "MaxTime=UNLIMITED", 60),
        (("--slurm", "time=2"), "MaxTime=UNLIMITED", 60),
        (("--slurm", "time=0:50"), "MaxTime=UNLIMITED", 25),
        (("--slurm", "time=1-0"), "MaxTime=UNLIMITED", 90),
        ((), "MaxTime=00:01:00", 30),
        ((), "DefaultTime=00:02:00 MaxTime=1-00:00:00", 60),
        (("--slurm", "time=1:00:00"), "MaxTime=00:01:00", 90),
        (("--grace", "172800s"), "MaxTime=UNLIMITED", 65535),
        (("--grace", "172800s", "--slurm", "time=01:00:00"), "MaxTime=UNLIMITED", 1800),
        (("--queue", "other"), "MaxTime=00:01:00", 45),
    ],
)
def test_the_warning_before_the_time_limit(login: Login, flags: tuple[str, ...], partition: str, seconds: int) -> None:
    other = "PartitionName=other Default=NO DefaultTime=NONE MaxTime=00:01:30"
    login.command("scontrol", f'echo "PartitionName=main Default=YES {partition}"; echo "{other}"')
    assert f"--signal=B:USR2@{seconds}" in login.directives(*flags)


def test_nodes_that_are_down_are_no_refusal(login: Login) -> None:
    login.command("sbatch", 'echo "allocation failure: Requested node configuration is not available" >&2; exit 1')
    nodes(login, "idle", "drained", "down*")
    shown = login("submit", "--on", "lab", "--dry-run", "--nnodes", "3", "--gpus", "2", login.script("pass"))
    assert shown.returncode == 0 and "#SBATCH --nodes=3" in shown.stdout
    assert shown.stderr == (
        "paceline: it waits until nodes are back that are down or drained now: n1 (drained), n2 (down*)\n"
    )
    for flags in (("--nnodes", "4"), ("--gpus", "3"), ("--cpus", "9"), ("--memory", "2Gi"), ("--queue", "other")):
        assert "Slurm refuses the job: Requested node configuration is not available" in login.refusal(*flags)
    nodes(login, "idle", "mixed", "allocated")
    assert "not available" in login.refusal("--nnodes", "3")
    login.command("sbatch", 'echo "sbatch: error: Invalid account or account/partition combination" >&2; exit 1')
    nodes(login, "down*")
    assert "Invalid account" in login.refusal()


def test_an_array_is_counted_by_its_indices(login: Login) -> None:
    assert "--array=0-9999:100%5" in login.directives("--array", "0-9999:100%5")
    (login.folder / "root" / "slurm" / "it-300").mkdir(parents=True)
    (login.folder / "root" / "slurm" / "it-300" / ".paceline-run").touch()
    done = login("submit", "--on", "lab", "--dry-run", "--name", "it", "--array", "0-999:100", login.script("pass"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("paceline: a job named it-300 has its files in ")


@pytest.mark.parametrize("name", ["-oProxyCommand=touch x", "two words", ""])
def test_a_login_node_has_the_name_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paceline.toml").write_text(f'[targets.s]\nbackend = "slurm"\nssh = "{name}"\n')
    with pytest.raises(UserError, match=r"s\.ssh: .* is not the name of a host"):
        registry.load("s")
