"""KV events, folded by routers' rules, give what is resident.

vLLM's own connector describes them, and its own publisher carries them. Blocks
come and go by lot: prompts with common heads, few slots, a disk that is full, a
tier's process that is killed, resets, restarts. What routers would look for is
compared with what kvtier has, at each rest; and vLLM's tracker must not keep
more than that. What vLLM says of GPU memory is put in between: a block that is
computed is there, and leaves it soon after. Prompts part at the end of a block:
of two blocks that share hashes, vLLM announces these twice.
"""

from __future__ import annotations

import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtier.engine.circuit_breaker import BreakerState
from kvtier_backends.memory import MemoryBackend
from tests.support.patience import until
from tests.vllm.support.connector import BLOCK_BYTES, BLOCK_TOKENS, Connector, connector
from tests.vllm.support.routers import DynamoIndex, Found, LLMDIndex
from tests.vllm.support.wire import open_wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from tests.vllm.support.wire import Wire

GROUP_BYTES = 4
WINDOW = 4 * BLOCK_TOKENS
SLOTS = 24
DISK_BYTES = 1 << 19
PROMPT_BLOCKS = 8
LATE_S = 0.01  #: of slow storage: blocks leave the primary tier while it stores their tails
REQUESTS = int(os.environ.get("KVTIER_EVENT_REQUESTS", "30"))
AROUND = 20  #: requests before and after what a test is about: more blocks than slots


class Subscriber:
    """Two routers that hear the same engine, and what they should have."""

    def __init__(self, chunk_blocks: int, wire: Wire) -> None:
        self._wire = wire
        self.llmd, self.dynamo = LLMDIndex(BLOCK_TOKENS), DynamoIndex(BLOCK_TOKENS)
        self.heard: list[Any] = []
        self.chunk_blocks = chunk_blocks
        self._names: dict[bytes, tuple[Any, ...]] = {}  # by key: all hashes of the block
        self.contents: Callable[[], list[set[bytes]]] | None = None  #: of tiers that forget
        self._parents: dict[Any, Any] = {}  # by hash
        self._met: set[bytes] = set()  # keys that a request had since the engine started

    def restart(self) -> None:
        """The engine has gone; its routers forget it."""
        self.llmd, self.dynamo = LLMDIndex(BLOCK_TOKENS), DynamoIndex(BLOCK_TOKENS)
        self.forget()

    def forget(self, described: Iterable[bytes] = ()) -> None:
        """Expect a block again when a request has it again: vLLM has forgotten all but these."""
        self._met.intersection_update(key[:-GROUP_BYTES] for key in described)

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
        self.llmd.apply(batch)
        self.dynamo.apply(batch)

    def compare(self, engine: Connector) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what both routers and vLLM's tracker have, and what they should have."""
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
        llmd, dynamo = self.llmd.found(), self.dynamo.found()
        tracker = self._main(engine.real._events_tracker._pending_event_metadata)
        reachable = self._reachable(expected)
        return (
            {
                "stale in llm-d": llmd - expected,
                "stale in Dynamo": dynamo - expected,
                "llm-d": self._reachable(llmd),
                "Dynamo": self._reachable(dynamo),
                "vLLM's tracker": tracker,
            },
            {
                "stale in llm-d": set(),
                "stale in Dynamo": set(),
                "llm-d": reachable,
                "Dynamo": reachable,
                "vLLM's tracker": tracked,
            },
        )

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
            tokens += [10 * child + number % 7 for number in range(chunk_tokens)]
        return [*tokens, 1]  # the last token is always computed


@pytest.fixture(name="wire")
def _wire() -> Iterator[Wire]:
    with open_wire() as carrying:
        yield carrying


@pytest.fixture(
    params=[1, pytest.param(4, marks=pytest.mark.one_release)],
    ids=lambda blocks: f"{blocks}_vllm_blocks",
)
def chunk_blocks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[(None,), (None, WINDOW)], ids=["one_group", "two_groups"])
def windows(request: pytest.FixtureRequest) -> tuple[int | None, ...]:
    found: tuple[int | None, ...] = request.param
    return found


