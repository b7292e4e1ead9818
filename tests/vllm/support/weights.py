"""Other weights for a model that is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path


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
