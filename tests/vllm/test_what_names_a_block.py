"""Each row of the page "What names a block": what it says is in the namespace is changed here."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.kv_offload.config import OffloadingCacheConfig

from kvtier.vllm.namespace import build_namespace, worker_report
from tests.vllm.support.offloading import CONFIG
from tests.vllm.test_namespace import TWO_RANKS, engine_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.kv_offload.config import OffloadingConfig

PAGE = Path(__file__).parents[2] / "docs/reference/what-names-a-block.md"


class Engine:
    """What kvtier is told of an engine. A change is made before it is looked at."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(bytes(100_000))
        self.folder = folder
        self.vllm = engine_config(folder)
        self.offloading: OffloadingConfig = CONFIG
        self.environment: dict[str, str] = {}

    def set(self, part: str, **values: Any) -> None:
        for name, value in values.items():
            setattr(getattr(self.vllm, part), name, value)

    def configure(self, **entries: Any) -> None:
        """Change the model's own configuration."""
        config = engine_config(self.folder, **entries).model_config.hf_config
        self.set("model_config", hf_config=config, hf_text_config=config)

    def geometry(self, **values: Any) -> None:
        self.offloading = replace(self.offloading, **values)

    def draft(self, method: str, content: bytes) -> None:
        """Speculate with a model of its own."""
        folder = self.folder.with_name("draft")
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(content)
        model = engine_config(folder).model_config
        self.vllm.speculative_config = SimpleNamespace(method=method, draft_model_config=model)

    def named(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """Return the namespace as text."""
        with monkeypatch.context() as context:
            context.delenv("PYTHONHASHSEED", raising=False)
            for name, value in self.environment.items():
                context.setenv(name, value)
            return str(build_namespace(self.offloading, worker_report(self.vllm)).facts)


def attention(engine: Engine, name: str) -> None:
    backend = SimpleNamespace(get_name=lambda: name)
    layer = SimpleNamespace(get_attn_backend=lambda: backend)
    engine.set("compilation_config", static_forward_context={"layer": layer})


def lora(engine: Engine, **values: Any) -> None:
    engine.vllm.lora_config = SimpleNamespace(**values)


def moved(engine: Engine) -> None:
    """The same files at another path."""
    other = Engine(engine.folder.with_name("moved"))
    engine.vllm = other.vllm


SCALED = {"rope_type": "longrope", "rope_theta": 1e4}
CHANGES: dict[str, list[Callable[[Engine], Any]]] = {
    "weights": [
        lambda e: (e.folder / "model.safetensors").write_bytes(bytes(99_999) + b"x"),
        lambda e: (e.folder / "below").mkdir() or (e.folder / "below/more.gguf").write_bytes(b"x"),
    ],
    "model name and path, revision, code revision": [
        moved,
        lambda e: e.set("model_config", revision="r"),
        lambda e: e.set("model_config", code_revision="r"),
        lambda e: e.geometry(model=replace(CONFIG.model, name="org/other")),
    ],
    "model's configuration, with `hf_overrides`": [lambda e: e.configure(hidden_size=3)],
    "rope: base, scaling, overrides": [
        lambda e: e.configure(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        lambda e: e.configure(rope_parameters=SCALED),
        lambda e: (e.configure(rope_parameters=SCALED), e.set("model_config", max_model_len=9)),
    ],
    "data type, quantization, scales": [
        lambda e: e.set("model_config", dtype="torch.bfloat16"),
        lambda e: e.set("model_config", quantization="fp8"),
        lambda e: e.set("model_config", quantization_config={"ignored_layers": ["a"]}),
        lambda e: e.configure(quantization_config={"kv_cache_scheme": {"num_bits": 8}}),
    ],
    "`load_format`, `model_loader_extra_config`": [
        lambda e: e.set("load_config", load_format="safetensors"),
        lambda e: e.set("load_config", model_loader_extra_config={"tensorizer_uri": "x"}),
    ],
    "to what LoRA adapters are applied": [
        lora,
        lambda e: lora(e, target_modules=["o_proj"]),
        lambda e: lora(e, enable_tower_connector_lora=True),
        lambda e: lora(e, lora_dtype="float32"),
    ],
    "draft model (EAGLE, MTP, a small model)": [
        lambda e: e.draft("eagle", b"1"),
        lambda e: e.draft("mtp", b"1"),
        lambda e: e.draft("eagle", b"2"),
    ],
    "KV data type, layers that have another": [
        lambda e: e.set("cache_config", cache_dtype="fp8"),
        lambda e: e.set("cache_config", kv_cache_dtype_skip_layers=["0"]),
        lambda e: e.geometry(model=replace(CONFIG.model, dtype="fp8")),
    ],
    "formats of Mamba states": [
        lambda e: e.set("cache_config", mamba_cache_dtype="float32"),
        lambda e: e.set("cache_config", mamba_ssm_cache_dtype="float32"),
        lambda e: e.set("cache_config", mamba_cache_mode="align"),
    ],
    "attention backend": [
        lambda e: attention(e, "FLASH_ATTN"),
        lambda e: attention(e, "FLASHINFER"),
        lambda e: e.geometry(kv_cache_layout="BLHNC"),
    ],
    "settings of the processor of images, audio and video": [
        lambda e: e.set(
            "model_config", multimodal_config=SimpleNamespace(mm_processor_kwargs={"crops": 4})
        ),
        lambda e: e.set("model_config", multimodal_config=SimpleNamespace(video_pruning_rate=0.5)),
    ],
    "layers, groups, block sizes, `blocks_per_chunk`": [
        lambda e: e.geometry(groups=(replace(CONFIG.groups[0], layer_names=("b", "a")),)),
        lambda e: e.geometry(cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=2)),
        lambda e: e.geometry(worker_kv_bytes_per_block=16384),
    ],
    "number of ranks": [
        lambda e: e.geometry(parallel=TWO_RANKS, worker_kv_bytes_per_block=4096),
        lambda e: e.geometry(canonical_layout=True),
        lambda e: e.environment.update(VLLM_PP_LAYER_PARTITION="1,2"),
    ],
    "vLLM's release, platform": [],  # they have a test of their own
    "hash function and its seed": [
        lambda e: e.set("cache_config", prefix_caching_hash_algo="sha256_cbor"),
        lambda e: e.environment.update(PYTHONHASHSEED="5"),
    ],
}


def rows(where: str) -> set[str]:
    """Return the first column of the page's table, where the second says so."""
    lines = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    return {what for what, found in lines if found == where}


def test_each_row_of_the_page_is_changed_here() -> None:
    assert rows("namespace") == set(CHANGES)


@pytest.mark.parametrize("what", [row for row in CHANGES if CHANGES[row]])
def test_engines_that_differ_in_it_do_not_share(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks among them: vLLM calls such rows portable, and serves wrong tokens."""
    found = [Engine(tmp_path / "model").named(monkeypatch)]
    for change in CHANGES[what]:
        engine = Engine(tmp_path / "model")
        change(engine)
        found.append(engine.named(monkeypatch))
    assert len(set(found)) == len(found)


def test_releases_and_platforms_do_not_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path / "model")
    found = [engine.named(monkeypatch)]
    monkeypatch.setattr("kvtier.vllm.namespace.vllm.__version__", "9.9.1")
    found.append(engine.named(monkeypatch))
    monkeypatch.setattr(
        "kvtier.vllm.namespace.current_platform", SimpleNamespace(device_type="other")
    )
    found.append(engine.named(monkeypatch))
    assert len(set(found)) == len(found)


def test_what_changes_no_bytes_is_not_in_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these would start cold otherwise."""
    before = Engine(tmp_path / "model").named(monkeypatch)
    after = Engine(tmp_path / "model")
    after.set("model_config", max_model_len=9, tokenizer="other", served_model_name="other")
    after.set("cache_config", gpu_memory_utilization=0.5, num_gpu_blocks=9)
    after.set("compilation_config", level=3)
    after.vllm.scheduler_config = SimpleNamespace(max_num_seqs=3, max_num_batched_tokens=9)
    after.configure(_name_or_path="elsewhere", _commit_hash="c", transformers_version="9")
    after.geometry(engine_id="f", extra_config={"cpu_bytes_to_use": 1})
    assert after.named(monkeypatch) == before
