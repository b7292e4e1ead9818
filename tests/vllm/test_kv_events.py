"""KV events, folded by routers' rules, give what is resident.

vLLM's own connector describes them, and its own publisher carries them. Blocks
come and go by lot: prompts with common heads, few slots, a disk that is full, a
tier's process that is killed, resets, restarts. What routers would look for is
compared with what kvtier has, at each rest; and vLLM's tracker must not keep
more than that. What vLLM says of GPU memory is put in between: a block that is
computed is there, and leaves it soon after. Prompts part at the end of a block,
but where a test says that they share hashes: those vLLM announces twice, and
only a router that counts knows when the last is gone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from vllm.distributed.kv_events import BlockRemoved

from kvtier.tier import backend_driver
from kvtier.vllm.scheduler import kv_events
from kvtier_backends.memory import MemoryBackend
from tests.vllm.support.connector import BLOCK_BYTES, BLOCK_TOKENS, connector
from tests.vllm.support.event_play import Play, Subscriber
from tests.vllm.support.wire import open_wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.support.wire import Wire

WINDOW = 4 * BLOCK_TOKENS
SLOTS = 24
CHUNK_BLOCKS = 4  #: of vLLM in one of kvtier's: they have hashes of their own
DISK_BYTES = 1 << 19
REQUESTS = int(os.environ.get("KVTIER_EVENT_REQUESTS", "30"))
EVENTS = int(os.environ.get("KVTIER_EVENTS", "1000"))  #: in blocks, stored or removed
LEG = max(8, EVENTS // 90)  #: requests; nine times so many announce about ten blocks each
AT_ONCE = 4  #: blocks that are announced a step as gone, where that is to be seen
AROUND = 20  #: requests before and after what a test is about: more blocks than slots


@pytest.fixture(name="wire")
def _wire() -> Iterator[Wire]:
    with open_wire() as carrying:
        yield carrying


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


# With one vLLM block in each, test_rig.py has the same.
@pytest.mark.parametrize("windows", [(None,), (None, WINDOW)], ids=["one_group", "two_groups"])
def test_routers_have_what_is_resident(
    windows: tuple[int | None, ...], tmp_path: Path, wire: Wire
) -> None:
    """Three engines in turn have the disk; the later ones find blocks of those before them."""
    subscriber = Subscriber(CHUNK_BLOCKS, wire)
    for seed in range(3):
        tiers = [disk(tmp_path, CHUNK_BLOCKS)]
        with open_engine(CHUNK_BLOCKS, tiers, windows=windows) as engine:
            Play(engine, subscriber, seed).serve(REQUESTS)
            found_again = {name for medium, name in subscriber.found() if medium == "STORAGE"}
        subscriber.restart()
    gone = {event.medium for event in subscriber.heard if type(event) is BlockRemoved}
    assert gone >= {"CPU", "STORAGE"}, "both tiers were full"
    assert found_again


# Each of both once: the other two pairs are the same code again.
@pytest.mark.parametrize(
    ("on_reset", "gpu_is_free"),
    [
        pytest.param("keep", False, id="keep-gpu_in_use"),
        pytest.param("new_generation", True, id="new_generation-gpu_free"),
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
        play.reset(gpu_is_free=gpu_is_free)
        play.serve(AROUND)


def memory(chunk_blocks: int, **more: Any) -> dict[str, Any]:
    """Return a tier of the primary tier's medium that holds four times as many blocks."""
    capacity = 4 * SLOTS * chunk_blocks * BLOCK_BYTES
    return {"type": "memory", "capacity_bytes": capacity, "enable_kv_events": True, **more}


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


