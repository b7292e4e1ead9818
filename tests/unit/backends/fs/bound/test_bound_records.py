"""Names, small files and the manifest: what is written comes back, and nothing else is believed."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_backends.fs.bound.account import Manifest
from kvtier_backends.fs.bound.protocol import (
    BLOCKS,
    KNOWN,
    GrantName,
    Lease,
    Location,
    RecordDamaged,
    Want,
    decode_array_untrusted,
    decode_untrusted,
    encode,
    encode_array,
    leaf_folder,
    leaf_number,
    namespace_number,
    parse_grant_untrusted,
    term_numbers,
)
from kvtier_backends.fs.bound.writer import USES_MAX, Uses, as_array
from kvtier_backends.fs.layout import make_layout
from tests.unit.backends.fs._fs import CONTEXT, key_of

BLOCK = st.tuples(*[st.integers(0, 30), st.integers(0, 5), st.integers(1, 9)])


@pytest.mark.parametrize("layout_name", ["kvtier", "vllm"])
@pytest.mark.parametrize("key", [key_of(1), key_of(2, 131), bytes(92), b"\x12" * 5 + bytes(4)])
def test_a_leaf_is_found_again_by_its_number(layout_name: str, key: bytes) -> None:
    layout = make_layout(layout_name, "/kv", CONTEXT)
    folder = layout.name(key).rpartition("/")[0]
    number = leaf_number(layout.blocks_name, folder)
    assert number is not None
    assert leaf_folder(number) == (namespace_number(layout.blocks_name), folder)


@pytest.mark.parametrize("folder", ["ab_/__", "a__/__"])
def test_short_keys_have_leaves_too(folder: str) -> None:
    assert leaf_folder(leaf_number("n", folder) or 0)[1] == folder


@pytest.mark.parametrize(
    "folder", ["", "abc", "abc/de/f", "xyz/de", "abc/de_g01", "a_b/de", "../.."]
)
def test_a_folder_of_no_layout_has_no_number(folder: str) -> None:
    assert leaf_number("n", folder) is None


def test_a_grants_name_says_whose_it_is_and_what_for() -> None:
    grant = GrantName("0123456789ab-17-18-0123abcd", 3, 4096)
    assert parse_grant_untrusted(str(grant)) == grant
    assert parse_grant_untrusted("grant-x-1-1") is None


def test_only_terms_count_as_terms() -> None:
    assert term_numbers(["0000000012", "0000000002", "x", "12", "0000000003.tmp"]) == [2, 12]


@given(raw=st.binary(max_size=200))
def test_a_foreign_small_file_raises_nothing_but_record_damaged(raw: bytes) -> None:
    for kind in (Lease, Want):
        with suppress(RecordDamaged):
            decode_untrusted(raw, kind)
    with suppress(RecordDamaged):
        decode_array_untrusted(raw, BLOCKS)


@given(blocks=st.lists(BLOCK), head=st.binary(max_size=20), at=st.integers(0, 10_000))
def test_a_list_of_blocks_comes_back_or_is_refused(
    blocks: list[tuple[int, int, int]], head: bytes, at: int
) -> None:
    raw = encode_array(as_array(blocks), head)
    found, read_head = decode_array_untrusted(raw, BLOCKS)
    assert (found.tolist(), read_head) == (blocks, head)
    flipped = bytearray(raw)
    flipped[at % len(raw)] ^= 1
    with pytest.raises(RecordDamaged):
        decode_array_untrusted(bytes(flipped), BLOCKS)


def test_small_files_come_back() -> None:
    for small in (Lease(1, "me", 5, released=True), Want(1, 2, 3, (4, 5), 6)):
        assert decode_untrusted(encode(small), type(small)) == small


@given(
    changes=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.lists(BLOCK, max_size=5)),
            st.tuples(st.just("remove"), st.lists(BLOCK, max_size=5)),
            st.tuples(st.just("touch"), st.lists(BLOCK, max_size=5)),
        )
    )
)
def test_the_manifest_is_a_mapping_from_blocks_to_sizes_and_epochs(
    changes: list[tuple[str, list[tuple[int, int, int]]]],
) -> None:
    manifest = Manifest()
    model: dict[int, list[int]] = {}
    for epoch, (change, blocks) in enumerate(changes, start=1):
        numbers = np.array([block for block, _, _ in blocks], np.uint64)
        if change == "add":
            once = {block: (block, leaf, size) for block, leaf, size in reversed(blocks)}
            manifest.add(as_array(once.values()), epoch)
            for block, _leaf, size in once.values():
                model[block] = [max(size, model.get(block, [0])[0]), epoch]
        elif change == "remove":
            manifest.remove(numbers)
            for block, _, _ in blocks:
                model.pop(block, None)
        else:
            manifest.touch(numbers, epoch)
            for block, _, _ in blocks:
                if block in model:
                    model[block][1] = epoch
        entries = manifest.entries
        found = zip(entries["block"], entries["size"], entries["epoch"], strict=True)
        assert {int(b): [int(s), int(e)] for b, s, e in found} == model
        assert manifest.bytes == sum(size for size, _ in model.values())


def test_the_oldest_are_those_whose_use_is_longest_ago() -> None:
    known = np.zeros(100, KNOWN)
    known["block"], known["size"] = np.arange(100), 10
    known["epoch"] = np.arange(100)[::-1]
    oldest = Manifest(known).oldest(35, 1000)
    assert sorted(oldest["block"]) == [96, 97, 98, 99]
    assert len(Manifest(known).oldest(10_000, 7)) == 7
    assert len(Manifest().oldest(10, 10)) == 0


def test_uses_are_bounded() -> None:
    uses = Uses()
    for number in range(USES_MAX + 10):
        uses.note(Location(number, 0))
    assert len(uses.drain()) == USES_MAX
    assert len(uses.drain()) == 0
