"""vLLM, imported without its warnings and its log, which say what a failure does not need."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from pathlib import Path

with warnings.catch_warnings():
    # torch and vLLM use deprecated parts of themselves while they are imported.
    warnings.simplefilter("ignore")
    import vllm

    # As in tests/vllm/conftest.py: one release cannot read another's, and makes it anew.
    _CACHE = Path(__file__).parents[2] / "build" / f"vllm-{vllm.__version__}"
    os.environ["VLLM_CACHE_ROOT"] = str(_CACHE)
    import vllm.v1.engine.core

    import kvtier.vllm  # noqa: F401 - imported for that alone

logging.getLogger("vllm").setLevel(logging.CRITICAL)
# What is imported stays: without this the garbage collector walks all of it, time and again.
gc.collect()
gc.freeze()
