"""vLLM, imported without its warnings and its log, which say what a failure does not need."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from tests.vllm.support.importing import importing_vllm

with importing_vllm():
    import vllm

    # As in tests/vllm/conftest.py: one release cannot read another's, and makes it anew.
    _CACHE = Path(__file__).parents[2] / "build" / f"vllm-{vllm.__version__}"
    os.environ["VLLM_CACHE_ROOT"] = str(_CACHE)
    import vllm.v1.engine.core

    import kvtier.vllm  # noqa: F401 - imported for that alone

logging.getLogger("vllm").setLevel(logging.CRITICAL)
