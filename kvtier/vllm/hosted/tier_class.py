"""Finds the classes of vLLM's tiers as vLLM does, and refuses those that kvtier can't host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.distributed import nixl_utils
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvtier.errors import ConfigError
from kvtier.plugin_api.log import log
from kvtier.plugin_api.options import Options
from kvtier.settings.hosted_tier import HostedOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

P2P: Final = "p2p"
"""vLLM's tier that loads blocks from other engines, and serves blocks to them."""

KVCR: Final = "kvcr"
"""Another tier, which kvtier can't host: it is refused before users install its dependencies."""

_NO_KVCR: Final = (
    "looks up and pins blocks of host memory in one call, for which kvtier needs another thread: "
    "its peers would find nothing. It also reports loads as ended that a peer may still write. "
    "Use p2p, or vLLM's TieringOffloadingSpec for it"
)


def class_of(tier: Mapping[str, Any], where: str) -> type[SecondaryTierManager]:
    """Return the class of one of vLLM's tiers. Raises ``ConfigError`` (``where``: for its text)."""
    options = Options(tier, f"{where}: tier")
    kind = options.text("type")
    if kind == KVCR and "module_path" not in tier:
        raise options.error("type", kind, _NO_KVCR)
    try:
        found: type[SecondaryTierManager] = SecondaryTierFactory.get_tier_class(dict(tier))
    except (ImportError, AttributeError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"{options.where}: type={kind!r} can't be loaded ({error}). Install its requirements, "
            "or correct type and module_path."
        ) from error
    if kind == P2P:
        _check_nixl(options)
    elif serves_peers(found):
        raise options.error(
            "type",
            kind,
            "serves the requests of other engines, which kvtier passes on to vLLM's p2p only. Use "
            "vLLM's TieringOffloadingSpec for it",
        )
    return found


def hosted_in(
    tier: Mapping[str, Any],
) -> tuple[type[SecondaryTierManager], dict[str, Any]] | None:
    """Return the hosted class and its configuration; None for a tier of another type.

    ``tier``: an entry of kvtier's ``secondary_tiers``. Raises ``ConfigError``.
    """
    if tier.get("type") != "vllm":
        return None
    hosted = HostedOptions.read({"tier": tier.get("tier")}, "secondary tier of type vllm").tier
    return class_of(hosted, "secondary tier of type vllm"), dict(hosted)


def info_keys_of(tier: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the labels that a hosted tier reports; not in every release."""
    hosted = hosted_in(tier)
    names = getattr(hosted and hosted[0], "config_info_keys", None)
    return () if hosted is None or names is None else tuple(names(hosted[1]))


def info_of(tier: SecondaryTierManager, name: str) -> Mapping[str, Any]:
    """Return the labels that a tier reports: none if it raises. ``name``: for the log."""
    info = getattr(tier, "config_info", None)
    try:
        return {} if info is None else dict(info())
    except Exception:  # noqa: BLE001 - third-party code, and labels are not worth a refusal
        log.warning("a tier of vLLM's reported no labels", tier=name, exc_info=True)
        return {}


def serves_peers(found: type[SecondaryTierManager]) -> bool:
    """Return whether a tier serves other engines' requests."""
    own: object = found.serve_external_requests
    return own is not SecondaryTierManager.serve_external_requests


def _check_nixl(options: Options) -> None:
    if nixl_utils.NixlWrapper is None:
        raise options.error("type", P2P, "needs NIXL, which is not installed: install nixl")
