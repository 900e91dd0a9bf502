"""Forms of the scheduler's values: read as they were written, or refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.api.codec import dumps, loads
from pollux.errors import InvalidValueError
from pollux.model.profile import Configuration, Timing
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState, Transition
from pollux.scheduler.record import Departure, JobRecord, Reallocation, RoundRecord
from pollux.server.storage import records as kept
from pollux.types import Allocation, JobSpec, JobView, Node, ShapeFactor, Snapshot, ThroughputParams
from tests.unit.api.test_codec import (
    PLAN,
    any_json,
    places,
    same,
    through_json,
    with_value,
)
from tests.unit.server.storage.values import (
    assert_same_record,
    make_record,
    records,
    rounds,
    snapshots,
)

# Forms of the scheduler's values --------------------------------------------------------------


@given(records())
def test_a_record_is_read_as_it_was_written(record):
    form = loads(dumps(kept.encode_record(record), "record"), "record")
    assert_same_record(kept.decode_record(form), record)


@given(rounds)
def test_a_round_is_read_as_it_was_written(record):
    assert same(kept.STORED.decode(RoundRecord, through_json(kept.STORED.encode(record)), "round"), record)


@given(snapshots())
def test_a_snapshot_is_read_as_it_was_written(snapshot):
    stored = kept.decode_snapshot(through_json(kept.encode_snapshot(snapshot)))
    assert stored.restored({job.name: job.spec for job in snapshot.jobs}) == snapshot


def test_what_was_fitted_for_an_application_is_written_once():
    theta = ThroughputParams(1, 2, 3, 4, 5, 6, 7)
    jobs = tuple(JobView(spec=JobSpec(name=name), age_s=0, params={"gpu": theta}) for name in "abc")
    form = kept.encode_snapshot(Snapshot(now=0, nodes=(), jobs=jobs))
    assert len(form["models"]) == 1


def test_restored_knowledge_is_fitted_in_the_next_round():
    knowledge = Knowledge("job a")
    for count in (1, 2, 4):
        knowledge.observe("gpu", Configuration(1, count, 32), Timing(0.1, 0.1 + 0.01 * count, 5))
    knowledge.refit()
    restored = kept.decode_knowledge(kept.encode_knowledge(knowledge))
    assert restored.params == {}
    assert restored.refit()
    assert restored.params["gpu"] == pytest.approx(knowledge.params["gpu"])


def test_the_most_replicas_ever_measured_are_remembered_when_their_times_are_forgotten():
    knowledge = Knowledge("job a")
    knowledge.profile.max_replicas = 64
    assert kept.decode_knowledge(kept.encode_knowledge(knowledge)).profile.max_replicas == 64


SCHEDULER_FORMS: dict[str, tuple[Any, Any]] = {
    "record": (
        kept.encode_record(
            make_record(
                allocation=Allocation.of(("n0", 2)),
                history=[Transition(1.0, JobState.PENDING, JobState.STARTING, "2 replicas")],
            )
        ),
        kept.decode_record,
    ),
    "round": (
        kept.STORED.encode(
            RoundRecord(
                number=1,
                at=2.0,
                trigger="submit",
                plan=PLAN,
                num_jobs=1,
                num_slots=4,
                decision_s=0.01,
                changes=(
                    Reallocation(
                        job="a",
                        before=Allocation.of(("n0", 2)),
                        after=Allocation.of(("n1", 2)),
                        has_started=True,
                        barred={"n0": "drained"},
                    ),
                ),
                departures=(Departure(job="b", state=JobState.FAILED, reason="why", num_slots=2),),
            )
        ),
        lambda form: kept.STORED.decode(RoundRecord, form, "round"),
    ),
    "snapshot": (
        kept.encode_snapshot(
            Snapshot(
                now=1.0,
                nodes=(Node(name="n0", num_slots=4),),
                jobs=(
                    JobView(
                        spec=JobSpec(name="a"),
                        age_s=1.0,
                        params={"gpu": ThroughputParams(1, 2, 3, 4, 5, 6, 7)},
                        shape_factors={"gpu": (ShapeFactor(False, 2, 1.1),)},
                    ),
                ),
            )
        ),
        lambda form: kept.decode_snapshot(form).restored({"a": JobSpec(name="a")}),
    ),
}


@pytest.mark.parametrize("kind", SCHEDULER_FORMS)
@given(data=st.data())
def test_a_form_with_anything_put_in_its_place_is_refused_or_read(kind, data):
    form, read = SCHEDULER_FORMS[kind]
    changed = with_value(form, data.draw(st.sampled_from(places(form))), data.draw(any_json))
    try:
        read(changed)
    except InvalidValueError as error:
        assert len(str(error)) < 2000


@pytest.mark.parametrize("kind", SCHEDULER_FORMS)
def test_missing_or_extra_fields_are_refused_by_name(kind):
    form, read = SCHEDULER_FORMS[kind]
    with pytest.raises(InvalidValueError, match="surprise"):
        read(form | {"surprise": 2})
    kinds = (JobRecord, RoundRecord)
    optional = {one.name for each in kinds for one in dataclasses.fields(each) if has_default(one)}
    for name in form.keys() - optional:
        with pytest.raises(InvalidValueError, match=name):
            read({key: value for key, value in form.items() if key != name})


def has_default(one):
    return one.default is not dataclasses.MISSING or one.default_factory is not dataclasses.MISSING


def test_a_row_from_before_a_field_is_read_with_its_default():
    form, read = SCHEDULER_FORMS["record"]
    assert read({key: value for key, value in form.items() if key != "unfit_types"}).unfit_types == {}
