"""The configuration and output of attempts, as agents and supervisors report them, on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from holdfast.protocol.wire import (
    MAX_CONFIGURATION_VALUE,
    MAX_OUTPUT_CHARACTERS,
    MAX_OUTPUT_LINES,
    OUTPUT_RANK,
    ConfigurationReport,
    OutputReport,
)
from holdfast_server import models
from holdfast_server.records.attempt_reports import lines_of

ATTEMPTS = "/api/v1/jobs/char-gpt/attempts"


def configuration(values, section="configuration"):
    return ConfigurationReport(at=1.0, section=section, values=values)


def test_a_section_replaces_the_one_before_it_and_leaves_the_other(agent, client):
    agent.start()
    agent.say(configuration({"lr": "1", "clip": "2"}), configuration({"torch": "2"}, "environment"))
    agent.say(configuration({"lr": "3"}))
    found = client.get(f"{ATTEMPTS}/1/configuration").json()
    assert (found["configuration"], found["environment"]) == ({"lr": "3"}, {"torch": "2"})


def test_attempts_are_compared_by_number(agent, client):
    agent.start()
    agent.say(configuration({"lr": "1", "same": "x"}))
    second = agent.restarted()
    second.start()
    second.say(configuration({"lr": "3", "same": "x"}))
    assert [row["attempt"] for row in client.get(ATTEMPTS).json()["attempts"]] == [2, 1]
    found = client.get(f"{ATTEMPTS}/2/configuration?against=1").json()
    assert found["differences"] == [{"section": "configuration", "name": "lr", "before": "1", "after": "3"}]
    assert client.get(f"{ATTEMPTS}/2/configuration?against=7").json()["error"] == "unknown_attempt"
    assert client.get(f"{ATTEMPTS}/2/configuration?against=-1").status_code == 422


def test_output_is_kept_up_to_its_last_lines_also_where_some_are_missing(agent, client, fresh_agent):
    agent.start()
    relay = fresh_agent(client, rank=OUTPUT_RANK)
    relay.say(OutputReport(at=1.0, first=0, lines=["a", "b"]))
    relay.say(OutputReport(at=1.0, first=5, lines=["f"]))
    assert client.get(f"{ATTEMPTS}/1/output").json()["lines"] == ["a", "b", "f"]
    relay.say(OutputReport(at=1.0, first=1002, lines=["later"]))
    found = client.get(f"{ATTEMPTS}/1/output").json()
    assert (found["first"], found["lines"]) == (1001, ["f", "later"])


def stored(client):
    """Return the number of stored reports of output, and of their lines."""

    def read():
        with client.app.state.services.database.read() as session:
            contents = list(session.scalars(select(models.OutputRecord.contents)))
            return len(contents), sum(len(lines_of(each)) for each in contents)

    return read()


@pytest.mark.parametrize(
    "numbers",
    [
        range(2000, 0, -1),
        range(5000, 0, -7),
        [7] * 50,
        range(0, 2000, 13),
        [2**50, 5, 2**40, *range(2**50, 0, -(2**45))],
    ],
    ids=["falling", "falling with gaps", "repeated", "overlapping", "jumping"],
)
def test_output_is_bounded_whatever_numbers_its_reports_have(agent, client, numbers):
    agent.start()
    reports = [OutputReport(at=1.0, first=first, lines=["x" * 20] * 20) for first in numbers]
    for start in range(0, len(reports), 500):
        agent.say(*reports[start : start + 500])
    count, lines = stored(client)
    assert count <= MAX_OUTPUT_LINES
    assert lines <= 2 * MAX_OUTPUT_LINES
    found = client.get(f"{ATTEMPTS}/1/output").json()
    assert 20 <= len(found["lines"]) <= MAX_OUTPUT_LINES
    assert min(numbers) <= found["first"] <= max(numbers)


def test_a_report_that_is_repeated_or_longer_replaces_the_one_before(agent, client):
    agent.start()
    agent.say(
        OutputReport(at=1.0, first=0, lines=["a", "b"]), OutputReport(at=1.0, first=0, lines=["a", "b", "c"])
    )
    agent.say(OutputReport(at=1.0, first=3, lines=["d"]))
    agent.say(OutputReport(at=1.0, first=3, lines=["d"]))
    found = client.get(f"{ATTEMPTS}/1/output").json()
    assert (found["first"], found["lines"]) == (0, ["a", "b", "c", "d"])


def test_what_is_too_long_is_cut(agent, client):
    agent.start()
    agent.say(configuration({"x": "y" * 5000}), OutputReport(at=1.0, first=0, lines=["z" * 5000]))
    assert len(client.get(f"{ATTEMPTS}/1/configuration").json()["configuration"]["x"]) == MAX_CONFIGURATION_VALUE
    assert len(client.get(f"{ATTEMPTS}/1/output").json()["lines"][0]) == MAX_OUTPUT_CHARACTERS


def test_reports_of_output_are_no_sign_of_life(agent, client, fresh_agent):
    agent.start()
    before = client.get("/api/v1/jobs/char-gpt").json()["iteration"]
    fresh_agent(client, rank=OUTPUT_RANK, iteration=99).say(OutputReport(at=1.0, first=0, lines=["a"]))
    assert client.get("/api/v1/jobs/char-gpt").json()["iteration"] == before
