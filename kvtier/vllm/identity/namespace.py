"""Collects the facts that change a block's bytes: the namespace of persistent tiers.

A block that one engine stored may be served by another only if both would have
computed the same bytes. The block's key covers the request's inputs: its tokens,
and through vLLM's extra keys LoRA adapters (``identity/adapters.py``),
multimodal inputs, prompt embeddings and the cache salt. So none of those is a fact
here. The namespace covers the engine's inputs: weights, positions, KV format and
geometry. ``docs/reference/what-names-a-block.md`` has all of it in one table.

Some subjects have a module of their own: weights (``weights.py``), the meaning of a page's bytes
(``page_facts.py``), and all of vLLM's other settings (``setting_facts.py``).

The scheduler-side spec gets only an ``OffloadingConfig``. Workers see the whole
configuration, so rank 0 collects ``worker_report`` and writes it to the region's
header, and the scheduler joins the two. Facts are few, plain and readable, so
that two ``namespace.json`` can be compared by eye; large values go in as a
digest. A fact too many costs a cold start, a fact too few serves wrong bytes:
when in doubt, it is in.
"""

from __future__ import annotations

import hashlib
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast
from uuid import uuid4

import vllm
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_offload.file_mapper import FileMapper

from kvtier.errors import InternalError
from kvtier.plugin_api.backend import Namespace
from kvtier.plugin_api.log import log, printable
from kvtier.vllm.identity.page_facts import KV_DTYPE, page_facts, without_ranks
from kvtier.vllm.identity.plain_values import digest, plain
from kvtier.vllm.identity.setting_facts import setting_facts, settings_of
from kvtier.vllm.identity.weights import Weights, source_of, weights_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.v1.kv_offload.base import OffloadingSpec

    from kvtier.vllm.memory.pages import Pages
    from kvtier.vllm.memory.region_header import RegionHeader

FORMAT_VERSION: Final = 2  #: raise it whenever the meaning of a row's bytes changes

_MIXED_FOLDER: Final = (
    "can't be used with several workers: vLLM keeps the blocks of all tensor-parallel sizes in one "
    "folder there, though their bytes differ. Set canonical_layout to true, or use type 'fs' with "
    "layout 'kvtier'"
)
_NO_FACTS: Final = (
    "can't be used by an engine whose model could not be described; its log says why. Use type "
    "'fs' with layout 'kvtier'"
)
_UNDESCRIBED: Final = "undescribed"
_REASON_CHARACTERS_MAX: Final = 1000
_PAGE_BYTES: Final = 4096
_APART: Final = "not_in_the_namespace"
_PAGES: Final = "pages"
_RESTS: Final = "rests"
_CONFIG_NOISE = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
# With these the angles depend on the model's entries alone, not on the engine's length limit.
_ROPE_TYPES_WITHOUT_LIMIT = frozenset({None, "default", "linear", "llama3", "mrope"})


def worker_report(vllm_config: Any, pages: Pages | None) -> dict[str, Any]:  # noqa: ANN401 - vLLM has no stubs
    """Return the facts that only a worker has, as JSON values, and separately what is not a fact.

    ``pages``: its KV caches. Raises ``InternalError`` without them. Call it on rank 0 while
    vLLM's current configuration is set (it is while ``get_worker`` runs). Reads samples of
    the model's files (``weights_of``).
    """
    if pages is None:
        raise InternalError("vLLM's connector has not reported the layout of the KV caches")
    began_s = time.monotonic()
    weights = weights_of(vllm_config.model_config, vllm_config.load_config)
    draft, draft_weights = _draft_of(vllm_config, weights)
    apart = {
        "local_facts": {
            "weights": dict(weights.local_facts),
            "draft_weights": dict(draft_weights.local_facts),
        },
        "weights_seconds": round(time.monotonic() - began_s, 3),
    }
    draft_facts = _draft_facts(vllm_config.speculative_config, draft, draft_weights)
    return {
        **_worker_facts(vllm_config, weights, draft_facts),
        _PAGES: page_facts(vllm_config, pages),
        "settings": setting_facts(vllm_config),
        _APART: apart,
    }


def _worker_facts(
    vllm_config: Any,  # noqa: ANN401 - vLLM has no stubs
    weights: Weights,
    draft_model: Mapping[str, Any] | None,
) -> dict[str, Any]:
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    return {
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "platform": str(current_platform.device_type),
        "attention_backends": _attention_backends(vllm_config),
        "model": _model_facts(model, weights),
        "draft_model": draft_model,
        "weights_load_format": str(plain(vllm_config.load_config.load_format)),
        "weights_loader": digest(
            plain(getattr(vllm_config.load_config, "model_loader_extra_config", None))
        ),
        "kv_cache_dtype_skip_layers": sorted(getattr(cache, "kv_cache_dtype_skip_layers", [])),
        "sliding_window_disabled": bool(getattr(model, "disable_sliding_window", False)),
        "lora": _lora_facts(getattr(vllm_config, "lora_config", None)),
        "block_hash": {
            "algorithm": str(cache.prefix_caching_hash_algo),
            "seed_digest": _hash_seed_digest(str(cache.prefix_caching_hash_algo)),
        },
    }


