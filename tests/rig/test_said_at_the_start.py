"""What kvtier says when an engine starts with settings with which vLLM's own code goes wrong."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from tests.rig.engine import engine
from tests.rig.shape import RELEASE, Shape

if TYPE_CHECKING:
    from pathlib import Path

AT_ONCE = (("sync_load_budget_bytes", 1 << 20),)


def warnings(shape: Shape, folder: Path) -> list[str]:
    with capture_logs() as lines, engine(shape, random.Random(0), folder):
        return [line["event"] for line in lines if line["log_level"] == "warning"]


@pytest.mark.parametrize(
    ("checkpoints", "unit", "is_said"), [(True, 2, True), (True, None, False), (False, 2, False)]
)
def test_states_that_vllm_misnames(
    checkpoints: bool, unit: int | None, is_said: bool, tmp_path: Path
) -> None:
    shape = Shape(kinds=("full", "mamba"), checkpoints=checkpoints, unit=unit)
    said = [each for each in warnings(shape, tmp_path) if "--prefix-match-unit" in each]
    assert len(said) == is_said


@pytest.mark.parametrize("kinds", [("full", "mamba"), ("full",)])
def test_loads_at_once_that_are_not_made(kinds: tuple[str, ...], tmp_path: Path) -> None:
    """vLLM 0.32 has none."""
    shape = Shape(kinds=kinds, options=AT_ONCE)
    said = [each for each in warnings(shape, tmp_path) if "sync_load_budget_bytes" in each]
    assert len(said) == ("mamba" in kinds and RELEASE >= (0, 33))
