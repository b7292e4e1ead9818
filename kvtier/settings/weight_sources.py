"""Decides whether an engine's settings show where its weights are, so that they can be checked.

KV data is only valid with the weights that it was computed with. Data of weights that can't be
identified is shared with no other engine and over no restart (``kvtier/vllm/identity/weights.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

READ_FILES: Final = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache"),
        *("pt", "gguf", "sharded_state", "runai_streamer", "runai_streamer_sharded"),
    }
)
"""Values of vLLM's ``load_format`` whose loaders read the model's folder or file."""

NO_WEIGHTS: Final = "dummy"
"""The ``load_format`` of random numbers. Engines that get their weights pushed start with it, so
the seed identifies nothing: all runs of one architecture start with the same numbers."""

SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors"})
"""Suffixes that vLLM's loaders read, and some more: an extra file costs a cold start at worst."""


def why_out_of_sight(load_format: str, source: str) -> str | None:
    """Return why the content of these weights can't be seen; None if no reason is known.

    ``source``: a path, a name of the hub, or an address. Looks at no file.
    """
    if load_format == NO_WEIGHTS:
        return f"load_format {load_format!r} starts with random ones, which others may replace"
    if load_format not in READ_FILES:
        return f"load_format {load_format!r} does not say where they are from"
    if "://" in source:
        return f"they are streamed from {source}"
    return None


def no_weight_files(path: Path) -> str:
    """Return the message about a folder without any."""
    return f"{path} has no weight files"


def is_weight_file(path: Path) -> bool:
    """Return whether this is, by its name, a file that a loader of vLLM's may read."""
    return path.suffix in SUFFIXES and path.is_file()
