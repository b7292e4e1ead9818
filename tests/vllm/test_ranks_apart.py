"""Ranks that do not share memory: another host, or a container with a /dev/shm of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from kvtier.errors import ConfigError
from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm.namespace import build_namespace, publish_facts
from kvtier.vllm.region import HostRegion
from kvtier.vllm.region_header import HEADER_BYTES, RegionHeader
from tests.vllm.support.engine import kvtier_config
from tests.vllm.support.offloading import CONFIG
from tests.vllm.support.play import ours_in_shm

if TYPE_CHECKING:
    from collections.abc import Iterator

RANK_1 = """
import sys
from kvtier.vllm.region import HostRegion
engine_id, slots, row_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
region = HostRegion(engine_id, slot_count=slots, row_bytes=row_bytes, world_size=2, rank=1)
print("mapped", flush=True)
sys.stdin.read()
region.close()
"""
ELSEWHERE = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]


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


def rank_1(spec: Any, where: list[str]) -> subprocess.Popen[str]:
    """Start the second rank in a process of its own, and wait until it has mapped its memory."""
    shape = [spec.config.engine_id, str(spec.slot_count), str(spec.block_bytes)]
    process = subprocess.Popen(
        [*where, sys.executable, "-c", RANK_1, *shape],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mapped\n"
    return process


def can_have_a_shm_of_its_own() -> bool:
    return subprocess.run([*ELSEWHERE, "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_have_a_shm_of_its_own(), reason="needs the right to mount")
def test_a_rank_with_a_memory_of_its_own_is_refused_before_anything_is_served(spec: Any) -> None:
    """It would load what lies in its own memory: other bytes, and no error."""
    process = rank_1(spec, ELSEWHERE)
    try:
        with pytest.raises(ConfigError, match=r"of 2 worker ranks, rank 1 does not share"):
            spec.get_manager()
    finally:
        process.communicate("")
    assert process.returncode == 0


def test_ranks_that_share_their_memory_start(spec: Any) -> None:
    process = rank_1(spec, [])
    try:
        manager = spec.get_manager()
        assert ours_in_shm(spec.config.engine_id) == [], "all have mapped it: the name has gone"
        manager.shutdown()
    finally:
        process.communicate("")
    assert process.returncode == 0


def test_a_doubled_rank_is_refused_where_vllm_has_the_memory(spec: Any) -> None:
    """Two engines of one name on one host would write into one another's blocks."""
    header = RegionHeader(memoryview(bytearray(HEADER_BYTES)), world_size=2)
    rank_1_of = replace(spec.config.parallel, rank=1)
    spec.config = replace(spec.config, parallel=rank_1_of)
    spec._leave_facts(header)
    with pytest.raises(ConfigError, match="rank 1 has mapped"):
        spec._leave_facts(header)


def test_a_model_that_cannot_be_described_starts_and_shares_with_nobody(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its engine needs no sharing to run; and what is not known must not be taken for equal."""
    told = []
    for _ in range(2):
        header = RegionHeader(memoryview(bytearray(HEADER_BYTES)), world_size=1)
        publish_facts(header, lambda: None)  # no model, no cache: as if all had other names
        told.append(build_namespace(CONFIG, header.read()))
    first, second = told
    assert first.facts != second.facts
    assert first.vllm_fields is None
    assert "could not be described" in first.vllm_refusal
    assert "the model could not be described" in capsys.readouterr().out
