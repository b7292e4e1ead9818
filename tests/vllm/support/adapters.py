"""LoRA adapters of random numbers for the tests' Llama."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 4
RANK = 8
HIDDEN = 128
OUT = {"q_proj": 128, "k_proj": 64, "v_proj": 64}


def write_adapter(folder: Path, seed: int) -> None:
    """Write an adapter, or others over one that is there."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, out in OUT.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=dice) * 0.2
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, RANK, generator=dice) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [*OUT],
        "base_model_name_or_path": "x",
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
