"""Makes the modules of this package importable as `horovod`, `horovod.torch` and so on."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

from paceline.contract import HOROVOD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

_OURS = "paceline.horovod"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `horovod.X` as the module `paceline.horovod.X`: the same one, under both names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module of a name, if it is ours."""
        if fullname.partition(".")[0] != "horovod":
            return None
        if fullname == "horovod" and os.environ.get(HOROVOD) != "paceline":
            installed = self._installed()
            if installed is not None:
                sys.meta_path.remove(self)
                return installed
        there = importlib.util.find_spec(_name(fullname))
        if there is None:
            return None
        is_package = there.submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def _installed(self) -> importlib.machinery.ModuleSpec | None:
        """Another package of the name; a folder without `__init__.py` is none."""
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec("horovod", None) for finder in others)
        return next((spec for spec in found if spec is not None and spec.origin is not None), None)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_name(spec.name))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed; the import system has replaced its spec, which is put back."""
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, module.__loader__)
        if module.__spec__ is not None and hasattr(module, "__path__"):
            module.__spec__.submodule_search_locations = list(module.__path__)


def _name(fullname: str) -> str:
    return _OURS + fullname.removeprefix("horovod")


def install() -> None:
    """Make them importable; where Horovod is installed, only if PACELINE_HOROVOD says "paceline"."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
