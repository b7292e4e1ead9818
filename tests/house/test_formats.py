"""The page on updates has the versions of what is stored, as they are in the code."""

from __future__ import annotations

import re
from typing import Final

from pages import DOCS, section
from sources import MODULES

from kvtier_backends.disk import format as disk_format
from kvtier_backends.fs import forms, layout
from kvtier_backends.mooncake import namespace_object
from kvtier_backends.redis import servers
from kvtier_backends.s3 import backend as s3
from kvtier_backends.shared import record_trailer


def version_in(module: str) -> int:
    """Return the constant of a module that cannot be imported, since it imports vLLM."""
    found = re.search(r"^FORMAT_VERSION: Final = (\d+)", MODULES[module].read_text(), re.MULTILINE)
    assert found, module
    return int(found[1])


VERSIONS: Final = [
    ("a `disk` tier's superblock", {disk_format.FORMAT_VERSION}),
    ("a block in a file of an `fs` tier", {forms._VERSION}),
    ("a block that is signed", {record_trailer._VERSION}),
    (
        "the description beside the blocks",
        {
            layout.FORMAT_VERSION,
            servers.FORMAT_VERSION,
            s3.FORMAT_VERSION,
            namespace_object.FORMAT_VERSION,
        },
    ),
    ("the names themselves", {version_in("kvtier.vllm.identity.namespace")}),
]


def test_every_format_on_the_page_has_its_version() -> None:
    text = section((DOCS / "how-to/start-stop-update.md").read_text(), "Formats")
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \|", text, re.MULTILINE)
    assert len(rows) == len(VERSIONS)
    for (what, version), (begins, versions) in zip(rows, VERSIONS, strict=True):
        assert what.startswith(begins)
        assert {int(version)} == versions, what
