"""The models that engine tests run on: random weights, no download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 512
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_llama(folder: Path, **shape: Any) -> Path:
    """Write a Llama of 4 layers with random weights: one KV-cache group."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(LlamaForCausalLM, LlamaConfig(**_SHAPE | shape), folder)


def make_gemma(folder: Path) -> Path:
    """Write a Gemma 3 with sliding-window and full attention: two KV-cache groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return _save(
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **_SHAPE,
            head_dim=32,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 2,
            # Tied, a random Gemma only repeats its last token, whatever the cache holds.
            tie_word_embeddings=False,
        ),
        folder,
    )


def _save(model_class: Any, config: Any, folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Spread the logits: a tie would make equal runs give different tokens.
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder
