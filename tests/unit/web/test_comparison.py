from __future__ import annotations

import gzip
import math
import re
from itertools import pairwise

import pytest
from starlette.testclient import TestClient

from holdfast.protocol.ids import checkpoint_id
from holdfast.protocol.wire import ConfigurationReport, LineageStarted, Origin
from holdfast_server.queries.comparison import MOST_JOBS
from holdfast_web.comparison import plot
from tests.support.fake_agent import FakeAgent, over_client
from tests.support.web_fixtures import NOW

POINT = checkpoint_id(400, 1)


@pytest.fixture
def fork(client: TestClient, agent: FakeAgent) -> FakeAgent:
    """A fork of `agent` at iteration 400, which has trained 200 iterations and went back by 100."""
    fork = FakeAgent(over_client(client), job="fork", started_at=NOW - 60, iteration=400)
    origin = Origin(job=agent.job, checkpoint=POINT, digest="0" * 64)
    fork.events.append(LineageStarted(at=fork.at, lineage=1, iteration=400, parent=POINT, origin=origin))
    fork.attempt = 2
    fork.start()
    fork.train(200)
    fork.send()
    fork.iteration, fork.lineage = 500, 2
    fork.events.append(LineageStarted(at=fork.at, lineage=2, iteration=500, parent=checkpoint_id(500, 1)))
    fork.train(50)
    fork.send()
    return fork


def curves(client: TestClient, query: str) -> dict[tuple[str, str], dict[str, list[float]]]:
    answer = client.get(f"/api/v1/compare?{query}")
    assert answer.status_code == 200, answer.text
    return {(job["name"], each["metric"]): each for job in answer.json()["jobs"] for each in job["curves"]}


def test_a_fork_continues_its_origin_on_the_axis_of_iterations(client: TestClient, fork: FakeAgent) -> None:
    found = curves(client, "job=char-gpt&job=fork")
    assert found["char-gpt", "loss"]["x"][-1] == 400
    x = found["fork", "loss"]["x"]
    assert (x[0], x[-1]) == (401, 550)
    assert x == sorted(x)


def test_one_lineage_alone_is_shown_to_its_end(client: TestClient, fork: FakeAgent) -> None:
    found = curves(client, "job=fork&job=fork:1&job=fork:2")
    assert found["fork:1", "loss"]["x"][-1] == 600
    assert (found["fork:2", "loss"]["x"][0], found["fork:2", "loss"]["x"][-1]) == (501, 550)
    assert client.get("/api/v1/compare?job=fork:7").status_code == 422


def test_jobs_are_aligned_by_the_time_since_their_start(client: TestClient, fork: FakeAgent) -> None:
    for job in ("char-gpt", "fork"):
        found = curves(client, f"job={job}&x=elapsed")[job, "loss"]
        assert 0 <= found["x"][0] < 5
    by_day = curves(client, "job=fork&x=time")["fork", "loss"]
    assert by_day["x"][0] > NOW - 100
    part = curves(client, "job=char-gpt&x=elapsed&from=10&to=20")["char-gpt", "loss"]["x"]
    assert 8 < part[0] < part[-1] < 22


def test_curves_have_about_as_many_points_as_requested(client: TestClient, fork: FakeAgent) -> None:
    for axis in ("iteration", "elapsed"):
        found = curves(client, f"job=char-gpt&job=fork&points=20&x={axis}")
        assert all(5 <= len(each["x"]) <= 40 for each in found.values())


def test_all_curves_have_one_width_of_buckets(client: TestClient, fork: FakeAgent) -> None:
    found = curves(client, "job=char-gpt&job=fork:1&points=100")
    steps = {later - earlier for each in found.values() for earlier, later in pairwise(each["x"][1:-1])}
    assert steps == {8}
    (alone,) = curves(client, "job=fork&points=300").values()
    assert alone["x"] == list(range(401, 551))
    assert "each point: mean of 2 iterations" in client.get("/compare?job=char-gpt&job=fork").text


