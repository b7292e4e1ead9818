"""What third parties wrote with names of before goes on; a line in the log has the new ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from kvtier.plugin_api.backend import BackendTraits
from kvtier.policies.eviction.lru import LRUPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.keys import Key


def test_traits_take_their_fields_by_the_names_of_before() -> None:
    with capture_logs() as lines:
        old = BackendTraits(
            load_parts_max=3,  # type: ignore[call-arg]
            store_parts_max=4,
            load_part_blocks_min=5,
            load_part_blocks_max=6,
            store_part_blocks_min=7,
            store_part_blocks_max=8,
            capacity_blocks=9,
        )
    assert old == BackendTraits(3, 4, 9, False, 5, 7, 6, 8)
    (line,) = lines
    assert line["log_level"] == "warning"
    assert line["write"]["load_parts_max"] == "load_batches_max"
    assert len(line["write"]) == 6


def test_traits_with_the_names_of_today_log_nothing_and_unknown_ones_are_refused() -> None:
    with capture_logs() as lines:
        BackendTraits(load_batches_max=1, store_batches_max=1)
        with pytest.raises(TypeError, match="load_pieces_max"):
            BackendTraits(1, 1, load_pieces_max=1)  # type: ignore[call-arg]
    assert not lines


def test_a_policy_that_has_take_back_restores() -> None:
    with capture_logs() as lines:

        class Old(LRUPolicy):
            def take_back(self, keys: Sequence[Key]) -> None:
                self.restored = keys

    assert [line["policy"] for line in lines] == ["Old"]
    policy = Old(4)
    policy.restore([b"a"])
    assert policy.restored == [b"a"]
