"""Holds every setting of the runtime, checked before anything starts.

Keys that vLLM's ``kv_connector_extra_config`` has too keep vLLM's names and
meaning; the others are kvtier's own. A bad value raises
``ConfigError`` with key, value and remedy before anything is started.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from kvtier.errors import ConfigError
from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.backend import Isolation
from kvtier.plugin_api.options import Options, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Ignores: TypeAlias = Callable[[str, str | None], bool]
    """Returns whether to ignore an unknown key, of a tier's type or (None) of the whole."""

DEFAULT_POLICY: Final = "reuse"

ADMIT_ALL: Final = "all"
"""The admission of a tier that every block is written to: no policy at all."""

_NO_BACKPRESSURE: Final = (
    "has no meaning here: kvtier bounds what is in flight itself. "
    "Remove it, or set cascade_slots_fraction_max"
)

Locality: TypeAlias = Literal["LOCAL", "REMOTE"]
OffloadPolicy: TypeAlias = Literal["chunk_level", "request_level"]
LoadPolicy: TypeAlias = Literal["auto", "always"]
MediaIds: TypeAlias = Literal["engine", "trust"]
OnReset: TypeAlias = Literal["new_generation", "keep"]
OnUnusable: TypeAlias = Literal["refuse", "skip"]


@dataclass(frozen=True)
class TierConfig:
    """One entry of ``secondary_tiers``: the part that the layers above the backend read."""

    name: str  #: its number from 1 and its type, e.g. ``"1:fs"``, as in vLLM's metric labels
    type: str = field(
        metadata=option.required(
            Options.text,
            "the backend: `disk`, `fs`, `redis`, `s3`, `mooncake`, `vllm`, `memory`, or a type "
            "that you have installed",
        )
    )
    options: Mapping[str, Any] = field(default_factory=dict)  #: the backend's own keys
    locality: Locality | None = option.text(
        None, "where the tier is, for KV events", choices=get_args(Locality)
    )
    enable_kv_events: bool = option.flag("publish KV events for this tier", default=False)
    offload_policy: OffloadPolicy = option.text(
        "chunk_level",
        '`"request_level"` stores all blocks of a request, including prefix hits',
        choices=get_args(OffloadPolicy),
    )
    eviction_policy: str = option.text(
        DEFAULT_POLICY, "which blocks leave first, in a tier with a capacity of its own"
    )
    read_only: bool = option.flag(
        "load what the tier has, and write nothing to it: for a bucket, a replica or a mount that "
        "others fill. Refused: beside `admission`",
        default=False,
    )
    admission: str = option.read_apart(ADMIT_ALL, "which blocks are written to the tier")
    admission_options: Mapping[str, Any] = field(default_factory=dict)
    isolation: Isolation | None = option.text(
        None,
        "where the tier runs: in a process of its own (default of all types but `memory` and "
        "`vllm`), or in the engine's process",
        choices=get_args(Isolation),
    )
    probe_timeout_s: float = option.seconds(
        1.0,
        "hang timeout for lookups (probes): the tier counts as hung if none completes within this "
        "time",
    )
    promote_timeout_s: float = option.seconds(
        10.0,
        "hang timeout for loads: the tier counts as hung if none completes within this time; "
        "time in a queue does not count",
    )
    store_timeout_s: float = option.seconds(
        60.0,
        "hang timeout for stores: the tier counts as hung if none completes within this time; "
        "their blocks stay pinned until the tier releases them",
    )
    start_timeout_s: float = option.seconds(
        60.0,
        "how long the storage may take to answer while the engine starts; after that it counts "
        "as hung, see `on_unusable`",
        maximum=3600.0,
    )
    startup_connect_timeout_s: float = option.seconds(
        1.0,
        "how long the engine's start waits until a tier that needs a server has reached it; after "
        "that the engine starts, and the tier goes on connecting",
        maximum=3600.0,
    )
    on_unusable: OnUnusable = option.text(
        "refuse",
        "what happens if the storage cannot be used at the start",
        choices=get_args(OnUnusable),
    )

    @property
    def request_level(self) -> bool:
        """Whether the tier wants all blocks of a request, prefix hits too."""
        return self.offload_policy == "request_level"

    @classmethod
    def from_mapping(
        cls, number: int, values: Mapping[str, Any], ignores: Ignores | None = None
    ) -> TierConfig:
        """Read one entry; ``number`` counts from 1. Keys unknown here are the backend's."""
        kind = Options(values, f"secondary_tiers[{number - 1}]").text("type")
        options = Options(values, f"secondary_tiers[{number - 1}] ({kind})")
        admission = dict(_policy_mapping(options, "admission", ADMIT_ALL))
        own = option.options_of(cls)
        config = cls(
            name=f"{number}:{kind}",
            admission=admission.pop("policy"),
            admission_options=admission,
            options={
                key: value
                for key, value in values.items()
                if key not in own and not (ignores is not None and ignores(key, kind))
            },
            **option.read(cls, options),
        )
        if config.admission == ADMIT_ALL:
            Options(admission, f"{options.where}: admission ({ADMIT_ALL})").finish()
        if config.read_only and options.has("admission"):
            raise options.error(
                "admission",
                values["admission"],
                "chooses what is written, and nothing is, with read_only. Give one of them",
            )
        options.refuse("backpressure", _NO_BACKPRESSURE)
        options.refuse(
            "module_path",
            "has no meaning here: kvtier finds backends by the entry point kvtier.backends. "
            "Install the backend's package and remove module_path",
        )
        return config


