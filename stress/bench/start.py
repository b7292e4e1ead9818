"""``stress.bench start``: fills a disk tier, and starts over it again and again in fresh processes.

A start is measured from where vLLM builds the manager, with its modules imported: until the engine
can go on, until the tier has announced all its blocks, and what steps of the scheduler's thread
take meanwhile.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from kvtier import Namespace, RuntimeConfig, SlotMemory, open_runtime
from kvtier.core.events import PRIMARY, EventKind
from kvtier.errors import StoreFault
from kvtier.tools.bench.tier_command import spread
from kvtier.tools.terminal import progress, table
from stress.bench.harness import PATH, RUNS, Option, Report, at_least_one, own_folder
from stress.children import run_child

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from kvtier.engine.facade import SchedulerFacade

OPTIONS: Final = (
    PATH,
    Option("--blocks", 1_000_000, "blocks in the folder of the disk tier", at_least_one),
    RUNS,
)

BLOCK_BYTES: Final = 4096
SLOTS: Final = 1024
STEP_S: Final = 0.001
"""An engine that has nothing to do yet steps this often."""

ANNOUNCED_S_MAX: Final = 600.0
KEY_BYTES: Final = 36
ROOM_SHARE: Final = 1.25
ROOM_BYTES: Final = 64 << 20
"""What the folder has room for, beside what is put into it: all of it is there at the start."""


def measure(asked: argparse.Namespace, report: Report) -> None:
    """Fill a folder, then start over it."""
    with own_folder(asked.path) as folder:
        tier = {
            "type": "disk",
            "path": str(folder),
            "enable_kv_events": True,
            "capacity_bytes": int(asked.blocks * BLOCK_BYTES * ROOM_SHARE) + ROOM_BYTES,
        }
        with progress("filling the folder", asked.blocks) as shown:
            for stored in _fill(tier, asked.blocks):
                shown.advance(stored)
        report |= {"blocks": asked.blocks, "runs": []}
        job = {"tier": tier, "blocks": asked.blocks}
        with progress("starting", asked.runs) as shown:
            for _ in range(asked.runs):
                report["runs"].append(run_child(__name__, job))
                shown.advance()


def show(report: Report) -> None:
    """Print the table."""
    runs = report["runs"]
    columns = {name: [run[name] for run in runs] for name in (runs[0] if runs else ())}
    table(
        f"a start over a disk tier of {report['blocks']:,} blocks",
        ["", "s", "of runs"],
        [[n, f"{statistics.median(each):.3f}", spread(each, 3)] for n, each in columns.items()],
    )


def main(job: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    """Start once over a tier of so many blocks; seconds by name."""
    began_s = time.perf_counter()
    facade = _runtime_of(job["tier"])
    opened_s = time.perf_counter()
    announced, longest_s, first_s = 0, 0.0, 0.0
    try:
        while announced < job["blocks"]:
            at_s = time.perf_counter()
            if at_s - opened_s > ANNOUNCED_S_MAX:
                raise TimeoutError(
                    f"{announced} of {job['blocks']} blocks announced in {ANNOUNCED_S_MAX:g} s"
                )
            facade.step_end()
            longest_s = max(longest_s, time.perf_counter() - at_s)
            announced += _announced_by_tiers(facade)
            first_s = first_s or (announced > 0) * (time.perf_counter() - opened_s)
            time.sleep(STEP_S)
        announced_s = time.perf_counter() - opened_s
    finally:
        facade.close()
    yield {
        "until the engine goes on": opened_s - began_s,
        "until the first block is announced": first_s,
        "until all are announced": announced_s,
        "longest step meanwhile": longest_s,
    }


def _fill(tier: Mapping[str, Any], blocks: int) -> Iterator[int]:
    """Store so many blocks in a tier; yield how many more there are.

    Raises ``StoreFault`` if it does not take them all.
    """
    facade = _runtime_of(tier)
    try:
        stored = 0
        for first in range(0, blocks, SLOTS // 2):
            keys = [_key(each) for each in range(first, min(first + SLOTS // 2, blocks))]
            _store(facade, f"r{first}", keys)
            stored += _announced_by_tiers(facade)
            yield len(keys)
        if stored < blocks:
            raise StoreFault(f"{blocks - stored} of {blocks} blocks were not stored")
    finally:
        facade.close()


def _store(facade: SchedulerFacade, request: str, keys: list[bytes]) -> None:
    facade.on_request_started(request)
    grant = facade.prepare_store(keys, request)
    assert grant is not None
    facade.complete_store(grant.keys, request)
    facade.on_request_finished(request)
    facade.step_end()
    while facade.get_finished():
        time.sleep(STEP_S)
        facade.step_end()


def _runtime_of(tier: Mapping[str, Any]) -> SchedulerFacade:
    config = RuntimeConfig.from_mapping(
        {"secondary_tiers": [tier]}, slot_count=SLOTS, block_bytes=BLOCK_BYTES
    )
    memory = SlotMemory.anonymous(SLOTS, BLOCK_BYTES)
    return open_runtime(config, memory, Namespace({"bench": "start"}), collect_events=True)


def _announced_by_tiers(facade: SchedulerFacade) -> int:
    """Return how many blocks secondary tiers have announced since the last call."""
    return sum(
        len(event.keys)
        for event in facade.take_events()
        if event.kind is EventKind.STORED and event.tier != PRIMARY
    )


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big") * (KEY_BYTES // 8) + bytes(KEY_BYTES % 8)
