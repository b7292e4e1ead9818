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


def make_gemma(folder: Path, window: int = 128) -> Path:
    """Write a Gemma 3 with sliding-window and full attention: two KV-cache groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return _save(
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **_SHAPE,
            head_dim=32,
            sliding_window=window,
            layer_types=["sliding_attention", "full_attention"] * 2,
            # Tied, a random Gemma only repeats its last token, whatever the cache holds.
            tie_word_embeddings=False,
        ),
        folder,
    )


def make_gpt_oss(folder: Path) -> Path:
    """Write a gpt-oss: a window of 128 and full attention in turn, sinks, experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return _save(
        GptOssForCausalLM,
        GptOssConfig(
            **_SHAPE,
            head_dim=32,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        folder,
    )


def make_lfm2(folder: Path) -> Path:
    """Write an LFM2: short convolutions, which keep a state, and full attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return _save(
        Lfm2ForCausalLM,
        Lfm2Config(
            **_SHAPE,
            layer_types=["conv", "full_attention"] * 2,
            # vLLM wants these, which the published configurations name.
            conv_dim=_SHAPE["hidden_size"],
            block_dim=_SHAPE["hidden_size"],
            block_ff_dim=_SHAPE["intermediate_size"],
            block_multiple_of=32,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            tie_word_embeddings=False,
        ),
        folder,
    )


def make_granite(folder: Path) -> Path:
    """Write a Granite 4 hybrid: Mamba 2 layers, which keep a state, and full attention."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    return _save(
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **_SHAPE,
            layer_types=["mamba", "attention"] * 2,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=128,
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_d_state=16,
            mamba_n_groups=1,
            mamba_chunk_size=32,
            mamba_expand=2,
            position_embedding_type="rope",
            tie_word_embeddings=False,
        ),
        folder,
    )


def make_eagle_head(folder: Path) -> Path:
    """Write an EAGLE head of one layer, which drafts for the model of ``make_llama``."""
    import json

    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaModel

    shape = _SHAPE | {"num_hidden_layers": 1}
    torch.manual_seed(1)
    weights = LlamaModel(LlamaConfig(**shape)).state_dict()
    hidden = _SHAPE["hidden_size"]
    weights["fc.weight"] = torch.randn(hidden, 2 * hidden) * 0.1
    kept = ("fc.", "layers.", "embed_tokens.")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            name: value
            for name, value in weights.items()
            if name.startswith(kept) and name != "layers.0.input_layernorm.weight"
        },
        folder / "model.safetensors",
    )
    config = {**LlamaConfig(**shape).to_dict(), "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_whisper(folder: Path) -> Path:
    """Write the configuration of a Whisper, which has an encoder, and no weights."""
    from transformers import WhisperConfig, WhisperFeatureExtractor

    WhisperFeatureExtractor().save_pretrained(folder)
    config = WhisperConfig(vocab_size=VOCABULARY, d_model=128, encoder_layers=2, decoder_layers=2)
    config.architectures = ["WhisperForConditionalGeneration"]
    config.save_pretrained(folder)
    return folder


def make_deepseek(folder: Path) -> Path:
    """Write a DeepSeek-V2: latent attention (MLA), and experts."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return _save(
        DeepseekV2ForCausalLM,
        DeepseekV2Config(
            **_SHAPE | {"num_key_value_heads": _SHAPE["num_attention_heads"]},
            kv_lora_rank=512,  # with the next one the only head that vLLM's CPU kernel takes
            qk_rope_head_dim=64,
            q_lora_rank=None,
            qk_nope_head_dim=32,
            v_head_dim=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            moe_intermediate_size=64,
            first_k_dense_replace=1,
            topk_method="greedy",
            topk_group=1,
            n_group=1,
        ),
        folder,
    )


def write_tokenizer(folder: Path) -> None:
    """Give a model a tokenizer of words ``w3``, ``w4`` ..., whose numbers are their ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    words = [*special, *(f"w{number}" for number in range(len(special), VOCABULARY))]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(WordLevel(vocabulary, unk_token=special[0]))
    made.pre_tokenizer = WhitespaceSplit()
    roles = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=made, **roles).save_pretrained(folder)


def _save(model_class: Any, config: Any, folder: Path) -> Path:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # a soak takes what is on the stream of errors for a failure
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Spread the logits: a tie would make equal runs give different tokens.
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    model.save_pretrained(folder)
    return folder