def disk(folder: Path, chunk_blocks: int, **more: Any) -> dict[str, Any]:
    """Return a tier that holds some sixty blocks, which it is full of soon."""
    return {
        "type": "disk",
        "path": str(folder / "disk"),
        "capacity_bytes": DISK_BYTES * chunk_blocks,
        "enable_kv_events": True,
        **more,
    }


def open_engine(chunk_blocks: int, tiers: list[dict[str, Any]], **more: Any) -> Any:
    return connector(
        slots=SLOTS,
        chunk_blocks=chunk_blocks,
        kv_events=True,
        self_describing_kv_events=True,
        secondary_tiers=tiers,
        **more,
    )


def test_routers_have_what_is_resident(
    chunk_blocks: int, windows: tuple[int | None, ...], tmp_path: Path, wire: Wire
) -> None:
    """Three engines in turn have the disk; the later ones find blocks of those before them."""
    subscriber = Subscriber(chunk_blocks, wire)
    for seed in range(3):
        tiers = [disk(tmp_path, chunk_blocks)]
        with open_engine(chunk_blocks, tiers, windows=windows) as engine:
            Play(engine, subscriber, seed).serve(REQUESTS)
            found_again = {name for medium, name in subscriber.llmd.found() if medium == "STORAGE"}
        subscriber.restart()
    gone = {event.medium for event in subscriber.heard if type(event) is BlockRemoved}
    assert gone >= {"CPU", "STORAGE"}, "both tiers were full"
    assert found_again


def test_what_a_tier_had_when_its_process_was_killed_is_found_nowhere(
    chunk_blocks: int, tmp_path: Path, wire: Wire
) -> None:
    subscriber = Subscriber(chunk_blocks, wire)
    with open_engine(chunk_blocks, [disk(tmp_path, chunk_blocks, cell="process")]) as engine:
        play = Play(engine, subscriber, 1)
        play.serve(AROUND)
        assert any(medium == "STORAGE" for medium, _ in subscriber.llmd.found())
        (tier,) = engine.manager.facade._tiers
        os.kill(tier._child.process.pid, signal.SIGKILL)

        def is_forgotten() -> bool:
            engine.end_step()
            return not any(medium == "STORAGE" for medium, _ in subscriber.llmd.found())

        def is_back() -> bool:
            engine.end_step()
            return bool(engine.tier().breaker == BreakerState.CLOSED.name)

        until(is_forgotten)
        subscriber.forget(engine.manager.facade._primary.resident())
        until(is_back)
        play.serve(AROUND)
        assert any(medium == "STORAGE" for medium, _ in subscriber.llmd.found())


# Each of both once. The other two pairs are the same code again.
@pytest.mark.parametrize(
    ("on_reset", "gpu_is_free"),
    [
        pytest.param("keep", False, id="keep-gpu_in_use"),
        pytest.param("new_generation", True, id="new_generation-gpu_free"),
        pytest.param("keep", True, id="keep-gpu_free", marks=pytest.mark.long),
        pytest.param(
            "new_generation", False, id="new_generation-gpu_in_use", marks=pytest.mark.long
        ),
    ],
)
def test_after_a_reset_routers_have_what_can_be_found(
    on_reset: str, gpu_is_free: bool, tmp_path: Path, wire: Wire
) -> None:
    """While requests use the GPU, vLLM resets its connector and announces nothing of it."""
    subscriber = Subscriber(1, wire)
    tiers = [disk(tmp_path, 1)]
    with open_engine(1, tiers, on_reset=on_reset) as engine:
        play = Play(engine, subscriber, 1)
        play.serve(AROUND)
        engine.real.reset_cache()
        subscriber.forget()
        if gpu_is_free:
            subscriber.hear([AllBlocksCleared()])
        play.rest()
        play.check()
        play.serve(AROUND)


def test_a_block_in_two_tiers_of_one_medium_is_found_until_both_have_lost_it(
    tmp_path: Path, wire: Wire
) -> None:
    tiers = [
        disk(tmp_path, 1),
        {
            "type": "fs",
            "root_dir": str(tmp_path / "fs"),
            "enable_kv_events": True,
        },
    ]
    subscriber = Subscriber(1, wire)
    with open_engine(1, tiers) as engine:
        Play(engine, subscriber, 1).serve(REQUESTS)
        removed = {each.ownership for each in subscriber.heard if type(each) is BlockRemoved}
        assert "1:disk" in removed


