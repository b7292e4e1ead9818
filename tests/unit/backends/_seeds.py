"""Seeds of what has no end: some in the gate, where each kind of story comes up, and more after."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(in_the_gate: int, of: int) -> list[Any]:
    """Return so many as parameters; ``make test`` runs the first, ``make test-long`` all."""
    later = [pytest.param(seed, marks=pytest.mark.long) for seed in range(in_the_gate, of)]
    return [*range(in_the_gate), *later]
