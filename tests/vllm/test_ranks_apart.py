"""Ranks that do not share memory: another host, or a container with a /dev/shm of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from vllm.v1.kv_offload.base import CanonicalKVCaches

from kvtier.errors import ConfigError
from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm.identity.namespace import build_namespace, publish_facts
from kvtier.vllm.memory.region import HostRegion
from kvtier.vllm.memory.region_header import HEADER_BYTES, RegionHeader
from tests.support.needs import needs
from tests.vllm.support.engine import kvtier_config
from tests.vllm.support.offloading import CONFIG
from tests.vllm.support.play import ours_in_shm
from tests.vllm.support.ranks import mapping_rank

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.vllm.support.children import Child

KV_CACHES = CanonicalKVCaches([], [[]])


@pytest.fixture
def spec() -> Iterator[Any]:
    config = replace(
        CONFIG,
        engine_id=f"test-apart-{uuid4().hex}",
        parallel=replace(CONFIG.parallel, world_size=2, tp_size=2),
        extra_config=kvtier_config(cpu_bytes_to_use=1 << 20),
    )
    spec = KVTierOffloadingSpec(config)
    rank_0 = HostRegion(
        config.engine_id,
        slot_count=spec.slot_count,
        row_bytes=spec.block_bytes,
        world_size=2,
        rank=0,
    )
    rank_0.header.publish({"model": "m"})
    yield spec
    rank_0.close()
    assert ours_in_shm(config.engine_id) == []


def rank_1(spec: Any, folder: Path, *, apart: bool) -> AbstractContextManager[Child]:
    """Return the second rank, in a process of its own that has mapped its memory."""
    return mapping_rank(
        folder,
        apart=apart,
        engine_id=spec.config.engine_id,
        slot_count=spec.slot_count,
        row_bytes=spec.block_bytes,
        world_size=2,
        rank=1,
    )


@needs("mount")
def test_a_rank_with_a_memory_of_its_own_is_refused_before_anything_is_served(
    spec: Any, log_folder: Path
) -> None:
    """It would load what lies in its own memory: other bytes, and no error."""
    refused = r"of 2 worker ranks, rank 1 does not share"
    with rank_1(spec, log_folder, apart=True), pytest.raises(ConfigError, match=refused):
        spec.get_manager()


def test_ranks_that_share_their_memory_start(spec: Any, log_folder: Path) -> None:
    with rank_1(spec, log_folder, apart=False):
        manager = spec.get_manager()
        assert ours_in_shm(spec.config.engine_id) == [], "all have mapped it: the name has gone"
        manager.shutdown()


def test_a_doubled_rank_is_refused_where_vllm_has_the_memory(spec: Any) -> None:
    """Two engines of one name on one host would write into one another's blocks."""
    header = RegionHeader(memoryview(bytearray(HEADER_BYTES)), world_size=2)
    rank_1_of = replace(spec.config.parallel, rank=1)
    spec.config = replace(spec.config, parallel=rank_1_of)
    spec._leave_facts(header, KV_CACHES)
    with pytest.raises(ConfigError, match="rank 1 has mapped"):
        spec._leave_facts(header, KV_CACHES)


def test_pipeline_stages_with_different_layers_are_refused(spec: Any) -> None:
    """The first had two layers and the second one: it wrote into the first one's second layer."""
    header = RegionHeader(memoryview(bytearray(HEADER_BYTES)), world_size=2)
    of_both = spec.config.parallel
    for rank, layers in ((0, 2), (1, 1)):
        spec.config = replace(spec.config, parallel=replace(of_both, rank=rank))
        spec.cpu_page_size_per_worker = 4096 * layers
        spec._leave_facts(header, KV_CACHES)
    refused = "of a block, rank 1 keeps 4096 bytes and rank 0 8192: .*VLLM_PP_LAYER_PARTITION"
    with pytest.raises(ConfigError, match=refused):
        spec._check_ranks(header)


def test_a_model_that_cannot_be_described_starts_and_shares_with_nobody(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its engine needs no sharing to run; and what is not known must not be taken for equal."""
    told = []
    for _ in range(2):
        header = RegionHeader(memoryview(bytearray(HEADER_BYTES)), world_size=1)
        publish_facts(
            header, lambda: None, None, {}
        )  # no model, no cache: as if all had other names
        told.append(build_namespace(CONFIG, header.read()))
    first, second = told
    assert first.facts != second.facts
    assert first.vllm_fields is None
    assert "could not be described" in first.vllm_refusal
    assert "the model could not be described" in capsys.readouterr().out
