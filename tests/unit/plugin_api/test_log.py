"""What the log tells where nobody configured structlog, as in most engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import structlog
from structlog import dev

from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Iterator


PASSWORD = "hunter2"


@pytest.fixture(autouse=True)
def _as_structlog_comes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = structlog.get_config()
    structlog.reset_defaults()
    monkeypatch.setattr(log, "_sink", None)  # vLLM's, once a test has imported kvtier.vllm
    renderer = dev.ConsoleRenderer.get_active()
    monkeypatch.setattr(renderer, "exception_formatter", dev.default_exception_formatter)
    yield
    structlog.configure(**before)


def test_a_program_with_a_log_of_its_own_takes_the_lines(capfd: pytest.CaptureFixture[str]) -> None:
    taken: list[tuple[str, str, dict[str, object]]] = []
    log.send_to(lambda level, event, fields: taken.append((level, event, dict(fields))))
    log.warning("slow", tier="disk")
    assert taken == [("warning", "slow", {"tier": "disk"})]
    assert capfd.readouterr().out == ""


def fail(options: dict[str, str]) -> None:
    raise OSError(f"{len(options)} options refused")


def test_a_traceback_tells_no_variables(capfd: pytest.CaptureFixture[str]) -> None:
    """rich, which vLLM installs, would have structlog print them all."""
    try:
        fail({"password": PASSWORD})
    except OSError:
        log.error("it failed", exc_info=True, tier="redis")

    told = capfd.readouterr().out
    assert PASSWORD not in told
    assert "it failed" in told
    assert "redis" in told
    assert "1 options refused" in told
    assert "in fail" in told


def test_a_configuration_of_the_users_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    structlog.configure(processors=[structlog.processors.JSONRenderer()])
    log.warning("slow", tier="disk")
    assert capfd.readouterr().out == '{"tier": "disk", "event": "slow"}\n'
