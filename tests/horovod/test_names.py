"""The names that scripts import, and the arguments that they pass by position and by name: those of Horovod 0.28."""

from __future__ import annotations

import importlib
import inspect
import os
import threading
import warnings
from typing import Any

import pytest

from paceline.contract import CONTRACTS, Placement
from tests.late import hvd, torch

_REDUCED = "op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=global"
_SCATTERED = "op=0, process_set=global, prescale_factor=1.0, postscale_factor=1.0"
SIGNATURES = {
    "allreduce": f"tensor, average=None, name=None, compression=none, {_REDUCED}",
    "allreduce_": f"tensor, average=None, name=None, {_REDUCED}",
    "allreduce_async": f"tensor, average=None, name=None, {_REDUCED}",
    "allreduce_async_": f"tensor, average=None, name=None, {_REDUCED}",
    "grouped_allreduce": f"tensors, average=None, name=None, compression=none, {_REDUCED}",
    "grouped_allreduce_": f"tensors, average=None, name=None, {_REDUCED}",
    "grouped_allreduce_async": f"tensors, average=None, name=None, {_REDUCED}",
    "grouped_allreduce_async_": f"tensors, average=None, name=None, {_REDUCED}",
    "sparse_allreduce_async": "tensor, name, op, process_set=global",
    "allgather": "tensor, name=None, process_set=global",
    "allgather_async": "tensor, name=None, process_set=global",
    "grouped_allgather": "tensors, name=None, process_set=global",
    "grouped_allgather_async": "tensors, name=None, process_set=global",
    "broadcast": "tensor, root_rank, name=None, process_set=global",
    "broadcast_": "tensor, root_rank, name=None, process_set=global",
    "broadcast_async": "tensor, root_rank, name=None, process_set=global",
    "broadcast_async_": "tensor, root_rank, name=None, process_set=global",
    "alltoall": "tensor, splits=None, name=None, process_set=global",
    "alltoall_async": "tensor, splits=None, name=None, process_set=global",
    "reducescatter": f"tensor, name=None, compression=none, {_SCATTERED}",
    "reducescatter_async": f"tensor, name=None, {_SCATTERED}",
    "grouped_reducescatter": f"tensors, name=None, compression=none, {_SCATTERED}",
    "grouped_reducescatter_async": f"tensors, name=None, {_SCATTERED}",
    "poll": "handle",
    "synchronize": "handle",
    "join": "device=-1",
    "barrier": "process_set=global",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "process_set_by_id": "process_set_id",
    "process_sets": "",
    "ProcessSet": "ranks_or_comm",
    "init": "comm=None, process_sets=None",
    "start_timeline": "file_path, mark_cycles=False",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=global",
    "allgather_object": "obj, name=None, process_set=global",
    "broadcast_parameters": "params, root_rank, process_set=global",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None, process_set=global",
    "DistributedOptimizer": "optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=0, "
    "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=global",
    **dict.fromkeys(
        ["ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled"], ""
    ),
    **dict.fromkeys(["is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled"], ""),
    **dict.fromkeys(["mpi_threads_supported", "nccl_built", "rank", "rocm_built", "shutdown", "size"], ""),
    "stop_timeline": "",
}
OTHERS = {
    *("Adasum", "Average", "Max", "Min", "Product", "Sum", "Compression", "global_process_set", "elastic"),
    *("HorovodInternalError", "HostsUpdatedInterrupt", "SyncBatchNorm"),
}
OF_MPI_OPS = SIGNATURES.keys() - {
    *("DistributedOptimizer", "broadcast_parameters", "broadcast_optimizer_state"),
    *("broadcast_object", "allgather_object", "process_set_by_id", "process_sets"),
}


def signature(function: Any) -> str:
    known = {id(hvd.global_process_set): "global", id(hvd.Compression.none): "none"}
    made = []
    for one in inspect.signature(function).parameters.values():
        assert one.kind == one.POSITIONAL_OR_KEYWORD
        default = "" if one.default is one.empty else f"={known.get(id(one.default), repr(one.default))}"
        made.append(one.name + default)
    return ", ".join(made)


def test_all_names_are_there_and_no_others() -> None:
    assert sorted(importlib.import_module("paceline.horovod.torch").__all__) == sorted(SIGNATURES.keys() | OTHERS)


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_function_takes_what_that_of_horovod_takes(name: str) -> None:
    function = getattr(hvd, name)
    assert signature(function) == SIGNATURES[name]
    assert function.__name__ == name
    assert function.__doc__
    if name in OF_MPI_OPS:
        assert getattr(importlib.import_module("paceline.horovod.torch.mpi_ops"), name) is function


