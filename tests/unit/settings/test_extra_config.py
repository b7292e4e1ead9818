"""``kv_connector_extra_config``: what vLLM's keys and data parallelism add to kvtier's settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import ConfigError
from kvtier.settings.extra_config import read_settings

if TYPE_CHECKING:
    from kvtier.settings.runtime_config import RuntimeConfig


def read(values: dict[str, Any], **others: int) -> RuntimeConfig:
    return read_settings(values, slot_count=64, block_bytes=4096, **others)


def test_the_number_of_the_engine_goes_into_every_text_of_a_tier() -> None:
    tier = {"type": "disk", "path": "/kv/{dp_rank}/of-{dp_rank}", "capacity_bytes": 1 << 30}
    values = {"secondary_tiers": [tier, {"type": "fs", "root_dir": "/shared/{rank}"}]}
    first, second = read(values, dp_rank=3).tiers
    assert first.options == {"path": "/kv/3/of-3", "capacity_bytes": 1 << 30}
    assert second.options["root_dir"] == "/shared/{rank}"
    assert read(values).tiers[0].options["path"] == "/kv/0/of-0"
    assert tier["path"] == "/kv/{dp_rank}/of-{dp_rank}", "the engine's own configuration stays"


@pytest.mark.parametrize("tiers", ["{dp_rank}", [7], {"path": "{dp_rank}"}])
def test_tiers_that_are_none_are_refused_as_they_were_given(tiers: object) -> None:
    with pytest.raises(ConfigError) as refused:
        read({"secondary_tiers": tiers}, dp_rank=3)
    assert repr(tiers) in str(refused.value)
