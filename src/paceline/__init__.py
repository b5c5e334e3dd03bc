"""paceline: one command trains a script on one machine, SSH hosts, Slurm or Kubernetes.

The names below are imported when they are used, so `import paceline` needs nothing but the standard library.
"""

from typing import TYPE_CHECKING, Any

from paceline._version import __version__

__all__ = ["Run", "Strategy", "__version__", "init", "jobs", "launch"]

if TYPE_CHECKING:
    from paceline.train.launch import launch
    from paceline.train.parallel.strategy import Strategy
    from paceline.train.run import Run, init

    from . import jobs

_HOMES = {"init": "run", "Run": "run", "Strategy": "parallel.strategy", "launch": "launch"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name != "jobs":
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    import importlib

    if name == "jobs":
        return importlib.import_module("paceline.jobs")
    return getattr(importlib.import_module(f"paceline.train.{_HOMES[name]}"), name)
