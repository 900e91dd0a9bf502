"""The dashboard, alerts and scrape configuration in deploy/grafana name what the server exports, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pollux.api.cluster import NodeReading, SlotReading
from pollux.api.report import Report
from pollux.api.usage import UsageRow
from pollux.scheduler.knowledge import Knowledge
from pollux.scheduler.lifecycle import JobState
from pollux.scheduler.node_types import Prices
from pollux.scheduler.record import JobRecord, RoundRecord
from pollux.server.present.gauges import JOB_GAUGES, Measured
from pollux.server.present.metrics import Metrics
from pollux.types import Allocation, Explanation, JobSpec, Node, Plan
from tests.pages import ROOT
from tests.promql import named
from tests.reports import report_fields

yaml = pytest.importorskip("yaml")

GRAFANA = ROOT / "deploy" / "grafana"
TARGET_LABELS = {"instance", "job"}  # Prometheus adds them
OWN_METRICS = {"up": set()}  # of Prometheus itself

# Exported, and on no panel; a reason stands beside each.
NOT_SHOWN: dict[str, str] = {
    "pollux_usage_slot_seconds_total": "for bills, not for watching: pollux usage has tables",
    "pollux_usage_goodput_seconds_total": "for bills, not for watching: pollux usage has tables",
}


READING = NodeReading(
    at=1.0, cpu=0.5, memory_bytes=1, memory_total_bytes=2, disk_bytes=1, disk_total_bytes=2, received_bytes_per_s=1.0,
    sent_bytes_per_s=1.0, slots=(
        SlotReading(slot=0, gpu="GPU-a", utilisation=0.5, memory_bytes=1, memory_total_bytes=2, power_w=100.0,
                    temperature_c=40.0),
    ),
)  # fmt: skip


def exported() -> dict[str, set[str]]:
    """The name of every sample there can be, with its labels: of metrics to which everything has happened once."""
    metrics = Metrics()
    record = JobRecord(spec=JobSpec(name="one"), sequence=0, knowledge=Knowledge("one"))
    record.allocation, record.generation = Allocation.of(("a", 1)), 1
    for state in (JobState.STARTING, JobState.RUNNING):
        record.move(state, 1.0, "")
        metrics.saw_job(record)
    explanation = Explanation(fitness_before=1.0, fitness=1.0, upper_bound=2.0)
    plan = Plan(allocations={}, explanation=explanation)
    decision = RoundRecord(number=1, at=1.0, trigger="submit", plan=plan, num_jobs=1, num_slots=1, decision_s=0.1)
    metrics.saw_round(decision)
    report = Report(job="one", **report_fields())
    seen = Measured(
        is_ready=True,
        nodes=[Node(name="a", num_slots=1)],
        jobs=[(record, (1.0, report))],
        num_jobs={"running": 1},
        node_s={"gpu": 1.0},
        prices=Prices(any=1.0),
        num_wanted_nodes=1,
        usage=[
            UsageRow(
                month=None, day=None, team="t", user="u", job=None, slot_hours=1, gpu_hours=0, goodput_hours=1, cost=0
            )
        ],
    )
    seen = replace(seen, readings={"a": READING}, energy_j=1.0)
    metrics.watch(lambda: seen)
    metrics.answered("GET", "/healthz", 200, 0.1)
    metrics.open_answers["/healthz"] += 1
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        assert family.samples, f"{family.name} has no samples here"
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


EXPORTED = exported()
FAMILIES = {re.sub(r"_(bucket|count|sum)$", "", name) for name in EXPORTED}


def dashboard() -> dict[str, Any]:
    return dict(json.loads((GRAFANA / "pollux.json").read_text()))


def panels() -> Iterator[dict[str, Any]]:
    for panel in dashboard()["panels"]:
        yield panel
        yield from panel.get("panels", ())


def queries() -> Iterator[tuple[str, str]]:
    """Where they stand, and what they are."""
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"]
    for panel in panels():
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load((GRAFANA / "pollux-alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


EXPRESSIONS = [*queries(), *((rule["alert"], rule["expr"]) for rule in alerts())]


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=lambda value: str(value)[:40])
def test_every_query_names_what_is_exported(where, expression):
    found = named(expression)
    assert found.metrics, f"{where}: no metric in {expression!r}"
    known = EXPORTED | OWN_METRICS
    there: set[str] = set()
    for metric, labels in found.metrics.items():
        assert metric in known, f"{where}: {metric} is not exported"
        assert labels <= known[metric] | TARGET_LABELS, f"{where}: {metric} has no such labels: {labels}"
        there |= known[metric]
    assert found.grouped <= there | TARGET_LABELS, f"{where}: no such labels: {found.grouped}"


def test_every_metric_is_shown_or_left_out_for_a_reason():
    shown = {re.sub(r"_(bucket|count|sum)$", "", metric) for _, query in queries() for metric in named(query).metrics}
    assert FAMILIES - shown == set(NOT_SHOWN)
    assert {gauge.name for gauge in JOB_GAUGES} <= FAMILIES


def test_legends_name_labels_that_are_left():
    for panel in panels():
        for target in panel.get("targets", ()):
            found = named(target["expr"])
            there = {label for metric in found.metrics for label in EXPORTED[metric]} | TARGET_LABELS
            if re.search(r"\b(sum|max|min)\b", target["expr"]):
                there = found.grouped
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in there, f"{panel['title']}: {label} in the legend of {target['expr']}"


def test_the_dashboard_is_one_that_grafana_takes():
    document = dashboard()
    assert document["schemaVersion"] >= 39 and document["uid"] == "pollux"
    assert [variable["name"] for variable in document["templating"]["list"]][:3] == ["datasource", "instance", "job"]
    rows = [panel["title"] for panel in document["panels"] if panel["type"] == "row"]
    assert rows == ["Cluster", "Jobs", "Decisions", "Health", "Devices"]
    assert len({panel["id"] for panel in panels()}) == len(list(panels()))
    for panel in panels():
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith(".") and panel["targets"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"].get("unit") or panel["options"]["yAxis"]["unit"]
        if panel["type"] == "timeseries":
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_panels_do_not_overlap_and_fit_the_width():
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_variables_that_are_used_are_there():
    names = {variable["name"] for variable in dashboard()["templating"]["list"]}
    for where, query in queries():
        assert set(re.findall(r"\$(\w+)", query)) <= names | {"__rate_interval", "__range"}, where


def test_prometheus_is_told_what_it_needs():
    document = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
    (scrape,) = document["scrape_configs"]
    assert (scrape["job_name"], scrape["metrics_path"]) == ("pollux", "/metrics")
    assert scrape["authorization"]["credentials_file"].startswith("/")
    assert scrape["static_configs"][0]["targets"] == ["SERVER:7077"]
    assert all((GRAFANA / name).is_file() for name in document["rule_files"])


def test_grafana_finds_both():
    provisioned = {
        path.parent.name: yaml.safe_load(path.read_text()) for path in (GRAFANA / "provisioning").rglob("*.yaml")
    }
    assert set(provisioned) == {"datasources", "dashboards"}
    assert [source["type"] for source in provisioned["datasources"]["datasources"]] == ["prometheus"]
    assert provisioned["dashboards"]["providers"][0]["options"]["path"].startswith("/")
    assert all(document["apiVersion"] == 1 for document in provisioned.values())


@pytest.mark.parametrize(
    "wrong",
    ["sum(", "rate pollux_x", 'pollux_x{a="b"', "pollux_x{a}", "sum by pollux_x", "pollux_x ? 1", "sum by (1) (x)"],
)
def test_what_is_no_query_is_not_taken_for_one(wrong):
    with pytest.raises((ValueError, IndexError)):
        named(wrong)


def test_names_are_told_apart():
    found = named('sum by (le) (rate(pollux_x_bucket{a="} b", c!~"d"}[5m])) / on (e) pollux_y > 1e3')
    assert found.metrics == {"pollux_x_bucket": {"a", "c"}, "pollux_y": set()}
    assert found.grouped == {"le", "e"}


def test_every_metric_is_explained():
    page = (ROOT / "docs" / "metrics.md").read_text()
    explained = {name for line in page.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line)}
    assert {name for name in explained if name.startswith(("pollux_", "process_"))} == FAMILIES
    labels = {label for name in FAMILIES for label in EXPORTED.get(name, ())}
    assert labels <= explained
