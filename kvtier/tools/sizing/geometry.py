"""Computes the bytes of one token in the KV cache of a model.

The model is described by a Hugging Face ``config.json``, which is untrusted, or by given numbers.

- Attention layers count in full, those with a sliding window too: an offloaded
  block holds the keys and values of all of them.
- With multi-head latent attention (DeepSeek) a token has one latent vector and
  one rotary key per layer, whatever the number of heads.
- Layers that share the cache of an earlier one do not count. Nor do recurrent layers (Mamba, linear
  attention), which keep a state but nothing per token.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvtier.errors import ConfigError
from kvtier.plugin_api.options import did_you_mean

CONFIG_BYTES_MAX: Final = 4 * 2**20
LAYERS_MAX: Final = 10_000
HEADS_MAX: Final = 2**16
DIM_MAX: Final = 2**20
TP_MAX: Final = 2**12

DTYPE_BYTES: Final = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
}

RECURRENT: Final = frozenset(
    {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "ssm", "moe", "mlp"}
)
"""Names of layers that keep no keys and values per token."""

NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,40}")

# Other names for the same field, from older or unusual families of models.
_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM: Final = ("head_dim", "attention_head_dim", "kv_channels")
_DTYPE: Final = ("dtype", "torch_dtype")


class LayerGroup(NamedTuple):
    """Layers that keep the same amount per token."""

    what: str
    layers: int
    kv_heads: int
    entries_per_head: int  #: of keys and values together


@dataclass(frozen=True)
class Geometry:
    """Layers and data types of a model's KV cache."""

    name: str
    groups: tuple[LayerGroup, ...]
    dtype: str
    is_latent: bool = False
    is_uniform: bool = True  #: each layer keeps the same, and ``dtype`` is certain
    notes: tuple[str, ...] = ()

    def bytes_per_token(self) -> int:
        """Return the bytes of one token if nothing is stored twice."""
        return self._bytes(1)

    def layer_token_bytes_min(self) -> int:
        """Return the least bytes of one token in one layer, with any quantization."""
        return min(group.kv_heads * group.entries_per_head for group in self.groups)

    def bytes_per_token_per_rank(self, tp: int) -> int:
        """Return the bytes of one token on each rank.

        Heads are divided among ``tp`` ranks. If there are more ranks than heads,
        several ranks have the same one, and a latent vector is on all of them.
        """
        if not 1 <= tp <= TP_MAX:
            raise ConfigError(f"tp={tp} must be within 1 and {TP_MAX}.")
        return self._bytes(tp)

    def bytes_per_token_in_vllm(self, tp: int) -> int:
        """Return the bytes of one token over all ranks, as vLLM's offloading stores it.

        It stores the data of every rank, but a latent vector once, since its copies are the same.
        """
        return self.bytes_per_token() if self.is_latent else tp * self.bytes_per_token_per_rank(tp)

    def _bytes(self, tp: int) -> int:
        entries = 0
        for group in self.groups:
            if max(tp, group.kv_heads) % min(tp, group.kv_heads):
                raise ConfigError(
                    f"tp={tp} does not go with {group.kv_heads} KV heads: one must be a multiple "
                    "of the other."
                )
            heads = max(1, group.kv_heads // tp)
            entries += group.layers * heads * group.entries_per_head
        return entries * DTYPE_BYTES[self.dtype]


def make_geometry(*, layers: int, kv_heads: int, head_dim: int, dtype: str = "auto") -> Geometry:
    """Return the geometry that the numbers describe. Raises ``ConfigError``."""
    for name, value, largest in (
        ("layers", layers, LAYERS_MAX),
        ("kv_heads", kv_heads, HEADS_MAX),
        ("head_dim", head_dim, DIM_MAX),
    ):
        if not 1 <= value <= largest:
            raise ConfigError(f"{name}={value} must be within 1 and {largest:,}.")
    kind, notes = _dtype(dtype, None)
    group = LayerGroup("attention", layers, kv_heads, 2 * head_dim)
    return Geometry(f"{layers} layers", (group,), kind, notes=notes)


def read_geometry(path: str | Path, *, dtype: str = "auto") -> Geometry:
    """Read a model's ``config.json``, or the one in a folder. Raises ``ConfigError``."""
    path = Path(path)
    if path.is_dir():
        path /= "config.json"
    try:
        with path.open("rb") as file:
            raw = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from error
    try:
        return parse_geometry_untrusted(raw, dtype=dtype)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error} Or describe the model by flags.") from error


