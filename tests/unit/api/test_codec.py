"""Every form: what is written is read back the same; what is not a form is refused by name, whatever it is."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.api import codec
from pollux.api.report import (
    MAX_METRICS,
    MAX_NAME_LENGTH,
    MAX_NOTE_LENGTH,
    MAX_NOTES,
    MAX_OBSERVED,
    MAX_REPORT_BYTES,
    MAX_TIMINGS,
    Report,
    checked,
    decode_measurement,
    decode_report,
    encode_measurement,
    encode_report,
    read_report,
    write_report,
)
from pollux.errors import InvalidValueError
from pollux.model.profile import Configuration, Timing
from pollux.server.storage import records
from pollux.server.storage.records import STORED
from pollux.types import Allocation, BatchLimits, Explanation, JobDecision, JobSpec, Node, Plan

# Values that can be ---------------------------------------------------------------------------

integers = st.integers(0, codec.MAX_INTEGER)
counts = st.integers(1, codec.MAX_INTEGER)
numbers = st.floats(0, allow_nan=False, allow_infinity=False)
signed = st.floats(allow_nan=False, allow_infinity=False)
shares_of_1 = st.floats(0, 1)
times = st.floats(1e-9, 1e9)
texts = st.text(st.characters(), max_size=20)  # half characters too
names = texts.filter(bool)
proper = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
proper_names = proper.filter(bool)

nodes = st.builds(Node, name=names, num_slots=counts, accelerator=texts)
allocations = st.dictionaries(names, counts, max_size=4).map(lambda counts: Allocation.of(*counts.items()))


@st.composite
def batch_limits(draw: st.DrawFn) -> BatchLimits:
    initial, minimum, maximum = sorted(draw(st.lists(counts, min_size=3, max_size=3)))
    device_min, device_max = sorted(draw(st.lists(counts, min_size=2, max_size=2)))
    return BatchLimits(
        initial=initial,
        minimum=minimum,
        maximum=maximum,
        device_min=min(device_min, maximum),
        device_max=device_max,
    )


@st.composite
def specs(draw: st.DrawFn, name: st.SearchStrategy[str] = names) -> JobSpec:
    least, most = sorted(draw(st.lists(counts, min_size=2, max_size=2)))
    return JobSpec(
        name=draw(name),
        application=draw(texts),
        submitted_at=draw(numbers),
        batch=draw(st.none() | batch_limits()),
        min_replicas=least,
        max_replicas=most,
        requested_replicas=draw(st.none() | counts),
        requested_batch_size=draw(st.none() | counts),
        is_preemptible=draw(st.booleans()),
        weight=draw(numbers.filter(bool)),
        accelerators=draw(st.none() | st.frozensets(texts, max_size=3)),
    )


@st.composite
def measurements(draw: st.DrawFn) -> tuple[Configuration, Timing]:
    num_nodes, num_replicas = sorted(draw(st.lists(counts, min_size=2, max_size=2)))
    return Configuration(num_nodes, num_replicas, draw(counts)), Timing(draw(times), draw(times), draw(counts))


metric_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | signed | proper,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(proper_names, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def reports(draw: st.DrawFn, job: st.SearchStrategy[str] = proper_names) -> Report:
    num_nodes, num_replicas = sorted(draw(st.lists(counts, min_size=2, max_size=2)))
    made = Report(
        job=draw(job),
        batch=draw(st.none() | batch_limits()),
        generation=draw(integers),
        num_replicas=num_replicas,
        num_nodes=num_nodes,
        accelerator=draw(proper_names),
        epoch=draw(integers),
        num_steps=draw(integers),
        progress=draw(st.none() | shares_of_1),
        remaining_examples=draw(st.none() | numbers),
        stalled_s=draw(numbers),
        device_batch=draw(counts),
        accum_steps=draw(integers),
        total_batch=draw(counts),
        noise_scale=draw(st.none() | numbers),
        noise_scale_error=draw(st.none() | numbers),
        efficiency=draw(st.none() | shares_of_1),
        gain=draw(numbers),
        throughput=draw(st.none() | numbers),
        goodput=draw(st.none() | numbers),
        replica=draw(st.none() | proper_names),
        timings=tuple(draw(st.lists(measurements(), max_size=4))),
        metrics=draw(st.dictionaries(proper_names, metric_values, max_size=4)),
        notes=tuple(draw(st.lists(texts, max_size=3))),
    )
    return checked(made)  # with notes as they are kept


@st.composite
def decisions(draw: st.DrawFn) -> JobDecision:
    options = draw(st.lists(st.tuples(integers, st.floats()), max_size=5))
    return JobDecision(
        job=draw(texts),
        before=draw(allocations),
        after=draw(allocations),
        speedup_before=draw(st.floats()),
        speedup_after=draw(st.floats()),
        move_factor=draw(st.floats()),
        option_replicas=np.array([count for count, _ in options], dtype=np.int64),
        option_speedups=np.array([speedup for _, speedup in options], dtype=np.float64),
        note=draw(texts),
    )


explanations = st.builds(
    Explanation,
    fitness_before=st.floats(),
    fitness=st.floats(),
    upper_bound=st.floats(),
    jobs=st.lists(decisions(), max_size=3).map(tuple),
    method=texts,
    decision_s=st.floats(),
)
plans = st.builds(
    Plan, allocations=st.dictionaries(texts, allocations, max_size=3), explanation=st.none() | explanations
)

any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)

REPORT = Report(
    job="resnet",
    batch=BatchLimits(initial=32, maximum=4096, device_max=256),
    generation=3,
    num_replicas=4,
    num_nodes=2,
    accelerator="gpu",
    epoch=7,
    num_steps=1234,
    progress=0.25,
    remaining_examples=40_000.0,
    stalled_s=1.5,
    device_batch=32,
    accum_steps=1,
    total_batch=256,
    noise_scale=512.5,
    noise_scale_error=60.0,
    efficiency=0.9,
    gain=1.5,
    throughput=1000.0,
    goodput=900.0,
    replica="resnet-3",
    timings=((Configuration(2, 4, 32), Timing(0.1, 0.12, 20)),),
    metrics={"loss": 0.5, "per_class": [0.1, 0.2], "note": "ok", "best": None},
    notes=("step 1200: batch 64 -> 32, because |G|^2 rose 3.1 times after it grew",),
)
SPEC = JobSpec(name="resnet", batch=REPORT.batch, accelerators=frozenset({"a100"}))
PLAN = Plan(
    allocations={"resnet": Allocation.of(("n0", 4))},
    explanation=Explanation(
        fitness_before=1.0,
        fitness=2.0,
        upper_bound=2.1,
        jobs=(
            JobDecision(
                job="resnet",
                before=Allocation(),
                after=Allocation.of(("n0", 4)),
                speedup_before=0.0,
                speedup_after=2.0,
                move_factor=0.9,
                option_replicas=np.array([1, 2, 4]),
                option_speedups=np.array([1.0, 1.5, 2.0]),
            ),
        ),
    ),
)


def stored(kind: type, name: str) -> tuple[Any, Any]:
    return STORED.encode, lambda value: STORED.decode(kind, value, name)


FORMS: dict[str, tuple[Any, Any, Any]] = {
    "report": (encode_report, decode_report, REPORT),
    "spec": (*stored(JobSpec, "spec"), SPEC),
    "plan": (records.encode_plan, records.decode_plan, PLAN),
    "node": (*stored(Node, "node"), Node(name="n0", num_slots=4)),
    "allocation": (*stored(Allocation, "allocation"), Allocation.of(("n0", 4), ("n1", 2))),
    "batch": (*stored(BatchLimits, "batch"), REPORT.batch),
    "timing": (encode_measurement, lambda value: decode_measurement(value, "timing"), REPORT.timings[0]),
}


def through_json(form: Any) -> Any:
    return codec.loads(codec.dumps(form, "form"), "form")


def same(a: Any, b: Any) -> bool:
    """Equal, with arrays compared by what is in them, and NaN equal to itself."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype == float)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            same(getattr(a, entry.name), getattr(b, entry.name)) for entry in dataclasses.fields(a)
        )
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a):
        return math.isnan(b)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


