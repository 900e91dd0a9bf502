"""What is drawn, over a connection to a real cluster whose engine does as it is told; and published simulations."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import time

import httpx
import numpy as np
import pytest

from pollux.api.cluster import SampleList, Timeline
from pollux.api.codec import decode
from pollux.api.job import JobCurves, JobModel
from pollux.api.request import JobRequest
from pollux.api.round import RoundDetail, RoundSummary
from pollux.api.simulation import Publication, PublishedSimulation, SimulationList
from pollux.errors import InvalidValueError, UnknownNameError
from pollux.model.goodput import best_batch
from pollux.model.profile import Configuration, Timing
from pollux.model.throughput import iteration_s
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.record import JobRecord
from pollux.server.config import ClusterConfig, ServiceConfig
from pollux.server.live import cluster as clusters
from pollux.server.present.charts import job_curves, job_model, least_useful_slots, useful_slots
from pollux.server.service import Service
from pollux.server.storage import simulations as simulations_
from pollux.server.storage.simulations import MAX_BYTES, MAX_SUMMARY_BYTES, Simulations
from pollux.types import Allocation, BatchLimits, JobDecision, JobSpec, Node, ThroughputParams
from tests.unit.server.live.world import ObedientEngine, report

PATIENCE_S = 20.0
LIMITS = BatchLimits(initial=32, maximum=1024, device_min=8, device_max=128)
THETA = ThroughputParams(0.02, 0.002, 0.03, 0.01, 0.01, 0.005, 2.0)


def until(condition, what="it"):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} never happened"
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """With one job that trains, one that has ended, and one that waits."""
    directory = tmp_path_factory.mktemp("data")
    engine = ObedientEngine(Node(name="a", num_slots=4, accelerator="cpu"))

    def make(config, store, url):
        described = ClusterConfig(
            data_directory=directory, secret="s" * 32, url=url, min_pause_s=0.0, interval_s=0.5, node_price=2.0
        )
        made = clusters.Cluster(store=store, engine=engine, config=described)
        engine.wake = made.wake
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "SAMPLE_EVERY_S", 0.1)
        with Service(ServiceConfig(data_directory=directory, port=0), make) as service:
            cluster = service.cluster
            for name in ("ended", "trains"):
                cluster.submit(JobRequest(command=("python", "t.py"), name=name, kind="elastic", max_replicas=2))
                until(lambda name=name: cluster.queries.summary_of(name).state == "running", name)
            engine.end("ended")
            until(lambda: cluster.queries.is_ended("ended"))
            timings = tuple(
                (Configuration(1, 1, batch), Timing(0.02 + 0.002 * batch, 0.02 + 0.002 * batch, 10))
                for batch in (16, 32, 64)
            )
            for step in range(5):
                told = {"loss": 1.0 / (step + 1), "name": "x", "flag": True}
                values = dict(num_steps=step, timings=timings, metrics=told, noise_scale_error=10.0 + step)
                cluster.report(report("trains", batch=LIMITS, **values))
            until(lambda: len(cluster.queries.curves("trains", 10).at) == 5, "reports are kept")
            until(lambda: cluster.queries.model("trains").accelerators, "a model")
            cluster.submit(JobRequest(command=("sleep", "9"), name="waits", kind="fixed", replicas=50))
            until(
                lambda: len(found := cluster.queries.samples(None, None, 10)) >= 3 and found[-1].num_pending, "samples"
            )
            yield service


@pytest.fixture
def client(service):
    headers = {"Authorization": f"Bearer {service.token}"}
    with httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, timeout=20) as client:
        yield client


def get(client, path, form=None, **params):
    response = client.get(path, params=params)
    assert response.status_code == 200, response.text
    if form is not None:
        decode(form, response.json(), "answer")
    return response.json()


# Over time ------------------------------------------------------------------------------------


def test_samples(client):
    samples = get(client, "/samples", SampleList)["samples"]
    times = [sample["at"] for sample in samples]
    assert times == sorted(times)
    last = samples[-1]
    assert (last["num_nodes"], last["num_slots"]) == (1, 4)
    assert last["num_running"] == 1
    assert last["num_used_slots"] in (1, 2)
    assert last["num_pending"] == 1
    assert last["efficiency"] == 1.0
    assert 0 < last["goodput"] <= last["num_used_slots"]
    assert last["cost"] == pytest.approx(2 * last["node_hours"])
    middle = times[1]
    assert [one["at"] for one in get(client, "/samples", since=middle, until=middle)["samples"]] == [middle]
    assert len(get(client, "/samples", points=2)["samples"]) == 2


def test_the_timeline(client):
    timeline = get(client, "/timeline", Timeline)
    assert [job["name"] for job in timeline["jobs"]] == ["ended", "trains", "waits"]
    ended, trains, waits = timeline["jobs"]
    assert ended["spans"][-1]["until"] == ended["finished_at"]
    assert ended["spans"][0]["allocation"] == [["a", 1]]
    assert [span["until"] for span in trains["spans"]][-1] is None
    assert waits["spans"] == []
    assert timeline["since"] == min(job["submitted_at"] for job in timeline["jobs"])  # less than an hour ago
    assert timeline["total"] == 3
    rows = {job["name"]: job["sequence"] for job in get(client, "/jobs")["jobs"]}
    assert {job["name"]: job["sequence"] for job in timeline["jobs"]} == rows
    assert len(get(client, "/timeline", limit=1)["jobs"]) == 1
    assert get(client, "/timeline", since=1, until=2)["jobs"] == []


@pytest.mark.parametrize("path", ["/samples", "/timeline"])
def test_a_time_that_ends_before_it_begins(client, path):
    response = client.get(path, params={"since": 20, "until": 10})
    assert response.status_code == 422
    assert "since = 20 is after until = 10" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/jobs/nobody/curves", "/jobs/nobody/model"])
def test_a_job_there_is_not(client, path):
    response = client.get(path)
    assert response.status_code == 404
    assert set(response.json()["error"]["known"]) == {"ended", "trains", "waits"}


# Jobs -----------------------------------------------------------------------------------------


def test_curves(client):
    curves = get(client, "/jobs/trains/curves", JobCurves)
    assert curves["metrics"] == {"loss": [1.0, 0.5, pytest.approx(1 / 3), 0.25, 0.2]}
    assert {len(column) for name, column in curves.items() if name != "metrics"} == {5}
    assert curves["noise_scale_error"] == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert get(client, "/jobs/trains/curves", points=2)["metrics"]["loss"] == [1.0, 0.2]
    assert get(client, "/jobs/waits/curves")["at"] == []


def test_metrics_that_come_and_go_leave_holes():
    odd = [{"a": 1, "b": "text"}, {"b": 2.5, "c": None}, {"a": True, "d": [1]}]
    curves = job_curves([(float(at), report("j", metrics=metrics)) for at, metrics in enumerate(odd)])
    assert curves.metrics == {"a": (1, None, None), "b": (None, 2.5, None)}


def test_metrics_that_are_not_finite_or_lie_deeper_have_curves():
    odd = [{"loss": "nan", "eval": {"accuracy": 0.5, "by": {"class": 1}}, "word": "inform"}, {"loss": "-inf"}]
    curves = job_curves([(float(at), report("j", metrics=metrics)) for at, metrics in enumerate(odd)])
    assert curves.metrics == {"loss": ("nan", "-inf"), "eval/accuracy": (0.5, None), "eval/by/class": (1, None)}


def test_the_model_of_a_job_that_trains(client):
    model = get(client, "/jobs/trains/model", JobModel)
    fitted = model["accelerators"]["cpu"]
    assert fitted["num_steps"] == 150  # of each of three batches ten steps, five times
    assert [point["device_batch"] for point in fitted["points"]] == [16, 32, 64]
    for point in fitted["points"]:
        assert point["predicted_step_s"] == pytest.approx(point["step_s"], rel=0.05)
    (line,) = fitted["lines"]
    assert (line["device_batch"][0], line["device_batch"][-1]) == (8, 128)
    assert line["step_s"] == sorted(line["step_s"])
    goodput, speedups = model["goodput"], model["speedups"]
    assert (goodput["accelerator"], goodput["noise_scale"], goodput["noise_scale_error"]) == ("cpu", 100.0, 14.0)
    assert goodput["total_batch"] == sorted(set(goodput["total_batch"]))
    assert speedups["chosen"] in speedups["num_replicas"]
    detail = get(client, f"/rounds/{speedups['round']}", RoundDetail)
    assert "trains" in [job["job"] for job in detail["jobs"]]


def test_a_job_of_which_nothing_was_measured(client):
    waits = get(client, "/jobs/waits/model", JobModel)
    assert (waits["accelerators"], waits["goodput"]) == ({}, None)
    get(client, "/jobs/ended/model", JobModel)


def made_record(allocation):
    knowledge = Knowledge("job j")
    for replicas, batch in itertools.product((1, 2), (16, 64)):
        step_s = float(iteration_s(THETA, 1, replicas, batch))
        knowledge.observe("gpu", Configuration(1, replicas, batch), Timing(0.02 + 0.002 * batch, step_s, 100))
    knowledge.refit()
    spec = JobSpec(name="j", batch=LIMITS)
    return JobRecord(spec=spec, sequence=0, knowledge=knowledge, allocation=allocation, noise_scale=500.0)


def test_the_highest_point_of_the_goodput_curve_is_what_the_job_would_choose():
    record = made_record(Allocation.of(("n", 2)))
    told = report("j", num_replicas=2, num_nodes=1, device_batch=128, accum_steps=1, total_batch=512)
    view = job_model(record, told, [Node(name="n", num_slots=4, accelerator="gpu")], None).goodput
    measured = {batch: timing for (_, k, batch), timing in record.knowledge.profile.timings("gpu").items() if k == 2}
    config, value = best_batch(record.knowledge.params["gpu"], 500.0, LIMITS, 1, 2, measured=measured)
    best = int(np.argmax(view.goodput))
    assert view.goodput[best] == pytest.approx(value)
    assert view.total_batch[best] == config.total(2)
    for index, total in enumerate(view.total_batch):
        assert total == 2 * view.device_batch[index] * (view.accum_steps[index] + 1)
    chosen = view.chosen
    assert (chosen.total_batch, chosen.device_batch, chosen.accum_steps) == (512, 128, 1)
    assert chosen.goodput == pytest.approx(chosen.throughput * chosen.efficiency)
    assert chosen.goodput <= value * (1 + 1e-9)


def test_what_a_job_had_last_is_drawn_when_it_holds_nothing():
    record = made_record(Allocation())
    assert job_model(record, None, (), None).goodput is None
    last = job_model(record, report("j", num_replicas=2, accelerator="gpu"), (), None).goodput
    assert (last.num_replicas, last.num_nodes) == (2, 1)


def test_useful_slots_count_from_one():
    decision = JobDecision(
        job="j",
        before=Allocation(),
        after=Allocation(),
        speedup_before=0.0,
        speedup_after=0.0,
        move_factor=1.0,
        option_replicas=np.arange(5),
        option_speedups=np.array([0.0, 0.5, 0.9, math.nan, 1.2]),
    )
    assert useful_slots(decision, 1) == 1.0
    assert useful_slots(decision, 4) == pytest.approx(2.4)
    assert useful_slots(decision, 3) is None
    assert least_useful_slots(decision, 3) == useful_slots(decision, 2) == pytest.approx(1.8)
    assert least_useful_slots(decision, 1) == least_useful_slots(None, 4) == 1.0  # also before it is decided on
    assert useful_slots(decision, 9) is None
    most = dataclasses.replace(decision, option_speedups=np.array([0.0, 0.0, 0.8, 1.0, 1.2]))
    assert useful_slots(most, 2) == 2.0  # one that must have two is reckoned from two
    assert useful_slots(most, 4) == pytest.approx(3.0)


# Rounds ---------------------------------------------------------------------------------------


def test_rounds_are_told_in_words(client):
    rounds = get(client, "/rounds", limit=1000)["rounds"]
    for round_ in rounds:
        decode(RoundSummary, round_, "round")
    words = [sentence for round_ in rounds for sentence in round_["words"]]
    assert any(sentence.startswith("ended starts with 1 slot on a: speedup 0 → ") for sentence in words)
    assert any(sentence.startswith("ended succeeded") for sentence in words)
    assert "nothing changed" in words
    assert all(0 <= round_["gap"] <= 1 for round_ in rounds)


def test_a_round_in_full(client):
    first = get(client, "/rounds", since=0, limit=1)["rounds"][0]
    detail = get(client, f"/rounds/{first['id']}", RoundDetail)
    assert {name: detail[name] for name in first} == first
    assert detail["nodes"] == [{"name": "a", "num_slots": 4, "accelerator": "cpu"}]
    (job,) = detail["jobs"]
    assert (job["job"], job["before"], job["after"]) == ("ended", [], [["a", 1]])
    assert len(job["option_replicas"]) == len(job["option_speedups"])


def test_a_round_there_is_not(client):
    response = client.get("/rounds/999999")
    assert response.status_code == 404
    assert response.json()["error"]["known"]
    assert client.get("/rounds/last").status_code == 422


# Simulations ----------------------------------------------------------------------------------

PAGE = "<!doctype html><title>x</title><script>alert(1)</script>"
FORM = {
    "title": "A & B <b>",
    "command": "pollux compare --seed 1",
    "kind": "compare",
    "summary": [{"workload": "w", "policy": "pollux", "avg_jct_s": 12.5, "missed": None}],
    "html": PAGE,
}


DESCRIBED = {name: value for name, value in FORM.items() if name != "html"} | {"owner": "ada"}
PUBLICATION = decode(Publication, FORM, "body")


def test_a_simulation_is_published_listed_shown_and_forgotten(client, service):
    before = get(client, "/simulations", SimulationList)["simulations"]
    first, second = (client.post("/simulations", json={**FORM, "title": title}) for title in ("one", "two"))
    assert (first.status_code, second.status_code) == (201, 201)
    one, two = first.json(), second.json()
    for made in (one, two):
        decode(PublishedSimulation, made, "simulation")
        assert made.pop("forgotten") == []
    listed = get(client, "/simulations", SimulationList)["simulations"]
    assert listed == [two, one, *before]
    assert get(client, f"/simulations/{one['id']}") == one
    assert one["summary"] == FORM["summary"]
    assert "html" not in one
    shown = httpx.get(f"{service.url}{one['report_url']}")  # no token: an iframe sends none
    assert (shown.status_code, shown.text) == (200, PAGE)
    policy = shown.headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts; default-src 'none';")
    assert "allow-same-origin" not in policy
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    assert client.delete(f"/simulations/{one['id']}").json() == one
    assert get(client, "/simulations")["simulations"] == [two, *before]
    assert httpx.get(f"{service.url}{one['report_url']}").status_code == 404
    gone = client.get(f"/simulations/{one['id']}")
    assert gone.status_code == 404
    assert two["id"] in gone.json()["error"]["known"]


def test_an_id_alone_opens_nothing(client, service):
    made = client.post("/simulations", json=FORM).json()
    for address in (made["id"], f"{made['id']}-", f"{made['id']}-{'A' * 32}", "../pollux.db", "..%2Fsecret", "%00"):
        response = httpx.get(f"{service.url}/reports/{address}")
        assert response.status_code == 404, address
        assert PAGE not in response.text


def test_an_address_of_no_report_reads_no_description(tmp_path, monkeypatch):
    """It needs no token: what it costs must not grow with what was published."""
    simulations = Simulations(tmp_path / "simulations")
    made = simulations.add(PUBLICATION, "ada")
    read: list[str] = []
    monkeypatch.setattr(simulations, "_read", lambda path: read.append(path.stem))
    for address in ("x" * 50, "", f"20260101-000000-abcdef-{'x' * 32}", made.report_url.removeprefix("/reports/")):
        assert simulations.page(address) is None
    assert read == ["20260101-000000-abcdef", made.id]  # what has the form of an id, and that alone
    with pytest.raises(UnknownNameError, match=made.id):
        simulations.one("20260101-000000-abcdef")
    assert len(read) == 3


def test_a_summary_may_be_long_but_not_too_long(tmp_path):
    simulations = Simulations(tmp_path / "simulations")
    rows = [{"workload": f"w{number}", **{f"metric {place}": 1.5 for place in range(12)}} for number in range(1000)]
    simulations.add(dataclasses.replace(PUBLICATION, summary=tuple(rows)), "ada")
    long = ({"note": "x" * MAX_SUMMARY_BYTES},)
    with pytest.raises(InvalidValueError, match="at most 1000000 are allowed: leave out rows or columns"):
        simulations.add(dataclasses.replace(PUBLICATION, summary=long), "ada")
    assert len(simulations.all()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"title": ""},
        {"kind": "guess"},
        {"summary": {}},
        {"summary": [{"a": [1]}]},
        {"html": None},
        {"html": "\ud800"},
        {"extra": 1},
    ],
)
def test_what_is_no_simulation_is_refused(client, change):
    response = client.post("/simulations", content=json.dumps({**FORM, **change}))
    assert response.status_code == 422
    assert response.json()["error"]["type"] == "InvalidValueError"


def test_numbers_that_are_none_are_refused(client):
    text = json.dumps({**FORM, "summary": [{"jct": math.inf}]})
    assert client.post("/simulations", content=text).status_code == 422


def test_a_page_may_be_large_but_not_too_large(client):
    large = client.post("/simulations", json={**FORM, "html": "x" * (MAX_BYTES - 1000)})
    assert large.status_code == 201
    client.delete(f"/simulations/{large.json()['id']}")
    response = client.post("/simulations", json={**FORM, "html": "x" * MAX_BYTES})
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "TooLargeError"


def test_a_file_that_makes_no_sense_is_left_out_and_said_once(tmp_path, caplog):
    simulations = Simulations(tmp_path / "simulations")
    assert simulations.all() == []
    good = simulations.add(PUBLICATION, "ada")
    assert good.forgotten == ()
    good = simulations.one(good.id)
    folder = tmp_path / "simulations"
    described = json.loads((folder / f"{good.id}.json").read_text())
    bad = {
        "20240101-000000-aaaaaa": "{half",
        "20240101-000000-bbbbbb": "[]",
        "20240101-000000-cccccc": json.dumps({**described, "id": "20240101-000000-cccccc", "summary": 3}),
        "20240101-000000-dddddd": json.dumps(described),  # says that it is another
        "notes": "these are mine",
    }
    for name, text in bad.items():
        (folder / f"{name}.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert simulations.all() == [good]
    assert len(caplog.records) == len(bad)
    assert {name for name in bad if any(name in record.getMessage() for record in caplog.records)} == set(bad)
    with pytest.raises(UnknownNameError, match=good.id):
        simulations.one("20240101-000000-aaaaaa")
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.glob(f"{good.id}*"))


@pytest.mark.parametrize(("number", "num_bytes"), [(3, 10**6), (100, 3 * (len(PAGE) + 500))])
def test_of_too_many_the_oldest_are_forgotten(tmp_path, monkeypatch, caplog, number, num_bytes):
    monkeypatch.setattr(simulations_, "KEEP_NUMBER", number)
    monkeypatch.setattr(simulations_, "KEEP_BYTES", num_bytes)
    simulations, folder = Simulations(tmp_path / "simulations"), tmp_path / "simulations"
    old = [made_at(folder, second) for second in range(3)]
    with caplog.at_level(logging.INFO):
        new = simulations.add(PUBLICATION, "ada")
    assert new.forgotten == (old[0],)
    assert old[0] in caplog.text
    assert [one.id for one in simulations.all()] == [new.id, old[2], old[1]]
    assert len(list(folder.iterdir())) == 6  # a page and its description


def made_at(folder, second):
    """One that was published long ago; its id."""
    folder.mkdir(exist_ok=True)
    kept = {**DESCRIBED, "id": f"20240101-00000{second}-aaaaaa", "key": "k" * 32, "at": float(second)}
    (folder / f"{kept['id']}.json").write_text(json.dumps(kept).ljust(480))
    (folder / f"{kept['id']}.html").write_text(PAGE)
    return kept["id"]


def test_what_a_crash_left_behind_goes_with_the_next_one(tmp_path):
    simulations, folder = Simulations(tmp_path / "simulations"), tmp_path / "simulations"
    kept = made_at(folder, 1)
    for name in ("20240101-000000-bbbbbb.html", "20240101-000000-cccccc.html.new", "notes.html"):
        (folder / name).write_text("half")
    new = simulations.add(PUBLICATION, "ada")
    assert new.forgotten == ()  # they were never shown
    assert {path.name for path in folder.iterdir()} == {
        *(f"{id_}.{kind}" for id_ in (kept, new.id) for kind in ("html", "json")),
        "notes.html",  # not ours
    }


def test_only_the_operator_may_publish_and_look(service):
    for method, path in (("GET", "simulations"), ("POST", "simulations"), ("GET", "events"), ("GET", "samples")):
        assert httpx.request(method, f"{service.url}/api/v1/{path}").status_code == 401
