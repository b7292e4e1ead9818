"""kvtier takes the volumes and secrets of the manifests as a cluster mounts them.

``python -m stress.pods`` runs whole engines; here ``kvtier check --connect`` runs in their place,
in the pod's read-only root, as the manifest's user and as a random one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.needs import needs
from tests.unit.deploy._pods import RANDOM, SOUND, check

if TYPE_CHECKING:
    from pathlib import Path

    from stress.pods.root import User

pytestmark = pytest.mark.slow


@needs("mount")
@pytest.mark.parametrize("user", [None, RANDOM], ids=["1000", "random"])
@pytest.mark.parametrize("scenario", ["local-nvme", "shared-folder"])
def test_a_volume_with_fsgroup_is_taken(scenario: str, user: User | None, tmp_path: Path) -> None:
    said = check(scenario, tmp_path, user)
    assert SOUND in said


@needs("mount")
def test_a_folder_of_the_host_is_taken_as_its_comment_makes_it(tmp_path: Path) -> None:
    said = check("host-path", tmp_path)
    assert SOUND in said


@needs("mount")
def test_the_root_of_a_volume_that_is_open_to_all_is_refused(tmp_path: Path) -> None:
    """So each tier has a folder of its own in its volume, which kvtier makes."""
    said = check("local-nvme", tmp_path, path="/cache")
    assert "is open to planted blocks" in said


@needs("mount")
def test_the_image_is_read_only(tmp_path: Path) -> None:
    said = check("local-nvme", tmp_path, path="/srv/kv")
    assert "its filesystem is read-only" in said