def test_by_time_a_job_of_few_iterations_keeps_points(client: TestClient) -> None:
    for name, iterations in (("fast", 2000), ("slow", 30)):
        agent = FakeAgent(over_client(client), job=name, started_at=NOW - 900)
        agent.start()
        agent.train(iterations)
        agent.send()
    found = curves(client, "job=fast&job=slow&points=40&x=elapsed")
    assert len(found["slow", "loss"]["x"]) >= 2


def report_losses(client: TestClient, losses: list[float]) -> None:
    agent = FakeAgent(over_client(client), job="losses", started_at=NOW - 60)
    agent.start()
    agent.train(len(losses))
    agent.samples.metrics = {"loss": losses}
    agent.send()


def test_the_lowest_value_is_of_one_iteration_however_wide_the_buckets_are(client: TestClient) -> None:
    report_losses(client, [2.0 + number % 5 if number != 500 else 0.0393 for number in range(1, 1001)])
    for points in (20, 1000):
        (found,) = curves(client, f"job=losses&points={points}").values()
        assert found["lowest"] == 0.0393
    assert ">0.0393</td>" in client.get("/compare?job=losses").text


def test_a_curve_that_ends_with_nan_names_the_first_iteration_of_it(client: TestClient) -> None:
    report_losses(client, [2.0] * 128 + [math.nan] * 72)
    (found,) = curves(client, "job=losses").values()
    assert (found["newest"], found["not_finite_from"], found["lowest"]) == ("nan", 129, 2.0)
    assert "not finite from 129" in client.get("/compare?job=losses").text


def test_a_metric_that_is_measured_now_and_then_did_not_become_nan(client: TestClient) -> None:
    report_losses(client, [2.0 if number % 10 == 0 else math.nan for number in range(1, 106)])
    (found,) = curves(client, "job=losses").values()
    assert found["not_finite_from"] is None


def test_several_metrics_are_compared_and_a_missing_one_is_left_out(client: TestClient, agent: FakeAgent) -> None:
    found = curves(client, "job=char-gpt&metric=loss&metric=grad_norm&metric=nothing")
    assert set(found) == {("char-gpt", "loss"), ("char-gpt", "grad_norm")}


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("job=unknown", 404),
        ("&".join(f"job=j{number}" for number in range(MOST_JOBS + 1)), 422),
        ("job=char-gpt&x=weight", 422),
        ("job=char-gpt&smooth=1", 422),
        ("job=char-gpt&from=x", 422),
    ],
)
def test_a_comparison_that_cannot_be_is_refused(
    client: TestClient, agent: FakeAgent, query: str, status: int
) -> None:
    assert client.get(f"/compare?{query}").status_code == status


def test_the_page_draws_a_curve_for_each_job_and_marks_the_fork(client: TestClient, fork: FakeAgent) -> None:
    page = client.get("/compare?job=char-gpt&job=fork").text
    assert '<g data-name="char-gpt">' in page
    assert '<g data-name="fork">' in page
    assert "fork forked</text>" in page
    assert "forked from char-gpt at iteration 400" in page
    assert 'class="raw' not in page
    assert len(page.encode()) < 60_000


def test_the_first_load_of_eight_jobs_is_below_100_kilobytes(client: TestClient) -> None:
    for number in range(MOST_JOBS):
        agent = FakeAgent(over_client(client), job=f"job-{number}", started_at=NOW - 900, seed=number)
        agent.start()
        agent.train(1000)
        agent.send()
    jobs = "&".join(f"job=job-{number}" for number in range(MOST_JOBS))
    page = client.get(f"/compare?{jobs}&metric=loss&metric=grad_norm&smooth=0.5")
    paths = set(re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text))
    scripts = [client.get(path, headers={"Accept-Encoding": "gzip"}) for path in paths]
    sizes = [len(gzip.compress(page.content)), *(int(each.headers["content-length"]) for each in scripts)]
    assert sum(sizes) < 100_000


def test_smoothing_keeps_the_measured_curve_and_all_links_keep_the_choices(
    client: TestClient, fork: FakeAgent
) -> None:
    page = client.get("/compare?job=fork&metric=grad_norm&x=elapsed&smooth=0.9&log=1&from=1&to=40").text
    assert 'class="raw c0"' in page
    choices = "metric=grad_norm&amp;x=elapsed&amp;from=1&amp;to=40&amp;smooth=0.9&amp;log=1"
    assert f'href="/compare?job=fork&amp;job=fork%3A2&amp;{choices}"' in page
    assert f'href="/compare?job=fork&amp;job=char-gpt&amp;{choices}">add char-gpt</a>' in page
    assert '<input type="hidden" name="job" value="fork">' in page


