"""Finds an engine's refusals of a configuration, without an engine, and changes nothing.

An engine stops at its first refusal, minutes after its start. Here every key and every tier is
checked by itself, so that all refusals that show without vLLM, a device and the model are reported
at once. ``tiers`` checks their storage, which may hang; ``places`` finds suspicious folders.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.errors import ConfigError
from kvtier.plugin_api.machine import ROOT
from kvtier.plugin_api.options import shown
from kvtier.plugin_api.threads import BoundedCall
from kvtier.recording.recorder import check_record
from kvtier.settings.extra_config import WHERE, cpu_bytes_to_use, read_settings
from kvtier.settings.host_memory import HostMemory
from kvtier.settings.plugins import lasting_tiers, make_policy
from kvtier.settings.secondary_tier import read_secondary_tier, refuse_behind_vllm
from kvtier.settings.vllm_keys import VLLMKeys
from kvtier.settings.weight_sources import (
    is_weight_file,
    no_weight_files,
    why_out_of_sight,
)
from kvtier.tools.answering import silent_option
from kvtier.tools.checking.engine_arguments import (
    DEFAULTS,
    BlockSize,
    EngineArguments,
    block_size_of,
)
from kvtier.tools.checking.findings import Findings
from kvtier.tools.checking.places import doubts_of_place
from kvtier.tools.checking.rules import NAMELESS_WEIGHTS
from kvtier.tools.checking.tiers import LOOK_S_MAX, check_tiers
from kvtier.tools.sizing.model_config import folder_in_cache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.settings.runtime_config import TierConfig
    from kvtier.tools.checking.tiers import LookAtPlace

CONNECTOR: Final = "OffloadingConnector"
MULTI_CONNECTOR: Final = "MultiConnector"
SPEC_NAME: Final = "KVTierOffloadingSpec"
SPEC_MODULE_PATH: Final = "kvtier.vllm"
VLLMS_SPEC_NAME: Final = "TieringOffloadingSpec"
TIER_CLASS: Final = "KVTierSecondaryTier"
READ_BY_VLLM: Final = ("type", "module_path", "backpressure")
"""Keys of an entry with that class that vLLM removes."""

SOUND_TIER: Final = {"type": "memory", "capacity_bytes": 1}
GIB: Final = 1 << 30


class Checked(NamedTuple):
    """Findings about a configuration, and its readable parts."""

    findings: Findings
    extra: Mapping[str, Any]  #: the part that kvtier reads; empty if there is none
    tiers: list[TierConfig]
    block: BlockSize
    model_answers: bool  #: whether the model's storage responds


def check(
    values: Mapping[str, Any],
    engine: EngineArguments = DEFAULTS,
    *,
    block_bytes: int = 0,
    connect: bool = False,
    wait_s: float | None = None,
    root: Path = ROOT,
    look_at_place: LookAtPlace = doubts_of_place,
) -> Checked:
    """Check a KV transfer configuration, or its ``kv_connector_extra_config`` alone.

    ``block_bytes``: of one block of all workers; 0: by the model's config. ``connect``: also try
    the storage of each tier. ``wait_s``: for the model's storage, and for that of all tiers
    together, instead of ``LOOK_S_MAX``; unless storage hangs, it takes a second at most.
    ``root``: the folder with ``proc`` and ``sys``. ``look_at_place``: see ``check_tiers``.
    """
    findings = Findings()
    offloading_gib = engine.kv_offloading_size
    if offloading_gib is not None and values.keys() & {"kv_connector", WHERE}:
        values = _as_vllm_completes(values)
    extra = _extra_config(values, findings)
    if extra is None:
        return Checked(findings, {}, [], BlockSize(0, 0), model_answers=False)
    if offloading_gib is not None:
        extra = {**extra, "cpu_bytes_to_use": offloading_gib * GIB}
    cached = None if engine.model is None else folder_in_cache(engine.model)
    places = {"model": engine.model, "cache": cached and str(cached)}
    answers = silent_option(places, wait_s) is None
    block = BlockSize(block_bytes, block_bytes)
    if not block_bytes:
        block = block_size_of(engine, extra, findings, answers=answers)
    sound = _check_primary(extra, block.least, engine.data_parallel_size, findings, root)
    if _is_vllms_with_kvtier(sound):
        tiers, nameless = _read_entries(
            sound["secondary_tiers"], block.certain, engine.dp_rank, findings
        )
    else:
        _check_spec(sound, findings)
        tiers = _read_whole(sound, engine.dp_rank, findings)
        _check_record(sound.get("record"), engine.dp_rank, findings, wait_s)
        nameless = [] if sound.get("weights_version") else tiers
    check_tiers(
        tiers, block.certain, findings, connect=connect, wait_s=wait_s, look_at_place=look_at_place
    )
    _check_weights(nameless, engine, findings, answers=answers, wait_s=wait_s)
    return Checked(findings, extra, tiers, block, model_answers=answers)


def _read_whole(extra: Mapping[str, Any], dp_rank: int, findings: Findings) -> list[TierConfig]:
    """Read a configuration of kvtier's own spec, except its memory. Returns its tiers."""
    _check_keys({**extra, "secondary_tiers": None}, findings)
    policy = extra.get("eviction_policy")
    if isinstance(policy, str) and policy:
        findings.attempt(lambda: make_policy(policy, 1))
    tiers = extra.get("secondary_tiers")
    if isinstance(tiers, list) and all(isinstance(tier, dict) for tier in tiers):
        read = [_read_tier(index, tier, dp_rank, findings) for index, tier in enumerate(tiers)]
        return [each for each in read if each is not None]
    _check_keys({"secondary_tiers": tiers}, findings)
    return []


