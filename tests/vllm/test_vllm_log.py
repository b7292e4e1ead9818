"""kvtier's log in vLLM: by vLLM's logging, in its format and as its configuration has it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tests.vllm.support.children import start_scenario

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = r"\(EngineCore pid=\d+\) {} \d\d-\d\d [\d:]+ \[.*:\d+\] "
FIELDS = r'tier is open tier=1:disk place="/a b" text="say \\"x\\" 100%" empty="" blocks=3\n'


def logged() -> None:
    """Log as an engine core does, whose process has begun to log by then."""
    import vllm.logger
    from vllm.config.logging import LoggingConfig

    from kvtier.plugin_api.log import log

    vllm.logger.configure_logging(LoggingConfig())
    vllm.logger.set_vllm_process_name("EngineCore")
    log.info("tier is open", tier="1:disk", place="/a b", text='say "x" 100%', empty="", blocks=3)
    log.write("warning", "tier's own", {"exception": "Traceback\nEnd", "path": "x\udcff"})
    try:
        raise OSError("it failed")  # noqa: TRY301 - its traceback is what is wanted
    except OSError:
        log.error("broke", exc_info=True)


def said_by_one(log_folder: Path, **environment: str) -> str:
    """Return what a process says, with this in its environment."""
    with start_scenario(logged, log_folder, environment) as child:
        child.result()
        return child.log()


def test_the_log_is_vllms_in_format_level_and_configuration(
    tmp_path: Path, log_folder: Path
) -> None:
    said = said_by_one(log_folder)
    assert re.search(PREFIX.format("INFO") + FIELDS, said), said
    warning = PREFIX.format("WARNING")
    assert re.search(warning + r"tier's own path=x\\udcff\n" + warning + "Traceback\n", said), said
    error = PREFIX.format("ERROR")
    assert re.search(error + r"broke\n" + error + r"Traceback .*\n", said), said
    assert "OSError: it failed" in said

    said = said_by_one(log_folder, VLLM_LOGGING_LEVEL="ERROR")
    assert "broke" in said
    assert "tier is open" not in said
    assert "tier's own" not in said

    config, own = made_configuration(tmp_path)
    assert "broke" not in said_by_one(log_folder, VLLM_LOGGING_CONFIG_PATH=str(config))
    lines = [json.loads(line) for line in own.read_text().splitlines()]
    ours = [line for line in lines if line["name"] == "vllm.kvtier"]
    assert [(line["levelname"], line["message"].split()[0]) for line in ours] == [
        ("WARNING", "tier's"),
        ("ERROR", "broke"),
    ]


def made_configuration(folder: Path) -> tuple[Path, Path]:
    """Return a configuration of logging as JSON, and the file that its lines go to."""
    path, own = folder / "logging.json", folder / "own.log"
    text = "%(levelname)s %(name)s %(message)s"
    config: dict[str, Any] = {
        "version": 1,
        "formatters": {
            "json": {"class": "pythonjsonlogger.jsonlogger.JsonFormatter", "format": text}
        },
        "handlers": {
            "own": {"class": "logging.FileHandler", "formatter": "json", "filename": str(own)}
        },
        "loggers": {"vllm": {"handlers": ["own"], "level": "WARNING", "propagate": False}},
    }
    path.write_text(json.dumps(config))
    return path, own
