"""FsBackend's layout ``vllm`` and vLLM's own fs tier share one folder, both ways."""

from __future__ import annotations

import hashlib
import json
import mmap
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from kvtier.errors import NamespaceMismatch
from kvtier.plugin_api.backend import (
    BackendContext,
    LoadBlock,
    Loaded,
    Namespace,
    Outcome,
    StoreBlock,
    block_digest,
)
from kvtier_backends.fs import FsBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio
BLOCK_BYTES = 16384
GROUPS = (0, 1, 7, 300, 2**32 - 1)
KEYS = [
    make_offload_key(hashlib.sha256(str(number).encode()).digest(), group)
    for number, group in enumerate(GROUPS)
]
REQUEST = ReqContext(req_id="r")


def spec(*, agnostic: bool = True, rank: int = 0) -> SimpleNamespace:
    groups = [
        SimpleNamespace(tokens_per_block=16, layer_names=("a", "b"), group_id=0),
        SimpleNamespace(tokens_per_block=32, layer_names=("c",), group_id=1),
    ]
    config = SimpleNamespace(
        groups=groups,
        parallel=SimpleNamespace(
            rank=rank,
            world_size=2,
            tp_size=2,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            is_parallelism_agnostic=agnostic,
        ),
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout=None,
        cache=SimpleNamespace(tokens_per_hash=16),
        model=SimpleNamespace(name="org/a model", dtype="torch.bfloat16"),
    )
    events = SimpleNamespace(enable_kv_cache_events=False)
    return SimpleNamespace(config=config, blocks_per_chunk=2, kv_events_config=events)


class Vllm:
    """vLLM's own tier over ``len(KEYS)`` blocks of memory."""

    def __init__(self, root: Path, **options: object) -> None:
        self.memory = mmap.mmap(-1, len(KEYS) * BLOCK_BYTES)
        self.view = memoryview(self.memory).cast("B", (len(KEYS), BLOCK_BYTES))
        self.tier = FileSystemTierManager(
            spec(**options),
            self.view,
            "fs",
            root_dir=str(root),
            n_read_threads=2,
            n_write_threads=2,
        )
        self.jobs = 0

    def run(self, *, load: bool) -> bool:
        """Move all keys, and tell whether vLLM calls that a success."""
        self.jobs += 1
        job = TransferJob(
            job_id=self.jobs,
            keys=KEYS,
            chunk_ids=np.arange(len(KEYS), dtype=np.int32),
            is_promotion=load,
            req_context=REQUEST,
        )
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        return bool(result.success)

    def fill(self, seed: int) -> list[bytes]:
        blocks = [bytes([seed + index]) * BLOCK_BYTES for index in range(len(KEYS))]
        self.memory[:] = b"".join(blocks)
        return blocks

    def context(self) -> BackendContext:
        mapper = self.tier.file_mapper
        namespace = Namespace({"any": 1}, mapper.get_run_config(), mapper.rank)
        return BackendContext(BLOCK_BYTES, namespace, "1:fs")

    def close(self) -> None:
        self.tier.shutdown()
        self.view.release()


@pytest.fixture(params=[{}, {"agnostic": False, "rank": 1}], ids=["agnostic", "rank1"])
def vllm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Vllm]:
    tmp_path.chmod(0o700)
    tier = Vllm(tmp_path, **request.param)
    yield tier
    tier.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("vllm_kv_py_fs")]


def fs(root: Path, vllm: Vllm, **options: object) -> FsBackend:
    given = {"root_dir": str(root), "layout": "vllm", **options}
    return FsBackend.from_options(given, vllm.context())


def stores(blocks: list[bytes]) -> list[StoreBlock]:
    return [
        StoreBlock(bytes(key), memoryview(data), block_digest(key, memoryview(data)))
        for key, data in zip(KEYS, blocks, strict=True)
    ]


async def test_what_vllm_wrote_is_loaded(tmp_path: Path, vllm: Vllm) -> None:
    """Without a digest, for vLLM writes none; and a load leaves the files alone."""
    blocks = vllm.fill(3)
    assert vllm.run(load=False)
    files = sorted(tmp_path.rglob("*.bin"))
    backend = fs(tmp_path, vllm)
    await backend.open()
    assert await backend.probe(KEYS) == [True] * len(KEYS)
    buffers = [bytearray(BLOCK_BYTES) for _ in KEYS]
    wanted = [LoadBlock(key, memoryview(one)) for key, one in zip(KEYS, buffers, strict=True)]
    assert await backend.load(wanted) == [Loaded(Outcome.DONE)] * len(KEYS)
    assert buffers == blocks
    assert await backend.store(stores(blocks)) == [Outcome.DONE] * len(KEYS)
    await backend.close()
    assert sorted(tmp_path.rglob("*.bin")) == files
    assert {path.stat().st_size for path in files} == {BLOCK_BYTES}


async def test_what_vllm_wrote_is_a_miss_where_it_is_refused(tmp_path: Path, vllm: Vllm) -> None:
    vllm.fill(3)
    assert vllm.run(load=False)
    backend = fs(tmp_path, vllm, allow_unchecksummed=False)
    await backend.open()
    assert await backend.probe(KEYS) == [False] * len(KEYS)
    wanted = [LoadBlock(key, memoryview(bytearray(BLOCK_BYTES))) for key in KEYS]
    assert await backend.load(wanted) == [Loaded(Outcome.ABSENT)] * len(KEYS)
    await backend.close()
    assert vllm.run(load=True)


@pytest.mark.parametrize("direct", [True, False])
async def test_what_kvtier_wrote_is_loaded_by_vllm(
    tmp_path: Path, vllm: Vllm, direct: bool
) -> None:
    backend = fs(tmp_path, vllm, direct=direct)
    await backend.open()
    blocks = vllm.fill(90)
    assert await backend.store(stores(blocks)) == [Outcome.DONE] * len(KEYS)
    await backend.close()
    vllm.fill(0)
    assert vllm.run(load=True)
    assert bytes(vllm.memory) == b"".join(blocks)
    names = {vllm.tier.file_mapper.get_file_name(key) for key in KEYS}
    assert names == {str(path) for path in tmp_path.rglob("*.bin")}
    assert vllm.run(load=False)  # vLLM leaves what exists, trailer and all
    assert {path.stat().st_size for path in tmp_path.rglob("*.bin")} == {BLOCK_BYTES + 4096}


async def test_both_write_the_same_config(tmp_path: Path, vllm: Vllm) -> None:
    (tmp_path / "own").mkdir()
    fs(tmp_path / "own", vllm)
    (theirs,) = tmp_path.glob("*/config.json")
    (ours,) = (tmp_path / "own").glob("*/config.json")
    assert ours.read_text() == theirs.read_text()
    assert ours.parent.name == theirs.parent.name
    assert json.loads(ours.read_text())["model_name"] == "org/a model"


async def test_a_config_of_other_fields_is_refused(tmp_path: Path, vllm: Vllm) -> None:
    (theirs,) = tmp_path.glob("*/config.json")
    theirs.write_text(theirs.read_text().replace("bfloat16", "float16"))
    with pytest.raises(NamespaceMismatch, match="dtype"):
        fs(tmp_path, vllm)
