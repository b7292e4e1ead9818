"""Refuses a place behind another ``OffloadingConnector`` in a ``MultiConnector``.

vLLM defines metrics for the first connector of each class, and ends its front end at a metric of
another one that is not among them: the engine would start, and end with its first request.
"""

from __future__ import annotations

from typing import Any, Final

from kvtier.errors import ConfigError

CONNECTOR: Final = "OffloadingConnector"


def check_connectors(spec_name: str, vllm_config: Any) -> None:  # noqa: ANN401 - vLLM is untyped here
    """Raise ``ConfigError`` if the first ``OffloadingConnector`` is another spec's.

    ``spec_name``: kvtier's. ``vllm_config``: of the whole engine; None if nobody knows it.
    """
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    entries = [
        entry
        for entry in extra.get("connectors", ())
        if isinstance(entry, dict) and entry.get("kv_connector") == CONNECTOR
    ]
    if not entries:
        return
    first = (entries[0].get("kv_connector_extra_config") or {}).get("spec_name")
    if first != spec_name:
        raise ConfigError(
            f"connectors: an {CONNECTOR} with spec_name={first!r} stands before the one with "
            f"spec_name={spec_name!r}. vLLM knows the metrics of the first one only, and would "
            "end at a metric of the other one's. Put kvtier's entry before it."
        )
