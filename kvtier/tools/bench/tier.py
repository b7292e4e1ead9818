"""Measures the backend of one tier beside the plain client or the bare disk, in turns.

Each round has a leg of stores and a leg of loads of every side, and every other round has the sides
in reverse. Stored blocks are removed before the next leg.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import Misuse
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier.plugin_api.log import log
from kvtier.plugin_api.machine import free_memory_bytes
from kvtier.plugin_api.options import did_you_mean
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.settings.plugins import make_backend
from kvtier.settings.runtime_config import TierConfig
from kvtier.tools.bench.call_legs import KINDS, STORE, CallLeg, batches_of, play
from kvtier.tools.bench.kv_like import kv_like
from kvtier.tools.bench.plain_clients import CALLS_AT_ONCE
from kvtier.tools.bench.plain_files import PlainDisk, PlainFiles
from kvtier.tools.bench.plain_mooncake import PlainMooncake
from kvtier.tools.bench.plain_redis import PlainRedis
from kvtier.tools.bench.plain_s3 import PlainS3
from kvtier.tools.bench.prompt_requests import PromptRequests, count_requests
from kvtier.tools.bench.tier_sides import BackendSide, ClientSide, storage_faults
from kvtier_backends.encryption.keys import KEY_BYTES
from kvtier_backends.shared.compression import BITPLANE_ZSTD, COMPRESSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.tools.bench.plain_clients import PlainClient
    from kvtier.tools.bench.tier_sides import CallShape, CallSide

PLAIN: Final = "kvtier"
SIGNED: Final = "kvtier, signed"
ENCRYPTED: Final = "kvtier, encrypted"
COMPRESSED: Final = "kvtier, compressed"
TIER_SIDES: Final = (PLAIN, SIGNED, ENCRYPTED, COMPRESSED)
_KEY_OPTION_OF: Final = {SIGNED: "auth_key_file", ENCRYPTED: "encryption_key_file"}


PLAIN_CLIENTS: Final[dict[str, type[PlainClient]]] = {
    "disk": PlainDisk,
    "fs": PlainFiles,
    "redis": PlainRedis,
    "s3": PlainS3,
    "mooncake": PlainMooncake,
}


@dataclass(frozen=True)
class TierBenchOptions:
    """A measurement's settings."""

    leg_bytes: int
    rounds: int
    protection: bool  #: measure signed and encrypted blocks as well
    compression: bool = False  #: and compressed ones, of bytes that compress like a model's

    def sides_of(self, kind: str) -> list[str]:
        """Return kvtier's sides for a type of tier."""
        is_measured = {
            PLAIN: True,
            SIGNED: self.protection and plain_client_class(kind).is_shared,
            ENCRYPTED: self.protection,
            COMPRESSED: self.compression,
        }
        return [side for side in TIER_SIDES if is_measured[side]]


@dataclass
class TierLegs:
    """All legs of one tier with one size of blocks."""

    block_bytes: int
    blocks: int  #: in each leg
    share_promised: float  #: of the best client's MB/s
    shapes: dict[str, dict[str, CallShape]]  #: by kind and side
    rounds: list[dict[str, dict[str, CallLeg]]] = field(default_factory=list)  #: by kind and side
    prompt_requests: PromptRequests = field(default_factory=dict)

    @property
    def leg_bytes(self) -> int:
        """Bytes that each leg has moved."""
        return self.block_bytes * self.blocks


def plain_client_class(kind: str) -> type[PlainClient]:
    """Return the class for a type of tier. Raises ``Misuse`` if it can't be measured."""
    if kind not in PLAIN_CLIENTS:
        raise Misuse(
            f"--tier: type {kind!r} has no client library to be measured beside."
            f"{did_you_mean(kind, PLAIN_CLIENTS)} Choose one of {', '.join(PLAIN_CLIENTS)}."
        )
    return PLAIN_CLIENTS[kind]


def sides_count(kind: str, options: TierBenchOptions) -> int:
    """Return how many sides a type of tier has, for a bar of progress."""
    return len(options.sides_of(kind)) + len(plain_client_class(kind).ways) * len(CALLS_AT_ONCE)


async def measure(
    config: TierConfig,
    block_bytes: int,
    options: TierBenchOptions,
    advance: Callable[[], None],
    *,
    is_alone: bool = False,
) -> TierLegs:
    """Run all rounds. Calls ``advance`` after each leg of a side.

    ``is_alone``: without the plain clients.

    Raises ``Misuse`` for a tier that can't be measured, and ``StoreFault`` if the server fails.
    """
    _check_memory(options.leg_bytes)
    if config.read_only:
        raise Misuse(
            f"{config.name} is read_only, and this measures by storing blocks. Remove read_only "
            "from a copy of the configuration, or measure another tier."
        )
    namespace = Namespace({"benchmark": True, "block_bytes": block_bytes})
    context = BackendContext(block_bytes, namespace, config.name)
    token = secrets.token_hex(4)
    client = plain_client_class(config.type)(config.options, context, token)
    count = options.leg_bytes // block_bytes
    memory = SlotMemory.anonymous(2 * max(count, 1), block_bytes)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        cleaner = _Cleaner(client, memory)
        stack.push_async_callback(cleaner.clean)
        tiers: list[BackendSide] = []
        for name in options.sides_of(config.type):
            side = _make_side(name, client, config, memory)
            stack.push_async_callback(side.close)
            cleaner.is_needed = True  # a tier that is still opening describes itself there
            try:
                await side.open()
            except Exception:
                cleaner.is_needed = bool(tiers)
                raise
            tiers.append(side)
            with storage_faults(client.library):
                await cleaner.open()
        for slot in range(count):
            data = kv_like(block_bytes, slot) if options.compression else os.urandom(block_bytes)
            memory.view(slot)[:] = data
        clients = [
            ClientSide(client, way, at_once, memory, tiers[0])
            for way in client.ways
            for at_once in CALLS_AT_ONCE
            if not is_alone
        ]
        measured = await _run(client, count, [*tiers, *clients], options, advance)
        requests = await count_requests(tiers[0], count)
        return replace(measured, prompt_requests=requests)


