"""What was compared, and on what: the head of every report."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version


def about() -> dict[str, str | int]:
    """Return versions, vLLM's too, and the machine's kind."""
    import vllm  # noqa: PLC0415 - not every benchmark has it

    return {**about_machine(), "vllm_version": str(vllm.__version__)}


def about_machine() -> dict[str, str | int]:
    """Return what a benchmark without vLLM runs on."""
    return {
        "kvtier_version": version("kvtier"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count() or 0,
    }
