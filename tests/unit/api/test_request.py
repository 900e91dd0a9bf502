"""What a user submits: checked, spelled out in JSON and header lines, and ordered by its dependencies."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pollux.api import request as jobs
from pollux.api.array import parse_array
from pollux.api.kind import detect_kind
from pollux.api.request import (
    MAX_NAME_LENGTH,
    OPTIONS,
    JobRequest,
    blocked_reason,
    check_dependencies,
    default_name,
    find_cycle,
    find_script,
    options_to_request,
    parse_duration,
    parse_headers,
    suggest_name,
    unique_name,
)
from pollux.errors import InvalidValueError
from pollux.scheduler.lifecycle import JobState
from pollux.types import UNBOUNDED_REPLICAS

COMMAND = ("python", "train.py")
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@st.composite
def requests(draw) -> JobRequest:
    low, high = sorted((draw(st.integers(1, 9)), draw(st.integers(1, 9))))
    replicas = draw(
        st.sampled_from([{}, {"replicas": low}, {"min_replicas": low}, {"min_replicas": low, "max_replicas": high}])
    )
    return JobRequest(
        command=("python", *draw(st.lists(texts, max_size=3))),
        name=draw(st.just("") | names),
        application=draw(st.just("") | names),
        kind=draw(st.sampled_from(["elastic", "auto"])),
        is_preemptible=draw(st.booleans()),
        checkpoints=draw(st.booleans()),
        weight=draw(st.floats(1e-6, 1e6)),
        max_restarts=draw(st.integers(0, 99)),
        cwd=draw(st.none() | texts.map(lambda text: f"/{text}")),
        env=draw(st.dictionaries(st.from_regex(r"X_[A-Z]{0,4}", fullmatch=True), texts, max_size=3)),
        time_limit_s=draw(st.none() | st.floats(0.001, 1e9)),
        after=tuple(draw(st.lists(names, max_size=3))),
        array=draw(st.sampled_from(["", "0-3", "1,3,7", "5"])),
        accelerators=tuple(draw(st.lists(st.sampled_from(["gpu", "a100"]), max_size=2))),
        **replicas,
    )


def refused(match: str, **fields: object) -> None:
    with pytest.raises(InvalidValueError, match=match):
        JobRequest(**({"command": COMMAND} | fields))


# The request ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"command": ()}, "say what to run"),
        ({"command": (" ",)}, "say what to run"),
        ({"command": "python train.py"}, "not one string"),
        ({"command": ("a\0b",)}, "without NUL"),
        ({"command": ("a\udc80",)}, "text"),
        ({"name": "my job"}, "as in 'my-job'"),
        ({"name": "../etc/passwd"}, "as in 'etc-passwd'"),
        ({"name": "été"}, "as in 'ete'"),
        ({"name": "train\n"}, "as in 'train'"),
        ({"name": "x" * 64}, "1 to 63"),
        ({"name": None}, "text"),
        ({"application": "a b"}, "application 'a b'"),
        ({"kind": "rigid"}, "elastic, restartable, fixed, auto"),
        ({"min_replicas": 4, "max_replicas": 2}, "min is above max"),
        ({"min_replicas": 0}, r"min-replicas 0; a whole number from 1"),
        ({"max_replicas": True}, "whole number"),
        ({"replicas": 1.5}, "whole number"),
        ({"replicas": 10**30}, "whole number"),
        ({"replicas": 2, "max_replicas": 4}, "either their number, or bounds"),
        ({"kind": "fixed", "max_replicas": 4}, "fixed job needs their number"),
        ({"is_preemptible": "no"}, "true or false"),
        ({"weight": 0}, "positive"),
        ({"weight": float("nan")}, "positive"),
        ({"weight": 10**400}, "positive"),
        ({"max_restarts": -1}, "from 0"),
        ({"cwd": "here"}, "absolute"),
        ({"cwd": ""}, "absolute"),
        ({"env": {"1A": "x"}}, "letters, digits and _"),
        ({"env": {"A": 1}}, "env A 1; text"),
        ({"env": ["A=1"]}, "mapping"),
        ({"time_limit_s": 0}, "positive"),
        ({"time_limit_s": "2h"}, "positive"),
        ({"after": "train"}, "a list of words"),
        ({"after": ("a b",)}, "after: job 'a b'"),
        ({"array": "0-9%0"}, '"0-9", a list'),
        ({"array": "9-0"}, "rising"),
        ({"array": "1,1"}, "different"),
        ({"array": "0-999999"}, "1 to 10000"),
        ({"accelerators": ("",)}, "empty"),
        ({"array_index": -1}, "array index"),
    ],
)
def test_impossible_requests_are_refused_with_what_is_allowed(fields, match):
    refused(match, **fields)


@pytest.mark.parametrize(
    "key",
    [
        "POLLUX_TOKEN",
        "POLLUX_ARRAY_INDEX",
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
    ],
)
def test_what_replicas_are_told_is_not_for_the_user_to_set(key):
    refused("Pollux sets it", env={key: "1"})
    JobRequest(command=COMMAND, env={f"MY_{key}": "1"})


@given(requests())
def test_json_round_trip(request):
    data = request.to_dict()
    assert JobRequest.from_dict(json.loads(json.dumps(data))) == request
    assert data["version"] == jobs.FORMAT_VERSION


@given(requests())
def test_expand_makes_one_job_per_index(request):
    expanded = request.expand()
    indices = parse_array(request.array) if request.array else (None,)
    assert [job.array_index for job in expanded] == list(indices)
    for job, index in zip(expanded, indices, strict=True):
        expected = request.name if index is None else f"{request.name}-{index}"
        assert (job.name, job.array) == (expected, "")
        assert job.env.get("POLLUX_ARRAY_INDEX") == (None if index is None else str(index))
        assert job.expand() == [job]
        assert JobRequest.from_dict(job.to_dict()) == job
    assert "POLLUX_ARRAY_INDEX" not in request.env


def test_an_array_is_bounded_in_bytes_too():
    """Every job of it is kept with all of its request."""
    array = JobRequest(command=COMMAND, array="0-299", env={"LONG": "x" * 100_000})
    assert len(array.expand()) == 300
    with pytest.raises(InvalidValueError, match=r"300 jobs with .* at most 64000000 are allowed: make env or command"):
        dataclasses.replace(array, env={"LONG": "x" * 900_000}).expand()
    assert len(JobRequest(command=COMMAND, array="0-9999").expand()) == 10_000


def test_the_dependencies_of_an_array_are_bounded_together():
    """800 jobs that wait for 3,000 each took half a minute, and the names alone 15 MB."""
    names = tuple(f"c-{number}" for number in range(3000))
    with pytest.raises(InvalidValueError, match=r"2400000 dependencies; at most 100000 .* let one job wait for these"):
        JobRequest(command=COMMAND, array="0-799", after=names[:1000], after_any=names[1000:]).expand()
    assert len(JobRequest(command=COMMAND, array="0-32", after=names).expand()) == 33
    assert len(JobRequest(command=COMMAND, after=names).expand()) == 1


@given(requests())
def test_a_spec_has_the_bounds_that_were_asked_for(request):
    (job, *_) = request.resolved("import pollux.train").expand()
    spec = job.to_spec("other", 5.0)
    assert (spec.name, spec.submitted_at, spec.weight) == ("other", 5.0, request.weight)
    if request.replicas is not None:
        assert spec.min_replicas == spec.max_replicas == spec.requested_replicas == request.replicas
    else:
        assert spec.min_replicas == (request.min_replicas or 1)
        assert spec.max_replicas == (request.max_replicas or UNBOUNDED_REPLICAS)
    assert spec.is_preemptible == request.is_preemptible
    assert spec.accelerators == (frozenset(request.accelerators) or None)


def test_a_name_with_no_room_for_an_index():
    with pytest.raises(InvalidValueError, match="1 to 63"):
        JobRequest(command=COMMAND, name="x" * 62, array="0-9").expand()


def test_a_fixed_job_runs_with_its_number_and_is_preempted_only_if_it_checkpoints():
    plain = JobRequest(command=COMMAND).resolved(None)
    assert plain.kind == "fixed"
    spec = plain.to_spec("a", 0.0)
    assert (spec.min_replicas, spec.max_replicas, spec.is_preemptible) == (1, 1, False)
    spec = dataclasses.replace(plain, replicas=4, checkpoints=True).to_spec("a", 0.0)
    assert (spec.min_replicas, spec.max_replicas, spec.is_preemptible) == (4, 4, True)


def test_a_restartable_job_has_bounds_and_is_preempted_like_an_elastic_one():
    spec = JobRequest(command=COMMAND, kind="restartable", max_replicas=4).to_spec("a", 0.0)
    assert (spec.min_replicas, spec.max_replicas, spec.is_preemptible) == (1, 4, True)
    assert spec.requested_replicas is None


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({"kind": "elastic"}, 3),
        ({"kind": "restartable"}, 3),
        ({"kind": "fixed"}, 0),
        ({"kind": "fixed", "checkpoints": True}, 3),
        ({"kind": "fixed", "max_restarts": 2}, 2),
        ({"kind": "elastic", "max_restarts": 0}, 0),
    ],
)
def test_restarts_are_those_that_were_said(options, number):
    """What begins from nothing is not begun again, unless somebody asks for it."""
    assert JobRequest(command=COMMAND, **options).num_restarts_allowed == number


def test_a_spec_needs_a_resolved_single_job():
    for request in (JobRequest(command=COMMAND), JobRequest(command=COMMAND, kind="fixed", array="0-1")):
        with pytest.raises(InvalidValueError, match="resolved and expanded"):
            request.to_spec("a", 0.0)


def test_bounds_on_what_turns_out_to_be_fixed():
    with pytest.raises(InvalidValueError, match="kind elastic"):
        JobRequest(command=COMMAND, max_replicas=4).resolved("import torch")


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({}, "say what to run"),
        ([], "mapping"),
        ({"command": ["a"], "max_replica": 3}, "Did you mean 'max_replicas'"),
        ({"command": ["a"], 3: 3}, "unknown field 3"),
        ({"command": ["a"], "version": 2}, "version 2"),
        ({"command": ["a"], "version": True}, "version True"),
        ({"command": ["a"], "env": None}, "mapping"),
        ({"command": [["a"]]}, "text"),
    ],
)
def test_json_is_read_strictly(data, match):
    with pytest.raises(InvalidValueError, match=match):
        JobRequest.from_dict(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
field_names = st.sampled_from([one.name for one in dataclasses.fields(JobRequest)])


@given(st.dictionaries(field_names | st.text(), json_values, max_size=5))
def test_any_json_is_a_request_or_an_invalid_value(data):
    try:
        request = JobRequest.from_dict({"command": ["a"]} | data)
    except InvalidValueError:
        return
    assert JobRequest.from_dict(request.to_dict()) == request


def test_a_request_keeps_its_own_environment():
    env = {"A": "1"}
    request = JobRequest(command=COMMAND, env=env)
    env["A"] = request.to_dict()["env"]["A"] = "2"
    assert request.env == {"A": "1"}
    assert len({request, request}) == 1


# Names, durations, kinds ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "script", "name"),
    [
        (("python", "-u", "/a/b/train.py", "--config", "conf.py"), "/a/b/train.py", "train"),
        (("torchrun", "--nproc-per-node=2", "my train.py"), "my train.py", "my-train"),
        (("python", "-m", "torch.distributed.run", "x.py"), "x.py", "x"),
        (("python", "-m", "package.fit", "conf.py"), None, "fit"),
        (("python", "-c", "import train.py"), None, "python"),
        (("bash", "-c", "python train.py"), None, "bash"),
        (("./run.sh",), "./run.sh", "run"),
        (("/usr/bin/nvidia-smi", "-L"), None, "nvidia-smi"),
        (("…",), None, "job"),
        (("python", "-m"), None, "python"),
        ((f"{'x' * 99}.py",), f"{'x' * 99}.py", "x" * 43),
    ],
)
def test_a_job_is_called_after_its_script(command, script, name):
    assert find_script(command) == script
    assert default_name(command) == JobRequest(command=command).name == name


@given(st.text())
def test_suggestions_are_allowed_and_allowed_names_stay(text):
    suggested = suggest_name(text)
    assert JobRequest(command=COMMAND, name=suggested).name == suggested
    assert suggest_name(suggested) == suggested


@given(names, st.sets(names | st.sampled_from(["train", "train-2", "train-3"])))
def test_unique_names(wanted, taken):
    for name in (wanted, "train", "x" * MAX_NAME_LENGTH):
        free = unique_name(name, taken)
        assert free not in taken
        assert JobRequest(command=COMMAND, name=free).name == free
        assert (free == name) == (name not in taken)


def test_unique_names_count_up():
    assert unique_name("train", set()) == "train"
    assert unique_name("train", {"train"}) == "train-2"
    assert unique_name("train", {"train", "train-2"}) == "train-3"
    assert unique_name("x" * 63, {"x" * 63}) == "x" * 61 + "-2"


@given(st.tuples(*[st.none() | st.integers(0, 9999)] * 4).filter(lambda parts: any(part is not None for part in parts)))
def test_parse_duration_is_the_inverse_of_writing_one(parts):
    text = "".join(f"{part}{unit}" for part, unit in zip(parts, "dhms", strict=True) if part is not None)
    expected_s = sum((part or 0) * unit_s for part, unit_s in zip(parts, (86400, 3600, 60, 1), strict=True))
    assert parse_duration(text) == expected_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("10m", 600), ("2h30m", 9000), ("1d", 86400), ("1.5h", 5400), (" 5s ", 5), ("0.5", 0.5), ("0", 0)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "2h30", "30m2h", "-5", "1:30", "5 minutes", "nan", "1e3", "1.2.3", "٣", "."])
def test_what_is_no_duration(text):
    with pytest.raises(InvalidValueError, match="2h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("import pollux.train", "elastic"),
        ("import torch, pollux.train as t", "elastic"),
        ("from pollux import train", "elastic"),
        ("from pollux import __version__, train as t", "elastic"),
        ("from pollux.train import init", "elastic"),
        ("from pollux.train.run import Run", "elastic"),
        ("def main():\n    if x:\n        from pollux import train", "elastic"),
        ("pattern = '\\d'\nimport pollux.train", "elastic"),
        ("import pollux", "fixed"),
        ("import pollux.trainer", "fixed"),
        ("from pollux import trainer", "fixed"),
        ("from .pollux import train", "fixed"),
        ("from . import train", "fixed"),
        ("'import pollux.train'  # from pollux import train", "fixed"),
        ("#!/bin/sh\nif true; then echo 'from pollux import train'; fi", "fixed"),
        ("\0", "fixed"),
        ("(" * 5000, "fixed"),
        ("", "fixed"),
    ],
)
def test_the_kind_is_seen_in_the_script(text, kind):
    assert detect_kind(text) == kind


def test_looking_at_a_script_does_not_run_it():
    assert detect_kind("import pollux.train\nraise SystemExit(1)") == "elastic"


def test_a_given_kind_is_not_questioned():
    assert JobRequest(command=COMMAND, kind="fixed").resolved("import pollux.train").kind == "fixed"


# Header lines and options ---------------------------------------------------------------------

SCRIPT = """#!/usr/bin/env python
# Trains something.
#POLLUX --name mine --max-replicas=8   --no-preemptible
##POLLUX --weight 3
#POLLUXES --weight 3

