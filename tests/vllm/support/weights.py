"""Other weights for a model that is there, and engines that could find what it had stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.patience import looks
from tests.vllm.support.engine import engine, kvtier_config
from tests.vllm.support.play import play_round, prompts_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CAPACITY_BYTES = 32 << 20


def fine_tune(source: Path, target: Path, seed: int) -> None:
    """Write each tensor of ``source`` with other numbers, the same ones for each seed.

    The file has the size of ``source``.
    """
    dice = torch.Generator().manual_seed(seed)
    tuned = {
        name: old + 0.5 * old.abs().mean() * torch.randn(old.shape, generator=dice)
        for name, old in load_file(source).items()
    }
    save_file(tuned, target, metadata={"format": "pt"})
    assert target.stat().st_size == source.stat().st_size


def write_into(model: Any) -> None:
    """Change a model in place, past all methods of vLLM's."""
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.numel():  # what the platform has packed is empty here
            parameter.data.copy_(parameter.data.roll(1, dims=0))


class WorkerExtension:
    """What a trainer adds to vLLM's workers: a method that looks, and one that writes."""

    def count_numbers(self: Any) -> int:
        return sum(each.numel() for each in self.get_model().parameters())

    def turn(self: Any) -> None:
        write_into(self.get_model())


def on_disk_and_fs(root: str, **keys: Any) -> dict[str, Any]:
    """Return the configuration of an engine with both kinds of tiers below a folder."""
    return kvtier_config(
        secondary_tiers=[
            {"type": "disk", "path": f"{root}/disk", "capacity_bytes": CAPACITY_BYTES},
            {"type": "fs", "root_dir": f"{root}/fs"},
        ],
        **keys,
    )


def start_and_play(
    model: str, root: str, lengths: Sequence[int], rounds: int = 1, **settings: Any
) -> list[dict[str, Any]]:
    """Start an engine with both kinds of tiers, and play once its disk says what it has.

    Before that, a disk finds nothing, whatever it has. ``keys``: of kvtier's configuration.
    """
    with engine(model, on_disk_and_fs(root, **settings.pop("keys", {})), **settings) as running:
        for _ in looks(running.statistics):
            if "blocks" in running.settle()["tiers"][0]["backend_gauges"]:
                break
        return [play_round(running, prompts_of(lengths)) for _ in range(rounds)]


def tokens_without_kvtier(model: str, lengths: Sequence[int]) -> list[list[int]]:
    """Return what an engine without offloading answers."""
    with engine(model, None) as plain:
        return plain.run_one_by_one(prompts_of(lengths)).tokens
