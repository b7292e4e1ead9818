"""kvtier's log in vLLM: by vLLM's logging, in its format and as its configuration has it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

LOGGING = """
import json, os, sys
import vllm.logger
from vllm.config.logging import LoggingConfig

for path, environment in json.loads(sys.argv[1]).items():
    if os.fork():
        assert os.wait()[1] == 0
        continue
    os.environ.update(environment)
    written = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(written, 1)
    os.dup2(written, 2)
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
    os._exit(0)
"""
PREFIX = r"\(EngineCore pid=\d+\) {} \d\d-\d\d [\d:]+ \[.*:\d+\] "
FIELDS = r'tier is open tier=1:disk place="/a b" text="say \\"x\\" 100%" empty="" blocks=3\n'


def test_the_log_is_vllms_in_format_level_and_configuration(tmp_path: Path) -> None:
    """One process for all, since importing vLLM takes most of the time."""
    plain, errors, configured = (tmp_path / name for name in ("plain", "errors", "configured"))
    config, own = made_configuration(tmp_path)
    environments = {
        plain: {},
        errors: {"VLLM_LOGGING_LEVEL": "ERROR"},
        configured: {"VLLM_LOGGING_CONFIG_PATH": str(config)},
    }
    subprocess.run(
        [
            sys.executable,
            "-c",
            LOGGING,
            json.dumps({str(at): env for at, env in environments.items()}),
        ],
        check=True,
    )
    said = plain.read_text()
    assert re.search(PREFIX.format("INFO") + FIELDS, said), said
    warning = PREFIX.format("WARNING")
    assert re.search(warning + r"tier's own path=x\\udcff\n" + warning + "Traceback\n", said), said
    error = PREFIX.format("ERROR")
    assert re.search(error + r"broke\n" + error + r"Traceback .*\n", said), said
    assert "OSError: it failed" in said

    said = errors.read_text()
    assert "broke" in said
    assert "tier is open" not in said
    assert "tier's own" not in said

    assert "broke" not in configured.read_text()
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
