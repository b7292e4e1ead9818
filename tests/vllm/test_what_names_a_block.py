"""Each row of the page "What names a block": what it says is in the namespace is changed here."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.config import OffloadingCacheConfig

from kvtier.vllm.identity import page_facts
from kvtier.vllm.identity.namespace import build_namespace, worker_report
from kvtier.vllm.memory.pages import Pages
from tests.vllm.support.offloading import CONFIG
from tests.vllm.test_namespace import ATTENTION, TWO_RANKS, engine_config, pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from vllm.v1.kv_offload.config import OffloadingConfig

pytestmark = pytest.mark.promise(22)

PAGE = Path(__file__).parents[2] / "docs/reference/what-names-a-block.md"


class Engine:
    """What kvtier is told of an engine. A change is made before it is looked at."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(bytes(100_000))
        self.folder = folder
        self.vllm = engine_config(folder)
        self.offloading: OffloadingConfig = CONFIG
        self.pages = pages()
        self.environment: dict[str, str] = {}
        self.patches: dict[str, Any] = {}  #: of what ``page_facts`` looks at

    def set(self, part: str, **values: Any) -> None:
        for name, value in values.items():
            setattr(getattr(self.vllm, part), name, value)

    def configure(self, **entries: Any) -> None:
        """Change the model's own configuration."""
        config = engine_config(self.folder, **entries).model_config.hf_config
        self.set("model_config", hf_config=config, hf_text_config=config)

    def larger(self, layer: str) -> None:
        """Have one of three layers have larger heads."""
        specs = dict.fromkeys("abc", ATTENTION) | {layer: replace(ATTENTION, head_size=32)}
        spec = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)
        groups = [KVCacheGroupSpec([*"abc"], spec)]
        self.pages = Pages(KVCacheConfig(10, [], groups), range(1), {})

    def configure_text(self, **entries: Any) -> None:
        """Change the part of it that is about text alone, which may be another object."""
        self.set(
            "model_config",
            hf_text_config=engine_config(self.folder, **entries).model_config.hf_config,
        )

    def geometry(self, **values: Any) -> None:
        self.offloading = replace(self.offloading, **values)

    def specs(self, *specs: Any) -> None:
        """Lay out the KV caches otherwise."""
        self.pages = pages(*specs)

    def config(self, name: str, **values: Any) -> None:
        """Have one of vLLM's configurations hold these alone."""
        setattr(self.vllm, name, SimpleNamespace(**values))

    def ranks(self, **values: Any) -> None:
        self.geometry(parallel=replace(CONFIG.parallel, **values))

    def runner(self) -> None:
        """Run the model as vLLM's newer runner does, which no field of its says."""
        kind = type("Config", (SimpleNamespace,), {"use_v2_model_runner": True})
        self.vllm = kind(**vars(self.vllm))

    def platform(self, **answers: Any) -> None:
        """Be on another platform."""
        asked = {name: lambda: False for name in ("is_cpu", "is_rocm", "is_fp8_fnuz")}
        self.patches["current_platform"] = SimpleNamespace(**asked | answers)

    def packed_for(self, instructions: str) -> None:
        layer = SimpleNamespace(isa=instructions)
        self.set("compilation_config", static_forward_context={"layer": layer})

    def draft(self, method: str, content: bytes) -> None:
        """Speculate with a model of its own."""
        folder = self.folder.with_name("draft")
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(content)
        model = engine_config(folder).model_config
        self.vllm.speculative_config = SimpleNamespace(method=method, draft_model_config=model)

    def named(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """Return the namespace as text."""
        return str(self.facts(monkeypatch))

    def facts(self, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Any]:
        """Return the namespace."""
        with monkeypatch.context() as context:
            context.delenv("PYTHONHASHSEED", raising=False)
            for name, value in self.environment.items():
                context.setenv(name, value)
            for name, value in self.patches.items():
                context.setattr(f"{page_facts.__name__}.{name}", value)
            return build_namespace(self.offloading, worker_report(self.vllm, self.pages)).facts


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


STATE = MambaSpec(block_size=32, shapes=((3, 8),), dtypes=(torch.float16,))
FP8 = replace(ATTENTION, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
MLA = MLAAttentionSpec(
    block_size=32, num_kv_heads=1, head_size=64, dtype=torch.uint8, cache_dtype_str="fp8"
)


@dataclass(frozen=True, kw_only=True)
class OfTomorrow(FullAttentionSpec):
    """A kind of layer that is new in vLLM, and has no field of its own."""


OF_TOMORROW = OfTomorrow(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float16)
UNIFORM = UniformTypeKVCacheSpecs(
    block_size=32, kv_cache_specs={"a": ATTENTION, "b": replace(ATTENTION, head_size=32)}
)
SHUFFLED = {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "1"}
SCALED = {"rope_type": "longrope", "rope_theta": 1e4}
CHANGES: dict[str, list[Callable[[Engine], Any]]] = {
    "weights": [
        lambda e: e.configure(_commit_hash="d"),
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
        lambda e: e.configure_text(rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        lambda e: e.configure_text(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        lambda e: e.configure_text(rope_parameters=SCALED),
        lambda e: e.configure_text(rope_parameters=SCALED, max_position_embeddings=9),
    ],
    "data type, quantization, scales": [
        lambda e: e.set("model_config", dtype="torch.bfloat16"),
        lambda e: e.specs(MLA),
        lambda e: (e.specs(MLA), e.set("model_config", dtype="torch.bfloat16")),
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
        lambda e: (
            e.draft("eagle", b"1"),
            setattr(e.vllm.speculative_config, "kv_cache_dtype", "fp8"),
        ),
    ],
    "KV data type, layers that have another": [
        lambda e: e.set("cache_config", cache_dtype="fp8"),
        lambda e: e.set("cache_config", kv_cache_dtype_skip_layers=["0"]),
        lambda e: e.specs(replace(ATTENTION, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)),
        lambda e: e.specs(MLA),
        lambda e: e.specs(replace(MLA, cache_dtype_str="fp8_ds_mla")),
    ],
    "KV-cache specs of the layers": [
        lambda e: e.specs(replace(ATTENTION, head_size=32)),
        lambda e: e.specs(replace(ATTENTION, num_kv_heads=4)),
        lambda e: e.specs(replace(ATTENTION, block_size=64)),
        lambda e: e.specs(replace(ATTENTION, page_size_padded=1 << 20)),
        lambda e: e.specs(replace(ATTENTION, dtype=torch.bfloat16)),
        lambda e: e.specs(STATE),
        lambda e: e.specs(replace(STATE, shapes=((8, 3),))),
        lambda e: e.specs(replace(STATE, num_speculative_blocks=3)),
        lambda e: e.specs(replace(STATE, dtypes=(torch.float32,))),
        lambda e: e.specs(replace(ATTENTION, head_size_v=32)),
        lambda e: e.specs(replace(ATTENTION, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)),
        lambda e: e.specs(replace(ATTENTION, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)),
        lambda e: e.specs(OF_TOMORROW),
        lambda e: e.specs(UNIFORM),
        lambda e: e.larger("b"),
        lambda e: e.larger("c"),
        lambda e: setattr(e, "pages", pages(a=torch.zeros(20, 1), b=torch.zeros(20, 1))),
    ],
    "layout of conv states, Mamba backend": [
        lambda e: e.specs(STATE),
        lambda e: (e.specs(STATE), e.patches.update({"get_conv_state_layout": lambda: "DS"})),
        lambda e: (e.specs(STATE), e.config("mamba_config", backend="flashinfer")),
    ],
    "model runner": [lambda e: e.runner()],
    "kind of fp8": [
        lambda e: e.specs(FP8),
        lambda e: (
            e.specs(FP8),
            e.platform(is_cpu=lambda: True, is_fp8_fnuz=lambda: True),
        ),
    ],
    "shuffled pages of ROCm": [
        lambda e: e.platform(is_rocm=lambda: True),
        lambda e: (e.platform(is_rocm=lambda: True), e.environment.update(SHUFFLED)),
    ],
    "CPUs: how attention packs K, the machine": [
        lambda e: e.packed_for("amx"),
        lambda e: e.packed_for("vec"),
        lambda e: e.packed_for("vec16"),
        lambda e: e.patches.update({"platform.machine": lambda: "aarch64"}),
    ],
    "which rank has which tokens": [
        lambda e: e.config("parallel_config", decode_context_parallel_size=2),
        lambda e: e.config(
            "parallel_config", decode_context_parallel_size=2, cp_kv_cache_interleave_size=32
        ),
    ],
    "vLLM's other settings": [
        lambda e: e.set("model_config", model_class_overrides={"A": "b:C"}),
        lambda e: e.config("attention_config", indexer_kv_dtype="fp8"),
        lambda e: e.config("kernel_config", moe_backend="marlin"),
        lambda e: e.config("speculative_config"),
        lambda e: e.config("speculative_config", disable_lookahead_block_hashes=True),
        lambda e: e.set("model_config", disable_sliding_window=True),
        lambda e: e.set("model_config", model_impl="transformers"),
        lambda e: e.config("cache_config_of_tomorrow", order_of_bytes="otherwise"),
        lambda e: e.set("cache_config", order_of_bytes="otherwise"),
        lambda e: e.environment.update(VLLM_MARLIN_INPUT_DTYPE="fp8"),
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
        lambda e: e.geometry(groups=(replace(CONFIG.groups[0], group_id=1),)),
        lambda e: e.geometry(groups=(replace(CONFIG.groups[0], tokens_per_block=64),)),
        lambda e: e.geometry(cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=2)),
        lambda e: e.geometry(cache=OffloadingCacheConfig(tokens_per_hash=64, blocks_per_chunk=1)),
        lambda e: e.geometry(worker_kv_bytes_per_block=16384),
    ],
    "number of ranks": [
        lambda e: e.geometry(parallel=TWO_RANKS, worker_kv_bytes_per_block=4096),
        lambda e: e.ranks(tp_size=2),
        lambda e: e.ranks(pp_size=2),
        lambda e: e.ranks(pcp_size=2),
        lambda e: e.ranks(dcp_size=2),
        lambda e: e.ranks(world_size=2),
        lambda e: e.geometry(canonical_layout=True),
        lambda e: e.geometry(canonical_layout=True, replicated_layout=True),
        lambda e: (e.ranks(is_parallelism_agnostic=False), e.geometry(canonical_layout=True)),
        lambda e: e.environment.update(VLLM_PP_LAYER_PARTITION="1,2"),  # the layers of a rank
    ],
    "vLLM's release, platform": [],  # they have a test of their own
    "hash function and its seed": [
        lambda e: e.set("cache_config", prefix_caching_hash_algo="sha256_cbor"),
        lambda e: e.environment.update(PYTHONHASHSEED="5"),
    ],
}


TOLD_TWICE = {
    "format": "raised by hand",
    "worker.vllm": "of the next test",
    "worker.platform": "of the next test",
    "worker.model.weights.bytes": "the samples of the files begin with their sizes",
    "worker.model.weights.files": "as above",
    "worker.pages.groups.layers": "the digest of the layers' names tells",
    "worker.pages.groups.spec.cache_dtype_str": "the KV data type is named after it",
}
"""Facts that another one tells as well, or that have a test of their own, each with its reason."""


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


def facts_in(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each fact. Elements of a list have the path of the list."""
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from facts_in(below, (*path, name))
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        for each in value:
            yield from facts_in(each, path)
    else:
        yield path


def without(value: Any, path: tuple[str, ...]) -> Any:
    """Return facts as they are if somebody forgot one of them."""
    if isinstance(value, list):
        return [without(each, path) for each in value]
    if not isinstance(value, dict) or not path:
        return value
    name, *below = path
    if not below:
        return {key: each for key, each in value.items() if key != name}
    return {k: without(each, tuple(below)) if k == name else each for k, each in value.items()}


def test_a_fact_that_is_left_out_is_missed_by_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fact has a change here that nothing else in the namespace tells."""
    found: dict[str, list[Any]] = {}
    for number, (what, changes) in enumerate(CHANGES.items()):
        found[what] = []
        for change in (lambda _: None, *changes):
            engine = Engine(tmp_path / str(number) / "model")
            change(engine)
            found[what].append(engine.facts(monkeypatch))
    paths = {path for each in found.values() for facts in each for path in facts_in(dict(facts))}
    # What is said of a draft model is what is said of any: it is looked at once.
    paths = {path for path in paths if path[:3] != ("worker", "draft_model", "model")}
    missed = {
        ".".join(path)
        for path in paths
        if not any(
            len({str(without(dict(facts), path)) for facts in each}) < len(each)
            for each in found.values()
        )
    }
    assert missed == set(TOLD_TWICE)


def test_releases_and_platforms_do_not_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path / "model")
    found = [engine.named(monkeypatch)]
    monkeypatch.setattr("kvtier.vllm.identity.namespace.vllm.__version__", "9.9.1")
    found.append(engine.named(monkeypatch))
    monkeypatch.setattr(
        "kvtier.vllm.identity.namespace.current_platform", SimpleNamespace(device_type="other")
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


WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float16, sliding_window=64
)


@pytest.mark.parametrize("spec", [ATTENTION, MLA, WINDOW])
def test_another_number_of_drafts_is_shared_by_models_without_states(
    spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only how long a window's blocks are kept goes by it."""
    found = set()
    for count in (2, 3):
        engine = Engine(tmp_path / "model")
        engine.draft("mtp", b"1")
        engine.vllm.speculative_config.num_speculative_tokens = count
        extra = {"extra_retained_tokens": count} if spec is WINDOW else {}
        engine.specs(replace(spec, **extra))
        found.add(engine.named(monkeypatch))
    assert len(found) == 1


def test_the_layout_of_states_is_nothing_to_a_model_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NIXL connector beside kvtier turns it, and would cost such a model a cold start."""
    engine = Engine(tmp_path / "model")
    before = engine.named(monkeypatch)
    engine.patches["get_conv_state_layout"] = lambda: "DS"
    engine.config("mamba_config", backend="flashinfer")
    assert engine.named(monkeypatch) == before


def test_rows_that_are_canonical_are_shared_whatever_a_rank_has_of_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two ranks, each has half of the heads; the row has all."""
    one = Engine(tmp_path / "model")
    one.geometry(canonical_layout=True)
    two = Engine(tmp_path / "model")
    two.geometry(canonical_layout=True, parallel=TWO_RANKS, worker_kv_bytes_per_block=4096)
    two.specs(replace(ATTENTION, num_kv_heads=1))
    assert one.named(monkeypatch) == two.named(monkeypatch)


@pytest.mark.parametrize(
    ("asked", "chosen", "spec"),
    [
        ("fp8", "fp8_ds_mla", replace(MLA, cache_dtype_str="fp8_ds_mla")),
        ("auto", "fp8", FP8),
        ("auto", "float16", ATTENTION),
    ],
)
def test_the_kv_data_type_has_one_name_whoever_asks(
    asked: str, chosen: str, spec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker writes what it chose into its configuration, which is the scheduler's on one GPU."""
    found = set()
    for name in (asked, chosen):
        engine = Engine(tmp_path / "model")
        engine.specs(spec)
        engine.set("cache_config", cache_dtype=name)
        engine.geometry(model=replace(CONFIG.model, dtype=name))
        found.add(engine.named(monkeypatch))
    assert len(found) == 1


def test_a_setting_that_cannot_be_compared_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(tmp_path / "model")
    engine.set("cache_config", something_new=object())
    assert engine.named(monkeypatch) != engine.named(monkeypatch)
    assert "can't be compared with another engine's" in capsys.readouterr().out
