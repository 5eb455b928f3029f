"""The network between agents and their server, which can be cut."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.support.load_balancer import LoadBalancer


class NetworkFaultProxy(LoadBalancer):
    """To one server, through which everything goes until it is told not to let it."""

    def __init__(self, server: str) -> None:
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        super().__init__()
        self._server = [server]
        self.mend()

    def cut(self) -> None:
        """Connections break, and nobody takes a new one: the host is gone."""
        self.servers = []
        asyncio.run_coroutine_threadsafe(self._break(), self._loop).result()

    def hold(self) -> None:
        """Nothing arrives and nothing breaks: packets are lost, and sent again in vain."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def mend(self) -> None:
        self.servers = self._server
        self._loop.call_soon_threadsafe(self._flows.set)

    async def _way(self) -> None:
        await self._flows.wait()

    async def _break(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with suppress(OSError, asyncio.CancelledError):  # asyncio itself would make a noise of the second
                await super()._carry(reader, writer)
        finally:
            self._writers.discard(writer)
