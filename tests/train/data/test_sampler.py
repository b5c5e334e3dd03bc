"""Each sample of an epoch exactly once, whatever the number of ranks; orders that are random and repeatable."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

from paceline.train.data.permutation import LARGEST_SIZE, Permutation
from paceline.train.data.sampler import ElasticSampler, ShardedSampler, UserBatchSampler, UserSampler, share

pytestmark = pytest.mark.torch

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 10, 64, 97, 100, 101, 1000, 1024, 4099]


def chi_square_limit(freedom: int) -> float:
    """About the 0.999999 quantile of chi-square (Wilson and Hilferty); seeds are fixed, so tests do not flake."""
    return freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3


def permuted(size: int, seed: int, epoch: int = 0, start: int = 0, stop: int | None = None) -> list[int]:
    """The order of an epoch from a position to another one."""
    return Permutation(size, seed, epoch).at(torch.arange(start, size if stop is None else stop)).tolist()


class TestPermutation:
    @pytest.mark.parametrize("size", [*SIZES, 1_100_003])  # the last is too large for tables
    def test_has_every_index_once(self, size: int) -> None:
        for epoch in range(5 if size < 5000 else 1):
            assert sorted(permuted(size, 0, epoch)) == list(range(size))

    def test_is_the_same_everywhere(self) -> None:
        # Written down once: another platform or version that finds something else breaks resuming there.
        assert permuted(10, 0) == [1, 4, 2, 8, 5, 0, 9, 3, 7, 6]
        assert permuted(10**8, 42, 7, 10**8 - 4) == [32473583, 72330378, 28198295, 95652013]
        assert permuted(LARGEST_SIZE, 1, 2, LARGEST_SIZE - 2) == [4448170212387717509, 3720229652558674611]

    @pytest.mark.parametrize("size", [2, 3, 5])
    def test_permutations_of_few_are_uniform(self, size: int) -> None:
        draws = 2000
        counts = collections.Counter(tuple(permuted(size, seed)) for seed in range(draws))
        expected = draws / math.factorial(size)
        chi_square = sum((counts[p] - expected) ** 2 / expected for p in itertools.permutations(range(size)))
        assert chi_square < chi_square_limit(math.factorial(size) - 1)

    @pytest.mark.parametrize("size", [7, 10, 16])
    @pytest.mark.parametrize("vary", ["seed", "epoch"])
    def test_every_index_is_as_often_at_every_position(self, size: int, vary: str) -> None:
        draws = 500
        counts = torch.zeros(size, size)
        for i in range(draws):
            order = permuted(size, i, 0) if vary == "seed" else permuted(size, 0, i)
            counts[torch.arange(size), torch.tensor(order)] += 1
        chi_square = ((counts - draws / size) ** 2 / (draws / size)).sum()
        assert chi_square < chi_square_limit((size - 1) ** 2)

    @pytest.mark.parametrize("size", [1000, 1024, 99991])
    def test_neighbours_and_epochs_are_unrelated(self, size: int) -> None:
        def correlation(a: Any, b: Any) -> float:
            return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])

        here, next_epoch, next_seed = (
            torch.tensor(permuted(size, seed, epoch)) for seed, epoch in ((5, 0), (5, 1), (6, 0))
        )
        limit = 5 / math.sqrt(size)
        assert abs(correlation(here, torch.arange(size))) < limit
        assert abs(correlation(here[1:], here[:-1])) < limit
        assert abs(correlation(here, next_epoch)) < limit
        assert abs(correlation(here, next_seed)) < limit
        # The differences of neighbours take many values: the order is no stride through the data set.
        assert len(((here[1:] - here[:-1]) % size).unique()) > size / 2

    @pytest.mark.parametrize("size", [0, -1, LARGEST_SIZE + 1])
    def test_refuses_sizes_out_of_range(self, size: int) -> None:
        with pytest.raises(ValueError, match="1 to 2\\*\\*62"):
            Permutation(size, 0)


def steps(samplers: list[ShardedSampler]) -> Iterator[list[Any]]:
    """The shards of all ranks, step by step, to the end of the epoch; they agree on where they are."""
    for shards in zip(*samplers, strict=True):
        assert len({(shard.epoch, shard.end, shard.total) for shard in shards}) == 1
        assert sum(shard.samples for shard in shards) == shards[0].total
        yield list(shards)


def used(shards: list[Any]) -> list[Any]:
    """The samples that count, in the order of the epoch."""
    return [index for shard in shards if shard.samples for index in shard.indices]


def world(make: Any, world_size: int, state: dict[str, Any] | None = None, **options: Any) -> list[ShardedSampler]:
    """The samplers of all ranks, gone on to `state`."""
    samplers = [make(rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    for sampler in samplers:
        if state:
            sampler.load_state_dict(state)
    return samplers


def train(make: Any, attempts: list[tuple[int, int, int]], *, epochs: int) -> dict[int, list[Any]]:
    """The samples that each epoch has used, when every attempt is killed after a number of steps.

    Attempts are (world size, global batch size, steps); a last one, never killed, comes after them. The step that an
    attempt takes when it is killed does not count, for the next attempt goes on from before it.
    """
    seen: dict[int, list[Any]] = {epoch: [] for epoch in range(epochs)}
    state: dict[str, Any] | None = None
    for world_size, global_batch_size, last in [*attempts, (3, 7, 10**6)]:
        samplers = world(make, world_size, state, global_batch_size=global_batch_size)
        taken = 0
        while taken <= last and samplers[0].epoch < epochs:
            torch.rand(3)  # the global generator is anywhere
            for shards in steps(samplers):
                taken += 1
                if taken > last:
                    break
                seen[shards[0].epoch] += used(shards)
                state = samplers[0].state_dict()
            else:
                state = samplers[0].state_dict()
    return seen


@given(
    st.integers(0, 10**6),
    st.integers(1, 1000),
    st.integers(1, 50),
    st.data(),
)
def test_shares_are_even_and_complete(start: int, size: int, world_size: int, data: st.DataObject) -> None:
    shares = [share(start, start + size, rank, world_size) for rank in range(world_size)]
    own = [(low, high) for low, high, samples in shares if samples]
    assert [i for low, high in own for i in range(low, high)] == list(range(start, start + size))
    counts = [samples for _, _, samples in shares]
    assert max(counts) - min(counts) <= 1
    assert all((low, high) == (start, start + 1) for low, high, samples in shares if not samples)


class TestElasticSampler:
    @settings(deadline=None)
    @given(
        st.integers(1, 200),
        st.booleans(),
        st.integers(0, 2**70),
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 60), st.integers(0, 12)), min_size=1, max_size=12),
    )
    def test_uses_every_sample_of_every_epoch_once(
        self, size: int, shuffle: bool, seed: int, attempts: list[tuple[int, int, int]]
    ) -> None:
        def make(global_batch_size: int, **options: Any) -> ShardedSampler:
            return ElasticSampler(size, global_batch_size=global_batch_size, shuffle=shuffle, seed=seed, **options)

        epochs = train(make, attempts, epochs=3)
        for order in epochs.values():
            assert sorted(order) == list(range(size))
        for epoch, order in epochs.items():
            assert order == (permuted(size, seed, epoch) if shuffle else list(range(size)))

    def test_the_next_iteration_is_the_next_epoch(self) -> None:
        sampler = ElasticSampler(10, global_batch_size=4)
        first, second = ([shard.indices for shard in sampler] for _ in range(2))
        assert first != second
        assert sorted(itertools.chain(*first)) == sorted(itertools.chain(*second)) == list(range(10))
        assert (sampler.epoch, sampler.position) == (2, 0)

    def test_a_finished_epoch_is_kept_apart_from_the_next(self) -> None:
        # What comes after the last batch, such as validation, is still to be done.
        sampler = ElasticSampler(10, global_batch_size=5)
        shards = iter(sampler)
        next(shards), next(shards)
        resumed = ElasticSampler(10, global_batch_size=5)
        resumed.load_state_dict(sampler.state_dict())
        assert (resumed.epoch, resumed.position) == (0, 10)
        assert list(resumed) == []
        assert (resumed.epoch, resumed.position) == (1, 0)

    @pytest.mark.parametrize(
        ("size", "drop_last", "length"), [(10, False, 3), (10, True, 2), (8, True, 2), (3, True, 0)]
    )
    def test_length_is_the_number_of_steps(self, size: int, drop_last: bool, length: int) -> None:
        sampler = ElasticSampler(size, global_batch_size=4, drop_last=drop_last, world_size=2)
        assert len(sampler) == len(list(sampler)) == length

    def test_looking_ahead_changes_nothing(self) -> None:
        # More steps than are mapped to indices in one call.
        ranks = world(lambda **kw: ElasticSampler(20_000, **kw), 3, global_batch_size=7, seed=1)
        assert list(itertools.chain(*map(used, steps(ranks)))) == permuted(20_000, 1)

    def test_reading_ahead_does_not_move_the_position(self) -> None:
        sampler = ElasticSampler(10, global_batch_size=4)
        assert len(list(sampler.ahead())) == 3
        assert (sampler.epoch, sampler.position) == (0, 0)

    def test_resumes_in_a_huge_epoch(self) -> None:
        sampler = ElasticSampler(10**8, global_batch_size=64, seed=3)
        state = {**sampler.state_dict(), "epoch": 2, "position": 10**7}
        sampler.load_state_dict(state)
        assert next(iter(sampler)).indices == permuted(10**8, 3, 2, 10**7, 10**7 + 64)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"size": 11}, "dataset_size=10, now it is 11"),
            ({"seed": 1}, "seed=0, now it is 1"),
            ({"shuffle": False}, "order='shuffled', now it is 'sequential'"),
        ],
    )
    def test_refuses_a_checkpoint_of_another_order(self, changed: dict[str, Any], message: str) -> None:
        options = {"size": 10, "global_batch_size": 4, "seed": 0}
        state = ElasticSampler(**options).state_dict()
        with pytest.raises(ValueError, match=message):
            ElasticSampler(**{**options, **changed}).load_state_dict(state)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"size": 0}, "empty"),
            ({"global_batch_size": 0}, "global_batch_size must be a whole number of at least 1, not 0"),
            ({"global_batch_size": 2.5}, "not 2.5"),
            ({"rank": 2, "world_size": 2}, "rank 2 is not in a world of 2"),
            ({"num_samples": 3}, "pass weights"),
            ({"weights": [1.0] * 9}, r"10 in all; their shape is \(9,\)"),
            ({"weights": [1.0] * 9 + [-1.0]}, "not negative"),
            ({"weights": [1.0] * 9 + [math.nan]}, "finite"),
            ({"weights": [0.0] * 10}, "only 0 samples have a positive weight"),
            ({"weights": [1.0] * 9 + [0.0], "replacement": False}, "only 9 samples .* 10 are needed"),
        ],
    )
    def test_refuses_what_makes_no_sense(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ElasticSampler(**{"size": 10, "global_batch_size": 4, **options})


class TestWeights:
    WEIGHTS = (0.0, 1.0, 2.0, 3.0, 0.0, 4.0)

    def draws(self, sampler: ElasticSampler) -> list[int]:
        return [index for shard in sampler for index in shard.indices]

    def test_draws_follow_the_weights(self) -> None:
        count = 20_000
        sampler = ElasticSampler(6, global_batch_size=100, weights=self.WEIGHTS, num_samples=count, seed=1)
        seen = collections.Counter(self.draws(sampler))
        expected = {i: count * w / 10 for i, w in enumerate(self.WEIGHTS) if w}
        assert set(seen) == set(expected)
        assert sum((seen[i] - e) ** 2 / e for i, e in expected.items()) < chi_square_limit(3)

    def test_without_replacement_the_heaviest_tend_to_come_first(self) -> None:
        count = 1000
        first: collections.Counter[int] = collections.Counter()
        sampler = ElasticSampler(6, global_batch_size=4, weights=self.WEIGHTS, replacement=False, num_samples=4)
        for _ in range(count):
            drawn = self.draws(sampler)
            assert sorted(drawn) == [1, 2, 3, 5]
            first[drawn[0]] += 1
        expected = {i: count * w / 10 for i, w in enumerate(self.WEIGHTS) if w}
        assert sum((first[i] - e) ** 2 / e for i, e in expected.items()) < chi_square_limit(3)

    @pytest.mark.parametrize("replacement", [True, False])
    def test_any_number_of_ranks_finds_the_same_draws(self, replacement: bool) -> None:
        options = {"global_batch_size": 7, "weights": torch.rand(50) + 0.1, "replacement": replacement, "seed": 5}
        one = ElasticSampler(50, **options)
        epochs = [self.draws(one), self.draws(one)]
        assert epochs[0] != epochs[1]
        ranks = world(lambda **kw: ElasticSampler(50, **kw), 3, **options)
        for epoch in epochs:
            assert list(itertools.chain(*map(used, steps(ranks)))) == epoch


class TestUserSampler:
    @settings(deadline=None, max_examples=40)
    @given(
        st.integers(1, 60),
        st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(0, 6)), max_size=8),
        st.sampled_from(["", "dealt", "divided"]),
    )
    def test_uses_every_index_once(self, size: int, attempts: list[tuple[int, int, int]], batches: str) -> None:
        """RandomSampler draws from the global generator, and BatchSampler gets its order from there."""
        random_order = RandomSampler(range(size))

        def make(global_batch_size: int, **options: Any) -> ShardedSampler:
            if batches:
                options["split"] = batches == "divided"
                return UserBatchSampler(BatchSampler(random_order, 4, drop_last=False), size=size, **options)
            return UserSampler(random_order, size=size, global_batch_size=global_batch_size, **options)

        epochs = train(make, attempts, epochs=2)
        assert [sorted(epochs[e]) for e in (0, 1)] == [list(range(size))] * 2
        assert size < 10 or epochs[0] != epochs[1]

    def test_leaves_the_global_generators_alone(self) -> None:
        torch.manual_seed(0)
        before = torch.default_generator.get_state()
        list(UserSampler(RandomSampler(range(9)), size=9, global_batch_size=2))
        assert torch.equal(before, torch.default_generator.get_state())

    def test_its_own_generator_is_seeded_for_each_epoch(self) -> None:
        def sampler() -> UserSampler:
            order = RandomSampler(range(50), generator=torch.Generator().manual_seed(9))
            return UserSampler(order, size=50, global_batch_size=50)

        whole = sampler()
        epochs = [next(iter(whole)).indices]
        list(whole)
        epochs.append(next(iter(whole)).indices)
        resumed = sampler()
        resumed.load_state_dict({**resumed.state_dict(), "epoch": 1})
        assert next(iter(resumed)).indices == epochs[1] != epochs[0]

    def test_set_epoch_is_called(self) -> None:
        class Rotated:
            epoch = -1

            def set_epoch(self, epoch: int) -> None:
                self.epoch = epoch

            def __iter__(self) -> Iterator[int]:
                return ((i + self.epoch) % 4 for i in range(4))

        sampler = UserSampler(Rotated(), size=4, global_batch_size=4)
        assert [shard.indices for _ in range(3) for shard in sampler] == [[0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1]]
        with pytest.raises(TypeError, match="the sampler has no length"):
            len(sampler)

    def test_batches_of_any_length_are_dealt_whole(self) -> None:
        batches = [["a"], ["b", "c", "d"], ["e", "f"]]
        ranks = world(lambda **kw: UserBatchSampler(batches, size=None, split=False, **kw), 2)
        assert [len(rank) for rank in ranks] == [2, 2]
        first, last = steps(ranks)
        assert [(shard.indices, shard.samples, shard.total) for shard in first] == [
            (["a"], 1, 4),
            (["b", "c", "d"], 3, 4),
        ]
        assert [(shard.indices, shard.samples, shard.total) for shard in last] == [
            (["e", "f"], 2, 2),
            (["e", "f"], 0, 2),
        ]

    def test_batches_of_any_length_are_divided(self) -> None:
        batches = [["a"], ["b", "c", "d"], ["e", "f"]]
        ranks = world(lambda **kw: UserBatchSampler(batches, size=None, **kw), 2)
        assert [[(s.indices, s.samples, s.total, s.end) for s in rank] for rank in steps(ranks)] == [
            [(["a"], 1, 1, 1), (["a"], 0, 1, 1)],
            [(["b", "c"], 2, 3, 2), (["d"], 1, 3, 2)],
            [(["e"], 1, 2, 3), (["f"], 1, 2, 3)],
        ]

    def test_drop_last(self) -> None:
        sampler = UserSampler([3, 1, 2, 0, 4], size=5, global_batch_size=2, drop_last=True)
        assert [shard.indices for shard in sampler] == [[3, 1], [2, 0]]
        assert len(sampler) == 2

    def test_refuses_what_cannot_work(self) -> None:
        with pytest.raises(TypeError, match="only once"):
            UserSampler(iter([1, 2]), size=2, global_batch_size=1)
        with pytest.raises(ValueError, match="DistributedSampler shards over ranks"):
            UserSampler(DistributedSampler(range(4), num_replicas=2, rank=0), size=4, global_batch_size=1)
