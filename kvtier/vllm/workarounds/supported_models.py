"""Refuses models that vLLM serves only without a KV connector, before one is loaded.

vLLM itself raises an assertion once the model is loaded, without the model's name or a remedy.
"""

from __future__ import annotations

from typing import Any

from kvtier.errors import ConfigError


def require_supported_model(vllm_config: Any) -> None:  # noqa: ANN401 - vLLM is untyped here
    """Raise ``ConfigError`` if vLLM has no KV connectors for this model."""
    model = vllm_config.model_config
    if model is not None and model.is_encoder_decoder:
        raise ConfigError(
            f"model={model.model!r} ({', '.join(model.architectures)}) is an encoder-decoder "
            "model, for which vLLM supports no KV connector. Remove kv_transfer_config."
        )
