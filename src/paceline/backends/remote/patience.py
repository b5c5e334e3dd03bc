"""How long a host is waited for: it can be reached and say nothing, for example if its homes are on a dead server."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paceline.backends.limits import Limits

_LOOKS = ("describe", "spec", "events", "logs", "nodes", "usage", "stands", "volumes")
_ENDLESS = ("wait", "slurm_wait", "slurm_logs", "environment_build")
_MANY_FILES = ("contents", "delete", "slurm_delete")
_COPY = 3  # times as long if it gets paceline's archive first
_WORK = 4  # times as long as for its login has a host for what changes something
_LARGE = 40  # the same where there may be many large files
_FEW, _MORE = 16, 0.1  # for each host beyond so many all of them get so many seconds more
_LEAST_DELETION = 600.0  # seconds
_COMMANDS = 300.0  # seconds that commands of Slurm may take, which try again while its controller is away


class Patience(NamedTuple):
    """Seconds until a host counts as silent.

    Attributes:
        login: from the start of ssh until its Python runs there; for a request that only looks, until the answer.
        copy: from one piece of the archive to the next, and then until the answer.
        work: from there until the first answer; None for no limit.
        later: for each further answer; None for no limit.
        connect: until its sshd has answered, in whole seconds; None: as for all hosts.
        prompt: whether hosts take about the same time for it, so that one that takes much longer is as good as silent.
    """

    login: float
    copy: float
    work: float | None
    later: float | None = None
    connect: int | None = None
    prompt: bool = False

    @classmethod
    def of(cls, verb: str, limits: Limits) -> Patience:
        """For a request of this name."""
        if verb in _LOOKS:
            return cls(limits.look, _COPY * limits.look, limits.look, prompt=True)
        if verb in _ENDLESS:
            return cls(limits.look, _COPY * limits.look, None)
        work = max(_LARGE * limits.act, _LEAST_DELETION) if verb in _MANY_FILES else _WORK * limits.act
        if verb.startswith("slurm_"):
            return cls(limits.act, work, max(work, _COMMANDS))
        return cls(limits.act, work, work, prompt=verb == "stop")

    def for_many(self, hosts: int) -> Patience:
        """The same for so many hosts at once: this machine needs time for all of these connections."""
        return self._replace(login=self.login + _MORE * max(0, hosts - _FEW))

    def shortened(self, seconds: float) -> Patience:
        """The same with so many seconds for the login."""
        return self._replace(login=seconds)
