"""Record the training of a script: batches, models, weights and steps; end it after some steps, or kill this rank."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import sys
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any

from paceline.contract.rehearsal import SAVED
from paceline.node.ranks import joining

from .recording import facts_of

if TYPE_CHECKING:
    from paceline.contract.rehearsal import Plan

    from .recording import Record

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))), "")
_MOST_TENSORS, _MOST_NUMBERS = 64, 4096  # of a model that are compared
_MOST_INDICES = 4096  # of a batch
_MOST_ROWS = 32
_COMPARED = (1, 2, 3, 5, 8)  # steps after which weights are compared, besides the last ones
_CUT_AT = 2  # passes that are this much longer than the steps of a rehearsal are shortened


class Over(SystemExit):
    """The rehearsal has seen its steps; the script ends as if it had done all that it wanted to."""

    def __init__(self) -> None:
        super().__init__(0)


class Training:
    """What this rank trains."""

    def __init__(self, record: Record, plan: Plan) -> None:
        """Patch what torch's own training loops call."""
        self._record, self._plan = record, plan
        self._torch: Any = sys.modules["torch"]
        self._optimizers: list[Any] = []
        self._steps: dict[int, int] = {}  # optimizer → steps that it has made
        self._stepping = 0
        self._backwards = 0  # since the last step
        self._reduced: dict[str, tuple[int, float, int]] = {}  # gradient → an element of its sum over a group's ranks
        self._kill_at: int | None = None
        self._loaders = 0
        self._loader: int | None = None  # that has given the last batch
        self._depth = 0  # of modules that are called
        self._passes = 0
        self._has_told = False
        self._patch()

    @property
    def steps(self) -> int:
        """How many steps the optimizer has made that has made most."""
        return max(self._steps.values(), default=0)

    def _patch(self) -> None:
        torch, training = self._torch, self
        optimizer: Any = sys.modules["torch.optim.optimizer"]
        init = torch.optim.Optimizer.__init__

        @functools.wraps(init)
        def made(this: Any, *args: Any, **kwargs: Any) -> None:
            init(this, *args, **kwargs)
            if not any(it is this for it in training._optimizers):
                training._optimizers.append(this)

        torch.optim.Optimizer.__init__ = made
        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)
        backward = torch.Tensor.backward

        @functools.wraps(backward)
        def backwards(this: Any, *args: Any, **kwargs: Any) -> Any:
            training._backwards += 1
            return backward(this, *args, **kwargs)

        torch.Tensor.backward = backwards
        save = torch.save

        @functools.wraps(save)
        def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(f, (str, os.PathLike)):
                return save(obj, f, *args, **kwargs)
            training._record.opened(os.fspath(f), "write")  # C code opens it
            result = save(obj, f, *args, **kwargs)
            training._record.saved()
            return result

        torch.save = torch.serialization.save = saved
        self._patch_loader()
        self._patch_models()

    # -- batches -------------------------------------------------------------------------------------------------------

    def _patch_loader(self) -> None:
        data, training = self._torch.utils.data, self
        begin = data.DataLoader.__iter__
        inner = sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter
        next_index, next_batch = inner._next_index, inner.__next__

        @functools.wraps(begin)
        def begun(this: Any) -> Any:
            at = training._record.where(sys._getframe(1))
            if getattr(this, "_iterator", None) is not None:  # its workers stay, and it goes on with this object
                this._iterator.__dict__.setdefault("_rehearsed", deque()).clear()
            found = begin(this)
            if at and training._record.is_rank and "paceline" not in type(this).__module__:
                with contextlib.suppress(Exception):
                    training._begin(this, found, at)
            return found

        @functools.wraps(next_index)
        def index(this: Any) -> Any:
            found = next_index(this)
            this.__dict__.setdefault("_rehearsed", deque()).append(found)
            return found

        @functools.wraps(next_batch)
        def batch(this: Any) -> Any:
            if not hasattr(this, "_rehearsal") or not training._record.is_rank:
                return next_batch(this)
            return training._next(this, next_batch)

        data.DataLoader.__iter__, inner._next_index, inner.__next__ = begun, index, batch

    def _begin(self, loader: Any, found: Any, at: str) -> None:
        """Note a pass over a loader."""
        self._loaders += 1
        maps = not isinstance(loader.dataset, self._torch.utils.data.IterableDataset)
        length = _length(loader)
        sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
        base, _ = _base(loader.dataset, [])
        cut = self._cut(length) if maps else None
        found.__dict__.setdefault("_rehearsed", deque())
        found._rehearsal = [self._loaders, 0, loader.dataset, cut]
        self._record.note(
            "pass", loader=self._loaders, at=at, length=length, samples=_length(loader.dataset), base=_length(base),
            batch=loader.batch_size, drops=bool(loader.drop_last or getattr(sampler, "drop_last", False)),
            sampler=type(sampler).__name__, replicas=getattr(sampler, "num_replicas", None),
            rank=getattr(sampler, "rank", None), epoch=getattr(sampler, "epoch", None),
            shuffles=getattr(sampler, "shuffle", None), cut=cut is not None, maps=maps, subset=_subset(loader.dataset),
        )  # fmt: skip

    def _cut(self, length: int | None) -> range | None:
        """The batches of a long pass that are passed over, so that its end is rehearsed too; None: none are."""
        steps = self._plan["steps"]
        if length is None or length < _CUT_AT * steps:
            return None
        first = steps // 2
        return range(first, first + (length - steps) // steps * steps)

    def _next(self, this: Any, next_batch: Any) -> Any:
        loader, number, dataset, cut = this._rehearsal
        while cut is not None and number in cut:
            number = this._rehearsal[1] = cut.stop if not this._num_workers else number + 1
            if this._num_workers:
                next_batch(this)
                this._rehearsed.popleft()
            else:  # their samples need not be loaded
                for _ in cut:
                    this._sampler_iter.__next__()
        try:
            found = next_batch(this)
        except StopIteration:
            self._record.note("passed", loader=loader, batches=number)
            raise
        this._rehearsal[1] += 1
        indices = this._rehearsed.popleft() if this._rehearsed else None
        if indices is not None:
            indices = indices if isinstance(indices, (list, tuple)) else [indices]
            with contextlib.suppress(Exception):
                indices = _base(dataset, [int(it) for it in indices[:_MOST_INDICES]])[1]
                self._record.note("batch", loader=loader, number=number, indices=indices, rows=_rows(found))
        self._loader = loader
        return found

    # -- models --------------------------------------------------------------------------------------------------------

    def _patch_models(self) -> None:
        torch, training = self._torch, self
        parallel = torch.nn.parallel.DistributedDataParallel
        init = parallel.__init__

        @functools.wraps(init)
        def made(this: Any, *args: Any, **kwargs: Any) -> None:
            for name in ("device_ids", "output_device"):
                kwargs.pop(name, None)  # there are no GPUs
            init(this, args[0] if args else kwargs.pop("module"), **kwargs)
            ranks = torch.distributed.get_process_group_ranks(this.process_group)
            at = training._record.where(sys._getframe(1))
            if not sys._getframe(1).f_code.co_filename.startswith(_PACKAGE):
                training._record.note("parallel", kind="DistributedDataParallel", ranks=list(ranks), at=at)

        parallel.__init__ = made
        join: Any = importlib.import_module("torch.distributed.algorithms.join").Join
        enter = join.__enter__

        @functools.wraps(enter)
        def entered(this: Any) -> Any:
            training._record.note("uneven", at=training._record.where(sys._getframe(1)))
            return enter(this)

        join.__enter__ = entered
        modules: Any = sys.modules["torch.nn.modules.module"]
        modules.register_module_forward_pre_hook(self._before_forward)
        modules.register_module_forward_hook(self._after_forward, always_call=True)

    def _before_forward(self, module: Any, args: Any) -> None:
        self._depth += 1
        if self._depth > 1 or not self._torch.is_grad_enabled() or not self._record.is_rank:
            return
        tensors = [it for it in args if hasattr(it, "shape") and it.numel() > 1]
        if tensors and module.training and self._passes < 4 * self._plan["steps"]:
            self._passes += 1
            with contextlib.suppress(Exception):
                self._record.note(
                    "forward", sum=_checksum(tensors[0]), model=type(module).__name__, rows=int(tensors[0].shape[0]),
                    at=self._record.where(sys._getframe(1)), **facts_of(tensors[0]),
                )  # fmt: skip

    def _after_forward(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def name_of(self, tensor: Any) -> str:
        """Which gradient or parameter of an optimizer a tensor is; "" if it is none."""
        with contextlib.suppress(Exception):
            pointer, size, total = tensor.data_ptr(), tensor.numel(), 0
            for number, optimizer in enumerate(self._optimizers):
                for index, parameter in enumerate(_parameters(optimizer)):
                    total += parameter.numel()
                    if parameter.grad is not None and parameter.grad.data_ptr() == pointer:
                        return f"gradient {number}.{index}"
                    if parameter.data_ptr() == pointer:
                        return f"parameter {number}.{index}"
            if size and size == total:
                return "all gradients"
        return ""

    def reduced(self, which: str, tensor: Any, ranks: int) -> None:
        """Note an element of a sum over ranks, to see what becomes of it until the step."""
        if which.startswith("gradient"):
            flat = tensor.detach().reshape(-1)
            index = int(flat.abs().argmax())
            self._reduced[which] = index, float(flat[index]), ranks

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        self._stepping += 1
        if self._stepping > 1 or not self._record.is_rank:
            return
        if self._reduced and self._backwards <= 1:
            with contextlib.suppress(Exception):
                self._note_ratio()
        self._reduced.clear()

    def _note_ratio(self) -> None:
        """Note what the first gradient that was summed over ranks is divided by."""
        which, (index, total, ranks) = next(iter(self._reduced.items()))
        number, _, place = which.partition(" ")[2].partition(".")
        gradient = _parameters(self._optimizers[int(number)])[int(place)].grad.reshape(-1)
        if total and float(gradient[index]):
            ratio = total / float(gradient[index])
            self._record.note("divided", by=ratio, ranks=ranks, at=self._record.where(sys._getframe(2)))

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._stepping = max(0, self._stepping - 1)
        if self._stepping or not self._record.is_rank:
            return
        if not any(it is optimizer for it in self._optimizers):
            self._optimizers.append(optimizer)
        number = next(index for index, it in enumerate(self._optimizers) if it is optimizer)
        made = self._steps[number] = self._steps.get(number, 0) + 1
        self._backwards = self._depth = 0
        if not self._has_told:
            self._has_told = True
            for kind, uses in (
                ("horovod", hasattr(optimizer, "synchronize")), ("library", "paceline.train.run" in sys.modules),
            ):  # fmt: skip
                if uses:
                    self._record.note(kind)
        facts: dict[str, Any] = {}
        last = 3 * self._plan["steps"]
        if made in _COMPARED or made % self._plan["steps"] == 0 or made >= last:
            with contextlib.suppress(Exception):
                facts["weights"] = _weights(optimizer)
        self._record.note(
            "step", optimizer=number, number=made, loader=self._loader, memory=_memory(),
            at=self._record.where(sys._getframe(1)), **facts,
        )  # fmt: skip
        self._record.clock += 1
        self._perhaps_die()
        if made >= last:
            self._record.note("limit", alone=joining.is_alone())
            raise Over

    def _perhaps_die(self) -> None:
        """Kill this rank some steps after a state was saved, if it is the one that is to die."""
        record, plan = self._record, self._plan
        if record.attempt or record.rank != plan["victim"]:
            return
        if self._kill_at is None:
            own = os.path.join(os.environ.get("PACELINE_RUN_DIR", ""), "saved.json")
            if os.path.exists(os.path.join(record.folder, SAVED)) or os.path.exists(own):
                self._kill_at = self.steps + plan["after"]
        elif self.steps >= self._kill_at:
            record.note("killed", step=self.steps)
            os.kill(os.getpid(), signal.SIGKILL)


def _parameters(optimizer: Any) -> list[Any]:
    return [it for group in optimizer.param_groups for it in group["params"]]


def _weights(optimizer: Any) -> dict[str, Any]:
    """Sums of what the optimizer trains, and of its state; `shapes` say whether ranks have the same."""
    parameters = _parameters(optimizer)
    found: dict[str, Any] = {
        "sharded": any(type(it).__name__ in ("DTensor", "FlatParameter") for it in parameters),
        "shapes": zlib.crc32(repr([tuple(it.shape) for it in parameters]).encode()),
        "sums": [], "state": [], "rate": [float(group.get("lr", 0.0)) for group in optimizer.param_groups],
    }  # fmt: skip
    if found["sharded"]:
        return found
    for parameter in parameters[:_MOST_TENSORS]:
        found["sums"].append(_sums(parameter))
        state = optimizer.state.get(parameter, {})
        for name in sorted(state, key=str):
            value = state[name]
            if hasattr(value, "numel") and value.is_floating_point():
                found["state"].append(_sums(value))
            elif isinstance(value, (int, float)):
                found["state"].append([float(value), abs(float(value))])
    return found


def _sums(tensor: Any) -> list[float]:
    """The weighted sum of some elements of a tensor, and the sum of what was added."""
    flat = tensor.detach().reshape(-1)[:_MOST_NUMBERS].double()
    if not flat.numel():
        return [0.0, 0.0]
    weights = flat.new_ones(flat.shape).cumsum(0).remainder(7).add(1)
    return [float((flat * weights).sum()), float((flat.abs() * weights).sum())]


def _checksum(tensor: Any) -> int:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _MOST_NUMBERS)
    return zlib.crc32(flat[::step].contiguous().cpu().numpy().tobytes())


def _rows(batch: Any) -> list[int]:
    """Checksums of the first samples of a batch, by its first tensor; empty if it has none."""
    while isinstance(batch, (list, tuple, dict)) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    if not hasattr(batch, "detach") or not batch.dim():
        return []
    return [zlib.crc32(it.contiguous().numpy().tobytes()) for it in batch.detach()[:_MOST_ROWS].cpu()]


def _base(dataset: Any, indices: list[int]) -> tuple[Any, list[int]]:
    """The data set that subsets are taken from, and the indices there."""
    while type(dataset).__name__ == "Subset" and hasattr(dataset, "indices"):
        indices = [int(dataset.indices[it]) for it in indices]
        dataset = dataset.dataset
    return dataset, indices


def _subset(dataset: Any) -> int | None:
    """A checksum of the indices that a subset has of its data set; None for another one."""
    is_one = type(dataset).__name__ == "Subset" and hasattr(dataset, "indices")
    return zlib.crc32(repr(list(map(int, dataset.indices))).encode()) if is_one else None


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def _memory() -> int:
    """Bytes of memory that this process has, of pages that it shares its share."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    return 0
