"""Engines whose pages are of one size and mean something else find nothing of one another.

The size of a page, its layers and its data types may be the same, and the order of what is in it
another. Such a page would be loaded without an error, and answers would be wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.models import make_eagle_head, make_granite
from tests.vllm.support.play import prompts_of, whole_blocks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

LENGTHS = [260, 200]
BLOCK_TOKENS = 64  #: of a Granite with states
#: Keeps a state at each block's end: vLLM's CPU code can do so at the end of a step only.
STATES = {
    "enable_prefix_caching": True,
    "mamba_cache_mode": "align",
    "max_num_batched_tokens": BLOCK_TOKENS,
    "blocks": 160,
}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}


def play(
    model: str, folder: str, settings: dict[str, Any], beside: list[dict[str, Any]]
) -> dict[str, Any]:
    """Play cold or from the folder, in an engine that has nothing in DRAM."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    config = kvtier_config(secondary_tiers=[{"type": "fs", "root_dir": folder}])
    with engine(model, config, before=beside, **settings) as running:
        played = running.run_one_by_one(prompts_of(LENGTHS), 16)
        running.settle()
        return {**played.as_json(), "layout": get_conv_state_layout()}


@pytest.mark.one_release
def test_states_in_another_layout_are_not_found(tmp_path: Path, log_folder: Path) -> None:
    """A convolution's state was stored by rows and read by columns, where NIXL is beside kvtier.

    vLLM's CPU platform turns the layout then, with nothing set. Three of four answers were wrong.
    """
    model = str(make_granite(tmp_path / "model"))
    folder = str(tmp_path / "kv")
    told = [
        run_scenario(
            play,
            log_folder=log_folder,
            model=model,
            folder=folder,
            settings=STATES,
            beside=beside,
        )
        for beside in ([], [NIXL])
    ]
    assert [each["layout"] for each in told] == ["SD", "DS"]
    assert [each["cached"] for each in told] == [[0, 0], [0, 0]]


@pytest.mark.long
def test_states_in_the_same_layout_are_found_however_it_was_chosen(
    tmp_path: Path, log_folder: Path
) -> None:
    """With the variable set, with NIXL beside, and with both."""
    model = str(make_granite(tmp_path / "model"))
    variable = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
    told = [
        run_scenario(
            play,
            log_folder=log_folder,
            environment=environment,
            model=model,
            folder=str(tmp_path / "kv"),
            settings=STATES,
            beside=beside,
        )
        for environment, beside in ((variable, []), ({}, [NIXL]), (variable, [NIXL]))
    ]
    whole = whole_blocks(LENGTHS, BLOCK_TOKENS)
    assert [each["cached"] for each in told] == [[0, 0], whole, whole]
    assert told[0]["tokens"] == told[1]["tokens"] == told[2]["tokens"]


@pytest.mark.long
def test_another_number_of_drafts_finds_the_blocks_of_a_model_without_states(
    llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    head = str(make_eagle_head(tmp_path / "head"))
    told = [
        run_scenario(
            play,
            log_folder=log_folder,
            model=str(llama),
            folder=str(tmp_path / "kv"),
            settings={
                "speculative_config": {
                    "model": head,
                    "method": "eagle",
                    "num_speculative_tokens": count,
                }
            },
            beside=[],
        )
        for count in (2, 3)
    ]
    cold, warm = told
    assert cold["cached"] == [0, 0]
    assert min(warm["cached"]) >= min(LENGTHS) // 2
    assert warm["tokens"] == cold["tokens"]
