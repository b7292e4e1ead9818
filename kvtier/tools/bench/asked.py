"""What several benchmarks are asked for, checked before anything is measured."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from kvtier.errors import Misuse

PAGE_BYTES: Final = 4096


def asked_folder(path: str | None) -> Path:
    """Return the folder on the disk to be measured. Raises ``Misuse``."""
    place = Path(path or tempfile.gettempdir())
    if not place.is_dir():
        raise Misuse(f"--path {place} is no folder. Make it first, on the disk to be measured.")
    return place


def check_pages(block_bytes: int) -> None:
    """Raise ``Misuse`` for blocks that are no whole pages."""
    if block_bytes < PAGE_BYTES or block_bytes % PAGE_BYTES:
        raise Misuse(
            f"--block-bytes {block_bytes} must be a multiple of {PAGE_BYTES}, for O_DIRECT."
        )
