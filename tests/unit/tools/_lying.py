"""A backend that harms blocks and vouches for them: no check of the runtime's can tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.plugin_api.backend import Loaded, Outcome, block_digest
from kvtier_backends.memory import MemoryBackend

if TYPE_CHECKING:
    import pytest


def make_memory_lie(monkeypatch: pytest.MonkeyPatch, at_byte: int) -> None:
    """Have memory tiers deliver every block with one bit wrong, and a digest that fits it."""
    real = MemoryBackend._load_one

    def load(self, block, hit) -> Loaded:
        loaded = real(self, block, hit)
        if loaded.outcome is Outcome.DONE:
            block.buffer[at_byte] ^= 1
            return Loaded(Outcome.DONE, block_digest(block.key, block.buffer))
        return loaded

    monkeypatch.setattr(MemoryBackend, "_load_one", load)
