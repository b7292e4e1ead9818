"""Tries the tier's operations at each server, once and step by step: for ``kvtier check``."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from kvtier.errors import StoreFault
from kvtier_backends.redis.client import ServerRefused
from kvtier_backends.redis.server_errors import MAY_NOT, error_named
from kvtier_backends.redis.servers import discover

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.errors import ConfigError
    from kvtier.plugin_api.options import Options
    from kvtier_backends.redis.client import RedisClient
    from kvtier_backends.redis.redis_options import Address, RedisOptions
    from kvtier_backends.redis.servers import Topology

NAMESPACE: Final = "kvtier-check"
LEFT_S: Final = "60"  #: then the server removes the leftovers of a killed check
_NAMES_MAX: Final = 1 << 18
_UNREACHED: Final = ("", "ConnectionError", "TimeoutError")
_REMEDIES: Final = {
    **dict.fromkeys(_UNREACHED, "Start the server, let this host reach it, or name another"),
    "ReadOnlyError": "It is a replica: name its master, or set mode to 'sentinel'",
    "MOVED": "It is a node of a cluster: set mode to 'cluster'",
}
_RIGHTS_OF_READERS: Final = "+get +exists"
_RIGHTS: Final = "+get +set +mset +exists +unlink"


class _Trial:
    """One tier's servers, and the current step."""

    def __init__(
        self, client: RedisClient, given: RedisOptions, reader: Options, *, read_only: bool
    ) -> None:
        self._client = client
        self._read_only = read_only
        self._given = given
        self._reader = reader
        self._step = "logging in"

    async def run(self) -> int:
        """Try each server. Returns the number of servers. Raises ``ConfigError``."""
        try:
            topology = await discover(self._client, self._given)
            for address in sorted(topology.addresses):
                await self._try_server(address, self._name_at(address, topology))
        except StoreFault as problem:
            raise self._failed(problem) from problem
        return len(topology.addresses)

    async def _try_server(self, address: Address, name: bytes) -> None:
        value = secrets.token_bytes(64)
        self._step = "logging in"
        steps: Sequence[tuple[str, tuple[str | bytes, ...]]] = (
            ("looking a key up", ("EXISTS", name)),
            ("storing one", ("SET", name, value, "EX", LEFT_S)),
            ("loading it", ("GET", name)),
            ("removing it", ("UNLINK", name)),
        )
        if self._read_only:
            steps = steps[:1]
        async with self._client.asking(address) as ask:
            for self._step, words in steps:
                found = await ask(*words)
                if words[0] == "GET" and found != value:
                    raise StoreFault(f"{address} did not keep the stored block")

    def _name_at(self, address: Address, topology: Topology) -> bytes:
        """Return a name that belongs to this server."""
        stem = f"{self._given.key_prefix}:{NAMESPACE}:{secrets.token_hex(8)}".encode()
        names = (stem + b"%06x" % number for number in range(_NAMES_MAX))
        return next(name for name in names if topology.server_of(name) == address)

    def _failed(self, problem: StoreFault) -> ConfigError:
        is_first = self._step == "logging in" and _kind_of(problem) in _UNREACHED
        step = "reaching it" if is_first else self._step
        return self._reader.error(
            "url", self._given.url, f"was tried: {step} failed ({problem}). {self._remedy(problem)}"
        )

    def _remedy(self, problem: StoreFault) -> str:
        kind = _kind_of(problem)
        if kind == MAY_NOT:
            more = " +cluster|slots +asking" if self._given.mode == "cluster" else ""
            user = self._given.username or "default"
            rights = _RIGHTS_OF_READERS if self._read_only else _RIGHTS
            return f"Run ACL SETUSER {user} ~{self._given.key_prefix}:* {rights}{more} there"
        if kind in _REMEDIES:
            return _REMEDIES[kind]
        if remedy := error_named(kind).remedy:
            return remedy[0].upper() + remedy[1:]
        if self._step == "logging in":
            return "Set username, db, and one of password_file, password_env, password_command"
        return "See to the server"


def _kind_of(problem: StoreFault) -> str:
    return problem.kind if isinstance(problem, ServerRefused) else ""


async def try_servers(
    client: RedisClient, given: RedisOptions, reader: Options, *, read_only: bool
) -> str:
    """Return a summary of the successful steps. Raises ``ConfigError`` for a failed one."""
    count = await _Trial(client, given, reader, read_only=read_only).run()
    servers = "its server was" if count == 1 else f"all {count} servers were"
    done = "looked up" if read_only else "stored, loaded and removed"
    return f"{servers} reached; a key was {done}"
