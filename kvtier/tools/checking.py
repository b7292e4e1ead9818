"""Finds what an engine would refuse in a configuration, without an engine, and changes nothing.

An engine stops at the first thing that it refuses, minutes after its start. Here every key and
every tier is looked at by itself, so that all refusals that show without vLLM, without a device and
without the model are reported at once.

Looking at a folder may hang as its storage does, so each tier is looked at in a thread that is not
waited for longer than ``LOOK_S_MAX``. Before that, another process looks whether it answers.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.admission_policy import AdmissionContext
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier.plugin_api.options import shown
from kvtier.plugin_api.slot_memory import machine_memory_bytes
from kvtier.plugin_api.threads import BoundedCall
from kvtier.settings.extra_config import WHERE, cpu_bytes_to_use, read_settings
from kvtier.settings.plugins import (
    backend_class,
    is_storage_trouble,
    lasting_tiers,
    make_admission,
    make_policy,
)
from kvtier.settings.runtime_config import ADMIT_ALL, TierConfig
from kvtier.settings.secondary_tier import read_secondary_tier, refuse_behind_vllm
from kvtier.settings.vllm_keys import VLLMKeys
from kvtier.settings.weight_sources import (
    NO_WEIGHTS,
    is_weight_file,
    no_weight_files,
    why_out_of_sight,
)
from kvtier.tools.answering import ANSWER_S_MAX, silent_option

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CONNECTOR: Final = "OffloadingConnector"
MULTI_CONNECTOR: Final = "MultiConnector"
SPEC_NAME: Final = "KVTierOffloadingSpec"
SPEC_MODULE_PATH: Final = "kvtier.vllm"
VLLMS_SPEC_NAME: Final = "TieringOffloadingSpec"
TIER_CLASS: Final = "KVTierSecondaryTier"
READ_BY_VLLM: Final = ("type", "module_path", "backpressure")
"""Keys of an entry with that class that vLLM takes out."""

SOUND_TIER: Final = {"type": "memory", "capacity_bytes": 1}
SHARED_MEMORY_FOLDER: Final = "/dev/shm"  # noqa: S108 - looked at, never written to
LOOK_S_MAX: Final = 15.0
GIB: Final = 1 << 30


@dataclass
class Findings:
    """What was found. ``refused``: an engine would not start. Texts as an engine would say them."""

    refused: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)  #: an engine starts, and gets little of it
    not_checked: list[str] = field(default_factory=list)
    tiers: list[str] = field(default_factory=list)  #: one line a sound tier

    @property
    def count(self) -> int:
        """How many refusals and warnings there are."""
        return len(self.refused) + len(self.warned)

    def refuse(self, text: object) -> None:
        """Note a refusal, once."""
        if str(text) not in self.refused:
            self.refused.append(str(text))


def check(
    values: Mapping[str, Any],
    *,
    block_bytes: int = 0,
    offloading_gib: float | None = None,
    dp_rank: int = 0,
    model: str | None = None,
    load_format: str = "auto",
) -> Findings:
    """Look at a KV transfer configuration, or at its ``kv_connector_extra_config`` alone.

    ``block_bytes``: of one block of all workers; 0: not known. ``offloading_gib``: what
    ``--kv-offloading-size`` will be. ``model`` and ``load_format``: what vLLM is given. Takes a
    second at most, or ``LOOK_S_MAX`` for each tier whose storage hangs.
    """
    findings = Findings()
    if offloading_gib is not None and values.keys() & {"kv_connector", WHERE}:
        values = _as_vllm_completes(values)
    extra = _extra_config(values, findings)
    if extra is None:
        return findings
    if offloading_gib is not None:
        extra = {**extra, "cpu_bytes_to_use": offloading_gib * GIB}
    _check_primary(extra, block_bytes, findings)
    if _is_vllms_with_kvtier(extra):
        nameless = _check_entries(extra["secondary_tiers"], block_bytes, dp_rank, findings)
    else:
        nameless = _check_whole(extra, block_bytes, dp_rank, findings)
    _check_weights(nameless, model, load_format, findings)
    if not block_bytes:
        findings.not_checked.append(
            "whether blocks fit into cpu_bytes_to_use and each tier: give --block-bytes"
        )
    return findings


def _check_whole(
    extra: Mapping[str, Any], block_bytes: int, dp_rank: int, findings: Findings
) -> list[TierConfig]:
    """Look at all of a configuration of kvtier's own spec but its memory.

    Returns the tiers that get no ``weights_version``.
    """
    _check_spec(extra, findings)
    _check_keys({**extra, "secondary_tiers": None}, findings)
    tiers = extra.get("secondary_tiers")
    configs: list[TierConfig | None] = []
    if isinstance(tiers, list) and all(isinstance(tier, dict) for tier in tiers):
        configs = [_read_tier(index, tier, dp_rank, findings) for index, tier in enumerate(tiers)]
        _check_tiers(configs, block_bytes, findings)
    else:
        _check_keys({"secondary_tiers": tiers}, findings)
    policy = extra.get("eviction_policy")
    if isinstance(policy, str) and policy:
        _try(findings, lambda: make_policy(policy, 1))
    return [each for each in configs if each is not None and not extra.get("weights_version")]


def _check_weights(
    tiers: list[TierConfig], model: str | None, load_format: str, findings: Findings
) -> None:
    """Warn if what these tiers store could be found by nobody, for nothing names the weights."""
    try:
        lasting = ", ".join(lasting_tiers(tiers))
    except ConfigError:  # of a type, and told already
        return
    if not lasting:
        return
    if model is None:
        findings.not_checked.append(
            "whether the model's weights can be told from others: give --model"
        )
        return
    look = None
    if silent_option({"model": model}) is None:
        look = BoundedCall(partial(_why_nameless, model, load_format), "kvtier-model-check")
    if look is None or not look.wait(LOOK_S_MAX):
        findings.not_checked.append(
            f"whether the model's weights can be told from others: the storage of {model} does not "
            "answer"
        )
        return
    reason = look.result()
    if reason is not None:
        findings.warned.append(
            f"nothing tells the weights of {model} from others ({reason}): neither a restart nor "
            f"another engine would find what {lasting} stores. Name the weights by the key "
            "weights_version, a name for each change of them."
        )


def _why_nameless(model: str, load_format: str) -> str | None:
    """Return why nothing tells a model's weights from others; None: something does."""
    reason = why_out_of_sight(load_format, model)
    path = Path(model)
    if reason is None and load_format != NO_WEIGHTS and path.is_dir():
        files = (file for file in path.rglob("*") if is_weight_file(file))
        reason = None if next(files, None) else no_weight_files(path)
    return reason


