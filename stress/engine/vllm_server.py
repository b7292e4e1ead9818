"""A real vLLM HTTP server in a process group of its own, on loopback, and its model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import aiohttp

from stress.failure import Failure
from stress.ports import HOST, HeldPort

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

BLOCK_BYTES = 32_768  #: K and V, two layers, two heads of 32 float32, for 32 tokens
BLOCK_TOKENS = 32  #: the CPU attention backend wants a multiple of 32
GPU_BLOCKS = 40  #: so few that running requests are preempted all the time
MODEL_TOKENS_MAX = 1024
ITS_OWN = "its own"  #: the weights that a server starts with
START_S_MAX = 600.0
STOP_S_MAX = 300.0
POLL_S = 0.2
LOG_TAIL_CHARACTERS = 8000
ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or it takes all cores, and waits for the busy ones
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""The variables of every server here."""

_ENVIRONMENT = {
    **ON_A_CPU,
    "KVTIER_STRESS_SERVER": "1",  # where faults are planted, if any
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
    # oneDNN keeps a kernel for each size of a batch that it meets: 200 MiB in four minutes, beside
    # which no leak can be seen. With so few kept a worker doesn't grow at all.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "TOKENIZERS_PARALLELISM": "false",
}
_FLAGS = (
    "--enforce-eager",
    "--skip-tokenizer-init",
    "--disable-uvicorn-access-log",
    "--enable-prompt-tokens-details",
)


class StartFailed(Failure):
    """A server ended before it answered."""


class Server:
    """A server that may end and be started again, and a session of connections to it."""

    def __init__(
        self, command: Sequence[str], url: str, session: aiohttp.ClientSession, log: Path
    ) -> None:
        self.url = url
        self.session = session
        self.is_up = asyncio.Event()  #: cleared before it is ended, set once it answers again
        self.outages = 0  #: that have begun
        self.resetting = asyncio.Lock()  #: held by who resets its caches or changes its weights
        self.accepts = asyncio.Event()  #: cleared while it is paused
        self.pauses = 0  #: that have begun
        self.weights: list[str] = []  #: what it has computed with, the present ones last
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The number of its first process, and of the session that all of them are in."""
        assert self._process is not None, "not started"
        return self._process.pid

    async def start(self) -> None:
        """Start it, and return once it answers. Raises ``StartFailed`` if it ends before."""
        self.begin()
        await self.wait_until_up()

    def begin(self) -> None:
        """Start it. Returns at once."""
        self.weights.append(ITS_OWN)
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )

    async def wait_until_up(self) -> None:
        """Return once it answers. Raises ``StartFailed`` if it ends before."""
        async with asyncio.timeout(START_S_MAX):
            while not await self.is_healthy():
                self.assert_alive(StartFailed)
                await asyncio.sleep(POLL_S)
        self.is_up.set()
        self.accepts.set()

    def begin_pause(self) -> None:
        """Tell everybody that from now on requests may be refused."""
        self.pauses += 1
        self.accepts.clear()

    def begin_outage(self) -> None:
        """Tell everybody that from now on connections may break."""
        self.outages += 1
        self.is_up.clear()

    async def wait_until_ended(self, limit_s: float) -> int:
        """Return the exit status. Raises ``Failure`` if it runs on."""
        assert self._process is not None, "not started"
        try:
            return await asyncio.to_thread(self._process.wait, limit_s)
        except subprocess.TimeoutExpired:
            raise Failure(f"the server still runs {limit_s:g} s after it was to end") from None

    def log(self, since: int = 0) -> str:
        """Return what the server's processes have printed, from so many bytes on."""
        with self._log.open("rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")

    def log_bytes(self) -> int:
        """Return how much they have printed so far."""
        return self._log.stat().st_size

    def assert_alive(self, failure: type[Failure] = Failure) -> None:
        """Raise ``failure`` with the end of the log if the server has ended."""
        assert self._process is not None, "not started"
        if self._process.poll() is not None:
            tail = self.log()[-LOG_TAIL_CHARACTERS:]
            raise failure(f"the server ended with status {self._process.returncode}\n{tail}")

    async def text_between_outages(self, path: str) -> str | None:
        """GET a page; None if the server is away, or has been meanwhile. Raises ``Failure``."""
        outages = self.outages
        if not self.is_up.is_set():
            return None
        try:
            async with self.session.get(self.url + path) as answer:
                text = await answer.text()
        except aiohttp.ClientError as error:
            if self.outages == outages:
                self.assert_alive()
                raise Failure(f"{path}: {error!r}") from error
            return None
        return text if self.outages == outages else None

    async def is_healthy(self) -> bool:
        """Tell whether the server answers and calls itself healthy."""
        try:
            async with self.session.get(f"{self.url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def stop(self) -> None:
        """End it as a service manager does. Raises ``Failure`` if it does not end in time."""
        self.begin_outage()
        os.kill(self.pid, signal.SIGTERM)
        await self.wait_until_ended(STOP_S_MAX)

    def kill(self) -> None:
        """Kill all its processes, if there are any, and wait for the first."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@asynccontextmanager
async def server(
    model: Path, extra_config: Mapping[str, Any] | None, log: Path, engine_id: str
) -> AsyncIterator[Server]:
    """Begin a server, without a connector if ``extra_config`` is None; it never outlives this.

    It is not up yet: others may begin beside it.
    """
    held = HeldPort()
    # Each request has a connection of its own: a client that leaves closes it.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    patience = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=patience) as session:
        command = _command(model, held.number, extra_config, engine_id)
        running = Server(command, f"http://{HOST}:{held.number}", session, log)
        try:
            running.begin()
            yield running
        finally:
            running.kill()
            held.release()


def _command(
    model: Path, port: int, extra_config: Mapping[str, Any] | None, engine_id: str
) -> list[str]:
    options = {
        "--model": str(model),
        "--host": HOST,
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


def make_model(folder: Path, seed: int) -> Path:
    """Write a small Llama with random weights; no download."""
    import torch  # noqa: PLC0415 - seconds, which a test of what else this layer has doesn't need
    from transformers import LlamaConfig, LlamaForCausalLM, utils  # noqa: PLC0415 - as above

    utils.logging.disable_progress_bar()  # nothing may be written to the standard error stream
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    )
    make: Any = LlamaForCausalLM
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)  # spreads the logits, so that ties are rare
    model.save_pretrained(folder)
    return folder
