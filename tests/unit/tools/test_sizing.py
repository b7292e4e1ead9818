"""What sizing promises: bytes as engines store them, and a knee where it is said to be."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies

from kvtier.errors import ConfigError
from kvtier.tools.sizing.geometry import (
    Geometry,
    LayerGroup,
    make_geometry,
    parse_geometry_untrusted,
    read_geometry,
)
from kvtier.tools.sizing.recommend import (
    GIB,
    SizePoint,
    Workfacts,
    advise,
    knee_of_curve,
    saved_by_a_gib_more,
    tier_table,
)

if TYPE_CHECKING:
    from pathlib import Path

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN_05B = {
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}


def parse(config: object, **options: Any) -> Geometry:
    return parse_geometry_untrusted(json.dumps(config).encode(), **options)


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [
        (LLAMA_8B, 128 * 1024),
        (QWEN_05B, 12 * 1024),
        (DEEPSEEK_V3, 70_272),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 12 * 2 * 768 * 2),
        (LLAMA_8B | {"torch_dtype": "torch.float16"}, 128 * 1024),
        (LLAMA_8B | {"torch_dtype": "float32"}, 128 * 1024),
        (LLAMA_8B | {"head_dim": 64}, 64 * 1024),
        (LLAMA_8B | {"v_head_dim": 64}, 96 * 1024),
        (LLAMA_8B | {"multi_query": True}, 16 * 1024),
        ({"text_config": LLAMA_8B, "vision_config": {"num_hidden_layers": 5}}, 128 * 1024),
    ],
)
def test_bytes_per_token_are_the_published_ones(config: object, bytes_per_token: int) -> None:
    assert parse(config).bytes_per_token() == bytes_per_token


def test_numbers_by_hand_are_as_good_as_a_config() -> None:
    for dtype, bytes_per_token in (("bfloat16", parse(LLAMA_8B).bytes_per_token()), ("fp8", 2**16)):
        by_hand = make_geometry(layers=32, kv_heads=8, head_dim=128, dtype=dtype)
        assert by_hand.bytes_per_token() == bytes_per_token


def test_windows_count_in_full_and_are_noted() -> None:
    """An offloaded block holds what all attention layers have."""
    kinds = ["sliding_attention", "full_attention"] * 16
    geometry = parse(LLAMA_8B | {"layer_types": kinds, "sliding_window": 1024})
    assert geometry.bytes_per_token() == 128 * 1024
    assert any("16 layers with a window of 1024" in note for note in geometry.notes)
    assert not parse(QWEN_05B).notes


def test_global_layers_may_have_heads_of_their_own() -> None:
    kinds = ["sliding_attention"] * 24 + ["full_attention"] * 8
    extra = {"layer_types": kinds, "global_head_dim": 512, "num_global_key_value_heads": 2}
    assert parse(LLAMA_8B | extra).groups == (
        LayerGroup("sliding_attention", 24, 8, 256),
        LayerGroup("full_attention", 8, 2, 1024),
    )


@pytest.mark.parametrize(
    "says",
    [
        {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8},
        {"layers_block_type": ["mamba"] * 24 + ["attention"] * 8},
        {"full_attention_interval": 4},
        {"attn_layer_period": 4, "attn_layer_offset": 3},
        {"attn_layer_indices": list(range(8))},
        {"hybrid_override_pattern": "M-M*" * 8},
    ],
)
def test_recurrent_layers_are_not_counted_however_they_are_named(says: dict[str, Any]) -> None:
    geometry = parse(LLAMA_8B | says)
    assert geometry.bytes_per_token() == 32 * 1024
    assert any("24 layers keep no KV" in note for note in geometry.notes)


def test_layers_that_share_a_cache_are_counted_once() -> None:
    geometry = parse(LLAMA_8B | {"num_kv_shared_layers": 16})
    assert geometry.bytes_per_token() == 64 * 1024
    assert any("16 layers use the cache" in note for note in geometry.notes)


@pytest.mark.parametrize(
    ("tp", "per_rank", "in_vllm"),
    [(1, 128, 128), (4, 32, 128), (8, 16, 128), (16, 16, 256), (64, 16, 1024)],
)
def test_ranks_divide_heads_until_each_has_one(tp: int, per_rank: int, in_vllm: int) -> None:
    """vLLM's size is the total: only heads that several ranks have make it larger."""
    geometry = parse(LLAMA_8B)
    assert geometry.bytes_per_token_per_rank(tp) == per_rank * 1024
    assert geometry.bytes_per_token_in_vllm(tp) == in_vllm * 1024


