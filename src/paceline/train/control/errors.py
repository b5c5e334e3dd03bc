"""Errors in the agreement between ranks; scripts find them in `paceline`."""

from __future__ import annotations


class PeerLost(RuntimeError):
    """Another rank failed or is gone, so this one cannot go on."""

    __module__ = "paceline"


class LeftEarly(RuntimeError):
    """A rank left a training loop, or the job, while another one went on."""

    __module__ = "paceline"


class CollectiveMismatch(RuntimeError):
    """The ranks are in different collectives, which can never end."""

    __module__ = "paceline"


class ReplicaMismatch(RuntimeError):
    """The ranks train with different parameters, or with different numbers of an optimizer, such as learning rates."""

    __module__ = "paceline"
