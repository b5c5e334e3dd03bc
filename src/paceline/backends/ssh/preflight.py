"""What is tried on hosts before a job starts there: connections, Python, disks, clocks, and the routes between them.

All hosts are asked at once, over one connection each (`node/host/check.py`), and all problems are reported.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.backends.check.findings import disk_findings, grouped, host_findings, line
from paceline.backends.check.report import Clock, Finding
from paceline.backends.remote.crowd import at_once, need_files
from paceline.job.errors import UserError
from paceline.job.text import a_few, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
    from types import TracebackType

    from paceline.backends.remote.connection import Answer, Answers, Host
    from paceline.backends.remote.patience import Patience
    from paceline.contract.facts import PreflightFacts
    from paceline.contract.messages import PeerRecord, Route, WantedEnvironment, WantedImage
    from paceline.contract.messages import Preflight as PreflightRequest
    from paceline.contract.nodejob import Order

    from .target import Hosts

_BRIEF = 2.0  # seconds for the login at a host that was silent a moment ago, if the others are all that a job can use
_CONNECT = 4  # the same for its sshd to answer, if a job can start without it: one that has just come back does
_FEW = 3  # routes from one host that are broken, of each of which a line tells
_ALL = 16  # hosts of which all routes are tried

Node = TypeVar("Node")


class Preflight:
    """Connections to several hosts at once; a context manager.

    Attributes:
        answers: the first answer of each host that answers.
        failed: the errors of the others.
        clocks: of the hosts that answer.
        peers: the hosts with the addresses and ports for each other.
    """

    def __init__(
        self,
        hosts: Hosts,
        order: Order | None = None,
        environment: WantedEnvironment | WantedImage | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        """Make no connection yet; see `PreflightRequest`."""
        self.answers: dict[Host, PreflightFacts] = {}
        self.failed: dict[Host, UserError] = {}
        self.clocks: dict[Host, Clock] = {}
        self._target, self._hosts = hosts, list(hosts.all)
        self._order, self._environment, self._imports = order, environment, imports
        # How many hosts the job needs and can use; 0 if there is none.
        self._least, self._most = (0, 0) if order is None else order.job.node_range
        self._token = secrets.token_hex(16)
        self._conversations: dict[Host, Answers] = {}
        self._tried: Mapping[Host, Collection[Host]] = {}
        self.peers: dict[Host, PeerRecord] = {}

    def __enter__(self) -> Preflight:
        need_files(len(self._hosts))
        try:
            silent = {host for host in self._hosts if self._target.was_silent(host, self._patience(host).login)}
            results = at_once(
                self._hosts,
                lambda host: self._begin(host, len(silent) if host in silent else None),
                self._target.notice,
            )
            self._sort_out(results)
            self._target.note(self.answers, self.failed)
        except BaseException:
            self._close()
            raise
        self.answers = {host: self.answers[host] for host in self._hosts if host in self.answers}  # in their order
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        at_once(self._conversations, lambda host: self._conversations[host].aclose())

    def _request(self, host: Host) -> PreflightRequest:
        return {
            "do": "preflight", "name": host.name, "token": self._token,
            "order": None if self._order is None else replace(self._order, slots=host.slots).to_json(),
            "environment": self._environment, "imports": self._imports,
        }  # fmt: skip

    def _patience(self, host: Host) -> Patience:
        return host.patience(self._request(host)).for_many(len(self._hosts))

    async def _begin(self, host: Host, silent: int | None) -> None:
        """Ask a host what it has, and read its clock; `silent`: how many were silent a moment ago, if this one was."""
        order, patience = self._request(host), self._patience(host)
        others = -1 if silent is None else len(self._hosts) - silent
        if others >= self._most:
            patience = patience.shortened(min(_BRIEF, patience.login))
        elif others >= self._least:
            patience = patience._replace(connect=_CONNECT)
        patience = patience._replace(later=patience.work)  # it may have a stuck disk
        self._conversations[host] = await host.connect(order, patience=patience)
        self.answers[host] = answer = await anext(self._conversations[host])
        self.peers[host] = {"name": host.name, "address": answer["address"], "port": answer["listens"]}
        await self._read_clock(host)

    def read_clocks(self) -> None:
        """Compare the clocks with this machine's once more; the most exact reading is kept."""
        self._on_all(list(self.answers), self._read_clock)

    async def _read_clock(self, host: Host) -> None:
        before, start = time.time(), time.monotonic()
        now = (await self._ask(host, {"do": "clock"}))["now"]
        half = (time.monotonic() - start) / 2
        if host not in self.clocks or half < self.clocks[host].uncertainty:
            self.clocks[host] = Clock(now - before - half, half)

    async def _ask(self, host: Host, order: Route) -> Answer:
        conversation = self._conversations[host]
        conversation.say(json.dumps(order))
        return await anext(conversation)

    def _on_all(self, hosts: Iterable[Host], do: Callable[[Host], Coroutine[Any, Any, Any]]) -> dict[Host, Any]:
        """The results of `do` for the hosts, all at once; a host that fails is moved to `failed`."""
        results = at_once(hosts, do)
        self._sort_out(results)
        return {host: answer for host, answer in results.items() if host in self.answers}

    def _sort_out(self, results: Mapping[Host, Any]) -> None:
        """Move hosts that have failed to `failed`."""
        for host, answer in results.items():
            if isinstance(answer, UserError):
                self.failed[host] = answer
                self.answers.pop(host, None)

    def ask(self, orders: Mapping[Host, Route]) -> dict[Host, Answer]:
        """The answers to a request for each host, of the hosts that answer."""
        return self._on_all(orders, lambda host: self._ask(host, orders[host]))

    def broken(self, hosts: Iterable[Host]) -> dict[tuple[Host, Host], str]:
        """The tried pairs of these hosts that cannot connect, and why; see `routes_of`."""
        self._tried = routes_of([host for host in hosts if host in self.answers])
        orders: dict[Host, Route] = {
            host: {"do": "reach", "peers": [self.peers[peer] for peer in peers]} for host, peers in self._tried.items()
        }
        by_name = {host.name: host for host in self._tried}
        found = {}
        for host, answer in self.ask(orders).items():
            for name, why in answer["reached"].items():
                if why is not None and by_name[name] in self.answers:
                    found[host, by_name[name]] = str(why)
        return found

    def routes(self, broken: Mapping[tuple[Host, Host], str]) -> list[Finding]:
        """Findings about pairs of hosts that cannot connect."""
        by_target: dict[tuple[Host, str], list[str]] = {}
        by_source: dict[tuple[Host, str], list[str]] = {}
        of_source = Counter(source for source, _ in broken)
        of_target = Counter(target for _, target in broken)
        for (source, target), why in broken.items():
            if of_source[source] > max(_FEW, of_target[target]):
                by_source.setdefault((source, why), []).append(target.name)
            else:
                by_target.setdefault((target, why), []).append(source.name)
        found = [
            (target, f"{a_few(sources)} cannot reach {target.name} at {self.peers[target]['address']}: {why}")
            for (target, why), sources in by_target.items()
        ]
        found += [
            (source, f"{source.name} cannot reach {a_few(targets)}: {why}")
            for (source, why), targets in by_source.items()
        ]
        do = "let the hosts connect to each other on every port: see the firewalls and routes between them"
        return [Finding("error", host.name, printable(what), do) for host, what in found]

    # -- for a job -----------------------------------------------------------------------------------------------------

    def choose(
        self,
        least: int,
        most: int,
        preferred: Callable[[Mapping[Host, PreflightFacts]], list[Host]],
        say: Callable[[str], None],
    ) -> list[Host]:
        """The hosts for a job: they can take it and reach each other. Problems of the others are reported."""
        unfit = self._unfit()
        wrong = [(host.name, text) for host, text in unfit]
        fit = {host: answer for host, answer in self.answers.items() if host not in dict(unfit)}
        if len(fit) < least:
            raise UserError("\n".join(grouped(wrong)))
        for text in grouped(wrong):
            say(text)
        order = preferred(fit)
        chosen = order[:most]
        self._check_distinct(chosen)
        if len(chosen) > 1:
            chosen = self._connected(chosen, order, least, most, say)
        answers = {host.name: self.answers[host] for host in chosen}
        framework = next((name for answer in answers.values() for name in answer["packages"]), None)
        for finding in host_findings(answers, {host.name: self.clocks[host] for host in chosen}):
            if framework is not None and finding.where in ("Python", framework):  # its ranks could not work together
                raise UserError(f"{line(finding)}, or name the packages with --environment")
            if finding.level != "error":  # a disk with one is in `_unfit`
                say(line(finding))
        return chosen

    def _unfit(self) -> list[tuple[Host, str]]:
        """The hosts that cannot take the job, and why."""
        found = [(host, str(error)) for host, error in self.failed.items()]
        for host, answer in self.answers.items():
            if "refused" in answer:
                found.append((host, f"{host.name}: {answer['refused']}"))
            else:
                found += [(host, line(it)) for it in disk_findings(host.name, answer["disks"]) if it.level == "error"]
        return sorted(found, key=lambda pair: self._hosts.index(pair[0]))

    def _check_distinct(self, hosts: Iterable[Host]) -> None:
        """Each node of a job is a machine of its own."""
        seen: dict[str, Host] = {}
        for host in hosts:
            other = seen.setdefault(self.answers[host]["machine"], host)
            if other != host:
                slots = other.slots + host.slots
                raise UserError(
                    f"{other.name} and {host.name} are the same machine; name it once, with all its slots: "
                    f"{other.name}:{slots or 2}"
                )

    def _connected(
        self, chosen: list[Host], order: list[Host], least: int, most: int, say: Callable[[str], None]
    ) -> list[Host]:
        """The hosts that reach each other; if some do not, others are tried instead."""
        broken = self.broken(chosen)
        if not broken and all(host in self.answers for host in chosen):
            return chosen
        if len(order) > len(chosen):
            broken = self.broken(order)
        lines: list[str] = []
        remaining = order
        while True:
            remaining = together([host for host in remaining if host in self.answers], self._tried, broken)
            lines += [line(finding) for finding in self.routes(broken)]
            if not broken or len(remaining) < least or tries_all(len(self._tried)):
                break
            broken = self.broken(remaining)
        remaining = [host for host in remaining if host in self.answers]
        lines += [str(self.failed[host]) for host in order if host in self.failed]
        if len(remaining) < least:
            raise UserError("\n".join(lines))
        for text in lines:
            say(text)
        return remaining[:most]


