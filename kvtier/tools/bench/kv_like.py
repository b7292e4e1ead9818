"""Bytes that compress as keys and values of a real model do, for measurements without one."""

from __future__ import annotations

from typing import Final

import numpy as np

_CHANNELS: Final = 64
_SPREAD: Final = 0.7
_FAR_OFF: Final = (17, 12.0)
"""A channel of keys that lies far off the others, as every model has some."""


def kv_like(size: int, seed: int = 0) -> bytes:
    """Return so many bytes of bfloat16 (an even number), the same for the same seed.

    Each channel is normally distributed, with a spread of its own: logarithms of spreads are, too.
    Byte planes and zstd make 69 % of them, as of the keys and values of a real model.
    """
    draw = np.random.default_rng(seed)
    tokens = -(-size // (2 * _CHANNELS))
    spreads = np.exp(draw.normal(0.0, _SPREAD, _CHANNELS))
    values = (draw.standard_normal((tokens, _CHANNELS)) * spreads).astype(np.float32)
    channel, distance = _FAR_OFF
    values[:, channel] += distance
    data: bytes = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return data[:size]
