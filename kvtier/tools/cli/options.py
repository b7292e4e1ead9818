"""The options of the commands, in groups. A light module: each start of ``kvtier`` reads it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

from cyclopts import Parameter

from kvtier.errors import Misuse

if TYPE_CHECKING:
    File = str
else:
    File = str | Path
    """Always a string; the type includes a path so that shells complete file names."""


def _shown_default(value: object) -> str | None:
    """Return a default as ``--help`` shows it; a flag that is off by default needs none."""
    return None if value is None or value is False else str(value)


def _check_file(kind: object, name: object) -> None:
    """Raise ``ValueError`` for a file without a name: an empty variable of the shell."""
    if name == "" and Path in get_args(kind):
        raise ValueError("It is empty: name a file.")


DEFAULTS: Final = Parameter(
    negative=(), show_default=_shown_default, allow_repeating=True, validator=_check_file
)
"""For every option: a flag has no opposite, since all are off by default; the last value counts."""


def _check_is_no_option(kind: object, name: object) -> None:
    """Raise ``ValueError`` for an option that is misspelt, or in the place of a file."""
    _check_file(kind, name)
    if str(name).startswith("-") and name != "-":
        raise ValueError(f"{name} is no option here. A file of that name is ./{name}.")


def refuse_unused(why: str, *groups: Any, **others: object) -> None:  # noqa: ANN401 - dataclasses
    """Raise ``Misuse`` for options that were given, and that this run would not read.

    ``groups``: of options; ``others``: single ones, which are off if false.
    """
    given = [
        each.name for of in groups for each in fields(of) if getattr(of, each.name) != each.default
    ]
    given += [name for name, value in others.items() if value]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise Misuse(f"{names}: no effect {why}")


HYPHEN: Final = Parameter(allow_leading_hyphen=True, validator=_check_is_no_option)
"""For a file that may be ``-``, for stdin or stdout."""

Json = Annotated[
    File | None,
    HYPHEN,
    Parameter(
        metavar="FILE",
        help="write all figures to FILE, as JSON; - writes them to stdout, and no tables",
    ),
]
"""The file for figures, for commands that can write them to stdout."""

JsonFile = Annotated[
    File | None,
    HYPHEN,
    Parameter(metavar="FILE", help="write all figures to FILE, as JSON"),
]
"""The same for the others."""

StoragePlace = Annotated[
    File,
    Parameter(
        help="the folder: a disk tier's path, or an fs tier's root_dir; an address such as "
        "redis://host:port or s3://bucket/prefix; or the tier's entry of secondary_tiers as JSON"
    ),
]

Count = Annotated[int | None, Parameter(metavar="N")]
Size = Annotated[str, Parameter(metavar="SIZE")]
Sizes = Annotated[str, Parameter(metavar="SIZES")]


@Parameter(name="*", group="Reading the trace")
@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Settings for reading a trace of requests."""

    format: Literal["auto", "mooncake", "qwen-bailian", "plain", "recorded"] = "auto"
    """format of the trace; by default recognised by its fields"""

    block_tokens: Count = None
    """tokens in one block of the trace; by default 512 for mooncake, 16 for the others"""

    on_bad_line: Literal["stop", "skip"] = "stop"
    """what to do with a line that is not a request"""

    limit: Count = None
    """read only the first N requests"""


@Parameter(name="*", group="Tiers")
@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """The tiers that a trace is played on."""

    config: Annotated[File | None, HYPHEN, Parameter(metavar="FILE")] = None
    """kv_connector_extra_config as JSON, as vLLM gets it; surrounding keys are ignored"""

    dram: Annotated[str | None, Parameter(metavar="SIZE")] = None
    """the primary tier: 2GiB, or a share of the trace's distinct blocks such as 5%"""

    tier: Annotated[tuple[str, ...], Parameter(metavar="TIER", show_default=False)] = ()
    """a secondary tier: disk:FOLDER:SIZE, fs:FOLDER, memory:SIZE, or an entry of secondary_tiers
    as JSON; may be given several times"""

    policy: Annotated[str | None, Parameter(metavar="NAME")] = None
    """eviction policy of the primary tier, and of tiers with a capacity"""

    block_bytes: Size = "16KiB"
    """bytes in one block of the trace"""

    keep: bool = False
    """keep the tiers' folders at the end, and accept folders that hold blocks"""

    verify: Literal["full", "head", "off"] = "full"
    """the part of read blocks to compare: every byte, the first 4 KiB of each block, or nothing"""


@Parameter(name="*", group="The stated engine")
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Speeds of the engine that plays a trace."""

    prefill_tokens_per_s: Annotated[float, Parameter(metavar="N")] = 100_000.0
    """speed at which prompts are computed, one at a time"""

    decode_tokens_per_s: Annotated[float, Parameter(metavar="N")] = 50.0
    """speed at which each request in flight gets its output"""

    requests_in_flight: Annotated[int, Parameter(metavar="N")] = 128
    """most requests in flight; others wait"""

    speed: Annotated[str, Parameter(metavar="N")] = "max"
    """play arrivals and computing N times as fast, in real time; max skips time in which only
    the engine computes"""


@Parameter(name="*", group="Policies alone, without the runtime")
@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Policies and capacities to compare."""

    policies: Annotated[str | None, Parameter(metavar="NAMES")] = None
    """compare these eviction policies (a,b or all) and MIN, which knows the future"""

    capacities: Sizes = "1%,2%,5%,10%,20%,50%"
    """capacities to compare: blocks, or shares of the trace's distinct blocks"""


@Parameter(name="*", group="The model")
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model whose KV cache is sized."""

    model: Annotated[File | None, HYPHEN, Parameter(metavar="PATH")] = None
    """the model's config.json, the folder with it, or a model in the hub's cache"""

    layers: Count = None
    """without --model: the number of layers with attention"""

    kv_heads: Count = None
    """without --model: the KV heads of each layer"""

    head_dim: Count = None
    """without --model: the length of a head"""

    dtype: Annotated[str, Parameter(metavar="NAME")] = "auto"
    """data type of the KV cache: bfloat16, fp8, ...; by default the model's"""

    tp: Annotated[int, Parameter(metavar="N")] = 1
    """tensor-parallel ranks"""


@Parameter(name="*", group="The tiers, fastest first")
@dataclass(frozen=True, kw_only=True)
class TiersOptions:
    """The existing or planned tiers."""

    tiers: Annotated[str | None, Parameter(metavar="SIZES")] = None
    """tiers that you have or plan: dram=64GiB,disk=2TiB"""

    price: Annotated[str | None, Parameter(metavar="PRICES")] = None
    """price of a GiB in each tier: dram=3.5,disk=0.12"""


@Parameter(name="*", group="The workload")
@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """The requests for the tiers."""

    trace: Annotated[File | None, HYPHEN, Parameter(metavar="FILE")] = None
    """a trace of requests; - reads stdin; gzip and zstd are recognised"""

    policy: Annotated[str | None, Parameter(metavar="NAME")] = None
    """eviction policy; by default the runtime's"""

    capacities: Sizes = "0.5%,1%,2%,3%,5%,7%,10%,15%,20%,25%,30%,40%,50%,70%"
    """capacities to replay: blocks, or shares of the trace's distinct blocks"""
