"""What a run has set up: models and optimizers, each with its own strategy, and everything that a checkpoint holds."""

from __future__ import annotations

import dataclasses
import logging
import os
import types
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import torch

from paceline.contract.exchange import SYNC, TRIAL_STEPS
from paceline.contract.memory import PLAN
from paceline.train.collective_trace import script_line
from paceline.train.group import sharded
from paceline.train.group.sharded import check_savable, is_dtensor

from .alike import check_alike, check_kind, check_optimizer_kind
from .build import Builds
from .errors import NotExchanged, UnusedParameters
from .late_exchange import LooseParameters
from .model import Model, some_of
from .optimizer import is_part_of_step, only_makes_state, prepare_optimizer, unscaled
from .shard.evaluation import JointPasses
from .shard.layout import keeps_parts, local_tensors, spread_optimizer
from .step_counts import StepCounts
from .strategy import Strategy
from .sync.options import describe
from .sync.saved import SavedSync

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from paceline.train.group.group import Group
    from paceline.train.torch_types import ParamGroup, StateDict

    from .model import Look
    from .pipeline.stages import Stages
    from .shard.choice import Options
    from .shard.optimizer import Parts
    from .shard.undecided import Choices, Kept, Undecided
    from .sync.methods.synchroniser import Synchroniser

    Reshard = Callable[[Sequence[Any], int, int], Any]


log = logging.getLogger("paceline")


class Stateful(Protocol):
    """Something with a state that a checkpoint can hold."""

    def state_dict(self) -> Any:
        """The state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Load a state."""


class Loop(Protocol):
    """The training loop, as far as optimizers are concerned."""

    def is_accumulating(self, every: int) -> bool:
        """Whether an accumulation is not complete, with `every` batches per step of the optimizer."""

    def optimizer_stepped(self, number: int) -> None:
        """Called after each step of an optimizer, with its place in the order of `setup`, from 0."""


@dataclass(frozen=True)
class RankPart:
    """An object of which each rank saves its own state.

    Attributes:
        thing: the object.
        reshard: called as `reshard(states, rank, world_size)` with the states of all ranks that saved, in rank order;
            returns the state of a rank among another number of ranks.
        is_users: whether the script has registered it; then another number of ranks cannot continue without it.
        is_required: whether a checkpoint without it does not fit.
    """

    thing: Stateful
    reshard: Reshard | None = None
    is_users: bool = False
    is_required: bool = False


@dataclass
class _Uses:
    """What an optimizer uses the gradients of.

    Attributes:
        changes: number of changes of what is exchanged, when this was found out.
        size: number of its parameters then.
        parts: models and loose parameters, and those of their parameters that it updates.
        seen: by the id of their exchange, the number of backward passes before its last step.
    """

    changes: int
    size: int
    parts: list[tuple[Model | LooseParameters, list[torch.Tensor]]]
    seen: dict[int, int]


class Trained(TypedDict):
    """What is trained, and how, as a checkpoint has it."""

    frozen: list[list[str]]  # names of parameters, of each model
    kept: Sequence[Kept | None]  # how models are kept of which that was not known from the start
    added: list[list[list[tuple[int, str] | None]]]  # names in groups that optimizers got later


