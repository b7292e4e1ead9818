"""Reports what tiers have done for one request: in the log at debug, and in its response.

A client that sends ``"kv_transfer_params": {"kvtier_report": true}`` finds the report in the same
place of the response. Other clients get none: other connectors use that place, too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from kvtier.core.metrics import PRIMARY_TIER
from kvtier.plugin_api.log import log
from kvtier.vllm.vllm_log import LOGGER

if TYPE_CHECKING:
    from kvtier.engine.facade import SchedulerFacade
    from kvtier.settings.runtime_config import RuntimeConfig

REPORT: Final = "kvtier_report"


class RequestReports:
    """Makes the reports of one engine's requests."""

    def __init__(self, facade: SchedulerFacade, config: RuntimeConfig) -> None:
        self._facade = facade
        self._tiers = [PRIMARY_TIER, *(tier.name for tier in config.tiers)]

    def at_end(self, request: Any) -> dict[str, Any] | None:  # noqa: ANN401 - vLLM's
        """Log the report of a request that ends; return it for the response, if asked for."""
        params = request.kv_transfer_params
        # Taken out: another engine's connector behind this one would use the same name.
        is_asked_for = bool(params) and params.pop(REPORT, None) is True
        if not (is_asked_for or LOGGER.isEnabledFor(logging.DEBUG)):
            return None
        report = self._facade.report(request.request_id)
        if report is None:
            return None
        tiers = self._tiers
        fields: dict[str, Any] = {
            "loaded_tokens": {tiers[n]: tokens for n, tokens in report.loaded_tokens.items()},
            "waited_s": round(report.waited_s, 6),
        }
        if report.missed is not None:
            source, reason = report.missed
            fields["missed"] = {"tier": tiers[source], "reason": reason}
        log.debug("request is over", request=request.request_id, **fields)
        return {REPORT: fields} if is_asked_for else None
