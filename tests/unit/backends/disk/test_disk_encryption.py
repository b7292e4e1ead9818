"""Encrypted blocks: unreadable without the key, never served wrong, rotated without a rewrite."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Outcome, block_digest
from kvtier_backends.encryption.cipher import BlockCipher, EncryptedBlock
from kvtier_backends.encryption.keys import parse_keys_untrusted
from tests.unit.backends.disk._disk import data_of, key_of, make_disk, open_disk

pytestmark = pytest.mark.anyio
OLD, NEW = "11" * 32, "22" * 32


def key_file(path: Path, *keys: str) -> str:
    path.write_text("# keys\n" + "\n".join(keys) + "\n")
    path.chmod(0o600)
    return str(path)


def cipher_of(key: str, namespace: bytes = b"n" * 16) -> BlockCipher:
    return BlockCipher(parse_keys_untrusted(key), namespace, 100)


async def test_what_is_on_the_disk_tells_nothing_of_the_block_or_its_digest(
    tmp_path: Path,
) -> None:
    keys = key_file(tmp_path / "keys", OLD)
    numbers = range(1000, 1030)
    async with open_disk(tmp_path / "kv", encryption_key_file=keys) as disk:
        assert await disk.store(*numbers) == [Outcome.DONE] * 30
        assert await disk.found(numbers) == list(numbers)
    raw = (tmp_path / "kv" / "segment-00000.kv").read_bytes()
    for number in numbers:
        assert data_of(number)[:64] not in raw
        assert block_digest(key_of(number), memoryview(data_of(number))) not in raw
        assert key_of(number) in raw, "the keys themselves are in the table"
    assert bytes.fromhex(OLD) not in raw
    async with open_disk(tmp_path / "kv", encryption_key_file=keys) as disk:
        assert await disk.found(numbers) == list(numbers)


async def test_a_wrong_key_is_a_miss_and_so_is_none(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys", OLD)
    async with open_disk(tmp_path / "kv", encryption_key_file=keys) as disk:
        await disk.store(1, 2)
    wrong_and_none: list[dict[str, Any]] = [
        {"encryption_key_file": key_file(tmp_path / "other", NEW)},
        {},
    ]
    for options in wrong_and_none:
        async with open_disk(tmp_path / "kv", **options) as disk:
            assert await disk.load(1, 2) == [Outcome.ABSENT] * 2
            assert disk.count("region_unknown_key") + disk.count("region_other_layout") >= 1
            assert await disk.store(3) == [Outcome.DONE]
            assert await disk.load(3) == [Outcome.DONE]


async def test_a_rotated_key_still_reads_and_no_longer_writes(tmp_path: Path) -> None:
    old = key_file(tmp_path / "old", OLD)
    both = key_file(tmp_path / "both", NEW, OLD)
    new = key_file(tmp_path / "new", NEW)
    async with open_disk(tmp_path / "kv", encryption_key_file=old) as disk:
        await disk.store(*range(20))
    async with open_disk(tmp_path / "kv", encryption_key_file=both) as disk:
        assert await disk.found(range(20)) == list(range(20))
        await disk.store(*range(20, 30))
        assert await disk.found(range(30)) == list(range(30))
    async with open_disk(tmp_path / "kv", encryption_key_file=new) as disk:
        assert await disk.found(range(30)) == list(range(20, 30))


async def test_blocks_under_an_older_key_are_not_put_where_the_new_key_is_named(
    tmp_path: Path,
) -> None:
    """They would not open there. They go when their region does, and that is told."""
    first = key_file(tmp_path / "first", OLD)
    async with open_disk(tmp_path / "kv", encryption_key_file=first) as disk:
        capacity = disk.backend.traits.capacity_blocks
        assert capacity is not None
        for number in range(capacity):
            await disk.store(number)
    both = key_file(tmp_path / "both", NEW, OLD)
    async with open_disk(tmp_path / "kv", encryption_key_file=both) as disk:
        log = disk.backend._log
        assert log is not None
        log._context.budget.earn(1 << 40)
        kept = list(range(0, capacity, 4))
        await disk.remove(*(n for n in range(capacity) if n % 4))
        for number in range(1000, 1000 + capacity // 2):
            assert await disk.store(number) == [Outcome.DONE]
        lost = [number for number in kept if key_of(number) in set(disk.lost)]
        assert lost
        assert await disk.found(kept) == [number for number in kept if number not in lost]
        assert disk.count("blocks_dropped") == len(lost)
        assert disk.count("bytes_reinserted") == 0


async def test_reinserted_blocks_open_as_before(tmp_path: Path) -> None:
    """Random removal at full capacity, under a key that was rotated on the way."""
    rng = random.Random(3)
    resident: list[int] = []
    number = again = 0
    for keys in ([OLD], [NEW, OLD]):
        path = key_file(tmp_path / "keys", *keys)
        async with open_disk(tmp_path / "kv", encryption_key_file=path) as disk:
            capacity = disk.backend.traits.capacity_blocks
            assert capacity is not None
            there = {key for batch in disk.backend.contents() for key in batch}
            resident = [n for n in range(number) if key_of(n) in there]
            for _ in range(80):
                numbers = range(number, number + 8)
                number += 8
                rng.shuffle(resident)
                excess = max(0, len(resident) + 8 - capacity)
                await disk.remove(*resident[:excess])
                assert await disk.store(*numbers) == [Outcome.DONE] * 8
                resident = [*resident[excess:], *numbers]
                lost = set(disk.lost)
                resident = [n for n in resident if key_of(n) not in lost]
            assert await disk.found(resident) == resident
            again += disk.count("bytes_reinserted")
    assert again > 0


@given(
    strategies.binary(min_size=100, max_size=100),
    strategies.binary(min_size=1, max_size=40),
    strategies.integers(0, (100 + 32) * 8 - 1),
)
def test_a_flipped_bit_in_a_block_or_its_tag_decrypts_nothing(
    data: bytes, key: bytes, bit: int
) -> None:
    cipher = cipher_of(OLD)
    memory = cipher.borrow(1)
    ((tag, digest),) = cipher.encrypt([(key, memoryview(data), b"d" * 16)], memory)
    back = memoryview(bytearray(100))
    encrypted = EncryptedBlock(key, cipher.keyring.current_id, tag, digest)
    assert cipher.decrypt(memory, [(0, encrypted)], [back]) == [(Outcome.DONE, b"d" * 16)]
    assert back == data
    damaged = bytearray(bytes(memory[:100]) + tag)
    damaged[bit // 8] ^= 1 << bit % 8
    memory[:100] = damaged[:100]
    encrypted = encrypted._replace(tag=bytes(damaged[100:]))
    assert cipher.decrypt(memory, [(0, encrypted)], [back])[0][0] is Outcome.DAMAGED


def test_a_block_opens_only_under_its_own_key_and_namespace() -> None:
    cipher = cipher_of(OLD)
    memory = cipher.borrow(1)
    ((tag, digest),) = cipher.encrypt([(b"a", memoryview(bytes(100)), bytes(16))], memory)
    back = memoryview(bytearray(100))
    right = EncryptedBlock(b"a", cipher.keyring.current_id, tag, digest)
    assert cipher.decrypt(memory, [(0, right)], [back])[0][0] is Outcome.DONE
    wrong = right._replace(key=b"b")
    assert cipher.decrypt(memory, [(0, wrong)], [back])[0][0] is Outcome.DAMAGED
    other = cipher_of(OLD, b"m" * 16)
    assert other.decrypt(memory, [(0, right)], [back])[0][0] is Outcome.DAMAGED


def test_no_two_blocks_are_sealed_alike() -> None:
    cipher = cipher_of(OLD)
    memory = cipher.borrow(2)
    same = (b"a", memoryview(bytes(100)), bytes(16))
    tags = cipher.encrypt([same, same], memory)
    one, other = cipher.views(memory, 2)
    assert one != other
    assert tags[0] != tags[1]
    assert tags[0][1] != tags[1][1]


def test_memory_is_used_again_for_nearly_as_many_blocks() -> None:
    cipher = cipher_of(OLD)
    memory = cipher.borrow(13)
    assert len(cipher.views(memory, 13)) == 13
    cipher.give_back(memory)
    assert cipher.borrow(16).obj is memory.obj
    assert cipher.borrow(15).obj is not memory.obj


@given(strategies.text(max_size=200))
def test_any_text_is_keys_or_a_config_error_that_does_not_repeat_it(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_keys_untrusted(text)  # a key by chance: never
    assert len(text) < 12 or text not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"encryption_key_file": "missing"}, "No such file"),
        ({"encryption_key_env": "KVTIER_NO_SUCH"}, "there must be 1 to 16 keys"),
        ({"encryption_key_env": "KVTIER_SHORT"}, "key 1 is not 64 hex digits"),
        ({"encryption_key_env": "A", "encryption_key_file": "B"}, "give one of them"),
    ],
)
async def test_keys_that_cannot_be_had_are_refused_at_start(
    options: dict[str, Any], names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_SHORT", "abcdef0123456789")
    with pytest.raises(ConfigError, match=names) as refused:
        make_disk(tmp_path / "kv", **options)
    assert "abcdef0123456789" not in str(refused.value)


async def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    keys = key_file(tmp_path / "keys", OLD)
    Path(keys).chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        make_disk(tmp_path / "kv", encryption_key_file=keys)
