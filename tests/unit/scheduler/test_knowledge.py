"""What is thought of a job on types where it has run little or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pollux.model.profile import Configuration, Timing
from pollux.model.throughput import iteration_s
from pollux.model.transfer import TypeRatios
from pollux.policy import make_policy
from pollux.scheduler.knowledge import Knowledge, ProfileMemory, learn_all
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.loop import Scheduler, SchedulerConfig
from pollux.scheduler.ports import JobReport, MemoryStore, TuneJob
from pollux.scheduler.record import JobRecord
from pollux.server.storage.records import decode_knowledge, encode_knowledge
from pollux.testing.snapshots import LIMITS
from pollux.types import Allocation, JobSpec, Node, ThroughputParams
from tests.fakes import HandClock, SlowEngine

SLOW = ThroughputParams(0.02, 0.001, 0.2, 0.01, 0.05, 0.004, 1.6)
TYPES = ("slow", "fast")
NODES = tuple(Node(name=f"{kind} node", num_slots=4, accelerator=kind) for kind in TYPES)


def timings(factor: float, replicas: Sequence[int] = (1, 2, 4)) -> list[tuple[Configuration, Timing]]:
    """Steps take ``factor`` times as long as they do with SLOW."""
    return [
        (
            Configuration(1, count, batch),
            Timing(
                (SLOW.alpha_g + SLOW.beta_g * batch) * factor, float(iteration_s(SLOW, 1, count, batch)) * factor, 10
            ),
        )
        for count in replicas
        for batch in (32, 64)
    ]


def measure(known: Knowledge, kind: str, factor: float, replicas: Sequence[int] = (1, 2, 4)) -> None:
    for configuration, timing in timings(factor, replicas):
        known.observe(kind, configuration, timing)


def knowledge(label: str, **factors: float) -> Knowledge:
    known = Knowledge(label)
    for kind, factor in factors.items():
        measure(known, kind, factor)
    return known


def test_what_one_job_showed_of_two_types_serves_another():
    both, one, ratios = knowledge("both", slow=1.0, fast=0.25), knowledge("one", slow=2.0), TypeRatios()
    assert learn_all([both, one], ratios, TYPES[:1]) == [both, one]  # as they were measured
    assert "fast" not in one.params
    assert learn_all([both, one], ratios, TYPES) == [one]
    assert one.params["fast"].beta_g == pytest.approx(one.params["slow"].beta_g / 4, rel=0.1)
    assert set(one.guesses) == {"fast"} and not both.guesses
    assert learn_all([both, one], ratios, TYPES) == []  # nothing new
    assert learn_all([one], ratios, TYPES) == []  # nor by the end of the job that showed it
    assert set(one.guesses) == {"fast"}


def test_nothing_is_guessed_where_nobody_asks_for_it():
    both, one, ratios = knowledge("both", slow=1.0, fast=0.25), knowledge("one", slow=2.0), TypeRatios()
    assert learn_all([both, one, one], ratios, None) == [both, one]
    assert learn_all([both, one], ratios, None) == []
    assert not one.guesses


@pytest.mark.parametrize("types", [TYPES, TYPES[1:]])
def test_a_measurement_takes_the_place_of_a_guess(types: Sequence[str]):
    """Also if all nodes of the other type have left meanwhile."""
    both, one, ratios = knowledge("both", slow=1.0, fast=0.25), knowledge("one", slow=2.0), TypeRatios()
    learn_all([both, one], ratios, TYPES)
    measure(one, "fast", 1.0)
    assert learn_all([both, one], ratios, types) == [one]
    assert not one.guesses
    assert one.params["fast"].beta_g == pytest.approx(SLOW.beta_g, rel=0.1)


def test_a_fit_is_not_hidden_by_a_guess_that_was_made_before():
    both, one = knowledge("both", slow=1.0, fast=0.25), knowledge("one", slow=2.0)
    learn_all([both, one], TypeRatios(), TYPES)
    measure(one, "fast", 1.0)
    one.refit()
    assert one.params["fast"] == one.fits["fast"].params


def test_what_was_measured_on_one_replica_is_completed_even_if_the_other_type_is_gone():
    job, ratios = knowledge("job", slow=1.0), TypeRatios()
    measure(job, "fast", 0.25, replicas=(1,))
    learn_all([job], ratios, TYPES)
    known = dict(job.guesses)
    assert set(known) == {"fast"}
    assert known["fast"].alpha_r == pytest.approx(SLOW.alpha_r / 4, rel=0.5)
    assert learn_all([job], ratios, TYPES[1:]) == []
    assert job.guesses == known
    assert learn_all([job], ratios, TYPES[:1]) == [job]  # nobody asks about a type without nodes
    assert not job.guesses


def make_scheduler(**config: bool) -> tuple[Scheduler, SlowEngine, HandClock, MemoryStore]:
    clock, engine, store = HandClock(), SlowEngine(NODES), MemoryStore()
    scheduler = Scheduler(
        policy=make_policy("pollux"),
        engine=engine,
        store=store,
        clock=clock,
        config=SchedulerConfig(**config),  # type: ignore[arg-type]
    )
    return scheduler, engine, clock, store


def advance(scheduler: Scheduler, engine: SlowEngine, clock: HandClock) -> None:
    clock.time += 60
    for _ in range(3):
        scheduler.tick()
        engine.finish()
    scheduler.tick()


def report(job: str, kind: str, factor: float) -> JobReport:
    return JobReport(job=job, accelerator=kind, timings=timings(factor), noise_scale=500.0)


def test_what_a_job_showed_of_types_outlives_it():
    scheduler, engine, clock, store = make_scheduler()
    for name in ("both", "one"):
        scheduler.submit(JobSpec(name=name, batch=LIMITS))
    advance(scheduler, engine, clock)
    engine.events += [report("both", "slow", 1.0), report("both", "fast", 0.25), report("one", "slow", 2.0)]
    advance(scheduler, engine, clock)
    known = store.jobs["one"].knowledge.params
    assert set(known) == set(TYPES)
    tuned = [command for command in engine.commands if isinstance(command, TuneJob)]
    engine.end("both", clock.time)
    advance(scheduler, engine, clock)
    assert store.jobs["one"].knowledge.params == known
    assert [command for command in engine.commands if isinstance(command, TuneJob)] == tuned


def test_what_a_job_showed_of_types_outlives_the_scheduler():
    scheduler, engine, clock, store = make_scheduler()
    scheduler.restore([], [knowledge("job over", slow=1.0, fast=0.25), knowledge("job other", slow=1.0)])
    scheduler.submit(JobSpec(name="one", batch=LIMITS))
    advance(scheduler, engine, clock)
    engine.events.append(report("one", "slow", 2.0))
    advance(scheduler, engine, clock)
    assert store.jobs["one"].knowledge.params["fast"].beta_g == pytest.approx(SLOW.beta_g / 2, rel=0.1)


def test_jobs_are_told_again_what_is_known_after_a_restart():
    scheduler, engine, clock, _ = make_scheduler(remembers_profiles=True)
    learnt = knowledge("application app", slow=1.0, fast=0.25)
    held = Allocation.of(("slow node", 1))
    record = JobRecord(
        spec=JobSpec(name="one", batch=LIMITS, application="app"),
        sequence=0,
        knowledge=learnt,
        state=JobState.RUNNING,
        allocation=held,
        generation=1,
    )
    engine.held["one"] = [held]
    scheduler.restore([record], [learnt])
    advance(scheduler, engine, clock)
    told = [command for command in engine.commands if isinstance(command, TuneJob)]
    assert [set(command.params) for command in told] == [set(TYPES)]


def test_a_job_that_becomes_slower_is_fitted_again_and_told():
    scheduler, engine, clock, store = make_scheduler()
    scheduler.submit(JobSpec(name="one", batch=LIMITS))
    advance(scheduler, engine, clock)

    def tell(factors: Sequence[float]) -> int:
        """How often the job is told a model."""
        before = len([command for command in engine.commands if isinstance(command, TuneJob)])
        for factor in factors:
            engine.events.append(report("one", "slow", factor))
            advance(scheduler, engine, clock)
        return len([command for command in engine.commands if isinstance(command, TuneJob)]) - before

    assert tell([1.0]) == 1
    known = store.jobs["one"].knowledge.params["slow"]
    assert tell([0.97, 1.03] * 10) == 0  # noise
    assert store.jobs["one"].knowledge.params["slow"] == known
    assert 1 <= tell([1.3] * 10) <= 2
    found = store.jobs["one"].knowledge.params["slow"]
    assert found.beta_g == pytest.approx(1.3 * known.beta_g, rel=0.05)


def test_a_job_that_becomes_slower_asks_for_a_round():
    scheduler, engine, clock, store = make_scheduler(decides_on_events=True, decides_on_models=True)
    scheduler.submit(JobSpec(name="one", batch=LIMITS))
    advance(scheduler, engine, clock)
    for factors, num_rounds in (([1.0], 1), ([0.97, 1.03] * 6, 0), ([1.3] * 10, 1)):
        before = len(store.rounds)
        for factor in factors:
            engine.events.append(report("one", "slow", factor))
            scheduler.tick()
            scheduler.tick()
        assert [entry.trigger for entry in store.rounds[before:]] == ["model"] * num_rounds


def test_a_job_that_lies_about_its_speed_changes_nothing_for_another_users_jobs_of_its_application():
    """An attack: mallory's job of ada's application says that more than one replica is useless."""
    replicas = {}
    for lies in (False, True):
        scheduler, engine, clock, store = make_scheduler(remembers_profiles=True)
        scheduler.submit(JobSpec(name="spoiler", owner="mallory", batch=LIMITS, application="resnet"))
        advance(scheduler, engine, clock)
        factors = {1: 1.0, 2: 30.0, 4: 90.0} if lies else dict.fromkeys((1, 2, 4), 1.0)
        told = [one for count, factor in factors.items() for one in timings(factor, [count])]
        engine.events.append(JobReport(job="spoiler", accelerator="slow", timings=told, noise_scale=500.0))
        advance(scheduler, engine, clock)
        engine.end("spoiler", clock.time)
        scheduler.submit(JobSpec(name="honest", owner="ada", batch=LIMITS, application="resnet"))
        assert store.jobs["honest"].knowledge.params == {}
        advance(scheduler, engine, clock)
        replicas[lies] = store.jobs["honest"].allocation.num_replicas
        scheduler.submit(JobSpec(name="next", owner="ada", batch=LIMITS, application="resnet"))
        assert store.jobs["next"].knowledge is store.jobs["honest"].knowledge  # her own jobs learn from each other
    assert replicas[True] == replicas[False]


def test_a_user_who_lies_about_types_with_many_jobs_counts_once():
    ratios = TypeRatios()
    for number in range(200):
        liar = knowledge(f"job lie{number}", slow=1.0, fast=50.0)
        liar.owner = "mallory"
        learn_all([liar], ratios, TYPES)
    for name in ("ada", "bob"):
        honest = knowledge(f"job {name}", slow=1.0, fast=0.25)
        honest.owner = name
        learn_all([honest], ratios, TYPES)
    assert ratios.typical("cyd")["slow", "fast"] == pytest.approx(0.25, rel=0.1)
    assert ratios.typical("ada")["slow", "fast"] == pytest.approx(0.25, rel=0.1)


def test_whose_knowledge_it_is_outlives_the_scheduler():
    known = knowledge("application ada/resnet", slow=1.0, fast=0.25)
    known.owner = "ada"
    scheduler, *_ = make_scheduler(remembers_profiles=True)
    scheduler.restore([], [decode_knowledge(encode_knowledge(known))])
    for owner in ("ada", "mallory"):
        scheduler.submit(JobSpec(name=f"of-{owner}", owner=owner, batch=LIMITS, application="resnet"))
    found = {record.spec.owner: record.knowledge for record in scheduler.active_jobs}
    assert set(found["ada"].profile.accelerators) == set(TYPES) and found["ada"].owner == "ada"
    assert not found["mallory"].profile.accelerators


def test_what_several_owners_shared_before_is_a_copy_for_each():
    """A database from when jobs of one application shared what was known, whoever owned them."""
    shared, memory = knowledge("application resnet", slow=1.0, fast=0.25), ProfileMemory()
    found = {
        owner: memory.adopt(JobSpec(name=owner, owner=owner, batch=LIMITS, application="resnet"), shared)
        for owner in ("ada", "bob")
    }
    assert found["ada"].label == "application ada/resnet" and found["ada"].owner == "ada"
    found["bob"].observe("slow", Configuration(1, 8, 32), Timing(100.0, 100.0, 5))
    assert Configuration(1, 8, 32) not in found["ada"].profile.timings("slow")
    again = ProfileMemory()
    again.recall([found["ada"]])
    known = again.of(JobSpec(name="next", owner="ada", batch=LIMITS, application="resnet"))
    assert set(known.profile.accelerators) == set(TYPES)


def test_a_job_cannot_make_up_types_without_end():
    """Where nodes are of several types, its reports name the one. Each pair of types has a ratio."""
    knowledge = Knowledge("job")
    news = [knowledge.observe(f"made up {number}", *timings(1)[0]) for number in range(40)]
    assert news == [True] * 32 + [False] * 8
    assert len(knowledge.profile.accelerators) == 32
    assert knowledge.observe("made up 0", *timings(1)[1])  # those that are known are measured on
