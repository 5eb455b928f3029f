"""Whatever is asked in however odd a way is refused in words, and breaks nothing."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import typing
from urllib.parse import quote

import pytest
from fastapi import params

from holdfast_web import _routers

JOB = "/api/v1/jobs/char-gpt"
ODD = [
    "", " ", "9" * 5000, "-1", "-" + "9" * 30, str(2**53 + 1), str(2**63), str(2**64),
    "1e400", "nan", "inf", "-inf",
    "0x10", "1_0", "٣", "²", "é", "\u202f1", "\x00", "\U0001f600", "%", "'", "../..", "true", "null", "[]",
    "000000000010-1", "٣" * 12 + "-1", "9" * 12 + "-" + "9" * 9,
]  # fmt: skip
ODD_JSON = ["9" * 400, "1e999", "-1", "NaN", '"nan"', '"\\ud800"', '"\\u0000"', '""', "[]", "{}", "true", "null"]
POINT = "000000000010-1"
PAGE = {"Accept": "text/html"}
SWEEPS = pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)])
"""Every so manieth value of each field; with 5, no two pages leave out the same ones."""


@pytest.fixture
def job(agent):
    agent.start()
    agent.train(10)
    agent.checkpoint()
    return agent


def fields_of(endpoint):
    """Names of the form fields of a page's route, and of what it depends on."""
    for name, parameter in inspect.signature(endpoint, eval_str=True).parameters.items():
        for mark in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(mark, params.Form):
                yield mark.alias or name
            elif isinstance(mark, params.Depends):
                dependency = mark.dependency or typing.get_args(parameter.annotation)[0]
                if inspect.isfunction(dependency) or dataclasses.is_dataclass(dependency):
                    yield from fields_of(dependency)


FORMS = {
    route.path: sorted(fields_of(route.endpoint))
    for router in _routers()
    for route in router.endpoints
    if route.method == "POST"
}
QUERIES = {
    "/": ["search", "owner", "label", "archived", "sort", "hide", "page"],
    "/compare": ["job", "metric", "x", "from", "to", "smooth", "log"],
    "/report": ["since", "project"],
    "/account": ["since", "by", "project", "owner", "label", "store"],
    "/fleet/account": ["search", "owner", "label", "archived", "sort", "page"],
    "/jobs/char-gpt/report": ["since"],
    "/jobs/char-gpt/attempts/1": ["against"],
    "/jobs/char-gpt/annotations/new": ["iteration"],
    "/fleet/live": ["search"],
    "/login": ["next"],
    "/jobs/char-gpt": ["points"],
    "/jobs/char-gpt/live": ["points"],
    "/jobs/char-gpt/points": ["points"],
    "/jobs/char-gpt/preview": ["budget", "every"],
    "/jobs/char-gpt/restore": ["checkpoint", "iteration"],
    f"/jobs/char-gpt/checkpoints/{POINT}": ["with", "tensors", "fork"],
}


def api_queries(client):
    for path, methods in client.app.openapi()["paths"].items():
        names = [one["name"] for one in methods.get("get", {}).get("parameters", []) if one["in"] == "query"]
        if names and not path.endswith("/stream"):
            yield path.replace("{job}", "char-gpt").replace("{checkpoint}", POINT), names


def test_every_query_is_tried(client):
    asked = dict(api_queries(client)) | QUERIES
    assert {name for names in asked.values() for name in names} >= {
        "after", "wait", "from", "to", "points", "limit", "before", "checkpoint", "iteration", "budget", "every",
    }  # fmt: skip
    assert {name for names in FORMS.values() for name in names} == {
        "action", "admin", "against", "alert", "all_matching", "archived", "back", "batches", "budget",
        "checkpoint", "code", "data", "degraded", "edit", "enabled", "every", "expires", "fallback",
        "for_seconds", "group", "hide", "hold", "holds", "iteration", "job", "jobs", "key", "kind", "label",
        "labels", "least_severity", "limit", "loader", "max_unsaved_work", "mode", "name", "next",
        "on_trouble", "owner", "password", "paused", "person", "pinned", "policy", "present", "project",
        "protected", "retention", "role", "runbook", "scopes", "script", "search", "seconds", "severity",
        "size", "skip_to", "sort", "status", "target", "text", "token", "value", "version", "view", "weight",
        "window", "write_budget", "writers",
    }  # fmt: skip


