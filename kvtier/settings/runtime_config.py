"""Holds every setting of the runtime, checked before anything starts.

Keys that vLLM's ``kv_connector_extra_config`` has too keep vLLM's names and
meaning; the others are kvtier's own. A bad value raises
``ConfigError`` with key, value and remedy before anything is started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping  # noqa: TC003 - a field's type, read at run time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta

from kvtier.errors import ConfigError
from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.backend import Isolation  # noqa: TC001 - likewise
from kvtier.plugin_api.options import Options, refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    Ignores: TypeAlias = Callable[[str, str | None], bool]
    """Returns whether to ignore an unknown key, of a tier's type or (None) of the top level."""

DEFAULT_POLICY: Final = "reuse"

_NAMES: Final = re.compile(r"[A-Za-z0-9._-]{1,32}")

ADMIT_ALL: Final = "all"
"""The admission of a tier that every block is written to: no policy at all."""

Locality: TypeAlias = Literal["LOCAL", "REMOTE"]
OffloadPolicy: TypeAlias = Literal["chunk_level", "request_level"]
LoadPolicy: TypeAlias = Literal["auto", "always"]
MediaIds: TypeAlias = Literal["engine", "trust"]
OnReset: TypeAlias = Literal["new_generation", "keep"]
OnUnusable: TypeAlias = Literal["refuse", "skip"]


@dataclass(frozen=True)
class TierConfig:
    """One entry of ``secondary_tiers``: the part that the layers above the backend read."""

    type: option.Text
    """one of [kvtier's types](../how-to/choose-a-tier.md), or one that you have installed"""
    name: option.ReadApart[str] = ""
    """the tier's label in metrics and logs, such as `"nvme"`; if not given, its number and type, as
    in `1:disk`. A name outlives a new order of tiers. Refused: a name that another tier has"""
    options: Mapping[str, Any] = field(default_factory=dict)  #: the backend's own keys
    locality: Locality | None = None
    """where the tier is, for KV events"""
    enable_kv_events: option.Flag = False
    """publish KV events for this tier"""
    offload_policy: OffloadPolicy = "chunk_level"
    """`"request_level"` stores all blocks of a request, including prefix hits"""
    eviction_policy: option.Text = DEFAULT_POLICY
    """the policy that evicts blocks, in a tier with a capacity of its own"""
    read_only: option.Flag = False
    """load blocks from the tier, but write none to it: for a bucket, a replica or a mount that
    others fill. Refused: beside `admission`"""
    admission: option.ReadApart[str] = ADMIT_ALL
    """the policy that chooses the blocks to write to the tier"""
    admission_options: Mapping[str, Any] = field(default_factory=dict)
    isolation: Isolation | None = None
    """where the tier runs: in a process of its own (default of most types), or in the engine's
    process"""
    probe_timeout_s: option.Seconds = 1.0
    """hang timeout for lookups (probes): the tier counts as hung if none completes within this
    time"""
    promote_timeout_s: option.Seconds = 10.0
    """hang timeout for loads: the tier counts as hung if none completes within this time; time in a
    queue does not count"""
    store_timeout_s: option.Seconds = 60.0
    """hang timeout for stores: the tier counts as hung if none completes within this time; their
    blocks stay pinned until the tier releases them"""
    start_timeout_s: Annotated[option.Seconds, Meta(le=3600.0)] = 60.0
    """how long the storage may take to respond while the engine starts; after that it counts as
    hung, see `on_unusable`"""
    startup_connect_timeout_s: Annotated[option.Seconds, Meta(le=3600.0)] = 1.0
    """how long the engine's start waits until a tier that needs a server has reached it; after that
    the engine starts, and the tier keeps trying to connect"""
    on_unusable: OnUnusable = "refuse"
    """effect of storage that cannot be used at the start"""
    may_be_request_scoped: bool = True  #: not behind vLLM's own tiering

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
        own = option.options_of(TierConfig)
        config = cls(
            name=_name(options) or f"{number}:{kind}",
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
                "chooses the blocks that are written, and a read_only tier writes none. Give one "
                "of them",
            )
        options.refuse(
            "module_path",
            "has no meaning here: kvtier finds backends by the entry point kvtier.backends. "
            "Install the backend's package and remove module_path",
        )
        return config


