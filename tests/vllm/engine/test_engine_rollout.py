"""A rolling update of real engines: the new one starts while the old one has the disk folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.patience import until
from tests.vllm.support.children import start_scenario
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.notes import leave, wait_for
from tests.vllm.support.play import play_round, prompts_of, whole_blocks

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = [500, 333]


def config_of(path: str, **options: Any) -> dict[str, Any]:
    tier = {"type": "disk", "path": path, "capacity_bytes": "16MiB", **options}
    return kvtier_config(cpu_bytes_to_use="64MiB", secondary_tiers=[tier], on_reset="keep")


def old_engine(model: str, path: str, notes: str) -> dict[str, Any]:
    """Have the folder, and serve until the new engine does."""
    with engine(model, config_of(path)) as running:
        first = play_round(running, prompts_of(LENGTHS))
        leave(f"{notes}/stored")
        wait_for(f"{notes}/ready")
        return {"first": first, "last": play_round(running, prompts_of(LENGTHS))}


def new_engine(model: str, path: str, notes: str) -> dict[str, Any]:
    """Start beside it, serve without the folder, and take that over."""
    wait_for(f"{notes}/stored")
    told: dict[str, Any] = {}
    with engine(model, config_of(path, on_unusable="skip")) as running:
        facade = running.manager().facade
        told["without"] = play_round(running, prompts_of(LENGTHS))
        facade.reset()  # what it has computed itself is forgotten
        facade.on_reset_flushed()
        leave(f"{notes}/ready")
        wait_for(f"{notes}/ended")

        def has_the_folder() -> bool:
            facade.get_finished()
            return bool(facade.statistics().tiers[0].breaker == "CLOSED")

        until(has_the_folder, facade.statistics)
        told["after"] = play_round(running, prompts_of(LENGTHS))
    return told


@pytest.mark.one_release
def test_a_rollout_costs_no_block_and_ends(llama: Path, tmp_path: Path, log_folder: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    arguments = {"model": str(llama), "path": str(tmp_path / "kv"), "notes": str(notes)}
    with (
        start_scenario(old_engine, log_folder / "old", {}, **arguments) as old,
        start_scenario(new_engine, log_folder / "new", {}, **arguments) as new,
    ):
        played = old.result()
        leave(str(notes / "ended"))
        told = new.result()
    tokens = played["first"]["tokens"]
    assert told["without"]["tokens"] == tokens
    assert told["without"]["cached"] == [0] * len(LENGTHS), "the folder was the old engine's"
    assert played["last"]["tokens"] == tokens, "which went on"
    assert told["after"]["tokens"] == tokens
    assert told["after"]["cached"] == whole_blocks(LENGTHS), "all of it from the folder"
