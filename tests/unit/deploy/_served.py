"""Runs the servers of a manifest beside ``kvtier check``, in a network namespace of their own."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvtier.tools.process_group import process_group
from stress.pods import manifests
from stress.pods.root import User, command_in_root
from stress.pods.substitutions import server_command, server_environment
from stress.pods.volumes import make_volumes, make_what_comments_say
from tests.support.patience import until
from tests.unit.deploy._pods import SOUND, check_in

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.network_namespace import Network


async def store_in_it(_network: Network, folder: Path, scenario: str, says: str) -> None:
    """Start the servers' pods, and check until one has taken something: they start in any order."""
    make_what_comments_say(scenario, folder)
    pods = manifests.pods(scenario)
    engine = pods.pop("vllm")
    with ExitStack() as stack:
        for pod in pods.values():
            scratch = folder / f"root-{pod.name}"
            scratch.mkdir()
            command = command_in_root(
                pod,
                server_command(pod),
                server_environment(pod),
                make_volumes(pod, folder, User.of(pod)),
                user=User.of(pod),
                hosts=manifests.services(scenario),
                scratch=scratch,
            )
            log = stack.enter_context((folder / f"{pod.name}.log").open("wb"))
            stack.enter_context(
                process_group(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
        user = User.of(engine)
        volumes = make_volumes(engine, folder, user)
        said = [""]

        def is_stored() -> bool:
            said[0] = check_in(engine, scenario, folder, volumes, user)
            return SOUND in said[0]

        until(is_stored, lambda: said[0] + logs(folder))
        assert says in said[0]


def logs(folder: Path) -> str:
    """Return what the servers have said last."""
    return "".join(log.read_text(errors="replace")[-2000:] for log in folder.glob("*.log"))
