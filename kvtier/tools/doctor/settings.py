"""Rules of settings, vLLM's and a tier's: hashes, prefix caching, admission, events, release."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.admission_policy import AdmissionContext
from kvtier.plugin_api.options import shown
from kvtier.settings.plugins import lasting_tiers, make_admission
from kvtier.settings.runtime_config import ADMIT_ALL
from kvtier.settings.vllm_releases import TESTED, is_tested
from kvtier.tools.checking.announced import host_of, why_unreachable
from kvtier.tools.checking.rules import (
    ADMITS_NOTHING,
    EVENTS_UNREADABLE,
    HASH_SEED_RANDOM,
    PREFIX_CACHING_OFF,
    VLLM_UNTESTED,
)

if TYPE_CHECKING:
    from kvtier.plugin_api.admission_policy import AdmissionPolicy
    from kvtier.settings.runtime_config import TierConfig
    from kvtier.tools.checking.findings import Findings
    from kvtier.tools.doctor.subject import Subject

SEED_VARIABLE: Final = "PYTHONHASHSEED"
WITH_A_SEED: Final = ("xxhash", "xxhash_cbor")
"""Hashes that vLLM seeds at random, for each process, unless the variable is set."""

ENDPOINT: Final = "tcp://*:5557"
"""vLLM's default."""

TRIAL_REQUESTS: Final = 6
TRIAL_BLOCKS_MAX: Final = 1 << 14
TRIAL_BLOCKS: Final = 64
"""Blocks of a prompt offered to an admission policy, if the longest is not known."""


def look_at_settings(subject: Subject, findings: Findings) -> None:
    """Note settings that make a sound configuration useless."""
    _hashes(subject, findings)
    if subject.engine.no_enable_prefix_caching:
        findings.add(
            PREFIX_CACHING_OFF,
            "vLLM's own prefix caching is off (--no-enable-prefix-caching).",
            "Remove --no-enable-prefix-caching.",
        )
    for tier in subject.tiers:
        _admission(subject, tier, findings)
    _events(subject, findings)
    vllm = subject.machine.vllm
    if vllm is not None:
        note_if_untested(vllm.version, f"{vllm.package} {vllm.version} is installed", findings)


def note_if_untested(version: str, about: str, findings: Findings) -> None:
    """Note a release of vLLM that kvtier is not tested with. ``about``: its place, as a clause."""
    if not is_tested(version):
        findings.add(
            VLLM_UNTESTED,
            f"{about}, and kvtier is tested with {' and '.join(TESTED)}.",
            "Install one of these, or a kvtier that knows this release.",
        )


def _hashes(subject: Subject, findings: Findings) -> None:
    algorithm = subject.engine.prefix_caching_hash_algo
    if algorithm not in WITH_A_SEED or SEED_VARIABLE in subject.machine.environment:
        return
    try:
        lasting = ", ".join(lasting_tiers(subject.tiers))
    except ConfigError:  # of a type, and refused already
        return
    if lasting:
        findings.add(
            HASH_SEED_RANDOM,
            f"--prefix-caching-hash-algo {algorithm}, {SEED_VARIABLE} is not set, and what "
            f"{lasting} has outlives the engine.",
            f"Set {SEED_VARIABLE} to the same number for all engines, or the algorithm to sha256.",
        )


def _admission(subject: Subject, tier: TierConfig, findings: Findings) -> None:
    """Offer two prompts in turn to the tier's policy, again and again."""
    if tier.admission == ADMIT_ALL:
        return
    context = AdmissionContext(max(1, subject.block_bytes), subject.slots or TRIAL_BLOCKS)
    try:
        policy = make_admission(tier, context)
    except ConfigError:  # refused already
        return
    blocks = min(subject.prompt_blocks or TRIAL_BLOCKS, TRIAL_BLOCKS_MAX)
    if not _admits(policy, blocks):
        findings.add(
            ADMITS_NOTHING,
            f"secondary tier {tier.name}: admission {shown(tier.admission)} "
            f"{shown(dict(tier.admission_options))} admits no block of two prompts of {blocks} "
            f"blocks that {TRIAL_REQUESTS} requests have in turn.",
            "Raise remembered_blocks_max, or remove admission.",
        )


def _admits(policy: AdmissionPolicy, blocks: int) -> bool:
    prompts = [
        [bytes([which]) * 32 + n.to_bytes(4, "big") for n in range(blocks)] for which in (1, 2)
    ]
    for number in range(TRIAL_REQUESTS):
        request, keys = f"request-{number}", prompts[number % 2]
        if any(policy.admit(keys, request)) or policy.end_request(request, keys):
            return True
    return False


def _events(subject: Subject, findings: Findings) -> None:
    tiers = [tier.name for tier in subject.tiers if tier.enable_kv_events]
    text = subject.engine.kv_events_config
    if text is None:
        if tiers:
            findings.not_checked.append(
                f"whether a router can read the events of {', '.join(tiers)}: give "
                "--kv-events-config"
            )
        return
    config = _mapping(text)
    if not tiers and not config.get("enable_kv_cache_events"):
        return
    named = f"--kv-events-config {text}"
    if not config.get("enable_kv_cache_events") or config.get("publisher", "zmq") != "zmq":
        findings.add(
            EVENTS_UNREADABLE,
            f"{', '.join(tiers) or 'vLLM'}: events are made, and {named} publishes none.",
            'Set "enable_kv_cache_events" to true and "publisher" to "zmq".',
        )
        return
    endpoint = str(config.get("endpoint", ENDPOINT))
    why = why_unreachable(host_of(endpoint.rpartition("://")[2]))
    if why is not None and not endpoint.startswith(("tcp://0.0.0.0:", "tcp://[::]:")):
        findings.add(
            EVENTS_UNREADABLE,
            f"{named}: a router on another host does not reach {endpoint}.",
            f'Set "endpoint" to "{ENDPOINT}", unless the router runs on this host.',
        )
    if subject.extra.get("self_describing_kv_events") is not True:
        findings.add(
            EVENTS_UNREADABLE,
            f"{named}: without self_describing_kv_events a router takes only the events of blocks "
            "that it has seen on the GPU before.",
            'Set "self_describing_kv_events" to true in kv_connector_extra_config.',
        )
    if not tiers and subject.tiers:
        findings.not_checked.append(
            "whether routers should see the tiers: enable_kv_events is set per tier"
        )


def _mapping(text: str) -> dict[str, Any]:
    """Return the value of ``--kv-events-config``. Raises ``ConfigError``."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(
            f"--kv-events-config cannot be read as JSON ({problem}). Pass the same value as to "
            "vLLM."
        ) from None
    if isinstance(values, dict):
        return values
    raise ConfigError("--kv-events-config holds no mapping. Pass the same value as to vLLM.")
