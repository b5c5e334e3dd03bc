"""Which operations all ranks have submitted, and whether they agree: the coordinator's part, without input or output.

Ranks submit operations under names, in any order. The coordinator on rank 0 answers with responses, in one order for
all. The response to a named operation gets a number; ranks that submit the same operation again send this number as a
bit of a mask, and when all have, the answer is such a mask too: a steady step sends a few bytes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
OP_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")

Shape = tuple[int, ...]
Described = tuple[str, Shape]  # type and shape of a tensor
Key = tuple[int, str, str]  # process set, kind, name

REDUCTIONS = ("allreduce", "reducescatter")
_CACHED = ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall")
UNNAMED = ".noname."  # in names that are made up; these come once only and are not cached


class Request(NamedTuple):
    """What one rank submits."""

    kind: str  # allreduce, reducescatter, allgather, broadcast, alltoall, barrier, join, add_set or remove_set
    name: str  # the same on all ranks
    process_set: int = 0  # number of the process set
    tensors: tuple[Described, ...] = ()  # type and shape of each; several in a grouped operation
    op: int = SUM  # the reduction
    root: int = 0  # global rank of the root of a broadcast
    prescale: float = 1.0  # factor before a reduction
    postscale: float = 1.0  # factor after it
    device: str = "cpu"
    extra: tuple[int, ...] = ()  # the splits of alltoall; the ranks of a new process set

    @property
    def key(self) -> Key:
        """What identifies it among the operations that wait."""
        return self.process_set, self.kind, self.name

    @property
    def title(self) -> str:
        """How warnings and the timeline call it, as Horovod does: `allreduce.NAME`."""
        return self.name if self.name.startswith(f"{self.kind}.") else f"{self.kind}.{self.name}"

    @classmethod
    def of(cls, fields: list[object]) -> Request:
        made = cls(*fields)  # type: ignore[arg-type]
        tensors = tuple((dtype, tuple(shape)) for dtype, shape in made.tensors)
        return made._replace(tensors=tensors, extra=tuple(made.extra))


class Response(NamedTuple):
    """What all ranks do now."""

    request: Request  # of one of the ranks; in what the ranks may differ, the other fields count
    error: str = ""  # why it cannot be done; "" if it can
    extents: tuple[tuple[int, ...], ...] = ()  # per member: first dimension of each tensor, or splits of alltoall
    number: int = -1  # of the cached operation; -1 if it is not cached
    evicted: int = -1  # number of the operation that this one replaces in the cache; -1 for none
    value: int = -1  # the last rank that joined; the number of a new process set

    @classmethod
    def of(cls, fields: list[object]) -> Response:
        made = cls(*fields)  # type: ignore[arg-type]
        extents = tuple(tuple(each) for each in made.extents)
        return made._replace(request=Request.of(list(made.request)), extents=extents)


class _Cached(NamedTuple):
    requests: dict[int, Request]
    response: Response


class Negotiator:
    """What the ranks have submitted, and what is ready."""

    def __init__(self, size: int, capacity: int = 4096, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock  # the current time in seconds
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}  # the ranks of each process set, by its number
        self.joined: set[int] = set()  # the ranks that have joined
        self._size = size
        self._last_joined = -1
        self._capacity = capacity
        self._next_set = 1
        self._waiting: dict[tuple[int, str], dict[str, dict[int, Request]]] = {}  # set and name, kind, rank
        self._since: dict[tuple[int, str], float] = {}
        self._touched: dict[tuple[int, str], None] = {}
        self._bits = [0] * size  # cached operations that a rank has submitted
        self._bits_since: dict[int, float] = {}
        self._cached: dict[int, _Cached] = {}
        self._numbers: dict[Key, int] = {}
        self._free: list[int] = []
        self._of_set: dict[int, int] = {0: 0}  # numbers of a process set's cached operations, as a mask
        self._retired = 0  # numbers that are no longer cached, but may still come

    def receive(self, rank: int, mask: int, requests: list[Request]) -> None:
        """Take what a rank has submitted: cached operations as a mask of their numbers, and others."""
        for number in numbers_of(mask & self._retired):
            self._add(rank, self._cached[number].requests[rank])
        self._bits[rank] |= mask & ~self._retired
        for request in requests:
            for number in self._of_name(request):
                if not self._retired >> number & 1:
                    self._retire(number)
            self._add(rank, request)

    def _of_name(self, request: Request) -> list[int]:
        """The cached operation of a request's name: of any kind, since ranks may disagree about that."""
        keys = ((request.process_set, kind, request.name) for kind in _CACHED)
        return [self._numbers[key] for key in keys if key in self._numbers]

    def responses(self) -> tuple[int, list[Response]]:
        """What is ready now and was not before: cached operations as a mask, and others."""
        ready = 0
        for number, mask in self._of_set.items():
            ready |= self._ready_of(number, mask)
        if ready:
            self._bits = [bits & ~ready for bits in self._bits]
        made: list[Response] = []
        if self.joined:
            for number in numbers_of(ready):
                cached = self._cached[number]
                if error := self._refused_with_joined(next(iter(cached.requests.values()))):
                    ready &= ~(1 << number)
                    made.append(cached.response._replace(error=error, number=-1))
        while self._touched:  # a join may make more ready
            touched, self._touched = self._touched, {}
            for where in touched:
                if where in self._waiting:
                    made.extend(self._answer(where))
        return ready, made

    def _ready_of(self, number: int, mask: int) -> int:
        """The cached operations of a process set that all its ranks have submitted, as a mask."""
        active = [rank for rank in self.sets[number] if rank not in self.joined]
        if not active:  # all have joined; what they submitted before is done
            return mask & self._some_bits()
        for rank in active:
            mask &= self._bits[rank]
        return mask

    def _some_bits(self) -> int:
        some = 0
        for bits in self._bits:
            some |= bits
        return some

    def waiting(self, longer_than: float) -> list[tuple[str, float, list[int]]]:
        """The operations that some ranks have submitted and others have not: name, seconds, missing ranks."""
        now = self.clock()
        found = []
        for (number, name), kinds in self._waiting.items():
            took = now - self._since[number, name]
            there = {rank for ranks in kinds.values() for rank in ranks} | self.joined
            if took >= longer_than and "join" not in kinds:
                title = next(iter(next(iter(kinds.values())).values())).title
                found.append((title, took, [rank for rank in self.sets[number] if rank not in there]))
        self._bits_since = {number: self._bits_since.get(number, now) for number in numbers_of(self._some_bits())}
        for number, since in self._bits_since.items():
            request = self._cached[number].response.request
            missing = [
                rank
                for rank in self.sets[request.process_set]
                if not self._bits[rank] >> number & 1 and rank not in self.joined
            ]
            if now - since >= longer_than:
                found.append((request.title, now - since, missing))
        return found

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not any(self._bits)

    def _add(self, rank: int, request: Request) -> None:
        if request.kind == "join":
            self.joined.add(rank)
            self._last_joined = rank
            self._touched.update(dict.fromkeys(self._waiting))
        where = (request.process_set, request.name)
        self._waiting.setdefault(where, {}).setdefault(request.kind, {})[rank] = request
        self._since.setdefault(where, self.clock())
        self._touched[where] = None

    def _retire(self, number: int) -> None:
        """Take an operation out of the cache: some rank has submitted it with other properties."""
        self._retired |= 1 << number
        requests = self._cached[number].requests
        self._of_set[next(iter(requests.values())).process_set] &= ~(1 << number)
        for rank in range(self._size):
            if self._bits[rank] >> number & 1:
                self._bits[rank] &= ~(1 << number)
                self._add(rank, requests[rank])

    def _answer(self, where: tuple[int, str]) -> list[Response]:
        """The response to what waits under a name, if it is complete."""
        number, _ = where
        kinds = self._waiting[where]
        members = self.sets.get(number, ())
        for kind, requests in list(kinds.items()):
            if all(rank in requests or rank in self.joined for rank in members):
                del kinds[kind]
                if not kinds:
                    del self._waiting[where], self._since[where]
                else:
                    self._touched[where] = None
                return [self._response(members, requests)]
        if len(kinds) > 1 and not self.joined:
            everyone = [rank for requests in kinds.values() for rank in requests]
            if sorted(everyone) == list(members):  # each rank has submitted one kind, and they differ
                del self._waiting[where], self._since[where]
                error = f"Mismatched collective operations: ranks do {' and '.join(sorted(kinds))} under one name"
                firsts = [next(iter(requests.values())) for requests in kinds.values()]
                return [Response(first, f"{error} ({where[1]}).", evicted=self._forget(first.key)) for first in firsts]
        return []

    def _response(self, members: tuple[int, ...], requests: dict[int, Request]) -> Response:
        first = next(requests[rank] for rank in (*members, *requests) if rank in requests)
        evicted = self._forget(first.key)
        if first.kind == "join":
            self.joined.clear()
            return Response(first, value=self._last_joined)
        error = disagreement(requests)
        if not error and any(rank in self.joined for rank in members):
            error = self._refused_with_joined(first)
        if not error and first.kind in ("add_set", "remove_set"):
            return self._change_sets(first)
        if error:
            return Response(first, f"{error} ({first.name})", evicted=evicted)
        extents: tuple[tuple[int, ...], ...] = ()
        if first.kind == "allgather":
            extents = tuple(tuple(shape[0] for _, shape in requests[rank].tensors) for rank in members)
        elif first.kind == "alltoall":
            extents = tuple(requests[rank].extra for rank in members)
        response = Response(first, extents=extents, evicted=evicted)
        if first.kind in _CACHED and UNNAMED not in first.name and len(requests) == len(members):
            return self._cache(response, requests)
        return response

    def _refused_with_joined(self, request: Request) -> str:
        """Why an operation cannot be done while ranks have joined; "" if it can."""
        members = self.sets[request.process_set]
        who = [rank for rank in members if rank in self.joined]
        can = request.kind == "barrier" or (request.kind == "allreduce" and request.op in (AVERAGE, SUM))
        if can or not who:
            return ""
        what = request.kind.capitalize()
        if request.kind == "allreduce":
            what += f" with op {OP_NAMES[request.op]}"
        return f"{what} is not supported with Join at this time: ranks {who} have joined"

    def _change_sets(self, request: Request) -> Response:
        if request.kind == "add_set":
            if request.extra in self.sets.values():
                return Response(request, f"a process set of ranks {list(request.extra)} exists already")
            number, self._next_set = self._next_set, self._next_set + 1
            self.sets[number], self._of_set[number] = request.extra, 0
            return Response(request, value=number)
        (number,) = request.extra
        if number not in self.sets:
            return Response(request)
        for where in [where for where in self._waiting if where[0] == number]:
            del self._waiting[where], self._since[where]
        for key in [key for key in self._numbers if key[0] == number]:
            gone = self._forget(key)
            self._bits = [bits & ~(1 << gone) for bits in self._bits]
        del self.sets[number], self._of_set[number]
        return Response(request, value=number)

    def _cache(self, response: Response, requests: dict[int, Request]) -> Response:
        if len(self._cached) >= self._capacity or self._of_name(response.request):
            return response
        number = self._free.pop() if self._free else len(self._cached)
        response = response._replace(number=number)
        self._cached[number] = _Cached(requests, response)
        self._numbers[response.request.key] = number
        self._of_set[response.request.process_set] |= 1 << number
        return response

    def _forget(self, key: Key) -> int:
        """Free the number of an operation that is answered anew: no rank can still send it. Returns it, or -1."""
        number = self._numbers.pop(key, -1)
        if number >= 0:
            del self._cached[number]
            self._retired &= ~(1 << number)
            self._of_set[key[0]] &= ~(1 << number)
            self._free.append(number)
        return number