def _policy_mapping(options: Options, key: str, default: str) -> dict[str, Any]:
    """Read a policy given by its name, or as ``{"policy": name, ...}`` with its own options."""
    if not options.is_mapping(key):
        return {"policy": options.text(key, default)}
    values = options.mapping(key)
    name = Options(values, f"{options.where}: {key}").text("policy")
    return {**values, "policy": name}


@dataclass(frozen=True)
class RuntimeConfig:
    """All settings of one runtime. Times in seconds, sizes in blocks unless named otherwise."""

    slot_count: int
    block_bytes: int
    eviction_policy: str = option.text(
        DEFAULT_POLICY,
        "which blocks leave the primary tier first. Refused: a policy that is not installed",
    )
    store_threshold: int = option.integer(
        0, "how often a block must be offered before it is stored; 0 and 1 store at once"
    )
    max_tracker_size: int = option.integer(
        64_000, "how many keys `store_threshold` counts", minimum=1
    )
    tiers: tuple[TierConfig, ...] = ()  #: of the key ``secondary_tiers``
    on_reset: OnReset = option.text(
        "new_generation",
        "the effect of vLLM's reset of the connector on what was stored before",
        choices=get_args(OnReset),
    )
    media_ids: MediaIds = option.text(
        "engine",
        'images, audio and video whose ids clients chose: `"engine"` keeps their blocks in this '
        'engine\'s host memory; with `"trust"` tiers get them, too',
        choices=get_args(MediaIds),
    )
    weights_version: str = option.text(
        "", "a name for the weights: only engines and restarts with the same name share blocks"
    )
    store_reserve_fraction: float = option.number(
        1 / 16,
        "share of the slots that promotions never hold, so that stores can continue",
        minimum=0.0,
        maximum=0.999,
    )
    cascade_slots_fraction_max: float = option.number(
        0.5, "share of the slots that the cascades of one tier may pin", maximum=1.0
    )
    abandoned_slots_fraction_max: float = option.number(
        0.125,
        "share of the slots that one hung tier may hold before it gets no more loads",
        maximum=1.0,
    )
    lease_timeout_s: float = option.seconds(
        60.0, "how long promoted blocks wait for the request that wanted them"
    )
    wait_timeout_s: float = option.seconds(
        600.0,
        "how long a request waits for tiers at most, in their queues too; then it computes what "
        "has not arrived, which is no failure of a tier",
    )
    close_timeout_s: float = option.seconds(5.0, "how long closing waits for all tiers together")
    job_blocks_max: int = option.integer(64, "blocks in one job", minimum=1)
    jobs_in_flight_max: int = option.integer(
        1_024,
        "jobs in flight in one tier; must be below half of `mailbox_messages_max`",
        minimum=1,
    )
    mailbox_messages_max: int = option.integer(8_192, "messages waiting for one tier", minimum=4)
    directory_keys_max: int = option.integer(
        1_000_000,
        "keys remembered as present in a tier, for which it need not be probed; about 170 bytes "
        "each",
    )
    load_policy: LoadPolicy = option.text(
        "auto",
        '`"auto"` computes what would take longer to load; `"always"` loads all that tiers have',
        choices=get_args(LoadPolicy),
    )
    prefill_tokens_per_s: float | None = option.number(
        None,
        "how fast the engine computes prompts; without it, that is learnt from the engine's steps",
    )
    breaker_failures_max: int = option.integer(
        3, "consecutive failures that open a tier's circuit breaker", minimum=1
    )
    breaker_pause_s: float = option.seconds(
        1.0,
        "first pause of an open breaker; each failed trial doubles it, up to `breaker_pause_s_max`",
    )
    breaker_pause_s_max: float = option.seconds(60.0, "longest pause of an open breaker")

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
        """Whether tiers serve their earlier blocks after a reset that names no weights."""
        return self.on_reset == "keep"

    @property
    def store_reserve_slots(self) -> int:
        """Slots that promotions never hold; 0 only if there is a single slot."""
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
        """How many victims are requested when a promotion finds no free slot."""
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

        ``read_elsewhere``: keys that vLLM itself reads. ``ignores``: called for unknown ones.
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
            tiers=tuple(
                TierConfig.from_mapping(number, tier, ignores)
                for number, tier in enumerate(options.mappings("secondary_tiers"), start=1)
            ),
            **option.read(cls, options),
        )
        options.finish(None if ignores is None else lambda key: ignores(key, None))
        return config
