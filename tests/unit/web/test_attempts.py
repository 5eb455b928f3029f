"""The attempts of a job: their list, and the configuration of each against another's."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from holdfast.protocol.tracebacks import exception_in
from holdfast.protocol.wire import AttemptFinished, ConfigurationReport, LineageStarted, Origin, OutputReport
from tests.support.clock import FakeClock
from tests.support.fake_agent import FakeAgent, over_client

JOB = "/jobs/char-gpt"
HTMX = {"HX-Request": "true"}


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def report(agent: FakeAgent, values: dict[str, str], **environment: str) -> None:
    for section, found in (("configuration", values), ("environment", environment)):
        agent.events.append(ConfigurationReport(at=agent.at, section=section, values=found))
    agent.send()


@pytest.fixture
def two_attempts(agent: FakeAgent, clock: FakeClock) -> FakeAgent:
    """A job that was restarted with another learning rate, and with another torch."""
    report(agent, {"lr": "0.001", "model.depth": "12"}, torch="2.8.0", python="3.12.3")
    agent.crash(12)
    report(agent, {"lr": "0.0003", "model.depth": "12", "clip": "1.0"}, torch="2.9.0", python="3.12.3")
    clock.now = agent.at
    return agent


def test_the_panel_lists_the_attempts_and_how_they_ended(
    client: TestClient, two_attempts: FakeAgent, clock: FakeClock
) -> None:
    assert "<bdi>running</bdi>" in client.get(f"{JOB}/attempts", headers=HTMX).text
    clock.now += 3600  # it no longer reports, so its state is unknown
    part = client.get(f"{JOB}/attempts", headers=HTMX).text
    assert "<html" not in part
    rows = re.findall(r'<a href="/jobs/char-gpt/attempts/(\d)">.*?<td data-label="End"><bdi>(.*?)</bdi>', part)
    assert rows == [("2", "not reported"), ("1", "killed by SIGKILL")]
    assert "<html" in client.get(f"{JOB}/attempts").text


def test_an_attempt_is_compared_with_the_one_before_it_and_shows_what_differs_first(
    client: TestClient, two_attempts: FakeAgent
) -> None:
    page = client.get(f"{JOB}/attempts/2").text
    text = words(page)
    assert "3 differences from attempt 1" in text
    assert text.index("lr 0.001 0.0003") < text.index("Configuration: 1 value that is the same")
    assert "clip none 1.0" in text
    assert "torch environment 2.8.0 2.9.0" in text
    assert re.search(r'<details class="shared-values">.*?model.depth', page), "what is equal is collapsed"


def test_without_a_comparison_all_values_are_shown(client: TestClient, two_attempts: FakeAgent) -> None:
    page = client.get(f"{JOB}/attempts/2?against=none").text
    assert "difference" not in words(page)
    assert re.search(r'<details class="shared-values" open>.*?lr.*?0.0003', page)


def test_a_fork_is_compared_with_the_attempt_that_wrote_the_copied_checkpoint(
    client: TestClient, two_attempts: FakeAgent, clock: FakeClock
) -> None:
    point = client.get("/api/v1/jobs/char-gpt/checkpoints").json()["checkpoints"][0]["id"]
    fork = FakeAgent(over_client(client), job="fork", started_at=clock.now)
    origin = Origin(job="char-gpt", checkpoint=point, digest="00")
    begins = {"iteration": int(point[:12]), "lineage": 1}
    fork.events.append(LineageStarted(at=fork.at, parent=point, origin=origin, **begins))
    fork.events.append(AttemptFinished(at=fork.at, reason="forked", **begins))
    fork.send()
    fork.attempt = 2
    fork.start()
    report(fork, {"lr": "0.01", "model.depth": "12", "clip": "1.0"}, torch="2.9.0", python="3.12.3")
    head = client.get("/jobs/fork").text
    link = re.search(r'<a href="([^"]+)">differences</a>', head)
    assert link, "the head of the fork's page links to the differences"
    page = client.get(link[1]).text
    text = words(page)
    assert link[1].endswith("#configuration")
    assert "3 differences from attempt 1 of char-gpt" in text
    assert '<th scope="col">char-gpt, attempt 1</th><th scope="col">fork, attempt 2</th>' in page
    assert "lr 0.001 0.01" in text
    assert "attempt 1" not in words(client.get("/jobs/fork/attempts").text).lower(), "the copy is no attempt"


def test_an_attempt_without_a_report_says_how_to_make_one(client: TestClient, agent: FakeAgent) -> None:
    page = client.get(f"{JOB}/attempts/1").text
    assert "This attempt has reported no configuration" in page


def test_an_unknown_attempt_is_not_found(client: TestClient, agent: FakeAgent) -> None:
    assert client.get(f"{JOB}/attempts/9").status_code == 404
    assert client.get(f"{JOB}/attempts/1?against=9").status_code == 404
    assert client.get(f"{JOB}/attempts/1?against=origin").status_code == 404
    assert client.get(f"{JOB}/attempts/1?against=x").status_code == 422


def crashed(agent: FakeAgent, lines: list[str], *, first: int = 0) -> None:
    agent.events.append(OutputReport(at=agent.at, first=first, lines=lines))
    agent.events.append(AttemptFinished(at=agent.at, iteration=agent.iteration, lineage=1, reason="RuntimeError"))
    agent.send()


def test_a_failed_job_shows_the_exception_first_and_the_page_of_the_attempt_all_output(
    client: TestClient, agent: FakeAgent
) -> None:
    lines = [
        "step 1",
        "Traceback (most recent call last):",
        '  File "t.py", line 1',
        "RuntimeError: <boom>",
        "bye",
    ]
    crashed(agent, lines)
    page = client.get(JOB).text
    assert re.search(r'<dt>Reason</dt><dd><span class="exception"><code>RuntimeError: &lt;boom&gt;</code>', page)
    assert page.index("RuntimeError: &lt;boom&gt;") < page.index("Traceback (most recent")
    full = client.get(f"{JOB}/attempts/1").text
    assert '<mark id="exception">RuntimeError: &lt;boom&gt;</mark>' in full
    assert "The last 5 lines" in words(full)
    part = client.get(f"{JOB}/attempts/1/output").text
    assert "<html" not in part
    assert part in full, "the page refreshes this part"


def test_only_the_last_lines_are_kept(client: TestClient, agent: FakeAgent) -> None:
    for start in range(0, 3_000, 300):
        agent.events.append(
            OutputReport(at=agent.at, first=start, lines=[f"line {n}" for n in range(start, start + 300)])
        )
    agent.send()
    found = client.get("/api/v1/jobs/char-gpt/attempts/1/output").json()
    assert (found["first"], found["lines"][0], found["lines"][-1]) == (2000, "line 2000", "line 2999")
    assert len(found["lines"]) == 1000


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], None),
        (["no error"], None),
        (["Traceback (most recent call last):", "  x", "torch.OutOfMemoryError: CUDA"], 2),
        (["Traceback (most recent call last):", "  x", "KeyboardInterrupt"], 2),
        (
            ["Traceback (most recent call last):", "  x", "KeyError: 1", "", "During handling of …", "",
             "Traceback (most recent call last):", "  y", "ValueError: 2", "after"],
            8,
        ),
        (
            ["[rank1]: Traceback (most recent call last):", "[rank0]: step", "[rank1]:   File",
             "[rank1]: ValueError: x", "Traceback (most recent call last):", "  z",
             "torch.distributed.elastic.ChildFailedError: "],
            3,
        ),
    ],
)  # fmt: skip
def test_the_exception_is_that_of_the_last_traceback_before_the_launchers(
    lines: list[str], found: int | None
) -> None:
    assert exception_in(lines) == found