# There and back -------------------------------------------------------------------------------


@given(reports())
def test_a_report_is_read_as_it_was_written(report):
    text = write_report(report)
    assert read_report(text) == report
    assert read_report(text.encode()) == report
    assert write_report(read_report(text)) == text


@given(specs())
def test_a_spec_is_read_as_it_was_written(spec):
    assert STORED.decode(JobSpec, through_json(STORED.encode(spec)), "spec") == spec


@given(nodes, allocations, batch_limits(), measurements())
def test_small_values_are_read_as_they_were_written(node, allocation, limits, measurement):
    for value in (node, allocation, limits):
        assert STORED.decode(type(value), through_json(STORED.encode(value)), "it") == value
    assert decode_measurement(through_json(encode_measurement(measurement)), "it") == measurement


@given(plans)
def test_a_plan_is_read_as_it_was_written_even_with_nan_and_infinity_in_its_estimates(plan):
    assert same(records.decode_plan(through_json(records.encode_plan(plan))), plan)


def test_numbers_of_numpy_are_written_as_numbers():
    plan = Plan(allocations={"a": Allocation.of(("n0", np.int64(2)))})
    assert same(records.decode_plan(through_json(records.encode_plan(plan))), plan)


def test_notes_are_clipped_and_never_a_reason_to_refuse_a_report():
    told = [f"note {number}" for number in range(30)]
    assert decode_report(encode_report(REPORT) | {"notes": told}).notes == tuple(told[-20:])
    odd = ["x" * 1000, "  two\nlines\t ", "half \ud800", " \n", ""]
    read = decode_report(encode_report(REPORT) | {"notes": odd}).notes
    assert read == ("x" * 300, "two lines", "half ?")
    assert read_report(write_report(dataclasses.replace(REPORT, notes=tuple(odd)))).notes == read