def _name(options: Options) -> str:
    """Read the name that a user gave the tier, if any. None looks like a number and a type."""
    name = options.text("name", "")
    if name and not _NAMES.fullmatch(name):
        raise options.error(
            "name", name, "must be 1 to 32 letters, digits, dots, hyphens or underscores"
        )
    return name


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
    eviction_policy: option.Text = DEFAULT_POLICY
    """the policy that evicts blocks of the primary tier. Refused: one that is not installed"""
    store_threshold: option.Integer = 0
    """number of times that a block must be offered before it is stored; 0 and 1 store at once"""
    max_tracker_size: Annotated[option.Integer, Meta(ge=1)] = 64_000
    """number of keys that `store_threshold` counts"""
    tiers: tuple[TierConfig, ...] = ()  #: of the key ``secondary_tiers``
    on_reset: OnReset = "new_generation"
    """the effect of vLLM's reset of the connector on blocks that were stored before"""
    media_ids: MediaIds = "engine"
    """images, audio and video whose ids clients chose: `"engine"` keeps their blocks in this
    engine's host memory; with `"trust"` tiers get them, too"""
    weights_version: option.Text = ""
    """a name for the weights: only engines and restarts with the same name share blocks"""
    store_reserve_fraction: Annotated[option.Number, Meta(ge=0.0, le=0.999)] = 1 / 16
    """share of the slots that promotions never hold, so that stores can continue"""
    cascade_slots_fraction_max: Annotated[option.Number, Meta(le=1.0)] = 0.5
    """share of the slots that the cascades of one tier may pin"""
    abandoned_slots_fraction_max: Annotated[option.Number, Meta(le=1.0)] = 0.125
    """share of the slots that one hung tier may hold before it gets no more loads"""
    lease_timeout_s: option.Seconds = 60.0
    """longest time that promoted blocks wait for their request"""
    wait_timeout_s: option.Seconds = 600.0
    """longest time that a request waits for tiers, including their queues; then it computes the
    missing blocks, which does not count as a failure of a tier"""
    close_timeout_s: option.Seconds = 5.0
    """longest time that closing waits for all tiers together"""
    job_blocks_max: Annotated[option.Integer, Meta(ge=1)] = 64
    """blocks in one job"""
    jobs_in_flight_max: Annotated[option.Integer, Meta(ge=1)] = 1_024
    """jobs in flight in one tier; must be below half of `mailbox_messages_max`"""
    mailbox_messages_max: Annotated[option.Integer, Meta(ge=4)] = 8_192
    """messages waiting for one tier"""
    directory_keys_max: option.Integer = 1_000_000
    """keys remembered as present in a tier, for which it need not be probed; about 170 bytes
    each"""
    load_policy: LoadPolicy = "auto"
    """`"auto"` computes blocks that take longer to load; `"always"` loads all that tiers have"""
    prefill_tokens_per_s: option.Number | None = None
    """the engine's speed at computing prompts; by default measured from the engine's steps"""
    record: option.Path | None = None
    """file to which the engine's requests are recorded, for
    [`kvtier replay` and `kvtier size`](../how-to/replay-a-trace.md#record-your-own-requests);
    `{dp_rank}` in it becomes the number of the engine. Needs the extra `compression`. Refused: a
    file that cannot be written, or that another engine writes; a model with several KV-cache
    groups"""
    record_bytes_max: Annotated[option.Size, Meta(ge=1 << 20)] = 1 << 30
    """bytes of the record: at half of them the file is renamed with the suffix `.1`, replacing the
    previous one, and a new one begins"""
    breaker_failures_max: Annotated[option.Integer, Meta(ge=1)] = 3
    """consecutive failures that open a tier's circuit breaker"""
    breaker_pause_s: option.Seconds = 1.0
    """first pause of an open breaker; each failed trial doubles it, up to `breaker_pause_s_max`"""
    breaker_pause_s_max: option.Seconds = 60.0
    """longest pause of an open breaker"""

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
        options.refuse(
            "cache_policy_module_path",
            "has no meaning here: kvtier finds policies by the entry point "
            "kvtier.eviction_policies. Install the policy's package and remove the key",
        )
        tiers = tuple(
            TierConfig.from_mapping(number, tier, ignores)
            for number, tier in enumerate(options.mappings("secondary_tiers"), start=1)
        )
        for number, tier in enumerate(tiers):
            if tier.name in {each.name for each in tiers[:number]}:
                entry = Options({}, f"secondary_tiers[{number}] ({tier.type})")
                raise entry.error("name", tier.name, "is another tier's. Give each its own")
        config = cls(
            slot_count=slot_count,
            block_bytes=block_bytes,
            tiers=tiers,
            **option.read(cls, options),
        )
        options.finish(None if ignores is None else lambda key: ignores(key, None))
        return config
