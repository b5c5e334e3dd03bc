"""Python imports this file when a program starts; nothing else is imported before the program imports `horovod`.

Another sitecustomize, further along sys.path, is imported as it would have been without this one.
"""

import os
import sys

_FOLDER = os.path.dirname(__file__)


class _Horovod:
    """Comes before all finders, up to the first import of `horovod`."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> object:
        """`horovod`, as `paceline.horovod.aliases` finds it; None for all other modules."""
        if name != "horovod":
            return None
        from importlib import import_module, util

        sys.meta_path.remove(cls)  # type: ignore[arg-type]  # see below
        if "paceline" not in sys.modules:
            _import_paceline()
        import_module("paceline.horovod.aliases").install()
        return util.find_spec(name)


def _import_paceline() -> None:
    """Import the package that this file belongs to: nothing beside it becomes importable."""
    from importlib import machinery, util

    beside = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))
    spec = machinery.PathFinder.find_spec("paceline", [beside])
    assert spec is not None and spec.loader is not None
    sys.modules["paceline"] = util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["paceline"])


sys.meta_path.insert(0, _Horovod)  # type: ignore[arg-type]  # to name the types would import typing
sys.path[:] = [path for path in sys.path if path != _FOLDER]
# An error of the other one is Python's to show, also that there is none: this module has failed then, and is gone.
del sys.modules["sitecustomize"]
__import__("sitecustomize")
