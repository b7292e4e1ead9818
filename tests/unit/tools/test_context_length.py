"""The longest prompt of a model is what vLLM would take it for, by its ``config.json``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tools.sizing.context_length import (
    LENGTHS,
    context_length_untrusted,
    read_context_length,
)
from kvtier.tools.sizing.model_config import config_of

if TYPE_CHECKING:
    from pathlib import Path

POSITIONS = {"max_position_embeddings": 4096}


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return POSITIONS | {"rope_scaling": {"type": kind, "factor": 4.0, **more}}


CASES: list[tuple[dict[str, Any], int | None]] = [  # what vLLM 0.32 returns for each of them
    (POSITIONS, 4096),
    ({"n_positions": 1024}, 1024),
    (POSITIONS | {"max_seq_len": 2048}, 2048),
    (POSITIONS | {"model_max_length": 131_072}, 131_072),
    (scaled("linear"), 16_384),
    (scaled("dynamic"), 16_384),
    (scaled("yarn"), 4096),
    (scaled("llama3"), 4096),
    (scaled("longrope", original_max_position_embeddings=1024), 1024),
    (scaled("su") | {"original_max_position_embeddings": 1024}, 1024),
    (scaled("linear") | {"model_type": "gemma3_text"}, 4096),
    (
        POSITIONS
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_type": "default"},
            }
        },
        32_768,
    ),
    ({"max_position_embeddings": 7, "text_config": POSITIONS}, 4096),
    ({}, None),
    ({"max_position_embeddings": "4096"}, None),
    ({"max_position_embeddings": True}, None),
]


@pytest.mark.parametrize(("config", "tokens"), CASES)
def test_the_longest_prompt_is_vllms(
    config: dict[str, Any], tokens: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_context_length(tmp_path / "config.json") == tokens


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["factor", "type", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = st.sampled_from([*LENGTHS, "rope_scaling", "rope_parameters", "text_config", "model_type"])


@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_what_a_config_holds_is_never_trusted(config: dict[str, Any]) -> None:
    tokens = context_length_untrusted(config)
    assert tokens is None or tokens >= 0


def test_a_config_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[")
    assert read_context_length(tmp_path / "config.json") is None
    assert read_context_length(tmp_path) is None


@pytest.mark.parametrize("model", ["org/m", "m", "org/m/n", "/org", "../m"])
def test_a_model_that_is_not_on_this_host_has_no_config(model: str, tmp_path: Path) -> None:
    assert config_of(model, {"HF_HUB_CACHE": str(tmp_path)}) is None
