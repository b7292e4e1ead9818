"""Reads vLLM's arguments beside the configuration, and computes the size of a block from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from cyclopts import Parameter

from kvtier.errors import ConfigError
from kvtier.tools.cli.options import File  # noqa: TC001 - read when the command starts
from kvtier.tools.sizing.geometry import read_geometry
from kvtier.tools.sizing.model_config import config_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.tools.checking.findings import Findings

BLOCK_TOKENS: Final = 16
"""vLLM's default ``--block-size``, unless the device needs larger blocks."""


@Parameter(name="*", group="vLLM's arguments")
@dataclass(frozen=True, kw_only=True)
class EngineArguments:
    """Arguments of vLLM, by vLLM's names, and the value of ``{dp_rank}``."""

    model: Annotated[File | None, Parameter(metavar="MODEL")] = None
    """finds weights that cannot be identified; its config.json, in that folder or in the
    hub's cache, also gives the size of a block"""

    load_format: Annotated[str, Parameter(metavar="FORMAT")] = "auto"
    """as vLLM gets it"""

    block_size: Annotated[int | None, Parameter(metavar="TOKENS")] = None
    """tokens in vLLM's blocks; by default 16"""

    tensor_parallel_size: Annotated[int, Parameter(metavar="N")] = 1
    """as vLLM gets it"""

    kv_cache_dtype: Annotated[str, Parameter(metavar="NAME")] = "auto"
    """as vLLM gets it"""

    kv_offloading_size: Annotated[float | None, Parameter(metavar="GIB")] = None
    """in place of cpu_bytes_to_use"""

    data_parallel_size: Annotated[int, Parameter(metavar="N")] = 1
    """engines on this host; each has cpu_bytes_to_use for itself"""

    dp_rank: Annotated[int, Parameter(metavar="N")] = 0
    """number of the engine that {dp_rank} stands for"""

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for an impossible size."""
        if self.block_size is not None and self.block_size < 1:
            raise ConfigError(f"--block-size={self.block_size} must be at least 1.")


DEFAULTS: Final = EngineArguments()


class BlockSize(NamedTuple):
    """The bytes of a block of all workers; 0 if not known."""

    least: int
    certain: int
    is_latent: bool = False  #: whether each worker has all of it


def block_size_of(
    engine: EngineArguments, extra: Mapping[str, Any], findings: Findings, *, answers: bool
) -> BlockSize:
    """Return the size of a block. ``answers``: whether the model's storage responds."""
    unknown = "whether blocks fit into cpu_bytes_to_use and each tier"
    config = config_of(engine.model) if engine.model is not None and answers else None
    if config is None:
        findings.not_checked.append(
            f"{unknown}: give --block-bytes, or --model with a folder that has its config.json, or "
            "a model in the hub's cache"
        )
        return BlockSize(0, 0)
    try:
        model = read_geometry(config, dtype=engine.kv_cache_dtype)
        token_bytes = model.bytes_per_token_in_vllm(engine.tensor_parallel_size)
    except ConfigError as problem:
        findings.not_checked.append(f"{unknown} ({problem}): give --block-bytes")
        return BlockSize(0, 0)
    tokens = offloaded_tokens(engine, extra)
    if not model.is_uniform:
        findings.not_checked.append(
            f"whether blocks fit into each tier: the layers of {engine.model} differ, or its cache "
            "may be quantized. Give --block-bytes"
        )
        return BlockSize(tokens * model.layer_token_bytes_min(), 0, model.is_latent)
    block_bytes = tokens * token_bytes
    findings.noted.append(
        f"a block has {block_bytes} bytes: {tokens} tokens of {token_bytes} bytes, by the config "
        f"of {engine.model}"
    )
    return BlockSize(block_bytes, block_bytes, model.is_latent)


def offloaded_tokens(engine: EngineArguments, extra: Mapping[str, Any]) -> int:
    """Return the tokens of an offloaded block; wrong keys are refused elsewhere."""
    tokens, blocks = extra.get("block_size"), extra.get("blocks_per_chunk")
    if type(tokens) is int and tokens > 0:
        return tokens
    blocks = blocks if type(blocks) is int and blocks > 0 else 1
    return blocks * (BLOCK_TOKENS if engine.block_size is None else engine.block_size)
