"""When the ranks compare the parameters and the numbers of their optimizers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paceline.train.control.errors import ReplicaMismatch
from paceline.train.parallel.sync.methods.synchroniser import Synchroniser
from paceline.train.parallel.wrapper import own_name
from paceline.train.replicas.contents import of_optimizer
from paceline.train.replicas.saved import Saved
from paceline.train.replicas.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from paceline.train.control.watch import Watch
    from paceline.train.parallel.prepared import Prepared
    from paceline.train.replicas.contents import Contents, Label
    from paceline.train.replicas.judging import Key, Part

_KEPT = 8  # moments of which a rank can say what exactly it had


class Replicas:
    """Compares the optimizers of all ranks: after their first steps, and then as often as it costs next to nothing.

    How often that is, each rank chooses from what it measures; it is a power of two, and so ranks that choose
    differently compare where both do.
    """

    def __init__(self, prepared: Prepared, watch: Watch, device: torch.device) -> None:
        self._prepared, self._watch, self._device = prepared, watch, device
        self._compared: dict[int, _Compared] = {}  # by numbers of optimizers
        self._has_begun = False
        self._settled = prepared.settled  # when optimizers were found
        watch.parts = self._parts

    def begins(self, step: int) -> None:
        """The training begins: compare what was set up, once."""
        if self._has_begun:
            return
        self._has_begun = True
        for number in range(len(self._prepared.optimizers)):
            one = self._of(number)
            if one is not None and one.is_comparable:
                one.compare(step)

    def stepped(self, number: int, step: int) -> None:
        self._has_begun = True
        one = self._of(number)
        if one is not None:
            one.stepped(step, len(self._compared))

    def settle(self, step: int) -> None:
        """Compare all optimizers that have stepped, on all ranks, and wait for the result."""
        if self._send_last(step):
            self._watch.await_replicas()

    def ends(self, step: int) -> None:
        """Compare what was trained last, if it was not changed since, when the run is closed: `Watch.close` waits."""
        self._send_last(step, unchanged=True)

    def _send_last(self, step: int, *, unchanged: bool = False) -> bool:
        stepped = [one for one in self._compared.values() if one.has_stepped]
        for one in stepped:
            one.finish(step, unchanged=unchanged)
        return bool(stepped)

    def saved(self) -> Saved | None:
        """What is compared of a checkpoint; None if nothing is."""
        prepared = self._prepared
        parameters = {
            _part("model", number): {own_name(name) for name, _ in model.module.named_parameters()}
            for number, model in enumerate(prepared.models)
            if model.strategy.replicas != "off"
        }
        optimizers: dict[str, _Compared] = {}
        shared = {id(thing): name for name, thing in prepared.stateful().items()}
        for number in (*range(len(prepared.optimizers)), *map(id, prepared.shared_optimizers)):
            one = self._of(number)
            if one is not None and one.is_alike:
                optimizers[shared[id(one.optimizer)]] = one
        if not parameters and not optimizers:
            return None
        strict = any(model.strategy.replicas == "check" for model in prepared.models)
        warns = not strict and all(one.warns for one in optimizers.values())

        def name(label: Label) -> str:
            if label.part in parameters:
                return label.key if label.part == "model" else f"{label.key} of {label.part}"
            return optimizers[label.part].name(label, several=len(optimizers) > 1)

        def equal() -> int | None:
            compared = self._watch.compared
            return None if compared is None else compared["step"]

        def differ(why: str) -> None:
            self._watch.replicas_differ(why, warns=warns)
            if not warns:
                raise ReplicaMismatch(why)

        return Saved(parameters, list(optimizers), self._device.type != "cpu", name, equal, differ)

    def _of(self, number: int) -> _Compared | None:
        """What is compared of an optimizer; None if nothing is."""
        prepared = self._prepared
        if self._settled != prepared.settled:  # parameters may be other ones now
            self._settled = prepared.settled
            self._compared.clear()
        if number in self._compared:
            return self._compared[number]
        if 0 <= number < len(prepared.optimizers):
            optimizer, mode = prepared.optimizers[number], prepared.replicas[number]
        else:
            found = [each for each in prepared.shared_optimizers if id(each) == number]
            if not found:
                return None
            optimizer, mode = found[0], "check"
        if mode == "off" or not prepared.is_known(optimizer):
            return None
        place = len(self._compared)
        self._compared[number] = one = _Compared(place, optimizer, prepared, self._watch, warns=mode == "warn")
        return one

    def _parts(self, key: Key) -> Sequence[Part]:
        """What this rank had at a moment; called by another thread."""
        for one in list(self._compared.values()):
            if one.place == key[0]:
                return one.parts(key, several=len(self._compared) > 1)
        return ()


def _part(kind: str, number: int) -> str:
    """The name of a part of a checkpoint, see `Prepared.stateful`."""
    return f"{kind}-{number}" if number else kind


class _Compared:
    """An optimizer that is compared."""

    def __init__(
        self, place: int, optimizer: torch.optim.Optimizer, prepared: Prepared, watch: Watch, *, warns: bool
    ) -> None:
        self.place = place  # among those that are compared
        self.has_stepped = False  # since all have waited for a comparison
        self.optimizer, self._prepared, self._watch, self.warns = optimizer, prepared, watch, warns
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        models = [m for m in prepared.models if any(id(parameter) in mine for parameter in m.module.parameters())]
        self._modules = [model.module for model in models]
        found = [model.synchroniser for model in models if model.synchroniser is not None]
        # Those of ranks that are not always the same.
        self._apart = [each for each in found if type(each).is_common is not Synchroniser.is_common]
        self._count = self._steps = 0  # after which it could be compared; all
        self._waited = 0  # comparisons
        self._schedule = Schedule()
        self._probe = next(p for group in optimizer.param_groups for p in group["params"])
        self._version = -1  # of the first parameter after the last step
        # Comparisons that a GPU computes: step, contents, whether all wait, and seconds that it has taken to begin.
        self._pending: list[tuple[Key, int, Contents, bool, float]] = []
        self._kept: dict[Key, Contents] = {}
        self._known: dict[int, str] | None = None  # names of parameters, once they are asked for

    @property
    def is_comparable(self) -> bool:
        """Whether its parameters are the same on all ranks now."""
        return all(map(self._is_common, self._apart))

    @property
    def is_alike(self) -> bool:
        """Whether its numbers, and what it keeps for its parameters, are the same on all ranks."""
        return all(synchroniser.steps_alike for synchroniser in self._apart)

    def _is_common(self, synchroniser: Synchroniser) -> bool:
        """The same of one model; of several optimizers, ranks are together after the steps of the first one only."""
        if synchroniser.steps_alike:
            return synchroniser.is_common
        return synchroniser.is_common and self._prepared.exchanges_after(self.optimizer)

    def stepped(self, step: int, optimizers: int) -> None:
        """Compare after a step if it is time to."""
        self._steps += 1
        self.has_stepped = True
        self._version = self._probe._version
        if self._pending:
            self._send_finished()
        if self._apart and not self.is_comparable:
            return
        self._count += 1
        if self._schedule.is_due(self._count):
            self.compare(step)
            self._schedule.compared(self._count, self._steps, optimizers)

    def compare(self, step: int) -> None:
        """Compare now, without waiting."""
        self._begin((self.place, self._waited, self._count), step, waits=False)

    def finish(self, step: int, *, unchanged: bool) -> None:
        """Compare now, on all ranks, which wait; if `unchanged`, only what was not changed since the last step."""
        self._send_finished(wait=True)
        self.has_stepped = False
        self._waited += 1
        if self.is_comparable and not (unchanged and self._version != self._probe._version):
            self._begin((self.place, self._waited, 0), step, waits=True)
            self._send_finished(wait=True)

    def _begin(self, key: Key, step: int, *, waits: bool) -> None:
        now = time.perf_counter()
        common = self._prepared.is_on_all
        contents = of_optimizer(self.optimizer, self._steps, alike=self.is_alike, is_common=common)
        while len(self._kept) >= _KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = contents
        self._pending.append((key, step, contents, waits, time.perf_counter() - now))
        self._send_finished()

    def _send_finished(self, *, wait: bool = False) -> None:
        """Send what was computed."""
        while self._pending and (wait or self._pending[0][2].sums.are_there()):
            key, step, contents, waits, seconds = self._pending.pop(0)
            now = time.perf_counter()
            self._watch.compare_replicas(key, step, contents.digest, waits=waits, warns=self.warns)
            self._schedule.costs.append(seconds + time.perf_counter() - now + contents.sums.gpu_seconds)

    def parts(self, key: Key, *, several: bool) -> Sequence[Part]:
        """What it had at a moment; empty if that is not known any more."""
        contents = self._kept.get(key)
        return () if contents is None else contents.parts(lambda label: self.name(label, several=several))

    def name(self, label: Label, *, several: bool) -> str:
        """The name of something, as users know it."""
        groups = self.optimizer.param_groups
        kind = type(self.optimizer).__name__
        whole = f"{kind} (optimizer {self.place})" if several else kind
        if label.group >= 0 and len(groups) > 1:
            whole = f"group {label.group} of {whole}"
        if label.place < 0:
            return f"{label.key} of {whole}"
        group = groups[label.group]["params"] if label.group >= 0 else [p for each in groups for p in each["params"]]
        found = self._names().get(id(group[label.place]))
        if not label.key:
            return found or f"number {label.place} of {whole}"
        return f"{label.key} of {found or f'parameter {label.place} of {whole}'}"

    def _names(self) -> dict[int, str]:
        if self._known is None:
            self._known = {id(p): name for module in self._modules for name, p in module.named_parameters()}
        return self._known
