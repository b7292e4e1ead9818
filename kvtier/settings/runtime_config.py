"""Every setting of the runtime, checked at the door.

The keys are those of vLLM's ``kv_connector_extra_config`` where vLLM has
them, and keep their meaning; the others are kvtier's own. A bad value raises
``ConfigError`` with key, value and remedy before anything is started.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast, get_args

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import CellKind
from kvtier.plugin_api.options import Options, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Ignores: TypeAlias = Callable[[str, str | None], bool]
    """Tells whether to pass over an unknown key, of a tier's type or (None) of the whole."""

DEFAULT_POLICY: Final = "reuse"

ADMIT_ALL: Final = "all"
"""The admission of a tier that every block is written to: no policy at all."""

NEW_GENERATION: Final = "new_generation"
KEEP: Final = "keep"

_NO_BACKPRESSURE: Final = (
    "has no meaning here: kvtier bounds what is in flight itself. "
    "Remove it, or set cascade_slots_fraction_max"
)


OnUnusable: TypeAlias = Literal["refuse", "start_without"]
"""What an engine does whose tier can't be used while it starts."""

START_TIMEOUT_S_MAX: Final = 3600.0


@dataclass(frozen=True)
class TierConfig:
    """One entry of ``secondary_tiers``: what the layers above the backend read."""

    name: str  #: its number from 1 and its type, e.g. ``"1:fs"``, as in vLLM's metric labels
    type: str
    options: Mapping[str, Any] = field(default_factory=dict)  #: the backend's own keys
    locality: str | None = None  #: LOCAL, REMOTE or None: relative to this engine
    enable_kv_events: bool = False
    request_level: bool = False  #: wants all blocks of a request, prefix hits too
    eviction_policy: str = DEFAULT_POLICY  #: used where the backend has a capacity
    admission: str = ADMIT_ALL  #: which blocks are written to the tier
    admission_options: Mapping[str, Any] = field(default_factory=dict)
    cell: CellKind | None = None  #: where the tier runs; None: as its backend prefers
    probe_timeout_s: float = 1.0
    promote_timeout_s: float = 10.0
    store_timeout_s: float = 60.0
    start_timeout_s: float = 60.0  #: for the backend to be made: then its storage hangs
    on_unusable: OnUnusable = "refuse"  #: what if the storage can't be used at the start

    @classmethod
    def from_mapping(
        cls, number: int, values: Mapping[str, Any], ignores: Ignores | None = None
    ) -> TierConfig:
        """Read one entry; ``number`` counts from 1. Keys unknown here are the backend's."""
        kind = Options(values, f"secondary_tiers[{number - 1}]").text("type")
        options = Options(values, f"secondary_tiers[{number - 1}] ({kind})")
        admission = dict(_policy_mapping(options, "admission", ADMIT_ALL))
        config = cls(
            name=f"{number}:{kind}",
            type=kind,
            locality=options.text("locality", choices=("LOCAL", "REMOTE"))
            if options.has("locality")
            else None,
            enable_kv_events=options.flag("enable_kv_events", default=False),
            request_level=options.text(
                "offload_policy", "chunk_level", choices=("chunk_level", "request_level")
            )
            == "request_level",
            eviction_policy=options.text("eviction_policy", DEFAULT_POLICY),
            admission=admission.pop("policy"),
            admission_options=admission,
            cell=cast("CellKind", options.text("cell", choices=get_args(CellKind)))
            if options.has("cell")
            else None,
            probe_timeout_s=options.number("probe_timeout_s", cls.probe_timeout_s),
            promote_timeout_s=options.number("promote_timeout_s", cls.promote_timeout_s),
            store_timeout_s=options.number("store_timeout_s", cls.store_timeout_s),
            start_timeout_s=options.number(
                "start_timeout_s", cls.start_timeout_s, maximum=START_TIMEOUT_S_MAX
            ),
            on_unusable=cast(
                "OnUnusable", options.text("on_unusable", "refuse", choices=get_args(OnUnusable))
            ),
            options={
                key: value
                for key, value in values.items()
                if key not in _TIER_KEYS and not (ignores is not None and ignores(key, kind))
            },
        )
        if config.admission == ADMIT_ALL:
            Options(admission, f"{options.where}: admission ({ADMIT_ALL})").finish()
        options.refuse("backpressure", _NO_BACKPRESSURE)
        options.refuse(
            "module_path",
            "has no meaning here: kvtier finds backends by the entry point kvtier.backends. "
            "Install the backend's package and remove module_path",
        )
        return config


