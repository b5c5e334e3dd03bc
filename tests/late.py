"""Modules that take seconds to import: they are imported when a test first uses them, not when tests are collected."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class _Late:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for marks and fixtures as it collects
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


if TYPE_CHECKING:
    import torch

    import paceline.horovod.torch as hvd
    from paceline.horovod.common import process
    from paceline.job import spec as job_spec
else:
    torch, hvd, process = _Late("torch"), _Late("paceline.horovod.torch"), _Late("paceline.horovod.common.process")
    job_spec = _Late("paceline.job.spec")  # with the validators