def test_the_values_that_differ_between_the_newest_attempts_are_listed(
    client: TestClient, agent: FakeAgent, fork: FakeAgent
) -> None:
    assert 'id="configuration"' not in client.get("/compare?job=char-gpt&job=fork").text
    for job, rate in ((agent, "0.001"), (fork, "0.002")):
        values = {"lr": rate, "depth": "12"} | ({"clip": "1.0"} if job is fork else {})
        job.events.append(ConfigurationReport(at=job.at, section="configuration", values=values))
        job.send()
    page = client.get("/compare?job=char-gpt&job=fork&job=fork:1").text
    _, table = page.split('id="configuration"')
    assert [" ".join(cell.split()) for cell in re.findall(r'#configuration">([^<]+)</a>', table)] == [
        "char-gpt, attempt 1",
        "fork, attempt 2",
    ]
    assert re.findall(r"<code>([^<]+)</code>|<i>(none)</i>", table) == [
        ("lr", ""), ("0.001", ""), ("0.002", ""), ("clip", ""), ("", "none"), ("1.0", ""),
    ]  # fmt: skip
    assert 'id="configuration"' not in client.get("/compare?job=fork&job=fork:1").text


def test_without_a_loss_the_first_metric_is_shown(client: TestClient) -> None:
    other = FakeAgent(over_client(client), job="other", started_at=NOW - 60)
    other.start()
    other.train(5)
    other.samples.metrics = {"reward": [1.0, 2.0, 3.0, 4.0, 5.0]}
    other.send()
    page = client.get("/compare?job=other").text
    assert "<h2>reward</h2>" in page
    assert 'name="metric" value="reward" checked' in page


def test_a_page_without_jobs_says_how_to_choose_them(client: TestClient) -> None:
    assert "No jobs to compare" in client.get("/compare").text


def test_a_moving_average_starts_at_the_first_value_and_passes_over_nan() -> None:
    assert plot.smoothed([4.0, 4.0, math.nan, 4.0], 0.9)[:2] == pytest.approx([4.0, 4.0])
    averaged = plot.smoothed([0.0, math.nan, 10.0], 0.5)
    assert math.isnan(averaged[1])
    assert averaged[2] == pytest.approx(20 / 3)


def test_a_curve_is_broken_where_a_value_cannot_be_drawn() -> None:
    across, up = plot.AxisRange(0, 10), plot.AxisRange(0, 1)
    assert plot.parts([0, 5, 6, 10, 11], [0.0, math.inf, 1.0, 0.5, 0.5], across, up) == [
        "0,1000 0,1000",
        "600,0 1000,500",
    ]


@pytest.mark.parametrize(
    ("axis", "expected"),
    [
        (plot.AxisRange(0, 10), [0, 2, 4, 6, 8, 10]),
        (plot.AxisRange(0.31, 0.42), [0.35, 0.4]),
        (plot.AxisRange(0.05, 200, logarithmic=True), [0.1, 1, 10, 100]),
        (plot.AxisRange(3, 9, logarithmic=True), [4, 6, 8]),
    ],
)
def test_ticks_are_round_values(axis: plot.AxisRange, expected: list[float]) -> None:
    assert axis.ticks(5) == pytest.approx(expected)
    assert re.fullmatch(r"\d+(\.\d+)?", f"{100 * axis.place(expected[0]):.2f}")


@pytest.mark.parametrize(
    "values", [(0.0, 5e-324), (-1.7e308, 1.7e308), (1e300, 1e300), (math.nan, math.inf), (3, 3)]
)
def test_no_range_of_values_breaks_the_axis(values: tuple[float, ...]) -> None:
    up = plot.y_range(values, logarithmic=False)
    if up is not None:
        assert 0 < up.high - up.low < math.inf
        assert len(plot.ticks(up, plot.Y_TICKS, lambda part: 1 - part)) <= 2 * plot.Y_TICKS
