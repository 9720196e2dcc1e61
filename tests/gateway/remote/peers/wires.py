"""Wire to a daemon, which a test cuts, freezes or leads elsewhere: how a machine dies, sleeps or comes back."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Self


class Wire:
    """A TCP proxy on the loopback. Owned by one test."""

    def __init__(self, port: int) -> None:
        # Of the daemon at its other end; 0 is none.
        self.target = port
        self.port = 0
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    @asynccontextmanager
    async def to(cls, port: int) -> AsyncGenerator[Self]:
        wire = cls(port)
        server = await asyncio.start_server(wire._accept, "127.0.0.1", 0)
        wire.port = server.sockets[0].getsockname()[1]
        try:
            yield wire
        finally:
            server.close()
            wire.thaw()
            wire.cut()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """End every connection, as the death of the process does."""
        for writer in self._writers:
            writer.transport.abort()

    def die(self) -> None:
        """The machine is gone: connections end, and new ones are refused at once."""
        self.target = 0
        self.cut()

    def freeze(self) -> None:
        """Nothing gets through any more, and no connection ends."""
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await self._flows.wait()
        if not self.target:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self._writers |= {writer, far_writer}
        if not self.target:  # it has died meanwhile
            self.cut()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass(reader, far_writer))
            tasks.create_task(self._pass(far_reader, writer))
        self._writers -= {writer, far_writer}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