class Prepared:
    """The models and optimizers of a run, and what its checkpoints hold besides them.

    Attributes:
        optimizers: those that were set up.
        replicas: `Strategy.replicas` of each of them.
        look: is called at the first forward passes, see `Model`.
        builds: models that were made without memory.
        settled: number of models of which it is known since their first pass how they are kept.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._models: list[Model] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._strategies: list[Strategy] = []  # of each of them
        self.replicas: list[str] = []
        self._registered: dict[str, Stateful] = {}
        self._rank_parts: dict[str, RankPart] = {}
        self._accumulates: set[int] = set()
        self._loose: list[LooseParameters] = []  # of each optimizer
        self._groups_given: list[int] = []  # of each optimizer, when it was set up
        self._restored: set[frozenset[int]] = set()  # groups of parameters that a resume has added
        self._added: dict[int, list[Any]] = {}  # of each optimizer of a checkpoint, the groups that it had got later
        self._waiting: weakref.WeakKeyDictionary[torch.optim.Optimizer, StateDict] = weakref.WeakKeyDictionary()
        self._changes = 0  # of what is exchanged
        self._uses: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Uses] = weakref.WeakKeyDictionary()
        self._follows: set[int] = set()  # places of optimizers after whose steps ranks may exchange something
        self._step_counts = StepCounts(group)
        self._factor: float | torch.Tensor = 1.0  # of the last loss
        self.look: Look | None = None
        self.builds = Builds()
        self._passes = JointPasses(group)
        self._choices: Choices | None = None
        self.settled = 0
        self._divides = False
        self._parts: dict[torch.optim.Optimizer, Parts] = {}  # where the state is sharded
        self._kept: set[torch.optim.Optimizer] = set()  # those whose parameters are on several stages

    # -- set up --------------------------------------------------------------------------------------------------------

    def add(self, thing: Any, strategy: Strategy | None, loop: Loop) -> Any:
        """Set up a model, with the strategy that `chosen` has returned, or an optimizer.

        Returns what takes its place in the training loop.
        """
        if isinstance(thing, torch.nn.Module):
            assert strategy is not None, "it is what `chosen` has returned"
            chosen = strategy
            self._check_shared(thing, chosen)  # also with a model of the same call
            self._warn_of_variable(chosen)
            check_alike(self._group, thing, chosen)
            model = self._begun(thing, chosen)
            if model.synchroniser is not None:
                part = SavedSync(model, model.strategy.method, self._group)
                self.register_on_rank(f"run.sync-{len(self._models)}", part)
            self._models.append(model)
            for optimizer, own in zip(self.optimizers, self._strategies, strict=True):
                if self._renew(optimizer):
                    self._shard_state(optimizer, own)
            self._changes += 1
            self._accumulates.add(model.strategy.accumulate)
            return model.wrapped
        if isinstance(thing, torch.optim.Optimizer):
            check_optimizer_kind(thing)
            self._renew(thing)
            if any(thing is optimizer for optimizer in self.optimizers):
                raise ValueError(f"this {type(thing).__name__} was set up before; pass an optimizer to run.setup once")
            strategy = self._strategy_of(thing, strategy)
            every = strategy.accumulate
            followed = self._followed(thing)
            number = self._step_counts.add(thing)
            self._follows |= {number} if followed else set()

            def stepped(skipped: bool) -> None:
                # Gradients that are the same on all ranks overflow on all or none. Ranks that train alone may differ.
                if not (skipped and all(synchroniser.steps_alike for synchroniser in followed)):
                    self._step_counts.stepped(number)
                for synchroniser in followed:
                    with self._group.guard:
                        synchroniser.after_step()
                loop.optimizer_stepped(number)

            is_sharded = self._shard_state(thing, strategy)
            prepare_optimizer(
                thing,
                self._group,
                strategy,
                is_accumulating=lambda: loop.is_accumulating(every),
                is_divided=lambda: self._is_divided(thing),
                reduced_loss=self._reduced_loss,
                stepped=stepped,
            )
            self.optimizers.append(thing)
            self._strategies.append(strategy)
            self._loose.append(LooseParameters(self._group, every))
            self._groups_given.append(len(thing.param_groups))
            self.replicas.append("off" if is_sharded else strategy.replicas)
            self._accumulates.add(every)
            self._follow_groups(thing)
            return thing
        raise TypeError(f"setup takes modules and optimizers, not {type(thing).__name__}")

    def chosen(self, module: torch.nn.Module, strategy: Strategy | None) -> Strategy:
        """The strategy of a model: what is given, with what the environment says, and how the script has divided it."""
        chosen = (strategy or Strategy()).completed(os.environ)
        self._check_shared(module, chosen)
        check_kind(module)
        if not any(map(is_dtensor, module.state_dict().values())):
            return chosen
        from .shard.by_script import by_script  # it imports much of torch

        given = by_script(module, self._group)
        options = {f"shard={chosen.shard!r}": given.data and chosen.shard, chosen.together_option: chosen.together > 1}
        for option in (each for each, has in options.items() if has):
            raise ValueError(
                f"{sharded.name_of(module)} is divided by the script already, and Strategy({option}) divides models "
                "that are whole; leave out one of them"
            )
        return dataclasses.replace(chosen, tensor=given.together)

    def _begun(self, module: torch.nn.Module, strategy: Strategy) -> Model:
        """The model, or what waits for its first pass, if that decides how it is kept."""
        if strategy.shard == "auto" and isinstance(module, torch.jit.ScriptModule):  # it takes no hooks, and no copies
            return self._made(module, dataclasses.replace(strategy, shard=False))
        if strategy.shard != "auto" and PLAN not in os.environ:
            return self._made(module, strategy)
        if self._choices is None:
            from .shard.undecided import Choices  # it imports much of torch

            self._choices = Choices(self._group, self._passes, self._settle)
            self._choices.divides_batches = self._divides
        own = lambda: [self.optimizers[number] for number in self._optimizers_of(module)]  # noqa: E731 - those of then
        return self._choices.make(module, strategy, own, self.builds.of(module))

    def _optimizers_of(self, module: torch.nn.Module) -> list[int]:
        """The places of the optimizers that update a model."""
        mine = {id(parameter) for parameter in module.parameters()}
        return [n for n, each in enumerate(self.optimizers) if any(id(p) in mine for _, p in _named(each))]

    def _settle(self, model: Undecided, options: Options) -> None:
        """Keep a model, of which it was not known how, as these options say. A collective of all ranks."""
        places = self._optimizers_of(model.module)
        made = self._made(model.module, dataclasses.replace(model.strategy, **options))
        model.passes_on(made)
        self._models[self._models.index(model)] = made
        self.settled += 1
        for place in places:
            optimizer, own = self.optimizers[place], self._strategies[place]
            self._renew(optimizer)
            if own.shard == "auto":
                self._strategies[place] = own = dataclasses.replace(own, **options)
            self._shard_state(optimizer, own)
        self.adopt()

    def divides_batches(self) -> None:
        """Note that the batches of a rank become smaller with more ranks."""
        self._divides = True
        if self._choices is not None:
            self._choices.divides_batches = True

    def is_known(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is known how the models are kept that an optimizer updates."""
        return self._choices is None or not self._choices.has({id(p) for _, p in _named(optimizer)})

    def decide(self, saved: Trained | None = None) -> None:
        """Let it be known of each model how it is kept, as what `trained` has returned says; a collective."""
        if self._choices is not None:
            self._choices.rest(() if saved is None else saved.get("kept", ()))

    def _made(self, module: torch.nn.Module, strategy: Strategy) -> Model:
        """The model with its exchange: the only place that asks how it is kept."""
        built = self.builds.of(module)
        own = sharded.is_fully_sharded(module)
        if not own and (strategy.keeps_copies or self._group.world_size == 1):
            return Model(module, self._group, strategy, self.look, built)
        if strategy.pipeline > 1:
            from .pipeline.model import PipelineModel

            return PipelineModel(module, self._group, strategy, self.look, built)
        from .shard.model import ShardedModel  # it imports much of torch that others do not need

        return ShardedModel(module, self._group, strategy, look=self.look, built=built, passes=self._passes)

    def _check_shared(self, module: torch.nn.Module, strategy: Strategy) -> None:
        """Check that a model is a new one, and has no parameters of another one, if one of them is sharded."""
        if any(module is model.module for model in self._models):
            raise ValueError(f"this {type(module).__name__} was set up before; pass a model to run.setup once")
        for model in self._models:
            theirs = {id(parameter) for _, parameter in model.named}
            for name, parameter in module.named_parameters():
                is_shared = model.current(parameter) is not parameter or id(parameter) in theirs
                if is_shared and not (model.strategy.keeps_copies and strategy.keeps_copies):
                    raise ValueError(
                        f"{name} of {type(module).__name__} is also a parameter of {model.name}, and "
                        "one of them is divided among ranks; make both parts of one model, and pass that to run.setup"
                    )

    def _shard_state(self, optimizer: torch.optim.Optimizer, strategy: Strategy) -> bool:
        """Keep this rank's part of an optimizer's state, if that is asked for; returns whether its parameters are."""
        for stages in self.stages:
            if any(stages.has_one(p) for _, p in _named(optimizer)):
                if optimizer not in self._kept:
                    stages.keep(optimizer)
                    self._kept.add(optimizer)
                return False
        is_sharded = any(is_dtensor(p) for _, p in _named(optimizer))
        if not is_sharded and (strategy.shard != "optimizer" or self._group.world_size == 1):
            return False
        from .shard.optimizer import Parts, check_each_number, takes_parts

        is_new = optimizer not in self._parts
        if is_sharded:
            check_each_number(optimizer, rows=False)
            if optimizer in self.optimizers:
                self.replicas[self.optimizers.index(optimizer)] = "off"
        if is_new and (takes_parts(optimizer) or not is_sharded):
            self._parts[optimizer] = parts = Parts(
                optimizer, self._group, (model.module for model in self._models), rows=not is_sharded
            )
            keeps_parts(optimizer, parts.like)
            if optimizer in self.optimizers:  # its state is that of all ranks
                optimizer.load_state_dict(optimizer.state_dict())
        elif is_new:
            if optimizer in self.optimizers:
                spread_optimizer(optimizer)
            optimizer.register_load_state_dict_post_hook(spread_optimizer)
        return is_sharded

    def _is_divided(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ranks have different gradients: parts of them, or those of other parameters; the same on all."""
        return any(is_dtensor(p) or not self.is_on_all(p) for _, p in _named(optimizer))

    def _renew(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let an optimizer that was made before its model was set up train what its parameters have become."""
        is_new = False
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                for model in self._models:
                    now = model.current(parameter)
                    if now is not parameter:
                        group["params"][place], is_new = now, True
                        if parameter in optimizer.state:
                            optimizer.state[now] = optimizer.state.pop(parameter)
        return is_new

    def adopt(self) -> None:
        """Make all that the optimizers train a part of the run; a collective of all ranks if something is new."""
        self._changes += 1
        self._refresh_models(self.optimizers)
        left_out = {id(p) for part in self._rank_parts.values() for p in _parameters(part.thing)}
        left_out |= {id(p) for model in self._models for p in model.module.parameters()}
        for optimizer, loose in zip(self.optimizers, self._loose, strict=True):
            named = {name: p for name, p in _named(optimizer) if p.requires_grad and id(p) not in left_out}
            loose.hold(named)
            for model in self._models:
                model.sum_over_stages(named.values())

    def _refresh_models(self, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Exchange parameters that a model got after it was set up, and that optimizers train; returns if any."""
        if self._group.world_size == 1:
            return False
        trained = {id(p) for optimizer in optimizers for _, p in _named(optimizer) if p.requires_grad}
        grown = [model for model in self._models if model.got_later() & trained]
        for model in grown:
            model.refresh()
        return bool(grown)

    def _follow_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Let groups of parameters that the optimizer gets later belong to the run."""
        add = optimizer.add_param_group

        def add_param_group(_: torch.optim.Optimizer, param_group: ParamGroup) -> None:
            given = param_group["params"]
            param_group = {**param_group, "params": [given] if isinstance(given, torch.Tensor) else list(given)}
            if _ids(param_group) in self._restored:  # the script adds it again in the epoch that is resumed
                return
            add(param_group)
            self._shard_state(optimizer, self._strategies[self.optimizers.index(optimizer)])
            self.adopt()
            if optimizer in self._waiting:
                self._load_group(optimizer)

        optimizer.add_param_group = types.MethodType(add_param_group, optimizer)  # type: ignore[method-assign]

    def cut(self, optimizer: torch.optim.Optimizer, state: StateDict) -> StateDict:
        """The part of an optimizer's state whose groups it has; the others wait until the script adds them again."""
        groups = state["param_groups"][: len(optimizer.param_groups)]
        if optimizer not in self.optimizers or len(groups) == len(state["param_groups"]):
            return state
        if len(state["param_groups"]) - len(groups) > len(self._added.get(self.optimizers.index(optimizer), ())):
            return state  # they were there from the start
        self._waiting[optimizer] = state
        return {"param_groups": groups, "state": _states_of(state, groups)}

    def _load_group(self, optimizer: torch.optim.Optimizer) -> None:
        """Load the state of the group that was added last."""
        saved, now = self._waiting[optimizer], optimizer.state_dict()
        group = saved["param_groups"][len(now["param_groups"]) - 1]
        now["param_groups"][-1] = group
        now["state"] |= _states_of(saved, [group])
        if len(now["param_groups"]) == len(saved["param_groups"]):
            del self._waiting[optimizer]
        optimizer.load_state_dict(now)

    def _warn_of_variable(self, strategy: Strategy) -> None:
        """Warn if the script's own choice of a method keeps that of the environment from having an effect."""
        name = os.environ.get(SYNC)
        if name and name != strategy.sync and self._group.is_main and TRIAL_STEPS not in os.environ:
            log.warning("%s=%s has no effect: the script says Strategy(sync=%r)", SYNC, name, strategy.sync)

    def _followed(self, optimizer: torch.optim.Optimizer) -> list[Synchroniser]:
        """The exchanges of models that this optimizer is the first to update, and that must know its steps."""
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = []
        for model in self._models:
            synchroniser = model.synchroniser
            is_updated = any(id(parameter) in mine for parameter in model.module.parameters())
            if is_updated and synchroniser is not None and synchroniser.needs_optimizer:
                synchroniser.follow(optimizer)
                found.append(synchroniser)
        return found

    def _strategy_of(self, optimizer: torch.optim.Optimizer, given: Strategy | None) -> Strategy:
        """The strategy of an optimizer, which must agree with that of its model."""
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        models = [m for m in self._models if any(id(parameter) in mine for parameter in m.module.parameters())]
        own = given or (models[0].strategy if models else Strategy())
        for model in models:
            if model.strategy.accumulate != own.accumulate:
                raise ValueError(
                    f"{type(optimizer).__name__} is set up with accumulate={own.accumulate}, and the model whose "
                    f"parameters it updates with accumulate={model.strategy.accumulate}; set both up with the "
                    "same value"
                )
        return own

    def register(self, name: str, thing: Any, *, per_rank: bool = False, reshard: Reshard | None = None) -> None:
        """Add an object to the checkpoints."""
        if not callable(getattr(thing, "state_dict", None)) or not callable(getattr(thing, "load_state_dict", None)):
            value = repr(thing) if isinstance(thing, (bool, int, float, str, type(None))) else "…"
            raise TypeError(
                f"{name} is of type {type(thing).__name__}, which has no state_dict and load_state_dict; "
                f"keep the script's own values in run.state: state = run.state({name}={value}), then state.{name}"
            )
        if reshard is not None and not per_rank:
            raise ValueError(
                "reshard= is for objects of which each rank saves its own state: pass per_rank=True as well"
            )
        if name in self.stateful() or name == "progress" or name in self._rank_parts:
            raise ValueError(f"the name {name} is taken; register {type(thing).__name__} under another name")
        if per_rank:
            self._rank_parts[name] = RankPart(thing, reshard, is_users=True, is_required=True)
        else:
            check_savable(name, thing)
            self._registered[name] = thing

    def register_on_rank(self, name: str, thing: Stateful, reshard: Reshard | None = None) -> None:
        """Add an object of which each rank saves its own state, such as the error of a compression.

        Without `reshard`, it is loaded only if the number of ranks is the same as at the save; otherwise it is not
        changed.
        """
        if name in self._rank_parts:
            raise ValueError(f"the name {name} is taken")
        self._rank_parts[name] = RankPart(thing, reshard, is_users=reshard is not None)

    def stateful(self) -> dict[str, Stateful]:
        """The parts that are the same on all ranks: `model`, `optimizer` (numbered from the second on), registered."""
        named: dict[str, Stateful] = {}
        kinds: dict[str, list[Any]] = {"model": [m.stateful for m in self._models], "optimizer": self.optimizers}
        for kind, things in kinds.items():
            for number, thing in enumerate(things):
                named[kind if number == 0 else f"{kind}-{number}"] = thing
        inside = {id(p) for thing in self._registered.values() for p in _parameters(thing)}
        for number, loose in enumerate(self._loose):
            loose.leave_to_others(inside)
            if len(loose) or loose.is_expected:
                named[_loose_part(number)] = loose
        return {**named, **self._registered}

    def complete(self, states: Mapping[str, Any]) -> None:
        """Add what other ranks alone know to the states of what `stateful` returns; a collective of all ranks."""
        named = self.stateful() if self.stages else {}
        for name, thing in named.items():
            for stages in self.stages:
                if isinstance(thing, torch.optim.Optimizer) and any(stages.has_one(p) for _, p in _named(thing)):
                    stages.complete(states[name])

    def rank_parts(self) -> dict[str, RankPart]:
        """The parts of which each rank saves its own state, except random states."""
        return dict(self._rank_parts)

    def clear(self) -> None:
        """Release the models, before their process group ends."""
        for model in self._models:
            model.close()
        for parts in self._parts.values():
            parts.close()
        self._models.clear()
        self._uses.clear()

    def sent(self) -> int:
        """Bytes that this rank has sent to other machines, or to ranks with which it shares no memory."""
        return sum(model.sent for model in self._models) + sum(parts.sent for parts in self._parts.values())

    def method(self) -> str | None:
        """The name of the method by which models exchange what they learn, or the names; None if none does."""
        return ", ".join(dict.fromkeys(model.method for model in self._models if model.method)) or None

    def trained(self) -> Trained:
        """What is trained now, and how: names of frozen parameters, and those of groups that optimizers got later."""
        names = {id(p): (number, name) for number, m in enumerate(self._models) for name, p in m.named}
        added = [o.param_groups[given:] for o, given in zip(self.optimizers, self._groups_given, strict=True)]
        return {
            "frozen": [[name for name, p in m.named if not p.requires_grad] for m in self._models],
            "kept": [] if self._choices is None else self._choices.records(),
            "added": [[[names.get(id(p)) for p in group["params"]] for group in groups] for groups in added],
        }

    def expect(self, names: Collection[str]) -> None:
        """Note which parts a checkpoint has that is loaded next: loose parameters may come later."""
        for number, loose in enumerate(self._loose):
            loose.is_expected = _loose_part(number) in names

    def train_as(self, saved: Trained) -> None:
        """Train what was trained when a checkpoint was taken, as with layers that are unfrozen in a later epoch."""
        changed: dict[bool, list[str]] = {True: [], False: []}
        for model, frozen in zip(self._models, saved["frozen"], strict=False):
            for name, parameter in model.named:
                if parameter.requires_grad == (name in frozen):
                    parameter.requires_grad_(name not in frozen)
                    changed[parameter.requires_grad].append(name)
        said = [
            f"{some_of(names)}: {'trained' if is_trained else 'frozen'}"
            for is_trained, names in changed.items()
            if names
        ]
        if said and self._group.is_main:
            log.warning("as when the checkpoint was taken, %s", "; ".join(said))
        self._added = dict(enumerate(saved["added"]))
        for optimizer, given, added in zip(self.optimizers, self._groups_given, saved["added"], strict=False):
            for names in added[len(optimizer.param_groups) - given :]:
                here = [dict(self._models[place[0]].named).get(place[1]) for place in names if place is not None]
                if len(here) < len(names) or any(p is None for p in here):
                    break
                optimizer.add_param_group({"params": here})
                self._restored.add(_ids(optimizer.param_groups[-1]))

    # -- training ------------------------------------------------------------------------------------------------------

    @property
    def has_models(self) -> bool:
        """Whether a model was set up."""
        return bool(self._models)

    @property
    def was_called(self) -> bool:
        """Whether a model was called with gradients since the last backward."""
        return any(model.was_called for model in self._models)

    @property
    def registered(self) -> list[Stateful]:
        """What the script has registered."""
        return [*self._registered.values(), *(part.thing for part in self._rank_parts.values() if part.is_required)]

    @property
    def modules(self) -> list[Stateful]:
        """The models that were set up, as the script has made them."""
        return [model.stateful for model in self._models]

    @property
    def models(self) -> list[Model]:
        """The models that were set up."""
        return self._models

    @property
    def stages(self) -> list[Stages]:
        """The stages of models whose blocks are on different ranks."""
        return [model.stages for model in self._models if model.stages is not None]

    def is_on_all(self, parameter: torch.Tensor) -> bool:
        """Whether all ranks have a parameter, whole or a part of it."""
        return not any(stages.has_one(parameter) for stages in self.stages)

    def to_step(self) -> Model:
        """The model that `Run.pipeline_step` trains: the one whose blocks are on different ranks, or the only one."""
        found = [model for model in self._models if model.stages is not None] or self._models
        if len(found) != 1:
            what = "no model was set up" if not found else f"{len(found)} models were set up"
            raise RuntimeError(f"run.pipeline_step trains one model, and {what}; call run.setup(model) for one first")
        return found[0]

    @property
    def shared_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that the script has registered, without those of which each rank has its own."""
        return [thing for thing in self._registered.values() if isinstance(thing, torch.optim.Optimizer)]

    @property
    def size(self) -> int:
        """The number of models, optimizers and registered things."""
        return len(self._models) + len(self.optimizers) + len(self._registered) + len(self._rank_parts)

    @property
    def has_optimizers(self) -> bool:
        """Whether an optimizer was set up or registered."""
        return any(True for _ in self._all_optimizers())

    def _all_optimizers(self) -> Iterator[torch.optim.Optimizer]:
        yield from self.optimizers
        yield from (thing for thing in self.registered if isinstance(thing, torch.optim.Optimizer))

    @property
    def accumulates(self) -> set[int]:
        """The numbers of batches per step of the optimizers; more than one if strategies differ."""
        return self._accumulates or {1}

    @property
    def has_new_gradients(self) -> bool:
        """Whether gradients that ranks exchange were computed since the last `check_gradients`."""
        return any(model.has_gradients for model in self._models)

    def has_gradients(self) -> bool:
        """Whether a parameter of some optimizer has a gradient other than zero; on a GPU, waits for it."""
        parameters = [p for optimizer in self._all_optimizers() for _, p in _named(optimizer)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        gradients += [gradient for model in self._models for gradient in model.not_exchanged()]
        here = any(bool((g._values() if g.is_sparse else g).any()) for g in local_tensors(gradients))
        if self.stages or any(map(is_dtensor, parameters)):  # of which ranks may have other gradients
            return bool(self._group.all_reduce(float(here), "max"))
        return here

    def exchanges_after(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ranks may exchange something after the steps of an optimizer that was set up."""
        return any(self.optimizers[place] is optimizer for place in self._follows)

    def accumulate_of_loss(self) -> int:
        """The number of batches per step of the models that the current loss was computed with."""
        found = self.accumulates
        if len(found) > 1:
            found = {model.strategy.accumulate for model in self._models if model.was_called}
            if len(found) != 1:
                what = "models set up with different Strategy.accumulate" if found else "no model that was set up"
                for model in self._models:
                    model.was_called = False
                raise RuntimeError(
                    f"this loss was computed with {what}, so it is not known how many batches make a step; "
                    "call the models that run.setup returned, and run.backward before the next one is called"
                )
        return next(iter(found))

    def backward(
        self,
        compute: Callable[[float | torch.Tensor], None],
        factor: float | torch.Tensor,
        step: int,
        inputs: Sequence[torch.Tensor] | None,
    ) -> None:
        """Do a backward, which is a collective if gradients are exchanged."""
        self._check_followed()
        self._factor = factor
        if self._choices is not None and PLAN in os.environ:
            self._choices.rest()  # no pass was seen, and nothing is to be trained
        given = None if inputs is None else {id(tensor) for tensor in inputs}
        expects = given is None
        for model in self._models:
            if given is not None and model.check_inputs(given):
                expects = True
        if not any([model.exchanges for model in self._models]):
            compute(factor)
            self._average_loose()
            if self._choices is not None:
                self._choices.check()
            return
        self._step_counts.exchanges(step)
        with self._group.guard:
            try:
                compute(factor)
            except BaseException as error:
                for model in self._models:
                    model.cut()
                if isinstance(error, RuntimeError):
                    self._explain(error)
                raise
        if self._choices is not None:
            self._choices.check()
        has_gradients = any(model.has_gradients for model in self._models)
        beside = (p for loose in self._loose for p in loose.late.parameters)
        if expects and not has_gradients and all(p.grad is None for p in beside):
            raise UnusedParameters(
                f"the loss of rank {self._group.rank} at {script_line()} depends on no model that was set up, while "
                "the other ranks wait for its gradients; if a batch has nothing to learn from, use "
                "model(x).sum() * 0"
            )
        self._average_loose()

    def _average_loose(self) -> None:
        for loose in self._loose:
            loose.average()

    def average_rest(self) -> None:
        """Average gradients that the next step would average, as those are used before it."""
        for loose in self._loose:
            if not loose.is_averaged:
                loose.average()

    def saw_loss(self, loss: torch.Tensor) -> None:
        """Note the loss of this rank's batch, as a GradScaler has scaled it or not."""
        for model in self._models:
            if model.synchroniser is not None and model.was_called:
                model.synchroniser.saw_loss(unscaled(loss))

    def _explain(self, error: RuntimeError) -> None:
        """Raise why an exchange has failed, if that is why a backward has: torch passes on its text at most."""
        for model in self._models:
            cause = model.synchroniser.error if model.synchroniser is not None else None
            if isinstance(cause, RuntimeError):
                raise cause from error
            if cause is not None:
                raise RuntimeError(f"the exchange of gradients failed: {cause}") from cause

    def _check_followed(self) -> None:
        for model in self._models:
            if model.synchroniser is not None and model.synchroniser.needs_optimizer:
                method, name = describe(model.strategy.method), type(model.module).__name__
                raise RuntimeError(
                    f"{method} must know the optimizer; pass the one of {name} to run.setup, after the model"
                )

    def check_partial(self) -> None:
        """Check that the gradients of an accumulation that is not complete were not changed."""
        for model in self._models:
            model.check_partial()

    def _reduced_loss(self, loss: Any) -> Any:
        """The loss over all ranks: what a closure has returned on each rank, weighted like its gradients."""
        if loss is None:
            return None
        for model in self._models:
            if model.synchroniser is not None and not model.synchroniser.steps_alike:
                raise RuntimeError(
                    "optimizer.step(closure) needs the loss of all ranks, and with "
                    f"{describe(model.strategy.method)} each rank steps alone; use an optimizer without a closure, or "
                    "another method in Strategy(sync=…)"
                )
        given = loss if isinstance(loss, torch.Tensor) else torch.tensor(float(loss), dtype=torch.float32)
        own = given.detach().to(self._group.device)
        # If a rank's batch is a stand-in, its loss may be NaN.
        own = own * self._factor if isinstance(self._factor, torch.Tensor) or self._factor else torch.zeros_like(own)
        total = self._group.all_reduce(own) / self._group.world_size
        return total if isinstance(loss, torch.Tensor) else float(total)

    def exchange(self, is_last: Callable[[int], bool]) -> None:
        """Set, for each `Strategy.accumulate`, whether the next backward is the last one of its accumulation."""
        for model in self._models:
            model.exchange(is_last(model.strategy.accumulate))
        for loose in self._loose:
            loose.averages = is_last(loose.accumulate)

    def before_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """Average gradients that no backward pass has averaged, before any optimizer uses them.

        Such are those that the script has computed by `torch.autograd.grad`, or that an optimizer uses which steps in
        a hook, in the middle of the backward pass.
        """
        if only_makes_state():
            return
        if any(model.is_stepping for model in self._models):
            raise RuntimeError(
                f"{type(optimizer).__name__} steps within run.pipeline_step, where gradients are not exchanged yet: "
                "with pipeline=, step after it, and not in hooks of parameters"
            )
        if self._choices is not None and PLAN in os.environ:
            self._choices.rest()
        if optimizer in self._waiting:
            number = len(optimizer.param_groups)
            raise RuntimeError(
                f"the checkpoint has group {number} of {type(optimizer).__name__}, with parameters of no model: the "
                "script must add it again before the first step after a resume, as by `if epoch >= 1 and "
                f"len(optimizer.param_groups) == {number}: optimizer.add_param_group(…)`"
            )
        if self._group.world_size == 1 or is_part_of_step(optimizer):
            return
        known = self._uses.get(optimizer)
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        is_new = False
        if known is None or (known.changes, known.size) != (self._changes, size):
            is_new = self._refresh_models([optimizer])
            self._check_updates(optimizer)
            mine = {id(p) for _, p in _named(optimizer)}
            every: list[Model | LooseParameters] = [*self._models, *self._loose]
            parts = [(each, [p for p in each.late.parameters if id(p) in mine]) for each in every]
            seen = {} if known is None else known.seen
            known = self._uses[optimizer] = _Uses(self._changes, size, [part for part in parts if part[1]], seen)
        is_within = torch._C._current_graph_task_id() != -1
        for part, own in known.parts:
            late = part.late
            if isinstance(part, LooseParameters):
                if is_within:
                    late.exchange(own)
                elif not (has_closure or part.is_averaged):
                    part.average()
                part.is_averaged = False
                continue
            is_by_hand = not has_closure and known.seen.get(id(late), 0) == late.backwards
            if part.averages and (is_within or ((is_by_hand or is_new) and any(p.grad is not None for p in own))):
                late.exchange(own)
            known.seen[id(late)] = late.backwards

    def _check_updates(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer has not parameters of before the script has divided or changed a model."""
        in_models = {id(parameter) for model in self._models for _, parameter in model.named}
        old = {p.shape for _, p in _named(optimizer) if id(p) not in in_models and p.grad is None and p.requires_grad}
        if not old:
            return
        updated = {id(p) for each in self._all_optimizers() for _, p in _named(each)}
        for model in self._models:
            for name, parameter in model.named:
                if parameter.grad is not None and id(parameter) not in updated and parameter.shape in old:
                    raise NotExchanged(
                        f"{type(optimizer).__name__} has a parameter of {list(parameter.shape)} that no model has, and "
                        f"{name} of {model.name} has a gradient and no optimizer: make the optimizer after the script "
                        "has divided or changed the model"
                    )

    def scale_gradients(self, every: int, factor: float | torch.Tensor) -> None:
        """Multiply the gradients of models set up with this `Strategy.accumulate`."""
        models = [model for model in self._models if model.strategy.accumulate == every]
        loose = [p for each in self._loose if each.accumulate == every for p in each.late.parameters]
        gradients = [gradient for model in models for gradient in model.gradients()]
        gradients += [p.grad for p in loose if p.grad is not None]
        for gradient in dict.fromkeys(gradients):  # models and optimizers may share parameters
            gradient.mul_(factor)

    def check_gradients(self, loop: Loop, again: bool = False) -> None:
        """Check that the gradients of a backward are complete if the optimizer steps next."""
        for model in self._models:
            model.check_gradients(complete=not loop.is_accumulating(model.strategy.accumulate), again=again)

    def check_steps(self) -> None:
        """Check that all ranks have stepped the same optimizers. A collective of all ranks."""
        self._step_counts.compare()

    def share_buffers(self) -> None:
        """Make models the same on all ranks; buffers, such as running means, are then rank 0's."""
        with self._group.guard:
            for model in self._models:
                model.settle()
                model.share_buffers()
                model.has_own_buffers = False

    def evaluation_begins(self) -> None:
        """Let all ranks evaluate with rank 0's buffers, if training has changed any; all ranks call this.

        Where ranks train apart, as in local SGD, each keeps its own.
        """
        for model in self._models:
            if model.has_own_buffers and (model.synchroniser is None or model.synchroniser.steps_alike):
                with self._group.guard:  # only here: a rank may evaluate alone if there is nothing to share
                    model.share_buffers()
                model.has_own_buffers = False

    def evaluate(self, evaluating: bool) -> None:
        """Set whether the next forward passes are for evaluation; ranks may have different numbers of them."""
        for model in self._models:
            model.evaluate(evaluating)

    def evaluated(self) -> None:
        """End an evaluation that has used all of its batches; all ranks call this."""
        self._passes.finish()

    def parameters_with_gradients(self) -> list[torch.Tensor]:
        """The parameters of all models that have a gradient; those that models share come once."""
        parameters: list[torch.Tensor] = [p for model in self._models for p in model.module.parameters()]
        parameters += [p for loose in self._loose for p in loose.late.parameters]
        return [p for p in dict.fromkeys(parameters) if p.grad is not None]


def _loose_part(number: int) -> str:
    """The part of a checkpoint with the loose parameters of an optimizer."""
    return f"optimizer-{number}.parameters" if number else "optimizer.parameters"


def _states_of(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[Any, Any]:
    """What the state of an optimizer has for the parameters of some of its groups."""
    numbers = {number for group in groups for number in group["params"]}
    return {number: kept for number, kept in state["state"].items() if number in numbers}


def _ids(group: Mapping[str, Any]) -> frozenset[int]:
    return frozenset(id(p[1] if isinstance(p, tuple) else p) for p in group["params"])


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of an optimizer, by names that are the same in each start of a script."""
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or range(len(group["params"]))
        for name, parameter in zip(names, group["params"], strict=True):
            yield f"{number}.{name}", parameter


def _parameters(thing: Any) -> Iterator[torch.Tensor]:
    """The parameters that the state of a registered thing has, if it is a module."""
    if isinstance(thing, torch.nn.Module):
        yield from thing.parameters()
