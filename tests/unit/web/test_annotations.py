"""The dialogs of annotations, without scripts, and the list on the job's page."""

from __future__ import annotations

from starlette.testclient import TestClient

from tests.support.fake_agent import FakeAgent

JOB = "/jobs/char-gpt"
NOTES = "/api/v1/jobs/char-gpt/annotations"


def test_an_annotation_is_added_edited_and_deleted_by_forms(client: TestClient, agent: FakeAgent) -> None:
    dialog = client.get(f"{JOB}/annotations/new?iteration=120").text
    assert 'value="120"' in dialog
    done = client.post(f"{JOB}/annotations", data={"iteration": "120", "text": "<b>new data</b>"})
    assert (done.status_code, done.headers["location"]) == (303, f"{JOB}#annotations")
    assert "&lt;b&gt;new data&lt;/b&gt;" in client.get(JOB).text
    (row,) = client.get(NOTES).json()["annotations"]
    address = f"{JOB}/annotations/{row['id']}"
    assert "Edit annotation of iteration 120" in client.get(address).text
    assert client.post(address, data={"text": "other data"}).status_code == 303
    assert "other data" in client.get(f"{JOB}/live").text
    assert client.post(f"{address}/delete").status_code == 303
    assert "No annotations" in client.get(JOB).text
    assert client.get(address).status_code == 404


def test_a_refused_annotation_keeps_the_input_and_names_the_reason(client: TestClient, agent: FakeAgent) -> None:
    refused = client.post(f"{JOB}/annotations", data={"iteration": "9999", "text": "from tomorrow"})
    assert refused.status_code == 422
    for part in ('value="9999"', 'value="from tomorrow"', "iteration 9,999 is not finished"):
        assert part in refused.text


def test_with_scripts_the_answer_refreshes_the_page_and_closes_the_dialog(
    client: TestClient, agent: FakeAgent
) -> None:
    done = client.post(
        f"{JOB}/annotations", data={"iteration": "120", "text": "new data"}, headers={"HX-Request": "true"}
    )
    assert done.headers["HX-Trigger"] == "holdfast:annotated"
    assert 'hx-target="#history"' in done.text
    assert "new data" in done.text
