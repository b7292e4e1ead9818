"""The protocol of the bound: quick where it waits by itself, patient with whoever is slow."""

from __future__ import annotations

from typing import Final

from kvtier_backends.fs.bound.protocol import Timing
from tests.support.patience import PATIENCE_S

QUICK: Final = Timing(
    busy_s=0.002,
    idle_s=0.01,
    # Nobody dies here unheard: whoever is not run for a while keeps what it leads and was granted.
    lease_s=PATIENCE_S,
    dead_s=PATIENCE_S,
    hang_s=PATIENCE_S,
    hand_back_s=0.2,
    uses_s=0.01,
    epoch_s=0.01,
    save_s=0.02,
)