def weights_in_words(worker: Mapping[str, Any] | None) -> str:
    """Return what identifies an engine's weights, and how long sampling them took, for the log."""
    known = worker or {}
    model = known.get("model")
    found = model.get("weights", {}) if isinstance(model, dict) else {}
    if "sample_digest" in found:
        seconds = known.get(_APART, {}).get("weights_seconds")
        return f"samples of {found['files']} files of {found['bytes']} bytes, in {seconds} s"
    return ", ".join(f"{name} {value}" for name, value in found.items()) or "not described"


def publish_facts(
    header: RegionHeader,
    vllm_config: Callable[[], Any],
    pages: Pages | None,
    rests: Mapping[str, Any],
) -> None:
    """Publish ``worker_report`` for the scheduler, or facts that no other engine has.

    A model, or a release of vLLM, that lacks an expected attribute is not a reason
    to refuse the engine: it then shares blocks with no other engine, and logs that.
    ``rests``: of this rank's part of a row (``memory/group_parts.py``).
    """
    found = facts_or_reason(lambda: worker_report(vllm_config(), pages))
    header.publish({**found, _APART: {**found.get(_APART, {}), _RESTS: rests}})


def published_rests(described: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the rests that ``publish_facts`` has published."""
    rests: Mapping[str, Any] = (described or {}).get(_APART, {}).get(_RESTS, {})
    return rests


def facts_or_reason(facts: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the facts; if that raises, the reason and a fact that no other engine has."""
    try:
        return facts()
    except Exception as error:  # noqa: BLE001 - whatever vLLM's objects raise
        log.error(
            "the model could not be described: its blocks are shared with no other engine, and "
            "none is found after a restart",
            exc_info=True,
        )
        reason = printable(f"{type(error).__name__}: {error}")[:_REASON_CHARACTERS_MAX]
        return {_UNDESCRIBED: reason, "only_this_engine": uuid4().hex}


def scheduler_facts(offloading_config: Any) -> dict[str, Any]:  # noqa: ANN401 - no stubs
    """Return the facts in vLLM's ``OffloadingConfig``, as JSON values."""
    parallel = offloading_config.parallel
    canonical = bool(offloading_config.canonical_layout)
    replicated = bool(offloading_config.replicated_layout)
    # A row is the same for any number of ranks if they share one copy (replicated) or
    # one layout (canonical). vLLM also calls plain rows of whole heads portable. They
    # are not: rank-major rows put the layers of one rank before those of the next.
    portable = replicated or (canonical and bool(parallel.is_parallelism_agnostic))
    return {
        "format": FORMAT_VERSION,
        "model_name": str(offloading_config.model.name),
        KV_DTYPE: str(offloading_config.model.dtype),
        "kv_cache_layout": offloading_config.kv_cache_layout,
        "canonical_layout": canonical,
        "replicated_layout": replicated,
        "tokens_per_hash": int(offloading_config.cache.tokens_per_hash),
        "blocks_per_chunk": int(offloading_config.cache.blocks_per_chunk),
        "block_bytes": _block_bytes(offloading_config),
        "groups": [
            {
                "group_id": int(group.group_id),
                "tokens_per_block": int(group.tokens_per_block),
                "layer_names": list(group.layer_names),
            }
            for group in offloading_config.groups
        ],
        "parallel": None
        if portable
        else {
            "tp": int(parallel.tp_size),
            "pp": int(parallel.pp_size),
            "pcp": int(parallel.pcp_size),
            "dcp": int(parallel.dcp_size),
            "world": int(parallel.world_size),
        },
    }


def build_namespace(
    offloading_config: Any,  # noqa: ANN401 - vLLM has no stubs
    worker: Mapping[str, Any] | None,
) -> Namespace:
    """Join both sides' facts, and add the fields that vLLM's own fs tier would hash.

    Raises ``InternalError`` if there are no worker facts: without them blocks of
    different weights could meet in one folder.
    """
    if not worker:
        raise InternalError(
            "rank 0 has left no facts about the model in the shared region; its log says why"
        )
    of_worker = dict(worker)
    apart = of_worker.pop(_APART, {})
    facts = {**scheduler_facts(offloading_config), "worker": of_worker}
    if _PAGES in of_worker:
        pages = dict(of_worker[_PAGES])
        facts[KV_DTYPE] = pages.pop(KV_DTYPE)  # vLLM's own depends on where its workers live
        of_worker[_PAGES] = without_ranks(pages) if facts["parallel"] is None else pages
    refusal = _NO_FACTS if _UNDESCRIBED in worker else ""
    mapper = FileMapper.from_offloading_spec(
        root_dir="",
        offloading_spec=cast("OffloadingSpec", SimpleNamespace(config=offloading_config)),
        parallel_agnostic=True,  # as vLLM's fs tier does
    )
    shared_by_vllm = "parallel_agnostic" not in mapper.fields
    mixed = shared_by_vllm and facts["parallel"] is not None and facts["parallel"]["world"] > 1
    if mixed:
        refusal = _MIXED_FOLDER
    # Through JSON and back: facts that were written and read must equal these.
    return Namespace(
        facts=json.loads(json.dumps(facts, sort_keys=True)),
        vllm_fields=None if refusal else dict(mapper.fields),
        vllm_refusal=refusal,
        vllm_rank=int(mapper.rank),
        local_facts=apart.get("local_facts", {}),
    )


def _block_bytes(config: Any) -> int:  # noqa: ANN401 - vLLM has no stubs
    copies = 1 if config.replicated_layout else config.parallel.world_size
    size = config.worker_kv_bytes_per_block * copies * config.cache.blocks_per_chunk
    return int(-(-size // _PAGE_BYTES) * _PAGE_BYTES)


def _model_facts(model: Any, weights: Weights) -> dict[str, Any]:  # noqa: ANN401 - no stubs
    config = plain(model.hf_config.to_dict())
    text = plain(model.hf_text_config.to_dict())
    quantization = {
        "engine": plain(getattr(model, "quantization_config", None)),
        "checkpoint": config.get("quantization_config"),
    }
    return {
        "name": str(model.model),
        "revision": model.revision,
        "code_revision": model.code_revision,
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "weights": dict(weights.facts),
        "config_digest": digest(_without_noise(config)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": None if model.quantization is None else str(model.quantization),
        "quantization_digest": digest(quantization),
        "implementation": str(plain(getattr(model, "model_impl", "auto"))),
        "rope": _rope_facts(text, model),
    }


def _rope_facts(text: Mapping[str, Any], model: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return how positions turn into angles, which are part of every stored K.

    The configuration's digest covers all of it. These are here to be readable,
    and to include the engine's length limit, which some scalings use.
    """
    names = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    facts: dict[str, Any] = {name: text[name] for name in names if text.get(name) is not None}
    if not _rope_types(facts) <= _ROPE_TYPES_WITHOUT_LIMIT:
        facts["max_position_embeddings"] = text.get("max_position_embeddings")
        facts["max_model_len"] = int(model.max_model_len)
    return facts


def _rope_types(value: Any) -> set[Any]:  # noqa: ANN401 - any JSON value
    """Return every rope type, however deep (some models keep one per layer type)."""
    if not isinstance(value, dict):
        return set()
    found = {value[key] for key in ("rope_type", "type") if isinstance(value.get(key), str)}
    return found.union(*(_rope_types(item) for item in value.values()))


def _draft_of(vllm_config: Any, weights: Weights) -> tuple[Any, Weights]:  # noqa: ANN401 - no stubs
    """Return the draft model's configuration and weights, if there is one.

    ``weights``: the model's. Its draft may lie in the same files, which are not read again.
    """
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return None, Weights({}, {})
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    is_the_same = source_of(draft) == source_of(vllm_config.model_config)
    if (
        is_the_same
        and load == vllm_config.load_config
        and draft.seed == vllm_config.model_config.seed
    ):
        return draft, weights
    return draft, weights_of(draft, load)


def _draft_facts(
    speculative: Any,  # noqa: ANN401 - no stubs
    draft: Any,  # noqa: ANN401 - as above
    weights: Weights,
) -> dict[str, Any] | None:
    """Return the draft model's facts: its layers' KV lies in the same blocks."""
    if speculative is None:
        return None
    return {
        "method": str(plain(getattr(speculative, "method", None))),
        "kv_cache_dtype": str(plain(getattr(speculative, "kv_cache_dtype", None))),
        "model": None
        if draft is None
        else {**_model_facts(draft, weights), "settings": settings_of("model_config", draft)},
    }


def _lora_facts(lora: Any) -> dict[str, Any] | None:  # noqa: ANN401 - vLLM has no stubs
    """Return the parts of a model that adapters apply to; blocks' hashes cover their content."""
    if lora is None:
        return None
    modules = getattr(lora, "target_modules", None)
    return {
        "target_modules": None if modules is None else sorted(modules),
        "tower_and_connector": bool(getattr(lora, "enable_tower_connector_lora", False)),
        "dtype": plain(getattr(lora, "lora_dtype", None)),
    }


def _attention_backends(vllm_config: Any) -> list[str]:  # noqa: ANN401 - vLLM has no stubs
    names = set()
    for layer in vllm_config.compilation_config.static_forward_context.values():
        get_backend = getattr(layer, "get_attn_backend", None)
        if get_backend is not None:
            names.add(str(get_backend().get_name()))
    return sorted(names)


def _hash_seed_digest(algorithm: str) -> str:
    """Digest the seed of the first block's hash.

    vLLM draws a random one for hashes that are not cryptographic, unless
    PYTHONHASHSEED is set. Its keys then mean nothing to another process, and
    the random digest keeps this engine's blocks to itself.
    """
    seed = resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
    return hashlib.sha256(str(seed).encode()).hexdigest()[:16]


def _without_noise(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