def _is_vllms_with_kvtier(extra: Mapping[str, Any]) -> bool:
    """Tell whether this is for vLLM's own tiering, with a tier of kvtier's among its tiers."""
    tiers = extra.get("secondary_tiers")
    return (
        extra.get("spec_name") == VLLMS_SPEC_NAME
        and isinstance(tiers, list)
        and any(isinstance(tier, dict) and tier.get("type") == TIER_CLASS for tier in tiers)
    )


def _check_entries(
    entries: list[Any], block_bytes: int, dp_rank: int, findings: Findings
) -> list[TierConfig]:
    """Look at those entries of vLLM's list that are kvtier's.

    Returns the tiers that get no ``weights_version``.
    """
    configs: list[TierConfig | None] = []
    nameless: list[TierConfig] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, dict) and entry.get("type") == TIER_CLASS:
            config = _read_entry(index, entry, block_bytes, dp_rank, findings)
            configs.append(config)
            if config is not None and not entry.get("weights_version"):
                nameless.append(config)
        else:
            kind = entry.get("type") if isinstance(entry, dict) else entry
            findings.not_checked.append(f"secondary_tiers[{index}] ({shown(kind)}): it is vLLM's")
    _check_tiers(configs, block_bytes, findings)
    findings.not_checked.append(f"keys beside secondary_tiers: vLLM's {VLLMS_SPEC_NAME} reads them")
    return nameless


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
    if isinstance(tier, dict):  # what is wrong in it is told below, with the tier's name
        own["tier"] = SOUND_TIER

    def read(left: Mapping[str, Any]) -> None:
        read_secondary_tier(left, slot_count=1, block_bytes=max(1, block_bytes), dp_rank=dp_rank)

    _each_refusal(own, read, findings)
    config = _read_tier(index, tier, dp_rank, findings) if isinstance(tier, dict) else None
    if config is not None:
        _try(findings, lambda: refuse_behind_vllm(config))
    return config


