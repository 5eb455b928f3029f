"""Questions that several ask at the same moment are answered once, and never with less than an asker knows."""

from __future__ import annotations

import asyncio

import pytest

from holdfast_server.core.bus import ChangeBus
from holdfast_server.core.request_coalescing import RequestCoalescer


class Source:
    """Answers with how often it was asked, when it is let."""

    def __init__(self) -> None:
        self.asked = 0
        self.let = asyncio.Event()

    async def __call__(self) -> int:
        self.asked += 1
        mine = self.asked
        await self.let.wait()
        return mine


def run(story):
    asyncio.run(story())


def test_those_who_ask_the_same_at_once_are_told_the_same():
    async def story():
        shared, source = RequestCoalescer(ChangeBus()), Source()
        asked = [asyncio.create_task(shared.answer("job", "live", source)) for _ in range(5)]
        await asyncio.sleep(0)
        source.let.set()
        assert await asyncio.gather(*asked) == [1] * 5
        assert await shared.answer("job", "live", source) == 2

    run(story)


def test_another_job_another_question_and_a_change_are_answered_anew():
    async def story():
        bus = ChangeBus()
        shared, source = RequestCoalescer(bus), Source()
        asked = [asyncio.create_task(shared.answer(*what, source)) for what in (("a", 1), ("a", 2), ("b", 1))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # they have begun
        bus.publish("a")
        asked.append(asyncio.create_task(shared.answer("a", 1, source)))
        await asyncio.sleep(0)
        bus.publish_all()
        asked.append(asyncio.create_task(shared.answer("b", 1, source)))
        await asyncio.sleep(0)
        source.let.set()
        assert await asyncio.gather(*asked) == [1, 2, 3, 4, 5]

    run(story)


def test_one_who_leaves_does_not_take_the_answer_from_the_others():
    async def story():
        shared, source = RequestCoalescer(ChangeBus()), Source()
        first, second = (asyncio.create_task(shared.answer("job", "live", source)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        source.let.set()
        assert await second == 1

    run(story)


def test_what_goes_wrong_goes_wrong_for_all_and_is_tried_again():
    async def story():
        shared = RequestCoalescer(ChangeBus())

        async def fail():
            raise ValueError("no such job")

        for _ in range(2):
            with pytest.raises(ValueError, match="no such job"):
                await shared.answer("job", "live", fail)

    run(story)


def test_however_often_a_job_changes_one_answer_is_under_way_and_one_waits():
    async def story():
        bus = ChangeBus()
        shared, source = RequestCoalescer(bus), Source()
        asked = []
        for _ in range(20):
            asked.append(asyncio.create_task(shared.answer("job", "live", source)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # what was asked has begun, if it need not wait
            bus.publish("job")
        assert source.asked == 1
        source.let.set()
        assert await asyncio.gather(*asked) == [1] + [2] * 19

    run(story)


def test_nobody_is_told_less_than_they_knew_when_they_asked():
    async def story():
        bus = ChangeBus()
        shared = RequestCoalescer(bus)

        async def ask():
            known = bus.count("job")
            for _ in range(4):
                await asyncio.sleep(0)
            return known

        async def asker():
            known = bus.count("job")
            return await shared.answer("job", "live", ask) - known

        asked = []
        for number in range(60):
            asked.append(asyncio.create_task(asker()))
            if number % 3 == 0:
                bus.publish("job")
            await asyncio.sleep(0)
        assert min(await asyncio.gather(*asked)) >= 0

    run(story)


def test_the_next_answer_is_found_though_the_one_before_it_failed():
    async def story():
        bus = ChangeBus()
        shared, source = RequestCoalescer(bus), Source()

        async def fail():
            await source.let.wait()
            raise ValueError("no such job")

        failing = asyncio.create_task(shared.answer("job", "live", fail))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        bus.publish("job")
        following = asyncio.create_task(shared.answer("job", "live", source))
        await asyncio.sleep(0)
        source.let.set()
        assert await following == 1
        with pytest.raises(ValueError, match="no such job"):
            await failing

    run(story)
