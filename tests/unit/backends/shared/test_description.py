"""The description beside the blocks is the engine's own, or is refused with what to do about it."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_backends.shared.namespaces import DESCRIPTION_BYTES_MAX, OtherNamespace, OwnDescription
from tests.unit.backends.shared._keys import CONTEXT

OWN = OwnDescription("kv/description", "kvtier toy", 1, CONTEXT, option="key_prefix")


def test_what_was_written_is_found_again() -> None:
    OWN.refuse_other_untrusted(OWN.text)
    OWN.refuse_other_untrusted(memoryview(json.dumps(json.loads(OWN.text)).encode()))


def test_another_namespace_is_refused_with_both_sides_and_the_remedy() -> None:
    other = {**json.loads(OWN.text), "block_bytes": 1}
    with pytest.raises(OtherNamespace) as refused:
        OWN.refuse_other_untrusted(json.dumps(other).encode())
    said = str(refused.value)
    assert (
        f"kv/description is of another namespace: block_bytes is 1 there and {CONTEXT.block_bytes}"
        in said
    )
    assert "another key_prefix, or remove kv/description" in said


def test_one_that_is_too_long_is_not_read() -> None:
    with pytest.raises(OtherNamespace, match=f"no description: {DESCRIPTION_BYTES_MAX + 1} bytes"):
        OWN.refuse_other_untrusted(bytes(DESCRIPTION_BYTES_MAX + 1))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(raw=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_is_there_raises_nothing_but_the_refusal(raw: bytes) -> None:
    with suppress(OtherNamespace):
        OWN.refuse_other_untrusted(raw)
