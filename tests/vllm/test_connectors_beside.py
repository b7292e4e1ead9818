"""A tier of kvtier's in vLLM's own spec, among the connectors of a ``MultiConnector``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.vllm.workarounds.connectors_beside import OWN_SPEC, check_place_of_tier

TIER = "KVTierSecondaryTier"
NIXL = {"kv_connector": "NixlConnector"}


def offloading(spec_name: str, **extra: Any) -> dict[str, Any]:
    settings = {"spec_name": spec_name, **extra}
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": settings}


PLAIN = offloading("TieringOffloadingSpec")
WITH_TIER = offloading(
    "TieringOffloadingSpec",
    secondary_tiers=[{"type": "fs"}, {"type": TIER, "module_path": "kvtier.vllm"}],
)
OF_KVTIER = offloading(OWN_SPEC[0], spec_module_path=OWN_SPEC[1])


def check(*connectors: dict[str, Any]) -> None:
    """Check as the tier does: it knows its connector's own configuration first."""
    alone, whole = WITH_TIER["kv_connector_extra_config"], {"connectors": list(connectors)}
    configs = [
        SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
        for extra in (alone, whole)
    ]
    check_place_of_tier(TIER, *OWN_SPEC, configs)


@pytest.mark.parametrize("behind", [[], [NIXL], [OF_KVTIER], [NIXL, WITH_TIER]])
def test_it_may_stand_behind_what_defines_its_metrics(behind: list[dict[str, Any]]) -> None:
    check(*behind, WITH_TIER)
    check(*behind, WITH_TIER, PLAIN)


@pytest.mark.parametrize(
    "first", [PLAIN, {"kv_connector": "OffloadingConnector"}, offloading(OWN_SPEC[0])]
)
def test_it_may_not_stand_behind_an_offloading_connector_without_them(
    first: dict[str, Any],
) -> None:
    with pytest.raises(ConfigError, match=f"Put the entry with {TIER} before it"):
        check(NIXL, first, WITH_TIER)


def test_nobody_knowing_the_configuration_is_no_reason_to_refuse() -> None:
    check_place_of_tier(TIER, *OWN_SPEC, [])
    check_place_of_tier(TIER, *OWN_SPEC, [SimpleNamespace(kv_transfer_config=None)])
