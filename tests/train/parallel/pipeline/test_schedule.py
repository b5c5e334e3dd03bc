"""The order of passes, the division of blocks, and microbatches."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from paceline.train.parallel.pipeline.batch import split  # noqa: E402
from paceline.train.parallel.pipeline.schedule import Schedule, order  # noqa: E402
from paceline.train.parallel.pipeline.stages import divide  # noqa: E402

pytestmark = pytest.mark.torch


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 6), st.integers(1, 9))
def test_stages_never_wait_for_each_other_in_a_circle_and_keep_few_microbatches(
    schedule: Schedule, stages: int, count: int
) -> None:
    waiting = [list(order(schedule, stage, stages, count)) for stage in range(stages)]
    for stage, passes in enumerate(waiting):
        assert sorted(passes) == sorted(itertools.product(("forward", "backward"), range(count)))
        kept = most = 0
        for kind, _ in passes:
            kept += 1 if kind == "forward" else -1
            most = max(most, kept)
        assert most <= (stages - stage if schedule == "1f1b" else count)
    done: set[tuple[int, str, int]] = set()
    while any(waiting):
        before = len(done)
        for stage, passes in enumerate(waiting):
            while passes:
                kind, number = passes[0]
                if kind == "forward":
                    needs = {(stage - 1, kind, number)} if stage else set()
                else:
                    needs = {(stage, "forward", number)}
                    needs |= {(stage + 1, kind, number)} if stage + 1 < stages else set()
                if not needs <= done:
                    break
                done.add((stage, *passes.pop(0)))
        assert len(done) > before


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.data())
def test_blocks_are_divided_as_equally_as_they_can_be(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    found = divide(sizes, parts)
    assert [number for part in found for number in part] == list(range(len(sizes)))
    assert all(found)

    def cost(ends: tuple[int, ...]) -> int:
        return sum(sum(sizes[a:b]) ** 2 for a, b in itertools.pairwise((0, *ends, len(sizes))))

    best = min(map(cost, itertools.combinations(range(1, len(sizes)), parts - 1)))
    assert cost(tuple(part.stop for part in found[:-1])) == best


@given(st.integers(1, 12), st.integers(1, 12))
def test_microbatches_have_all_samples_in_order_and_are_of_equal_size(size: int, count: int) -> None:
    x, mask, y = torch.randn(size, 3), torch.ones(1, 3), torch.arange(size)
    parts = split(((x, {"mask": mask, "flag": True}), y), count)
    assert len(parts) == min(size, count)
    assert max(part.samples for part in parts) - min(part.samples for part in parts) <= 1
    assert torch.equal(torch.cat([part.given[0][0] for part in parts]), x)
    assert torch.equal(torch.cat([part.targets for part in parts]), y)
    for part in parts:
        assert len(part.given[0][0]) == len(part.targets) == part.samples
        assert part.given[0][1]["flag"] is True
        assert size == 1 or torch.equal(part.given[0][1]["mask"], mask)


@pytest.mark.parametrize("batch", [torch.zeros(4), (torch.zeros(4),), "x", (1, torch.zeros(4))])
def test_what_is_no_batch_is_refused(batch: object) -> None:
    with pytest.raises(TypeError, match=r"a batch is a pair|is called with no tensor"):
        split(batch, 2)
