"""An engine with an ``fs`` tier, for tests to kill: it stores a block, then loads it."""

from __future__ import annotations

import sys
import threading

import structlog

from kvtier.plugin_api.backend import Namespace
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.runtime import open_runtime
from kvtier.settings.runtime_config import RuntimeConfig, TierConfig
from tests.support.patience import until

BLOCK = 8192
KEY = bytes(36)


def main(root: str) -> None:
    """Say when the block is stored; load it after a line on standard input; never end."""
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    limits = ("probe_timeout_s", "promote_timeout_s", "store_timeout_s")
    patient = dict.fromkeys(limits, 600.0)  # of the product's own, one might run out
    tier = TierConfig.from_mapping(1, {"type": "fs", "root_dir": root, **patient})
    config = RuntimeConfig(8, BLOCK, tiers=(tier,), on_reset="keep")
    facade = open_runtime(config, SlotMemory.anonymous(8, BLOCK), Namespace({"model": "m"}))

    def step(done: bool) -> bool:
        facade.step_end()
        return done

    facade.on_request_started("r")
    grant = facade.prepare_store([KEY], "r")
    assert grant is not None
    facade.complete_store(grant.keys, "r")
    until(lambda: step(not facade.has_pending_work()))
    facade.reset()
    facade.on_reset_flushed()
    print("stored", flush=True)
    sys.stdin.readline()
    facade.lookup(KEY, "r")
    facade.step_end()
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