def _check_record(given: object, dp_rank: int, findings: Findings, wait_s: float | None) -> None:
    try:
        extra = {"record": given}
        path = read_settings(extra, slot_count=1, block_bytes=1, dp_rank=dp_rank).record
    except ConfigError:  # told already
        return
    if path is None:
        return
    if silent_option({"record": path}, wait_s) is None:
        findings.attempt(partial(check_record, path))
    else:
        findings.refuse(f"{WHERE}: record={shown(given)}: its storage does not answer. Mend it.")


def _check_weights(
    tiers: list[TierConfig],
    engine: EngineArguments,
    findings: Findings,
    *,
    answers: bool,
    wait_s: float | None,
) -> None:
    """Warn if nothing identifies the weights, so that no engine finds blocks of these tiers."""
    try:
        lasting = ", ".join(lasting_tiers(tiers))
    except ConfigError:  # of a type, and reported already
        return
    model = engine.model
    if not lasting:
        return
    if model is None:
        findings.not_checked.append("whether the model's weights can be identified: give --model")
        return
    look = None
    if answers:
        call = partial(_why_nameless, model, engine.load_format)
        look = BoundedCall(call, "kvtier-model-check")
    if look is None or not look.wait(wait_s or LOOK_S_MAX):
        findings.not_checked.append(
            f"whether the model's weights can be identified: the storage of {model} does not answer"
        )
        return
    reason = look.result()
    if reason is not None:
        findings.add(
            NAMELESS_WEIGHTS,
            f"the weights of {model} cannot be identified ({reason}): neither a restart nor "
            f"another engine would find the blocks that {lasting} stores.",
            "Name the weights by the key weights_version, with a new name for each change.",
        )


def _why_nameless(model: str, load_format: str) -> str | None:
    """Return why a model's weights cannot be identified; None if they can."""
    reason = why_out_of_sight(load_format, model)
    path = Path(model)
    if reason is None and path.is_dir():
        files = (file for file in path.rglob("*") if is_weight_file(file))
        reason = None if next(files, None) else no_weight_files(path)
    return reason


