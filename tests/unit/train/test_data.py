"""The elastic loader: exactly once in committed steps, workers that stay, and clear refusals.

Several ranks are several loaders in one process, driven in lockstep; nothing here needs a process group.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from pollux.errors import InvalidValueError, PolluxError  # noqa: E402
from pollux.testing.examples import examples  # noqa: E402
from pollux.train.data import ElasticLoader  # noqa: E402
from pollux.train.position import StepShape  # noqa: E402

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))  # K, m, s


class Numbers(Dataset):
    """Example i is i. Counts its reads where asked, across processes."""

    def __init__(self, length, reads=None, with_pid=False):
        self.length, self.reads, self.with_pid = length, reads, with_pid

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.reads is not None:
            with self.reads.get_lock():
                self.reads[index] += 1
        return (index, os.getpid()) if self.with_pid else index


class Stream(IterableDataset):
    """Gives ``length`` numbers, other ones in each epoch."""

    def __init__(self, length):
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(self.epoch * 1000, self.epoch * 1000 + self.length))


class SeekableStream(Stream):
    def __iter__(self, start=0):
        for number in range(start, self.length):
            yield start, number  # the place where reading began is part of the example


class Unseeded(Sampler):
    """A sampler that nobody can seed."""

    def __init__(self, length):
        self.length, self.rng = length, random.SystemRandom()

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.rng.sample(range(self.length), self.length))


def shapes(num_replicas, device_batch, accum_steps=0):
    return [
        StepShape(num_replicas=num_replicas, rank=rank, device_batch=device_batch, accum_steps=accum_steps)
        for rank in range(num_replicas)
    ]


def tolist(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def run_step(loaders, iterators, fails=False):
    """One step on all ranks: the global examples in order of position, or None at the end of the epoch."""
    read, num_passes, mean, first = {}, set(), 0.0, True
    while True:
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            assert first and all(batch is None for batch in batches), "ranks disagree where the epoch ends"
            return None
        first = False
        for loader, batch in zip(loaders, batches, strict=True):
            now = loader.current
            num_passes.add(now.step.num_passes)
            mean += now.weight * sum(tolist(batch)) / len(batch) / len(loaders)  # as DDP would average gradients
            assert len(batch) == max(now.num_examples, 1)
            if not now.is_filler:
                read |= dict(zip(now.step.passes[now.index], tolist(batch), strict=True))
        if loaders[0].current.is_last or (fails and len(read) % 2):
            break
    for loader in loaders:
        loader.retry() if fails else loader.commit()
    assert len(num_passes) == 1
    assert fails or mean == pytest.approx(sum(read.values()) / len(read))
    return [read[position] for position in sorted(read)]


def run_epoch(loaders):
    iterators, seen = [iter(loader) for loader in loaders], []
    while (examples := run_step(loaders, iterators)) is not None:
        seen += examples
    return seen


def run_chaos(data, make, num_epochs):
    """Random shapes, failed steps and restores to other numbers of ranks; the committed examples of each epoch."""
    loaders = [make(shape) for shape in shapes(*data.draw(SHAPES))]
    epochs = []
    for epoch in range(num_epochs):
        seen, iterators = [], [iter(loader) for loader in loaders]
        assert loaders[0].epoch == epoch
        while True:
            event = data.draw(st.sampled_from(["step", "step", "fail", "rebatch", "resize"]))
            if event == "rebatch":
                _, device_batch, accum_steps = data.draw(SHAPES)
                for loader, shape in zip(loaders, shapes(len(loaders), device_batch, accum_steps), strict=True):
                    loader.configure(shape)
            elif event == "resize":  # survivors keep their loader, newcomers get the state
                state = json.loads(json.dumps(loaders[0].state_dict()))
                new = shapes(*data.draw(SHAPES))
                for loader, shape in zip(loaders, new, strict=False):
                    loader.configure(shape)
                newcomers = [make(shape) for shape in new[len(loaders) :]]
                for loader in newcomers:
                    loader.load_state_dict(state)
                loaders = loaders[: len(new)] + newcomers
                iterators = iterators[: len(new)] + [iter(loader) for loader in newcomers]
            else:
                examples = run_step(loaders, iterators, fails=event == "fail")
                if examples is None:
                    break
                seen += examples if event == "step" else []
        epochs.append(seen)
    return epochs


@examples(40, deadline=None)
@given(st.data(), st.integers(1, 40), st.booleans())
def test_each_example_is_committed_once_whatever_happens(data, length, shuffle):
    def make(shape):
        return ElasticLoader(Numbers(length), shape, shuffle=shuffle, seed=5)

    expected = make(StepShape(device_batch=3))
    for seen in run_chaos(data, make, 2):
        assert sorted(seen) == list(range(length))
        assert seen == run_epoch([expected]), "the order depends on the replicas"


@examples(25, deadline=None)
@given(st.data(), st.integers(1, 40))
def test_each_example_of_a_stream_is_committed_once_whatever_happens(data, length):
    epochs = run_chaos(data, lambda shape: ElasticLoader(Stream(length), shape), 2)
    assert epochs == [list(range(length)), list(range(1000, 1000 + length))]


@examples(25, deadline=None)
@given(st.data(), st.integers(1, 30))
def test_the_order_of_a_sampler_is_the_same_on_all_ranks(data, length):
    def make(shape):
        return ElasticLoader(Numbers(length), shape, sampler=RandomSampler(Numbers(length)), seed=2)

    for seen in run_chaos(data, make, 2):
        assert sorted(seen) == list(range(length))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_ranks_with_workers_read_every_example_once(num_workers):
    reads = multiprocessing.Array("i", 30)
    loaders = [
        ElasticLoader(Numbers(30, reads), shape, shuffle=True, num_workers=num_workers) for shape in shapes(2, 3, 1)
    ]
    first, second = run_epoch(loaders), run_epoch(loaders)
    assert sorted(first) == sorted(second) == list(range(30)) and first != second
    assert list(reads) == [2] * 30, "something was read twice though nothing changed"
    for loader in loaders:
        loader.close()


def test_changing_the_batch_keeps_the_worker_processes_and_close_ends_them():
    pids, seen = set(), []
    with ElasticLoader(Numbers(120, with_pid=True), StepShape(device_batch=4), num_workers=2) as loader:
        for epoch in range(2):
            for step, (examples, owners) in enumerate(loader):
                pids |= set(owners.tolist())
                seen += examples.tolist()
                if step == 3 and epoch == 0:
                    loader.retry()
                    del seen[-len(examples) :]
                else:
                    loader.commit()
                loader.configure(StepShape(device_batch=3 + step % 5))
        assert len(pids) == 2 and os.getpid() not in pids
        assert seen == list(range(120)) * 2
    assert_gone(pids)


def test_a_stream_keeps_its_worker_processes_through_a_resize():
    loader = ElasticLoader(Stream(50), StepShape(device_batch=4), num_workers=2)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2, 3]
    loader.commit()
    pids = {child.pid for child in multiprocessing.active_children()}
    loader.configure(StepShape(num_replicas=2, rank=1, device_batch=3, accum_steps=1))
    assert [next(batches).tolist() for _ in range(2)] == [[5, 7, 9], [11, 13, 15]]
    loader.retry()
    loader.configure(StepShape(num_replicas=2, rank=1, device_batch=5))
    assert next(batches).tolist() == [5, 7, 9, 11, 13]
    assert {child.pid for child in multiprocessing.active_children()} == pids and len(pids) == 2
    loader.close()
    assert_gone(pids)


def test_a_loader_that_nobody_closes_takes_its_workers_with_it():
    loader = ElasticLoader(Numbers(50), StepShape(device_batch=4), num_workers=2, auto_commit=True)
    next(batches := iter(loader))
    pids = {child.pid for child in multiprocessing.active_children()}
    assert len(pids) == 2
    del loader, batches
    assert_gone(pids)


def assert_gone(pids):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not pids & {child.pid for child in multiprocessing.active_children()}:
            return
        time.sleep(0.02)
    raise AssertionError("worker processes are left over")


def test_reading_ahead_is_bounded():
    reads = multiprocessing.Array("i", 400)
    with ElasticLoader(Numbers(400, reads), StepShape(device_batch=5), num_workers=2, prefetch_factor=3) as loader:
        for _, _ in zip(range(4), loader, strict=False):
            loader.commit()
        time.sleep(0.3)  # time enough to read everything, were it allowed
        assert sum(reads) <= (5 + 2 * 3) * 5


def test_a_failed_read_ends_the_workers_and_can_be_gone_on_from():
    loader = ElasticLoader(Numbers(10), StepShape(device_batch=2), num_workers=1, collate_fn=BreaksOnce())
    seen = []
    with pytest.raises(RuntimeError, match="once"):
        for batch in loader:
            loader.commit()
            seen += batch
    assert seen == [0, 1, 2, 3]
    assert not multiprocessing.active_children()
    loader._source._options["collate_fn"] = list
    assert [x for batch in committing(loader) for x in batch] == [4, 5, 6, 7, 8, 9]
    loader.close()


def test_a_killed_worker_is_an_error_and_not_a_hang():
    loader = ElasticLoader(Numbers(400), StepShape(device_batch=2), num_workers=2)
    with pytest.raises((RuntimeError, OSError)):  # torch raises it in the loop's body, or when a batch is asked for
        for _ in loader:
            loader.commit()
            if loader.position == 20:
                victim = multiprocessing.active_children()[0]
                os.kill(victim.pid, signal.SIGKILL)
                victim.join(5)
    assert 20 <= loader.position < 400
    loader.close()
    expected = list(range(loader.position, 400))
    assert [x for batch in committing(loader) for x in batch.tolist()] == expected
    loader.close()


class BreaksOnce:
    def __call__(self, examples):
        if 4 in examples:
            raise RuntimeError("once")
        return examples


def committing(loader):
    for batch in loader:
        yield batch
        if loader.current.is_last:
            loader.commit()


def test_collate_fn_and_keys_of_any_kind():
    letters = {"a": 1, "b": 2, "c": 3}
    loader = ElasticLoader(letters, StepShape(device_batch=2), sampler=["c", "a", "b"], collate_fn=tuple)
    assert list(committing(loader)) == [(3, 1), (2,)]


def test_a_sampler_may_draw_with_replacement_and_keeps_its_generator():
    own = torch.Generator()
    sampler = WeightedRandomSampler([0.0, 1.0, 0.0, 3.0], num_samples=20, generator=own)
    before = torch.get_rng_state()
    loaders = [ElasticLoader(Numbers(4), shape, sampler=sampler) for shape in shapes(3, 2)]
    seen = run_epoch(loaders)
    assert len(seen) == 20 and set(seen) == {1, 3}
    assert sampler.generator is own
    assert torch.equal(torch.get_rng_state(), before), "the global random state was touched"
    assert len(loaders[0]) == 4


def test_a_sampler_without_generator_follows_rank_0():
    orders = []

    def share(order):  # what a broadcast would do: the first to come is rank 0
        if len(orders) % 2 == 0:
            orders.append(order)
        else:
            orders.append(orders[-1])
        return orders[-1]

    loaders = [ElasticLoader(Numbers(20), shape, sampler=Unseeded(20), share_order=share) for shape in shapes(2, 3)]
    assert run_epoch(loaders) == orders[0] and orders[0] is orders[1]

    alone = ElasticLoader(Numbers(20), shapes(2, 3)[0], sampler=Unseeded(20))
    with pytest.raises(InvalidValueError, match="share_order"):
        next(iter(alone))


def test_an_order_that_cannot_be_drawn_again_travels_with_the_state():
    loader = ElasticLoader(Numbers(20), StepShape(device_batch=3), sampler=Unseeded(20))
    assert loader.state_dict()["order"] is None, "nothing drawn yet, nothing to keep"
    batches = committing(loader)
    seen = [*next(batches).tolist(), *next(batches).tolist()]
    batches.close()
    other = ElasticLoader(Numbers(20), StepShape(device_batch=4), sampler=Unseeded(20))
    other.load_state_dict(loader.state_dict())
    assert other.position == 3
    seen = seen[:3] + [x for batch in committing(other) for x in batch.tolist()]
    assert sorted(seen) == list(range(20))


@examples(25, deadline=None)
@given(st.integers(1, 30), st.integers(1, 4), SHAPES)
def test_a_batch_of_a_batch_sampler_is_the_unit(length, batch_size, shape):
    sampler = BatchSampler(RandomSampler(Numbers(length)), batch_size, drop_last=False)
    loaders = [ElasticLoader(Numbers(length), one, batch_sampler=sampler) for one in shapes(*shape)]
    iterators, seen, weight = [iter(loader) for loader in loaders], [], 0.0
    while (batches := [next(iterator, None) for iterator in iterators])[0] is not None:
        for loader, batch in zip(loaders, batches, strict=True):
            now = loader.current
            weight += now.weight / len(loaders)
            if not now.is_filler:
                assert len(batch) == now.num_examples
                seen.append(batch.tolist())
        if loaders[0].current.is_last:
            assert weight == pytest.approx(1)
            weight = 0.0
            for loader in loaders:
                loader.commit()
    assert sorted(x for batch in seen for x in batch) == list(range(length))
    assert sorted(map(len, seen), reverse=True)[:-1] == [batch_size] * (len(seen) - 1)
    assert loaders[0].position == len(sampler) == len(seen)


def test_a_stream_that_takes_start_is_not_read_from_the_beginning():
    loader = ElasticLoader(SeekableStream(20), StepShape(device_batch=4), collate_fn=list)
    state = loader.state_dict() | {"position": 8}
    loader.load_state_dict(state)
    assert next(committing(loader)) == [(8, 8), (8, 9), (8, 10), (8, 11)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_dealt_out_to_ranks_and_workers(num_workers):
    loaders = [ElasticLoader(Stream(23), shape, num_workers=num_workers, collate_fn=list) for shape in shapes(2, 3)]
    assert run_epoch(loaders) == list(range(23))
    for loader in loaders:
        loader.close()


def test_drop_last_leaves_out_what_fills_no_step():
    loaders = [ElasticLoader(Numbers(23), shape, drop_last=True) for shape in shapes(2, 3)]
    assert run_epoch(loaders) == list(range(18))
    assert len(loaders[0]) == 3
    streams = [ElasticLoader(Stream(23), shape, drop_last=True) for shape in shapes(2, 3)]
    assert run_epoch(streams) == list(range(18))


def test_iterating_goes_on_where_the_commits_ended_and_then_with_the_next_epoch():
    loader = ElasticLoader(Numbers(6), StepShape(device_batch=2))
    for batch in loader:
        if loader.position == 2:
            assert batch.tolist() == [2, 3]
            break
        loader.commit()
    assert [x for batch in committing(loader) for x in batch.tolist()] == [2, 3, 4, 5]
    assert (loader.epoch, loader.position) == (0, 6)

    late = ElasticLoader(Numbers(6), StepShape(device_batch=2))
    late.load_state_dict(loader.state_dict())
    assert list(late) == [], "the restored epoch was done"
    assert len(list(committing(late))) == 3 and late.epoch == 1
    late.set_epoch(4)
    assert (late.epoch, late.position) == (4, 0)


@pytest.mark.parametrize("dataset", [Numbers(6), Stream(6)])
def test_an_epoch_named_again_starts_at_its_beginning(dataset):
    loader = ElasticLoader(dataset, StepShape(device_batch=2))
    next(batches := iter(loader))
    loader.commit()
    loader.set_epoch(1)
    loader.set_epoch(0)
    assert next(batches).tolist() == [0, 1]


def test_steps_must_be_committed_unless_told_otherwise():
    loader = ElasticLoader(Numbers(6), StepShape(device_batch=2, accum_steps=1))
    with pytest.raises(PolluxError, match="no step to commit"):
        loader.commit()
    with pytest.raises(PolluxError, match="no pass"):
        _ = loader.current
    batches = iter(loader)
    next(batches)
    with pytest.raises(PolluxError, match="pass 1 of 2"):
        loader.commit()
    next(batches)
    with pytest.raises(PolluxError, match="neither committed nor retried"):
        next(batches)
    automatic = ElasticLoader(Numbers(6), StepShape(device_batch=2), auto_commit=True)
    assert torch.cat(list(automatic)).tolist() == list(range(6)) and automatic.position == 6


def test_one_iteration_at_a_time():
    loader = ElasticLoader(Numbers(6), StepShape(device_batch=2))
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(PolluxError, match="elsewhere"):
        next(first)


def test_a_state_of_something_else_is_refused_and_changes_nothing():
    loader = ElasticLoader(Numbers(10), StepShape(device_batch=2), shuffle=True, seed=1)
    next(batches := committing(loader))
    next(batches)
    batches.close()
    good = loader.state_dict()
    assert good["position"] == 2
    for other, message in [
        (ElasticLoader(Numbers(9), StepShape(), shuffle=True), "length = 10"),
        (ElasticLoader(Numbers(10), StepShape()), "shuffle = True"),
        (ElasticLoader(Stream(10), StepShape()), "unit = 'example'"),
        (ElasticLoader(Numbers(10), StepShape(), batch_sampler=[[1], [2]]), "unit = 'example'"),
    ]:
        with pytest.raises(InvalidValueError, match=message):
            other.load_state_dict(good)
        assert (other.epoch, other.position) == (0, 0)
    for change, message in [
        ({"version": 99}, "version 99"),
        ({"position": -1}, "position = -1"),
        ({"position": 11}, "beyond the 10"),
        ({"epoch": "x"}, "epoch = 'x'"),
        ({"checksum": 1}, "order of epoch 0"),
        ({"checksum": None}, "order is missing"),
    ]:
        with pytest.raises(InvalidValueError, match=message):
            loader.load_state_dict(good | change)
    with pytest.raises(InvalidValueError, match="seed missing"):
        loader.load_state_dict({key: value for key, value in good.items() if key != "seed"})
    assert loader.state_dict() == good
    foreign = ElasticLoader(Numbers(10), StepShape(), shuffle=True, seed=7)
    foreign.load_state_dict(good)
    assert foreign.state_dict() == good, "the seed is part of the state"


def test_a_stream_that_ends_before_the_saved_position_is_refused():
    loader = ElasticLoader(Stream(5), StepShape())
    loader.load_state_dict(loader.state_dict() | {"position": 9})
    with pytest.raises(InvalidValueError, match="beyond the 5"):
        next(iter(loader))


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": NoLength()}, "no length"),
        ({"dataset": Numbers(0)}, "0 examples"),
        ({"sampler": [1], "batch_sampler": [[1]]}, "both sampler and batch_sampler"),
        ({"sampler": [1], "shuffle": True}, "already gives the order"),
        ({"sampler": []}, "list has length 0"),
        ({"sampler": iter([1, 2])}, "only once"),
        ({"sampler": DistributedSampler(Numbers(4), num_replicas=2, rank=0)}, "divides the data among ranks"),
        ({"batch_sampler": [[1]], "drop_last": True}, "drop_last"),
        ({"dataset": Stream(4), "shuffle": True}, "IterableDataset"),
        ({"dataset": Stream(4), "sampler": [1]}, "IterableDataset"),
        ({"num_workers": -1}, "-1 workers"),
        ({"prefetch_factor": 2}, "needs workers"),
        ({"prefetch_factor": 0, "num_workers": 1}, "at least 1"),
        ({"seed": -1}, "seed -1"),
        ({"drop_last": True, "shape": StepShape(device_batch=5)}, "never fits"),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_the_first_step(options, message):
    with pytest.raises(InvalidValueError, match=message):
        ElasticLoader(**{"dataset": Numbers(4), "shape": StepShape()} | options)


def test_what_only_the_first_epoch_shows_is_refused_then():
    for loader in [
        ElasticLoader(Stream(0), StepShape()),
        ElasticLoader(Numbers(4), StepShape(), batch_sampler=[[1], []]),
    ]:
        with pytest.raises(InvalidValueError, match=r"no examples|empty batch"):
            next(iter(loader))
    loader = ElasticLoader(Numbers(4), StepShape(), drop_last=True, sampler=SequentialSampler(Numbers(4)))
    with pytest.raises(InvalidValueError, match="never fits"):
        loader.configure(StepShape(device_batch=5))
    with pytest.raises(TypeError):
        len(ElasticLoader(Stream(3), StepShape()))
