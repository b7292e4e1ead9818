"""A region's header says whose blocks these are, in words that an engine does not rely on."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies
from structlog.testing import capture_logs

from kvtier.plugin_api.backend import BackendContext, Namespace, Outcome
from kvtier_backends.disk import format as fmt
from kvtier_backends.disk.folder import description as described
from kvtier_backends.disk.offline.inspection import Folder
from tests.unit.backends.disk._disk import BLOCK_BYTES, CONTEXT, OTHER_CONTEXT, open_disk

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
HEADER = fmt.RegionHeader(
    b"f" * 16, b"i" * 16, b"n" * 16, b"k" * 16, 3, 7, BLOCK_BYTES, BLOCK_BYTES, 8, 2, 1_700_000_000
)
LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(126)]


@given(strategies.binary(max_size=200))
def test_bytes_that_are_no_description_say_nothing(raw: bytes) -> None:
    assert described.facts_untrusted(raw) == {}


def test_a_bomb_is_not_unpacked() -> None:
    context = BackendContext(BLOCK_BYTES, Namespace({"model_name": "m" * (64 << 20)}), "1:disk")
    assert described.facts_untrusted(described.describe(context)) == {}


def test_a_description_that_has_no_room_is_left_out() -> None:
    long = replace(HEADER, description=b"d" * (fmt.DESCRIPTION_BYTES_MAX + 1))
    found = fmt.decode_header_untrusted(fmt.encode_header(long))
    assert found == replace(HEADER, description=b"")


def test_a_header_of_before_there_were_descriptions_has_none() -> None:
    fields = (HEADER.folder_id, HEADER.incarnation, HEADER.namespace, HEADER.key_id)
    numbers = (3, 7, BLOCK_BYTES, BLOCK_BYTES, 8, 2, 1_700_000_000)
    old = fmt._with_checksum(fmt._HEADER.pack(b"kvtierR\n", 1, *fields, *numbers))
    assert fmt.decode_header_untrusted(old) == HEADER


async def test_each_region_tells_the_facts_of_its_engine(tmp_path: Path) -> None:
    """Those of a model of 126 layers, too."""
    facts = {"model_name": "org/large", "groups": [{"layer_names": LAYERS}]}
    context = replace(CONTEXT, namespace=Namespace(facts, local_facts={"mtime": 7}))
    async with open_disk(tmp_path / "kv", context) as disk:
        assert await disk.store(1, 2) == [Outcome.DONE] * 2
    with Folder(str(tmp_path / "kv")) as folder:
        header = folder.inspect(0).header
    assert header is not None
    assert described.facts_untrusted(header.description) == {
        **facts,
        "on_this_machine": {"mtime": 7},
    }


async def test_a_start_says_what_others_have_left(tmp_path: Path) -> None:
    async with open_disk(tmp_path / "a kv") as disk:
        await disk.store(1)
        await disk.come_to_rest()
    with capture_logs() as logs:
        async with open_disk(tmp_path / "a kv"):
            pass
        assert not [line for line in logs if "other namespaces" in line["event"]]
        async with open_disk(tmp_path / "a kv", OTHER_CONTEXT):
            pass
    (line,) = [line for line in logs if "other namespaces" in line["event"]]
    assert line["bytes"] != "0"
    assert shlex.split(line["remove"])[:3] == ["kvtier", "purge", str(tmp_path / "a kv")]
