"""The longest prompt of a model in vLLM, if ``--max-model-len`` is not given.

It implements a part of vLLM's rule (``vllm.config.model._get_and_verify_max_len``), by
``config.json`` alone:

- the smallest of the fields in ``LENGTHS``, or ``model_max_length`` if there is one;
- times the factor of the rope scaling, unless its type is one of ``ALREADY_SCALED``, or the model
  is a Gemma 3;
- with LongRoPE, the length before scaling.

It is not known if vLLM uses other sources: the defaults of a model's class if no field exists, the
tokenizer of a pooling model, or ``--hf-overrides``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from kvtier.tools.sizing.geometry import CONFIG_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

LENGTHS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
BEFORE_ALL: Final = "model_max_length"
ORIGINAL: Final = "original_max_position_embeddings"
LONGROPE: Final = ("su", "longrope")
ALREADY_SCALED: Final = (
    *LONGROPE,
    "llama3",
    "yarn",
    "deepseek_yarn",
    "deepseek_llama_scaling",
)
TOKENS_MAX: Final = 1 << 40


def read_context_length(path: Path) -> int | None:
    """Return the tokens of the longest prompt, by a ``config.json``; None: not known."""
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(CONFIG_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    return context_length_untrusted(config) if isinstance(config, dict) else None


def context_length_untrusted(config: Mapping[str, Any]) -> int | None:
    """Return the same for the contents of a ``config.json``. Raises nothing."""
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    lengths = {name: config[name] for name in LENGTHS if _is_length(config.get(name))}
    if not lengths:
        return None
    tokens: float = lengths.get(BEFORE_ALL) or min(lengths.values())
    scalings = [*_scalings(config)]
    kinds = [each.get("rope_type", each.get("type")) for each in scalings]
    original = config.get(ORIGINAL, next((each.get(ORIGINAL) for each in scalings), None))
    if any(kind in LONGROPE for kind in kinds) and _is_length(original):
        return int(original)
    if "gemma3" not in str(config.get("model_type")):
        factors = [
            each["factor"]
            for each, kind in zip(scalings, kinds, strict=True)
            if kind not in ALREADY_SCALED and _is_length(each.get("factor"))
        ]
        tokens *= factors[-1] if factors else 1
    return int(tokens)


def _scalings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of the rope, of each kind of layer if they differ."""
    for name in ("rope_parameters", "rope_scaling"):
        found = config.get(name)
        if isinstance(found, dict) and found:
            nested = [each for each in found.values() if isinstance(each, dict)]
            yield from nested or [found]
            return


def _is_length(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= TOKENS_MAX
