"""/metrics: honest names, bounded series, and a dashboard that asks for what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast_server.alerts import evaluation
from holdfast_server.api import system
from holdfast_server.core.alert_settings import AlertSettings
from holdfast_server.http.metrics import MOST_JOBS, ServerMetrics

DASHBOARD = Path(__file__).resolve().parents[4] / "docs" / "grafana-dashboard.json"
UNITS = ("seconds", "bytes", "ratio", "iterations", "hours", "total", "info", "second")
PLAIN = {
    "holdfast_jobs", "holdfast_jobs_not_exported", "holdfast_alerts_open", "holdfast_listeners",
    "holdfast_database_writes_waiting", "holdfast_job_iteration", "holdfast_job_attempt", "holdfast_job_ranks",
    "holdfast_job_loss", "holdfast_job_status", "holdfast_job_checkpoints_durable",
    "holdfast_job_checkpoints_failing",
}  # fmt: skip
"""Counts and numbers that have no unit."""


@pytest.fixture
def families(client, agent, clock):
    """Of a server that has seen a job, an alert, a refusal and a delivery."""
    agent.start()
    agent.train(10)
    agent.checkpoint()
    client.post("/api/v1/ingest", content=b"x", headers={"Content-Type": "application/json"})
    client.post("/api/v1/ingest", content=b"x", headers={"Content-Type": "text/plain"})
    client.get("/api/v1/jobs/nobody")
    client.app.state.services.metrics.delivered(channel="webhook", taken=True)

    def read():
        return {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}

    read()
    return read


def value(families, name, **labels):
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert found, (name, labels)
    return sum(found)


def test_figures_say_what_they_are_in_their_names(families):
    for name, family in families().items():
        assert family.documentation, name
        if name.startswith(("process_", "python_")):
            continue
        assert name.startswith("holdfast_"), name
        full = f"{name}_total" if family.type == "counter" else name
        assert name in PLAIN or full.endswith(UNITS), name


def test_what_happened_is_counted(families, client):
    seen = families()
    assert value(seen, "holdfast_ingest_batches_total", result="acknowledged") == 3
    assert value(seen, "holdfast_ingest_batches_total", result="refused") == 2
    assert value(seen, "holdfast_ingest_duration_seconds_count") == 3
    assert value(seen, "holdfast_ingest_samples_total") == 10
    assert value(seen, "holdfast_http_requests_total", route="/api/v1/jobs/{job}", status="4xx") == 1
    assert value(seen, "holdfast_http_request_duration_seconds_count", route="/api/v1/ingest") == 5
    assert value(seen, "holdfast_jobs", status="running") == 1
    assert value(seen, "holdfast_job_unsaved_iterations", job="char-gpt") == 0
    assert value(seen, "holdfast_database_size_bytes") > 4096
    assert value(seen, "holdfast_database_writes_waiting") == 0
    assert value(seen, "holdfast_alert_deliveries_total", channel="webhook", result="delivered") == 1
    assert value(seen, "process_resident_memory_bytes") > 0


def test_open_alerts_are_counted_by_severity(families, client, clock):
    clock.now += 130
    evaluation.evaluate(client.app.state.services.database, clock.now)
    seen = families()
    assert value(seen, "holdfast_alerts_open", severity="critical") == 1
    assert value(seen, "holdfast_alerts_open", severity="info") == 0


def test_what_is_asked_for_makes_no_new_series(families, client):
    before = {
        (sample.name, *sample.labels.values()) for family in families().values() for sample in family.samples
    }
    for number in range(20):
        client.get(f"/nowhere/{number}")
        client.get(f"/api/v1/jobs/nobody-{number}")
        client.request(f"MAKE{number}", "/api/v1/jobs")
    after = {(sample.name, *sample.labels.values()) for family in families().values() for sample in family.samples}
    new = {name[1:3] for name in after - before if name[0] == "holdfast_http_requests_total"}
    assert new <= {("GET", "none"), ("other", "none"), ("other", "/api/v1/jobs"), ("GET", "/metrics")}


def test_of_more_jobs_than_the_bound_the_others_are_counted(families, client, fresh_agent, monkeypatch):
    monkeypatch.setattr(system, "MOST_JOBS", 3)
    assert MOST_JOBS == 200
    for number in range(4):
        fresh_agent(client, job=f"other-{number}").start()
    seen = families()
    assert value(seen, "holdfast_jobs_not_exported") == 2
    told = {sample.labels["job"] for sample in seen["holdfast_job_iteration"].samples}
    assert len(told) == 3
    assert sum(sample.value for sample in seen["holdfast_jobs"].samples) == 5


def test_a_long_poll_says_nothing_of_how_quick_the_server_is(families, client):
    client.get("/api/v1/jobs/char-gpt/desired", params={"after": -1, "wait": 1})
    seen = families()
    route = "/api/v1/jobs/{job}/desired"
    assert value(seen, "holdfast_http_requests_total", route=route) == 1
    with pytest.raises(AssertionError):
        value(seen, "holdfast_http_request_duration_seconds_count", route=route)


def test_two_servers_in_one_process_do_not_count_for_each_other():
    first, second = ServerMetrics(), ServerMetrics()
    first.delivered(channel="email", taken=False)
    assert (
        first.registry.get_sample_value(
            "holdfast_alert_deliveries_total", {"channel": "email", "result": "refused"}
        )
        == 1
    )
    assert (
        second.registry.get_sample_value(
            "holdfast_alert_deliveries_total", {"channel": "email", "result": "refused"}
        )
        is None
    )
    assert AlertSettings() is not None


# ---- the dashboard ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(DASHBOARD.read_text())


def queries(dashboard):
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]


def test_the_dashboard_asks_only_for_figures_that_the_server_has(dashboard, families):
    known = {sample.name for family in families().values() for sample in family.samples}
    asked = list(queries(dashboard))
    assert len(asked) > 20
    for title, query in asked:
        named = set(re.findall(r"\b(?:holdfast|process)_[a-z_]+", query))
        assert named, title
        assert named - known - {"holdfast_job_loss"} == set() or named <= _optional(known), title


def _optional(known):
    """Figures of jobs that are told only once they are known."""
    return known | {
        f"holdfast_job_{name}"
        for name in ("overhead_ratio", "budget_ratio", "interval_iterations", "iterations_per_second", "loss")
    }


def test_the_dashboard_is_one_that_grafana_imports(dashboard):
    assert dashboard["id"] is None
    assert dashboard["schemaVersion"] >= 36
    assert {"title", "uid", "panels", "templating", "time", "refresh"} <= dashboard.keys()
    (source,) = (one for one in dashboard["templating"]["list"] if one["type"] == "datasource")
    assert (source["name"], source["query"]) == ("datasource", "prometheus")
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place.keys() == {"x", "y", "w", "h"}
        assert place["x"] + place["w"] <= 24
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert [target["refId"] for target in panel["targets"]] == [*"ABC"][: len(panel["targets"])]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)), "two panels on one place"
