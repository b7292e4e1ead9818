"""Mooncake's plain client: batches from and to registered memory, in threads."""

from __future__ import annotations

import re
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.threads import DaemonThreads
from kvtier.tools.bench.plain_clients import CALLS_AT_ONCE, PlainClient, expect_blocks
from kvtier_backends.mooncake.connection import knock
from kvtier_backends.mooncake.library import load_library, set_environment, told
from kvtier_backends.mooncake.mooncake_options import read_options
from kvtier_backends.mooncake.registered import address_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.plugin_api.backend import BackendContext

_DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")


class PlainMooncake(PlainClient):
    """A client separate from the tier's, which lends the store no memory either."""

    def __init__(self, options: Mapping[str, Any], context: BackendContext, token: str) -> None:
        super().__init__(options, context, token)
        reader, given, _ = read_options(options, context)
        if given.segment_bytes:
            raise Misuse(
                f"--tier: segment_bytes={given.segment_bytes} would put some blocks into this "
                "process. Remove it, and start mooncake_client, which owns memory."
            )
        self._library = load_library(reader)
        self._given = given
        self._prefix = f"{given.key_prefix}/bench-{token}"
        self._client: Any = None
        self._threads = DaemonThreads(max(CALLS_AT_ONCE), "plain-mooncake")
        self.library = f"Mooncake {_version()}"

    @override
    def options_of_tier(self, part: str, leg_bytes: int) -> dict[str, Any]:
        return {**self.options, "key_prefix": f"{self._prefix}/{part}"}

    @override
    async def open(self, memory: memoryview) -> None:
        given = self._given
        set_environment(given.timeout_s)
        local_hostname = given.local_hostname or knock(given)
        self._client = self._library.MooncakeDistributedStore()
        code = self._client.setup(
            local_hostname,
            given.metadata_server,
            0,
            given.local_buffer_bytes,
            given.protocol,
            given.device or "",
            given.master,
        )
        code = code or self._client.register_buffer(address_of(memory), memory.nbytes)
        if code != 0:
            raise StoreFault(f"the plain client can't be set up: {told(code)}")
        self._placement = self._library.ReplicateConfig()
        self._placement.replica_num = given.replicas

    @override
    async def store(self, way: str, names: Sequence[str], views: Sequence[memoryview]) -> None:
        put = self._client.batch_put_from
        codes = await self._threads.run(partial(put, *self._parts(names, views), self._placement))
        if any(codes):
            raise StoreFault(f"the plain client could not store a block: {told(min(codes))}")

    @override
    async def load(self, way: str, names: Sequence[str], views: Sequence[memoryview]) -> None:
        get = self._client.batch_get_into
        lengths = await self._threads.run(partial(get, *self._parts(names, views)))
        expect_blocks(lengths, self.context.block_bytes)

    @override
    async def remove(self, names: Sequence[str]) -> None:
        remove = self._client.batch_remove
        await self._threads.run(partial(remove, [self._name(name) for name in names], True))  # noqa: FBT003 - forced

    @override
    async def remove_all(self) -> None:
        if self._client is None:
            return
        pattern = f"^{re.escape(self._prefix)}/.*"
        remove = self._client.remove_by_regex
        await self._threads.run(partial(remove, pattern, True))  # noqa: FBT003 - forced

    @override
    async def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._threads.stop()

    def _parts(
        self, names: Sequence[str], views: Sequence[memoryview]
    ) -> tuple[list[str], list[int], list[int]]:
        sizes = [view.nbytes for view in views]
        return [self._name(name) for name in names], [address_of(view) for view in views], sizes

    def _name(self, name: str) -> str:
        return f"{self._prefix}/plain/{name}"


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"
