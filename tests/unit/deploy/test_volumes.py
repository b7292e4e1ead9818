"""kvtier takes the volumes and secrets of the manifests as a cluster mounts them.

``python -m stress.pods`` runs whole engines; here ``kvtier check --connect`` runs in their place,
in the pod's read-only root, as the manifest's user and as a random one.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from stress.pods import manifests
from stress.pods.root import VENV, User, command_in_root, image_environment
from stress.pods.volumes import make_volumes, make_what_comments_say
from tests.support.needs import needs

if TYPE_CHECKING:
    from pathlib import Path

RANDOM = User(1_000_680_000, 0, 1_000_680_000)  #: such as OpenShift gives
SMALL = 1 << 20


def check(scenario: str, folder: Path, user: User | None, **changed: object) -> str:
    """Return what ``kvtier check`` prints in the pod. ``changed``: keys of its tier."""
    pod = manifests.pods(scenario)["vllm"]
    make_what_comments_say(scenario, folder)
    user = user or User.of(pod)
    (folder / "root").mkdir()
    config = pod.kv_transfer_config
    extra = config["kv_connector_extra_config"]
    extra["cpu_bytes_to_use"] = SMALL
    (tier,) = extra["secondary_tiers"]
    tier.update(changed)
    done = subprocess.run(
        command_in_root(
            pod,
            [f"{VENV}/bin/python", "-m", "kvtier", "check", "-", "--connect"],
            {**image_environment(), **pod.environment},
            make_volumes(pod, folder, user),
            user=user,
            shared_memory_bytes=2 * SMALL,
            scratch=folder / "root",
        ),
        input=json.dumps(config),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@needs("mount")
@pytest.mark.parametrize("user", [None, RANDOM], ids=["1000", "random"])
@pytest.mark.parametrize("scenario", ["local-nvme", "shared-folder"])
def test_a_volume_with_fsgroup_is_taken(scenario: str, user: User | None, tmp_path: Path) -> None:
    said = check(scenario, tmp_path, user)
    assert "nothing that an engine on this host would refuse was found" in said


@needs("mount")
def test_a_folder_of_the_host_is_taken_as_its_comment_makes_it(tmp_path: Path) -> None:
    said = check("host-path", tmp_path, None)
    assert "nothing that an engine on this host would refuse was found" in said


@needs("mount")
def test_the_root_of_a_volume_that_is_open_to_all_is_refused(tmp_path: Path) -> None:
    """So each tier has a folder of its own in its volume, which kvtier makes."""
    said = check("local-nvme", tmp_path, None, path="/cache")
    assert "is open to planted blocks" in said


@needs("mount")
def test_the_image_is_read_only(tmp_path: Path) -> None:
    said = check("local-nvme", tmp_path, None, path="/srv/kv")
    assert "its filesystem is read-only" in said