def numbers_of(mask: int) -> list[int]:
    """The numbers of the bits that are set, in ascending order."""
    return [number for number, bit in enumerate(reversed(f"{mask:b}")) if bit == "1"] if mask else []


def disagreement(requests: dict[int, Request]) -> str:
    """Why the ranks' requests for one operation cannot be carried out together; "" if they agree."""
    (one, first), *others = sorted(requests.items())
    for _, shape in first.tensors:
        if not shape and first.kind in ("allgather", "alltoall", "reducescatter"):
            return f"Rank {one} tried to {first.kind} a rank-zero tensor."
    for rank, request in others:
        error = _difference(one, first, rank, request)
        if error:
            return error
    return ""


def _difference(one: int, first: Request, rank: int, request: Request) -> str:
    kind = first.kind
    if len(first.tensors) != len(request.tensors):
        return (
            f"Mismatched groups: rank {one} has {len(first.tensors)} tensors, rank {rank} has {len(request.tensors)}."
        )
    for (dtype, shape), (their_dtype, their_shape) in zip(first.tensors, request.tensors, strict=True):
        if dtype != their_dtype:
            return f"Mismatched data types: rank {one} has type {dtype}, rank {rank} has type {their_dtype}."
        if kind in ("allgather", "alltoall"):
            if len(shape) != len(their_shape) or shape[1:] != their_shape[1:]:
                return (
                    f"Mismatched {kind} tensor shapes: beyond the first dimension, rank {one} has {list(shape[1:])}, "
                    f"rank {rank} has {list(their_shape[1:])}."
                )
        elif shape != their_shape:
            return (
                f"Mismatched {kind} tensor shapes: rank {one} has {list(shape)}, rank {rank} has {list(their_shape)}."
            )
    pairs = (
        ("devices", first.device, request.device),
        ("reduction operations", OP_NAMES[first.op], OP_NAMES[request.op]),
        (f"{kind} root ranks", first.root, request.root),
        ("prescale factors", first.prescale, request.prescale),
        ("postscale factors", first.postscale, request.postscale),
        ("process sets", first.extra if kind != "alltoall" else (), request.extra if kind != "alltoall" else ()),
    )
    for what, ours, theirs in pairs:
        if ours != theirs:
            return f"Mismatched {what}: rank {one} has {ours}, rank {rank} has {theirs}."
    return ""
