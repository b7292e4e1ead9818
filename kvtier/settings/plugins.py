"""Finds backends, eviction policies and admission policies by their entry points."""

from __future__ import annotations

import errno
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError, StorageUnusable, StoreFault
from kvtier.plugin_api.admission_policy import AdmissionPolicy
from kvtier.plugin_api.backend import Backend, BackendContext, Namespace
from kvtier.plugin_api.eviction_policy import EvictionPolicy
from kvtier.plugin_api.log import log
from kvtier.plugin_api.offline import Offline
from kvtier.plugin_api.options import Options, nearest_name, shown
from kvtier.plugin_api.threads import BoundedCall
from kvtier.settings.runtime_config import ADMIT_ALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.metadata import EntryPoint

    from kvtier.plugin_api.admission_policy import AdmissionContext
    from kvtier.plugin_api.backend import BackendTraits
    from kvtier.settings.runtime_config import TierConfig

_MISTAKES: Final = frozenset(
    {
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOTDIR,
    }
)
"""These errors don't pass by themselves: a path is wrong."""

BACKENDS: Final = "kvtier.backends"
OFFLINE: Final = "kvtier.offline"
POLICIES: Final = "kvtier.eviction_policies"
ADMISSIONS: Final = "kvtier.admission_policies"

FALLBACK_POLICY: Final = "lru"

HOSTED: Final = frozenset({"example", "obj", "p2p"})
"""Types of vLLM's tiers that run in kvtier as the ``tier`` of a ``"vllm"`` one."""

NOT_YET: Final = frozenset({"kvcr"})
"""Types of vLLM's tiers that kvtier can't run."""


def make_backend(config: TierConfig, context: BackendContext) -> Backend:
    """Build the backend of one tier; may wait for its storage without end.

    Raises ``ConfigError`` for an unknown type or a bad setting, and
    ``StorageUnusable`` if the storage has a fault.
    """
    found = _find(BACKENDS, config.type, f"secondary tier {config.name}: type", Backend)
    try:
        backend: Backend = found.from_options(config.options, context)
    except ConfigError as refusal:
        if is_storage_trouble(refusal.__cause__):
            raise StorageUnusable(str(refusal)) from refusal
        raise
    except (OSError, StoreFault) as trouble:
        raise StorageUnusable(
            f"secondary tier {config.name}: its storage is not usable "
            f"({type(trouble).__name__}: {trouble}): fix it or configure another path."
        ) from trouble
    if unfit := _unfit(config, backend.traits):
        backend.discard()
        raise ConfigError(f"secondary tier {config.name}: {unfit}")
    return backend


def _unfit(config: TierConfig, traits: BackendTraits) -> str:
    """Return why a backend with these traits can't be used; empty: it can."""
    if traits.request_scoped and not config.may_be_request_scoped:
        return "it is request-scoped, which vLLM's own tiering does not support. Use kvtier's spec."
    if traits.capacity_blocks is not None and traits.capacity_blocks < 1:
        return f"it has room for capacity_blocks={traits.capacity_blocks}. Give it more room."
    return ""


def check_keys(tiers: Iterable[TierConfig], block_bytes: int) -> None:
    """Refuse the keys of tiers that their backends would refuse, before anything is made.

    Raises ``ConfigError``. Faults that only the storage shows, and storage that hangs, are left
    to the code that makes the tier.
    """
    for tier in tiers:
        found = _find(BACKENDS, tier.type, f"secondary tier {tier.name}: type", Backend)
        context = BackendContext(
            block_bytes, Namespace(facts={}), tier.name, read_only=tier.read_only
        )
        check = partial(found.check_keys, tier.options, context)
        try:
            call = BoundedCall(check, f"kvtier-{tier.name}-check")
            if call.wait(tier.start_timeout_s):  # else a file with keys lies on storage that hangs
                call.result()
        except ConfigError as refusal:
            if not is_storage_trouble(refusal.__cause__):
                raise
        except (OSError, StoreFault):
            continue


def is_storage_trouble(cause: BaseException | None) -> bool:
    """Return whether the cause is a fault of the storage, and not a wrong setting."""
    if isinstance(cause, OSError):
        return cause.errno not in _MISTAKES
    return isinstance(cause, StoreFault)


def backend_class(kind: str) -> type[Backend]:
    """Return the class registered for a tier type. Raises ``ConfigError`` if there is none."""
    found: type[Backend] = _find(BACKENDS, kind, "secondary_tiers: type", Backend)
    return found


