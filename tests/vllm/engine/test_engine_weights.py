"""Weights are replaced in a running engine: nothing that the old ones computed is used again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.support.children import run_scenario
from tests.vllm.support.engine import Engine, engine, kvtier_config
from tests.vllm.support.play import assert_at_rest, play_round, prompts_of, whole_blocks

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [500, 333, 64]  #: in tokens
CAPACITY_BYTES = 32 << 20


def replace_weights(running: Engine) -> None:
    """Give the model other weights, the same ones each time."""

    def turn(model: Any) -> None:
        for number, parameter in enumerate(model.parameters()):
            if parameter.ndim > 1:
                parameter.data = parameter.data.roll(1 + number % 3, dims=0).contiguous()

    running.llm.apply_model(turn)


def weights_change(model: str, tiers: list[dict[str, Any]]) -> dict[str, Any]:
    """Play with the first weights, with others, and in an engine that is started anew."""
    told: dict[str, Any] = {}
    prompts = prompts_of(LENGTHS)
    with engine(model, None) as plain:
        replace_weights(plain)
        told["fresh"] = plain.run_one_by_one(prompts).as_json()
    config = kvtier_config(secondary_tiers=tiers)
    with engine(model, config) as running:
        told["original"] = play_round(running, prompts)
        replace_weights(running)
        assert running.llm.reset_prefix_cache(reset_connector=True)
        told["replaced"] = play_round(running, prompts)
        told["again"] = play_round(running, prompts)
    with engine(model, config) as running:
        # Blocks of a disk are made known while the first requests run.
        told["restarted"] = [play_round(running, prompts) for _ in range(2)]
    return told


def of_kinds(root: Path) -> dict[str, dict[str, Any]]:
    return {
        "fs": {"type": "fs", "root_dir": str(root / "kv")},
        "disk": {"type": "disk", "path": str(root / "disk"), "capacity_bytes": CAPACITY_BYTES},
        "memory": {"type": "memory", "capacity_bytes": CAPACITY_BYTES},
    }


@pytest.mark.parametrize(
    "kinds",
    [
        # Each would serve what the others don't: a miss is one of all three.
        "memory disk fs",
        # By itself, each could at most serve less.
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("fs", "disk", "memory")),
    ],
)
def test_after_a_change_of_weights_nothing_computed_before_is_read(
    kinds: str, llama: Path, tmp_path: Path, log_folder: Path
) -> None:
    """80 of 80 tokens were read with the KV data of the old weights."""
    tiers = [of_kinds(tmp_path)[kind] for kind in kinds.split()]
    told = run_scenario(weights_change, log_folder=log_folder, model=str(llama), tiers=tiers)
    blocks = whole_blocks(LENGTHS)
    assert told["replaced"]["tokens"] == told["fresh"]["tokens"] == told["again"]["tokens"]
    assert told["replaced"]["tokens"] != told["original"]["tokens"]
    assert told["replaced"]["cached"] == [0, 0, 0]
    assert told["again"]["cached"][:2] == blocks[:2], "what the new weights computed is used"
    assert_at_rest(told["again"]["statistics"])
    first, second = told["restarted"]
    assert first["tokens"] == second["tokens"] == told["original"]["tokens"]
    if "fs" in kinds:
        assert first["cached"][:2] == blocks[:2], "what the model's own weights computed is found"
    elif kinds == "memory":
        assert first["cached"] == [0, 0, 0]
