"""An engine's requests by lot, the routers that hear its KV events, and what they should have."""

from __future__ import annotations

import os
import random
import signal
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.engine.link.circuit_breaker import BreakerState
from tests.support.patience import until
from tests.vllm.support.connector import BLOCK_TOKENS, Connector
from tests.vllm.support.routers import Found, routers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.vllm.support.wire import Wire

GROUP_BYTES = 4
PROMPT_BLOCKS = 8


class Subscriber:
    """Routers that hear the same engine, and what they should have.

    ``shares_hashes``: prompts part within a block of kvtier's, so that two blocks have hashes in
    common. Routers that don't count lose these with the first of the two.
    """

    def __init__(self, chunk_blocks: int, wire: Wire, *, shares_hashes: bool = False) -> None:
        self._wire = wire
        self.shares_hashes = shares_hashes
        self._start_routers()
        self.heard: list[Any] = []
        self.chunk_blocks = chunk_blocks
        self._names: dict[bytes, tuple[Any, ...]] = {}  # by key: all hashes of the block
        self.contents: Callable[[], list[set[bytes]]] | None = None  #: of tiers that forget
        self._parents: dict[Any, Any] = {}  # by hash
        self._met: set[bytes] = set()  # keys that a request had since the engine started

    def restart(self) -> None:
        """The engine has gone; its routers forget it."""
        self._start_routers()
        self.forget()

    def _start_routers(self) -> None:
        self._routers = {
            who: router
            for who, router in routers_of(BLOCK_TOKENS).items()
            if router.counts or not self.shares_hashes
        }

    def found(self) -> Found:
        """Return what all routers find."""
        return set.intersection(*(router.found() for router in self._routers.values()))

    def found_by_any(self) -> Found:
        """Return what at least one router finds."""
        return set().union(*(router.found() for router in self._routers.values()))

    def announced(self) -> int:
        """Return how many blocks kvtier has announced so far, as there or as gone."""
        ours = [each for each in self.heard if getattr(each, "medium", None) in ("CPU", "STORAGE")]
        return sum(len(each.block_hashes) // self.chunk_blocks for each in ours)

    def forget(self, described: Iterable[bytes] = ()) -> None:
        """Expect a block again when a request has it again: vLLM has forgotten all but these."""
        self._met = self._main(described)

    def meet(self, engine: Connector, name: str) -> BlockStored:
        """Learn what a request's blocks are called; return what vLLM says of those on the GPU."""
        request = engine.requests[name]
        hashes, size = request.block_hashes, self.chunk_blocks
        for end in range(size, len(hashes) + 1, size):
            key = bytes(hashes[end - 1])
            self._met.add(key)
            self._names[key] = tuple(
                maybe_convert_block_hash(each) for each in hashes[end - size : end]
            )
        names = [maybe_convert_block_hash(each) for each in hashes]
        self._parents.update(zip(names, [None, *names], strict=False))
        return BlockStored(
            names,
            None,
            list(request.all_token_ids)[: len(hashes) * BLOCK_TOKENS],
            BLOCK_TOKENS,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            group_idx=0,
        )

    def hear(self, batch: list[Any]) -> None:
        """Take the events of a step, as vLLM publishes them."""
        batch = self._wire.carry(batch)
        self.heard += batch
        for router in self._routers.values():
            router.apply(batch)

    def compare(self, engine: Connector) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what routers and vLLM's tracker have, and what they should have."""
        facade = engine.manager.facade
        contents = known_to(facade) if self.contents is None else self.contents()
        by_medium = {"CPU": self._main(facade._primary.resident())}
        tracked = set(by_medium["CPU"])
        for number, tier in enumerate(engine.manager._tiers):
            keys = self._main(contents[number])
            by_medium.setdefault(tier.medium.value, set()).update(keys)
            if facade.evicts(number):  # of others nobody would tell the tracker when to forget
                tracked |= keys
        expected = {
            (medium, name)
            for medium, keys in by_medium.items()
            for key in keys
            for name in self._names[key]
        }
        tracker = engine.real._events_tracker._pending_event_metadata
        nowhere = set(tracker) - self._resident(engine, contents)
        found: dict[str, Any] = {"vLLM's tracker": self._main(tracker), "kept of nothing": nowhere}
        wanted: dict[str, Any] = {"vLLM's tracker": tracked, "kept of nothing": set()}
        for who, router in self._routers.items():
            has = router.found()
            found[f"stale in {who}"], wanted[f"stale in {who}"] = has - expected, set()
            found[who], wanted[who] = self._reachable(has), self._reachable(expected)
        return found, wanted

    def _resident(self, engine: Connector, contents: list[set[bytes]]) -> set[bytes]:
        """Return all that is in a tier which will announce its removal, of all groups."""
        facade = engine.manager.facade
        bounded = [keys for number, keys in enumerate(contents) if facade.evicts(number)]
        return set(facade._primary.resident()).union(*bounded)

    def _reachable(self, found: Found) -> Found:
        """Leave out blocks whose head is nowhere: routers look for prefixes, and so does vLLM."""
        names = {name for _, name in found}
        for name, parent in self._parents.items():  # parents are met first
            if parent is not None and parent not in names:
                names.discard(name)
        return {(medium, name) for medium, name in found if name in names}

    def _main(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return those of the group that routers look at, as far as a request had them."""
        main = {key[:-GROUP_BYTES] for key in keys if not any(key[-GROUP_BYTES:])}
        return main & self._met


def differences(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """Say what was found too much, and what is missing."""
    return "; ".join(
        f"{index}: has {found[index] - theirs}, lacks {theirs - found[index]}"
        for index, theirs in expected.items()
        if found[index] != theirs
    )


def known_to(facade: Any) -> list[set[bytes]]:
    """Return what each tier has, as far as the engine knows."""
    known = facade._primary.audit().directory.known
    return [
        {key for key, tiers in known.items() if tiers >> number & 1}
        for number in range(len(facade._links))
    ]


class Play:
    """One engine that serves requests by lot, and its subscriber."""

    def __init__(self, engine: Connector, subscriber: Subscriber, seed: int) -> None:
        self.engine = engine
        self.subscriber = subscriber
        self._lot = random.Random(seed)
        self._count = 0
        self._on_gpu: dict[str, BlockStored] = {}  # by request
        engine.on_step = self.hear

    def hear(self, scheduled: Sequence[str]) -> None:
        """What vLLM's scheduler does at the end of each step: the GPU's events come first."""
        on_gpu = [self._on_gpu[name] for name in scheduled]
        self.subscriber.hear([*on_gpu, *self.engine.real.take_events()])

    def serve(self, requests: int) -> None:
        """Serve so many requests, one after the other."""
        for _ in range(requests):
            self._count += 1
            self._serve(f"r{self._count}", self._prompt())
            self.check()

    def check(self) -> None:
        """Compare at a rest. A tier may tell of a block at any moment: then that was none."""

        def is_true() -> bool:
            found, expected = self.subscriber.compare(self.engine)
            if found != expected:
                self.engine.end_step()
            return found == expected

        until(is_true, lambda: differences(*self.subscriber.compare(self.engine)))

    def rest(self) -> None:
        """Step until nothing is under way, and all of it is told."""
        self.engine.settle()
        self.engine.until(lambda: not self.engine.manager.has_pending_work())
        self.engine.end_step()
        self.engine.end_step()

    def kill_tier(self) -> None:
        """Kill the process of the only tier. Nothing of it is found until it is back."""
        (tier,) = self.engine.manager.facade._tiers
        os.kill(tier._child.process.pid, signal.SIGKILL)

        def is_forgotten() -> bool:
            self.engine.end_step()
            return not any(medium == "STORAGE" for medium, _ in self.subscriber.found_by_any())

        def is_back() -> bool:
            self.engine.end_step()
            return bool(self.engine.tier().breaker == BreakerState.CLOSED.name)

        until(is_forgotten)
        self.subscriber.forget(self.engine.manager.facade._primary.resident())
        until(is_back)

    def reset(self, *, gpu_is_free: bool) -> None:
        """Reset the connector. While requests use the GPU, vLLM announces nothing of that."""
        self.engine.real.reset_cache()
        self.subscriber.forget()
        if gpu_is_free:
            self.subscriber.hear([AllBlocksCleared()])
        self.rest()
        self.check()

    def _serve(self, name: str, prompt: list[int]) -> None:
        engine = self.engine
        engine.start(name, prompt)
        on_gpu = self._on_gpu[name] = self.subscriber.meet(engine, name)
        if engine.match(name)[name]:
            engine.complete(engine.end_step([name]))
        engine.finish(name)
        self.rest()
        self.subscriber.hear([BlockRemoved(on_gpu.block_hashes, "GPU", group_idx=0)])

    def _prompt(self) -> list[int]:
        """Walk down a tree of blocks; each has few children, so that heads are shared."""
        chunk_tokens = self.subscriber.chunk_blocks * BLOCK_TOKENS
        tokens: list[int] = []
        for _ in range(self._lot.randint(1, PROMPT_BLOCKS)):
            child = self._lot.randrange(4)
            block = [10 * child + number % 7 for number in range(chunk_tokens)]
            if self.subscriber.shares_hashes:  # two of four have their first half in common
                block[: chunk_tokens // 2] = [100 + child // 2] * (chunk_tokens // 2)
            tokens += block
        return [*tokens, 1]  # the last token is always computed
