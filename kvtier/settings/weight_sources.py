"""Whether an engine's settings say where its weights are: only then can their content be seen.

KV data is of use with the weights that it was computed with. What nothing tells from other weights
is shared with no other engine and over no restart (``kvtier/vllm/weights.py``).
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
"""The ``load_format`` of random numbers. Engines that are pushed their weights start with it, so
the seed names nothing: all runs of one architecture start with the same numbers."""

SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors"})
"""Of all that vLLM's loaders read, and some more: a file too many costs a cold start at worst."""


def why_out_of_sight(load_format: str, source: str) -> str | None:
    """Return why the content of these weights can't be seen; None where nothing speaks against.

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
    """Return what to say of a folder without any."""
    return f"{path} has no weight files"


def is_weight_file(path: Path) -> bool:
    """Tell whether this is, by its name, a file that a loader of vLLM's may read."""
    return path.suffix in SUFFIXES and path.is_file()
