"""The position of an epoch: divided without a word between ranks, moved by commits alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.errors import InvalidValueError
from pollux.train.position import EpochOrder, Position, Step, StepShape, count_passes, divide

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))  # K, m, s


def ranks(num_replicas, device_batch, accum_steps):
    return [
        StepShape(num_replicas=num_replicas, rank=rank, device_batch=device_batch, accum_steps=accum_steps)
        for rank in range(num_replicas)
    ]


def test_a_full_step_is_dealt_out_in_turn():
    steps = [divide(0, 10, shape) for shape in ranks(2, 2, 1)]
    assert [step.passes for step in steps] == [(range(0, 4, 2), range(4, 8, 2)), (range(1, 5, 2), range(5, 9, 2))]
    assert [step.own_count for step in steps] == [4, 4]
    assert not steps[0].is_short and steps[0].weight(0) == 0.5


def test_the_last_step_is_short_and_uses_as_few_passes_as_it_can():
    steps = [divide(8, 10, shape) for shape in ranks(4, 2, 1)]
    assert [[list(own) for own in step.passes] for step in steps] == [[[8]], [[9]], [[]], [[]]]
    assert [step.weight(0) for step in steps] == [2.0, 2.0, 0.0, 0.0]
    assert all(step.is_short and step.count == 2 for step in steps)
    assert divide(10, 10, StepShape()) is None
    assert divide(8, 10, ranks(4, 2, 1)[0], drop_last=True) is None


@given(SHAPES, st.integers(1, 70), st.integers(0, 69))
def test_every_position_of_a_step_goes_to_one_rank(shape, length, position):
    steps = [divide(position, length, one) for one in ranks(*shape)]
    if position >= length:
        assert steps == [None] * len(steps)
        return
    num_replicas, device_batch, accum_steps = shape
    count = min(num_replicas * device_batch * (accum_steps + 1), length - position)
    assert {step.count for step in steps} == {count}
    assert len({step.num_passes for step in steps}) == 1 and steps[0].num_passes <= accum_steps + 1
    cells = [len(own) for step in steps for own in step.passes]
    assert max(cells) <= device_batch and max(cells) - min(cells) <= 1
    assert sorted(p for step in steps for own in step.passes for p in own) == list(range(position, position + count))
    weights = [step.weight(i) for step in steps for i in range(step.num_passes)]
    assert sum(weights) / num_replicas == pytest.approx(1)


@given(st.data(), st.integers(1, 60), st.booleans(), st.integers(0, 5))
def test_each_example_of_an_epoch_is_committed_once_whatever_happens(data, length, shuffle, seed):
    """Any shapes, steps that fail, restores onto other ranks: the committed examples are the epoch, in its order."""
    position = Position()
    for epoch in range(2):
        position.set_epoch(epoch)
        expected = EpochOrder(length, seed=seed, shuffle=shuffle).indices(epoch).tolist()
        committed = []
        while True:
            order = EpochOrder(length, seed=seed, shuffle=shuffle).indices(epoch)  # as a newcomer would draw it
            steps = [position.take(length, shape) for shape in ranks(*data.draw(SHAPES))]
            if steps[0] is None:
                break
            if data.draw(st.booleans(), label="fails"):
                continue
            read = sorted(p for step in steps for own in step.passes for p in own)
            committed += [int(order[p]) for p in read]
            position.commit(steps[0].count)
            if data.draw(st.booleans(), label="restored elsewhere"):
                position = Position(epoch=position.epoch, consumed=position.consumed)
        assert committed == expected
        assert sorted(committed) == list(range(length))


@given(SHAPES, st.integers(1, 70), st.booleans())
def test_count_passes_agrees_with_walking_through(shape, length, drop_last):
    one, walked, position = ranks(*shape)[0], 0, 0
    while (step := divide(position, length, one, drop_last=drop_last)) is not None:
        walked, position = walked + step.num_passes, position + step.count
    assert count_passes(length, one, drop_last=drop_last) == walked


def test_orders_differ_by_seed_and_epoch_and_never_change():
    order = EpochOrder(8, seed=3)
    first, second = order.indices(0), order.indices(1)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, EpochOrder(8, seed=4).indices(0))
    assert np.array_equal(first, order.indices(0))
    assert first.tolist() == GOLDEN, "checkpoints name positions in this order: it may never change"
    assert EpochOrder(4, shuffle=False).indices(7).tolist() == [0, 1, 2, 3]


GOLDEN = [1, 0, 2, 7, 5, 3, 6, 4]


def test_only_a_commit_moves_the_position():
    position = Position()
    shape = StepShape(device_batch=4)
    assert position.take(10, shape) == position.take(10, shape)
    position.commit(4)
    assert position.consumed == 4
    position.set_epoch(0)
    assert position.consumed == 4
    position.set_epoch(1)
    assert (position.epoch, position.consumed) == (1, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepShape(num_replicas=0), "0 replicas"),
        (lambda: StepShape(num_replicas=2, rank=2), "rank 2 of 2"),
        (lambda: StepShape(rank=-1), "rank -1"),
        (lambda: StepShape(device_batch=0), "device batch size 0"),
        (lambda: StepShape(accum_steps=-1), "-1 accumulation"),
        (lambda: StepShape(split_every=-1), "split every -1 steps"),
        (lambda: EpochOrder(0), "0 examples"),
        (lambda: EpochOrder(3, seed=-1), "seed -1"),
        (lambda: Position(epoch=-1), "epoch -1"),
        (lambda: Position().commit(0), "0 examples committed"),
        (lambda: Position().set_epoch(-2), "epoch -2"),
        (lambda: Position(consumed=11).take(10, StepShape()), "beyond the 10"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(InvalidValueError, match=message):
        make()


# --- one replica, one pass: some steps are split to be measured ----------------------------------------------------

SPLIT_SHAPES = st.builds(
    StepShape,
    device_batch=st.integers(1, 9),
    limit=st.none() | st.integers(1, 9),
    split_every=st.integers(1, 6),
)


def walk(length: int, shape: StepShape, *, epoch: int = 0, start: int = 0, drop_last: bool = False) -> list[Step]:
    steps, position = [], start
    while (step := divide(position, length, shape, drop_last=drop_last, epoch=epoch)) is not None:
        steps.append(step)
        position += step.count
    return steps


@given(SPLIT_SHAPES, st.integers(1, 70), st.booleans(), st.integers(0, 9))
def test_split_steps_have_every_example_once_in_two_nearly_equal_passes(shape, length, drop_last, epoch):
    steps = walk(length, shape, epoch=epoch, drop_last=drop_last)
    covered = [place for step in steps for own in step.passes for place in own]
    assert covered == list(range(length - length % shape.total if drop_last else length))
    for step in steps:
        assert step.num_passes == (2 if step.is_split else 1)
        if step.is_split:
            assert not step.is_short and step.sizes == [len(own) for own in step.passes]
            assert step.sizes[0] - step.sizes[1] in (0, 1) and step.sizes[1] >= 1
            assert sum(step.weight(index) for index in range(2)) == pytest.approx(1)
    assert count_passes(length, shape, drop_last=drop_last, epoch=epoch) == sum(step.num_passes for step in steps)


@given(SPLIT_SHAPES, st.integers(1, 60))
def test_every_nth_step_is_split_however_short_an_epoch_is(shape, length):
    """An epoch of one step would otherwise be split every time, and never be timed."""
    num_epochs = 4 * shape.split_every
    steps = [step for epoch in range(num_epochs) for step in walk(length, shape, epoch=epoch) if not step.is_short]
    num_split = sum(step.is_split for step in steps)
    expected = len(steps) / shape.split_every if shape.total >= 2 else 0
    assert num_split == expected


@given(st.sampled_from([2, 8, 32, 128]), st.integers(1, 200))
def test_no_run_of_short_epochs_is_without_a_split_step(split_every, num_steps):
    """The noise scale of a job with 48 steps an epoch would otherwise not be measured for its first 80 epochs."""
    shape = StepShape(device_batch=2, split_every=split_every)
    num_epochs = 8 * split_every // num_steps + 8
    steps = [step for epoch in range(num_epochs) for step in walk(2 * num_steps, shape, epoch=epoch)]
    places = [index for index, step in enumerate(steps) if step.is_split]
    gaps = [later - earlier for earlier, later in itertools.pairwise([-1, *places])]
    assert max(gaps) <= 4 * split_every


@given(SPLIT_SHAPES, st.integers(1, 40), st.data())
def test_workers_that_read_ahead_agree_with_the_loader(shape, length, data):
    """Restarted anywhere, as after another batch: the same steps follow."""
    epoch = data.draw(st.integers(0, 5))
    whole = walk(length, shape, epoch=epoch)
    index = data.draw(st.integers(0, len(whole) - 1))
    assert walk(length, shape, epoch=epoch, start=whole[index].start) == whole[index:]


@given(SHAPES, st.integers(1, 70), st.integers(1, 5))
def test_steps_of_several_gradients_are_never_split(shape, length, split_every):
    num_replicas, _, accum_steps = shape
    if num_replicas * (accum_steps + 1) == 1:
        return
    for one in ranks(*shape):
        asked = replace(one, split_every=split_every)
        assert [s.passes for s in walk(length, asked)] == [s.passes for s in walk(length, one)]
        assert not any(step.is_split for step in walk(length, asked))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_serves_split_steps_as_its_workers_have_read_them(num_workers):
    torch = pytest.importorskip("torch")
    from pollux.train.data import ElasticLoader

    shape = StepShape(device_batch=7, split_every=3)
    with ElasticLoader(range(40), shape, shuffle=True, num_workers=num_workers, auto_commit=True) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            num_passes, sizes, seen = len(loader), [], []
            for batch in loader:
                sizes.append((loader.step.is_split, len(batch)))
                seen += torch.as_tensor(batch).tolist()
            assert sorted(seen) == list(range(40)) and num_passes == len(sizes)
            expected = []
            for step in walk(40, shape, epoch=epoch):
                expected += [(step.is_split, len(own)) for own in step.passes]
            assert sizes == expected


def test_a_batch_of_one_cannot_be_split():
    assert not any(step.is_split for step in walk(9, StepShape(device_batch=1, split_every=1)))