def offline_classes() -> dict[str, type[Offline]]:
    """Return the classes that show a tier's storage to tools, by tier type.

    One that can't be loaded is left out, with a warning: it must not keep others from use.
    """
    classes: dict[str, type[Offline]] = {}
    for name in sorted(_installed(OFFLINE)):
        try:
            classes[name] = _find(OFFLINE, name, "tier type", Offline)
        except Exception as fault:  # noqa: BLE001 - a third party's import may raise anything
            log.warning("storage of a tier type cannot be shown", type=name, reason=str(fault))
    return classes


def lasting_tiers(tiers: Iterable[TierConfig]) -> list[str]:
    """Return the names of the tiers that outlive the engine's process, or are shared."""
    return [
        tier.name for tier in tiers if backend_class(tier.type).medium_of(tier.options) != "CPU"
    ]


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Build an eviction policy for ``capacity`` blocks. Raises ``ConfigError`` if unknown."""
    return _policy_class(name)(capacity)


@cache
def fallback_policy() -> Callable[[int], EvictionPolicy]:
    """Return the factory of the policy that replaces one that broke."""
    return _policy_class(FALLBACK_POLICY)


def _policy_class(name: str) -> type[EvictionPolicy]:
    found: type[EvictionPolicy] = _find(POLICIES, name, "eviction_policy", EvictionPolicy)
    return found


def policy_maker(
    config: TierConfig, traits: BackendTraits | None
) -> Callable[[], EvictionPolicy] | None:
    """Return the factory of a tier's own policy; None if it has no capacity to keep to, as yet."""
    if traits is None or traits.capacity_blocks is None:
        _policy_class(config.eviction_policy)
        return None
    return partial(make_policy, config.eviction_policy, traits.capacity_blocks)


def make_admission(config: TierConfig, context: AdmissionContext) -> AdmissionPolicy:
    """Build a tier's admission policy. Raises ``ConfigError`` for an unknown one, or bad options.

    Not for ``ADMIT_ALL``, which stands for no policy.
    """
    where = f"secondary tier {config.name}: admission"
    found = _find(ADMISSIONS, config.admission, where, AdmissionPolicy, also=(ADMIT_ALL,))
    policy: AdmissionPolicy = found(Options(config.admission_options, where), context)
    return policy


def _find(group: str, name: str, key: str, base: type, also: Sequence[str] = ()) -> Any:  # noqa: ANN401 - a class of ``base``
    """Load the class registered as ``name``. ``also``: names to list as known besides."""
    known = _installed(group)
    if name not in known:  # perhaps installed since this process looked
        _installed.cache_clear()
        known = _installed(group)
    entry = known.get(name)
    if entry is None and group == BACKENDS and name in HOSTED:
        raise ConfigError(
            f"{key}={name!r} is a tier of vLLM's own. Put its entry into one of kvtier's: "
            f'{{"type": "vllm", "tier": {{"type": "{name}", ...}}}}.'
        )
    if entry is None and group == BACKENDS and name in NOT_YET:
        raise ConfigError(
            f"{key}={name!r} is a tier of vLLM's own that is not there yet in kvtier. Go on with "
            "vLLM's TieringOffloadingSpec for this tier, or choose one of "
            f"{', '.join(sorted(known))}."
        )
    if entry is None:
        names = sorted([*known, *also])
        near = nearest_name(name, names)
        known_names = f". Known: {', '.join(names) or 'none'}. Choose one of these, or"
        raise ConfigError(
            f"{key}={shown(name)} is not installed"
            + (f"; did you mean {near!r}? If not," if near else known_names)
            + f" install the package that provides it (entry point {group})."
        )
    try:
        found = entry.load()
    except ImportError as missing:
        raise ConfigError(
            f"{key}={name!r}: {entry.value!r} can't be imported ({missing}). Install its "
            "requirements."
        ) from missing
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(
            f"{key}={name!r}: the entry point {entry.value!r} is not a subclass of "
            f"{base.__module__}.{base.__name__}. Ask the package's author to mend it."
        )
    return found


@cache  # looking through all installed packages takes 8 ms
def _installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name."""
    from importlib.metadata import entry_points  # noqa: PLC0415 - a fifth of the import time

    return {entry.name: entry for entry in entry_points(group=group)}
