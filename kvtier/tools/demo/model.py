"""The demo's model: a small Llama with random weights, which takes no download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from transformers import LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY: Final = 512


class LlamaShape(NamedTuple):
    """How large a Llama is."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tokens_max: int


DEMO_SHAPE: Final = LlamaShape(4, 4, 2, 64, VOCABULARY, tokens_max=4096)


def make_model(folder: Path, shape: LlamaShape = DEMO_SHAPE) -> None:
    """Save a Llama with random weights; no download."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.heads * shape.head_size,
        intermediate_size=4 * shape.heads * shape.head_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.tokens_max,
    )
    model: Any = LlamaForCausalLM
    model(config).save_pretrained(folder)
