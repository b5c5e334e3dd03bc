"""The hosts of a target, from the settings or the flags, and requests to all of them at once."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from msgspec import Meta

from paceline.backends import limits
from paceline.backends.hosts import NAME, bare, example_for, printed_by
from paceline.backends.remote.connection import Host, Silent, Unreachable
from paceline.job.errors import UserError, nearest
from paceline.job.model import Model, Parsers
from paceline.job.paths import jobs_folder
from paceline.job.quantities import duration
from paceline.node.files import read_json, write_json

from . import asking
from .flags import FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.backends.limits import Limits
    from paceline.backends.remote.connection import Answer
    from paceline.backends.remote.patience import Patience
    from paceline.contract.messages import Request

    from .asking import Outcome

_HOST = re.compile(NAME + r"(:(?P<slots>[0-9]{1,4}))?")
_LEAST = 0.1  # seconds that a host is waited for
_MOST_KEPT = 64  # hosts to which connections are kept: each is a process of some megabytes, for a minute
REMEMBERED = 60.0  # seconds
_COSTLY = 1.0  # seconds; what fails sooner delays nobody


def _valid_hosts(hosts: Any) -> Any:
    if isinstance(hosts, list) and all(isinstance(host, str) for host in hosts):
        _parsed(hosts)
    return hosts


def _range(times: Any) -> Any:
    if not isinstance(times, (list, tuple)):
        return times
    times = list(map(str, times))
    seconds = [duration(it, usual="s", zero="give 1s or more") or 0.0 for it in times]
    if seconds and not (len(seconds) == 2 and seconds == sorted(seconds)):
        raise ValueError(f"{times} are not two times, at first and at most; write for example ['10s', '100s']")
    return times


def _key_file(file: Any) -> Any:
    if isinstance(file, str) and (os.path.isdir(it := os.path.expanduser(file)) or not os.path.exists(it)):
        raise ValueError(f"no file {file!r}; name the private key that the hosts accept")
    return file


class Options(Model, frozen=True, kw_only=True):
    """The keys of a target other than `backend`; flags can set them too.

    Attributes:
        hosts: names that ssh knows, each with the ranks on it: HOST[:SLOTS].
        identity_file: the private key.
        python: the interpreter there.
        root: the folder with the jobs there.
        exact: a job's nodes are the first of the hosts in this order, and not those that suit best.
        host_discovery_script: prints the hosts that a watched job is to have.
        containers: what runs images; None: what there is on each host.
        cooldown: for how long a watched job leaves out a host that has failed, at first and at most; [] for ever.
    """

    is_strict: ClassVar[bool] = True
    hosts: Annotated[list[str], Meta(min_length=1)]
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    identity_file: str | None = None
    python: str = "python3"
    root: str = "~/.local/state/paceline"
    exact: bool = False
    host_discovery_script: str | None = None
    containers: Literal["podman", "docker", "apptainer", "singularity"] | None = None
    cooldown: list[str] | None = None

    parsers: ClassVar[Parsers] = {"hosts": _valid_hosts, "cooldown": _range, "identity_file": _key_file}


def _parsed(hosts: Sequence[str]) -> dict[str, int]:
    """Host → slots, 0 if they are not given."""
    parsed: dict[str, int] = {}
    for text in hosts:
        found = _HOST.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not a host; write {example_for(text, 'node1, or user@node2:4')}")
        name = bare(found["name"])
        if name in parsed:
            raise ValueError(f"{name} is named twice; leave one out")
        parsed[name] = int(found["slots"] or 0)
    return parsed


def _hosts(options: Options, hosts: Sequence[str], within: Limits) -> list[Host]:
    found = [
        Host(name, slots, options.port, options.identity_file, options.python, options.root, within)
        for name, slots in _parsed(hosts).items()
    ]
    if len(found) > _MOST_KEPT:
        found = [replace(host, is_kept=False) for host in found]
    if "python" in options.given:
        return found
    return [replace(host, python=sys.executable) if host.is_here else host for host in found]


class Hosts:
    """The hosts of a target.

    Attributes:
        label: what a user calls it: its name, or the hosts as they were typed.
        given: the options with which flags named the hosts; None for a target of the settings.
        all: its hosts, as the settings or the flags have them.
        containers: what runs images there; None: what there is.
        is_exact: a job gets the first of the hosts in this order, instead of the first that are free.
    """

    def __init__(self, name: str, options: Options, *, are_given: bool = False) -> None:
        """Make no connection yet."""
        self.name, self._options = name, options
        typed = [host[:-2] if host.endswith(":0") else host for host in options.hosts]
        self.label = ",".join(typed) if are_given else name
        self.given = (
            {name: it for name, it in options.dumped(only_given=True).items() if it is not None} | {"hosts": typed}
            if are_given
            else None
        )
        self._limits, self.containers = limits.load(), options.containers
        self.all, self.is_exact = _hosts(options, options.hosts, self._limits), options.exact
        self._silences = Silences()
        self._deadline = math.inf
        self._say: Callable[[str], None] = lambda line: None
        self._told: set[Host] = set()

    def named(self, names: Sequence[str]) -> list[Host]:
        """The hosts of these names."""
        known = {host.name: host for host in self.all}
        names = [bare(name) for name in names]
        for name in names:
            if name not in known:
                raise UserError(f"{name} is not a host of {self.name}; {nearest(name, known)}")
        return [known[name] for name in dict.fromkeys(names)]

    def flags_of(self, hosts: Sequence[Host]) -> str:
        """The flags that name these of its hosts alone."""
        given = self._options.dumped(only_given=True)
        words = ["-H", ",".join(host.name for host in hosts)]
        for flag in FLAGS:
            if not flag.names_hosts and given.get(flag.option):
                words += [flag.names[0], str(given[flag.option])]
        return shlex.join(words)

    def wanted(self) -> list[Host]:
        """The hosts that a job in the foreground should have now."""
        script = self._options.host_discovery_script
        if script is None:
            return self.all
        found = _hosts(self._options, [f"{name}:{slots or 1}" for name, slots in printed_by(script)], self._limits)
        before = {host.name: host for host in self.all}
        # A host whose slots have changed is another one: it leaves, and comes back with other ranks.
        known = {host.name: host for host in found if host.slots != getattr(before.get(host.name), "slots", None)}
        self.all = [known.pop(host.name, host) for host in self.all] + [*known.values()]
        now = {host.name: host for host in self.all}
        return [now[host.name] for host in found]

    def ask(
        self, hosts: Sequence[Host], request: Callable[[Host], Request]
    ) -> tuple[dict[Host, Answer], dict[Host, UserError]]:
        """The answers of these hosts, and the errors of the others.

        A host that was silent a short while ago is not asked again by this process, and delays a new one only briefly;
        nor does one for which this process did not wait, since nearly all others had answered.
        """
        found: dict[Host, Answer | UserError] = {}
        asked: dict[Host, tuple[Request, Patience]] = {}
        waited: dict[Host, float] = {}
        late: dict[Host, UserError | None] = {}
        for host in hosts:
            asks = request(host)
            patience = host.patience(asks).for_many(len(hosts))
            error, already = self._silences.in_this_process(host) or (None, 0.0)
            if host.has_login:
                error, already = None, 0.0
            if error is not None and already >= patience.login:
                found[host] = error
                continue
            if self._silences.is_late(host):
                late[host] = error
            elif error is not None or host.has_login or self._silences.before(host) < patience.login:
                waited[host] = already + self._at_most(patience.login - already)
            asked[host] = asks, patience.shortened(self._at_most(patience.login - already))
        if again := [host for host in asked if self._silences.is_late(host)]:
            self.notice(again)
        outcomes = asking.ask_all(asked, asked.keys() - waited.keys(), self.notice)
        for host, outcome in outcomes.items():
            if isinstance(outcome.answer, Silent) and host not in waited:
                why = late.get(host) or self._silences.explained(host)
                outcomes[host] = outcome._replace(answer=why, is_late=host in late)
            found[host] = outcomes[host].answer
        self._silences.note(outcomes, waited)
        answers = {host: found[host] for host in hosts if not isinstance(found[host], UserError)}
        failed = {host: found[host] for host in hosts if isinstance(found[host], UserError)}
        return answers, failed

    def _at_most(self, seconds: float) -> float:
        return max(_LEAST, min(seconds, self._deadline - time.monotonic()))

    def was_silent(self, host: Host, seconds: float) -> bool:
        """Whether a host did not answer within this time a short while ago, so that it is not worth it again."""
        _, waited = self._silences.in_this_process(host) or (None, self._silences.before(host))
        return waited >= seconds

    def say_who_is_waited_for(self, say: Callable[[str], None]) -> None:
        self._say = say

    def notice(self, hosts: Sequence[Host]) -> None:
        """Say of many hosts, once of each, that it has not answered yet; of a few a verb says it in the end."""
        new = [host for host in hosts if host not in self._told]
        if new and len(self.all) >= asking.MANY:
            from paceline.job.text import a_few

            self._told.update(new)
            self._say(f"no answer yet from {a_few([host.name for host in new])}; waiting")

    def look_until(self, deadline: float) -> None:
        """From now on wait for no host beyond this time (monotonic)."""
        self._deadline = deadline

    def answers(self, hosts: Sequence[Host], request: Callable[[Host], Request]) -> dict[Host, Answer]:
        """The answers of all these hosts."""
        answers, failed = self.ask(hosts, request)
        for error in failed.values():
            raise error
        return answers

    def some(
        self, hosts: Sequence[Host], request: Callable[[Host], Request], warn: Callable[[str], None]
    ) -> dict[Host, Answer]:
        """The answers of those of these hosts that answer, if one does; `warn` gets a line about each other one."""
        answers, failed = self.ask(hosts, request)
        if not answers:
            raise next(iter(failed.values()))
        for line in left_out(failed):
            warn(line)
        return answers

    def note(self, answers: Mapping[Host, Answer], failed: Mapping[Host, UserError]) -> None:
        """Remember which hosts have answered, and which have not."""
        waited = {host: host.limits.act for host in failed if not self.was_silent(host, host.limits.act)}
        outcomes = {host: asking.Outcome(answer, 0.0) for host, answer in answers.items()}
        outcomes.update({host: asking.Outcome(error, host.limits.act) for host, error in failed.items()})
        self._silences.note(outcomes, waited)

    @property
    def unreachable(self) -> set[str]:
        """The names of the hosts that did not answer."""
        return self._silences.hosts


def left_out(failed: Mapping[Host, UserError]) -> tuple[str, ...]:
    """One line for each host that did not answer."""
    return tuple(f"{error}; what it has is not shown" for error in failed.values())


# -- hosts that were silent --------------------------------------------------------------------------------------------


class _Here(NamedTuple):
    """A silence in this process: what to say of it, how long the host was waited for, when, and see `Outcome`."""

    error: UserError
    waited: float
    when: float
    is_late: bool


class Silences:
    """Hosts that were silent a short while ago, so that no verb waits for them again and again.

    Those of earlier processes are in a file of the user's state folder.
    """

    def __init__(self) -> None:
        self._path = jobs_folder().parent / "silent.json"
        self._here: dict[Host, _Here] = {}
        self._before = self._read()

    def _read(self) -> dict[str, list[float]]:
        """Host → when it was silent (since the epoch), and for how many seconds."""
        now, found = time.time(), {}
        for name, entry in (read_json(self._path) or {}).items():
            with contextlib.suppress(TypeError, ValueError):  # a damaged file says nothing
                when, waited = map(float, entry)
                if 0 <= now - when < REMEMBERED:
                    found[name] = [when, waited]
        return found

    def in_this_process(self, host: Host) -> tuple[UserError, float] | None:
        """Why a host did not answer this process, and after how many seconds; None if it was not silent."""
        found = self._here.get(host)
        if found is None or time.monotonic() - found.when >= REMEMBERED:
            return None
        return found.error, found.waited

    def is_late(self, host: Host) -> bool:
        """Whether this process did not wait for a host because nearly all others had answered."""
        return self.in_this_process(host) is not None and self._here[host].is_late

    def before(self, host: Host) -> float:
        """How long another process waited for a host in vain; 0 if none did a short while ago."""
        when, waited = self._before.get(_key(host), (0.0, 0.0))
        return waited if 0 <= time.time() - when < REMEMBERED else 0.0

    def explained(self, host: Host) -> Silent:
        """Why a host that was silent before is not waited for."""
        when, waited = self._before[_key(host)]
        within = "" if math.isinf(waited) else f" within {waited:g} s"
        ago = max(0.0, time.time() - when)
        hint = f"it is waited for again {REMEMBERED:g} s after that; see what it does: {host.by_hand}"
        return Silent(f"cannot reach {host.name}: no answer{within} {ago:.0f} s ago, and none now; {hint}")

    def note(self, outcomes: Mapping[Host, Outcome], waited: Mapping[Host, float]) -> None:
        """Remember which hosts have answered, and which have not."""
        silent: dict[str, list[float]] = {}
        back: set[str] = set()
        for host, (answer, seconds, is_late) in outcomes.items():
            if not isinstance(answer, Unreachable):
                self._here.pop(host, None)
                back.add(_key(host))
                continue
            # ssh itself has given up: waiting longer changes nothing
            limit = waited.get(host, self.before(host)) if isinstance(answer, Silent) else math.inf
            limit = seconds if is_late else limit
            self._here[host] = _Here(answer, limit, time.monotonic(), is_late)
            if host in waited and seconds >= _COSTLY:
                silent[_key(host)] = [time.time(), limit]
        if silent or not back.isdisjoint(self._before):
            others = self._read()  # other processes may have noted more since then
            self._before = {name: it for name, it in {**others, **silent}.items() if name not in back}
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_json(self._path, self._before)

    @property
    def hosts(self) -> set[str]:
        """The names of the hosts that did not answer this process."""
        return {host.name for host in self._here}


def _key(host: Host) -> str:
    return host.name if host.port is None else f"{host.name}:{host.port}"
