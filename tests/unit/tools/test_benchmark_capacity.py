"""What the agents of the capacity benchmark report goes on from batch to batch."""

from __future__ import annotations

import asyncio

import msgspec

from benchmarks.ingest.capacity import METRICS, _Agent, _Fleet
from holdfast.protocol.wire import Batch, Samples


class RecordingAgent(_Agent):
    """Keeps each body, which a server would acknowledge."""

    bodies: list[bytes]

    async def _ask(self, method, path, body=b""):
        self.bodies.append(body)
        return 200


def test_every_batch_goes_on_after_the_one_before():
    async def report() -> list[bytes]:
        agent = RecordingAgent(_Fleet(ports=[1], token="secret", agents=0, period=1), 7, 1)
        agent.bodies = []
        for steps in (3, 4):
            await agent._post("samples", [], agent._samples(steps))
        await agent._post("control", agent._checkpoint())
        return agent.bodies

    batches = [msgspec.msgpack.decode(body, type=Batch) for body in asyncio.run(report())]
    samples = [batch.samples for batch in batches if isinstance(batch.samples, Samples)]
    assert [number for each in samples for number in each.iteration] == list(range(1, 8))
    assert all(set(each.metrics) == set(METRICS) for each in samples)
    assert [event.state for event in batches[-1].events] == ["snapshot", "persisting", "durable"]
    assert [batch.sequence for batch in batches] == [1, 2, 3]
