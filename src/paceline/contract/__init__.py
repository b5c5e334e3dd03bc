"""The environment variables of every launcher and framework, written and read in one place.

`CONTRACTS` maps the name that `--framework` takes to the class that knows that framework's variables; `OWN_CONTRACT`
knows paceline's own variables, which every rank gets too. `recognise` finds out which launcher started the
calling process.
"""

from __future__ import annotations

from .base import Contract, Variables
from .horovod import HorovodContract
from .indexed import IndexedContract
from .jax import JaxContract
from .mpi import MpiContract
from .paceline import (
    ERROR_FILE,
    GIT_CREDENTIALS,
    HOROVOD,
    RANK_KEY,
    RESUME_CODE,
    STOP_SIGNALS,
    TOKEN,
    WANTS_INTERRUPT,
    PacelineContract,
)  # fmt: skip
from .paddle import PaddleContract
from .placement import ContractError, Placement
from .recognise import Recognised, recognise
from .slurm import SlurmContract
from .tensorflow import TensorflowContract
from .threads import thread_count
from .torch import TorchContract

CONTRACTS: dict[str, Contract] = {
    contract.name: contract
    for contract in (
        TorchContract(),
        HorovodContract(),
        PaddleContract(),
        TensorflowContract(),
        JaxContract(),
        MpiContract(),
        SlurmContract(),
        IndexedContract(),
    )
}
OWN_CONTRACT: Contract = PacelineContract()

__all__ = [
    "CONTRACTS",
    "ERROR_FILE",
    "GIT_CREDENTIALS",
    "HOROVOD",
    "OWN_CONTRACT",
    "RANK_KEY",
    "RESUME_CODE",
    "STOP_SIGNALS",
    "TOKEN",
    "WANTS_INTERRUPT",
    "Contract",
    "ContractError",
    "Placement",
    "Recognised",
    "Variables",
    "recognise",
    "thread_count",
]
