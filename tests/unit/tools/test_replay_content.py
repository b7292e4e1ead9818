"""The bytes of a key, and what a check of them finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies

from kvtier.errors import ConfigError
from kvtier.tools.replay.content import BlockContent, key_of

BLOCK_BYTES = 256
WORDS = BLOCK_BYTES // 8
NUMBERS = strategies.integers(min_value=0, max_value=2**63)


def block(content: BlockContent, number: int) -> np.ndarray:
    row = np.empty(WORDS, dtype=np.uint64)
    content.fill(row, key_of(number))
    return row


@given(numbers=strategies.lists(NUMBERS, min_size=1, max_size=5))
def test_what_was_filled_passes_its_check(numbers) -> None:
    content = BlockContent(BLOCK_BYTES)
    rows = np.array([block(content, number) for number in numbers])
    assert content.check(rows, [key_of(number) for number in numbers]) == []


@given(
    numbers=strategies.lists(NUMBERS, min_size=1, max_size=5, unique=True),
    data=strategies.data(),
    flip=strategies.integers(min_value=1, max_value=255),
)
def test_one_wrong_byte_is_found_and_named(numbers, data, flip) -> None:
    """Whichever byte of whichever block it is."""
    content = BlockContent(BLOCK_BYTES)
    rows = np.array([block(content, number) for number in numbers])
    which = data.draw(strategies.integers(0, len(numbers) - 1))
    at = data.draw(strategies.integers(0, BLOCK_BYTES - 1))
    right = int(rows[which, at // 8])
    rows[which].view(np.uint8)[at] ^= flip
    wrong = int(rows[which, at // 8])
    (found,) = content.check(rows, [key_of(number) for number in numbers])
    assert found.block == which
    assert found.offset_bytes == at // 8 * 8
    assert (found.expected, found.found) == (right, wrong)


@given(number=NUMBERS, other=NUMBERS, cut=strategies.integers(0, WORDS - 1))
def test_a_block_mixed_of_two_is_found(number, other, cut) -> None:
    if number == other:
        return
    content = BlockContent(BLOCK_BYTES)
    mixed = block(content, number)
    mixed[cut:] = block(content, other)[cut:]
    (found,) = content.check(mixed[np.newaxis], [key_of(number)])
    assert found.offset_bytes == cut * 8


@given(number=NUMBERS, by_bytes=strategies.integers(1, BLOCK_BYTES - 1))
def test_a_shifted_block_is_found(number, by_bytes) -> None:
    content = BlockContent(BLOCK_BYTES)
    shifted = np.roll(block(content, number).view(np.uint8), by_bytes).view(np.uint64)
    assert content.check(shifted[np.newaxis], [key_of(number)])


def test_a_block_that_is_never_written_is_found() -> None:
    """Fresh memory is all zeros."""
    zeros = np.zeros((1, WORDS), dtype=np.uint64)
    assert BlockContent(BLOCK_BYTES).check(zeros, [key_of(0)])


@pytest.mark.parametrize("block_bytes", [0, 4, 4095])
def test_a_block_of_odd_size_is_refused(block_bytes) -> None:
    with pytest.raises(ConfigError, match=r"block_bytes=.*multiple of 8"):
        BlockContent(block_bytes)