def parse_geometry_untrusted(raw: bytes, *, dtype: str = "auto") -> Geometry:
    """Return the geometry that a ``config.json`` describes. Raises only ``ConfigError``."""
    if len(raw) > CONFIG_BYTES_MAX:
        raise ConfigError(f"larger than {CONFIG_BYTES_MAX >> 20} MiB: this is no model's config.")
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError("not JSON.") from error
    if not isinstance(config, dict):
        raise ConfigError("not a JSON object.")
    return _Model(config).geometry(dtype)


class _Model:
    """The fields of a config that matter, checked as they are read."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._outer = config
        text = config.get("text_config")
        # A model of text and images nests the fields about text.
        self._config: dict[str, Any] = {**config, **text} if isinstance(text, dict) else config

    def geometry(self, dtype: str) -> Geometry:
        if "compress_ratios" in self._config:
            raise ConfigError("compress_ratios: compressed KV caches are not understood.")
        count = self._number(_LAYERS, LAYERS_MAX)
        kinds = self._layer_kinds(count)
        notes = []
        shared = self._number(("num_kv_shared_layers",), count, default=0)
        if shared:
            kinds = kinds[: count - shared]
            notes.append(f"{shared} layers use the cache of an earlier layer: not counted")
        keeping = Counter(kind for kind in kinds if kind not in RECURRENT)
        without = len(kinds) - sum(keeping.values())
        if without:
            notes.append(
                f"{without} layers keep no KV per token (a state, or nothing): not counted"
            )
        if not keeping:
            raise ConfigError("no layer keeps keys and values per token: there is no KV cache.")
        notes += self._notes(keeping)
        latent = self._has("kv_lora_rank")
        make = self._latent_group if latent else self._group
        groups = tuple(make(kind, layers) for kind, layers in keeping.items())
        chosen, dtype_notes = _dtype(dtype, self._text(_DTYPE))
        name = self._text(("model_type",)) or "model"
        if not NAME.fullmatch(name):
            name = "model"
        return Geometry(
            name,
            groups,
            chosen,
            is_latent=latent,
            is_uniform=len(groups) == 1 and not without and not self._may_be_quantized(dtype),
            notes=(*notes, *dtype_notes),
        )

    def _may_be_quantized(self, dtype: str) -> bool:
        """Return whether the model's config may request a cache of another type than its own."""
        of_weights = self._outer.get("quantization_config")
        named = of_weights.items() if isinstance(of_weights, dict) else ()
        return dtype == "auto" and any("kv_cache" in key and value for key, value in named)

    def _group(self, kind: str, layers: int) -> LayerGroup:
        heads = self._number(_HEADS, HEADS_MAX)
        is_global = kind == "full_attention" and self._has("global_head_dim")
        if self._config.get("multi_query") is True and not self._has("new_decoder_architecture"):
            kv_heads = 1
        elif is_global and self._has("num_global_key_value_heads"):
            kv_heads = self._number(("num_global_key_value_heads",), HEADS_MAX)
        else:
            kv_heads = self._number(_KV_HEADS, HEADS_MAX, default=heads)
        if is_global:
            head_dim = self._number(("global_head_dim",), DIM_MAX)
        elif any(self._has(name) for name in _HEAD_DIM):
            head_dim = self._number(_HEAD_DIM, DIM_MAX)
        else:
            hidden = self._number(_HIDDEN, DIM_MAX)
            if hidden % heads:
                raise ConfigError(
                    f"hidden_size={hidden} is no multiple of {heads} heads; head_dim is missing."
                )
            head_dim = hidden // heads
        value_dim = self._number(("v_head_dim",), DIM_MAX, default=head_dim)
        return LayerGroup(kind, layers, kv_heads, head_dim + value_dim)

    def _latent_group(self, kind: str, layers: int) -> LayerGroup:
        latent = self._number(("kv_lora_rank",), DIM_MAX)
        rotary = self._number(("qk_rope_head_dim",), DIM_MAX)
        return LayerGroup(f"{kind}, latent", layers, 1, latent + rotary)

    def _layer_kinds(self, count: int) -> list[str]:
        """Return the type of each layer, from the field that this family of models uses."""
        config = self._config
        for field in ("layer_types", "layers_block_type"):
            if self._has(field):
                return self._named_kinds(field, count)
        if self._has("hybrid_override_pattern"):  # M: Mamba, -: MLP, E: experts, *: attention
            pattern = config["hybrid_override_pattern"]
            if not isinstance(pattern, str) or len(pattern) != count:
                raise ConfigError(
                    f"hybrid_override_pattern has no letter for each of {count} layers."
                )
            return ["attention" if each == "*" else "mamba" for each in pattern]
        if self._has("attn_layer_period"):
            period = self._number(("attn_layer_period",), LAYERS_MAX)
            offset = self._number(("attn_layer_offset",), LAYERS_MAX, default=0)
            return ["attention" if i % period == offset else "mamba" for i in range(count)]
        if self._has("full_attention_interval"):
            every = self._number(("full_attention_interval",), LAYERS_MAX)
            return [
                "linear_attention" if (i + 1) % every else "full_attention" for i in range(count)
            ]
        if self._has("attn_layer_indices"):
            indices = config["attn_layer_indices"]
            if not isinstance(indices, list) or len(indices) > count:
                raise ConfigError(f"attn_layer_indices is no list of at most {count} layers.")
            return ["attention" if i in indices else "mamba" for i in range(count)]
        return ["attention"] * count

    def _named_kinds(self, field: str, count: int) -> list[str]:
        kinds = self._config[field]
        if not isinstance(kinds, list) or len(kinds) != count:
            raise ConfigError(f"{field} has no name for each of {count} layers.")
        for kind in kinds:
            if not isinstance(kind, str) or not NAME.fullmatch(kind):
                raise ConfigError(
                    f"{field} contains a value that is not the name of a kind of layer."
                )
        return kinds

    def _notes(self, keeping: Counter[str]) -> list[str]:
        notes = []
        windowed = keeping["sliding_attention"] + keeping["chunked_attention"]
        window = self._config.get("sliding_window")
        if windowed or (window and self._config.get("use_sliding_window") is not False):
            layers = f"{windowed} layers" if windowed else "layers"
            width = f" of {window} tokens" if isinstance(window, int) else ""
            notes.append(f"{layers} with a window{width}: counted for every token")
        if self._has("index_head_dim"):
            notes.append("the keys of the sparse-attention index are not counted")
        return notes

    def _has(self, name: str) -> bool:
        return self._config.get(name) not in (None, False)

    def _number(self, names: tuple[str, ...], largest: int, default: int | None = None) -> int:
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            smallest = 0 if default == 0 else 1
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} is not a whole number.")
            if not smallest <= value <= largest:
                raise ConfigError(f"{name} must be within {smallest} and {largest:,}.")
            return value
        if default is None:
            raise ConfigError(f"{names[0]} is missing.")
        return default

    def _text(self, names: tuple[str, ...]) -> str | None:
        found = (each.get(name) for each in (self._config, self._outer) for name in names)
        return next((value for value in found if isinstance(value, str) and value), None)


def _dtype(asked: str, of_model: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the type of the cache's entries, and what to note about it."""
    if asked != "auto":
        if asked not in DTYPE_BYTES:
            meant = did_you_mean(asked, DTYPE_BYTES)
            raise ConfigError(
                f"dtype={asked!r} is unknown.{meant} Known: {', '.join(DTYPE_BYTES)}."
            )
        return asked, ()
    if of_model is None:
        return "bfloat16", ("dtype not stated: bfloat16 assumed",)
    of_model = of_model.removeprefix("torch.")
    if of_model in ("float32", "float"):
        return "float16", ("weights are float32: engines run them, and their cache, in 16 bits",)
    if of_model not in DTYPE_BYTES:
        raise ConfigError("dtype is unknown. Set it with --dtype.")
    return of_model, ()
