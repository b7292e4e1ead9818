"""Models with several kinds of layers find in a tier, after a restart, what they find in DRAM."""

from __future__ import annotations

import pytest

from tests.rig.hits import hits
from tests.rig.layers import BLOCK_TOKENS

pytestmark = pytest.mark.promise(23)

LENGTHS = (48, 49, 56, 57, 25, 63)  #: with ends on a block and off it
SHAPES = {
    "one chunk of a window": {"kinds": ("full", "window:4")},
    "two chunks of a window": {"kinds": ("full", "window:8")},
    "windows that end within chunks": {"kinds": ("full", "window:6", "window:18")},
    "windows alone": {"kinds": ("window:8", "window:16")},
    "a state": {"kinds": ("full", "mamba")},
    "a state, chunks of 3": {"kinds": ("full", "mamba"), "blocks_per_chunk": 3},
    "a state, with drafts": {"kinds": ("full", "mamba"), "speculates": 3},
    "a state from within a step": {"kinds": ("full", "mamba"), "checkpoints": True},
    "a state beside a draft": {"kinds": ("full", "mamba"), "speculates": 1, "drafts": (0,)},
    "a state beside latent attention": {"kinds": ("mla", "mamba")},
    "a window and a state": {"kinds": ("full", "window:8", "mamba")},
    "windows, all ends of which are kept": {"kinds": ("full", "window:8"), "retention": None},
    "windows, some ends of which are kept": {"kinds": ("full", "window:8"), "retention": 16},
    "a draft": {"kinds": ("full",), "drafts": (0,)},
    "a draft beside a window": {"kinds": ("full", "window:8"), "drafts": (0,)},
    "a draft with a window": {"kinds": ("full", "window:8"), "drafts": (1,)},
    "a draft with one chunk of a window": {"kinds": ("full", "window:4"), "drafts": (1,)},
    "drafts in all groups": {"kinds": ("full", "window:8"), "drafts": (0, 1)},
    "a draft, chunks of 2": {"kinds": ("full",), "drafts": (0,), "blocks_per_chunk": 2},
    "blocks of 4 and 8": {"kinds": ("full", "half:8")},
    "blocks of 4 and 8, a window that ends within a block": {"kinds": ("full", "half:11")},
    "blocks of 4, 16 and 4": {"kinds": ("full", "quarter:16", "window:8")},
    "blocks of 8, a draft": {"kinds": ("full", "half:8"), "drafts": (1,)},
    "pages of three sizes, side by side": {
        "kinds": ("full", "quarter:16", "window:8"),
        "layout": "BLHNC",
    },
    "windows of two layers and of one": {"kinds": ("full",) * 2 + ("window:8",) * 3},
    "a draft beside blocks of 16": {"kinds": ("full", "quarter:16"), "drafts": (0,)},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tier_serves_after_a_restart_what_dram_serves(shape: str) -> None:
    found = hits(lengths=LENGTHS, **SHAPES[shape])
    assert found.restart == found.dram
    assert sum(found.dram), "nothing was compared"


@pytest.mark.parametrize("kinds", [("full", "mamba"), ("mla", "mamba")])
def test_hits_end_within_a_block_where_vllm_waits_for_no_tier(kinds: tuple[str, ...]) -> None:
    """With ``prefix_match_unit`` vLLM asks for the rest once the whole blocks are there.

    It takes what DRAM has of it at that moment, and the next request finds what a tier brought.
    """
    found = hits(kinds, (*LENGTHS, 51), unit=1)
    assert found.restart == [tokens // BLOCK_TOKENS * BLOCK_TOKENS for tokens in found.dram]
    assert found.again == found.dram != found.restart