# -- which routes are tried --------------------------------------------------------------------------------------------


def tries_all(count: int) -> bool:
    """Whether all routes between so many hosts are tried."""
    return count <= _ALL


def routes_of(hosts: Sequence[Node]) -> dict[Node, list[Node]]:
    """Host → those that it is to connect to.

    Of a few hosts all routes are tried. Of many, each host connects to the next ones at distances 1, 2, 4, …, and all
    connect to the first one, where the nodes of a job meet: N·(log₂ N + 1) connections instead of N·(N - 1). This finds

    - each host that no other reaches, or that reaches no other, such as one with a wrong interface, by several others;
    - each division of the hosts into groups that do not reach each other, since the distance 1 makes a ring of all.

    It does not find every single pair that is broken while both hosts of it reach the others.
    """
    count = len(hosts)
    if tries_all(count):
        return {host: [other for other in hosts if other != host] for host in hosts}
    distances = [1 << bit for bit in range(count.bit_length()) if 1 << bit < count]
    return {
        host: [hosts[it] for it in dict.fromkeys([0, *((place + far) % count for far in distances)]) if it != place]
        for place, host in enumerate(hosts)
    }


def together(
    hosts: Sequence[Node], tried: Mapping[Node, Collection[Node]], broken: Collection[tuple[Node, Node]]
) -> list[Node]:
    """Nodes that reach each other, as far as tried.

    These are of the largest group that broken routes do not divide; of it the host with the largest share of broken
    routes, from it or to it, is removed until no route is broken.
    """
    remaining, bad = dict.fromkeys(_largest_group(hosts, tried, broken)), set(broken)
    while bad := {pair for pair in bad if pair[0] in remaining and pair[1] in remaining}:
        routes = [(source, target) for source in remaining for target in tried.get(source, ()) if target in remaining]
        share = dict.fromkeys(remaining, 0.0)
        for end in (0, 1):
            of_all, of_bad = Counter(pair[end] for pair in routes), Counter(pair[end] for pair in bad)
            share = {host: max(share[host], of_bad[host] / max(1, of_all[host])) for host in remaining}
        del remaining[max(reversed(remaining), key=share.__getitem__)]
    return list(remaining)


def _largest_group(
    hosts: Sequence[Node], tried: Mapping[Node, Collection[Node]], broken: Collection[tuple[Node, Node]]
) -> list[Node]:
    """The largest group of hosts that are connected by routes that work in all directions in which they were tried."""
    works: dict[Node, set[Node]] = {host: set() for host in hosts}
    for source in hosts:
        for target in tried.get(source, ()):
            if target in works and (source, target) not in broken and (target, source) not in broken:
                works[source].add(target)
                works[target].add(source)
    groups: list[set[Node]] = []
    left = dict.fromkeys(hosts)
    while left:
        group, edge = set(), [next(iter(left))]
        while edge:
            host = edge.pop()
            if host in left:
                del left[host]
                group.add(host)
                edge += works[host]
        groups.append(group)
    largest = max(groups, key=len, default=set())
    return [host for host in hosts if host in largest]
