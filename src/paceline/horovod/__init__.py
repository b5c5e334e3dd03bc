"""The API of Horovod on `torch.distributed`, for PyTorch, TensorFlow and Keras; see docs/horovod.md."""

from typing import Any

__all__ = ["run"]
__version__ = "0.28.1"  # of the API


def __getattr__(name: str) -> Any:
    if name == "run":
        from paceline.horovod.runner import run

        return run
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
