"""A load balancer in a thread: each connection goes to the next server that accepts it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from urllib.parse import urlsplit


class LoadBalancer:
    def __init__(self) -> None:
        self.servers: list[str] = []
        """Their URLs. One that takes no connection is passed over."""
        self._next = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="balancer")
        self._thread.start()
        self._listener = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._carry, "127.0.0.1", 0)

    async def _end(self) -> None:
        self._listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(len(self.servers)):
            self._next += 1
            server = urlsplit(self.servers[self._next % len(self.servers)])
            with suppress(OSError):
                behind, ahead = await asyncio.open_connection(server.hostname, server.port)
                await asyncio.gather(self._pump(reader, ahead), self._pump(behind, writer))
                return
        writer.close()

    async def _way(self) -> None:
        """Wait until data may be forwarded."""

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._way()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()