def _as_vllm_completes(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration that vLLM makes of one, given ``--kv-offloading-size``.

    It names connector and role itself, after it has refused a connector without a role.
    """
    role = {} if values.get("kv_connector") else {"kv_role": "kv_both"}
    return {**values, "kv_connector": CONNECTOR, **role}


def _extra_config(values: Mapping[str, Any], findings: Findings) -> Mapping[str, Any] | None:
    """Return the part that kvtier reads; note what keeps vLLM from reading it at all."""
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


def _check_primary(extra: Mapping[str, Any], block_bytes: int, findings: Findings) -> None:
    try:
        size = cpu_bytes_to_use(extra)
    except ConfigError as refusal:
        findings.refuse(f"{refusal} (--kv-offloading-size of vLLM sets it too.)")
        return
    most = machine_memory_bytes()
    free = None
    with suppress(OSError):
        usage = os.statvfs(SHARED_MEMORY_FOLDER)
        free = usage.f_bavail * usage.f_frsize
    named = f"{WHERE}: cpu_bytes_to_use={shown(extra['cpu_bytes_to_use'])}"
    if most is not None and size > most:
        findings.refuse(
            f"{named} is more than the {most} bytes of memory that there are. Lower it."
        )
    elif free is not None and size > free:
        findings.refuse(
            f"{named} needs {size} bytes of shared memory, but {free} bytes are free in "
            f"{SHARED_MEMORY_FOLDER}. Lower cpu_bytes_to_use, or give the host more shared memory "
            "(docker run --shm-size, or an emptyDir volume with medium: Memory)."
        )
    elif size < block_bytes:
        findings.refuse(f"{named} holds no block of {block_bytes} bytes. Raise it.")


def _check_tiers(configs: list[TierConfig | None], block_bytes: int, findings: Findings) -> None:
    """Look at the tiers that could be read. None has another's place."""
    owner_of: dict[str, str] = {}
    for config in configs:
        if config is None:
            continue
        place = _check_tier(config, block_bytes, findings)
        if place is not None and owner_of.setdefault(place, config.name) != config.name:
            findings.refuse(
                f"secondary tiers {owner_of[place]} and {config.name} both use {place!r}. Give "
                "each tier a place of its own."
            )


def _check_tier(config: TierConfig, block_bytes: int, findings: Findings) -> str | None:
    """Look at one tier; return the place that it would use, if it has one."""
    before = findings.count
    _check_policies(config, block_bytes, findings)
    place: list[str | None] = []
    try:
        backend = backend_class(config.type)  # its import is not what may hang
    except ConfigError as refused:
        findings.refuse(refused)
        return None

    silent = silent_option(config.options)
    if silent is not None:
        _note_trouble(
            config,
            f"secondary tier {config.name}: {silent}={shown(config.options[silent])} has not "
            f"answered for {ANSWER_S_MAX:g} s: its storage hangs, or is very slow. Mend the "
            "storage, or name another.",
            findings,
        )
        return None

    context = BackendContext(block_bytes, Namespace(facts={}), config.name)

    def look_with(options: Mapping[str, Any]) -> None:
        try:
            place.append(backend.check_options(options, context))
        except ConfigError as refused:
            if not is_storage_trouble(refused.__cause__):
                raise
            _note_trouble(config, str(refused), findings)

    def look() -> None:
        try:
            _each_refusal(config.options, look_with, findings)
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            findings.refuse(
                f"secondary tier {config.name}: it can't be checked ({type(error).__name__}: "
                f"{error}), and an engine may refuse it. Tell who wrote this type of tier."
            )

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(LOOK_S_MAX)
    if thread.is_alive():
        _note_trouble(
            config,
            f"secondary tier {config.name}: its storage does not answer within {LOOK_S_MAX:g} s "
            f"({shown(dict(config.options))}). See to it, or name another.",
            findings,
        )
    elif findings.count == before:
        where = f" at {place[0]}" if place and place[0] else ""
        findings.tiers.append(f"{config.name}{where}")
    return place[0] if place else None


def _check_policies(config: TierConfig, block_bytes: int, findings: Findings) -> None:
    _try(findings, lambda: make_policy(config.eviction_policy, 1))
    if config.admission != ADMIT_ALL:
        context = AdmissionContext(block_bytes=max(1, block_bytes), slot_count=1)
        _try(findings, lambda: make_admission(config, context))


def _note_trouble(config: TierConfig, text: str, findings: Findings) -> None:
    """Note that a tier's storage can't be used now, which not every engine refuses."""
    if config.on_unusable == "start_without":
        findings.warned.append(
            f"{text} An engine starts without this tier, and takes it as soon as that is over."
        )
    else:
        findings.refuse(text)


def _read_tier(
    index: int, values: Mapping[str, Any], dp_rank: int, findings: Findings
) -> TierConfig | None:
    """Read a tier with what it has that is sound; None if that is not enough."""
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

    _each_refusal(values, read_one, findings)
    return read[0] if read else None


def _check_keys(values: Mapping[str, Any], findings: Findings) -> None:
    ignores = VLLMKeys()

    def read(left: Mapping[str, Any]) -> None:
        read_settings(left, slot_count=1, block_bytes=1, ignores=ignores)

    _each_refusal(values, read, findings)


def _each_refusal(
    values: Mapping[str, Any], read: Callable[[Mapping[str, Any]], None], findings: Findings
) -> None:
    """Note what is refused; leave the key at fault out, and go on until nothing is."""
    left = dict(values)
    while True:
        try:
            read(left)
        except ConfigError as refused:
            # A key that is missing because it was left out has been named already.
            if refused.key in left or refused.key not in values:
                findings.refuse(refused)
            if refused.key not in left:
                return
            del left[refused.key]
        else:
            return


def _try(findings: Findings, call: Any) -> None:  # noqa: ANN401 - whatever it returns
    try:
        call()
    except ConfigError as refusal:
        findings.refuse(refusal)
