"""kvtier's log in vLLM: by vLLM's logging, in its format and as its configuration has it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

LOGGING = """
import vllm.logger
from vllm.config.logging import LoggingConfig
vllm.logger.configure_logging(LoggingConfig())
vllm.logger.set_vllm_process_name("EngineCore")
import kvtier.vllm
from kvtier.plugin_api.log import log
log.info("tier is open", tier="1:disk", place="/a b", text='say "x" 100%', empty="", blocks=3)
log.write("warning", "tier's own", {"exception": "Traceback\\nEnd", "path": "x\\udcff"})
try:
    raise OSError("it failed")
except OSError:
    log.error("broke", exc_info=True)
"""
PREFIX = r"\(EngineCore pid=\d+\) {} \d\d-\d\d [\d:]+ \[.*:\d+\] "


def logged(**environment: str) -> str:
    """Return what a process of vLLM's writes."""
    run = subprocess.run(
        [sys.executable, "-c", LOGGING],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return run.stdout + run.stderr


def test_lines_have_the_format_of_vllm_and_their_fields() -> None:
    said = logged()
    fields = r'tier is open tier=1:disk place="/a b" text="say \\"x\\" 100%" empty="" blocks=3\n'
    assert re.search(PREFIX.format("INFO") + fields, said), said
    warning = PREFIX.format("WARNING")
    assert re.search(warning + r"tier's own path=x\\udcff\n" + warning + "Traceback\n", said), said
    error = PREFIX.format("ERROR")
    assert re.search(error + r"broke\n" + error + r"Traceback .*\n", said), said
    assert "OSError: it failed" in said


def test_the_level_is_vllms() -> None:
    said = logged(VLLM_LOGGING_LEVEL="ERROR")
    assert "broke" in said
    assert "tier is open" not in said
    assert "tier's own" not in said


def test_a_logging_configuration_of_vllm_makes_json(tmp_path: Path) -> None:
    text = "%(levelname)s %(name)s %(message)s"
    config: dict[str, Any] = {
        "version": 1,
        "formatters": {
            "json": {"class": "pythonjsonlogger.jsonlogger.JsonFormatter", "format": text}
        },
        "handlers": {"own": {"class": "logging.FileHandler", "formatter": "json"}},
        "loggers": {"vllm": {"handlers": ["own"], "level": "WARNING", "propagate": False}},
    }
    own = tmp_path / "own.log"
    config["handlers"]["own"]["filename"] = str(own)
    path = tmp_path / "logging.json"
    path.write_text(json.dumps(config))
    assert "broke" not in logged(VLLM_LOGGING_CONFIG_PATH=str(path))
    lines = [json.loads(line) for line in own.read_text().splitlines()]
    ours = [line for line in lines if line["name"] == "vllm.kvtier"]
    assert [(line["levelname"], line["message"].split()[0]) for line in ours] == [
        ("WARNING", "tier's"),
        ("ERROR", "broke"),
    ]
