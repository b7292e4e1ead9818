"""``kvtier size``: recommends how large each tier should be."""

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
    """Recommend how large each tier should be.

    Needs a model: its config.json, or three numbers. With a trace it says what each size would hit
    and where the knee is; with prices, how large each tier should be.
    """
    from kvtier.tools.cli.sizing import run_size  # noqa: PLC0415 - only what was asked for

    return run_size(model, tiers, workload, reading, json)
