"""Finds a model's ``config.json``: in its folder, or in the hub's cache on this host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_NAME: Final = "config.json"
MAIN: Final = "refs/main"
COMMIT_CHARACTERS_MAX: Final = 64


def folder_in_cache(model: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the model's folder in the hub's cache; None if it is not a name of the hub."""
    owner, _, name = model.partition("/")
    if not (owner and name) or "/" in name or owner in (".", "..", "~"):
        return None
    home = environment.get("HF_HOME") or "~/.cache/huggingface"
    cache = environment.get("HF_HUB_CACHE") or f"{home}/hub"
    return Path(cache).expanduser() / f"models--{owner}--{name}"


def config_of(model: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the model's ``config.json``; None if it is not on this host.

    For a model in the hub's cache, it is that of the branch ``main``. May hang.
    """
    path = Path(model)
    if path.exists():
        return path / CONFIG_NAME if path.is_dir() else path
    folder = folder_in_cache(model, environment)
    try:
        commit = (folder / MAIN).read_text()[:COMMIT_CHARACTERS_MAX].strip() if folder else ""
    except (OSError, ValueError):
        return None
    if folder is None or not commit.isalnum():
        return None
    found = folder / "snapshots" / commit / CONFIG_NAME
    return found if found.exists() else None
