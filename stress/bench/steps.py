"""How many scheduler steps pass from the first lookup of a prefix on disk to its HIT.

Managers only, vLLM's with its ``fs`` tier: an engine's own steps would blur it.
A step is lookups as vLLM's connector makes them, then the step's end, then the
time that the forward pass of a model takes. Two cases:

- *restarted*: a new manager over the folder, which has to find out what is there
  (both have ``START_S`` for it, much less than an engine's start takes);
- *known*: the manager that stored the blocks, after a reset of its primary tier.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import Final

from vllm.v1.kv_offload.base import LookupResult

from kvtier.errors import InternalError
from kvtier.tools.held_signals import HeldSignals
from stress.bench.harness import own_folder
from stress.bench.sides import SIDES, ManagerSide, Setup, make_context, make_keys
from stress.bench.turns import RequestPlayer, Stopwatch

BLOCKS: Final = 256
BLOCK_BYTES: Final = 64 << 10
STEP_S: Final = 0.02
START_S: Final = 0.5
STEPS_MAX: Final = 100
KNOWN: Final = "known"
RESTARTED: Final = "restarted"
STEPS_PROMISED: Final = {KNOWN: 2, RESTARTED: 3}


def measure_steps(
    tier_type: str, blocks: int = BLOCKS, block_bytes: int = BLOCK_BYTES
) -> dict[str, dict[str, int]]:
    """Return the steps of each case for each side; ``tier_type`` is that of kvtier's tier."""
    found: dict[str, dict[str, int]] = {KNOWN: {}, RESTARTED: {}}
    with own_folder() as folder, HeldSignals() as signals:
        setup = Setup(2 * blocks, block_bytes, "lru", folder, tier_type)
        for name in SIDES:
            signals.check()  # not within a manager, which takes locks
            with closing(ManagerSide(name, setup)) as side:
                RequestPlayer(side, Stopwatch()).fill(0, blocks)
                side.reset()
                found[KNOWN][name] = _steps_to_hit(side, blocks)
            with closing(ManagerSide(name, setup)) as side:
                time.sleep(START_S)
                found[RESTARTED][name] = _steps_to_hit(side, blocks)
    return found


def _steps_to_hit(side: ManagerSide, blocks: int) -> int:
    keys = make_keys(0, blocks)
    context = make_context("reader", keys)
    side.manager.on_new_request(context)
    for step in range(1, STEPS_MAX + 1):
        if _is_hit(side, keys, context):
            side.manager.on_request_finished(context)
            return step
        side.step()
        time.sleep(STEP_S)
    raise InternalError(f"{side.name}: no HIT within {STEPS_MAX} steps")


def _is_hit(side: ManagerSide, keys: list[bytes], context: object) -> bool:
    """Look a prefix up as vLLM's connector does; a miss would end the comparison."""
    is_hit = True
    for key in keys:
        result = side.manager.lookup(key, context)
        if result is LookupResult.MISS:
            raise InternalError(f"{side.name}: a block that was stored is a miss")
        is_hit = is_hit and result is LookupResult.HIT
    return is_hit
