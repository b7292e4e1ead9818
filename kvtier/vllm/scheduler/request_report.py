"""Reports what tiers have done for one request: in the log at debug, and in its response.

A client that sends ``"kv_transfer_params": {"kvtier_report": true}`` finds the report in the same
place of the response. Other clients get none: other connectors use that place, too.
"""

from __future__ import annotations

import logging
from copy import copy
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
        # Taken out of a copy: another engine's connector behind this one would use the same name,
        # and all answers to a prompt may share the mapping.
        params = request.kv_transfer_params = copy(request.kv_transfer_params)
        is_asked_for = bool(params) and params.pop(REPORT, None) is True
        is_wanted = is_asked_for or LOGGER.isEnabledFor(logging.DEBUG)
        report = self._facade.report(request.request_id) if is_wanted else None
        if report is None:
            return None
        fields: dict[str, Any] = {
            "loaded_tokens": {self._tiers[n]: tokens for n, tokens in report.loaded_tokens.items()},
            "waited_s": round(report.waited_s, 6),
        }
        if report.missed is not None:
            source, reason = report.missed
            fields["missed"] = {"tier": self._tiers[source], "reason": reason}
        log.debug("request is over", request=request.request_id, **fields)
        return {REPORT: fields} if is_asked_for else None
