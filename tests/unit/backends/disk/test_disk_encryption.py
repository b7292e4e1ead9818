"""Encrypted blocks: unreadable without the key, never served wrong, rotated without a rewrite.

How keys are read and refused is shown in ``shared/test_record_options.py``; that blocks which are
reinserted still open, in ``test_disk_backend.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Outcome, block_digest
from kvtier_backends.encryption.cipher import BlockCipher, EncryptedBlock
from kvtier_backends.encryption.keys import parse_keys_untrusted
from tests.unit.backends.disk._disk import data_of, key_of, key_options, open_disk

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
OLD, NEW, FOREIGN = "11" * 32, "22" * 32, "33" * 32


async def test_what_is_on_the_disk_tells_nothing_of_the_block_or_its_digest(
    tmp_path: Path,
) -> None:
    numbers = range(1000, 1030)
    async with open_disk(tmp_path / "kv", **key_options(tmp_path, OLD)) as disk:
        assert await disk.store(*numbers) == [Outcome.DONE] * 30
        assert await disk.found(numbers) == list(numbers)
    raw = (tmp_path / "kv" / "segment-00000.kv").read_bytes()
    for number in numbers:
        assert data_of(number)[:64] not in raw
        assert block_digest(key_of(number), memoryview(data_of(number))) not in raw
        assert key_of(number) in raw, "the keys themselves are in the table"
    assert bytes.fromhex(OLD) not in raw


async def test_a_rotated_key_still_reads_and_no_longer_writes_and_without_it_all_is_a_miss(
    tmp_path: Path,
) -> None:
    """Another key, or none, finds nothing; and all go on storing."""
    lives = (([OLD], []), ([NEW, OLD], [0]), ([NEW], [1]), ([FOREIGN], []), ([], []))
    for number, (keys, found) in enumerate(lives):
        async with open_disk(tmp_path / "kv", **key_options(tmp_path, *keys)) as disk:
            assert await disk.found(range(number)) == found
            missed = disk.count("region_unknown_key") + disk.count("region_other_layout")
            assert (missed > 0) == (number > 1)
            assert await disk.store(number) == [Outcome.DONE]
            assert await disk.load(number) == [Outcome.DONE]


async def test_blocks_under_an_older_key_are_not_put_where_the_new_key_is_named(
    tmp_path: Path,
) -> None:
    """They would not open there. They go when their region does, and that is told."""
    async with open_disk(tmp_path / "kv", **key_options(tmp_path, OLD)) as disk:
        capacity = disk.capacity
        for number in range(capacity):
            await disk.store(number)
    async with open_disk(tmp_path / "kv", **key_options(tmp_path, NEW, OLD)) as disk:
        disk.log._context.budget.earn(1 << 40)
        kept = list(range(0, capacity, 4))
        await disk.remove(*(n for n in range(capacity) if n % 4))
        for number in range(1000, 1000 + capacity // 2):
            assert await disk.store(number) == [Outcome.DONE]
        lost = [number for number in kept if key_of(number) in set(disk.lost)]
        assert lost
        assert await disk.found(kept) == [number for number in kept if number not in lost]
        assert disk.count("blocks_dropped") == len(lost)
        assert disk.count("bytes_reinserted") == 0


@given(
    strategies.binary(min_size=100, max_size=100),
    strategies.binary(min_size=1, max_size=40),
    strategies.integers(0, (100 + 32) * 8 - 1),
)
def test_a_block_opens_as_it_was_written_and_under_its_own_key_and_namespace_only(
    data: bytes, key: bytes, bit: int
) -> None:
    """The tag lies in the table, whose entries may name any block."""
    keyring = parse_keys_untrusted(OLD)
    cipher = BlockCipher(keyring, b"n" * 16, 100)
    memory = cipher.borrow()
    tag, digest = cipher.encrypt(key, memoryview(data), b"d" * 16, memory)
    back = memoryview(bytearray(100))
    encrypted = EncryptedBlock(key, keyring.current_id, tag, digest)
    assert cipher.decrypt(memory, encrypted, back) == b"d" * 16
    assert back == data
    other_key = encrypted._replace(key=key + b"b")
    assert cipher.decrypt(memory, other_key, back) is None
    elsewhere = BlockCipher(keyring, b"m" * 16, 100)
    assert elsewhere.decrypt(memory, encrypted, back) is None
    damaged = bytearray(bytes(memory[:100]) + tag)
    damaged[bit // 8] ^= 1 << bit % 8
    memory[:100] = damaged[:100]
    encrypted = encrypted._replace(tag=bytes(damaged[100:]))
    assert cipher.decrypt(memory, encrypted, back) is None


@given(strategies.text(max_size=200))
def test_any_text_is_keys_or_a_config_error_that_does_not_repeat_it(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_keys_untrusted(text)  # a key by chance: never
    assert len(text) < 12 or text not in str(refused.value)
