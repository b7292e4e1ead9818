"""Runs ``kvtier size``: reads the model, replays the trace, and shows the gain of each size."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.errors import ConfigError
from kvtier.plugin_api.sizes import read_bytes, shown_bytes
from kvtier.settings.runtime_config import DEFAULT_POLICY
from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.options import refuse_unused
from kvtier.tools.cli.trace_input import describe, read_trace_in_sight
from kvtier.tools.replay.curves import Workload, parse_capacities, parse_policies, replay
from kvtier.tools.sizing.geometry import Geometry, make_geometry, read_geometry
from kvtier.tools.sizing.model_config import config_of
from kvtier.tools.sizing.recommend import (
    GIB,
    SizePoint,
    TierAdvice,
    Workfacts,
    advise,
    knee_of_curve,
    saved_by_a_gib_more,
    tier_table,
)
from kvtier.tools.terminal import check_can_write, progress, table, write_json
from kvtier_backends.disk.folder.claim import capacity_bytes_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.tools.cli.options import (
        ModelOptions,
        TiersOptions,
        TraceOptions,
        WorkloadOptions,
    )

BLOCK_TOKENS: Final = 16  #: vLLM's default, unless a trace has another
PRICE_MAX: Final = 1e9
_TIER: Final = re.compile(r"\s*([A-Za-z0-9_-]{1,30})\s*=\s*([^=\s]{1,20})\s*")


class _Asked(NamedTuple):
    """The command line, read and checked."""

    geometry: Geometry
    tp: int
    tiers: dict[str, int]  # bytes
    prices: dict[str, float]

    def token_bytes(self) -> int:
        return self.geometry.bytes_per_token_in_vllm(self.tp)


def run_size(
    model: ModelOptions,
    tiers: TiersOptions,
    workload: WorkloadOptions,
    reading: TraceOptions,
    json_file: str | None,
) -> int:
    """Print the recommendation, and write the report if requested. Returns the exit status.

    After Ctrl-C the curve ends early, and nothing is recommended.
    """
    asked = _Asked(_geometry(model), model.tp, _tiers(tiers.tiers), _prices(tiers.price))
    if json_file:
        check_can_write(json_file, workload.trace, model.model)
    if workload.trace is None:
        lines = replace(reading, block_tokens=None)
        refuse_unused("without --trace. Give it too.", lines, workload, price=tiers.price)
        report = _without_trace(reading.block_tokens or BLOCK_TOKENS, asked)
    else:
        report = _with_trace(workload.trace, workload, reading, asked)
    if json_file:
        write_json(json_file, report)
        print(f"Figures: {json_file}")
    return 0 if report["complete"] else INTERRUPTED


def _without_trace(block_tokens: int, asked: _Asked) -> dict[str, Any]:
    token_bytes = asked.token_bytes()
    _tier_blocks(asked.tiers, token_bytes * block_tokens, 1)  # refuses one without room for a block
    report = _model(asked, block_tokens)
    _show_model(report)
    if asked.tiers:
        tokens = report["tokens_per_tier"]
        rows = [
            [name, shown_bytes(size), f"{tokens[name]:,}"] for name, size in asked.tiers.items()
        ]
        table("Tokens per tier", ["tier", "size", "tokens"], rows)
        _show_engines(asked, next(iter(tokens.values())), "first tier")
    return report


def _with_trace(
    trace_file: str, given: WorkloadOptions, reading: TraceOptions, asked: _Asked
) -> dict[str, Any]:
    policies = parse_policies(given.policy or DEFAULT_POLICY)
    if len(policies) != 1:
        raise ConfigError(f"--policy {given.policy}: size works with one. Name one.")
    trace = read_trace_in_sight(trace_file, reading)
    workload = Workload(trace)
    facts = Workfacts(
        block_bytes=asked.token_bytes() * trace.block_tokens,
        block_tokens=trace.block_tokens,
        requests=len(trace.requests),
        references=trace.references,
        largest_request_blocks=max(len(request.blocks) for request in trace.requests),
    )
    tier_blocks = _tier_blocks(asked.tiers, facts.block_bytes, trace.distinct_blocks)
    ladder = parse_capacities(given.capacities, trace.distinct_blocks)
    points, complete = _replay(workload, policies[0], {*ladder, *tier_blocks.values()})

    best = knee_of_curve(points) if complete else None
    curve = _curve(points, facts)
    report = _model(asked, trace.block_tokens) | {
        "complete": complete,
        "trace": describe(trace),
        "policy": policies[0],
        "curve": curve,
        "knee": None if best is None else curve[best],
    }
    _show_model(report)
    title = f"Hit ratio of {trace.name} at each size, policy {policies[0]}"
    _show_curve(title if complete else f"{title} (interrupted: incomplete)", curve, best)
    if complete:
        report |= _tiers_with_trace(asked, facts, points, best, tier_blocks)
    return report


def _replay(workload: Workload, policy: str, capacities: set[int]) -> tuple[list[SizePoint], bool]:
    """Replay at each capacity; the last point is the endless cache, which needs no replay."""
    points = []
    smaller = sorted(each for each in capacities if each < workload.distinct_blocks)
    try:
        with progress("replaying", len(smaller) * len(workload.requests)) as bar:
            for capacity in smaller:
                point = replay(workload, policy, capacity, bar.advance)
                points.append(SizePoint(capacity, point.hit_ratio))
    except KeyboardInterrupt:
        return points, False
    points.append(SizePoint(workload.distinct_blocks, workload.endless_hit_ratio()))
    return points, True


def _tiers_with_trace(
    asked: _Asked,
    facts: Workfacts,
    points: Sequence[SizePoint],
    best: int | None,
    tier_blocks: Mapping[str, int],
) -> dict[str, Any]:
    """Show the existing and the recommended tiers; return their part of the report."""
    report: dict[str, Any] = {}
    point_of = {point.blocks: point for point in points}
    first = None if best is None else ("size at the knee", points[best].blocks)
    if tier_blocks:
        given = tier_table(
            [
                (name, point_of[blocks], asked.prices.get(name))
                for name, blocks in tier_blocks.items()
            ]
        )
        report["tiers"] = _tier_figures(given, facts)
        _show_tiers("The tiers given", report["tiers"])
        first = (f"tier {given[0].name}, as given", given[0].blocks)
    if asked.prices:
        advice = advise(points, asked.prices, facts)
        useful = [each for each in advice if each is advice[0] or each.own_hit_ratio]
        recommended = _recommended(useful, facts)
        report["recommended"] = recommended
        report["extra_config"] = None
        if recommended:
            _show_tiers("Recommended at these prices", recommended)
            first = (f"tier {recommended[0]['name']}, as recommended", recommended[0]["blocks"])
            for each in advice:
                if each not in useful:
                    print(f"Left out: {each.name}, no larger than a faster tier: it has no hits.")
            report["extra_config"] = _show_extra_config(recommended, facts.block_tokens)
    if not points[-1].hit_ratio:
        print("No block of this trace is used twice: a tier of any size would have no hit.")
    if first is not None:
        report["engines"] = _show_engines(asked, first[1] * facts.block_tokens, first[0])
    return report


# --- the command line ---


def _geometry(model: ModelOptions) -> Geometry:
    layers, kv_heads, head_dim = model.layers, model.kv_heads, model.head_dim
    flags = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    given = [name for name, value in flags.items() if value is not None]
    if model.model is not None:
        if given:
            raise ConfigError(f"--model and {given[0]} exclude each other. Give one of them.")
        config = config_of(model.model)
        if config is None:
            raise ConfigError(
                f"--model {model.model}: is not on this host. Name a folder with the model's "
                "config.json, that file, or a model in the hub's cache."
            )
        return read_geometry(config, dtype=model.dtype)
    if layers is None or kv_heads is None or head_dim is None:
        raise ConfigError(f"Give --model, or all of {', '.join(flags)}.")
    return make_geometry(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=model.dtype)


def _pairs(text: str | None, name: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in text.split(",") if text else ():
        found = _TIER.fullmatch(part)
        if found is None or found[1] in pairs:
            raise ConfigError(f"{name} {text}: {part!r} is not one more TIER=VALUE.")
        pairs[found[1]] = found[2]
    return pairs


def _tiers(text: str | None) -> dict[str, int]:
    return {tier: read_bytes(size, tier) for tier, size in _pairs(text, "--tiers").items()}


def _prices(text: str | None) -> dict[str, float]:
    prices = {}
    for tier, price in _pairs(text, "--price").items():
        try:
            prices[tier] = float(price)
        except ValueError:
            prices[tier] = math.nan
        if not 0 < prices[tier] <= PRICE_MAX:
            raise ConfigError(f"--price {text}: {price!r} is not a price above 0.")
    return prices


def _tier_blocks(tiers: Mapping[str, int], block_bytes: int, distinct: int) -> dict[str, int]:
    blocks = {}
    for name, size in tiers.items():
        blocks[name] = min(size // block_bytes, distinct)
        if not blocks[name]:
            raise ConfigError(
                f"--tiers: {name} has {shown_bytes(size)}, and a block takes "
                f"{shown_bytes(block_bytes)}. "
                "Make it larger, with a unit such as GiB."
            )
    return blocks


# --- figures ---


def _model(asked: _Asked, block_tokens: int) -> dict[str, Any]:
    token_bytes = asked.token_bytes()
    return {
        "report": "kvtier size",
        "complete": True,
        "model": {
            "name": asked.geometry.name,
            "dtype": asked.geometry.dtype,
            "groups": [group._asdict() for group in asked.geometry.groups],
            "notes": [*asked.geometry.notes, *_notes_on_tp(asked)],
            "tp": asked.tp,
        },
        "bytes_per_token": token_bytes,
        "bytes_per_token_per_rank": asked.geometry.bytes_per_token_per_rank(asked.tp),
        "block_tokens": block_tokens,
        "bytes_per_block": token_bytes * block_tokens,
        "tokens_per_gib": GIB // token_bytes,
        "tokens_per_tier": {name: size // token_bytes for name, size in asked.tiers.items()},
    }


def _notes_on_tp(asked: _Asked) -> list[str]:
    geometry, tp = asked.geometry, asked.tp
    if tp == 1:
        return []
    if geometry.is_latent:
        note = (
            "vLLM's offloading stores latent vectors once if there is one node and no other "
            f"parallelism; otherwise, and in SGLang, each of {tp} ranks stores its own"
        )
        return [note]
    heads = min(group.kv_heads for group in geometry.groups)
    if tp > heads:
        return [f"{tp} ranks share {heads} KV heads: each head is stored {tp // heads} times"]
    return []


def _curve(points: Sequence[SizePoint], facts: Workfacts) -> list[dict[str, Any]]:
    if not points:
        return []
    return [
        {
            "blocks": point.blocks,
            "bytes": point.blocks * facts.block_bytes,
            "tokens": point.blocks * facts.block_tokens,
            "hit_ratio": point.hit_ratio,
            "tokens_saved_per_1000_requests_by_a_gib_more": saved,
        }
        for point, saved in zip(points, saved_by_a_gib_more(points, facts), strict=True)
    ]


def _tier_figures(tiers: Sequence[TierAdvice], facts: Workfacts) -> list[dict[str, Any]]:
    return [_figures_of(tier, tier.blocks * facts.block_bytes, facts) for tier in tiers]


def _recommended(tiers: Sequence[TierAdvice], facts: Workfacts) -> list[dict[str, Any]]:
    """Return the figures of tiers that are all disks, except the first."""
    return _tier_figures(tiers[:1], facts) + [
        _figures_of(tier, capacity_bytes_for(tier.blocks, facts.block_bytes), facts)
        for tier in tiers[1:]
    ]


def _figures_of(tier: TierAdvice, size: int, facts: Workfacts) -> dict[str, Any]:
    return {
        "name": tier.name,
        "blocks": tier.blocks,
        "bytes": size,
        "tokens": tier.blocks * facts.block_tokens,
        "hit_ratio": tier.own_hit_ratio,
        "hit_ratio_so_far": tier.hit_ratio,
        "price": None if tier.price_per_gib is None else tier.price_per_gib * size / GIB,
    }


# --- tables, made of the figures ---


def _show_model(report: Mapping[str, Any]) -> None:
    model = report["model"]
    rows = [
        ["bytes per token", f"{report['bytes_per_token']:,}"],
        [f"bytes per block of {report['block_tokens']} tokens", f"{report['bytes_per_block']:,}"],
        ["tokens in a GiB", f"{report['tokens_per_gib']:,}"],
        *(
            [
                f"{group['what']}, {group['layers']} layers: KV heads x entries",
                f"{group['kv_heads']} x {group['entries_per_head']}",
            ]
            for group in model["groups"]
        ),
    ]
    table(f"KV cache of {model['name']}, {model['dtype']}", ["", ""], rows)
    for note in model["notes"]:
        print(f"- {note}")


def _show_curve(title: str, curve: Sequence[Mapping[str, Any]], best: int | None) -> None:
    rows = []
    for index, point in enumerate(curve):
        saved = point["tokens_saved_per_1000_requests_by_a_gib_more"]
        rows.append(
            [
                f"{100 * point['blocks'] / curve[-1]['blocks']:.3g} %",
                f"{point['blocks']:,}",
                shown_bytes(point["bytes"]),
                f"{point['tokens']:,}",
                f"{point['hit_ratio']:.3f}",
                "-" if saved is None else f"{saved:,.0f}",
                "knee" if index == best else "",
            ]
        )
    columns = ["share", "blocks", "size", "tokens", "hit ratio", "1 GiB more saves", ""]
    table(title, columns, rows)
    print("1 GiB more saves: prompt tokens per 1,000 requests that need not be computed.")


def _show_tiers(title: str, tiers: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        [
            tier["name"],
            shown_bytes(tier["bytes"]),
            f"{tier['tokens']:,}",
            f"{tier['hit_ratio']:.3f}",
            f"{tier['hit_ratio_so_far']:.3f}",
            "-" if tier["price"] is None else f"{tier['price']:,.2f}",
        ]
        for tier in tiers
    ]
    table(title, ["tier", "size", "tokens", "hits here", "hits so far", "price"], rows)


def _show_extra_config(tiers: Sequence[Mapping[str, Any]], block_tokens: int) -> dict[str, Any]:
    """Print a configuration of the tiers: the most expensive in memory, the others disks."""
    config = {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": tiers[0]["bytes"],
        **({} if block_tokens == BLOCK_TOKENS else {"block_size": block_tokens}),
        "secondary_tiers": [
            {
                "type": "disk",
                "name": tier["name"],
                "path": f"/path/to/{tier['name']}",
                "capacity_bytes": tier["bytes"],
            }
            for tier in tiers[1:]
        ],
    }
    if tiers[1:]:
        print("A disk tier keeps a part of its size free, for blocks that it moves.")
    print(f"kv_connector_extra_config, with paths that you choose:\n{json.dumps(config, indent=2)}")
    return config


def _show_engines(asked: _Asked, tokens: int, what: str) -> dict[str, int]:
    """Show the engines' options for a number of tokens; return them for the report."""
    per_rank = tokens * asked.geometry.bytes_per_token_per_rank(asked.tp)
    sizes = {
        "vllm_cpu_bytes_to_use": tokens * asked.token_bytes(),
        "sglang_hicache_size": math.ceil(per_rank / 10**9),
    }
    print(
        f"{tokens:,} tokens ({what}):\n"
        f"  vLLM: cpu_bytes_to_use={sizes['vllm_cpu_bytes_to_use']} "
        "(total over all workers, not per rank)\n"
        f"  SGLang: --hicache-size {sizes['sglang_hicache_size']} "
        f"(GB of 10^9 bytes, per rank) with --tp {asked.tp}"
    )
    return sizes
