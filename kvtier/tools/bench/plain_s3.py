"""Plain obstore: as many requests at once as a call has blocks."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvtier.tools.bench.plain_clients import PlainClient, expect_blocks
from kvtier_backends.s3.client import make_store
from kvtier_backends.s3.s3_options import address_of, credentials_of, read_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.plugin_api.backend import BackendContext

_REMOVED_AT_ONCE = 256


class PlainS3(PlainClient):
    """The library that the ``s3`` tier sends its requests with, configured alike."""

    def __init__(self, options: Mapping[str, Any], context: BackendContext, token: str) -> None:
        super().__init__(options, context, token)
        given, reader = read_options(options, context)
        address = address_of(given, reader)
        self._store = make_store(given, address, credentials_of(given, reader)(), reader.where)
        self._prefix = address.below(f"kvtier-bench-{token}")
        self._url = f"{given.url.rstrip('/')}/kvtier-bench-{token}"
        import obstore  # noqa: PLC0415 - an extra, which make_store has found

        self._obstore = obstore
        self.library = f"obstore {version('obstore')}"

    @override
    def options_of_tier(self, part: str, leg_bytes: int) -> dict[str, Any]:
        return {**self.options, "url": f"{self._url}/{part}"}

    @override
    async def open(self, memory: memoryview) -> None:
        """Do nothing: each request finds a connection."""

    @override
    async def store(self, way: str, names: Sequence[str], views: Sequence[memoryview]) -> None:
        put = self._obstore.put_async
        requests = [
            put(self._store, self._name(name), view, use_multipart=False)
            for name, view in zip(names, views, strict=True)
        ]
        await asyncio.gather(*requests)

    @override
    async def load(self, way: str, names: Sequence[str], views: Sequence[memoryview]) -> None:
        lengths = await asyncio.gather(*map(self._load_one, names))
        expect_blocks(lengths, self.context.block_bytes)

    @override
    async def remove(self, names: Sequence[str]) -> None:
        await self._remove([self._name(name) for name in names])

    @override
    async def remove_all(self) -> None:
        found = await self._obstore.list(self._store, prefix=self._prefix).collect_async()
        await self._remove([each["path"] for each in found])

    @override
    async def close(self) -> None:
        """Do nothing: the library closes its connections by itself."""

    async def _load_one(self, name: str) -> int:
        result = await self._obstore.get_async(self._store, self._name(name))
        return len(await result.bytes_async())

    async def _remove(self, paths: Sequence[str]) -> None:
        for start in range(0, len(paths), _REMOVED_AT_ONCE):
            batch = list(paths[start : start + _REMOVED_AT_ONCE])
            await self._obstore.delete_async(self._store, batch)

    def _name(self, name: str) -> str:
        return f"{self._prefix}/plain/{name[:3]}/{name}"
