"""The store for the event loop: one thread uses it, one call after the other.

All methods raise BatchError if the database cannot be read or written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sglang_qspec.tools.serve_batches.objects import Batch, FileObject, Object
from sglang_qspec.tools.serve_batches.store import Claimed, Kind, Message, Store, StoredTotals

Result = TypeVar("Result")


class State:
    """Files and batches as the database has them. The methods are those of `Store`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "database")

    @property
    def gateway(self) -> str | None:
        """Id of this gateway; None if there can be no other."""
        return self._store.gateway if self._store.is_shared else None

    async def beat(self) -> Claimed:
        """As `Store.beat`."""
        return await self._call(self._store.beat)

    async def get(self, kind: type[Kind], id: str, tenant: str) -> Kind | None:
        """As `Store.get`."""
        return await self._call(lambda: self._store.get(kind, id, tenant))

    async def page(self, kind: type[Kind], tenant: str, **asked: Any) -> tuple[list[Kind], bool]:
        """As `Store.page`."""
        return await self._call(lambda: self._store.page(kind, tenant, **asked))

    async def add(self, tenant: str, *objects: Object) -> None:
        """As `Store.add`."""
        await self._call(lambda: self._store.add(tenant, *objects))

    async def change(
        self,
        tenant: str,
        id: str,
        change: Callable[[Batch], Batch],
        *added: FileObject,
        anyone: bool = False,
    ) -> Batch:
        """As `Store.change`."""
        return await self._call(
            lambda: self._store.change(tenant, id, change, *added, anyone=anyone)
        )

    async def remove(self, id: str) -> None:
        """As `Store.remove`."""
        await self._call(lambda: self._store.remove(id))

    async def running(self) -> list[Batch]:
        """As `Store.running`."""
        return await self._call(self._store.running)

    async def files(self) -> list[tuple[str, FileObject]]:
        """As `Store.files`."""
        return await self._call(self._store.files)

    async def totals(self, kind: type[Object], tenant: str) -> StoredTotals:
        """As `Store.totals`."""
        return await self._call(lambda: self._store.totals(kind, tenant))

    async def messages(self, batch: str | None = None) -> list[Message]:
        """As `Store.messages`."""
        return await self._call(lambda: self._store.messages(batch))

    async def note_attempt(self, message: str) -> None:
        """As `Store.note_attempt`."""
        await self._call(lambda: self._store.note_attempt(message))

    async def forget(self, message: str) -> None:
        """As `Store.forget`."""
        await self._call(lambda: self._store.forget(message))

    async def leave(self) -> None:
        """As `Store.leave`."""
        await self._call(self._store.leave)

    async def _call(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Wait for the last call."""
        self._thread.shutdown()
