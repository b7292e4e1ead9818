"""A real vLLM HTTP server in a process group of its own, on loopback, for ``soak.py``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import aiohttp

from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

BLOCK_TOKENS = 32  #: the CPU attention backend wants a multiple of 32
GPU_BLOCKS = 70  #: so few that running requests are preempted all the time
MODEL_TOKENS_MAX = 2048
START_S_MAX = 600.0
STOP_S_MAX = 120.0
POLL_S = 0.2
LOG_TAIL_CHARACTERS = 8000
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_FLAGS = (
    "--enforce-eager",
    "--skip-tokenizer-init",
    "--disable-uvicorn-access-log",
    "--enable-prompt-tokens-details",
)


class Server:
    """One server, and a session of connections to it."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, process: subprocess.Popen[bytes], log: Path
    ) -> None:
        self.url = url
        self.session = session
        self._process = process
        self._log = log

    def log(self) -> str:
        """Return all that the server's processes have printed."""
        return self._log.read_text(errors="replace")

    def assert_alive(self) -> None:
        """Raise ``Failure`` with the end of the log if the server has ended."""
        if self._process.poll() is not None:
            tail = self.log()[-LOG_TAIL_CHARACTERS:]
            raise Failure(f"the server ended with status {self._process.returncode}\n{tail}")

    async def text(self, path: str) -> str:
        """GET a page."""
        async with self.session.get(self.url + path) as answer:
            return await answer.text()

    async def is_healthy(self) -> bool:
        """Tell whether the server answers and calls itself healthy."""
        try:
            async with self.session.get(f"{self.url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def stop(self) -> None:
        """End it as a service manager does. Raises ``Failure`` if it does not end in time."""
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self._process.wait, STOP_S_MAX)
        except subprocess.TimeoutExpired:
            raise Failure(f"the server still runs {STOP_S_MAX:g} s after SIGTERM") from None


@asynccontextmanager
async def server(
    model: Path, extra_config: Mapping[str, Any] | None, log: Path, engine_id: str
) -> AsyncIterator[Server]:
    """Start a server, without a connector if ``extra_config`` is None; it never outlives this."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
            _command(model, port, extra_config, engine_id),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
        )
    try:
        # Each request has a connection of its own: a client that leaves closes it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        patience = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=patience) as session:
            running = Server(f"http://127.0.0.1:{port}", session, process, log)
            async with asyncio.timeout(START_S_MAX):
                while not await running.is_healthy():
                    running.assert_alive()
                    await asyncio.sleep(POLL_S)
            yield running
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _command(
    model: Path, port: int, extra_config: Mapping[str, Any] | None, engine_id: str
) -> list[str]:
    options = {
        "--model": str(model),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--block-size": str(BLOCK_TOKENS),
        "--num-gpu-blocks-override": str(GPU_BLOCKS),
        "--max-model-len": str(MODEL_TOKENS_MAX),
        "--seed": "0",
    }
    if extra_config is not None:
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": engine_id,
            "kv_connector_extra_config": dict(extra_config),
        }
        options["--kv-transfer-config"] = json.dumps(transfer)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *_FLAGS]
    for name, value in options.items():
        command += [name, value]
    return command
