"""When a checkpoint is due, what it holds, and whether it fits the script."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
import time
from typing import TYPE_CHECKING, Any

import torch

from paceline.train.checkpoint.consensus import ExchangeError, SingleExchange, SocketExchange
from paceline.train.checkpoint.plain_state import without_numpy_scalars
from paceline.train.checkpoint.store import CheckpointError, CheckpointStore
from paceline.train.control.errors import ReplicaMismatch
from paceline.train.data.random_state import random_states, set_random_states
from paceline.train.group import sharded
from paceline.train.parallel.shard.layout import likes_of
from paceline.train.parallel.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from paceline.contract import Placement
    from paceline.train.checkpoint.store import Checkpoint
    from paceline.train.group.group import Group
    from paceline.train.parallel.prepared import Prepared, RankPart, Stateful
    from paceline.train.replicas.saved import Saved
    from paceline.train.torch_types import StateDict

log = logging.getLogger("paceline")
_AGREE_EVERY = 10  # steps between two broadcasts of rank 0's clock, which decides for all
_TRY_AGAIN = 60.0  # seconds after which one that the disk did not take is due again, if intervals are longer
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Interval:
    """How often to take a checkpoint: steps (`500`, `"500 steps"`) or time (`"90s"`, `"10m"`, `"1h"`)."""

    def __init__(self, text: int | str) -> None:
        self.steps, self.seconds = 0, 0.0
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(steps?|[smh])?\s*", str(text))
        if match is None or float(match[1]) <= 0:
            raise ValueError(f"checkpoint_every={text!r} is neither steps (500) nor time ('90s', '10m', '1h')")
        if match[2] in _UNITS:
            self.seconds = float(match[1]) * _UNITS[match[2]]
        elif float(match[1]) == int(float(match[1])):
            self.steps = int(float(match[1]))
        else:
            raise ValueError(f"checkpoint_every={text!r}: a checkpoint is taken after whole steps")


def open_store(folder: Path, placement: Placement, keep: int, *, required: bool) -> CheckpointStore:
    """Open the store of a run, and lock its folder. All ranks must call this."""
    exchange = SocketExchange() if placement.world_size > 1 else SingleExchange()
    store = CheckpointStore(
        folder,
        rank=placement.rank,
        world_size=placement.world_size,
        exchange=exchange,
        keep=keep,
        required=required,
    )
    store.hold()
    return store


class Checkpointing:
    """The checkpoints of a run: when one is due, and what it holds."""

    def __init__(self, group: Group, prepared: Prepared, store: CheckpointStore | None, every: Interval | None) -> None:
        self.saved = 0  # step of the checkpoint that was started or loaded last
        self._group, self._prepared, self._store, self._every = group, prepared, store, every
        self._began = time.monotonic()  # on rank 0, when the interval under way began
        if store is None and every is not None and group.is_main:
            log.warning("no checkpoints are taken: without `paceline run`, pass checkpoint_dir= to paceline.init")

    @property
    def can_save(self) -> bool:
        """Whether there is a folder for checkpoints."""
        return self._store is not None

    @property
    def is_automatic(self) -> bool:
        """Whether checkpoints are taken without a call of the script."""
        return self._every is not None and self._store is not None

    def is_due(self, done: int, before: int) -> bool:
        """Whether one is due after `done` steps; the same on all ranks."""
        if self._every is None or self._store is None:
            return False
        every = self._every.steps or _AGREE_EVERY
        return done // every > before // every and (self._every.steps > 0 or self._is_time())

    def is_due_after(self, done: int, *, epoch_counts: bool) -> bool:
        """Whether one is due at the end of an epoch for whose steps `is_due` was not called; the same on all ranks."""
        if self._every is None or self._store is None:
            return False
        if self._every.steps:
            return epoch_counts or done // self._every.steps > self.saved // self._every.steps
        return self._is_time()

    def _is_time(self) -> bool:
        assert self._every is not None
        seconds = min(self._every.seconds, _TRY_AGAIN) if self.lost else self._every.seconds
        due = self._group.broadcast_object(time.monotonic() >= self._began + seconds)
        if due:
            self._began = time.monotonic()
        return due

    @property
    def lost(self) -> CheckpointError | None:
        """Why the checkpoint taken last is not on the disk, see `CheckpointStore.lost`."""
        return self._store.lost if self._store is not None else None

    def save(self, step: int, progress: Mapping[str, Any], *, block: bool, compared: Saved | None = None) -> None:
        """Take a checkpoint of everything that was set up."""
        if self._store is None:
            raise RuntimeError("there is no folder for checkpoints; pass checkpoint_dir= to paceline.init")
        self._prepared.decide()
        with self._group.guard:
            for model in self._prepared.models:
                if model.stages is not None:
                    model.share_buffers()
            shared = {name: _state_of(thing) for name, thing in self._prepared.stateful().items()}
            self._prepared.complete(shared)
            own = {name: _state_of(part.thing) for name, part in self._prepared.rank_parts().items()}
            rank_state = {**random_states(), **({"parts": own} if own else {})}
            try:
                check_whole(self._prepared.stateful())
            except RuntimeError as error:  # maybe on this rank alone
                self._store.refuse(step, CheckpointError(str(error)))
            progress = {**progress, "trained": self._prepared.trained(), "data_size": self._group.data_size}
            self._store.save(step, {**shared, "progress": progress}, rank_state, block=block, compared=compared)
        self.saved = step

    @property
    def follows(self) -> bool:
        """Whether an earlier run of this process has saved into the folder."""
        return self._store is not None and self._store.follows

    def find(self) -> Checkpoint | None:
        """Read the newest checkpoint; None if there is none."""
        if self._store is None:
            return None
        with self._group.guard:
            return self._store.load(self._group.device)

    def load(self, found: Checkpoint, loaders: int) -> None:
        """Load a checkpoint into everything that was set up."""
        progress = found.shared_state["progress"]
        self._prepared.decide(progress["trained"])
        self._prepared.train_as(progress["trained"])
        self._prepared.expect(found.shared_state)
        stateful = self._prepared.stateful()
        check_parts(stateful, found.shared_state, loaders, len(found.shared_state["progress"]["loaders"]))
        check_whole(stateful)
        for name, thing in stateful.items():
            state = _filled(found, name, thing)
            load(name, thing, self._prepared.cut(thing, state) if isinstance(thing, torch.optim.Optimizer) else state)
        self.saved = progress["step"]

    @property
    def begins_with_weights(self) -> bool:
        """Whether the newest checkpoint has weights only; the same on all ranks, which ask together."""
        if self._store is None:
            return False
        with self._group.guard:
            return self._store.begins_with_weights()

    @property
    def has_saved(self) -> bool:
        """Whether this run has saved a checkpoint."""
        if self._store is not None:
            self._store.wait()
        return self._store is not None and self._store.last_saved_step is not None

    def load_weights(self, found: Checkpoint) -> None:
        """Load weights that were imported into the first model; everything else stays as it is."""
        thing = self._prepared.stateful().get("model")
        if thing is None:
            raise RuntimeError(
                f"{found.path} has weights of a model, and the script has none yet; pass it to run.setup before"
            )
        state = found.shared_state["model"]
        models = self._prepared.models
        module = models[0].module if models else thing
        if isinstance(module, torch.nn.Module):
            _add_tied(state, module)
        built = self._prepared.builds.of(models[0].module) if models and models[0].stages is None else None
        if built is None:
            try:
                load("model", thing, _filled(found, "model", thing))
            except RuntimeError:  # of torch, with a line for each tensor
                check_weights(found.path, state, thing.state_dict())
                raise
            return
        # Until it is known how the model is kept, it has no memory.
        check_weights(found.path, state, thing.state_dict())
        built.begin(models[0].module, Weights(state))
        extra = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
        models[0].module.load_state_dict(extra, strict=False)

    def load_some(self, found: Checkpoint, *, but: set[str]) -> set[str]:
        """Load those parts of a checkpoint that were set up so far; returns their names."""
        self._prepared.decide(found.shared_state["progress"]["trained"])
        here = {name: thing for name, thing in self._prepared.stateful().items() if name in found.shared_state}
        check_whole(here)
        for name, thing in here.items():
            if name not in but:  # a copy, as optimizers keep what they load and change it; all of it is loaded again
                kept = dataclasses.replace(found, shared_state=copy.deepcopy({name: found.shared_state[name]}))
                load(name, thing, _filled(kept, name, thing))
        if not but:
            self.load_rank_state(found)
        return set(here)

    def load_again(self, found: Checkpoint, *, whole: bool) -> None:
        """Load a checkpoint for a second time, from the disk: the objects may have what was loaded first."""
        assert self._store is not None
        with self._group.guard:
            again = self._store.read_again(found, self._group.device, whole=whole)
        for name in again.shared_state:
            if name != "progress":
                thing = self._prepared.stateful()[name]
                load(name, thing, _filled(again, name, thing))
        self.load_rank_state(dataclasses.replace(found, rank_state=again.rank_state))

    def has_same_ranks(self, found: Checkpoint) -> bool:
        """Whether as many ranks have taken a checkpoint, and as many of them had other data and random numbers."""
        data_size = found.shared_state["progress"].get("data_size", found.world_size)  # older ones do not have it
        return (found.world_size, data_size) == (self._group.world_size, self._group.data_size)

    def load_rank_state(self, found: Checkpoint) -> None:
        """Load this rank's own states; with another number of ranks, those that `reshard` returns."""
        parts, rank, world_size = self._prepared.rank_parts(), self._group.rank, self._group.world_size
        same_ranks = self.has_same_ranks(found)
        if found.rank_state is not None and found.world_size == world_size:
            if same_ranks:
                set_random_states(found.rank_state)
            states = [found.rank_state]
        elif any(part.is_users for part in parts.values()):
            assert self._store is not None
            with self._group.guard:
                states = self._store.rank_states(found)
        else:
            return
        for name, part in parts.items():
            saved = [state["parts"][name] for state in states if name in state.get("parts", {})]
            if len(saved) == len(states):
                if same_ranks or (part.is_users and found.world_size == world_size):
                    part.thing.load_state_dict(saved[0])
                elif part.is_users:
                    part.thing.load_state_dict(_resharded(name, part, saved, rank, world_size))
            elif part.is_required:
                raise RuntimeError(
                    f"the checkpoint does not fit this script: it has no {name}; "
                    "register what it was taken with, or use another checkpoint_dir for another script"
                )

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self, explain: Callable[[RuntimeError], None]) -> None:
        """Wait for a checkpoint in progress, with the other ranks."""
        if self._store is None:
            return
        try:
            self._store.close()
        except ExchangeError as error:
            explain(error)
            raise

    def leave(self) -> RuntimeError | None:
        """Wait for a checkpoint in progress; returns why the last one was not written, if it was not."""
        try:
            if self._store is not None:
                self._store.close()
        except (CheckpointError, ReplicaMismatch) as error:
            return error
        return self.lost

    def disconnect(self) -> None:
        if self._store is not None:
            self._store.disconnect()


