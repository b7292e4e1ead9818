"""All rules of ``kvtier check`` and ``kvtier doctor``: severity, reason and page of a finding.

A finding adds the fact and the remedy. ``docs/how-to/run-the-doctor.md`` has the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Severity(StrEnum):
    """Severity of a finding, the worst first."""

    ERROR = "error"  #: an engine would not start, or a tier does not work
    WARNING = "warning"  #: an engine starts, but gains less than it could
    NOTE = "note"  #: may be intended


@dataclass(frozen=True)
class Rule:
    """One rule. ``docs``: a page below ``docs``, with its section."""

    name: str
    severity: Severity
    why: str
    docs: str


def _error(name: str, why: str, docs: str) -> Rule:
    return Rule(name, Severity.ERROR, why, docs)


def _warning(name: str, why: str, docs: str) -> Rule:
    return Rule(name, Severity.WARNING, why, docs)


_SHARING: Final = "how-to/share-a-folder.md#block-hashes"
_FILESYSTEMS: Final = "reference/filesystems.md#what-works"
_CAPACITY: Final = "how-to/size-your-tiers.md#how-many-tokens-fit"
_WRITERS: Final = "how-to/protect-shared-storage.md#who-may-write-there"
_SICK: Final = "how-to/watch-metrics.md#is-a-tier-sick"

# --- of kvtier check ---

REFUSED: Final = _error(
    "refused", "An engine would not start.", "how-to/check-a-configuration.md#check-a-configuration"
)
TRIAL_FAILED: Final = _error(
    "trial-failed",
    "An engine would start, and this tier would not work.",
    "how-to/check-a-configuration.md#try-the-storage",
)
UNUSABLE_NOW: Final = _warning(
    "unusable-now",
    "The engine goes without this tier for as long as that lasts.",
    "reference/configuration.md#on_unusable",
)
NAMELESS_WEIGHTS: Final = _warning(
    "nameless-weights",
    "Blocks of unknown weights are served to the engine that stored them only.",
    "how-to/change-weights.md#give-the-weights-a-name",
)
UNREACHABLE_ADDRESS: Final = _warning(
    "unreachable-address",
    "Other engines call that address and miss; this engine's log does not show it.",
    "how-to/prefill-decode.md#when-a-peer-fails",
)
RELATIVE_PATH: Final = _warning(
    "relative-path",
    "An engine that is started elsewhere has an empty tier.",
    "how-to/share-a-folder.md#when-its-filesystem-is-unmounted-or-the-folder-is-replaced",
)
NOT_MOUNTED: Final = _warning(
    "not-mounted",
    "The root filesystem fills up, and the disk that was meant stays empty.",
    "how-to/share-a-folder.md#when-its-filesystem-is-unmounted-or-the-folder-is-replaced",
)
CAPACITY_ABOVE_FILESYSTEM: Final = _warning(
    "capacity-above-filesystem",
    "The tier never gets the room that it was sized for.",
    _CAPACITY,
)

# --- of a machine and its settings ---

MEMORY_IN_USE: Final = _warning(
    "memory-in-use",
    "The kernel may kill the engine when all slots are used, or the engine ends at its start.",
    _CAPACITY,
)
PRIMARY_BELOW_GPU: Final = _warning(
    "primary-below-gpu-cache",
    "Host memory then holds little that the GPU does not hold already: it is hit seldom.",
    _CAPACITY,
)
PRIMARY_BELOW_PROMPT: Final = _warning(
    "primary-below-prompt",
    "A long prompt evicts its own blocks, and can't be loaded whole from any tier.",
    _CAPACITY,
)
CASCADES_BELOW_PROMPT: Final = _warning(
    "cascades-below-prompt",
    "The tail of a long prompt is deferred, and lost if it is evicted before the tier has room.",
    "reference/configuration.md#cascade_slots_fraction_max",
)
PREFIX_CACHING_OFF: Final = _warning(
    "prefix-caching-off",
    "The GPU then keeps no prefix: each one is loaded from host memory or a tier again.",
    "reference/configuration.md#vllms-keys",
)
HASH_SEED_RANDOM: Final = _warning(
    "hash-seed-random",
    "Each process hashes with a seed of its own: neither a restart nor another engine finds the "
    "stored blocks.",
    _SHARING,
)
ADMITS_NOTHING: Final = _warning(
    "admits-nothing",
    "The tier stays empty, so it never serves a block.",
    "reference/configuration.md#admission",
)
EVENTS_UNREADABLE: Final = _warning(
    "events-unreadable",
    "A router sends requests elsewhere, as it does not know what this engine has.",
    "how-to/behind-llm-d.md#behind-llm-ds-router",
)
VLLM_UNTESTED: Final = _warning(
    "vllm-untested",
    "kvtier starts if that release has what it needs, but the two have not been tested together.",
    "reference/vllm-releases.md#vllm-releases",
)

# --- of a tier's folder ---

FOLDER_IN_MEMORY: Final = _warning(
    "folder-in-memory",
    "It takes the memory that cpu_bytes_to_use could have, and is empty after a reboot.",
    _FILESYSTEMS,
)
FOLDER_IN_CONTAINER: Final = _warning(
    "folder-in-container",
    "A container's own layer is gone with the container, and often small and slow.",
    _FILESYSTEMS,
)
DISK_ON_NETWORK: Final = _warning(
    "disk-on-network",
    "A disk tier belongs to one engine: over a network it is slower, and still not shared.",
    _FILESYSTEMS,
)
NO_DIRECT: Final = _warning(
    "no-o-direct",
    "Blocks pass through the page cache, which takes memory and processor time for them.",
    "reference/filesystems.md#what-the-tiers-ask-of-a-filesystem",
)
CAPACITY_ABOVE_FREE: Final = _warning(
    "capacity-above-free",
    "The filesystem fills up before the tier does, and stores fail from then on.",
    _CAPACITY,
)
FOLDER_OF_ANOTHER: Final = _warning(
    "folder-of-another-user",
    "The tier can't be used, or its files are mixed with those of another user's engines.",
    "reference/filesystems.md#modes",
)
OPEN_TO_PLANTING: Final = _warning(
    "open-to-planting",
    "Anyone who can write there can plant blocks, and so change a model's answers.",
    _WRITERS,
)
LISTED_BY_ALL: Final = Rule(
    "listed-by-all",
    Severity.NOTE,
    "All users of the host can list the files and their times; only the owner can read blocks.",
    _WRITERS,
)
NAMESPACES_APART: Final = Rule(
    "namespaces-apart",
    Severity.NOTE,
    "Engines of one model that differ in this share the storage's room, but none of its blocks.",
    "how-to/share-a-folder.md#when-do-two-engines-share-blocks",
)

# --- measured ---

SLOWER_THAN_PREFILL: Final = _warning(
    "slower-than-prefill",
    "Computing is sooner done than loading, so the tier's blocks are mostly not used.",
    "explanation/load-or-recompute.md#how-it-is-decided",
)

# --- of a running engine ---

NO_ENGINE: Final = _error(
    "no-engine", "Nothing is known of it.", "how-to/is-it-helping.md#scrape-the-engines"
)
TIER_NOT_IN_USE: Final = _error(
    "tier-not-in-use", "The engine goes on without this tier, and computes instead.", _SICK
)
TIER_FAULTS: Final = _warning(
    "tier-faults", "Each block that is concerned is a miss, or was not stored.", _SICK
)
TOO_SMALL: Final = _warning(
    "too-small",
    "Blocks are recomputed or loaded again that a larger tier would have kept.",
    "how-to/is-it-helping.md#would-a-larger-disk-help",
)
NEVER_HIT: Final = _warning(
    "never-hit",
    "Writing to it costs, and nothing comes back.",
    "how-to/is-it-helping.md#why-did-requests-miss",
)
EVICTED_UNREAD: Final = _warning(
    "evicted-unread",
    "Loads and slots are spent on blocks that no request gets.",
    "how-to/is-it-helping.md#how-much-is-loaded-for-nothing",
)
STORES_DROPPED: Final = _warning(
    "stores-dropped",
    "Blocks that are not stored are computed again.",
    "how-to/is-it-helping.md#what-was-not-stored-and-why",
)
ENGINES_APART: Final = Rule(
    "engines-apart",
    Severity.NOTE,
    "Engines that differ in this find none of one another's blocks, though they share a tier.",
    "how-to/share-a-folder.md#when-do-two-engines-share-blocks",
)
OTHER_FORMATS: Final = _warning(
    "other-formats",
    "Blocks that another version or configuration of kvtier has stored are not served, and take "
    "room until they are overwritten or removed.",
    "reference/disk-format.md",
)
UNAUTHENTICATED: Final = _warning(
    "unauthenticated",
    "Another engine has other keys, or someone is planting blocks. Each of them is a miss.",
    "how-to/protect-shared-storage.md#engines-with-and-without-keys",
)

RULES: Final = tuple(each for each in tuple(globals().values()) if isinstance(each, Rule))
"""All of them, in this order."""
