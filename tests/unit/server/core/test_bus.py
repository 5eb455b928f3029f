from __future__ import annotations

import asyncio
import gc
import threading

from holdfast_server.core.bus import ChangeBus


def run(scenario):
    return asyncio.run(scenario(ChangeBus()))


def test_a_listener_hears_of_its_job_only():
    async def scenario(bus):
        with bus.subscribe("a") as one, bus.subscribe() as every:
            bus.publish("b")
            first = await one.wait(0.0), await every.wait(0.0)
            bus.publish("a")
            return first, (await one.wait(0.0), await every.wait(0.0))

    assert run(scenario) == ((False, True), (True, True))


def test_samples_wake_nobody_to_whom_they_change_nothing():
    async def scenario(bus):
        with bus.subscribe("a") as page, bus.subscribe("a", samples=False) as agent:
            heard = []
            for tell in (bus.publish, lambda _, **options: bus.publish_all(**options)):
                for samples_only in (True, False):
                    tell("a", samples_only=samples_only)
                    heard.append((await page.wait(0.0), await agent.wait(0.0)))
            return heard

    assert run(scenario) == [(True, False), (True, True)] * 2


def test_changes_pile_up_as_one():
    async def scenario(bus):
        with bus.subscribe() as listener:
            for number in range(1000):
                bus.publish(f"job-{number}")
            return await listener.wait(0.0), await listener.wait(0.0)

    assert run(scenario) == (True, False)


def test_a_wait_ends_with_a_change_or_with_its_time():
    async def scenario(bus):
        with bus.subscribe("a") as listener:
            early = await listener.wait(0.0)
            asyncio.get_running_loop().call_soon(bus.publish, "a")
            return early, await listener.wait(300)

    assert run(scenario) == (False, True)


def test_closing_ends_every_wait_present_and_future():
    async def scenario(bus):
        listener = bus.subscribe()
        asyncio.get_running_loop().call_soon(bus.close)
        return await listener.wait(300), await listener.wait(300), await bus.subscribe().wait(300)

    assert run(scenario) == (False, False, False)


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


def test_a_change_that_another_thread_publishes_wakes_the_loop():
    async def scenario(bus):
        with bus.subscribe("a") as listener:
            writer = threading.Thread(target=bus.publish, args=("a",))
            writer.start()
            heard = await listener.wait(300)
            writer.join()
            return heard, await listener.wait(0.0)

    assert run(scenario) == (True, False)