# What is not a form ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMS)
@given(value=any_json)
def test_any_json_is_refused_or_read_and_nothing_else(kind, value):
    _, read, _ = FORMS[kind]
    try:
        read(value)
    except InvalidValueError as error:
        assert len(str(error)) < 2000


def places(form: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a form could be changed."""
    found = [path]
    if isinstance(form, dict | list):
        for key in form if isinstance(form, dict) else range(len(form)):
            found += places(form[key], (*path, key))
    return found


def with_value(form: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = form.copy()
    copy[path[0]] = with_value(form[path[0]], path[1:], value)
    return copy


@pytest.mark.parametrize("kind", FORMS)
@given(data=st.data())
def test_a_form_with_anything_put_in_its_place_is_refused_or_read(kind, data):
    write, read, value = FORMS[kind]
    form = write(value)
    changed = with_value(form, data.draw(st.sampled_from(places(form))), data.draw(any_json))
    try:
        found = read(changed)
    except InvalidValueError:
        return
    assert same(read(through_json(write(found))), found)  # what was taken can be kept


@given(st.text() | st.binary() | any_json.map(json.dumps))
def test_any_text_is_refused_or_read_and_nothing_else(text):
    with pytest.raises(InvalidValueError):
        read_report(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[" * 100_000,
        '{"version":' * 5_000,
        "1" * 5_000,
        "[" + "1" * 5_000 + "]",
        "\ufeff{}",
        "\ud800",
        b"\xff\xfe\x00",
        None,
        7,
    ],
    ids=lambda text: codec.shown(text)[:20],
)
def test_text_that_is_no_report_is_refused(text):
    with pytest.raises(InvalidValueError, match="report"):
        read_report(text)


@pytest.mark.parametrize("version", [0, 1, 3, "2", True, None, 2.0])
def test_an_unknown_version_is_refused(version):
    with pytest.raises(InvalidValueError, match=r"report\.version = .*reads version 2"):
        decode_report(encode_report(REPORT) | {"version": version})


@pytest.mark.parametrize("kind", ["report", "spec", "plan", "node", "batch"])
def test_each_missing_field_and_any_extra_one_is_refused_by_name(kind):
    write, read, value = FORMS[kind]
    form = write(value)
    # Stored rows may be older than a field that has a default; a report has all of its fields.
    optional = {field.name for field in dataclasses.fields(value) if field.default is not dataclasses.MISSING}
    optional |= {field.name for field in dataclasses.fields(value) if field.default_factory is not dataclasses.MISSING}
    for name in form if kind == "report" else set(form) - optional:
        with pytest.raises(InvalidValueError, match=name):
            read({key: entry for key, entry in form.items() if key != name})
    with pytest.raises(InvalidValueError, match="'surprise', which is no field"):
        read(form | {"surprise": 1})
    with pytest.raises(InvalidValueError, match="a name in"):
        read(form | {7: 1})


NUMBER_FIELDS = ["progress", "noise_scale", "noise_scale_error", "efficiency", "gain", "throughput", "goodput"]
INTEGER_FIELDS = ["generation", "num_replicas", "num_nodes", "epoch", "num_steps", "device_batch", "accum_steps"]


@pytest.mark.parametrize("name", [*NUMBER_FIELDS, *INTEGER_FIELDS, "total_batch"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, -1e-9, "1", True, [], {}, 10**400])
def test_a_report_with_an_impossible_number_is_refused_by_name(name, value):
    with pytest.raises(InvalidValueError, match=rf"report\.{name} = .*needed"):
        decode_report(encode_report(REPORT) | {name: value})
    with pytest.raises(InvalidValueError, match=rf"report\.{name} = "):
        write_report(dataclasses.replace(REPORT, **{name: value}))


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_nan_and_infinity_in_the_text_are_refused_by_name(literal):
    text = write_report(REPORT)
    with pytest.raises(InvalidValueError, match=r"report\.goodput = "):
        read_report(text.replace('"goodput":900.0', f'"goodput":{literal}'))
    with pytest.raises(InvalidValueError, match=r"report\.metrics\.loss = "):
        read_report(text.replace('"loss":0.5', f'"loss":{literal}'))
    with pytest.raises(InvalidValueError, match=r"report\.timings\[0\]\.grad_s = "):
        read_report(text.replace("0.1,0.12", f"{literal},0.12"))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("progress", 1.5, "from 0 to 1"),
        ("efficiency", 1.1, "from 0 to 1"),
        ("num_nodes", 5, "at most num_replicas = 4"),
        ("num_replicas", 2.0, "an integer"),
        ("job", "", "at least 1"),
        ("job", "x" * 257, "at most 256"),
        ("job", "\ud800", "Unicode"),
        ("accelerator", None, "a text"),
        ("batch", {"initial": 4}, "report.batch has no"),
        ("timings", [[1, 2, 3]], "exactly 6"),
        ("timings", [[2, 1, 8, 0.1, 0.1, 1]], "nodes <= replicas"),
        ("timings", [[1, 1, 8, 0.0, 0.1, 1]], "positive"),
        ("timings", [[1, 1, 8, 0.1, 0.1, 1]] * 1025, "at most 1024"),
        ("timings", "no", "a list"),
        ("metrics", {f"m{index}": 1 for index in range(257)}, "at most 256"),
        ("metrics", {"x" * 300: 1}, "at most 256"),
        ("metrics", {"a": [[[[[[[[[1]]]]]]]]]}, "nested too deeply"),
        ("metrics", {"a": 1 << 65}, "at most 64 bits"),
        ("metrics", {"a": {"b": [1, "\udfff"]}}, r"report\.metrics\.a\.b\[1\]"),
        ("metrics", [1], "an object"),
        ("notes", "one", "a list"),
        ("notes", ["one", 2], r"report\.notes\[1\] = 2"),
    ],
)
def test_a_report_out_of_bounds_is_refused_with_what_is_allowed(name, value, says):
    with pytest.raises(InvalidValueError, match=says):
        decode_report(encode_report(REPORT) | {name: value})


def test_a_report_too_long_is_neither_read_nor_written():
    with pytest.raises(InvalidValueError, match=r"report of \d+ bytes; at most 256000"):
        read_report(write_report(REPORT) + " " * MAX_REPORT_BYTES)
    with pytest.raises(InvalidValueError, match="at most 256000 are allowed: log less"):
        write_report(dataclasses.replace(REPORT, metrics={"text": "x" * MAX_REPORT_BYTES}))


def test_a_report_that_is_full_of_everything_fits():
    """As many timings, metrics, values and notes as are allowed, with numbers of full length and long names."""
    third = 1 / 3
    timing = (Configuration(16, 128, 4096), Timing(third, 1 + third, 100_000))
    full = dataclasses.replace(
        REPORT,
        timings=(timing,) * MAX_TIMINGS,
        metrics={f"{number:0{MAX_NAME_LENGTH}d}": third for number in range(MAX_METRICS)},
        observed=((third, third),) * MAX_OBSERVED,
        notes=("\u4e2d" * MAX_NOTE_LENGTH,) * MAX_NOTES,
    )
    assert 0.6 < len(write_report(full)) / MAX_REPORT_BYTES < 1


def test_a_field_named_twice_is_refused():
    with pytest.raises(InvalidValueError, match="'goodput' is there twice"):
        read_report(write_report(REPORT).replace('"gain":', '"goodput":1.0,"gain":'))


def test_a_field_named_twice_among_very_many_is_found_at_once():
    names = ",".join(f'"{number:x}":0' for number in range(100_000))
    began_s = time.process_time()
    with pytest.raises(InvalidValueError, match="'z' is there twice"):
        codec.loads(f'{{{names},"z":0,"z":0}}', "body")
    assert time.process_time() - began_s < 5.0  # 0.1 s; a search of all names for each took over a minute


@pytest.mark.parametrize(
    ("kind", "name", "value", "says"),
    [
        ("spec", "weight", 0, "positive"),
        ("spec", "weight", math.nan, r"spec\.weight"),
        ("spec", "max_replicas", 0, "spec: job 'resnet': replicas"),
        ("spec", "requested_batch_size", -3, "batch size -3 requested"),
        ("spec", "accelerators", ["a", "a"], "once"),
        ("spec", "is_preemptible", 1, "true or false"),
        ("batch", "maximum", 8, "batch: max batch size 8"),
        ("batch", "minimum", -1, "batch: min batch size -1"),
        ("node", "num_slots", 0, "node: node 'n0' has 0 slots"),
        ("plan", "allocations", {"a": {"shares": [["n", 0]]}}, r"plan\.allocations\.a: 0 replicas"),
        ("plan", "allocations", {"a": {"shares": [["n", 1], ["n", 1]]}}, "named twice"),
    ],
)
def test_other_forms_out_of_bounds_are_refused_with_what_is_allowed(kind, name, value, says):
    write, read, good = FORMS[kind]
    with pytest.raises(InvalidValueError, match=says):
        read(write(good) | {name: value})


def test_a_decision_needs_as_many_speedups_as_options():
    form = records.encode_plan(PLAN)
    form["explanation"]["jobs"][0]["option_speedups"].pop()
    with pytest.raises(InvalidValueError, match="2 entries; 3 are needed"):
        records.decode_plan(form)


def test_what_nobody_could_read_back_is_not_written():
    with pytest.raises(InvalidValueError, match="batch size 0 requested"):
        JobSpec(name="a", requested_batch_size=0)
    with pytest.raises(InvalidValueError, match="cannot be written as JSON"):
        codec.dumps({"a": math.nan}, "it")
    with pytest.raises(InvalidValueError, match="cannot be written as JSON"):
        codec.dumps({"a": object()}, "it")


def test_a_report_made_here_is_checked_too():
    with pytest.raises(InvalidValueError, match=r"report\.timings\[0\]"):
        write_report(dataclasses.replace(REPORT, timings=((1, 2),)))
    with pytest.raises(InvalidValueError, match=r"report\.batch"):
        write_report(dataclasses.replace(REPORT, batch=3))
    with pytest.raises(InvalidValueError, match=r"report\.metrics\.a"):
        write_report(dataclasses.replace(REPORT, metrics={"a": object()}))
