"""When restarts and engines share blocks: the table of docs/how-to/share-a-folder.md, by vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from kvtier.settings.extra_config import read_settings
from kvtier.vllm.identity.namespace import _hash_seed_digest
from kvtier.vllm.identity.sharing import hash_seed_is_random, warn_of_lonely_tiers

SHARED_BY_DEFAULT = ("sha256", "sha256_cbor")
RANDOM_BY_DEFAULT = ("xxhash", "xxhash_cbor")


def process(monkeypatch: pytest.MonkeyPatch, algorithm: str, seed: str | None) -> tuple[bytes, str]:
    """Return a block's hash, and the namespace's digest, as a process that starts now has them."""
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None)
    hash_fn = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hash_fn)
    return kv_cache_utils.hash_block_tokens(hash_fn, None, [1, 2, 3]), _hash_seed_digest(algorithm)


@pytest.mark.parametrize("algorithm", [*SHARED_BY_DEFAULT, *RANDOM_BY_DEFAULT])
@pytest.mark.parametrize("seeds", [(None, None), ("0", "0"), ("0", "1"), (None, "0")])
def test_two_processes_share_blocks_when_the_page_says_so(
    algorithm: str, seeds: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, here), (second, there) = (process(monkeypatch, algorithm, seed) for seed in seeds)
    shares = seeds[0] == seeds[1] and (seeds[0] is not None or algorithm in SHARED_BY_DEFAULT)
    assert (first == second) is shares
    assert (here == there) is shares, "the namespace tells the same"


@pytest.mark.parametrize(
    ("algorithm", "seed", "tier", "warns"),
    [
        ("xxhash", None, "fs", True),
        ("xxhash_cbor", None, "disk", True),
        ("xxhash", "0", "fs", False),
        ("sha256", None, "fs", False),
        ("xxhash", None, "memory", False),
        ("xxhash", None, None, False),
    ],
)
def test_a_start_warns_where_nobody_else_finds_the_blocks(
    algorithm: str,
    seed: str | None,
    tier: str | None,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    process(monkeypatch, algorithm, seed)
    tiers: list[dict[str, Any]] = [] if tier is None else [{"type": tier}]
    config = read_settings({"secondary_tiers": tiers}, slot_count=8, block_bytes=1)
    facts = {"worker": {"block_hash": {"algorithm": algorithm}}}
    assert warn_of_lonely_tiers(config, facts) is warns
    assert hash_seed_is_random(algorithm) is (algorithm in RANDOM_BY_DEFAULT and seed is None)
    log = capsys.readouterr().out
    assert ("PYTHONHASHSEED" in log) is warns
    assert (f"1:{tier}" in log) is warns
