"""Errors of models, gradients and optimizers."""


class ModelMismatch(RuntimeError):
    """This rank's model differs from rank 0's, or another rank's does."""

    __module__ = "paceline"  # where users find it


class UnusedParameters(RuntimeError):
    """Parameters got no gradient, so ranks would wait for it or train with different weights."""

    __module__ = "paceline"  # where users find it


class WrongDevice(ValueError):
    """A batch is not on the model's device."""

    __module__ = "paceline"  # where users find it


class NotExchanged(RuntimeError):
    """Gradients were computed that the ranks do not exchange."""

    __module__ = "paceline"  # where users find it


class NotBuilt(RuntimeError):
    """A model has no numbers when it is set up."""

    __module__ = "paceline"  # where users find it


class UnitsMixed(RuntimeError):
    """A part of a sharded model uses parameters that are not gathered then."""

    __module__ = "paceline"  # where users find it


class OptimizerMismatch(RuntimeError):
    """Some ranks have called `optimizer.step()` and others have not, so their weights differ."""

    __module__ = "paceline"  # where users find it


class AccumulationChanged(RuntimeError):
    """The gradients of an accumulation were changed before all of its batches had added theirs."""

    __module__ = "paceline"  # where users find it


class FixedSync(ValueError):
    """A script chooses the method of exchange itself, so that `paceline tune` cannot try others."""
