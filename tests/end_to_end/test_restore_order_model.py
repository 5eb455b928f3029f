"""A model of restore orders: whatever is clicked, killed, stopped, cut and delayed, the promises hold."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from holdfast.protocol.wire import OPEN_ORDER_STATES
from holdfast_server.records.order_transitions import TRANSITIONS
from tests.support.restore_order_simulation import (
    ITERATIONS,
    RestoreOrderSimulation,
    SimulatedAgent,
    SimulationEnvironment,
)

ENDED = ("restored", "superseded")
"""States that nothing takes an order out of."""
HEALED_BOUNDARIES = 8
WAYS = {(before, transition.after) for transition in TRANSITIONS for before in transition.before}
PHASES = [phase for phase in Phase if phase is not Phase.explain]
"""An explanation follows every line that is run: it takes twice the time of all worlds, for one that fails."""


class RestoreOrderModel(RuleBasedStateMachine):
    ground: SimulationEnvironment

    def __init__(self) -> None:
        super().__init__()
        self.world = RestoreOrderSimulation(self.ground)

    # ---- people

    @rule(iteration=st.sampled_from(ITERATIONS), key=st.sampled_from("abcdef"), brief=st.booleans())
    def somebody_clicks(self, iteration: int, key: str, brief: bool) -> None:
        self.world.click(iteration, f"{key}-{iteration}", 30.0 if brief else None)

    @precondition(lambda self: self.world.placed)
    @rule(data=st.data())
    def somebody_cancels(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(self.world.placed[-3:]), label="order"))

    # ---- the world

    @rule(seconds=st.sampled_from([1.0, 25.0, 40.0, 86400.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    @rule()
    def the_server_looks_at_its_orders(self) -> None:
        self.world.watch()

    @rule()
    def the_network_is_cut_or_mended(self) -> None:
        self.world.connected = not self.world.connected

    @rule()
    def checkpoints_break_or_are_mended(self) -> None:
        self.world.breaks = not self.world.breaks

    # ---- agents

    @rule()
    def an_attempt_starts(self) -> None:
        """The one before may be dead, stopped, or not know yet that it is over."""
        if len(self.world.agents) < 8:
            self.world.start()

    @precondition(lambda self: self.training)
    @rule(data=st.data(), steps=st.integers(1, 5))
    def one_trains(self, data: st.DataObject, steps: int) -> None:
        agent = self.one(data, self.training)
        for _ in range(steps):
            agent.step()

    @precondition(lambda self: self.training and self.world.connected)
    @rule(data=st.data())
    def one_hears_what_is_wanted(self, data: st.DataObject) -> None:
        self.one(data, self.training).hear()

    @precondition(lambda self: self.telling and self.world.connected)
    @rule(data=st.data(), twice=st.booleans())
    def something_is_told(self, data: st.DataObject, twice: bool) -> None:
        self.world.deliver(self.one(data, self.telling), twice=twice)

    @precondition(lambda self: self.training)
    @rule(data=st.data())
    def one_is_killed(self, data: st.DataObject) -> None:
        self.one(data, self.training).alive = False

    @precondition(lambda self: any(agent.alive for agent in self.world.agents))
    @rule(data=st.data())
    def one_is_stopped_or_wakes_up(self, data: st.DataObject) -> None:
        agent = self.one(data, [agent for agent in self.world.agents if agent.alive])
        agent.awake = not agent.awake

    @property
    def training(self) -> list[SimulatedAgent]:
        return [agent for agent in self.world.agents if agent.acts]

    @property
    def telling(self) -> list[SimulatedAgent]:
        """Those with something to say: the spool of a dead one is sent by the next."""
        able = [agent for agent in self.world.agents if agent.awake or not agent.alive]
        return [agent for agent in able if agent.outgoing.batches]

    def one(self, data: st.DataObject, agents: list[SimulatedAgent]) -> SimulatedAgent:
        return data.draw(st.sampled_from(agents), label="agent")

    # ---- promises

    @invariant()
    def each_is_carried_out_at_most_once_and_by_nobody_that_is_fenced_off(self) -> None:
        times = Counter(order.id for order, _ in self.world.noted)
        assert all(count == 1 for count in times.values()), times
        assert all(attempt >= order.fence for order, attempt in self.world.noted)

    @invariant()
    def one_at_a_time_is_open_and_all_go_the_ways_that_there_are(self) -> None:
        orders = self.world.orders()
        assert sum(order.open for order in orders) <= 1
        noted = {order.id for order, _ in self.world.noted}
        for order in orders:
            way = [step.state for step in order.transitions]
            assert way[: len(known := self.world.ways.get(order.id, []))] == known, "what has happened stays so"
            for before, after in itertools.pairwise(way):
                assert (before, after) in WAYS
                assert before not in ENDED
                assert before != "failed" or after == "restored", "by an attempt that had not heard of it yet"
            assert way[-1] == order.state
            assert order.state != "restored" or order.id in noted, "restored is what has happened"
            assert all(step.who for step in order.transitions)
            self.world.ways[order.id] = way

    def teardown(self) -> None:
        """All is mended: every order ends, and what was carried out is told as that."""
        world = self.world
        world.connected, world.breaks = True, False
        for agent in world.agents:
            agent.alive = False
        agent = world.start()
        for _ in range(HEALED_BOUNDARIES):
            agent.step()
            agent.hear()
        for each in (*world.agents, agent):  # what comes late may have opened an order again: it hears of that
            while each.outgoing.batches:
                world.deliver(each)
            agent.hear()
            for _ in range(HEALED_BOUNDARIES):
                agent.step()
        world.watch()
        noted = {order.id for order, _ in world.noted}
        for order in world.orders():
            assert order.state not in OPEN_ORDER_STATES, [step.state for step in order.transitions]
            assert (order.id in noted) is (order.state == "restored"), [step.state for step in order.transitions]
        self.each_is_carried_out_at_most_once_and_by_nobody_that_is_fenced_off()


@pytest.fixture
def model() -> Iterator[Callable[..., None]]:
    ground = SimulationEnvironment()

    def run(**wanted: Any) -> None:
        kind = type("OrdersHere", (RestoreOrderModel,), {"ground": ground})
        checks = list(HealthCheck)
        run_state_machine_as_test(kind, settings=settings(phases=PHASES, suppress_health_check=checks, **wanted))

    yield run
    ground.close()


def test_orders_keep_their_promises(model: Callable[..., None]) -> None:
    model(max_examples=40, stateful_step_count=30, derandomize=True)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_orders_keep_their_promises_in_two_thousand_worlds(model: Callable[..., None]) -> None:
    model(max_examples=2000, stateful_step_count=50, derandomize=False, print_blob=True)
    print("order model: 2,000 worlds of up to 50 steps, every promise kept")