class _Cleaner:
    """Removes all stored blocks, once there may be some."""

    def __init__(self, client: PlainClient, memory: SlotMemory) -> None:
        self._client = client
        self._memory = memory
        self._is_open = False
        self.is_needed = False

    async def open(self) -> None:
        """Open the client, unless it is open."""
        if not self._is_open:
            await self._client.open(self._memory.buffer)
            self._is_open = True

    async def clean(self) -> None:
        """Remove all blocks. If the server is gone, log what is left."""
        if not self.is_needed:
            return
        try:
            await self.open()
            await self._client.remove_all()
        except Exception as error:  # noqa: BLE001 - each library has its own
            log.warning(
                "kvtier bench: its blocks could not be removed",
                names_contain=f"bench-{self._client.token}",
                error=f"{type(error).__name__}: {error}",
            )


def _check_memory(leg_bytes: int) -> None:
    """Raise ``Misuse`` if memory lacks room for a leg to store from, and one to load into."""
    free = free_memory_bytes()
    if free is not None and 2 * leg_bytes > free:
        raise Misuse(
            f"--bytes {leg_bytes} needs twice as many bytes of memory, and {free} are free. Give "
            "fewer."
        )


def _make_side(
    name: str, client: PlainClient, config: TierConfig, memory: SlotMemory
) -> BackendSide:
    part = name.partition(", ")[2] or "tier"
    given = client.options_of_tier(part, memory.slot_count // 2 * memory.block_bytes)
    if name == COMPRESSED:
        given = {**given, COMPRESSION: BITPLANE_ZSTD}
    with _with_key(_KEY_OPTION_OF.get(name), given) as options:
        backend = make_backend(
            TierConfig(config.type, config.name, options=options), client.context
        )
    return BackendSide(name, backend, memory, client.token)


@contextmanager
def _with_key(option: str | None, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the options with a key file added, which has a random key and exists meanwhile."""
    if option is None:
        yield options
        return
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(secrets.token_hex(KEY_BYTES))
        file.flush()
        yield {**options, option: file.name}


async def _run(
    client: PlainClient,
    count: int,
    sides: list[CallSide],
    options: TierBenchOptions,
    advance: Callable[[], None],
) -> TierLegs:
    block_bytes = client.context.block_bytes
    shapes = _shapes_of(sides, block_bytes, count)
    measured = TierLegs(block_bytes, count, client.share_promised, shapes)
    leg = 0
    for side in sides:
        leg += 1
        await _warm_up(side, leg, count)
        for _ in range(client.warm_up_legs if isinstance(side, BackendSide) else 0):
            await _play_leg(side, STORE, leg, count)
            await _remove_leg(side, leg, count)
    for round_ in range(options.rounds):
        legs: dict[str, dict[str, CallLeg]] = {kind: {} for kind in KINDS}
        for side in sides if round_ % 2 == 0 else sides[::-1]:
            leg += 1
            side.prepare_load()
            for kind in KINDS:
                legs[kind][side.name] = await _play_leg(side, kind, leg, count)
                advance()
            await _remove_leg(side, leg, count)
        measured.rounds.append(legs)
    return measured


def _shapes_of(
    sides: list[CallSide], block_bytes: int, count: int
) -> dict[str, dict[str, CallShape]]:
    """Return each side's shape of calls. Raises ``Misuse`` if a leg does not keep a side busy."""
    shapes = {kind: {side.name: side.shape(kind) for side in sides} for kind in KINDS}
    needed = max(
        shape.blocks * shape.at_once for of_kind in shapes.values() for shape in of_kind.values()
    )
    if count < needed:
        raise Misuse(
            f"--bytes {count * block_bytes} is less than all calls at once move: {needed} blocks "
            f"of {block_bytes} bytes. Give {needed * block_bytes} or more."
        )
    return shapes


async def _play_leg(side: CallSide, kind: str, leg: int, count: int) -> CallLeg:
    shape = side.shape(kind)
    return await play(partial(side.call, kind, leg), batches_of(count, shape.blocks), shape.at_once)


async def _remove_leg(side: CallSide, leg: int, count: int) -> None:
    for batch in batches_of(count, side.shape(STORE).blocks):
        await side.remove(leg, batch)


async def _warm_up(side: CallSide, leg: int, count: int) -> None:
    """Use each connection once, so that the first round does not pay for connecting."""
    at_once = max(side.shape(kind).at_once for kind in KINDS)
    numbers = range(min(at_once, count))
    for kind in KINDS:
        await play(partial(side.call, kind, leg), batches_of(len(numbers), 1), at_once)
    await side.remove(leg, numbers)
