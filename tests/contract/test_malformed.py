"""A variable that cannot be read gives one line that names it."""

from __future__ import annotations

import pytest

from paceline.contract import CONTRACTS, OWN_CONTRACT, Contract, ContractError, Placement

TWO = Placement(rank=1, world_size=2, local_rank=1, local_world_size=2, endpoints=("a:1", "a:2"), devices=("0",))


@pytest.mark.parametrize(
    ("contract", "changes", "message"),
    [
        ("torch", {"RANK": "two"}, "RANK='two' is not a whole number"),
        ("torch", {"RANK": "2"}, r"rank 2 is not in 0…world_size - 1 .*RANK=2, WORLD_SIZE=2"),
        ("torch", {"RANK": "-1"}, "RANK=-1"),
        ("torch", {"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        ("torch", {"LOCAL_WORLD_SIZE": "0", "GROUP_RANK": None, "GROUP_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE=0"),
        ("torch", {"GROUP_RANK": "7"}, "GROUP_RANK=7"),
        ("torch", {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ("horovod", {"HOROVOD_SIZE": None}, "HOROVOD_SIZE is not set"),
        ("horovod", {"HOROVOD_LOCAL_RANK": "5"}, "HOROVOD_LOCAL_RANK=5"),
        ("paddle", {"PADDLE_TRAINERS_NUM": "1"}, "PADDLE_TRAINERS_NUM=1"),
        ("paddle", {"PADDLE_MASTER": "somewhere"}, "PADDLE_MASTER='somewhere' is not host:port"),
        ("paddle", {"PADDLE_TRAINER_ENDPOINTS": "a:1"}, "1 endpoints for a world size of 2.*PADDLE_TRAINERS_NUM=2"),
        ("jax", {"JAX_COORDINATOR_ADDRESS": ":1"}, "JAX_COORDINATOR_ADDRESS=':1' is not host:port"),
        ("jax", {"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2"),
        ("mpi", {"OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE='many'"),
        ("slurm", {"SLURM_STEP_TASKS_PER_NODE": "2(3)"}, r"2\(3\)' is not a Slurm list of tasks per node"),
        ("slurm", {"SLURM_NODEID": "1"}, "SLURM_NODEID=1 is not one of the nodes in SLURM_STEP_TASKS_PER_NODE=2"),
        ("slurm", {"SLURM_PROCID": "9"}, "SLURM_PROCID=9"),
        ("slurm", {"SLURM_STEP_NUM_TASKS": None, "SLURM_NTASKS": None}, "neither SLURM_STEP_NUM_TASKS nor"),
        ("slurm", {"SLURM_STEP_NODELIST": "n[1-"}, r"'n\[1-' is not a Slurm node list"),
        ("tensorflow", {"TF_CONFIG": "{"}, "TF_CONFIG='{' does not hold a cluster and a task"),
        ("tensorflow", {"TF_CONFIG": "[1]"}, "TF_CONFIG"),
        (
            "tensorflow",
            {"TF_CONFIG": '{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}'},
            "not workers",
        ),
        (
            "tensorflow",
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}'},
            "rank 1 is not in.*TF_CONFIG",
        ),
        ("indexed", {"PACELINE_PROCESS_NUM": None}, "PACELINE_PROCESS_NUM is not set"),
        ("paceline", {"PACELINE_MAIN_PORT": "x"}, "PACELINE_MAIN_PORT='x'"),
    ],
)
def test_malformed(contract: str, changes: dict[str, str | None], message: str) -> None:
    known: dict[str, Contract] = {**CONTRACTS, "paceline": OWN_CONTRACT}
    env = {**known[contract].write(TWO), **changes}
    with pytest.raises(ContractError, match=message) as caught:
        known[contract].read({name: text for name, text in env.items() if text is not None})
    assert "\n" not in str(caught.value)