def test_a_latent_vector_is_on_every_rank_and_stored_once_by_vllm() -> None:
    geometry = parse(DEEPSEEK_V3)
    assert geometry.bytes_per_token_per_rank(8) == 70_272
    assert geometry.bytes_per_token_in_vllm(8) == 70_272


@pytest.mark.parametrize("tp", [0, 3, 12, 10**6])
def test_a_number_of_ranks_that_does_not_go_with_the_heads_is_refused(tp: int) -> None:
    with pytest.raises(ConfigError, match=f"tp={tp}"):
        parse(LLAMA_8B).bytes_per_token_in_vllm(tp)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ([], "not a JSON object"),
        ({}, "num_hidden_layers is missing"),
        (LLAMA_8B | {"num_hidden_layers": "32"}, "num_hidden_layers is not a whole number"),
        (LLAMA_8B | {"num_hidden_layers": True}, "num_hidden_layers is not a whole number"),
        (LLAMA_8B | {"num_hidden_layers": 10**9}, "num_hidden_layers must be within"),
        (LLAMA_8B | {"num_key_value_heads": 0}, "num_key_value_heads must be within"),
        (LLAMA_8B | {"hidden_size": 4095}, "no multiple of 32 heads"),
        (LLAMA_8B | {"torch_dtype": "int3"}, "dtype is unknown"),
        (LLAMA_8B | {"layer_types": ["full_attention"]}, "layer_types has no name for each"),
        (LLAMA_8B | {"layer_types": ["\x1b[31m"] * 32}, "not the name of a kind of layer"),
        (LLAMA_8B | {"layer_types": ["mamba"] * 32}, "there is no KV cache"),
        (LLAMA_8B | {"hybrid_override_pattern": "M*"}, "no letter for each"),
        (LLAMA_8B | {"attn_layer_indices": 4}, "attn_layer_indices is no list"),
        (LLAMA_8B | {"compress_ratios": [4]}, "not understood"),
        (DEEPSEEK_V3 | {"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_field(config: object, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse(config)


def test_a_config_is_read_from_its_folder_and_named_when_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        read_geometry(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        read_geometry(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert read_geometry(tmp_path).bytes_per_token() == 128 * 1024
    (tmp_path / "config.json").write_bytes(b" " * (5 * 2**20))
    with pytest.raises(ConfigError, match="larger than 4 MiB"):
        read_geometry(tmp_path / "config.json")


JUNK = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats()
    | strategies.text(max_size=5),
    lambda inner: (
        strategies.lists(inner, max_size=4)
        | strategies.dictionaries(strategies.text(max_size=3), inner)
    ),
    max_leaves=8,
)
FIELDS = strategies.sampled_from(
    [
        *DEEPSEEK_V3,
        "layer_types",
        "layers_block_type",
        "hybrid_override_pattern",
        "attn_layer_period",
        "attn_layer_offset",
        "attn_layer_indices",
        "full_attention_interval",
        "text_config",
        "num_kv_shared_layers",
        "global_head_dim",
        "head_dim",
        "multi_query",
        "sliding_window",
    ]
)


@given(
    strategies.sampled_from([LLAMA_8B, DEEPSEEK_V3, {}]),
    strategies.dictionaries(FIELDS, JUNK, max_size=4),
)
def test_a_config_raises_nothing_but_config_error(
    config: dict[str, Any], junk: dict[str, Any]
) -> None:
    with suppress(ConfigError):
        assert parse(config | junk).bytes_per_token() > 0


@given(strategies.binary(max_size=50))
def test_bytes_raise_nothing_but_config_error(raw: bytes) -> None:
    with suppress(ConfigError):
        parse_geometry_untrusted(raw)


def curve(*points: tuple[int, float]) -> list[SizePoint]:
    return [SizePoint(*point) for point in points]


FACTS = Workfacts(
    block_bytes=GIB, block_tokens=100, requests=1000, references=5000, largest_request_blocks=3
)
BEND = curve((1, 0.1), (5, 0.3), (10, 0.5), (20, 0.55), (100, 0.6))


def test_the_knee_is_where_the_curve_bends() -> None:
    assert knee_of_curve(BEND) == 2


def test_a_straight_line_or_no_hits_have_no_knee() -> None:
    assert knee_of_curve(curve((50, 0.3), (100, 0.6))) is None
    assert knee_of_curve(curve((50, 0.0), (100, 0.0))) is None


@given(
    strategies.lists(
        strategies.tuples(strategies.integers(1, 1000), strategies.floats(0, 1)),
        min_size=1,
        max_size=9,
    ),
    strategies.integers(1, 50),
)
def test_the_knee_depends_on_no_unit(pairs: list[tuple[int, float]], scale: int) -> None:
    sizes = sorted({size for size, _ in pairs})
    ratios = sorted(ratio for _, ratio in pairs)
    points = curve(*zip(sizes, ratios, strict=False))
    scaled = [SizePoint(point.blocks * scale, point.hit_ratio) for point in points]
    first, second = knee_of_curve(points), knee_of_curve(scaled)

    def height(index: int | None) -> float:
        if index is None:
            return 0.0
        end = points[-1]
        return points[index].hit_ratio / end.hit_ratio - points[index].blocks / end.blocks

    assert height(first) == pytest.approx(height(second), abs=1e-9)


def test_the_cheapest_tier_gets_the_knee_and_a_dearer_one_what_pays() -> None:
    dram, disk = advise(BEND, {"disk": 1.0, "dram": 1.5}, FACTS)
    assert (dram.name, disk.name) == ("dram", "disk")
    assert (disk.blocks, disk.hit_ratio) == (10, 0.5)
    assert dram.blocks == 5  # the only size that holds a request of 3 and is below the knee
    dram, disk = advise(BEND, {"disk": 1.0, "dram": 1.01}, FACTS._replace(largest_request_blocks=1))
    assert dram.blocks == 1  # one block is 0.2 - 0.101 above the line, five are 0.6 - 0.505


def test_a_dear_tier_still_holds_the_largest_request() -> None:
    dram, disk = advise(BEND, {"disk": 1.0, "dram": 1000.0}, FACTS)
    assert dram.blocks == 5
    assert dram.own_hit_ratio + disk.own_hit_ratio == pytest.approx(disk.hit_ratio)


def test_of_tiers_at_one_price_the_first_is_the_fastest() -> None:
    """It gets the memory: the other one is a disk in the configuration that is printed."""
    assert [tier.name for tier in advise(BEND, {"dram": 1.0, "disk": 1.0}, FACTS)] == [
        "dram",
        "disk",
    ]


def test_without_a_hit_nothing_is_recommended_and_without_a_knee_all_blocks() -> None:
    """Prompts that come in turn, for ever: a cache of least recent use hits all of them or none."""
    prices = {"disk": 1.0, "dram": 2.0}
    assert advise(curve((10, 0.0), (100, 0.0)), prices, FACTS) == []
    disk = advise(curve((10, 0.0), (50, 0.0), (100, 0.9)), prices, FACTS)[-1]
    assert (disk.name, disk.blocks, disk.hit_ratio) == ("disk", 100, 0.9)


def test_tiers_hold_copies_so_a_smaller_one_behind_adds_nothing() -> None:
    first, second = tier_table([("a", SizePoint(10, 0.5), None), ("b", SizePoint(5, 0.3), 2.0)])
    assert (first.own_hit_ratio, second.own_hit_ratio, second.hit_ratio) == (0.5, 0.0, 0.5)


def test_a_gib_more_saves_tokens() -> None:
    """From 1 to 5 blocks of 1 GiB: 0.2 of 5,000 blocks of 100 tokens, 1,000 requests, 4 GiB."""
    saved = saved_by_a_gib_more(BEND, FACTS)
    assert saved[0] == pytest.approx(0.2 * 5000 * 100 / 4)
    assert saved[-1] is None
    assert len(saved) == len(BEND)


def test_a_gib_more_saves_no_more_tokens_than_all_larger_sizes() -> None:
    """Where a GiB reaches over several sizes: from 1 block to 8.5, and from 20 to the end."""
    saved = saved_by_a_gib_more(BEND, FACTS._replace(block_bytes=GIB * 2 // 15))
    assert saved[0] == pytest.approx((0.3 + 0.2 * 3.5 / 5 - 0.1) * 5000 * 100)
    saved = saved_by_a_gib_more(BEND, FACTS._replace(block_bytes=1))
    assert saved[3] == pytest.approx((0.6 - 0.55) * 5000 * 100)
