"""Small helpers that scripts import from `horovod.common.util`."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def is_iterable(value: object) -> bool:
    """Whether one can iterate over it."""
    return isinstance(value, Iterable)


def split_list(items: Sequence[T], parts: int) -> list[list[T]]:
    """Split a list into at most `parts` lists whose lengths differ by one at most; empty ones are left out."""
    each, odd = divmod(len(items), parts)
    bounds = [index * each + min(index, odd) for index in range(parts + 1)]
    made = [list(items[start:end]) for start, end in itertools.pairwise(bounds)]
    return [part for part in made if part]


def num_rank_is_power_2(count: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return count > 0 and count & (count - 1) == 0


@contextlib.contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set variables of the environment for a while; those that are None stay as they are."""
    wanted = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is the API of a framework: "torch", and "tensorflow" and "keras" where they are installed."""
    return ext_base_name == "torch" or (
        ext_base_name in ("tensorflow", "keras") and importlib.util.find_spec(ext_base_name) is not None
    )


def _built(name: str) -> Callable[..., Any]:
    def built(verbose: bool = False) -> Any:
        from . import process

        return getattr(process, name)()

    built.__name__ = built.__qualname__ = name
    built.__doc__ = f"The answer of `hvd.{name}`."
    return built


gloo_built, mpi_built, nccl_built = _built("gloo_built"), _built("mpi_built"), _built("nccl_built")
ddl_built, ccl_built = _built("ddl_built"), _built("ccl_built")
cuda_built, rocm_built = _built("cuda_built"), _built("rocm_built")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Check that there is the API of a framework, such as "horovod.torch".

    Raises:
        ImportError: there is not.
    """
    name = ext_name.rpartition(".")[2]
    if not extension_available(name):
        raise ImportError(f"{ext_name} needs {name}, which is not installed")


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Nothing was built for a version of a framework, so each one will do."""


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether a version such as "2.13.0+cpu" is at least another one, such as "2.6.0"."""
    first, second = ([int(part) for part in re.findall(r"\d+", it.partition("+")[0])[:3]] for it in (ver, target))
    return first + [0] * (3 - len(first)) >= second + [0] * (3 - len(second))


def gpu_available(*_: Any) -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()
