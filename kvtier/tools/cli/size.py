"""``kvtier size``: recommends the size of each tier."""

from __future__ import annotations

from kvtier.tools.cli.options import (
    JsonFile,
    ModelOptions,
    TiersOptions,
    TraceOptions,
    WorkloadOptions,
)


def size(
    *,
    model: ModelOptions = ModelOptions(),
    tiers: TiersOptions = TiersOptions(),
    workload: WorkloadOptions = WorkloadOptions(),
    reading: TraceOptions = TraceOptions(),
    json: JsonFile = None,
) -> int:
    """Recommend the size of each tier.

    Needs a model: its config.json, or three numbers. With a trace it shows the hit ratio of each
    size and the knee; with prices, the recommended size of each tier.
    """
    from kvtier.tools.cli.sizing import run_size  # noqa: PLC0415 - only what was asked for

    return run_size(model, tiers, workload, reading, json)
