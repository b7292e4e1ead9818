from __future__ import annotations

from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.settings.runtime_config import RuntimeConfig


def read(values: dict[str, Any], slot_count: int = 64) -> RuntimeConfig:
    return RuntimeConfig.from_mapping(values, slot_count=slot_count, block_bytes=4096)


def test_the_defaults_are_accepted() -> None:
    config = read({})
    assert config == RuntimeConfig(slot_count=64, block_bytes=4096)
    assert config.tiers == ()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"store_threshold": "2"}, "store_threshold='2'"),
        ({"store_threshold": -1}, "store_threshold=-1"),
        ({"max_tracker_size": 0}, "max_tracker_size=0"),
        ({"eviction_policy": ""}, "eviction_policy=''"),
        ({"lease_timeout_s": 0}, "lease_timeout_s=0"),
        ({"store_reserve_fraction": 1}, "store_reserve_fraction=1"),
        ({"cascade_slots_fraction_max": 1.5}, "cascade_slots_fraction_max=1.5"),
        ({"abandoned_slots_fraction_max": -1}, "abandoned_slots_fraction_max=-1"),
        ({"job_blocks_max": 0}, "job_blocks_max=0"),
        ({"jobs_in_flight_max": 9000}, "jobs_in_flight_max=9000"),
        ({"breaker_failures_max": 0}, "breaker_failures_max=0"),
        ({"secondary_tiers": {}}, "secondary_tiers={}"),
        ({"secondary_tiers": ["fs"]}, "secondary_tiers=['fs']"),
        ({"secondary_tiers": [{}]}, "secondary_tiers[0]: type is missing"),
        (
            {"secondary_tiers": [{"type": "fs", "locality": "NEAR"}]},
            "secondary_tiers[0] (fs): locality='NEAR' must be one of LOCAL, REMOTE",
        ),
        (
            {"secondary_tiers": [{"type": "fs"}, {"type": "fs", "promote_timeout_s": 0}]},
            "secondary_tiers[1] (fs): promote_timeout_s=0",
        ),
        (
            {"secondary_tiers": [{"type": "fs", "offload_policy": "all"}]},
            "offload_policy='all' must be one of chunk_level, request_level",
        ),
        ({"secondary_tiers": [{"type": "fs", "module_path": "x"}]}, "module_path='x'"),
        (
            {"secondary_tiers": [{"type": "fs", "read_only": True, "admission": "second_touch"}]},
            "admission='second_touch' chooses the blocks that are written",
        ),
        (
            {"secondary_tiers": [{"type": "fs", "name": "0:primary"}]},
            "secondary_tiers[0] (fs): name='0:primary' must be 1 to 32 letters",
        ),
        (
            {"secondary_tiers": [{"type": "fs", "name": "a"}, {"type": "disk", "name": "a"}]},
            "secondary_tiers[1] (disk): name='a' is another tier's",
        ),
        ({"cache_policy_module_path": "x"}, "cache_policy_module_path='x'"),
        ({"evction_policy": "lru"}, "did you mean 'eviction_policy'"),
    ],
)
def test_a_bad_setting_is_refused_with_key_value_and_remedy(
    values: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(values)
    assert named in str(caught.value)


def test_a_primary_tier_without_room_for_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"slot_count=0.*cpu_bytes_to_use"):
        read({}, slot_count=0)


def test_a_tier_is_named_by_its_number_and_type_and_keeps_the_backends_keys() -> None:
    values = {"type": "fs", "root_dir": "/x", "offload_policy": "request_level"}
    (tier,) = read({"secondary_tiers": [values]}).tiers
    assert tier.name == "1:fs"
    assert tier.request_level
    assert tier.options == {"root_dir": "/x"}
    (named,) = read({"secondary_tiers": [{**values, "name": "nfs"}]}).tiers
    assert (named.name, named.options) == ("nfs", tier.options)


@pytest.mark.parametrize("slot_count", [1, 2, 3, 8, 100])
def test_bounds_in_slots_leave_room_on_both_sides(slot_count: int) -> None:
    config = RuntimeConfig(slot_count=slot_count, block_bytes=1)
    assert 0 <= config.store_reserve_slots < slot_count
    assert slot_count == 1 or config.store_reserve_slots >= 1
    assert 1 <= config.cascade_slots_max <= slot_count
    assert 1 <= config.evict_batch_slots <= slot_count
