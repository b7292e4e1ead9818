"""The ``fs`` tier keeps the whole contract with blocks that are signed or encrypted, too."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvtier.testing import BACKEND_CHECKS, PERSISTENCE_CHECKS, BackendCheck
from kvtier_backends.fs import FsBackend

if TYPE_CHECKING:
    from pathlib import Path

    from kvtier.plugin_api.backend import Backend, BackendContext

pytestmark = pytest.mark.anyio


def fs(root: Path, option: str, context: BackendContext) -> Backend:
    keys = root / "keys"
    keys.write_text("11" * 32)
    keys.chmod(0o600)
    options = {"root_dir": str(root / "kv"), option: str(keys), "n_read_threads": 4}
    return FsBackend.from_options(options, context)


@pytest.mark.parametrize("option", ["auth_key_file", "encryption_key_file"])
@pytest.mark.parametrize(
    "check", BACKEND_CHECKS + PERSISTENCE_CHECKS, ids=lambda check: check.__name__
)
async def test_protected_fs_keeps_the_contract(
    check: BackendCheck, option: str, tmp_path: Path
) -> None:
    await check(partial(fs, tmp_path, option))
