"""``kvtier replay``: plays a trace through the runtime, or through policies alone."""

from __future__ import annotations

from typing import Annotated

from kvtier.tools.cli.options import (
    HYPHEN,
    EngineOptions,
    File,
    JsonFile,
    PolicyOptions,
    TierOptions,
    TraceOptions,
    refuse_unused,
)


def replay(
    trace: Annotated[File, HYPHEN],
    /,
    *,
    reading: TraceOptions = TraceOptions(),
    tiers: TierOptions = TierOptions(),
    engine: EngineOptions = EngineOptions(),
    alone: PolicyOptions = PolicyOptions(),
    json: JsonFile = None,
) -> int:
    """Play a trace of requests through the real runtime, on real tiers, and check every byte.

    Prompts arrive as in the trace, and are looked up, loaded, computed and stored as by an engine;
    computing only takes the stated time. With --policies, only eviction policies are
    compared, without the runtime.

    Parameters
    ----------
    trace
        the trace; - reads stdin; gzip and zstd are recognised
    """
    if alone.policies is not None:
        refuse_unused(
            "with --policies, which compares policies without the runtime. Leave out either.",
            tiers,
            engine,
        )
        from kvtier.tools.cli.curves import run_curves  # noqa: PLC0415 - only what was asked for

        return run_curves(trace, reading, alone.policies, alone.capacities, json)
    refuse_unused("without --policies. Give it too.", alone)
    from kvtier.tools.cli.replaying import run_replay  # noqa: PLC0415 - as above

    return run_replay(trace, reading, tiers, engine, json)
