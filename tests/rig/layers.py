"""The layers that a scenario's model has: one KV-cache group for each kind."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_cache_interface import KVCacheSpec

BLOCK_TOKENS = 4
_HEADS = 2
_HEAD_SIZE = 8
PAGE_BYTES = BLOCK_TOKENS * _HEADS * _HEAD_SIZE * 2 * 2  # keys and values, of two bytes


WORD_BYTES = 8  #: the model writes words

SMALLER: Final = {"half": 2, "quarter": 4}
"""Layers of a part of the bytes a token: vLLM gives them so many times more tokens a block, so
that all pages are of one size."""


def layers(
    kinds: Sequence[str],
    layers_each: int,
    ranks: int = 1,
    stage: int = 0,
    *,
    drafts: int = 0,
    checkpoints: int = 0,
) -> dict[str, KVCacheSpec]:
    """Return the spec of each layer of a stage.

    Kinds: full, mla, mamba, window:TOKENS, and those of ``SMALLER`` with a window, as half:TOKENS.
    ``drafts``: how many tokens are proposed after each step. ``checkpoints``: how many states
    from within a step a Mamba layer keeps, beside the one behind it.
    """
    return {
        f"model.layers.{number * layers_each + n}.{kind}": _spec(kind, ranks, drafts, checkpoints)
        for number, kind in enumerate(kinds, stage * len(kinds))
        for n in range(layers_each)
    }


def own_bytes(spec: Any, layout: str) -> int:
    """Return how much a layer has of a block: its page, without padding where pages lie apart."""
    if layout.startswith("B"):
        return int(spec.page_size_bytes)
    if isinstance(spec, MambaSpec):
        return replace(spec, page_size_padded=None).page_size_bytes
    return int(spec.unpadded_page_size_bytes)


def _spec(kind: str, ranks: int, drafts: int, checkpoints: int) -> KVCacheSpec:
    kind, _, window = kind.partition(":")
    shape: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": _HEADS // ranks,
        "head_size": _HEAD_SIZE // SMALLER.get(kind, 1),
        "dtype": torch.float16,
    }
    if window:
        return SlidingWindowSpec(sliding_window=int(window), **shape)
    if kind == "full":
        return FullAttentionSpec(**shape)
    if kind == "mla":
        # As many bytes as the others have: vLLM wants pages of one size.
        return MLAAttentionSpec(
            **shape | {"num_kv_heads": 1, "head_size": PAGE_BYTES // BLOCK_TOKENS // 2}
        )
    assert kind == "mamba"
    return MambaSpec(
        block_size=BLOCK_TOKENS,
        shapes=((3, 4), (2, 8)),
        dtypes=(torch.float16, torch.float32),
        page_size_padded=PAGE_BYTES // ranks,
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
        num_prefill_checkpoint_blocks=checkpoints,
        prefill_checkpoint_alignment=1 if checkpoints else None,
    )