def _state_of(thing: Stateful) -> Any:
    state = thing.state_dict()
    return state if isinstance(thing, torch.nn.Module) else without_numpy_scalars(state)


def _resharded(name: str, part: RankPart, states: Sequence[Any], rank: int, world_size: int) -> Any:
    """This rank's state, made from the states of another number of ranks."""
    if part.reshard is None:
        raise RuntimeError(
            f"{name} was registered with per_rank=True and saved by {len(states)} ranks, and now there are "
            f"{world_size}; pass reshard= to run.register, which returns a rank's state from theirs, or continue with "
            f"{len(states)} ranks"
        )
    return part.reshard(states, rank, world_size)


def check_parts(here: Mapping[str, Any], saved: Mapping[str, Any], loaders: int, saved_loaders: int) -> None:
    """Check that a checkpoint fits what was set up."""
    missing = sorted(set(here) - set(saved))
    surplus = sorted(set(saved) - set(here) - {"progress"})
    wrong = [f"it has no {' and no '.join(missing)}"] if missing else []
    if surplus:
        wrong.append(f"its {' and '.join(surplus)} {'is' if len(surplus) == 1 else 'are'} not in the script")
    if loaders != saved_loaders:
        wrong.append(f"it has {_number(saved_loaders)}, and the script has made {_number(loaders)} so far")
    if wrong:
        raise RuntimeError(
            f"the checkpoint does not fit this script: {'; '.join(wrong)}; "
            "set up and register what it was taken with, or use another checkpoint_dir for another script"
        )


