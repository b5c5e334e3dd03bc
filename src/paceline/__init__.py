"""paceline: one command trains a script on one machine, SSH hosts, Slurm or Kubernetes.

The names below are imported when they are used, so `import paceline` needs nothing but the standard library.
"""

from typing import TYPE_CHECKING, Any

from paceline._version import __version__

__all__ = [
    "AccumulationChanged",
    "AllReduce",
    "AutoSync",
    "CheckpointError",
    "CheckpointFolderTaken",
    "CollectiveMismatch",
    "ContractError",
    "DataMismatch",
    "DiLoCo",
    "Disagreement",
    "LeftEarly",
    "LocalSGD",
    "LogMismatch",
    "ModelMismatch",
    "NotBuilt",
    "NotConnected",
    "NotExchanged",
    "OptimizerMismatch",
    "PeerLost",
    "PowerSGD",
    "Preempted",
    "RankFailed",
    "ReplicaMismatch",
    "Run",
    "Strategy",
    "TopK",
    "UnitsMixed",
    "UnusedParameters",
    "WrongDevice",
    "__version__",
    "init",
    "jobs",
    "launch",
]  # fmt: skip

if TYPE_CHECKING:
    from paceline.contract.functions import RankFailed
    from paceline.contract.placement import ContractError
    from paceline.train.checkpoint.errors import CheckpointError, CheckpointFolderTaken
    from paceline.train.control.connect import NotConnected
    from paceline.train.control.errors import CollectiveMismatch, LeftEarly, PeerLost, ReplicaMismatch
    from paceline.train.control.exit_report import Preempted
    from paceline.train.data.agreement import DataMismatch
    from paceline.train.group.join import Disagreement
    from paceline.train.launch import launch
    from paceline.train.metrics.reduction import LogMismatch
    from paceline.train.parallel.errors import (
        AccumulationChanged,
        ModelMismatch,
        NotBuilt,
        NotExchanged,
        OptimizerMismatch,
        UnitsMixed,
        UnusedParameters,
        WrongDevice,
    )
    from paceline.train.parallel.strategy import Strategy
    from paceline.train.parallel.sync.options import AllReduce, AutoSync, DiLoCo, LocalSGD, PowerSGD, TopK
    from paceline.train.run import Run, init

    from . import jobs

_HOMES = {
    "init": "train.run", "Run": "train.run", "Strategy": "train.parallel.strategy", "launch": "train.launch",
    "AllReduce": "train.parallel.sync.options", "AutoSync": "train.parallel.sync.options",
    "DiLoCo": "train.parallel.sync.options",
    "LocalSGD": "train.parallel.sync.options",
    "PowerSGD": "train.parallel.sync.options", "TopK": "train.parallel.sync.options",
    # errors
    "AccumulationChanged": "train.parallel.errors",
    "CheckpointError": "train.checkpoint.errors",
    "CheckpointFolderTaken": "train.checkpoint.errors",
    "CollectiveMismatch": "train.control.errors",
    "ContractError": "contract.placement",
    "DataMismatch": "train.data.agreement",
    "Disagreement": "train.group.join",
    "LeftEarly": "train.control.errors",
    "LogMismatch": "train.metrics.reduction",
    "ModelMismatch": "train.parallel.errors",
    "NotBuilt": "train.parallel.errors",
    "NotConnected": "train.control.connect",
    "NotExchanged": "train.parallel.errors",
    "OptimizerMismatch": "train.parallel.errors",
    "PeerLost": "train.control.errors",
    "Preempted": "train.control.exit_report",
    "RankFailed": "contract.functions",
    "ReplicaMismatch": "train.control.errors",
    "UnitsMixed": "train.parallel.errors",
    "UnusedParameters": "train.parallel.errors",
    "WrongDevice": "train.parallel.errors",
}  # fmt: skip


if not TYPE_CHECKING:  # a type checker finds what is misspelt

    def __getattr__(name: str) -> Any:
        if name not in _HOMES and name != "jobs":
            raise AttributeError(f"module 'paceline' has no attribute {name!r}")
        import importlib

        if name == "jobs":
            return importlib.import_module("paceline.jobs")
        return getattr(importlib.import_module(f"paceline.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
