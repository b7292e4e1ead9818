"""Somebody writes to the storage between two engines: with keys, the engine computes; nothing else.

Whole runtimes over real files. What is planted has a checksum that fits, as anyone can make it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.plugin_api.backend import block_digest
from kvtier_backends.fs.forms import encode_trailer
from tests.unit.backends.shared._keys import FOREIGN, NEW, OLD, key_file
from tests.unit.runtime.test_runtime import BLOCK_BYTES, KEYS, PATIENT, Runtime

if TYPE_CHECKING:
    from pathlib import Path

KINDS = pytest.mark.parametrize("option", ["auth_key_file", "encryption_key_file"])
PLANTED = memoryview(b"!" * BLOCK_BYTES)


def run(root: Path, **options: str) -> Runtime:
    fs = {"type": "fs", "root_dir": str(root), "isolation": "thread", **PATIENT, **options}
    return Runtime(root, secondary_tiers=[fs])


def file_of(root: Path, key: bytes) -> Path:
    (path,) = root.rglob(f"{key.hex()}.kv")
    return path


def store_all(root: Path, **options: str) -> None:
    runtime = run(root, **options)
    runtime.store(KEYS[:2])
    assert runtime.facade.close() is True


def unauthenticated(runtime: Runtime) -> int:
    return runtime.facade.statistics().tiers[0].backend_counters.get("unauthenticated", 0)


def test_without_keys_a_planted_block_is_served(tmp_path: Path) -> None:
    store_all(tmp_path)
    trailer = encode_trailer(KEYS[0], BLOCK_BYTES, block_digest(KEYS[0], PLANTED))
    file_of(tmp_path, KEYS[0]).write_bytes(bytes(PLANTED) + trailer)
    engine = run(tmp_path)
    with pytest.raises(AssertionError):
        engine.hits(KEYS[:2], "r")  # insists on the bytes that were stored
    engine.facade.close()


@KINDS
def test_with_keys_it_is_a_miss_and_removed_and_stored_again(option: str, tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys", OLD)
    store_all(tmp_path / "kv", **{option: keys})
    store_all(tmp_path / "theirs", **{option: key_file(tmp_path / "foreign", FOREIGN)})
    planted = file_of(tmp_path / "theirs", KEYS[0]).read_bytes()
    file_of(tmp_path / "kv", KEYS[0]).write_bytes(planted)
    engine = run(tmp_path / "kv", **{option: keys})
    assert engine.hits(KEYS[:2], "finds it") == 0
    engine.until(lambda: not list((tmp_path / "kv").rglob(f"{KEYS[0].hex()}.kv")))
    engine.until(lambda: unauthenticated(engine) == 1)
    engine.store(KEYS[:1])
    assert engine.facade.close() is True
    next_engine = run(tmp_path / "kv", **{option: keys})
    assert next_engine.hits(KEYS[:2], "finds its own") == 2
    assert next_engine.facade.close() is True


@KINDS
def test_blocks_under_an_older_key_are_served_after_a_rotation(option: str, tmp_path: Path) -> None:
    """They pass the driver's check as well, which knows of no key."""
    store_all(tmp_path / "kv", **{option: key_file(tmp_path / "old", OLD)})
    engine = run(tmp_path / "kv", **{option: key_file(tmp_path / "both", NEW, OLD)})
    assert engine.hits(KEYS[:2], "r") == 2
    assert unauthenticated(engine) == 0
    assert engine.facade.close() is True
