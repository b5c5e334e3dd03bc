"""A model of which each rank keeps a part, by torch's `fully_shard`."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import inspect
import logging
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from paceline.train.group.sharded import is_dtensor, kind_of, name_of
from paceline.train.parallel.errors import NotExchanged, UnitsMixed
from paceline.train.parallel.model import Model, broadcast, without_exchange
from paceline.train.parallel.nested import mapped, tensors_in
from paceline.train.parallel.same_batch import COMPARED, other_batches
from paceline.train.parallel.units import compute_again, describe, find_units, scales

from .by_script import by_script, fsdp_groups
from .layout import spread
from .mesh import make_mesh, shard_size
from .tensor import divide, forget_groups, plan_of
from .wires import Wires

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from paceline.train.group.group import Group
    from paceline.train.parallel.build import Built
    from paceline.train.parallel.model import Look
    from paceline.train.parallel.strategy import Strategy
    from paceline.train.torch_types import Arguments

    from .evaluation import JointPasses

log = logging.getLogger("paceline")
_MMAP_THRESHOLD, _LARGE = -3, 4 << 20  # of glibc's malloc.h; bytes


class ShardedModel(Model):
    """A user's model, each rank with its part of all parameters, gradients and states of optimizers.

    A forward pass gathers the parameters of a unit at a time, and so is a collective, also without gradients. In an
    evaluation, a rank that has no more batches takes part in the passes of the others; see `JointPasses`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: Group,
        strategy: Strategy,
        *,
        look: Look | None,
        built: Built | None,
        passes: JointPasses,
    ) -> None:
        self._is_sharded = self._was_cut = self._is_repeating = False
        self._is_last = True  # what torch begins with
        self._has_exchanged = True  # the last backward
        self._compared = 0
        self._together: dist.ProcessGroup | None = None  # the ranks that compute layers together
        self._by_script: dist.ProcessGroup | None = None  # the same, where the script has divided these
        self._mode = contextlib.ExitStack()  # of a pass
        self._passes, self._number = passes, passes.add(self)
        super().__init__(module, group, dataclasses.replace(strategy, replicas="off"), look, built)

    # -- setting up ----------------------------------------------------------------------------------------------------

    def _to_device(self, module: torch.nn.Module) -> None:
        """Move nothing yet: each unit moves when it is sharded, so the device never has the whole model."""

    def _exchanges_again(self) -> None:
        module = self.module
        if not self._is_sharded:
            self._shard()
            self._is_sharded = True
        self._trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._dtypes = [p.dtype for _, p in self._trained]
        self.late.watch([p for _, p in self._trained if kind_of(p) is None])
        self._compute = self._compute_together = module

    def _shard(self) -> None:
        from torch.distributed.fsdp import FSDPModule

        module, group, strategy = self.module, self._group, self.strategy
        if group.device.type == "cpu":
            give_back_memory()
        given = by_script(module, group)
        mesh = given.data
        self._by_script = given.layers
        if mesh is None:
            is_whole = strategy.tensor > 1 and given.layers is None
            plan = plan_of(module, strategy.plan, strategy.tensor) if is_whole else {}
            mesh, tensor = make_mesh(shard_size(strategy.shard, group), group)
            self._together = tensor.get_group() if is_whole and tensor is not None else None
            given.spread_numbers(module, mesh)
            units = find_units(module, strategy.units)
            self._shard_units(units, mesh, lambda part, name: divide(part, _within(plan, units, name), tensor))
            module.set_reduce_scatter_unused_params(strategy.find_unused_parameters)  # type: ignore[operator]
        else:
            given.spread_numbers(module, mesh)
        ranks = mesh.get_group(mesh.ndim - 1)
        self._wires = Wires(group, dist.get_process_group_ranks(ranks), ranks)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                # torch calls them, and asks for no more than that.
                part.set_custom_reduce_scatter(self._wires.reduce_scatter)  # type: ignore[arg-type]
                part.set_custom_all_gather(self._wires.all_gather)  # type: ignore[arg-type]
                if group.device.type == "cpu":  # to gather the next unit early takes memory, and saves no time
                    part.set_modules_to_backward_prefetch([part])
        type(module).__deepcopy__ = type(module).__reduce_ex__ = no_copy  # type: ignore[attr-defined,assignment,method-assign]
        for part in module.modules():
            part.register_load_state_dict_pre_hook(_spread_state)  # type: ignore[no-untyped-call]
        module.register_forward_pre_hook(self._before_pass, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after_pass, always_call=True)

    def _shard_units(
        self, units: Mapping[str, torch.nn.Module], mesh: DeviceMesh, divide: Callable[[torch.nn.Module, str], None]
    ) -> None:
        """Shard a model, a unit at a time; `divide` divides its layers before."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        if "ignored_params" not in inspect.signature(fully_shard).parameters:
            raise RuntimeError(
                f"models cannot be sharded with torch {torch.__version__}, whose fully_shard has no ignored_params; "
                "install a later version, such as the newest"
            )
        module, group = self.module, self._group
        is_half = self.strategy.precision == "bf16"
        whole = {p for p in module.parameters() if not can_be_sharded(p)}
        whole |= {p for unit in units.values() for p in scales(unit)} if is_half else set()
        check_units(module, units, whole)
        offloads = self.strategy.offload and group.device.type != "cpu"
        offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
        shard = functools.partial(fully_shard, mesh=mesh, ignored_params=whole, offload_policy=offload)
        # Autocast would keep a copy in bfloat16 of all that is gathered, until the backward pass.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        if not is_half:
            policy = MixedPrecisionPolicy()
        if group.is_main:
            ranks = mesh.size(mesh.ndim - 1)
            layers = f", layers over {self.strategy.tensor}" if self.strategy.tensor > 1 else ""
            said = f"{self.name}: {describe(module, units)}, over {ranks} rank{'s' if ranks > 1 else ''}{layers}"
            print(f"paceline: {said}", file=sys.stderr, flush=True)
        with group.guard:
            for name, part in (*units.items(), ("", module)):
                self._prepare(part, is_root=part is module, whole=whole)
                before = dict(part.named_parameters())
                divide(part, name)
                if part is module:  # torch keeps what is beside the units until the end of the pass
                    shard(part)
                else:
                    shard(part, reshard_after_forward=self.strategy.reshard, mp_policy=policy)
                for own, parameter in part.named_parameters():
                    if parameter is not before[own]:
                        self._replaced(before[own], parameter)

    def _prepare(self, part: torch.nn.Module, *, is_root: bool, whole: set[torch.nn.Parameter]) -> None:
        """Give a unit rank 0's numbers, and let it be compiled and computed again as the strategy says."""
        device = self._group.device
        self._fill(part, self.module)
        for parameter in part.parameters():
            if kind_of(parameter) is not None:
                continue  # of a unit within
            moved = parameter.data.to(device)
            dist.broadcast(moved, 0)
            parameter.data = moved
        if is_root:
            for owner in part.modules():
                for name, buffer in owner._buffers.items():
                    if buffer is not None:
                        owner._buffers[name] = moved = buffer.to(device)
                        dist.broadcast(moved, 0)
            return
        if self.strategy.recompute:
            compute_again(part)
        if self.strategy.compile:
            part.compile(**({} if self.strategy.compile is True else {"backend": self.strategy.compile}))

    def refresh(self) -> None:
        """Train the parameters that are trained now; a collective of all ranks."""
        new = [name for name, p in self.named if id(p) in self.got_later()]
        if new:
            raise NotExchanged(
                f"{self.name} got the parameter {new[0]} after run.setup, which has sharded it; add it before run.setup"
            )
        self._exchanges_again()

    # -- the forward pass ----------------------------------------------------------------------------------------------

    def _run(self, given: Arguments) -> Any:
        if self._was_cut:
            self.module.reset_iter_state()  # type: ignore[operator]
            self._was_cut = False
        if self._is_training:
            if self._has_changed:
                self.refresh()
            self.late.forget()
            self._compare(given)
            if self.module.training:
                self.share_buffers()
        return self._computed(given)

    def _compare(self, given: Arguments) -> None:
        """In the first passes, check that ranks that compute layers together were given the same batch."""
        ranks = self._together or self._by_script
        if self._compared >= COMPARED or ranks is None:
            return
        self._compared += 1
        line = other_batches(given, ranks)
        if line and self._together is not None:
            raise RuntimeError(line)
        if line:  # a script may give each of them a part of the sequence
            self._compared = COMPARED
            log.warning("%s, unless each is to have a part of it", line)

    @property
    def _is_training(self) -> bool:
        return torch.is_grad_enabled() and not self._is_evaluating

    def _before_pass(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Before each pass, also one that a method of the model begins: let ranks without batches take part."""
        alone = not (self._is_training or self._is_repeating)
        if torch.is_inference_mode_enabled():
            # torch keeps the tensors that units are gathered to, and those of this mode could never be trained.
            self._mode.enter_context(torch.inference_mode(False))
            self._mode.enter_context(torch.no_grad())
            args, kwargs = mapped((args, kwargs), _changeable)
        if alone:
            self._passes.goes_on(self._number, (args, kwargs))
        return args, kwargs

    def _after_pass(self, *_: Any) -> None:
        """After each pass, also one that an error has ended: leave what it has entered."""
        self._mode.close()

    def _computed(self, given: Arguments) -> Any:
        args, kwargs = given
        try:
            result = self._compute(*args, **kwargs)
        except RuntimeError as error:
            self._was_cut = True
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise UnitsMixed(
                f"a module of {self.name} uses parameters of another unit, which are not gathered "
                f"then ({str(error).splitlines()[0][:200]}): make one unit of both, or leave both out of the units: "
                "Strategy(units=(…))"
            ) from error
        except BaseException:
            self._was_cut = True
            raise
        found = [each for each in tensors_in(result) if each.requires_grad]
        if found:
            torch.autograd.graph.register_multi_grad_hook(found, self._backward_begins, mode="any")
        return result

    def _backward_begins(self, _: torch.Tensor) -> None:
        self.has_gradients, self._has_exchanged = True, self._is_last

    def cut(self) -> None:
        """Note that an error has ended a pass."""
        self._was_cut = True

    def compute_again(self, given: Arguments) -> None:
        """Take part in a pass of other ranks."""
        self._is_repeating = True
        try:
            with torch.no_grad():
                self._computed(given)
        finally:
            self._is_repeating = False

    def share_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks."""
        with self._group.guard:
            broadcast(list(self.module.buffers()))

    # -- gradients -----------------------------------------------------------------------------------------------------

    def exchange(self, last: bool) -> None:
        """Set whether the next backward is the last of its accumulation, and so exchanges gradients."""
        self._is_evaluating = False
        if last is not self._is_last:
            self._is_last = last
            self.module.set_requires_gradient_sync(last)  # type: ignore[operator]

    def _no_sync(self) -> AbstractContextManager[None]:
        return without_exchange(self, self._is_last)

    @property
    def exchanges(self) -> bool:
        """Whether the next `backward` waits for the other ranks: each does, as it gathers parameters."""
        return bool(self._trained)

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over the ranks now."""
        return self._is_last

    def _is_late(self) -> bool:
        self.has_gradients = True
        return self._is_last

    def gradients(self) -> list[torch.Tensor]:
        """All gradients so far, also those that are not exchanged yet."""
        here = [parameter.grad for _, parameter in self._trained if parameter.grad is not None]
        return [*here, *self.not_exchanged()]  # the module may have its gathered parameters now

    def not_exchanged(self) -> list[torch.Tensor]:
        """Gradients of an accumulation that are not in `grad` of its parameters yet."""
        return list(_accumulated(self.module))

    def check_inputs(self, inputs: set[int]) -> bool:
        """Whether a backward for these tensors, given by their ids, gives gradients of this model."""
        if any(id(p) in inputs for _, p in self._trained):
            raise ValueError("inputs= cannot have parameters of a sharded model; leave inputs= out, or set shard=False")
        return False

    def check_gradients(self, complete: bool, again: bool = False) -> None:
        """Check that the exchange of the gradients of a backward is complete, if there are any."""
        super().check_gradients(complete, again)
        self.has_gradients = False
        if complete and self._has_exchanged and not self._may_be_unused:
            self._check_unused()

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent for parameters and gradients."""
        return self._wires.sent

    @property
    def method(self) -> str | None:
        """The name of the method that exchanges gradients now."""
        return "shard"

    def close(self) -> None:
        """Give back what the exchange holds."""
        if self._is_sharded:
            self._wires.close()
        if self.strategy.tensor > 1:
            forget_groups()


def _within(plan: Mapping[str, ParallelStyle], units: Collection[str], unit: str) -> dict[str, ParallelStyle]:
    """What a plan has for the layers of a unit, by their names in it; "" is what is outside of all units."""
    if unit:
        own = {name.removeprefix(f"{unit}."): style for name, style in plan.items() if name.startswith(f"{unit}.")}
        return own | ({"": plan[unit]} if unit in plan else {})
    return {name: style for name, style in plan.items() if not any(f"{name}.".startswith(f"{each}.") for each in units)}


def give_back_memory() -> None:
    """Let the C library give back the memory of each large tensor at once.

    Otherwise glibc keeps what a unit has used, up to 32 MB each, among memory that is used: see mallopt(3).
    """
    with contextlib.suppress(AttributeError, OSError):  # other C libraries have no mallopt
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def check_units(
    module: torch.nn.Module, units: Mapping[str, torch.nn.Module], whole: Collection[torch.nn.Parameter]
) -> None:
    """Check that `fully_shard` takes the parameters of a model, before anything is changed."""
    kinds: dict[str, tuple[str, torch.dtype]] = {}  # of the units, and of the rest
    for name, parameter in module.named_parameters():
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            raise ValueError(f"{name} has hooks, which a sharded parameter loses: register them after run.setup")
        if parameter in whole:
            if parameter.requires_grad and not parameter.is_floating_point():
                raise ValueError(f"{name} is trained, and is {parameter.dtype}: only floating-point numbers can be")
            continue
        unit = next((each for each in units if name.startswith(f"{each}.")), "")
        other, dtype = kinds.setdefault(unit, (name, parameter.dtype))
        if dtype != parameter.dtype:
            raise ValueError(
                f"{other} is {dtype}, and {name}, which is sharded together with it, {parameter.dtype}: convert one of "
                "them, or give them units of their own: Strategy(units=(…))"
            )
    for name, part in module.named_modules():
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse:
            raise ValueError(f"{name} has sparse gradients, which cannot be sharded; use sparse=False")


def can_be_sharded(parameter: torch.Tensor) -> bool:
    """Whether `fully_shard` takes a parameter; others are the same on all ranks, and their gradients averaged."""
    return parameter.dim() > 0 and parameter.numel() > 0 and parameter.is_floating_point()


def _changeable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be changed in place outside of inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def _accumulated(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The gradients of an accumulation, which torch keeps whole until they are exchanged, and has no name for."""
    for params in fsdp_groups(module):
        for each in params.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            if each.unsharded_accumulated_grad is not None:
                yield each.unsharded_accumulated_grad
            if whole is not None and whole.grad is not None:
                yield whole.grad


def no_copy(module: torch.nn.Module, *_: Any) -> NoReturn:
    """In place of `__deepcopy__` and `__reduce_ex__` of a model of which each rank has a part."""
    raise TypeError(
        f"{name_of(module)} is divided among the ranks, so it has no copy: each has a part of it; keep what "
        "state_dict() returns, or write a checkpoint and export it: paceline checkpoint export (docs/sharding.md)"
    )


def _spread_state(module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict` of a model, or of a part of it: take this rank's part of whole tensors."""
    # Parameters may be gathered now, as after an error; `state_dict` gives them back first.
    own = module.state_dict() if isinstance(state, dict) and not prefix else module._parameters
    spread(state, {prefix + name: each for name, each in own.items() if is_dtensor(each)})