def test_names_of_modules_beside() -> None:
    util = importlib.import_module("paceline.horovod.common.util")
    assert util.gloo_built(verbose=True)
    for name in ("mpi_built", "nccl_built", "ddl_built", "ccl_built"):
        assert not getattr(util, name)()
    assert (util.extension_available("torch"), util.extension_available("mxnet")) == (True, False)
    basics = importlib.import_module("paceline.horovod.common.basics").HorovodBasics(__file__, "mpi_lib_v2")
    assert (basics.size, basics.Sum) == (hvd.size, hvd.Sum)
    with pytest.raises(AttributeError, match="mlsl_built"):
        basics.mlsl_built()


def test_names_that_scripts_import_from_elsewhere() -> None:
    util = importlib.import_module("paceline.horovod.common.util")
    assert util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2") is None
    with pytest.raises(ImportError, match=r"horovod\.mxnet needs mxnet, which is not installed"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__)
    assert util.is_version_greater_equal_than("2.13.0+cpu", "2.6") and util.is_version_greater_equal_than(
        "2.6", "2.6.0"
    )
    assert not util.is_version_greater_equal_than("1.15.5", "2.0.0")
    exceptions = importlib.import_module("paceline.horovod.common.exceptions")
    assert isinstance(exceptions.HorovodVersionMismatchError("torch", "2.6.0", "2.13.0"), ImportError)
    elastic = importlib.import_module("paceline.horovod.common.elastic")
    assert issubclass(elastic.ObjectState, elastic.AbstractObjectState)
    ops = importlib.import_module("paceline.horovod.torch.mpi_ops")
    assert ops.gpu_available("torch") is torch.cuda.is_available()
    optimizer = importlib.import_module("paceline.horovod.torch.optimizer")
    assert optimizer._DistributedAdasumOptimizer.__mro__[1] is optimizer._DistributedOptimizer


class Batches:
    """A loader as a script writes it."""

    def __init__(self, count: int, fails: bool = False) -> None:
        self.count, self.fails, self.read = count, fails, 0

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Any:
        for number in range(self.count):
            self.read += 1
            yield number
        if self.fails:
            raise OSError("the disk")

    def _process_batch(self, batch: int) -> int:
        return batch * 10


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_loader_reads_ahead_in_a_thread_that_ends(ahead: int) -> None:
    base = importlib.import_module("paceline.horovod.data.data_loader_base")

    class Loader(base.AsyncDataLoaderMixin, Batches, base.BaseDataLoader):  # type: ignore[misc]
        pass

    before = threading.active_count()
    loader = Loader(ahead, 5)
    for _ in range(2):
        assert list(loader) == [0, 10, 20, 30, 40]
    assert next(iter(loader)) == 0  # an epoch that is left
    loader.close_async_loader()
    assert threading.active_count() == before
    with pytest.raises(OSError, match="the disk"):
        list(Loader(ahead, 1, fails=True))
    endless = Loader(ahead, 10**9)
    assert next(iter(endless)) == 0
    endless.close_async_loader()
    assert endless.read <= ahead + 3


def test_names_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    env = importlib.import_module("paceline.horovod.runner.common.util.env")
    placement = Placement(rank=2, world_size=3, local_rank=2, local_world_size=3, node_rank=0, node_count=1)
    for name, value in CONTRACTS["torch"].write(placement).items():
        monkeypatch.setenv(name, value)
    assert env.get_env_rank_and_size() == (2, 3)
    worker = importlib.import_module("paceline.horovod.runner.elastic.worker")
    assert worker.HostUpdateResult is importlib.import_module("paceline.horovod.common.elastic").HostUpdateResult


def test_variables_are_set_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    env = importlib.import_module("paceline.horovod.common.util").env
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD", raising=False)
    with env(HOROVOD_CYCLE_TIME="7", HOROVOD_FUSION_THRESHOLD="0", HOROVOD_TIMELINE=None):
        assert (os.environ["HOROVOD_CYCLE_TIME"], os.environ["HOROVOD_FUSION_THRESHOLD"]) == ("7", "0")
        assert "HOROVOD_TIMELINE" not in os.environ
    assert os.environ["HOROVOD_CYCLE_TIME"] == "5"
    assert "HOROVOD_FUSION_THRESHOLD" not in os.environ


@pytest.mark.parametrize("name", ["allreduce", "allreduce_", "grouped_allreduce_async", "grouped_allreduce"])
def test_the_older_argument_warns_at_the_line_of_the_script(name: str) -> None:
    tensor = torch.ones(1)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(ValueError, match="initialized"):
        warnings.simplefilter("always")
        getattr(hvd, name)([tensor] if "grouped" in name else tensor, average=False)
    assert [(one.category, one.filename) for one in caught] == [(DeprecationWarning, __file__)]
