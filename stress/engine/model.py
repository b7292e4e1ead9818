"""A small model with random weights, made on the spot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def make_model(folder: Path, seed: int) -> Path:
    """Write a small Llama with random weights; no download."""
    import torch  # noqa: PLC0415 - seconds, which a test of what else this layer has doesn't need
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - as above

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    )
    make: Any = LlamaForCausalLM
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)  # spreads the logits, so that ties are rare
    model.save_pretrained(folder)
    return folder
