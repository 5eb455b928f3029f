from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

from holdfast_server.db.request_threads import THREADS, RequestThreads

asked_by = ContextVar("asked_by", default="nobody")


def run(scenario):
    async def whole():
        threads = RequestThreads()
        try:
            return await asyncio.wait_for(scenario(threads), 300)
        finally:
            threads.close()

    return asyncio.run(whole())


def test_a_busy_class_makes_no_other_wait():
    may_end = threading.Event()

    async def scenario(threads):
        busy = [
            asyncio.create_task(threads.run(name, lambda: may_end.wait(300)))
            for name in THREADS
            for _ in range(2 * THREADS[name] if name != "agents" else 0)
        ]
        await asyncio.sleep(0)
        answer = await threads.run("agents", lambda: "at once")
        assert not any(task.done() for task in busy)
        may_end.set()
        await asyncio.gather(*busy)
        return answer

    assert run(scenario) == "at once"


def test_a_class_has_no_more_threads_than_its_limit():
    async def scenario(threads):
        together = threading.Barrier(THREADS["pages"])
        names = set()

        def meet():
            together.wait(300)
            names.add(threading.current_thread().name)

        await asyncio.gather(*(threads.run("pages", meet) for _ in range(3 * THREADS["pages"])))
        return names

    assert run(scenario) == {f"holdfast-pages_{number}" for number in range(THREADS["pages"])}


def test_a_function_runs_in_the_context_of_its_caller():
    async def scenario(threads):
        asked_by.set("ada")
        return await threads.run("answers", asked_by.get)

    assert run(scenario) == "ada"


def test_who_gives_up_before_it_has_begun_has_not_asked():
    may_end, asked = threading.Event(), []

    async def scenario(threads):
        busy = [
            asyncio.create_task(threads.run("access", lambda: may_end.wait(300))) for _ in range(THREADS["access"])
        ]
        await asyncio.sleep(0)
        late = asyncio.create_task(threads.run("access", lambda: asked.append(1)))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.wait([late])
        may_end.set()
        await asyncio.gather(*busy)
        await threads.run("access", lambda: None)

    run(scenario)
    assert asked == []
