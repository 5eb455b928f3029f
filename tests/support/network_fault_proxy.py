"""A proxy between agents and their server that can cut or hold connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.support.load_balancer import LoadBalancer


class NetworkFaultProxy(LoadBalancer):
    """Proxy to one server that forwards everything until a test cuts or holds it."""

    def __init__(self, server: str) -> None:
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        super().__init__()
        self._server = [server]
        self.mend()

    def cut(self) -> None:
        """Abort open connections and refuse new ones, as if the host were down."""
        self.servers = []
        asyncio.run_coroutine_threadsafe(self._break(), self._loop).result()

    def hold(self) -> None:
        """Deliver nothing and keep connections open, as if all packets were lost."""
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
