"""Answers the queries of the page "Is it helping?": the demo's engine, scraped by Prometheus.

Each ``promql`` block of the page is a query of ``kvtier/tools/monitoring/questions.py``, in their
order, and is followed by a ``text`` block, its answer. After a change of a query or a metric, with
vLLM, and with Prometheus (Debian: ``apt-get install prometheus``)::

    python -m docs.write_is_it_helping [PAGE]

A query without an answer, or whose answer is no number, is an error; the page is not written then.
"""

from __future__ import annotations

import os
import random
import re
import sys
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import start_http_server

from kvtier.tools.demo.engine import BLOCK_BYTES, SEED, generate, make_prompts, start_engine
from kvtier.tools.demo.model import make_model
from kvtier.tools.monitoring.questions import FIGURES
from stress.monitored.prometheus import ENVIRONMENT, PAGE, prometheus

if TYPE_CHECKING:
    from vllm import LLM

QUERY: Final = "```promql\n"
ANSWERED: Final = re.compile(
    rf"(^{QUERY})(.*?)(^```\n\n```text\n).*?(^```$)", re.MULTILINE | re.DOTALL
)
PROMPTS, PROMPT_TOKENS, REQUESTS = 40, 1000, 300


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
    queries = [figure.query for figure in FIGURES.values()]
    if not len(queries) == page.count(QUERY) == len(ANSWERED.findall(page)):
        raise SystemExit("a query has no block, or none for its answer")
    with TemporaryDirectory() as made:
        llm = start(Path(made))
        server, _ = start_http_server(0, "127.0.0.1")
        with prometheus(Path(made), server.server_port) as asked:
            generate(llm, [3])  # from now on the counters are there, at 0
            asked.wait_for_scrape()
            run(llm)
            at = asked.wait_for_scrape()
            answers = {query: asked.ask(query, at) for query in queries}
        llm.llm_engine.engine_core.shutdown()
    for query, series in answers.items():
        if not series or any(each["value"][1] in {"NaN", "+Inf"} for each in series):
            raise SystemExit(f"no answer, or none that is a number: {query}{series}")
    asked_for = iter(queries)

    def block(found: re.Match[str]) -> str:
        query = next(asked_for)
        return f"{found[1]}{query}{found[3]}{shown(answers[query])}{found[4]}"

    return ANSWERED.sub(block, page)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    path = Path(*sys.argv[1:]) if sys.argv[1:] else PAGE
    path.write_text(answered(path.read_text()))
