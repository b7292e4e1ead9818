"""Makes bytes that compress like the keys and values of a real model, for use without one."""

from __future__ import annotations

from typing import Final

import numpy as np

_CHANNELS: Final = 64
_SPREAD: Final = 0.7
_FAR_OFF: Final = (17, 12.0)
"""A channel of keys with outliers, as every model has some."""


def kv_like(size: int, seed: int = 0) -> bytes:
    """Return ``size`` bytes of bfloat16 (an even number), the same for the same seed.

    Each channel is normally distributed, with a spread of its own: logarithms of spreads are, too.
    Byte planes and zstd compress them to 69 %, like the keys and values of a real model.
    """
    draw = np.random.default_rng(seed)
    tokens = -(-size // (2 * _CHANNELS))
    spreads = np.exp(draw.normal(0.0, _SPREAD, _CHANNELS))
    values = (draw.standard_normal((tokens, _CHANNELS)) * spreads).astype(np.float32)
    channel, distance = _FAR_OFF
    values[:, channel] += distance
    data: bytes = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return data[:size]
