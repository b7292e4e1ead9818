"""``kvtier bench tier``: runs the measurements, and prints and writes the results."""

from __future__ import annotations

import asyncio
import json
import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.sizes import read_bytes
from kvtier.settings.runtime_config import TierConfig
from kvtier.tools.bench.about import about_machine
from kvtier.tools.bench.call_legs import KINDS
from kvtier.tools.bench.prompt_requests import PROMPT_BLOCKS, requests_shown
from kvtier.tools.bench.tier import TierBenchOptions, measure, plain_client_class, sides_count
from kvtier.tools.bench.tier_figures import CallFigures, figures
from kvtier.tools.terminal import progress, table, write_json
from kvtier_backends.shared.compression import COMPRESSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tools.bench.tier import TierLegs

PAGE_BYTES: Final = 4096
_OPTIONS_OF_KEYS: Final = tuple(
    f"{kind}_{place}" for kind in ("auth_key", "encryption_key") for place in ("env", "file")
)


def run(tiers: Sequence[str], sizes: str, options: TierBenchOptions, json_file: str | None) -> None:
    """Measure the tiers one after the other, print a table for each, and write the file."""
    configs = [_tier(text, number) for number, text in enumerate(tiers, start=1)]
    block_bytes = block_sizes(sizes)
    report: dict[str, Any] = {**about_machine(), "options": asdict(options), "tiers": []}
    for tier in configs:
        found: list[tuple[TierLegs, Sequence[CallFigures]]] = []
        try:
            for size in block_bytes:
                measured = _measure(tier, size, options)
                found.append((measured, figures(measured)))
        finally:  # a size that can't be measured, or Ctrl-C, does not discard the results before it
            if found:
                _print_figures(tier, found, options)
        report["tiers"].append(_to_json(tier, found))
    if json_file:
        write_json(json_file, report)


def _tier(text: str, number: int) -> TierConfig:
    """Read an entry of ``secondary_tiers``. Raises ``Misuse``, which repeats no value."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise Misuse(
            f"--tier number {number} is no JSON ({problem}). Give one entry of secondary_tiers, "
            'such as \'{"type": "redis", "url": "redis://127.0.0.1:6379"}\'.'
        ) from None
    if not isinstance(values, dict):
        raise Misuse(f"--tier number {number} is no mapping. Give one entry of secondary_tiers.")
    config = TierConfig.from_mapping(number, values)
    plain_client_class(config.type)
    for key in _OPTIONS_OF_KEYS:
        if key in config.options:
            raise Misuse(
                f"--tier number {number}: {key} is not for here: --protection measures signed and "
                "encrypted blocks, with keys of its own. Remove it."
            )
    if COMPRESSION in config.options:
        raise Misuse(
            f"--tier number {number}: {COMPRESSION} is not for here: --compression measures "
            "compressed blocks beside those that are not. Remove it."
        )
    return config


def block_sizes(text: str) -> list[int]:
    """Return the sizes that ``--block-bytes`` names, each once. Raises ``Misuse``."""
    words = [word for word in text.split(",") if word.strip()]
    sizes = list(dict.fromkeys(read_bytes(word, "--block-bytes") for word in words))
    if not sizes:
        raise Misuse("--block-bytes names no size. Give one at least, e.g. 64KiB.")
    for size in sizes:
        if size < PAGE_BYTES or size % PAGE_BYTES:
            raise Misuse(f"--block-bytes {size} must be a multiple of {PAGE_BYTES}, for O_DIRECT.")
    return sizes


def _measure(tier: TierConfig, block_bytes: int, options: TierBenchOptions) -> TierLegs:
    legs = options.rounds * sides_count(tier.type, options) * len(KINDS)
    with progress(f"{tier.type}, blocks of {shown_size(block_bytes)}", legs) as shown:
        try:
            return asyncio.run(measure(tier, block_bytes, options, shown.advance))
        except StoreFault as fault:
            raise Misuse(
                f"--tier: {tier.name} failed while it was measured: {str(fault).rstrip('.')}. "
                "Look at its server, and start again."
            ) from fault


def _print_figures(
    tier: TierConfig,
    found: Sequence[tuple[TierLegs, Sequence[CallFigures]]],
    options: TierBenchOptions,
) -> None:
    rows = [
        _row(measured.block_bytes, each)
        for measured, of_size in found
        for each in of_size
        if each.is_best_client or not each.is_client
    ]
    columns = ["", "calls", "MB/s", "of rounds", "p50, ms", "p99, ms", "CPU s a GB", "ratio"]
    table(f"{tier.type} tier", [*columns, "of rounds", "holds"], rows)
    notes = [
        ["calls", "how many at once, of how many blocks each; p50 and p99 are of one call"],
        ["ratio", f"to the client's best MB/s; at least {found[0][0].share_promised} is promised"],
        ["bytes of a leg", f"{shown_size(options.leg_bytes)}, medians of {options.rounds} rounds"],
        ["cores", f"{about_machine()['cores']}, shared with the server if it is on this machine"],
    ]
    notes += [
        [f"requests for {PROMPT_BLOCKS} blocks", requests_shown(measured.prompt_requests)]
        for measured, _ in found[:1]
        if measured.prompt_requests
    ]
    table("", ["", ""], notes)


def _row(size: int, each: CallFigures) -> list[str]:
    side = each.side if not each.is_client else each.side.rpartition(",")[0]
    return [
        f"{shown_size(size)} {each.kind}: {side}",
        f"{each.calls_at_once} of {each.blocks_a_call}",
        f"{each.median_mb_per_s:,.0f}",
        spread(each.mb_per_s, 0),
        f"{each.call_p50_ms:.1f}",
        f"{each.call_p99_ms:.1f}",
        f"{statistics.median(each.cpu_s_per_gb):.2f}",
        f"{each.median_ratio:.2f}" if not each.is_client else "",
        spread(each.ratios, 2) if not each.is_client else "",
        "" if each.holds is None else "yes" if each.holds else "NO",
    ]


def _to_json(
    tier: TierConfig, found: Sequence[tuple[TierLegs, Sequence[CallFigures]]]
) -> dict[str, Any]:
    sizes = [
        {
            "block_bytes": measured.block_bytes,
            "prompt_requests": measured.prompt_requests,
            "figures": [each.to_json() for each in of_size],
        }
        for measured, of_size in found
    ]
    return {"type": tier.type, "sizes": sizes}


def spread(values: Sequence[float], digits: int) -> str:
    """Show the smallest and the largest."""
    return f"{min(values):,.{digits}f}..{max(values):,.{digits}f}"


def shown_size(count: int) -> str:
    """Return a size with its unit, without rounding it."""
    if count % (1 << 20) == 0:
        return f"{count >> 20} MiB"
    return f"{count >> 10} KiB" if count % (1 << 10) == 0 else f"{count} bytes"
