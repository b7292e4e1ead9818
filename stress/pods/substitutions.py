"""All in which a pod that is run here differs from the one in a cluster.

The device is a CPU, the model is a tiny one of random weights, and sizes are a 1024th. All pods
have one address, so that one pod of each owner runs, and the bucket is on a server of this machine.
All else, arguments, environment, mounts, modes, user and groups, is as the manifest has it.
"""

from __future__ import annotations

import re
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.tools.demo.tiers import packaged_valkey
from stress.engine.vllm_server import BLOCK_TOKENS, MODEL_TOKENS_MAX, ON_A_CPU
from stress.pods.root import VENV, image_environment, path_in_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stress.pods.manifests import Pod

ADDRESS: Final = "127.0.0.1"  #: of every pod
MODEL: Final = "/model"
SCALE: Final = 1024
PROCESSES_BYTES: Final = 5 << 30
"""What an engine's processes have beside ``/dev/shm``, in place of the manifest's: they are less
than 2 GiB on a CPU, and a 1024th of it would be nothing."""

OF_A_CPU: Final = (
    *("--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--seed", "0"),
    *("--num-gpu-blocks-override", "70", "--max-model-len", str(MODEL_TOKENS_MAX)),
    *("--enforce-eager", "--skip-tokenizer-init"),
)

_S3: Final = '"type": "s3",'
_SIZE: Final = re.compile(r'"(\d+)GiB"')
_SERVERS_SIZE: Final = re.compile(r"\b(\d+)g(b)$", re.IGNORECASE)


def shared_memory_bytes(pod: Pod) -> int:
    """Return the size of its ``/dev/shm``: a 1024th for kvtier, and all of it for vLLM."""
    return pod.shared_memory_bytes - pod.primary_bytes + pod.primary_bytes // SCALE


def small(argument: str) -> str:
    """Return an argument with a 1024th of the sizes in it."""
    return _SIZE.sub(r'"\1MiB"', argument)


def addressed(argument: str) -> str:
    """Return an argument with the pod's address in it, as kubelet puts it there."""
    return argument.replace("$(POD_IP)", ADDRESS)


def engine_command(
    command: Sequence[str], arguments: Sequence[str], s3_endpoint: str = ""
) -> list[str]:
    """Return what runs for ``vllm serve MODEL ...``: the CPU build lacks the command.

    ``s3_endpoint``: the server that has the bucket, in place of AWS's.
    """
    assert list(command) == ["vllm", "serve"], command
    s3 = f'{_S3} "endpoint": "{s3_endpoint}", "allow_http": true,'
    ours = [addressed(small(each)).replace(_S3, s3) for each in arguments[1:]]
    server = [f"{VENV}/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL]
    return [*server, *ours, *OF_A_CPU]


def server_command(pod: Pod) -> list[str]:
    """Return what runs for a pod of a server: a package's program, with a 1024th of the memory."""
    (name,) = pod.container["command"]
    arguments = (_SERVERS_SIZE.sub(r"\1m\2", each) for each in pod.arguments)
    return [_program(name), *map(addressed, arguments)]


def engine_environment(pod: Pod) -> dict[str, str]:
    """Return the variables of an engine's pod, with those that a CPU needs."""
    return {**image_environment(), **ON_A_CPU, **pod.environment}


def server_environment(pod: Pod) -> dict[str, str]:
    """Return those of a server's pod, with the libraries of Mooncake's package if it is there."""
    environment = image_environment()
    if find_spec("mooncake") is not None:
        libraries = path_in_image(Path(str(resources.files("mooncake"))))
        environment["LD_LIBRARY_PATH"] += f":{libraries}"
    return {**environment, **pod.environment}


def _program(name: str) -> str:
    found = packaged_valkey() if name == "valkey-server" else resources.files("mooncake") / name
    assert found, f"no package has {name}"
    return path_in_image(Path(str(found)))