def _of_weights(options: Options) -> dict[str, str]:
    """Read what a reset says of the model's weights, and what they are called."""
    has_name = options.has("weights_version")
    return {
        "on_reset": options.text("on_reset", NEW_GENERATION, choices=(NEW_GENERATION, KEEP)),
        "weights_version": options.text("weights_version") if has_name else "",
    }


def _policy_mapping(options: Options, key: str, default: str) -> dict[str, Any]:
    """Read a policy given by its name, or as ``{"policy": name, ...}`` with its own options."""
    if not options.is_mapping(key):
        return {"policy": options.text(key, default)}
    values = options.mapping(key)
    name = Options(values, f"{options.where}: {key}").text("policy")
    return {**values, "policy": name}


_TIER_KEYS: Final = frozenset(
    {
        "type",
        "locality",
        "enable_kv_events",
        "offload_policy",
        "eviction_policy",
        "admission",
        "cell",
        "probe_timeout_s",
        "promote_timeout_s",
        "store_timeout_s",
        "start_timeout_s",
        "on_unusable",
    }
)


@dataclass(frozen=True)
class RuntimeConfig:
    """All settings of one runtime. Times in seconds, sizes in blocks unless named otherwise."""

    slot_count: int
    block_bytes: int
    eviction_policy: str = DEFAULT_POLICY
    store_threshold: int = 0
    max_tracker_size: int = 64_000
    tiers: tuple[TierConfig, ...] = ()
    on_reset: str = NEW_GENERATION  #: what a reset says about the weights
    weights_version: str = ""  #: what the weights are called that the engine begins with
    lease_timeout_s: float = 60.0
    close_timeout_s: float = 5.0
    store_reserve_fraction: float = 1 / 16  #: of the slots, never held by promotions
    cascade_slots_fraction_max: float = 0.5  #: of the slots, pinned by one tier's cascades
    abandoned_slots_fraction_max: float = 0.125  #: of the slots, lost to one hung tier
    job_blocks_max: int = 64
    jobs_in_flight_max: int = 1_024
    mailbox_messages_max: int = 8_192
    known_keys_max: int = 1_000_000
    breaker_failures_max: int = 3  #: failures in a row that open a tier's breaker
    breaker_pause_s: float = 1.0  #: the first pause; each failed trial doubles it
    breaker_pause_s_max: float = 60.0

    def __post_init__(self) -> None:
        """Check the relations between settings."""
        if self.slot_count < 1:
            raise ConfigError(
                f"slot_count={self.slot_count!r} must be at least 1: give the primary tier room "
                f"for one block of {self.block_bytes} bytes (raise cpu_bytes_to_use)."
            )
        if not 0 <= self.store_reserve_fraction < 1:
            raise refusal(
                "store_reserve_fraction",
                f"store_reserve_fraction={self.store_reserve_fraction!r} must be at least 0 and "
                "below 1: promotions need some slots too.",
            )
        if 2 * self.jobs_in_flight_max >= self.mailbox_messages_max:
            raise refusal(
                "jobs_in_flight_max",
                f"jobs_in_flight_max={self.jobs_in_flight_max!r} must be below half of "
                f"mailbox_messages_max={self.mailbox_messages_max!r}: each job and each probe "
                "needs room to be sent. Lower the first or raise the second.",
            )
        if self.breaker_pause_s > self.breaker_pause_s_max:
            raise refusal(
                "breaker_pause_s",
                f"breaker_pause_s={self.breaker_pause_s!r} must be at most "
                f"breaker_pause_s_max={self.breaker_pause_s_max!r}: the first pause is the "
                "shortest. Lower the first or raise the second.",
            )

    @property
    def keeps_on_reset(self) -> bool:
        """Whether tiers serve what they have after a reset that names no weights."""
        return self.on_reset == KEEP

    @property
    def store_reserve_slots(self) -> int:
        """Slots that promotions never hold; 0 only where there is a single slot."""
        wanted = max(1, int(self.slot_count * self.store_reserve_fraction))
        return min(wanted, self.slot_count - 1)

    @property
    def cascade_slots_max(self) -> int:
        """Slots that one tier's cascades may pin at once."""
        return max(1, int(self.slot_count * self.cascade_slots_fraction_max))

    @property
    def abandoned_slots_max(self) -> int:
        """Slots that one tier may leave in quarantine before it gets no more loads."""
        return int(self.slot_count * self.abandoned_slots_fraction_max)

    @property
    def evict_batch_slots(self) -> int:
        """How many victims are asked for when a promotion finds no free slot."""
        return max(1, min(64, self.slot_count // 32))

    @classmethod
    def from_mapping(
        cls,
        values: Mapping[str, Any],
        *,
        slot_count: int,
        block_bytes: int,
        read_elsewhere: tuple[str, ...] = (),
        ignores: Ignores | None = None,
    ) -> RuntimeConfig:
        """Read ``kv_connector_extra_config``.

        ``read_elsewhere``: keys that vLLM itself reads. ``ignores``: asked of unknown ones.
        """
        where = "kv_connector_extra_config"
        options = Options(values, where)
        options.allow(*read_elsewhere)
        options.refuse("backpressure", _NO_BACKPRESSURE)
        options.refuse(
            "cache_policy_module_path",
            "has no meaning here: kvtier finds policies by the entry point "
            "kvtier.eviction_policies. Install the policy's package and remove the key",
        )
        config = cls(
            slot_count=slot_count,
            block_bytes=block_bytes,
            eviction_policy=options.text("eviction_policy", DEFAULT_POLICY),
            store_threshold=options.integer("store_threshold", 0),
            max_tracker_size=options.integer("max_tracker_size", cls.max_tracker_size, minimum=1),
            tiers=tuple(
                TierConfig.from_mapping(number, tier, ignores)
                for number, tier in enumerate(options.mappings("secondary_tiers"), start=1)
            ),
            **_of_weights(options),
            lease_timeout_s=options.number("lease_timeout_s", cls.lease_timeout_s),
            close_timeout_s=options.number("close_timeout_s", cls.close_timeout_s),
            store_reserve_fraction=options.number(
                "store_reserve_fraction", cls.store_reserve_fraction, above=-1e-9, maximum=0.999
            ),
            cascade_slots_fraction_max=options.number(
                "cascade_slots_fraction_max", cls.cascade_slots_fraction_max, maximum=1.0
            ),
            abandoned_slots_fraction_max=options.number(
                "abandoned_slots_fraction_max", cls.abandoned_slots_fraction_max, maximum=1.0
            ),
            job_blocks_max=options.integer("job_blocks_max", cls.job_blocks_max, minimum=1),
            jobs_in_flight_max=options.integer(
                "jobs_in_flight_max", cls.jobs_in_flight_max, minimum=1
            ),
            mailbox_messages_max=options.integer(
                "mailbox_messages_max", cls.mailbox_messages_max, minimum=4
            ),
            known_keys_max=options.integer("known_keys_max", cls.known_keys_max),
            breaker_failures_max=options.integer(
                "breaker_failures_max", cls.breaker_failures_max, minimum=1
            ),
            breaker_pause_s=options.number("breaker_pause_s", cls.breaker_pause_s),
            breaker_pause_s_max=options.number("breaker_pause_s_max", cls.breaker_pause_s_max),
        )
        options.finish(None if ignores is None else lambda key: ignores(key, None))
        return config
