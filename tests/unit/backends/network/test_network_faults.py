"""A network that drops or resets between a tier and its server: misses, and recovery by itself.

Real servers, in a network namespace, where nftables drops packets or answers them with resets.
In all of it each call ends in time, no byte is wrong, no slot is written to after its call, and
no task or socket is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.network_namespace import needs_namespace, run_inside
from tests.unit.backends.network import _inside

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs_namespace, pytest.mark.slow]


def test_packets_are_dropped_or_reset_as_told(tmp_path: Path) -> None:
    """Otherwise the tests below would break nothing."""
    run_inside(_inside.packets_fare_as_told, tmp_path)


@pytest.mark.parametrize(
    "kind",
    # Of a Mooncake store, the gate has an owner that resets, and a master that hangs or is killed.
    ["redis", "s3", pytest.param("mooncake", marks=pytest.mark.long)],
)
def test_a_network_that_drops_or_resets_costs_misses_and_hits_come_back(
    kind: str, tmp_path: Path
) -> None:
    """Both ways, one way, within a reply, and with resets; the connection goes and comes once."""
    run_inside(_inside.breaks_and_heals, tmp_path, kind)


@pytest.mark.parametrize("kind", ["redis", "s3_idle"])
def test_connections_that_a_firewall_forgot_cost_one_call(kind: str, tmp_path: Path) -> None:
    """Not one call each, and all of its time: they are dropped silently, while new ones work."""
    run_inside(_inside.is_stranded, tmp_path, kind)


def test_an_owner_of_memory_that_resets_costs_its_blocks_until_it_answers(tmp_path: Path) -> None:
    """The master, which can be reached, goes on naming them."""
    run_inside(_inside.owner_is_reset, tmp_path)
