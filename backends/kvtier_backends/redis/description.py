"""Stores the readable description of the namespace beside its blocks.

Block names hold a digest of the whole description. So a different description means that two
namespaces share a digest, or that another program wrote there: nothing is served then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.errors import StoreFault
from kvtier_backends.redis.client import ServerRefused
from kvtier_backends.redis.server_errors import refuses_writes
from kvtier_backends.redis.topology import UNSETTLED
from kvtier_backends.shared.namespaces import OwnDescription, namespace_name

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import BackendContext
    from kvtier_backends.redis.client import RedisClient
    from kvtier_backends.redis.redis_options import Address
    from kvtier_backends.redis.topology import Topology

FORMAT_VERSION: Final = 1


class Description:
    """The description of the engine's own namespace, and the names of everything it stores."""

    def __init__(self, key_prefix: str, context: BackendContext) -> None:
        self._stem = f"{key_prefix}:{namespace_name(context)}:".encode()
        self.name = self._stem + b"description"
        self._own = OwnDescription(
            self.name.decode(), "kvtier-redis", FORMAT_VERSION, context, "key_prefix"
        )

    def name_of(self, key: bytes) -> bytes:
        """Return a block's name."""
        return self._stem + key.hex().encode()

    async def compare(self, client: RedisClient, topology: Topology) -> Address:
        """Write the description if there is none, and compare it. Returns its server's address.

        Raises ``OtherNamespace``, and ``StoreFault`` if the server can't be used.
        """
        address = topology.server_of(self.name)
        if address is None:
            raise StoreFault("no node of the cluster is in charge of the description")
        try:
            await self._compare_at(client, address)
        except ServerRefused as refused:
            # Its hash slot is moving. The next check will find it: block names distinguish
            # namespaces, too.
            if not topology.is_cluster or refused.kind not in UNSETTLED:
                raise
        return address

    async def _compare_at(self, client: RedisClient, address: Address) -> None:
        async with client.asking(address) as ask:
            if not self._own.is_read_only:
                try:
                    await ask("SET", self.name, self._own.text, "NX")
                except ServerRefused as refused:
                    if not refuses_writes(refused.kind):  # and serves its data
                        raise
            found = await ask("GET", self.name)
        if found is not None:
            self._own.refuse_other_untrusted(found)
