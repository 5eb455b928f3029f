from __future__ import annotations

import re


def test_the_reference_lists_every_route_and_fetches_nothing_from_elsewhere(client):
    page = client.get("/docs").text
    for path in client.app.openapi()["paths"]:
        assert path in page
    assert re.findall(r"(?:src|href)=\"(?!#|/)", page) == []
    assert "<script" not in page
    assert "style=" not in page
    assert client.get("/docs/style.css").headers["content-type"].startswith("text/css")


def test_every_object_that_is_named_is_described(client):
    document = client.app.openapi()
    named = set(re.findall(r"#/components/schemas/([A-Za-z_]+)", str(document)))
    assert {"Batch", "Desired", "JobSummary", "Order", "Timeline"} <= named
    assert named <= set(document["components"]["schemas"])
    assert "HTTPValidationError" not in named


def test_unknown_addresses_and_methods_say_where_to_look(client):
    assert client.get("/api/v1/nothing").json()["error"] == "not_found"
    reply = client.put("/api/v1/jobs")
    assert (reply.status_code, reply.json()["error"]) == (405, "method_not_allowed")
    assert "/docs" in reply.json()["message"]