def _add_tied(state: StateDict, module: torch.nn.Module) -> None:
    """Add names of tensors of a module that files have under another name only, as most do of tied weights."""
    names: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    for tied in names.values():
        given = next((name for name in tied if name in state), None)
        if given is not None and len(tied) > 1:
            state.update({name: state[given] for name in tied if name not in state})


def check_weights(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Check that weights that were imported fit the model: names and shapes."""
    missing, surplus = [name for name in here if name not in saved], [name for name in saved if name not in here]
    shapes = {
        name: (getattr(saved[name], "shape", None), getattr(here[name], "shape", None))
        for name in here
        if name in saved
    }
    other = [
        f"{name}, which is {list(a or ())} there and {list(b or ())} in the model"
        for name, (a, b) in shapes.items()
        if a != b
    ]
    wrong = [
        f"{what} {_some(names)}"
        for what, names in (("they lack", missing), ("the model lacks", surplus), ("other shapes:", other))
        if names
    ]
    if wrong:
        raise RuntimeError(
            f"the weights of {path} do not fit the model: {'; '.join(wrong)}; import weights of this model, or use "
            "another checkpoint_dir"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_whole(here: Mapping[str, Any]) -> None:
    """Check that it is known of the objects that a checkpoint has for all ranks which part each rank has."""
    for name, thing in here.items():
        if found := sharded.in_object(thing):
            raise RuntimeError(sharded.why_refused(name, found))


def _filled(found: Checkpoint, name: str, thing: Any) -> Any:
    """The state of a part of a checkpoint for an object: whole, or this rank's part where that is sharded."""
    return found.shards.fill(name, found.shared_state[name], likes_of(thing))


def _number(loaders: int) -> str:
    return f"{loaders or 'no'} training loader{'s' if loaders != 1 else ''}"


def _count_on_cpu(optimizer: torch.optim.Optimizer) -> None:
    """Put numbers of steps on the CPU that torch keeps there: read from a GPU, each step would wait for it."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for group in optimizer.param_groups:
        for parameter in () if group.get("fused") or group.get("capturable") else group["params"]:
            kept = optimizer.state.get(parameter, {})
            if isinstance(step := kept.get("step"), torch.Tensor) and step.dim() == 0:
                kept["step"] = step.cpu()


def load(name: str, thing: Any, state: Any) -> None:
    """Load a part of a checkpoint."""
    if not isinstance(thing, torch.optim.Optimizer):
        thing.load_state_dict(state)
        return
    # Options of this kind of optimizer that its groups have; the script may have added others of its own.
    before = [{option for option in thing.defaults if option in group} for group in thing.param_groups]
    why = ""
    try:
        thing.load_state_dict(state)
        _count_on_cpu(thing)
    except (ValueError, KeyError) as error:
        why = f"{error}"
    else:  # torch checks what it has loaded only in its next step
        groups = zip(before, thing.param_groups, strict=False)
        lacking = sorted({option for options, group in groups for option in options if option not in group})
        why = f"it has no {', '.join(lacking)}" if lacking else ""
    if why:
        raise RuntimeError(
            f"the checkpoint's {name} does not fit {type(thing).__name__}: {why}; "
            "train on with the optimizer that it was taken with, or use another checkpoint_dir"
        )
