"""Checks an option that several benchmarks have."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvtier.errors import Misuse


def asked_folder(path: str | None) -> Path:
    """Return the folder on the disk to be measured. Raises ``Misuse``."""
    place = Path(path or tempfile.gettempdir())
    if not place.is_dir():
        raise Misuse(f"--path {place} is no folder. Make it first, on the disk to be measured.")
    return place