#POLLUX --env 'A=1 2' --env B=x=y --time-limit 2h30m --after "a, b"
#POLLUX --max-replicas 4 --env A=3 --checkpoints --array 0-2 --weight 0.5
import torch
#POLLUX --nonsense
"""


def test_header_lines():
    assert parse_headers(SCRIPT) == {
        "name": "mine",
        "max_replicas": 4,
        "is_preemptible": False,
        "env": {"A": "3", "B": "x=y"},
        "time_limit_s": 9000.0,
        "after": ("a", "b"),
        "checkpoints": True,
        "array": "0-2",
        "weight": 0.5,
    }
    assert parse_headers(SCRIPT.replace("\n", "\r\n")) == parse_headers("\ufeff" + SCRIPT) == parse_headers(SCRIPT)
    assert parse_headers("import os\n#POLLUX --nonsense") == parse_headers("") == parse_headers("#POLLUX") == {}


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("--max-replica 3", "line 2: unknown option '--max-replica'.* Did you mean '--max-replicas'"),
        ("--no-name", "line 2: unknown option '--no-name'"),
        ("train.py", "line 2: unknown option 'train.py'"),
        ("--name", "line 2: option '--name'; NAME is needed"),
        ("--name --weight 2", "line 2: option '--name'"),
        ("--checkpoints=yes", "line 2: .*takes no value"),
        ("--weight heavy", "line 2: --weight 'heavy'; W is needed"),
        ("--replicas 1.5", "line 2: --replicas '1.5'; N is needed"),
        ("--time-limit soon", "line 2: --time-limit 'soon'; TIME is needed.*2h30m"),
        ("--env A", "line 2: --env 'A'; KEY=VALUE is needed"),
        ("--name 'open", "line 2: No closing quotation"),
    ],
)
def test_wrong_header_lines_are_named(line, match):
    with pytest.raises(InvalidValueError, match=match):
        parse_headers(f"# first\n#POLLUX {line}\n")


words = st.sampled_from(
    [f"--{option.name}" for option in OPTIONS] + ["=", "a=b", "1", "'", "\\", "0-3", "#", "\r", "\n#POLLUX "]
)


@given(st.text() | st.lists(words | st.text(max_size=5), max_size=8).map(" ".join).map("#POLLUX {}".format))
def test_any_header_text_is_a_request_or_an_invalid_value(text):
    with contextlib.suppress(InvalidValueError):
        options_to_request(parse_headers(text), COMMAND, {}).resolved(text)


@given(st.text())
def test_any_script_has_a_kind(text):
    assert detect_kind(text) in ("elastic", "fixed")


def test_the_command_line_wins_over_header_lines():
    header = {"name": "a", "weight": 2.0, "env": {"A": "1", "B": "1"}, "after": ("x",)}
    given_now = {"name": "b", "env": ["B=2", "C=3"], "after": [], "time_limit_s": "10m", "weight": None}
    request = options_to_request(header, ["python", "train.py"], given_now)
    assert request == JobRequest(
        command=COMMAND, name="b", weight=2.0, env={"A": "1", "B": "2", "C": "3"}, after=("x",), time_limit_s=600.0
    )
    assert options_to_request({}, COMMAND, {"after": ["x,y", "z"]}).after == ("x", "y", "z")


def test_replicas_on_the_command_line_take_bounds_away_from_the_header_and_the_reverse():
    request = options_to_request({"min_replicas": 2, "max_replicas": 8}, COMMAND, {"replicas": 4})
    assert (request.min_replicas, request.max_replicas, request.replicas) == (None, None, 4)
    request = options_to_request({"replicas": 4}, COMMAND, {"max_replicas": 8})
    assert (request.max_replicas, request.replicas) == (8, None)
    with pytest.raises(InvalidValueError, match="either"):
        options_to_request({}, COMMAND, {"replicas": 4, "max_replicas": 8})


def test_options_to_request_refuses_what_it_does_not_know():
    with pytest.raises(InvalidValueError, match="Did you mean 'weight'"):
        options_to_request({}, COMMAND, {"wieght": 2})
    with pytest.raises(InvalidValueError, match="not one string"):
        options_to_request({}, "python train.py")


def test_the_table_covers_every_field_and_has_its_defaults():
    fields = {one.name for one in dataclasses.fields(JobRequest)}
    by_server = {"array_index", "array_of", "array_limit", "params", "study", "metric", "versions"}
    assert {option.field for option in OPTIONS} == fields - by_server - {"command"}
    request = JobRequest(command=COMMAND)
    for option in OPTIONS:
        assert option.default == ("" if option.field == "name" else getattr(request, option.field))
        assert option.help.endswith(".")
        assert bool(option.metavar) != (option.type == "flag")


# Dependencies ---------------------------------------------------------------------------------


def job(name: str, *after: str) -> JobRequest:
    return JobRequest(command=COMMAND, name=name, after=after)


def after(*names, **more):
    return JobRequest(command=COMMAND, name="job", after=names, **more)


def test_dependencies_wait_end_or_are_done():
    states = {"a": "succeeded", "b": "running", "c": "failed", "d": "cancelled", "e": "pending"}
    assert blocked_reason(after(*()), states) is blocked_reason(after(*("a",)), states) is None
    assert blocked_reason(after(*("a", "b", "e")), states) == ("waiting for b, e", False)
    assert blocked_reason(after(*("b", "c")), states) == ("it was to run after c, which failed", True)
    assert blocked_reason(after(*("d",)), states) == ("it was to run after d, which was cancelled", True)
    assert blocked_reason(after(after_any=["a", "c", "d"]), states) is None
    assert blocked_reason(after(after_any=["b"]), states) == ("waiting for b", False)
    assert blocked_reason(after(after_fail=["c"]), states) is None
    assert blocked_reason(after(after_fail=["b"]), states) == ("waiting for b", False)
    assert blocked_reason(after(after_fail=["a"]), states) == ("it was to run if a failed, which succeeded", True)
    assert blocked_reason(after(*("z",)), states) == ("it was to run after z, which is not known", True)


@pytest.mark.parametrize("state", JobState)
def test_every_state_of_the_lifecycle_is_understood(state):
    blocked = blocked_reason(after(*("a",)), {"a": state.value})
    assert (blocked is None) == (state is JobState.SUCCEEDED)
    assert blocked is None or blocked.is_hopeless == state.is_final
    cycle = find_cycle([job("b", "a")], {"a": (state.value, ("b",))})
    assert (cycle is None) == state.is_final


def test_cycles_are_told_in_order():
    assert find_cycle([job("a", "a")], {}) == ["a", "a"]
    cycle = find_cycle([job("a", "b"), job("b", "c"), job("c", "a"), job("d", "a")], {})
    assert cycle is not None and cycle[0] == cycle[-1] and sorted(cycle[1:]) == ["a", "b", "c"]
    assert all((x, y) in {("a", "b"), ("b", "c"), ("c", "a")} for x, y in itertools.pairwise(cycle))
    with pytest.raises(InvalidValueError, match=r"for ever: \w after \w after \w"):
        check_dependencies([job("a", "b"), job("b", "a")], {})


def test_long_chains_and_old_jobs_are_fine():
    chain = [job("j0"), *(job(f"j{n}", f"j{n - 1}") for n in range(1, 3000))]
    check_dependencies(chain, {})
    check_dependencies([job("train-2", "train")], {"train": ("running", ())})
    assert find_cycle([dataclasses.replace(chain[0], after=("j2999",)), *chain[1:]], {}) is not None


@given(st.dictionaries(st.sampled_from("abcdef"), st.sets(st.sampled_from("abcdef")), max_size=6))
def test_a_cycle_is_found_if_and_only_if_there_is_one(edges):
    remaining = dict(edges)  # jobs that wait for nobody are taken away until none is left, or only cycles
    while free := [name for name, after in remaining.items() if not after & remaining.keys()]:
        for name in free:
            del remaining[name]
    cycle = find_cycle([job(name, *sorted(after)) for name, after in edges.items()], {})
    assert (cycle is not None) == bool(remaining)
    for name, after in itertools.pairwise(cycle or []):
        assert after in edges[name]


def test_unknown_dependencies_are_refused_with_the_nearest_names():
    with pytest.raises(InvalidValueError, match=r"'trian', which is not known\. Did you mean 'train' or 'train-2'"):
        check_dependencies([job("b", "trian")], {"train": ("running", ()), "train-2": ("failed", ())})
    check_dependencies([job("b", "a"), job("a")], {})


def test_header_lines_may_stand_behind_a_docstring():
    text = '#!/usr/bin/env python\n"""Trains.\n\n#POLLUX --name not-this\n"""\n#POLLUX --name mine\n\n'
    text += "#POLLUX --max-replicas 2\nimport os\n#POLLUX --name too-late\n"
    assert parse_headers(text) == {"name": "mine", "max_replicas": 2}
    assert parse_headers('"""One line."""\n#POLLUX --name a\n') == {"name": "a"}
    assert parse_headers("x = 1\n#POLLUX --name late\n") == {}


def test_an_empty_name_is_a_mistake():
    with pytest.raises(InvalidValueError, match="--name"):
        options_to_request({}, ["true"], {"name": ""})


def test_replicas_are_refused_in_the_words_of_their_options():
    with pytest.raises(InvalidValueError, match=r"^min-replicas 3, max-replicas 2; min is above max$"):
        JobRequest(command=("true",), min_replicas=3, max_replicas=2)
    with pytest.raises(InvalidValueError, match=r"^max-replicas 1, replicas 2; give either"):
        JobRequest(command=("true",), replicas=2, max_replicas=1)


def test_header_lines_as_code_formatters_leave_them():
    assert parse_headers('# POLLUX --name mine --env "A=1 2"\nimport os\n') == {"name": "mine", "env": {"A": "1 2"}}
    assert parse_headers("# POLLUX is a scheduler\n#  POLLUX --name no\n") == {}
