"""What makes a job slow, what helps, and how much: from what its ranks have spent their time on. Pure functions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Callable, NamedTuple

from paceline.node.journal.pace import across

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.contract.stands import Pace, Spent

_MOST = 3  # causes that are named
_PAST = 0.1  # of the last samples, below which a wait is over
_MANY = 50  # collectives per second
_MOST_WORKERS = 16  # that are recommended
_SMALL = 4096.0  # bytes of a read, on average, below which files are small
_IDLE_WORKERS = 0.6  # of the workers that are waited for have a batch to load, at most
_FAR = 0.25  # of what the local temporary folder gives, below which a storage is slow
_WORK = 0.4  # of a core, below which a worker waits
_BUCKET, _FIRST_BUCKET = 25e6, 1e6  # bytes that torch puts into a bucket
_MOST_USE = 0.6  # of the time in which a GPU that waits for Python computes
_STEPS = 0.8  # of the time in which the main thread computes steps, and so nothing else keeps a GPU idle
_MOST_MEMORY = 0.5  # of a GPU, below which a larger batch fits
_FULL = 0.6  # of what a network can send, from which on it is full
_LEAST_SENT = 1e7  # bytes per second, from which on an exchange goes over the network
_SWAPS = 1e6  # bytes per second, from which on a machine swaps
_HOT = 87.0  # degrees Celsius, from which on GPUs slow down
_STILL = 0.6  # of the samples, from which on the main thread waits, and does not compute
# The library's names of the parts of a step, and those of samples.
_MEASURED = {"sync": "exchange", "checkpoint": "checkpoint", "optimizer": "optimizer"}


class _Seen:
    """What the causes look at.

    Attributes:
        spent: all that is known.
        parts: the share of each part; what the library has measured counts for more than samples.
        measured: the share of parts that the library has measured, of a step.
        step: seconds of a step; None if that is not known.
        used: the share that the ranks use of the cores that they could have.
        workers: of the DataLoader; None if it has not been seen.
        compute: the share of a step without waiting for data.
    """

    def __init__(self, spent: Spent) -> None:
        self.spent = spent
        self.parts = dict(spent["parts"])
        seconds = spent.get("seconds", {})
        total = seconds.get("total", 0.0)
        self.step = total or spent.get("step")
        self.workers = spent["loader"]["workers"] if "loader" in spent else None
        if total:
            loads = self.parts.pop("loading", 0.0), self.parts.pop("workers", 0.0)
            self.parts["workers" if self.workers or loads[0] < loads[1] else "loading"] = seconds["data"] / total
        self.measured = {name: seconds[part] / total for part, name in _MEASURED.items() if seconds.get(part)}
        self.parts.update(self.measured)
        if spent.get("gpu") and "ddp" in spent and self.step and "exchange" not in self.measured:
            self.parts["exchange"] = max(self.share("exchange"), spent["ddp"]["exposed"] / self.step)
        self.compute = 1 - self.parts.get("loading", 0.0) - self.parts.get("workers", 0.0)
        self.used = spent["used"] / (spent["used"] + spent["free"]) if spent.get("used") else 0.0

    def share(self, *parts: str) -> float:
        """Of some parts together."""
        return sum(self.parts.get(part, 0.0) for part in parts)

    def is_still(self, part: str) -> bool:
        """Whether the main thread waits in a part, and does not compute."""
        return self.spent.get("still", {}).get(part, 0.0) >= _STILL

    @property
    def least(self) -> float:
        """Of a step: what it takes at least, however many workers load beside it."""
        waits = self.work_of_workers < _WORK if self.parts.get("workers") else self.is_still("loading")
        needs_cores = not waits
        return max(self.compute, 0.02, self.used if needs_cores else 0.0)

    @property
    def work(self) -> float:
        """Of a step: what one worker would take to load a batch. Workers that are waited for are never idle."""
        return float(self.workers or 1) if self.parts.get("workers") else self.parts.get("loading", 0.0)

    @property
    def more(self) -> int:
        """How many workers load as fast as the rest of a step is."""
        return min(_MOST_WORKERS, max(1, math.ceil(self.work / self.least)))

    @property
    def left(self) -> float:
        """What is left of a step with these."""
        return min(1.0, max(self.least, self.work / self.more))

    @property
    def ahead(self) -> float:
        """Of a step that is left when workers load so far ahead that all of them always have a batch to load."""
        return max(self.least, self.spent.get("busy", 1.0))

    @property
    def reads(self) -> float:
        """Bytes per second that are read while data is waited for; infinite if that is not known."""
        if self.workers:
            return self.spent.get("rate") or math.inf
        seconds = (self.step or 0.0) * self.share("loading")
        read = self.spent.get("ranks", 1) * self.spent.get("read", 0.0)
        return read / seconds if seconds and read else math.inf

    @property
    def is_far(self) -> bool:
        """Whether the local temporary folder gives much more; data that computing yields is not read at all."""
        return 1e5 < self.reads < _FAR * self.spent.get("local", 0.0)

    @property
    def work_of_workers(self) -> float:
        """Of a core, that a worker uses."""
        ranks = self.spent.get("ranks", 1)
        return (self.spent.get("used", math.inf) / ranks - self.compute) / (self.workers or 1)

    @property
    def buckets(self) -> tuple[int, int]:
        """How many a step of DistributedDataParallel has, and how many are enough."""
        ddp = self.spent["ddp"]
        return ddp["buckets"], 1 + math.ceil(max(0, ddp["bytes"] - _FIRST_BUCKET) / _BUCKET)

    @property
    def waits_for_python(self) -> bool:
        """Whether GPUs are idle while nothing but Python keeps them waiting."""
        steps = self.share("script", "forward", "backward", "optimizer")
        return self.spent.get("gpu_use", 1.0) < _MOST_USE and steps >= _STEPS

    @property
    def waited(self) -> float:
        """The share of the time in which ranks wait for one that is slower."""
        return self.spent["busiest"]["others"] - self.spent["busiest"]["exchange"]

    @property
    def queued(self) -> float:
        """The share of the time in which ranks wait for cores that they use themselves, and other processes do not."""
        spent = self.spent
        busy = max(spent.get("used", 0.0), spent.get("cores", 0) - spent.get("free", 0.0))
        return spent.get("queued", 0.0) * spent.get("used", 0.0) / busy if busy else 0.0

    @property
    def others(self) -> float:
        """How many cores of the machine other processes keep busy."""
        spent = self.spent
        return max(0.0, spent["cores"] - spent["free"] - spent["used"]) if "cores" in spent else 0.0

    @property
    def crowded(self) -> float:
        """The share of the time in which ranks wait for cores that other processes use."""
        return self.spent.get("queued", 0.0) - self.queued if self.others >= 0.5 else 0.0

    @property
    def sending(self) -> float:
        """Bytes per second that this machine sends while its ranks exchange with those of others; else 0."""
        share, is_alone = self.share("exchange"), self.spent.get("world", 0) <= self.spent.get("ranks", 1)
        return 0.0 if is_alone or not share else self.spent.get("sent", 0.0) / share

    @property
    def fills(self) -> float:
        """The share of what the network can send that is sent then; 0 if that is not known."""
        return self.sending / self.spent["link"] if self.spent.get("link") else 0.0

    @property
    def leaves_infiniband(self) -> bool:
        """Whether NCCL sends next to nothing over the InfiniBand that there is."""
        spent = self.spent
        uses = spent.get("infiniband", math.inf)
        return bool(spent.get("gpu")) and self.sending >= _LEAST_SENT and uses < 0.01 * spent["sent"]

    @property
    def crowds_itself(self) -> bool:
        """Whether ranks wait for cores since they compute with more threads than there are for each."""
        return self.spent.get("computing", 0) > self.fair and self.queued >= 0.1

    @property
    def waited_early(self) -> bool:
        """Whether data was waited for at first alone, as where the first epoch fills a cache."""
        return self.spent.get("late", 1.0) < _PAST

    def threads(self, count: int) -> str:
        """What gives each rank so many threads: the script itself may set them."""
        at = self.spent.get("threads_at")
        return f"torch.set_num_threads({count}) at {at}" if at else f"OMP_NUM_THREADS={count}"

    @property
    def could(self) -> int:
        """The threads of a rank if cores that nobody uses are shared out too."""
        had = self.spent.get("used", 0.0) + self.spent.get("free", 0.0)
        return min(self.fair, round(had / max(self.spent.get("ranks", 1), 1)))

    @property
    def fair(self) -> int:
        """The threads of a rank if the cores are shared out."""
        return max(1, self.spent.get("cores", 1) // max(self.spent.get("ranks", 1), 1))


class _Cause(NamedTuple):
    """A cause."""

    parts: tuple[str, ...]  # of a step, in whose place it is named; a part is named once, by the first cause that holds
    least: float  # the share of these parts from which on it is named
    holds: Callable[[_Seen], object]  # whether the other evidence is there
    # what, helps: in words; `_words` has the values
    what: str
    helps: str
    saved: Callable[[_Seen], float | None]  # the share of the time that this would save; None if nobody knows


_LOADING, _WORKERS = ("loading",), ("workers",)
_CAUSES = (
    *(
        _Cause(
            parts, 0.2, lambda it: it.waited_early,
            "{percent} % of the time waits for data{at}, but {late} % of the last quarter of it: the first epoch may "
            "fill a cache", "fill it before the job, or leave it: more workers gain nothing any more",
            lambda it: it.share("loading", "workers"),
        )
        for parts in (_LOADING, _WORKERS)
    ),
    _Cause(
        _LOADING, 0.2, lambda it: it.spent.get("reads", 0) >= 50 and it.spent["read"] / it.spent["reads"] < _SMALL,
        "{percent} % of {of} loads data{at}, in {reads:.0f} reads of {read} on average: many small files",
        "pack the samples into few large files (tar shards, one array), which would save up to {saved}",
        lambda it: it.share("loading"),
    ),
    _Cause(
        _LOADING, 0.2, lambda it: it.is_still("loading") and it.is_far,
        "{percent} % of {of} waits for data{at}: {workers} workers read{size} from slow storage, {rate}/s, while the "
        "local temporary folder gives {local}/s",
        "a copy on a local disk would save up to {saved}, or num_workers={more} about {by_more}{tune}",
        lambda it: it.share("loading") * (1 - it.reads / it.spent["local"]),
    ),
    _Cause(
        _LOADING, 0.2, lambda it: it.is_still("loading"),
        "{percent} % of {of} waits for data{at}, without computing: {workers} workers read{size} from slow storage",
        "num_workers={more} would save about {saved}{tune}, or copy the data to a local disk first",
        lambda it: 1 - it.left,
    ),
    _Cause(
        _LOADING, 0.2, lambda it: it.left < 0.95,
        "{percent} % of {of} waits for data{at}: {workers} workers read{size}",
        "num_workers={more} would save about {saved}{tune}", lambda it: 1 - it.left,
    ),
    _Cause(
        _LOADING, 0.2, lambda it: True,
        "{percent} % of {of} waits for data{at}: {workers} workers read{size}, and no core is free for more of them",
        "less work on each sample helps: store what is decoded, transform whole batches", lambda it: None,
    ),
    _Cause(
        _WORKERS, 0.2,
        lambda it: it.workers and it.workers > 1 and it.spent.get("busy", 1) <= _IDLE_WORKERS and it.ahead < 0.95,
        "{percent} % of {of} waits for a batch that comes late{at}, while {idle} % of the {workers} workers have "
        "nothing to load",
        "prefetch_factor={further} would save about {saved}{tune}", lambda it: 1 - it.ahead,
    ),
    _Cause(
        _WORKERS, 0.2, lambda it: it.workers and it.is_far and it.work_of_workers < _WORK,
        "{percent} % of {of} waits for data{at}: {workers} workers read {rate}/s from slow storage, while the local "
        "temporary folder gives {local}/s",
        "a copy on a local disk would save up to {saved}, or num_workers={more} about {by_more}{tune}",
        lambda it: it.share("workers") * (1 - it.reads / it.spent["local"]),
    ),
    _Cause(
        _WORKERS, 0.2, lambda it: it.workers and it.left < 0.95 and it.more > it.workers,
        "{percent} % of {of} waits for data{at}: {workers} workers are too few",
        "num_workers={more} would save about {saved}{tune}", lambda it: 1 - it.left,
    ),
    _Cause(
        _WORKERS, 0.2, lambda it: True,
        "{percent} % of {of} waits for the workers that load data{at}",
        "less work on each sample helps: store what is decoded, use larger files", lambda it: None,
    ),
    _Cause(
        ("exchange",), 0.0, lambda it: "busiest" in it.spent and it.spent["busiest"]["part"] == "evaluation",
        "{others} % of the time ranks wait for rank {rank}, which evaluates alone, at {line}",
        "evaluation on all ranks, each with its share of the data, would save about {saved}",
        lambda it: it.waited * (1 - 1 / it.spent["ranks"]),
    ),
    _Cause(
        ("exchange",), 0.0, lambda it: "busiest" in it.spent,
        "{others} % of the time ranks wait for rank {rank}, which is at {line} ({part}) more often than they are",
        "as fast as the others it would save about {saved}; look at its data, and at its host: {host}",
        lambda it: it.waited,
    ),
    _Cause(
        ("start of workers",), 0.1, lambda it: it.spent.get("iterations", 0) > it.spent.get("ranks", 1),
        "{percent} % of the time starts workers of a DataLoader{at}, again in each epoch",
        "persistent_workers=True would save about {saved}", lambda it: it.share("start of workers"),
    ),
    _Cause(
        ("exchange",), 0.1, lambda it: "ddp" in it.spent and it.spent["ddp"]["finds_unused"]
        and not it.spent["ddp"]["unused"],
        "{percent} % of {of} exchanges with other ranks{at}, with find_unused_parameters=True although all parameters "
        "are used", "without it there is one collective less, which would save up to {saved}",
        lambda it: it.share("exchange") / (it.buckets[0] + 1),
    ),
    _Cause(
        ("exchange",), 0.1, lambda it: "ddp" in it.spent and it.buckets[0] > 2 * it.buckets[1],
        "{percent} % of {of} exchanges with other ranks{at}, in {buckets} buckets of {bucket} on average",
        "bucket_cap_mb=25 makes {enough} of them, which would save up to {saved}",
        lambda it: it.share("exchange") * (1 - it.buckets[1] / it.buckets[0]),
    ),
    _Cause(
        ("exchange",), 0.2, lambda it: it.spent.get("objects", 0.0) >= 0.2,
        "{objects} % of the time exchanges Python objects of all ranks{objects_at}, which are pickled",
        "every hundredth step, or tensors in one all_gather or all_reduce, would save up to {saved}",
        lambda it: it.spent["objects"],
    ),
    _Cause(
        ("exchange",), 0.2, lambda it: it.spent.get("collectives", 0.0) >= _MANY
        and it.spent["by_hand"] > 0.5 * it.share("exchange"),
        "{percent} % of {of} exchanges with other ranks{at}, in {collectives:.0f} collectives of the script per "
        "second", "few for all tensors together would save up to {saved}; for gradients, DistributedDataParallel does "
        "it beside the backward pass", lambda it: it.share("exchange"),
    ),
    _Cause(
        ("exchange",), 0.2, lambda it: it.leaves_infiniband,
        "{percent} % of {of} exchanges with other ranks{at}, at {sending}/s over TCP, and next to nothing over "
        "this machine's InfiniBand",
        "NCCL_DEBUG=INFO says why: NCCL_IB_DISABLE=1, an NCCL_IB_HCA that names another port, or a container without "
        "/dev/infiniband", lambda it: None,
    ),
    _Cause(
        ("exchange",), 0.2, lambda it: it.fills >= _FULL,
        "{percent} % of {of} exchanges with other ranks{at}, at {sending}/s of the {link}/s that the network can send",
        "gradients in 16 bits would save up to {saved}; paceline tune compares the ways to exchange them",
        lambda it: it.share("exchange") / 2,
    ),
    _Cause(
        ("exchange",), 0.3,
        lambda it: it.spent.get("gpu") and it.fills and it.sending >= _LEAST_SENT and "infiniband" not in it.spent,
        "{percent} % of {of} exchanges with other ranks{at}, at {sending}/s over TCP, of {link}/s that the network can "
        "send",
        "NCCL_SOCKET_NTHREADS=4 and NCCL_NSOCKS_PERTHREAD=4 make more connections, which would save up to {saved}",
        lambda it: it.share("exchange") * (1 - it.fills),
    ),
    _Cause(
        ("exchange",), 0.3, lambda it: not it.crowds_itself,  # those that are waited for wait for a core
        "{percent} % of {of} exchanges with other ranks{at}",
        "paceline tune compares the ways to exchange gradients", lambda it: None,
    ),
    _Cause(
        ("checkpoint",), 0.1, lambda it: True,
        "{percent} % of {of} writes or reads checkpoints{at}",
        "a tenth as often would save about {saved}; or in the background (docs/checkpoints.md)",
        lambda it: 0.9 * it.share("checkpoint"),
    ),
    _Cause(
        ("logging",), 0.1, lambda it: True,
        "{percent} % of the time logs and prints{at}", "every hundredth step would save about {saved}",
        lambda it: 0.99 * it.share("logging"),
    ),
    _Cause(
        ("item",), 0.1, lambda it: it.spent.get("gpu"),
        "{percent} % of the time copies results to the CPU{at} (.item(), .cpu(), .tolist()), and waits for the GPU "
        "each time", "keep sums on the GPU, and copy them every hundredth step", lambda it: None,
    ),
    _Cause(
        ("item",), 0.1, lambda it: True,
        "{percent} % of the time takes single values from tensors{at} (.item(), .tolist())",
        "sums of whole tensors, read every hundredth step, would save up to {saved}", lambda it: it.share("item"),
    ),
    _Cause(
        ("copy",), 0.1, lambda it: it.spent.get("gpu") and not it.spent.get("loader", {}).get("pinned"),
        "{percent} % of the time copies batches to the GPU{at}, from memory that is not pinned",
        "DataLoader(…, pin_memory=True) and .to(device, non_blocking=True) would save up to {saved}",
        lambda it: it.share("copy"),
    ),
    _Cause(
        ("optimizer",), 0.3, lambda it: not it.spent.get("gpu"),
        "{percent} % of {of} is the optimizer's{at}, which takes as long for a small batch",
        "a batch twice as large would save about {saved} for each sample", lambda it: it.share("optimizer") / 2,
    ),
    _Cause(
        ("script",), 0.5, lambda it: not it.spent.get("gpu") and it.is_still("script"),
        "{percent} % of the time is in the script's own code{at}, and mostly waits there",
        "up to {saved} would be saved if the script slept, wrote files or ran other programs less often, or in a "
        "thread",
        lambda it: it.share("script"),
    ),
    _Cause(
        ("script",), 0.5, lambda it: not it.spent.get("gpu"),
        "{percent} % of the time is in the script's own code{at}",
        "paceline profile shows what it calls; Python's loops over samples are slow, operations on whole tensors are "
        "not", lambda it: None,
    ),
    _Cause(
        (), 0.0, lambda it: it.waits_for_python and it.spent.get("gpu_memory", 1.0) < _MOST_MEMORY,
        "GPUs compute in {gpu_use} % of the time, and {gpu_memory} % of their memory is used: Python takes longer for "
        "a step than they do",
        "a batch twice as large would save about {saved} for each sample",
        lambda it: 1 - max(0.5, it.spent["gpu_use"]),
    ),
    _Cause(
        (), 0.0, lambda it: it.waits_for_python,
        "GPUs compute in {gpu_use} % of the time: between kernels they wait for Python",
        'torch.compile(model, mode="reduce-overhead") would save up to {saved}', lambda it: 1 - it.spent["gpu_use"],
    ),
    _Cause(
        (), 0.0, lambda it: it.spent.get("single") and it.spent.get("gpu_use", 0.0) >= _MOST_USE,
        "GPUs compute in {gpu_use} % of the time, and matrix products are in float32",
        'torch.autocast(device_type="cuda", dtype=torch.bfloat16), or torch.set_float32_matmul_precision("high"), uses '
        "their tensor cores", lambda it: None,
    ),
    _Cause(
        (), 0.0, lambda it: it.spent.get("swapped", 0.0) >= _SWAPS,
        "the machine swaps {swapped}/s{stalled}",
        "fewer data workers or ranks, or smaller batches, need less memory", lambda it: it.spent.get("stalled"),
    ),
    _Cause(
        (), 0.0, lambda it: it.crowds_itself,
        "{queued} % of the time ranks wait for a core: {ranks} with {computing} threads each compute on {cores} cores",
        "{fairly} would save about {saved}", lambda it: it.queued,
    ),
    _Cause(
        (), 0.0, lambda it: it.crowded >= 0.1,
        "{crowded} % of the time ranks wait for a core, while other processes use {elsewhere} of {cores}",
        "a machine, or cores, of its own would save about {saved}", lambda it: it.crowded,
    ),
    _Cause(
        ("forward", "backward", "optimizer"), 0.5,
        lambda it: 0 < it.spent.get("computing", 0) < it.could and not it.spent.get("gpu"),
        "{percent} % of the time computes with {computing} thread(s) a rank, of {could} cores for each",
        "{as_could} would save up to {saved}",
        lambda it: it.share("forward", "backward", "optimizer") * (1 - it.spent["computing"] / it.could),
    ),
)  # fmt: skip


def reads_slowly(spent: Spent) -> bool:
    """Whether ranks wait for data that is read, so that it is worth knowing what the local disk would give."""
    it = _Seen(spent)
    return it.share("loading", "workers") >= 0.2 and it.reads < math.inf


def causes(spent: Spent) -> list[str]:
    """What makes ranks slow, one line each, the worst first, at most three; nothing if there is nothing to say."""
    it = _Seen(spent)
    named: set[str] = set()
    found: list[tuple[float, str]] = []
    for cause in _CAUSES:
        share = it.share(*cause.parts)
        if named.isdisjoint(cause.parts) and share >= cause.least and cause.holds(it):
            named.update(cause.parts)
            saved = cause.saved(it)
            words = _words(it, cause, share, saved or 0.0)
            found.append((share if saved is None else saved, f"{cause.what}; {cause.helps}".format(**words)))
    return [line for _, line in sorted(found, key=lambda one: -one[0])[:_MOST]]


def _words(it: _Seen, cause: _Cause, share: float, saved: float) -> dict[str, object]:
    spent, busiest = it.spent, it.spent.get("busiest")
    line = spent["lines"].get(cause.parts[0]) if cause.parts else None
    batch = spent["loader"]["batch"] if "loader" in spent else None
    in_steps = it.step and cause.parts and (cause.parts[0] in ("loading", "workers") or cause.parts[0] in it.measured)

    def amount(saved: float) -> str:
        if in_steps and it.step:
            return f"{_time(saved * it.step)} of {_time(it.step)}"
        return f"{saved * 100:.0f} % of the time"

    read, reads = spent.get("read", 0.0), spent.get("reads", 0.0)
    of_sample = f" {size(read / (batch or 1))} {'a sample' if batch else 'a batch'}"
    return {
        "percent": round(share * 100), "of": "each step" if in_steps else "the time",
        "at": f" at {line}" if line else "",
        "saved": amount(saved),
        "tune": " (paceline tune tries it)" if "seconds" in spent else "", "workers": it.workers or 0,
        "more": it.more, "size": of_sample if read >= 1000 else " it", "reads": reads,
        "read": size(read / max(reads, 1)), "could": it.could,
        "fairly": it.threads(it.fair) + ("" if "threads_at" in spent else " for each"),
        "as_could": it.threads(it.could),
        "late": round(100 * spent.get("late", 0.0)), "objects": round(100 * spent.get("objects", 0.0)),
        "objects_at": f" at {spent['lines']['objects']}" if "objects" in spent["lines"] else "",
        "queued": round(it.queued * 100), "rate": size(it.reads) if it.reads < math.inf else "",
        "by_more": amount(1 - it.left), "idle": round(100 - 100 * spent.get("busy", 0.0)),
        "further": 4 * (spent.get("loader", {}).get("prefetch") or 2), "local": size(spent.get("local", 0.0)),
        **(_of_ddp(it) if "ddp" in spent else {}), "collectives": spent.get("collectives", 0.0),
        "sending": size(it.sending), "link": size(spent.get("link", 0.0)), "elsewhere": f"{it.others:.2g}",
        "crowded": round(100 * it.crowded), "swapped": size(spent.get("swapped", 0.0)), "host": _of_host(it),
        "stalled": f", and {spent['stalled'] * 100:.0f} % of the time processes wait" if "stalled" in spent else "",
        "gpu_use": round(100 * spent.get("gpu_use", 0.0)), "gpu_memory": round(100 * spent.get("gpu_memory", 0.0)),
        **{key: spent.get(key, "") for key in ("computing", "ranks", "cores")},
        **({**busiest, "others": round(busiest["others"] * 100)} if busiest else {}),
    }  # fmt: skip


def pace_of(spent: Spent) -> Pace | None:
    """What other nodes are compared with; None if that is not known."""
    if "pace" not in spent:
        return None
    seen, is_named = _of_host(_Seen(spent)), "busiest" in spent
    return {**spent["pace"], "host": spent["host"], "ranks": spent["ranks"], "is_named": is_named, "seen": seen}


def compared(nodes: Sequence[Spent]) -> list[str]:
    """What makes the ranks of one node slower than those of the others, from what the ranks of each have spent."""
    return across([pace for spent in nodes if (pace := pace_of(spent)) is not None])


def _of_host(it: _Seen) -> str:
    """What is seen on the machine that may slow a rank down; else where to look."""
    spent = it.spent
    seen = [
        f"other processes use {it.others:.2g} of {spent.get('cores')} cores" if it.others >= 0.5 else "",
        f"it swaps {size(spent['swapped'])}/s" if spent.get("swapped", 0.0) >= _SWAPS else "",
        f"heat has slowed its cores down {spent['slowed']} times" if spent.get("slowed") else "",
        f"a GPU has {spent['hottest']:.0f} °C" if spent.get("hottest", 0.0) >= _HOT else "",
    ]
    return ", ".join(filter(None, seen)) or "other processes, temperature, swapping, storage, network"


def _of_ddp(it: _Seen) -> dict[str, object]:
    count, enough = it.buckets
    return {"buckets": count, "enough": enough, "bucket": size(it.spent["ddp"]["bytes"] / count)}


def in_words(spent: Spent) -> str:
    """`loading 62 %, backward 20 %, …`: what is at least a hundredth; of a step, as the library has measured it."""
    seconds = dict(spent.get("seconds", {}))
    total = seconds.pop("total", 0.0)
    if not total:
        return ", ".join(_percents(spent["parts"]))
    seconds["other"] = max(0.0, total - sum(seconds.values()))
    parts = {part: seconds[part] / total for part in sorted(seconds, key=lambda it: -seconds[it])}
    return f"{_time(total)} a step: {', '.join(_percents(parts))}"


def _percents(parts: Mapping[str, float]) -> Iterator[str]:
    return (f"{part} {share * 100:.0f} %" for part, share in parts.items() if share >= 0.01)


def _time(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.1 else f"{seconds * 1000:.2g} ms"


def size(count: float) -> str:
    """`3.4 MB`, for a number of bytes."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.2g} {unit}" if count < 100 else f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.2g} GB"
