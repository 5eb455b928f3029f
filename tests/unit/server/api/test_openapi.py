"""The OpenAPI document holds: every operation is described, and its examples fit their schemas."""

from __future__ import annotations

import jsonschema_rs
import pytest

from tests.support.endpoint_table import ENDPOINTS


def operations(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


@pytest.fixture
def document(client):
    return client.app.openapi()


def test_every_answer_and_body_under_api_has_an_example_that_fits_its_schema(document):
    found = 0
    for method, path, operation in operations(document):
        if not path.startswith("/api/"):
            continue
        contents = [answer.get("content", {}) for answer in operation["responses"].values()]
        contents.append(operation.get("requestBody", {}).get("content", {}))
        for content in contents:
            for kind, media in content.items():
                if kind == "text/event-stream":
                    continue
                schema = {**media["schema"], "components": document["components"]}
                errors = list(jsonschema_rs.validator_for(schema).iter_errors(media["example"]))
                assert errors == [], (method, path, [str(error) for error in errors])
                found += 1
    assert found > 200


def test_every_operation_says_what_it_is_and_what_it_may_answer(document):
    for method, path, operation in operations(document):
        assert operation["tags"], path
        assert operation.get("description") or operation["summary"], path
        refuses = ENDPOINTS.access[method, path].audience != "public"
        assert ({"401", "403"} <= operation["responses"].keys()) == refuses, (method, path)
        if path.startswith("/api/"):
            assert "503" in operation["responses"], (method, path)
            assert "404" in operation["responses"] or "{" not in path, (method, path)
            assert {"413", "422"} <= operation["responses"].keys() or "requestBody" not in operation, path
        for answer in operation["responses"].values():
            assert answer["description"], (method, path)


def test_the_names_of_operations_are_their_own(document):
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(names) == len(set(names))
