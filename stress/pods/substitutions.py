"""All in which a pod that is run here differs from the one in a cluster.

The device is a CPU, the model is a tiny one of random weights, and sizes are a 1024th: all else,
arguments, environment, mounts, modes, user and groups, is as the manifest has it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from stress.engine.vllm_server import BLOCK_TOKENS, MODEL_TOKENS_MAX
from stress.pods.root import VENV

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stress.pods.manifests import Pod

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
ENVIRONMENT_OF_A_CPU: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

_SIZE: Final = re.compile(r'"(\d+)GiB"')


def shared_memory_bytes(pod: Pod) -> int:
    """Return the size of its ``/dev/shm``: a 1024th for kvtier, and all of it for vLLM."""
    return pod.shared_memory_bytes - pod.primary_bytes + pod.primary_bytes // SCALE


def small(argument: str) -> str:
    """Return an argument with a 1024th of the sizes in it."""
    return _SIZE.sub(r'"\1MiB"', argument)


def engine_command(command: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return what runs for ``vllm serve MODEL ...``: the CPU build lacks the command."""
    assert list(command) == ["vllm", "serve"], command
    ours = [small(each) for each in arguments[1:]]
    server = [f"{VENV}/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL]
    return [*server, *ours, *OF_A_CPU]


def server_command(command: Sequence[str], arguments: Sequence[str], program: str) -> list[str]:
    """Return what runs for a cache server's: ``program``, with a 1024th of its memory."""
    assert list(command) == ["valkey-server"], command
    return [program, *(re.sub(r"^(\d+)gb$", r"\1mb", each) for each in arguments)]