def _is_vllms_with_kvtier(extra: Mapping[str, Any]) -> bool:
    """Return whether this is for vLLM's own tiering, with a kvtier tier among its tiers."""
    tiers = extra.get("secondary_tiers")
    return (
        extra.get("spec_name") == VLLMS_SPEC_NAME
        and isinstance(tiers, list)
        and any(isinstance(tier, dict) and tier.get("type") == TIER_CLASS for tier in tiers)
    )


def _read_entries(
    entries: list[Any], block_bytes: int, dp_rank: int, findings: Findings
) -> tuple[list[TierConfig], list[TierConfig]]:
    """Read kvtier's entries in vLLM's list.

    Returns the tiers, and those of them that get no ``weights_version``.
    """
    configs: list[TierConfig] = []
    nameless: list[TierConfig] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, dict) and entry.get("type") == TIER_CLASS:
            config = _read_entry(index, entry, block_bytes, dp_rank, findings)
            configs += [config] if config is not None else []
            if config is not None and not entry.get("weights_version"):
                nameless.append(config)
        else:
            kind = entry.get("type") if isinstance(entry, dict) else entry
            findings.not_checked.append(f"secondary_tiers[{index}] ({shown(kind)}): it is vLLM's")
    findings.not_checked.append(f"keys beside secondary_tiers: vLLM's {VLLMS_SPEC_NAME} reads them")
    return configs, nameless


def _read_entry(
    index: int, entry: Mapping[str, Any], block_bytes: int, dp_rank: int, findings: Findings
) -> TierConfig | None:
    """Read an entry, and the tier in it as if it stood in kvtier's own list."""
    if entry.get("module_path") != SPEC_MODULE_PATH:
        findings.refuse(
            f"secondary_tiers[{index}]: module_path={shown(entry.get('module_path'))}: vLLM would "
            f"not find {TIER_CLASS}. Set it to {SPEC_MODULE_PATH!r}."
        )
    own = {key: value for key, value in entry.items() if key not in READ_BY_VLLM}
    tier = entry.get("tier")
    if isinstance(tier, dict):  # its faults are reported below, with the tier's name
        own["tier"] = SOUND_TIER

    def read(left: Mapping[str, Any]) -> None:
        read_secondary_tier(left, slot_count=1, block_bytes=max(1, block_bytes), dp_rank=dp_rank)

    findings.refuse_each(own, read)
    config = _read_tier(index, tier, dp_rank, findings) if isinstance(tier, dict) else None
    if config is not None:
        findings.attempt(lambda: refuse_behind_vllm(config))
    return config


