"""Imports vLLM, which makes millions of objects that stay."""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def importing_vllm() -> Iterator[None]:
    """Import it in this block: without its warnings, and with no collector that walks it.

    Collections take a tenth of the time that the import does, and free nothing. Later ones would
    walk all of it again, and have a fork copy its pages.
    """
    with warnings.catch_warnings():
        # torch and vLLM use deprecated parts of themselves while they are imported.
        warnings.simplefilter("ignore")
        gc.disable()
        yield
        gc.freeze()
        gc.enable()
