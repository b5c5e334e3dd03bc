"""How long a verb waits for one machine, as the settings or the environment say."""

from __future__ import annotations

import os
from typing import NamedTuple

from paceline.job import settings_files
from paceline.job.errors import UserError
from paceline.job.quantities import duration

_LEAST_CONNECT = 5.0  # seconds
LOOK, ACT, RECONNECT = "PACELINE_LOOK_TIMEOUT", "PACELINE_ACT_TIMEOUT", "PACELINE_RECONNECT_TIMEOUT"


class Limits(NamedTuple):
    """Seconds that a verb waits for a machine that does not answer.

    Attributes:
        look: when it reads what is there, such as `list`.
        act: when it checks machines, or starts, changes or ends something, such as `stop`.
        reconnect: for a new connection to a host of a job in the foreground, after one has broken.
    """

    look: float = 5.0
    act: float = 15.0
    reconnect: float = 60.0

    @property
    def connect(self) -> float:
        """Seconds for one connection: a server that starts anew may take it and say nothing; then another is tried."""
        return max(_LEAST_CONNECT, self.look / 4)


DEFAULT = Limits()


def load() -> Limits:
    """The limits of this user: a variable goes before the settings."""
    given = [_given(LOOK), _given(ACT), _given(RECONNECT)]
    if None in given and settings_files.exist():
        from paceline.job.settings import load as settings  # takes long to import

        defaults = settings().defaults
        set_there = (defaults.look_timeout, defaults.act_timeout, defaults.reconnect_timeout)
        given = [mine or theirs for mine, theirs in zip(given, set_there, strict=True)]
    return Limits(*(seconds or default for seconds, default in zip(given, DEFAULT, strict=True)))


def _given(variable: str) -> float | None:
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return duration(text, usual="s", zero="give for example 5s")
    except ValueError as error:
        raise UserError(f"{variable}: {error}") from None
