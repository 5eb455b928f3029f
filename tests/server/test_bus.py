from __future__ import annotations

import asyncio
import gc

import pytest

from holdfast_server.bus import LocalBus


def run(scenario):
    return asyncio.run(scenario(LocalBus()))


def test_a_listener_hears_of_its_job_only():
    async def scenario(bus):
        with bus.subscribe("a") as one, bus.subscribe() as every:
            bus.publish("b")
            bus.publish("a")
            return await anext(one), await anext(every), await anext(every)

    assert run(scenario) == ("a", "b", "a")


def test_changes_pile_up_as_one():
    async def scenario(bus):
        with bus.subscribe() as listener:
            for _ in range(1000):
                bus.publish("a")
            assert await anext(listener) == "a"
            bus.publish("b")
            return await anext(listener), await listener.wait(0.0)

    assert run(scenario) == ("b", False)


def test_a_wait_ends_with_a_change_or_with_its_time():
    async def scenario(bus):
        with bus.subscribe("a") as listener:
            early = await listener.wait(0.0)
            asyncio.get_running_loop().call_soon(bus.publish, "a")
            return early, await listener.wait(60)

    assert run(scenario) == (False, True)


def test_closing_ends_every_listener_present_and_future():
    async def scenario(bus):
        listener = bus.subscribe()
        asyncio.get_running_loop().call_soon(bus.close)
        heard = [job async for job in listener]
        with pytest.raises(StopAsyncIteration):
            await anext(bus.subscribe())
        return heard, await listener.wait(60)

    assert run(scenario) == ([], False)


def test_a_listener_that_went_away_is_forgotten():
    async def scenario(bus):
        with bus.subscribe():
            assert len(bus) == 1
        assert len(bus) == 0
        lost = bus.subscribe()
        del lost
        gc.collect()
        return len(bus)

    assert run(scenario) == 0
