"""The disk backend keeps the shipped contract; each namespace has a folder of its own here."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.testing import BACKEND_CHECKS, PERSISTENCE_CHECKS, BackendCheck
from kvtier_backends.disk import DiskBackend
from kvtier_backends.disk.format import namespace_digest

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.plugin_api.backend import Backend, BackendContext

pytestmark = pytest.mark.anyio


OPTIONS: dict[str, dict[str, Any]] = {
    "direct": {},
    "page cache": {"direct": False},
    "encrypted": {"encryption_key_env": "KVTIER_TEST_KEYS"},
}


def disk(root: Path, kind: str, context: BackendContext) -> Backend:
    # Two engines never share a folder, so the check of two at once needs two.
    path = root / namespace_digest(context).hex()
    options = {"path": str(path), "capacity_bytes": 4 << 20, **OPTIONS[kind]}
    return DiskBackend.from_options(options, context)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(
    "check", BACKEND_CHECKS + PERSISTENCE_CHECKS, ids=lambda check: check.__name__
)
async def test_disk_keeps_the_contract(
    check: BackendCheck, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_TEST_KEYS", "5a" * 32)
    await check(partial(disk, tmp_path, kind))