def memory(chunk_blocks: int, **more: Any) -> dict[str, Any]:
    """Return a tier of the primary tier's medium that holds four times as many blocks."""
    capacity = 4 * SLOTS * chunk_blocks * BLOCK_BYTES
    return {"type": "memory", "capacity_bytes": capacity, "enable_kv_events": True, **more}


@pytest.mark.parametrize("on_reset", ["keep", "new_generation"])
def test_after_a_reset_nothing_is_found_of_two_tiers_of_one_medium(
    on_reset: str, wire: Wire
) -> None:
    """Dynamo ends a removal at the first block that it doesn't know.

    What the first tier of the medium had was gone by then, and the rest was found for ever.
    """
    subscriber = Subscriber(1, wire)
    holds_all = memory(1, capacity_bytes=100 * SLOTS * BLOCK_BYTES)
    with open_engine(1, [holds_all], on_reset=on_reset) as engine:
        play = Play(engine, subscriber, 1)
        play.serve(AROUND)
        engine.real.reset_cache()
        subscriber.forget()
        play.rest()
        play.check()
        play.serve(AROUND)


def test_what_a_killed_tier_had_is_found_where_another_of_its_medium_has_it(wire: Wire) -> None:
    subscriber = Subscriber(1, wire)
    with open_engine(1, [memory(1, cell="process")]) as engine:
        play = Play(engine, subscriber, 1)
        play.serve(AROUND)
        before = known_to(engine.manager.facade)[0]
        os.kill(engine.manager.facade._tiers[0]._child.process.pid, signal.SIGKILL)

        def is_forgotten() -> bool:
            engine.end_step()
            return not known_to(engine.manager.facade)[0]

        until(is_forgotten)
        primary = set(engine.manager.facade._primary.resident())
        assert primary & before
        assert before - primary
        play.rest()
        play.check()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> list[MemoryBackend]:
    """Return the memory tiers that are made."""
    made: list[MemoryBackend] = []
    make = MemoryBackend.from_options.__func__  # type: ignore[attr-defined]

    def from_options(*arguments: Any) -> MemoryBackend:
        made.append(make(MemoryBackend, *arguments))
        return made[-1]

    monkeypatch.setattr(MemoryBackend, "from_options", from_options)
    return made


@pytest.mark.parametrize("medium", ["CPU", "STORAGE"])
@pytest.mark.parametrize("operation", ["load", "store"])
def test_what_never_came_is_announced_by_nobody(
    operation: str,
    medium: str,
    chunk_blocks: int,
    faulty: list[MemoryBackend],
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And vLLM's tracker does not keep it: it was described when a lookup found it on its way.

    A tier of the primary tier's medium that fails to load a block has it all the same.
    """
    monkeypatch.setattr(MemoryBackend, "medium", medium)  # it stands for storage, too
    tier = memory(chunk_blocks, faults={operation: {"fail_every": 3}})
    subscriber = Subscriber(chunk_blocks, wire)
    with open_engine(chunk_blocks, [tier]) as engine:
        subscriber.contents = lambda: [set(faulty[-1]._kept)]
        Play(engine, subscriber, 1).serve(REQUESTS)
        assert engine.tier().counts.failed


# The orders of events in which blocks were hidden are in test_kv_events_in_order.py.
SEEDS = [40, 41, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(42, 46))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tier_that_is_slow_by_lot_hides_no_block_of_its_medium(
    seed: int, faulty: list[MemoryBackend], wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads whose store failed leave the primary tier before their tails, and come back."""
    lot = random.Random(seed)
    store = MemoryBackend.store

    async def store_late(self: MemoryBackend, blocks: Any) -> Any:
        self.faults.store.delay_s = LATE_S * lot.choice([0, lot.random()])
        return await store(self, blocks)

    monkeypatch.setattr(MemoryBackend, "store", store_late)
    chunk_blocks = lot.choice([1, 4])
    tier = memory(chunk_blocks, faults={"store": {"fail_every": 3}})
    subscriber = Subscriber(chunk_blocks, wire)
    with open_engine(chunk_blocks, [tier]) as engine:
        subscriber.contents = lambda: [set(faulty[-1]._kept)]
        Play(engine, subscriber, seed).serve(REQUESTS)
