"""The demo's model: a small Llama with random weights, and a tokenizer; neither is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY: Final = 512
PANGRAM: Final = "The quick brown fox jumps over the lazy dog. "
"""The tokenizer has a token for each of these words, and spells all others."""


class LlamaShape(NamedTuple):
    """Sizes of a Llama."""

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


def write_model(folder: Path) -> None:
    """Save the demo's model with a tokenizer of bytes: the same files each time."""
    torch.manual_seed(0)
    make_model(folder)
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [PANGRAM * 2],
        vocab_size=VOCABULARY,
        min_frequency=1,
        special_tokens=[*special.values()],  # in the order of their numbers in a LlamaConfig
        show_progress=False,
    )
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    PreTrainedTokenizerFast(tokenizer_file=str(file), **special).save_pretrained(folder)
