"""The servers that manifests bring take blocks: their programs run as the manifests have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.needs import needs
from tests.support.network_namespace import run_inside
from tests.unit.deploy._served import store_in_it

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@needs("mount")
@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        ("valkey", "redis://valkey:6379"),
        pytest.param("mooncake", "an object was stored, loaded", marks=needs("mooncake")),
    ],
)
def test_a_server_takes_what_an_engine_stores(scenario: str, says: str, tmp_path: Path) -> None:
    """With the password, the rights and the names that both manifests have."""
    run_inside(store_in_it, tmp_path, scenario, says)