@SWEEPS
def test_no_odd_query_breaks_the_server(job, client, step):
    for path, names in [*api_queries(client), *QUERIES.items()]:
        for name, value in list(itertools.product(names, ODD))[len(path) % step :: step]:
            reply = client.get(path, params={name: value}, headers=PAGE, follow_redirects=False)
            assert reply.status_code < 500, (path, name, value)


@SWEEPS
def test_no_odd_form_breaks_the_server(job, client, step):
    usual = {"version": "0", "budget": "3", "every": "9", "paused": "true", "key": "k", "checkpoint": POINT}
    usual |= {
        "name": "spikes",
        "kind": "loss_spike",
        "limit": "6",
        "window": "30",
        "for_seconds": "0",
        "jobs": "*",
    }
    usual |= {"severity": "warning", "jobs": "*"}
    named = {"job": "char-gpt", "checkpoint": POINT, "project": "default", "annotation": "1", "alert": "1"}
    named |= {"approval": "1"}
    for path, names in FORMS.items():
        address = re.sub(r"{(\w+)(:\w+)?}", lambda match: named.get(match[1], "x"), path)
        for name, value in list(itertools.product(names, ODD))[len(path) % step :: step]:
            reply = client.post(address, data=usual | {name: value}, headers=PAGE, follow_redirects=False)
            assert reply.status_code < 500, (path, name, value)


def test_no_odd_json_breaks_the_server(job, client):
    fields = ("iteration", "checkpoint", "key", "budget", "policy", "every", "paused", "retention")
    fields += ("checkpoint_request", "probe_request", "protected")
    for field, value in itertools.product(fields, ODD_JSON):
        body = f'{{"{field}": {value}}}'.encode()
        edit = client.patch(f"{JOB}/desired", content=body, headers={"If-Match": '"0"'})
        assert client.post(f"{JOB}/restores", content=body).status_code < 500, body
        assert client.put(f"{JOB}/protection", content=body).status_code < 500, body
        assert edit.status_code < 500, body


@pytest.mark.parametrize("field", ["samples_seconds", "fine_seconds", "reports_seconds", "samples_bytes"])
def test_no_odd_retention_breaks_the_server(client, field):
    for value in [*ODD_JSON, str(2**63 - 1), str(2**63), "1e308", "5e-324"]:
        reply = client.patch("/api/v1/projects/default/retention", content=f'{{"{field}": {value}}}'.encode())
        assert reply.status_code == 200 if value == "null" else reply.status_code in (400, 422), value


def test_no_odd_path_or_header_breaks_the_server(job, client):
    for value in filter(str.strip, ODD):
        for path in ("/jobs/{}", "/api/v1/jobs/{}", f"{JOB}/restores/{{}}", "/api/v1/jobs/{}/desired"):
            assert client.get(path.format(quote(value, safe="")), headers=PAGE).status_code < 500, (path, value)
        for path in (f"{JOB}/training/{{}}", f"{JOB}/approvals/{{}}/approve", f"{JOB}/approvals/{{}}/decline"):
            assert client.post(path.format(quote(value, safe=""))).status_code < 500, (path, value)
        for header in ("If-Match", "Origin", "Host", "Cookie", "Authorization", "Sec-Fetch-Site"):
            reply = client.patch(f"{JOB}/desired", json={"budget": 0.1}, headers={header: value.encode()})
            assert reply.status_code < 500, (header, value)
