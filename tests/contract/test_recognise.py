"""Who started this process: every launcher alone, one within another, and variables that contradict each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.contract import CONTRACTS, OWN_CONTRACT, ContractError, Placement, Recognised, recognise, thread_count
from paceline.contract.slurm import agreed_port

# Rank 5 of 8 on the second of two nodes, and the one rank that a node's agent is.
RANK = Placement(
    rank=5,
    world_size=8,
    local_rank=1,
    local_world_size=4,
    node_rank=1,
    node_count=2,
    main_address="n1",
    main_port=4000,
    attempt=2,
    job="77",
)
AGENT = Placement(rank=1, world_size=2, node_rank=1, node_count=2, main_address="n1", job="12")

TORCH = CONTRACTS["torch"].write(RANK)
SLURM = CONTRACTS["slurm"].write(RANK)
OPEN_MPI = CONTRACTS["mpi"].write(RANK)
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN_AGENT = CONTRACTS["slurm"].write(AGENT)
BATCH = {name: text for name, text in SLURM.items() if not name.startswith("SLURM_STEP")}
MEETING = {"MASTER_ADDR": "n1", "MASTER_PORT": "4000"}
POD = {**MEETING, "RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "n1",
    "PET_MASTER_PORT": "4000",
}

BY_SRUN = replace(RANK, main_port=agreed_port("77"))
BY_MPIRUN = replace(RANK, node_rank=0, node_count=1, attempt=0, job="none")
NODE = replace(AGENT, main_port=4000, job="none")


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: text for name, text in env.items() if name not in names}


@pytest.mark.parametrize(
    ("env", "argv", "launcher", "placement"),
    [
        # One launcher alone.
        ({"PATH": "/bin"}, [], "none", Placement()),
        (OWN_CONTRACT.write(RANK), [], "paceline", RANK),
        (TORCH, [], "torchrun", RANK),
        (TORCH, ["--local-rank=1"], "torch.distributed.launch", RANK),
        (TORCH, ["x", "--local_rank=1", "--local_rank=0"], "torch.distributed.launch", RANK),
        (without(TORCH, "LOCAL_RANK"), ["--local_rank=1"], "torch.distributed.launch", RANK),
        (SLURM, [], "srun", BY_SRUN),
        ({**OPEN_MPI, **MEETING}, [], "mpirun", BY_MPIRUN),
        ({**HYDRA, **MEETING}, [], "mpirun", BY_MPIRUN),
        (POD, [], "pytorchjob", NODE),
        ({**POD, "PET_NPROC_PER_NODE": "auto"}, [], "pytorchjob", NODE),
        (TRAINJOB, [], "pytorchjob", NODE),
        ({**MEETING, "RANK": "1", "WORLD_SIZE": "2"}, [], "environment", NODE),
        # torchrun within something else.
        ({**TORCH, **SRUN_AGENT}, [], "torchrun", RANK),
        ({**TORCH, **BATCH}, [], "torchrun", RANK),
        ({**TORCH, **CONTRACTS["mpi"].write(AGENT)}, [], "torchrun", RANK),
        ({**POD, **TRAINJOB, **TORCH}, [], "torchrun", RANK),
        ({**OWN_CONTRACT.write(AGENT), **TORCH}, [], "torchrun", RANK),
        # paceline's agent within something else; its ranks inherit the variables.
        ({**OWN_CONTRACT.write(RANK), **TORCH, **SRUN_AGENT}, [], "paceline", RANK),
        ({**OWN_CONTRACT.write(RANK), **CONTRACTS["jax"].write(RANK), **POD}, [], "paceline", RANK),
        ({**OWN_CONTRACT.write(RANK), **TORCH, "TORCHELASTIC_RUN_ID": "of-the-user"}, [], "paceline", RANK),
        # mpirun within Slurm: in a batch script, and with its daemons as tasks of a step.
        ({**OPEN_MPI, **MEETING, **BATCH}, [], "mpirun", BY_MPIRUN),
        ({**OPEN_MPI, **MEETING, **SRUN_AGENT}, [], "mpirun", BY_MPIRUN),
        ({**HYDRA, **MEETING, **SRUN_AGENT}, [], "mpirun", BY_MPIRUN),
        # srun sets PMI_RANK and PMI_SIZE too, with --mpi=pmi2.
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}, [], "srun", BY_SRUN),
        # Variables for env:// that a script for srun sets itself.
        ({**SLURM, **MEETING, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, [], "srun", RANK),
        ({**SLURM, **MEETING}, ["--local_rank=1"], "srun", RANK),
        # A batch script or the shell of salloc is one process, whatever the size of the job.
        (BATCH, [], "none", Placement()),
        ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, [], "none", Placement()),
        # Two ranks started by hand in the shell of `srun --pty`.
        (
            {**CONTRACTS["slurm"].write(Placement()), **MEETING, "RANK": "1", "WORLD_SIZE": "2"},
            [],
            "environment",
            NODE,
        ),
        # mpirun in the pod of a node.
        ({**POD, **OPEN_MPI}, [], "mpirun", BY_MPIRUN),
        # What scripts for one process set, or get.
        ({"WORLD_SIZE": "1"}, ["--local_rank=-1"], "none", Placement()),
        ({"LOCAL_RANK": "-1"}, ["--local_rank", "3"], "none", Placement()),
        ({"RANK": "0"}, ["--local_rank=0"], "none", Placement()),
    ],
)
def test_recognise(env: dict[str, str], argv: list[str], launcher: str, placement: Placement) -> None:
    assert recognise(env, ["train.py", *argv]) == Recognised(launcher, placement)


@pytest.mark.parametrize(
    ("env", "argv", "message"),
    [
        (TORCH, ["--local-rank=2"], "LOCAL_RANK=1 contradicts --local-rank=2"),
        ({**OWN_CONTRACT.write(RANK), **TORCH, "RANK": "0"}, [], "RANK=0 contradicts PACELINE_RANK=5"),
        (
            {**OWN_CONTRACT.write(RANK), **TORCH, "WORLD_SIZE": "6"},
            [],
            "WORLD_SIZE=6 contradicts PACELINE_WORLD_SIZE=8",
        ),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "8"}, [], "RANK=0 contradicts SLURM_PROCID=5"),
        ({**SLURM, "WORLD_SIZE": "2"}, [], "WORLD_SIZE=2 contradicts SLURM_NTASKS=8"),
        ({**OPEN_MPI, **MEETING, "RANK": "0"}, [], "RANK=0 contradicts OMPI_COMM_WORLD_RANK=5"),
        ({**HYDRA, **MEETING, "RANK": "0"}, [], "RANK=0 contradicts PMI_RANK=5"),
        (OPEN_MPI, [], "set MASTER_ADDR"),
        ({**POD, "PET_NPROC_PER_NODE": "4"}, [], "PET_NPROC_PER_NODE=4.*start the script with `paceline run`"),
        ({"RANK": "1"}, [], "RANK=1 is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "8", **BATCH}, [], "WORLD_SIZE=8 is set, but RANK is not"),
        ({}, ["--local-rank=1"], "LOCAL_RANK=1 is set, but RANK is not"),
        ({**TORCH, "RANK": "8"}, [], "RANK=8, WORLD_SIZE=8"),
    ],
)
def test_contradictions(env: dict[str, str], argv: list[str], message: str) -> None:
    with pytest.raises(ContractError, match=message) as caught:
        recognise(env, ["train.py", *argv])
    assert "\n" not in str(caught.value)


def test_mpirun_on_one_node_needs_no_address() -> None:
    env = CONTRACTS["mpi"].write(Placement(rank=1, world_size=2, local_rank=1, local_world_size=2))
    assert recognise(env, []).placement.main_address == "127.0.0.1"


def test_thread_count() -> None:
    assert [thread_count(cores, ranks) for cores, ranks in ((16, 4), (16, 3), (2, 4), (1, 1))] == [4, 5, 1, 1]


@pytest.mark.parametrize(
    ("rank", "local_rank", "here", "node"), [(1, 1, 8, (0, 1)), (5, 1, 4, (1, 2)), (7, 3, 4, (1, 2)), (3, 0, 3, (1, 3))]
)
def test_local_rank_by_hand(rank: int, local_rank: int, here: int, node: tuple[int, int]) -> None:
    """Scripts for Slurm and MPI export RANK, WORLD_SIZE and LOCAL_RANK, and think that this is enough."""
    env = {"RANK": str(rank), "WORLD_SIZE": "8", "LOCAL_RANK": str(local_rank), "MASTER_ADDR": "h"}
    found = recognise(env, [])
    assert found.launcher == "environment"
    p = found.placement
    assert (p.rank, p.local_rank, p.local_world_size) == (rank, local_rank, here)
    assert (p.node_rank, p.node_count) == node


@pytest.mark.parametrize("env", [{"RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}])
def test_a_plan_is_of_one_process_whatever_starts_it(env: dict[str, str]) -> None:
    assert recognise({**env, "PACELINE_PLAN": "/plan.json"}, []).placement == Placement()
