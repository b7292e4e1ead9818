"""Answers the queries of the page "Is it helping?": the demo's engine, scraped by Prometheus.

Each ``promql`` block of the page is followed by a ``text`` block, its answer. After a change of a
query or a metric, with vLLM, and with Prometheus (Debian: ``apt-get install prometheus``)::

    python docs/write_is_it_helping.py [PAGE]

A query without an answer, or whose answer is no number, is an error; the page is not written then.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode
from urllib.request import urlopen

from prometheus_client import start_http_server

from kvtier.tools.demo.engine import (
    BLOCK_BYTES,
    SEED,
    generate,
    make_model,
    make_prompts,
    start_engine,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm import LLM

PAGE: Final = Path(__file__).parent / "how-to/is-it-helping.md"
QUERY: Final = "```promql\n"
ANSWERED: Final = re.compile(
    rf"(^{QUERY}(.*?)^```\n\n```text\n).*?(^```$)", re.MULTILINE | re.DOTALL
)
CONFIGURED: Final = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TARGET: Final = "vllm.example:8000"
SCRAPE_S: Final = 1.0
PATIENCE_S: Final = 60.0
PROMPTS, PROMPT_TOKENS, REQUESTS = 40, 1000, 300
ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that this process has the metrics
    "VLLM_NO_USAGE_STATS": "1",
}


class Prometheus:
    """A running server."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/api/v1/query?"

    def ask(self, query: str, at: float) -> list[Any]:
        """Return the series of a query's answer at a time."""
        with urlopen(self._url + urlencode({"query": query, "time": at})) as answer:  # noqa: S310 - ours
            series: list[Any] = json.load(answer)["data"]["result"]
        return series

    def wait_for_scrape(self) -> float:
        """Wait until a scrape has begun after now; return its time."""
        now = time.time()
        while time.time() < now + PATIENCE_S:
            time.sleep(SCRAPE_S / 4)
            for series in self.ask("timestamp(kvtier:info)", time.time()):
                scraped = float(series["value"][1])
                if scraped > now:
                    return scraped
        raise SystemExit("Prometheus has not scraped the engine")


@contextmanager
def prometheus(folder: Path, page: str, port: int) -> Iterator[Prometheus]:
    """Run Prometheus as the page configures it, but for the target: a port of this machine."""
    config = folder / "prometheus.yml"
    scrape = CONFIGURED.findall(page)[0].replace(TARGET, f"127.0.0.1:{port}")
    config.write_text(f"global: {{scrape_interval: {SCRAPE_S:g}s}}\n{scrape}")
    options = ("--web.listen-address=127.0.0.1:0", f"--storage.tsdb.path={folder / 'data'}")
    command = ["prometheus", f"--config.file={config}", *options]
    log = folder / "prometheus.log"
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as child:  # noqa: S603
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not (listens := re.search(r'"Listening on" address=(\S+)', log.read_text())):
                if child.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"Prometheus did not start:\n{log.read_text()}")
                time.sleep(0.1)
            yield Prometheus(listens[1])
        finally:
            child.terminate()


def start(folder: Path) -> LLM:
    """Start the demo's engine on three tiers, none of which has room for all prompts."""
    make_model(folder / "model")
    disk = {"type": "disk", "name": "nvme", "path": str(folder / "disk")}
    shared = {"type": "fs", "name": "shared", "root_dir": str(folder / "fs")}
    config = {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": 150 * BLOCK_BYTES,
        "secondary_tiers": [
            {**disk, "capacity_bytes": 400 * BLOCK_BYTES},
            {**shared, "capacity_bytes": 1000 * BLOCK_BYTES, "admission": "second_touch"},
        ],
    }
    job = {"model": str(folder / "model"), "extra_config": config}
    return start_engine(job, num_gpu_blocks_override=70, max_model_len=2048)


def run(llm: LLM) -> None:
    """Send requests, one after the other: the more popular a prompt, the more often."""
    prompts = make_prompts(PROMPTS, PROMPT_TOKENS, SEED)
    popularity = [*accumulate(1 / rank for rank in range(1, PROMPTS + 1))]
    choose = random.Random(SEED)  # noqa: S311 - not for secrets
    for prompt in choose.choices(prompts, cum_weights=popularity, k=REQUESTS):
        generate(llm, prompt)


def shown(series: list[Any]) -> str:
    """Return an answer as the page shows it: a line for each series."""
    found = {
        ", ".join(f"{name}={value}" for name, value in sorted(each["metric"].items())): float(
            f"{float(each['value'][1]):.3g}"
        )
        for each in series
    }
    width = max(map(len, found))
    return "".join(
        f"{labels:{width}}  {value:{',.0f' if value >= 1000 else 'g'}}\n".lstrip()
        for labels, value in sorted(found.items())
    )


def answered(page: str) -> str:
    """Return the page with its answers made anew."""
    queries = [query for _, query, _ in ANSWERED.findall(page)]
    if len(queries) != page.count(QUERY):
        raise SystemExit("a query has no block for its answer")
    with TemporaryDirectory() as made:
        llm = start(Path(made))
        server, _ = start_http_server(0, "127.0.0.1")
        with prometheus(Path(made), page, server.server_port) as asked:
            generate(llm, [3])  # from now on the counters are there, at 0
            asked.wait_for_scrape()
            run(llm)
            at = asked.wait_for_scrape()
            answers = {query: asked.ask(query, at) for query in queries}
        llm.llm_engine.engine_core.shutdown()
    for query, series in answers.items():
        if not series or any(each["value"][1] in {"NaN", "+Inf"} for each in series):
            raise SystemExit(f"no answer, or none that is a number: {query}{series}")
    return ANSWERED.sub(lambda block: f"{block[1]}{shown(answers[block[2]])}{block[3]}", page)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    path = Path(*sys.argv[1:]) if sys.argv[1:] else PAGE
    path.write_text(answered(path.read_text()))
