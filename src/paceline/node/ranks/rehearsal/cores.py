"""Run a script for GPUs on cores: what it puts on a GPU stays where it is."""

from __future__ import annotations

import sys
from typing import Any


def use(local_rank: int) -> None:
    """Take the CPU for each GPU, from now on."""
    torch: Any = sys.modules["torch"]
    modes: Any = sys.modules["torch.overrides"]
    device_type, tensor, cpu = torch.device, torch.Tensor, torch.device("cpu")
    moves = {tensor.to, torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.tensor, torch.full}

    def replaced(value: Any) -> Any:
        if (isinstance(value, str) and value.startswith("cuda")) or (
            isinstance(value, device_type) and value.type == "cuda"
        ):
            return cpu
        return value

    class OnCores(modes.TorchFunctionMode):  # type: ignore[misc]  # torch is not known here
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is tensor.cuda:
                return args[0]
            kwargs = dict(kwargs or {})
            if "device" in kwargs:
                kwargs["device"] = cpu if type(kwargs["device"]) is int else replaced(kwargs["device"])
            if func in moves:
                moved = func is tensor.to and len(args) > 1 and type(args[1]) is int
                args = (args[0], cpu, *args[2:]) if moved else tuple(map(replaced, args))
            return func(*args, **kwargs)

    OnCores().__enter__()
    torch.cuda.set_device = torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_, **__: None
    torch.cuda.current_device = lambda: local_rank
