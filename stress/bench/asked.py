"""The option ``--path``, which several benchmarks have."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import Misuse

if TYPE_CHECKING:
    import argparse


def add_path(parser: argparse.ArgumentParser) -> None:
    """Declare ``--path``."""
    parser.add_argument(
        "--path",
        metavar="FOLDER",
        help="a folder on the disk to be measured (default: the one for temporary files)",
    )


def asked_folder(path: str | None) -> Path:
    """Return the folder on the disk to be measured. Raises ``Misuse``."""
    place = Path(path or tempfile.gettempdir())
    if not place.is_dir():
        raise Misuse(f"--path {place} is no folder. Make it first, on the disk to be measured.")
    return place
