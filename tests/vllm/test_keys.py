"""kvtier answers every key that the installed vLLM reads: it takes it, or says why not."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm

from kvtier.errors import ConfigError
from kvtier.settings.extra_config import read_settings
from kvtier.settings.plugins import HOSTED, NOT_YET
from kvtier.settings.vllm_keys import NOT_NEEDED, keys_of_connector, keys_of_tier

PACKAGE = str(Path(vllm.__file__).parent)


def test_every_key_of_this_vllm_is_taken_or_ignored_or_refused_with_a_reason() -> None:
    found = keys_of_connector(PACKAGE)
    assert {"cpu_bytes_to_use", "secondary_tiers", "store_threshold", "canonical_layout"} <= found
    assert set(NOT_NEEDED) <= found, "what is ignored with a reason is still a key"
    for key in found - set(NOT_NEEDED):
        with pytest.raises(ConfigError) as refused:
            read_settings({key: b"of no type at all"}, slot_count=1, block_bytes=1)
        assert "unknown key" not in str(refused.value), key


def test_every_option_of_vllms_fs_tier_is_one_of_ours() -> None:
    options = keys_of_tier(PACKAGE, "fs")
    assert "root_dir" in options
    ours = {"root_dir", "n_read_threads", "n_write_threads", "enable_kv_events", "locality"}
    assert options <= ours


def test_every_tier_type_of_this_vllm_is_ours_or_hosted_or_named_as_not_there() -> None:
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    assert set(SecondaryTierFactory._registry) == {"fs", *HOSTED, *NOT_YET}
