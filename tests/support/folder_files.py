"""What files a folder has while an engine stores, evicts and removes in it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def files_of(folder: Path, suffix: str = "") -> Iterator[os.stat_result]:
    """Yield what the system says of each file that is still there when it is asked."""
    for place, _, names in os.walk(folder):
        for name in names:
            if name.endswith(suffix):
                with suppress(FileNotFoundError):
                    yield Path(place, name).stat()
