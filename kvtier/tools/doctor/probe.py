"""``--probe``: stores and loads blocks through each tier's own code, for some seconds.

It works like ``kvtier bench tier`` without the plain client: in a separate folder, or under
separate names, which are removed again.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.threads import BoundedCall
from kvtier.tools.bench.call_legs import KINDS, LOAD, STORE
from kvtier.tools.bench.tier import PLAIN, PLAIN_CLIENTS, TierBenchOptions, measure
from kvtier.tools.doctor.running import note_if_slower
from kvtier.tools.held_signals import HeldSignals
from kvtier.tools.terminal import progress
from kvtier_backends.posix import padded_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.settings.runtime_config import TierConfig
    from kvtier.tools.bench.tier import TierLegs
    from kvtier.tools.checking.findings import Findings
    from kvtier.tools.doctor.subject import Subject

BLOCK_BYTES: Final = 1 << 20
"""Bytes of a block, if the model's are not known."""

LEG_BYTES: Final = 512 << 20
"""Bytes moved at once: enough to keep every type of tier busy."""

ROUNDS: Final = 1
PROBE_S_MAX: Final = 60.0
CLEAN_UP_S_MAX: Final = 10.0
POLL_S: Final = 0.05


def probe(subject: Subject, prefill_tokens_per_s: float | None, findings: Findings) -> None:
    """Measure each tier, and note those that are slower than the engine computes."""
    block_bytes = padded_bytes(subject.block_bytes or BLOCK_BYTES)
    for tier in subject.tiers:
        where = f"secondary tier {tier.name}"
        try:
            stored, loaded = _measure(tier, block_bytes)
        except (Misuse, StoreFault, OSError) as reason:
            findings.not_checked.append(f"how fast {tier.name} is ({reason})")
            continue
        findings.noted.append(
            f"tier {tier.name}: {stored / 1e6:,.0f} MB/s stored, {loaded / 1e6:,.0f} MB/s loaded, "
            f"in blocks of {block_bytes} bytes"
        )
        if prefill_tokens_per_s is None or not subject.block_bytes:
            findings.not_checked.append(
                f"whether {tier.name} loads sooner than the engine computes: set "
                "prefill_tokens_per_s or name a running engine, and give --block-bytes or --model"
            )
            continue
        tokens_per_s = loaded / subject.block_bytes * subject.block_tokens
        note_if_slower(tokens_per_s, prefill_tokens_per_s, where, findings)


def _measure(tier: TierConfig, block_bytes: int) -> tuple[float, float]:
    """Return the bytes a second that a tier stores and loads. Raises ``Misuse``, ``StoreFault``."""
    if tier.type not in PLAIN_CLIENTS:
        raise Misuse(f"kvtier bench measures {', '.join(PLAIN_CLIENTS)} only")
    options = TierBenchOptions(LEG_BYTES, rounds=ROUNDS, protection=False)

    cancels: list[Callable[[], object]] = []

    async def run() -> TierLegs:
        task = asyncio.current_task()
        assert task is not None
        cancels.append(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        async with asyncio.timeout(PROBE_S_MAX):
            return await measure(tier, block_bytes, options, bar.advance, is_alone=True)

    with HeldSignals() as signals, progress(f"measuring {tier.name}", len(KINDS)) as bar:
        running = BoundedCall(lambda: asyncio.run(run()), f"kvtier-{tier.name}-probe")
        ends_at = time.monotonic() + PROBE_S_MAX + CLEAN_UP_S_MAX
        while not running.wait(POLL_S):
            if time.monotonic() > ends_at:
                raise StoreFault("its storage hangs")
            try:
                signals.check()
            except KeyboardInterrupt:  # its blocks are removed first
                for cancel in cancels:
                    cancel()
                running.wait(CLEAN_UP_S_MAX)
                raise
    try:
        legs = running.result()
    except TimeoutError:
        raise StoreFault(f"{LEG_BYTES >> 20} MiB take more than {PROBE_S_MAX:g} s") from None
    *_, figures = legs.rounds
    stored, loaded = (legs.leg_bytes / figures[kind][PLAIN].seconds for kind in (STORE, LOAD))
    return stored, loaded
