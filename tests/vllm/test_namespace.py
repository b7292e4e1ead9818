"""What keeps the blocks of two engines apart, and what does not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvtier.errors import InternalError
from kvtier.vllm.identity import namespace
from kvtier.vllm.identity.namespace import build_namespace, worker_report
from kvtier.vllm.memory.pages import Pages
from tests.vllm.support.offloading import CONFIG

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.vllm.identity.weights import Weights

ATTENTION = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float16)
TWO_RANKS = replace(CONFIG.parallel, world_size=2, tp_size=2)


class HFConfig(SimpleNamespace):
    """A model's configuration as transformers shows it."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def engine_config(folder: Path, **hf: Any) -> Any:
    entries = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "_commit_hash": "c"}
    config = HFConfig(**{**entries, **hf})
    model = SimpleNamespace(
        model=str(folder),
        revision=None,
        code_revision=None,
        hf_config=config,
        hf_text_config=config,
        dtype="torch.float16",
        quantization=None,
        max_model_len=1000,
        seed=0,
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(),
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def pages(*specs: Any, **caches: Any) -> Pages:
    """Return the KV caches of a worker: a group of the two layers of ``CONFIG`` for each spec."""
    groups = [KVCacheGroupSpec(["a", "b"], spec) for spec in specs or [ATTENTION]]
    return Pages(KVCacheConfig(10, [], groups), range(len(groups)), caches)


def worker_facts(vllm_config: Any) -> Any:
    """Return what of a worker's report tells blocks apart."""
    return build_namespace(CONFIG, worker_report(vllm_config, pages())).facts["worker"]


def test_vllm_fields_are_those_of_its_own_fs_tier() -> None:
    """Backends that speak vLLM's layout find the folder that vLLM would use."""
    namespace = build_namespace(CONFIG, {"model": "m"})
    assert namespace.vllm_rank == 0
    assert namespace.vllm_fields is not None
    assert namespace.vllm_fields["model_name"] == "org/model"
    assert namespace.vllm_fields["blocks_per_file"] == 1
    assert "parallel_agnostic" not in namespace.vllm_fields  # it is: one rank, whole heads


def test_several_ranks_get_no_vllm_folder_unless_their_rows_are_canonical() -> None:
    """vLLM shares one folder between tensor-parallel sizes whose bytes differ."""
    two = replace(CONFIG, parallel=TWO_RANKS, worker_kv_bytes_per_block=4096)
    refused = build_namespace(two, {"model": "m"})
    assert refused.vllm_fields is None
    assert "canonical_layout" in refused.vllm_refusal
    canonical = build_namespace(
        replace(two, canonical_layout=True, kv_cache_layout="LBHNC"), {"model": "m"}
    )
    assert canonical.vllm_fields is not None


def test_no_worker_facts_is_an_error() -> None:
    """An empty namespace would let two models meet."""
    with pytest.raises(InternalError, match="no facts about the model"):
        build_namespace(CONFIG, None)


def test_a_draft_in_the_models_own_files_has_them_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As heads that come with the model. One in other files has not."""
    (tmp_path / "model.safetensors").write_bytes(b"1")
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft/model.safetensors").write_bytes(b"2")
    looked: list[str] = []
    real = namespace.weights_of

    def weights_of(model: Any, load: Any) -> Weights:
        looked.append(model.model)
        return real(model, load)

    monkeypatch.setattr(namespace, "weights_of", weights_of)
    told = []
    for draft in (tmp_path, tmp_path / "draft"):
        config = engine_config(tmp_path)
        model = engine_config(draft).model_config
        config.speculative_config = SimpleNamespace(method="mtp", draft_model_config=model)
        told.append(worker_facts(config)["draft_model"]["model"]["weights"])
    assert looked == [str(tmp_path), str(tmp_path), str(tmp_path / "draft")]
    assert told[0] == worker_facts(engine_config(tmp_path))["model"]["weights"]
    assert told[0] != told[1]
