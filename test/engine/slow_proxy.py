"""A TCP proxy that delays and cuts connections."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Self

from sglang_qspec.tools.ports import free_port

CHUNK = 1 << 16


class SlowProxy:
    """Forwards connections at its own port to another port of this machine, as a context manager.

    An event loop in a thread of its own forwards the bytes.
    """

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self.delay_s = 0.0
        """Delay of each chunk, in each direction."""
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """End all connections; the clients may connect again."""
        self._loop.call_soon_threadsafe(self._close_all)

    def __enter__(self) -> Self:
        self._thread.start()
        start = asyncio.start_server(self._accept, "127.0.0.1", self.port)
        asyncio.run_coroutine_threadsafe(start, self._loop).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _close_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        ends = {writer, far[1]}
        self._writers |= ends
        try:
            await asyncio.gather(self._forward(reader, far[1]), self._forward(far[0], writer))
        finally:
            self._writers -= ends

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
        writer.close()
