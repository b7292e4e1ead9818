"""NIXL whose progress thread rests between two looks, instead of keeping a processor busy.

It has a setting for that, which its Python API gives away as 0: each agent then takes all of a
processor for as long as it lives.
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.distributed.nixl_utils import NixlWrapper

PAUSE_US = 1000


def let_nixl_rest() -> None:
    """Have every agent that this process makes from now on rest."""
    bindings = sys.modules[NixlWrapper.__module__].nixlBind
    real = bindings.nixlAgentConfig
    if real.__module__ == __name__:
        return

    class Resting(real):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, PAUSE_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Resting
