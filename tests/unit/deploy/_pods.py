"""Runs commands in the pods of the manifests, in place of what these run."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

from stress.pods import manifests
from stress.pods.root import VENV, User, command_in_root, image_environment
from stress.pods.volumes import make_volumes, make_what_comments_say

if TYPE_CHECKING:
    from pathlib import Path

RANDOM = User(1_000_680_000, 0, 1_000_680_000)  #: such as OpenShift gives
SMALL = 1 << 20
SOUND = "nothing that an engine on this host would refuse was found"


def check(scenario: str, folder: Path, user: User | None = None, **changed: object) -> str:
    """Return what ``kvtier check --connect`` prints in the pod of the engine.

    ``changed``: keys of its tier.
    """
    pod = manifests.pods(scenario)["vllm"]
    make_what_comments_say(scenario, folder)
    user = user or User.of(pod)
    volumes = make_volumes(pod, folder, user)
    return check_in(pod, scenario, folder, volumes, user, **changed)


def check_in(
    pod: manifests.Pod,
    scenario: str,
    folder: Path,
    volumes: dict[str, Path],
    user: User,
    **changed: object,
) -> str:
    """Do it with volumes that have been made."""
    (folder / "root").mkdir(exist_ok=True)
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
            volumes,
            user=user,
            shared_memory_bytes=2 * SMALL,
            hosts=manifests.services(scenario),
            scratch=folder / "root",
        ),
        input=json.dumps(config),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr
