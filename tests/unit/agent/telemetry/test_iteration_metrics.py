"""When the controller learns of an iteration: not later than it matters, and not one by one."""

import types

import pytest

from holdfast.save.run import RunState, WriteResult
from holdfast.telemetry import iteration_metrics
from holdfast.telemetry.iteration_metrics import BATCH_ITERATIONS, BATCH_SECONDS, IterationMetrics
from holdfast.telemetry.reporter import Reporter, TrainingPosition
from tests.support.persist_job import empty_run


class FakeController:
    """Remembers what it was told, and in which portions."""

    follows_losses = False

    def __init__(self):
        self.plan = object()
        self.portions = []
        self.settings = types.SimpleNamespace(policy="fixed", budget=0.1)

    def observe(self, *seen):
        self.portions[-1] += [(each.iteration, each.in_flight) for each in seen]

    def measured(self, _):
        self.portions.append([("settled", None)])


class MetricsLoop:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(iteration_metrics.time, "time", lambda: self.now)
        self.standing, self.controller = TrainingPosition(), FakeController()
        self.meter = IterationMetrics(self.controller, Reporter("job", self.standing))
        monkeypatch.setattr(
            self.meter._reporter, "report_interval", lambda *_, **__: self.controller.portions.append([])
        )
        self.controller.portions.append([])
        self.meter.clock.begin()

    def iterate(self, seconds=0.001):
        self.now += seconds
        self.standing.iteration += 1
        self.meter.end_iteration({})

    @property
    def portions(self):
        return [[iteration for iteration, _ in portion] for portion in self.controller.portions if portion]


@pytest.fixture
def loop(monkeypatch):
    return MetricsLoop(monkeypatch)


def test_quick_iterations_are_learnt_of_together_and_in_order(loop):
    loop.iterate()  # long after whatever was before
    for _ in range(2 * BATCH_ITERATIONS):
        loop.iterate()
    assert [len(portion) for portion in loop.portions] == [1, BATCH_ITERATIONS, BATCH_ITERATIONS]
    assert [each for portion in loop.portions for each in portion] == list(range(1, 2 * BATCH_ITERATIONS + 2))


def test_slow_iterations_are_learnt_of_one_by_one(loop):
    for _ in range(3):
        loop.iterate(BATCH_SECONDS)
    assert loop.portions == [[1], [2], [3]]


def test_those_beside_a_checkpoint_are_learnt_of_before_what_it_took(loop):
    for in_flight in (False, False, True, True):
        loop.meter.begin_iteration(in_flight=in_flight)
        loop.iterate()
    assert loop.portions == [[1]]
    run = empty_run(1, seconds=0.1)
    run.begin_write()
    run.end(RunState.DURABLE, WriteResult(seconds=0.5))
    loop.meter.checkpoint_settled(run.cost)
    assert loop.portions == [[1], [2, 3, 4], ["settled"]]
    assert loop.controller.portions[1] == [(2, False), (3, True), (4, True)]


def test_nothing_waits_while_there_is_no_plan_yet(loop):
    loop.controller.plan = None
    for _ in range(3):
        loop.iterate()
    assert loop.portions == [[1], [2], [3]]


def test_whoever_needs_to_know_has_them_learnt_of(loop):
    for _ in range(4):
        loop.iterate()
    loop.meter.update_controller()
    loop.meter.update_controller()
    assert loop.portions == [[1], [2, 3, 4]]
