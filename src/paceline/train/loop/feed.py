"""The training loaders that `Run.dataloader` returns: their batches are the steps of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.train.data.loader import Loader

    from .epochs import Body
    from .steps import Steps


class Feed:
    """A training loader whose batches are the steps of a `Run`: requesting the next batch ends the current step."""

    def __init__(self, loader: Loader, steps: Steps) -> None:
        self.loader = loader
        self.used_in: Body | None = None  # the epoch in which the last iteration began
        self.finished_in: Body | None = None  # the epoch in which the last iteration reached its end
        self._is_through = False  # this epoch's batches were trained on before the resume
        self._made_in = steps.body
        self._steps = steps

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def dataset(self) -> Any:
        """The whole data set, of which each rank gets its share."""
        return self.loader.dataset

    @property
    def samples(self) -> int:
        """This rank's samples in the batch yielded last; 0 if it is a stand-in, which does not count."""
        return self.loader.samples

    @property
    def batch_size(self) -> int | None:
        """This rank's samples of a full batch; None if a batch sampler makes the batches."""
        return self.loader.batch_size

    @property
    def batch_index(self) -> int:
        """Number of the current batch within its epoch, from 0; outside of a loop, that of the next batch."""
        return self.loader.batch_index

    @property
    def sampler(self) -> Any:
        """The script's own sampler, or an equivalent, see `Loader`."""
        return self.loader.sampler

    @property
    def batch_sampler(self) -> Any:
        """The script's own batch sampler; None if there is none."""
        return self.loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        steps, body = self._steps, self._steps.body
        if steps.needs_ends:
            self.loader.look_ahead()
        if self._is_through and self.finished_in == body:
            self._is_through = False
            return
        if body is not None and self._made_in == body:
            steps.warn_of_new_loader()
        self.used_in, self.finished_in = body, None
        if steps.in_loop:  # of loaders that are iterated together, the first one counts the steps
            for batch in self.loader:
                steps.add(self.loader)
                yield batch
        else:
            with steps.loop(self.loader):
                for batch in self.loader:
                    steps.begin(self.loader)
                    yield batch
                    steps.end()
                steps.epoch_ends()
        self.finished_in = body

    def state_dict(self, *, before: bool) -> dict[str, Any]:
        """The position in this loader; with `before`, that before the batch yielded last."""
        return {"used_in": self.used_in, "finished_in": self.finished_in, **self.loader.state_dict(before=before)}

    def load_state_dict(self, state: dict[str, Any], *, by_epochs: bool) -> None:
        """Go to the position of `state`.

        Args:
            by_epochs: whether the epoch that was under way begins again, without the batches that it was trained on.
        """
        self.loader.load_state_dict(state)
        self.finished_in = _body(state["finished_in"]) if by_epochs else None
        self.used_in = _body(state.get("used_in")) if by_epochs else None
        self._is_through = self.finished_in is not None


def _body(saved: Any) -> Body | None:
    if saved is None:
        return None
    return (
        (0, saved) if isinstance(saved, int) else (saved[0], saved[1])
    )  # a number: from versions that did not count loops
