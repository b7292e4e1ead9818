"""Collects facts about the meaning of a page's bytes, besides their number.

Two pages of one size may hold the same values in another order, or numbers of another kind. So
each layer's KV-cache spec is a fact, with all its fields, including fields new in vLLM. Facts that
no spec has are read where they take effect: in the worker, once its KV caches are registered.

Fields that only define how long blocks are kept, or who owns a layer, are left out of the specs:
engines with different numbers of drafts of an attention-only model share their blocks.
"""

from __future__ import annotations

import platform
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final

from vllm import envs
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVQuantMode, MambaSpec, UniformTypeKVCacheSpecs

from kvtier.vllm.identity.plain_values import digest, plain
from kvtier.vllm.identity.setting_facts import settings_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from kvtier.vllm.memory.pages import Pages

HARMLESS: Final = {
    "extra_retained_tokens": "how long blocks are kept; it goes by the number of drafts",
    "is_draft": "who owns the layer: the draft model is a fact",
    "non_causal": "how requests are scheduled; the model's configuration is a fact",
    "non_causal_multi_token_decode": "as above",
    "kv_cache_specs": "the specs of a group's layers, each of which is looked at",
}
"""Fields of specs that change nothing in a page, each with its reason."""

OF_A_RANK: Final = ("num_kv_heads", "num_head_slots")
"""Fields that define how much of a page one rank has: left out if blocks are the same for any
number of ranks. The total number of heads is in the model's configuration."""

KV_DTYPE: Final = "kv_dtype"
"""The fact that defines the number format. Tiers that compress read it."""


def page_facts(vllm_config: Any, pages: Pages) -> dict[str, Any]:  # noqa: ANN401 - no stubs
    """Return the facts that distinguish pages of one size, as JSON values."""
    specs = [spec for group in pages.groups for _, spec in _layers(pages.config, group)]
    has_states = any(isinstance(spec, MambaSpec) for spec in specs)
    return {
        KV_DTYPE: _kv_cache_dtype(vllm_config, specs),
        "fp8": _kind_of_fp8() if any(_is_quantized(spec) for spec in specs) else None,
        "groups": [_group(pages, group) for group in pages.groups],
        "states": _states(vllm_config) if has_states else None,
        "runner": "v2" if getattr(vllm_config, "use_v2_model_runner", False) else "v1",
        "shuffled": _is_shuffled(),
        "cpu": _cpu(vllm_config) if current_platform.is_cpu() else None,
        "context_parallel": _context_parallel(vllm_config.parallel_config),
    }


def without_ranks(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about pages that are the same for any number of ranks."""
    groups = [
        [
            {**each, "spec": {k: v for k, v in each["spec"].items() if k not in OF_A_RANK}}
            for each in group
        ]
        for group in facts["groups"]
    ]
    return {**facts, "groups": groups}


def spec_facts(spec: KVCacheSpec) -> dict[str, Any]:
    """Return one layer's spec fields about its pages: all that are not at their default."""
    found = {
        field.name: plain(getattr(spec, field.name))
        for field in fields(spec)
        if field.name not in HARMLESS
        if field.default is MISSING or getattr(spec, field.name) != field.default
    }
    return {"kind": plain(type(spec)), **found}


def _group(pages: Pages, group: int) -> list[dict[str, Any]]:
    """Return the specs of a group's layers: each once, with the layers that have it."""
    found: list[tuple[dict[str, Any], list[str]]] = []
    for name, spec in _layers(pages.config, group):
        facts = {"spec": spec_facts(spec), "kernel_blocks": _kernel_blocks(pages, name)}
        for known, names in found:
            if known == facts:
                names.append(name)
                break
        else:
            found.append((facts, [name]))
    return [
        {**facts, "layers": len(names), "layers_digest": digest(names)} for facts, names in found
    ]


def _layers(config: KVCacheConfig, number: int) -> Iterator[tuple[str, KVCacheSpec]]:
    group = config.kv_cache_groups[number]
    spec = group.kv_cache_spec
    for name in group.layer_names:
        if isinstance(spec, UniformTypeKVCacheSpecs):
            yield name, spec.kv_cache_specs.get(name, spec.first_spec)
        else:
            yield name, spec


def _kernel_blocks(pages: Pages, layer: str) -> int | None:
    """Return how many of its own blocks the attention kernel uses for one of vLLM's."""
    cache = pages.caches.get(layer)
    return None if cache is None else int(cache.shape[0]) // pages.config.num_blocks


def _kv_cache_dtype(vllm_config: Any, specs: Iterable[KVCacheSpec]) -> str:  # noqa: ANN401
    """Return the number format, by a name that does not depend on the calling process.

    vLLM's workers write the name of their chosen format into their configuration: ``fp8``
    becomes ``fp8_ds_mla``, or ``auto`` becomes ``fp8``. A scheduler in the same process sees it
    there, and one in another process does not. A remaining ``auto`` is the model's data type.
    """
    names = {getattr(spec, "cache_dtype_str", None) for spec in specs}
    if names and None not in names:
        return ", ".join(sorted(str(name) for name in names))
    name = str(vllm_config.cache_config.cache_dtype)
    if name != "auto":
        return name
    modes = {getattr(spec, "kv_quant_mode", KVQuantMode.NONE) for spec in specs}
    if KVQuantMode.FP8_PER_TENSOR in modes:
        return "fp8"
    return str(vllm_config.model_config.dtype).removeprefix("torch.")


def _is_quantized(spec: KVCacheSpec) -> bool:
    dtype = getattr(spec, "dtype", None)
    mode = getattr(spec, "kv_quant_mode", KVQuantMode.NONE)
    return mode != KVQuantMode.NONE or getattr(dtype, "itemsize", 2) == 1


def _kind_of_fp8() -> str:
    return "fnuz" if current_platform.is_fp8_fnuz() else "ocp"


def _is_shuffled() -> bool:
    """Return whether AITER's kernels, on ROCm, keep K and V in an order of their own."""
    is_asked_for = envs.VLLM_ROCM_USE_AITER and envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT
    return bool(current_platform.is_rocm() and is_asked_for)


def _states(vllm_config: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM has no stubs
    """Return the facts that decide the order and the rounding of states.

    The layout of a convolution's state is the effective one: the CPU platform flips it if a NIXL
    connector is configured beside kvtier. The shape of a state does not show which of its sides
    is which.
    """
    return {
        "conv_state_layout": str(get_conv_state_layout()),
        "settings": settings_of("mamba_config", getattr(vllm_config, "mamba_config", None)),
    }


def _cpu(vllm_config: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM has no stubs
    """Return the instruction sets for which attention packs K; they decide its order."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return {
        "machine": platform.machine(),
        "packed_for": sorted({str(layer.isa) for layer in layers if hasattr(layer, "isa")}),
    }


def _context_parallel(parallel: Any) -> list[Any] | None:  # noqa: ANN401 - vLLM has no stubs
    """Return how the ranks that share out the tokens interleave them."""
    sizes = (
        getattr(parallel, "decode_context_parallel_size", 1),
        getattr(parallel, "prefill_context_parallel_size", 1),
    )
    if sizes == (1, 1):
        return None
    return [
        plain(getattr(parallel, "dcp_kv_cache_interleave_size", None)),
        plain(getattr(parallel, "cp_kv_cache_interleave_size", None)),
    ]
