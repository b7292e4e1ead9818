"""Measures what kvtier adds to an engine's start: one start in a fresh process, as JSON.

``stress.bench.start JOB``. It begins where vLLM asks for the manager, and its
modules are imported: from there until the engine can go on, until the tier has said all that it
has, and what steps of the scheduler's thread take meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from kvtier import Namespace, RuntimeConfig, SlotMemory, open_runtime
from kvtier.core.events import PRIMARY, EventKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.engine.facade import SchedulerFacade

SLOTS: Final = 1024
STEP_S: Final = 0.001
"""An engine that has nothing to do yet steps this often."""

TOLD_S_MAX: Final = 600.0

NAMESPACE: Final = Namespace({"bench": "start"})


def runtime_of(tiers: list[Mapping[str, Any]], block_bytes: int) -> SchedulerFacade:
    """Start a runtime over these tiers."""
    config = RuntimeConfig.from_mapping(
        {"secondary_tiers": tiers}, slot_count=SLOTS, block_bytes=block_bytes
    )
    memory = SlotMemory.anonymous(SLOTS, block_bytes)
    return open_runtime(config, memory, NAMESPACE, collect_events=True)


def told_of_tiers(facade: SchedulerFacade) -> int:
    """Return how many blocks secondary tiers have told of since the last call."""
    return sum(
        len(event.keys)
        for event in facade.take_events()
        if event.kind is EventKind.STORED and event.tier != PRIMARY
    )


def one_start(tiers: list[Mapping[str, Any]], block_bytes: int, blocks: int) -> dict[str, float]:
    """Start once over tiers the first of which has so many blocks. Returns seconds by name."""
    began_s = time.perf_counter()
    facade = runtime_of(tiers, block_bytes)
    opened_s = time.perf_counter()
    told, longest_s, first_s = 0, 0.0, 0.0
    try:
        while told < blocks:
            at_s = time.perf_counter()
            if at_s - opened_s > TOLD_S_MAX:
                raise TimeoutError(f"{told} of {blocks} blocks told within {TOLD_S_MAX:g} s")
            facade.step_end()
            longest_s = max(longest_s, time.perf_counter() - at_s)
            told += told_of_tiers(facade)
            first_s = first_s or (told > 0) * (time.perf_counter() - opened_s)
            time.sleep(STEP_S)
        told_s = time.perf_counter() - opened_s
    finally:
        facade.close()
    return {
        "until the engine goes on": opened_s - began_s,
        "until the first block is told": first_s,
        "until all are told": told_s,
        "longest step meanwhile": longest_s,
    }


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    print(json.dumps(one_start(job["tiers"], job["block_bytes"], job["blocks"])))
