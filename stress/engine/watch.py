"""Watches ``/metrics`` of a server that may be killed and started again meanwhile."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvtier.engine.link.circuit_breaker import BreakerState, worst
from kvtier.engine.link.tier_health import NAMES
from kvtier.tools.report.soak import Sample
from stress.engine.vllm_server import BLOCK_BYTES, BLOCK_TOKENS
from stress.failure import Failure
from stress.limits import PATIENCE_S
from stress.record import NOTICED

if TYPE_CHECKING:
    from collections.abc import Callable

    from stress.engine.vllm_server import Server

DISK: Final = "1:disk"
FS: Final = "2:fs"
TIERS: Final = (DISK, FS)
SCRAPE_S = 1.0

NOT_ZERO_AT_REST = re.compile(
    r"""
    vllm:\w*config_info\{ | vllm:engine_sleep_state\{ | vllm:lora_requests_info\{
    | kvtier:info\{ | kvtier:primary_slots\{state="(free|ready)"\} | kvtier:(disk|fs)_\w+\{
    | kvtier:tier_capacity_bytes\{ | kvtier:tier_used_bytes\{ | kvtier:tier_inflight_limit_blocks\{
    | kvtier:tier_estimated_\w+\{ | kvtier:tier_estimate_error_ratio\{
    | kvtier:tier_last_fault_timestamp_seconds\{
    | process_ | python_ | http_
    """,
    re.VERBOSE,
)
"""Gauges that say what there is. All others say what is under way."""

NEVER = (
    "kvtier:faults",
    "kvtier:samples_dropped",
    "kvtier:primary_policies_replaced",
    "kvtier:tier_policies_replaced",
    "kvtier:tier_unknown_completions",
)
"""Counters of what must not happen, whatever goes wrong outside of kvtier."""


def metrics_of(text: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return all that only grows, and all gauges, as name and labels → value."""
    growing: dict[str, float] = {}
    gauges: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = ",".join(
                f'{name}="{value}"'
                for name, value in sorted(sample.labels.items())
                if name not in ("engine", "model_name")
            )
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            (gauges if family.type == "gauge" else growing)[name] = float(sample.value)
    return growing, gauges


def is_named(series: str, name: str, labels: dict[str, str]) -> bool:
    """Tell whether a series is of this metric, and has these labels among others."""
    own, _, rest = series.partition("{")
    wanted = (f'{label}="{value}"' for label, value in labels.items())
    return own.removesuffix("_total") == name and all(each in rest for each in wanted)


class Watch:
    """Scrapes ``/metrics`` and sees that counters only grow. One task at a time scrapes."""

    def __init__(self, running: Server) -> None:
        self.gauges: dict[str, float] = {}
        self._growing: dict[str, float] = {}  # of the server that runs now
        self._before: Counter[str] = Counter()  # of those before it
        self._server = running
        self._scraping = asyncio.Lock()

    async def scrape(self) -> bool:
        """Scrape once; False: the server is being restarted.

        Raises ``Failure`` if a counter or a histogram fell or went away, or one of ``NEVER``
        is not zero.
        """
        async with self._scraping:  # answers that overtake each other would look like falling
            text = await self._server.text_between_outages("/metrics")
            if text is None:
                return False
            growing, self.gauges = metrics_of(text)
            for name, value in self._growing.items():
                if growing.get(name, -1.0) < value:
                    raise Failure(f"{name} fell from {value:g} to {growing.get(name)}")
            self._growing = growing
        for name in NEVER:
            if self.total(name):
                raise Failure(f"{name} is {self.total(name):g}, see the server's log")
        return True

    def server_ended(self) -> None:
        """Begin anew: the counters of the next server begin at zero."""
        self._before.update(self._growing)
        self._growing, self.gauges = {}, {}

    async def watch(self, sample: Callable[[], None]) -> None:
        """Scrape until cancelled, and have each scrape sampled. Raises ``Failure``.

        How long a request takes depends on the machine; that one of them gets on, doesn't.
        """
        tokens, since_s = -1.0, time.monotonic()
        while True:
            if not await self.scrape():
                since_s = time.monotonic()
            elif (now := self.total("vllm:generation_tokens")) != tokens:
                tokens, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > PATIENCE_S:
                raise Failure(f"no token for {PATIENCE_S:g} s: {self.not_at_rest()}")
            if self.gauges:
                sample()
            await asyncio.sleep(SCRAPE_S)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a counter over its series with these labels, of all servers."""
        return sum(
            value
            for counters in (self._growing, self._before)
            for series, value in counters.items()
            if is_named(series, name, labels)
        )

    def since_start(self, name: str, **labels: str) -> float:
        """Return the same of the server that runs now."""
        return sum(v for series, v in self._growing.items() if is_named(series, name, labels))

    def gauge(self, name: str, **labels: str) -> float | None:
        """Return a gauge; None if the server hasn't published it yet."""
        found = (v for series, v in self.gauges.items() if is_named(series, name, labels))
        return next(found, None)

    def not_at_rest(self) -> dict[str, float]:
        """Return the gauges that should be zero, and aren't."""
        return {
            name: value
            for name, value in self.gauges.items()
            if value and not NOT_ZERO_AT_REST.match(name)
        }


async def come_to_rest(running: Server, watch: Watch) -> float:
    """Wait until nothing is under way; returns after how many seconds. Raises ``Failure``.

    Idle requests make the engine publish its gauges.
    """
    began_s = time.monotonic()
    while True:
        body = {"prompt": [3], "max_tokens": 1, "temperature": 0.0}
        try:
            async with running.session.post(f"{running.url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise Failure(f"at rest: {answer.status} {await answer.text()}")
        except aiohttp.ClientError as error:
            running.assert_alive()
            raise Failure(f"at rest: {error!r}") from error
        await asyncio.sleep(SCRAPE_S)
        await watch.scrape()
        left = watch.not_at_rest()
        took_s = time.monotonic() - began_s
        if not left:
            return took_s
        if took_s > PATIENCE_S:
            raise Failure(f"not at rest after {took_s:.0f} s: {left}")


# --- samples, for the same page as the other layers' ---


def sample_of(watch: Watch, at_s: float, requests: int, fs_blocks: int) -> Sample:
    """Return this moment. ``fs`` doesn't count its blocks: ``fs_blocks`` are its files."""
    on_disk = watch.gauge("kvtier:disk_blocks", tier=DISK)
    return Sample(
        at_s=round(at_s, 3),
        requests=requests,
        blocks_read=int(watch.total("vllm:kv_offload_load_bytes")) // BLOCK_BYTES,
        blocks_stored=int(watch.total("vllm:kv_offload_store_bytes")) // BLOCK_BYTES,
        lookups=int(watch.total("vllm:external_prefix_cache_queries")) // BLOCK_TOKENS,
        hits=int(watch.total("vllm:external_prefix_cache_hits")) // BLOCK_TOKENS,
        resident={
            "primary": _slots(watch, "ready"),
            DISK: int(on_disk or 0),
            FS: fs_blocks,
        },
        breakers={tier: state for tier in TIERS if (state := breaker_of(watch, tier)) is not None},
        quarantined=_slots(watch, "quarantined"),
    )


def breaker_of(watch: Watch, tier: str) -> str | None:
    """Return the worst state of a tier's breakers; None if the server has published none yet."""
    found = (
        watch.gauge("kvtier:tier_breaker_state", tier=tier, work=work) for work in NAMES.values()
    )
    states = [BreakerState(int(value)) for value in found if value is not None]
    return worst(states).name if states else None


def noticed_by(watch: Watch, tier: str) -> dict[str, int]:
    """Return what a tier has noticed of the faults, over all servers."""
    return {name: int(watch.total(f"kvtier:tier_{name}", tier=tier)) for name in NOTICED}


def blocks_from(watch: Watch, tier: str) -> float:
    """Return how many blocks a tier has delivered, to all servers."""
    return watch.total("vllm:kv_offload_tiering_read_bytes", tier=tier) / BLOCK_BYTES


def _slots(watch: Watch, state: str) -> int:
    return int(watch.gauge("kvtier:primary_slots", state=state) or 0)
