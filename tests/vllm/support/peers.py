"""Engines in processes of their own that a test plays one request after the other in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.vllm.support.children import Child

HOST = "127.0.0.1"
SOURCES = "vllm:prompt_tokens_cached_by_source"


def serve(
    model: str, extra_config: dict[str, Any], folder: str, settings: dict[str, Any] | None = None
) -> None:
    """Run what is asked for in the folder, one file after the other; step in between."""
    from prometheus_client import REGISTRY
    from vllm.v1.kv_offload.tiering.p2p.manager import P2PSecondaryTierManager

    from tests.support.patience import pause
    from tests.vllm.support.engine import engine
    from tests.vllm.support.nixl import let_nixl_rest

    let_nixl_rest()
    inbox = Path(folder)
    real = P2PSecondaryTierManager.submit_load

    def noted(self: Any, job: Any) -> None:
        real(self, job)
        (source,) = job.req_context.kv_transfer_params.values()
        (inbox / f"loading-{source['kv_request_id']}").touch()

    P2PSecondaryTierManager.submit_load = noted
    with engine(model, extra_config, **(settings or {})) as played:
        number = 0
        while True:
            played.step()
            asked = inbox / f"{number}.json"
            if not asked.exists():
                pause()  # the processors are others' meanwhile
                continue
            call = json.loads(asked.read_text())
            if not call:
                return
            if call["forget"]:
                played.settle()
                played.forget()
            run = played.run if isinstance(call["params"], list) else played.run_one_by_one
            outputs = run(call["prompts"], call["max_tokens"], call["params"])
            told = {
                **outputs.as_json(),
                "statistics": played.statistics(),
                "metrics": played.metrics(),
                "sources": {
                    sample.labels["source"]: sample.value
                    for family in REGISTRY.collect()
                    if family.name == SOURCES
                    for sample in family.samples
                    if sample.name.endswith("_total") and sample.value
                },
            }
            half = inbox / f"{number}.half"
            half.write_text(json.dumps(told))
            half.rename(inbox / f"{number}.told")
            number += 1


class Peer:
    """An engine in a process of its own, which plays ``serve``."""

    def __init__(self, child: Child, folder: Path, port: int) -> None:
        self.child = child
        self.port = port
        self.folder = folder
        self._calls = 0

    def ask(
        self,
        prompts: list[list[int]],
        params: Any = None,
        max_tokens: int = 8,
        *,
        forget: bool = False,
    ) -> Path:
        """Have prompts run, one by one; return the file in which the answer will be.

        ``params``: of all requests; or a list, of each, and they run at once. ``forget``: empty
        the engine's own prefix cache first.
        """
        call = {"prompts": prompts, "params": params, "max_tokens": max_tokens, "forget": forget}
        half = self.folder / f"{self._calls}.asked"
        half.write_text(json.dumps(call))
        half.rename(self.folder / f"{self._calls}.json")
        self._calls += 1
        return self.folder / f"{self._calls - 1}.told"

    def run(self, *arguments: Any, **settings: Any) -> Any:
        """Return the answer to ``ask``."""
        return json.loads(self.child.wait_for(self.ask(*arguments, **settings)))