def _as_vllm_completes(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration that vLLM makes from one with ``--kv-offloading-size``.

    It names connector and role itself, after it has refused a connector without a role.
    """
    role = {} if values.get("kv_connector") else {"kv_role": "kv_both"}
    return {**values, "kv_connector": CONNECTOR, **role}


def _extra_config(values: Mapping[str, Any], findings: Findings) -> Mapping[str, Any] | None:
    """Return the part that kvtier reads; note the reasons why vLLM would not read it at all."""
    if "kv_connector" not in values and "kv_connector_extra_config" not in values:
        return values
    extra = values.get("kv_connector_extra_config")
    connector = values.get("kv_connector")
    if values.get("kv_role") not in ("kv_both", "kv_producer", "kv_consumer"):
        findings.refuse(
            f"kv_role={shown(values.get('kv_role'))}: vLLM needs one with kv_connector. Set it to "
            "'kv_both'."
        )
    if connector == MULTI_CONNECTOR and isinstance(extra, dict):
        return _of_multi_connector(extra, findings)
    if connector != CONNECTOR:
        findings.refuse(
            f"kv_connector={shown(connector)} does not read kvtier's keys. Set it to {CONNECTOR!r}."
        )
        return None
    if not isinstance(extra, dict):
        findings.refuse(f"{WHERE}={shown(extra)} must be a mapping.")
        return None
    return extra


def _of_multi_connector(extra: dict[str, Any], findings: Findings) -> Mapping[str, Any] | None:
    connectors = extra.get("connectors")
    entries = connectors if isinstance(connectors, list) else []
    ours = [
        entry
        for entry in entries
        if isinstance(entry, dict)
        and isinstance(entry.get(WHERE), dict)
        and (entry[WHERE].get("spec_name") == SPEC_NAME or _is_vllms_with_kvtier(entry[WHERE]))
    ]
    if len(ours) > 1:
        findings.refuse(
            f"connectors: {len(ours)} entries of the {MULTI_CONNECTOR} use kvtier, and all "
            "have one engine_id: put the tiers of all into the secondary_tiers of one."
        )
    offloading = [
        entry
        for entry in entries
        if isinstance(entry, dict) and entry.get("kv_connector") == CONNECTOR
    ]
    if ours and offloading and offloading[0] is not ours[0]:
        findings.refuse(
            f"connectors: another {CONNECTOR} stands before kvtier's. vLLM knows the metrics of "
            "the first one only, and would end at a metric of kvtier's. Put kvtier's entry first."
        )
    if not ours:
        findings.refuse(
            f"connectors={shown(connectors)}: no entry of the {MULTI_CONNECTOR} has "
            f"spec_name={SPEC_NAME!r}. Give it to one, with kv_connector {CONNECTOR!r}."
        )
        return None
    return _extra_config(ours[0], findings)


def _check_spec(extra: Mapping[str, Any], findings: Findings) -> None:
    for key, wanted in (("spec_name", SPEC_NAME), ("spec_module_path", SPEC_MODULE_PATH)):
        if extra.get(key) != wanted:
            findings.refuse(
                f"{WHERE}: {key}={shown(extra.get(key))}: vLLM would not use kvtier. Set it to "
                f"{wanted!r}."
            )


def _check_primary(
    extra: Mapping[str, Any], block_bytes: int, engines: int, findings: Findings, root: Path
) -> Mapping[str, Any]:
    """Check the size of host memory. Returns the keys that are not reported yet."""
    try:
        size = cpu_bytes_to_use(extra)
    except ConfigError as refusal:
        findings.refuse(f"{refusal} (--kv-offloading-size of vLLM sets it too.)")
        said = (refusal.key, refusal.misspelt)
        return {key: value for key, value in extra.items() if key not in said}
    value = extra["cpu_bytes_to_use"]
    try:
        of = f" for each of {engines} data-parallel engines" if engines > 1 else ""
        HostMemory(value, engines * size, of).require(root)
    except ConfigError as refusal:
        findings.refuse(refusal)
    else:
        if size < block_bytes:
            findings.refuse(
                f"{WHERE}: cpu_bytes_to_use={shown(value)} holds no block of {block_bytes} bytes. "
                "Raise it."
            )
    return extra


def _read_tier(
    index: int, values: Mapping[str, Any], dp_rank: int, findings: Findings
) -> TierConfig | None:
    """Read a tier from its sound keys; None if they are not enough."""
    read: list[TierConfig] = []

    def read_one(left: Mapping[str, Any]) -> None:
        # As many before it as there are, so that it is called by its own number.
        padded = [*[{"type": "memory"}] * index, dict(left)]
        config = read_settings(
            {"secondary_tiers": padded},
            slot_count=1,
            block_bytes=1,
            dp_rank=dp_rank,
            ignores=VLLMKeys(),
        )
        read.append(config.tiers[index])

    findings.refuse_each(values, read_one)
    return read[0] if read else None


def _check_keys(values: Mapping[str, Any], findings: Findings) -> None:
    ignores = VLLMKeys()

    def read(left: Mapping[str, Any]) -> None:
        read_settings(left, slot_count=1, block_bytes=1, ignores=ignores)

    findings.refuse_each(values, read)