def test_what_a_tier_loses_at_once_is_announced_over_steps_and_nothing_of_it_is_found(
    faulty: list[MemoryBackend], wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subscriber that reads nothing holds up neither the steps nor the others.

    Blocks come back while losses wait, and are there in the end.
    """
    monkeypatch.setattr(kv_events, "AT_ONCE", AT_ONCE)
    monkeypatch.setattr(backend_driver, "CONTENTS_A_PAUSE", 2)
    store, losses = MemoryBackend.store, []

    async def lose_all_first(self: MemoryBackend, blocks: Any) -> Any:
        if losses and not losses[-1]:
            losses[-1] = list(self._kept)
            self._kept.clear()
            self.on_lost(losses[-1])
        return await store(self, blocks)

    monkeypatch.setattr(MemoryBackend, "store", lose_all_first)
    subscriber = Subscriber(1, wire)
    with wire.mute_subscriber(), open_engine(1, [memory(1)]) as engine:
        (link,) = engine.manager.facade._links
        link.contents.gone_a_step = AT_ONCE
        subscriber.contents = lambda: [set(faulty[-1]._kept)]
        play = Play(engine, subscriber, 1)
        play.serve(AROUND)
        before = len(subscriber.heard)
        for _ in range(3):
            losses.append([])
            play.serve(AROUND)
        removed = [
            event
            for event in subscriber.heard[before:]
            if type(event) is BlockRemoved and event.ownership == "1:memory"
        ]
        assert max(len(lost) for lost in losses) > 4 * AT_ONCE
        assert max(len(event.block_hashes) for event in removed) <= AT_ONCE


@pytest.mark.parametrize(("operation", "medium"), [("load", "CPU"), ("store", "STORAGE")])
def test_what_never_came_is_announced_by_nobody(
    operation: str,
    medium: str,
    faulty: list[MemoryBackend],
    wire: Wire,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And vLLM's tracker does not keep it: it was described when a lookup found it on its way.

    A tier of the primary tier's medium that fails to load a block has it all the same.
    """
    monkeypatch.setattr(MemoryBackend, "medium", medium)  # it stands for storage, too
    tier = memory(CHUNK_BLOCKS, faults={operation: {"fail_every": 3}})
    subscriber = Subscriber(CHUNK_BLOCKS, wire)
    with open_engine(CHUNK_BLOCKS, [tier]) as engine:
        subscriber.contents = lambda: [set(faulty[-1]._kept)]
        Play(engine, subscriber, 1).serve(REQUESTS)
        assert engine.tier().counts.failed


@pytest.mark.slow  # a tier's process starts six times
@pytest.mark.parametrize(
    ("chunk_blocks", "shares_hashes"),
    [
        pytest.param(1, False, id="1_vllm_blocks", marks=pytest.mark.long),
        pytest.param(CHUNK_BLOCKS, True, id="4_vllm_blocks-shared_hashes"),
    ],
)
def test_through_kills_resets_and_restarts_routers_have_what_is_resident(
    chunk_blocks: int, shares_hashes: bool, tmp_path: Path, wire: Wire
) -> None:
    """Two groups; so many blocks come and go as ``KVTIER_EVENTS`` says. In the end all are gone."""
    subscriber = Subscriber(chunk_blocks, wire, shares_hashes=shares_hashes)
    for number, on_reset in enumerate(("keep", "keep", "new_generation")):
        tiers = [disk(tmp_path, chunk_blocks, isolation="process")]
        with open_engine(chunk_blocks, tiers, windows=(None, WINDOW), on_reset=on_reset) as engine:
            play = Play(engine, subscriber, number)
            play.serve(LEG)
            is_found_again = any(medium == "STORAGE" for medium, _ in subscriber.found())
            play.kill_tier()
            play.serve(LEG)
            # With several hashes a block vLLM forgets those within it when it resets a busy GPU.
            play.reset(gpu_is_free=chunk_blocks > 1 or number == 1)
            play.serve(LEG)
            if on_reset == "new_generation":
                play.reset(gpu_is_free=chunk_blocks > 1)
                assert not subscriber.found_by_any()
                assert not engine.real._events_tracker._pending_event_metadata
        subscriber.restart()
        assert is_found_again
    assert subscriber.announced() >= EVENTS
