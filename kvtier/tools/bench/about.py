"""What was compared, and on what: the head of every report."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import vllm


def about() -> dict[str, str | int]:
    """Return versions and the machine's kind."""
    return {
        "kvtier_version": version("kvtier"),
        "vllm_version": str(vllm.__version__),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count() or 0,
    }
