"""Checks each tier by itself, and tries its storage if requested.

Reading a folder may hang if its storage does, so each tier is checked in a thread, for
``LOOK_S_MAX`` at most. Before that, another process checks whether the storage responds. All tiers
are checked at once: one that hangs does not delay the others.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvtier.errors import ConfigError
from kvtier.plugin_api.admission_policy import AdmissionContext
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier.plugin_api.options import shown
from kvtier.plugin_api.threads import BoundedCall
from kvtier.settings.plugins import (
    backend_class,
    is_storage_trouble,
    make_admission,
    make_policy,
)
from kvtier.settings.runtime_config import ADMIT_ALL
from kvtier.tools.answering import ANSWER_S_MAX, silent_option
from kvtier.tools.checking.announced import doubts_of_address
from kvtier.tools.checking.findings import Findings
from kvtier.tools.checking.places import doubts_of_place
from kvtier.tools.terminal import progress
from kvtier_backends.posix import NO_ROOM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvtier.plugin_api.backend import Backend
    from kvtier.settings.runtime_config import TierConfig
    from kvtier.tools.checking.findings import Finding

    LookAtPlace: TypeAlias = Callable[[TierConfig, str], Iterable[Finding]]

LOOK_S_MAX: Final = 15.0
UNKNOWN: Final = Namespace(facts={})
INTERRUPTED_S_MAX: Final = 0.5
"""Time after Ctrl-C for a trial to remove what it has stored."""


def check_tiers(
    configs: Sequence[TierConfig],
    block_bytes: int,
    findings: Findings,
    *,
    connect: bool,
    wait_s: float | None = None,
    look_at_place: LookAtPlace = doubts_of_place,
) -> None:
    """Check the tiers that could be read. No two have the same place.

    ``wait_s``: for storage that does not respond, instead of ``LOOK_S_MAX``. ``look_at_place``:
    yields warnings about a tier's folder, and may hang.
    """
    if not configs:
        return
    owner_of: dict[str, str] = {}
    look = partial(
        _check_tier,
        block_bytes=block_bytes,
        connect=connect,
        wait_s=wait_s,
        look_at_place=look_at_place,
    )
    looks = [BoundedCall(partial(look, each), f"kvtier-{each.name}-look") for each in configs]
    try:
        with progress("looking at the tiers", len(configs)) as bar:
            for call in looks:
                call.result()
                bar.advance()
    except KeyboardInterrupt:
        for call in looks:
            call.wait(INTERRUPTED_S_MAX)
        raise
    for config, call in zip(configs, looks, strict=True):
        found, place = call.result()
        findings.merge(found)
        if place is not None and owner_of.setdefault(place, config.name) != config.name:
            findings.refuse(
                f"secondary tiers {owner_of[place]} and {config.name} both use {place!r}. Give "
                "each tier a place of its own."
            )


def _check_tier(
    config: TierConfig,
    block_bytes: int,
    *,
    connect: bool,
    wait_s: float | None,
    look_at_place: LookAtPlace,
) -> tuple[Findings, str | None]:
    """Check one tier; return the findings, and the place that it would use, if it has one."""
    findings = Findings()
    _check_policies(config, block_bytes, findings)
    where = f"secondary tier {config.name}"
    try:
        backend = backend_class(config.type)  # its import does not hang
    except ConfigError as refused:
        findings.refuse(refused)
        return findings, None
    silent = silent_option(config.options, wait_s)
    if silent is not None:
        _note_trouble(
            config,
            f"{where}: {silent}={shown(config.options[silent])} has not "
            f"answered for {wait_s or ANSWER_S_MAX:g} s: its storage hangs, or is very slow. Mend "
            "the storage, or name another.",
            findings,
        )
        return findings, None
    context = BackendContext(block_bytes, UNKNOWN, config.name, read_only=config.read_only)
    place: list[str] = []
    doubts: list[Finding] = [*doubts_of_address(config)]

    def look() -> None:
        place.extend(_look(backend, config, context, findings))
        if "".join(place).startswith("/"):
            doubts.extend(look_at_place(config, place[0]))

    running = BoundedCall(look, f"kvtier-{config.name}-check")
    if not running.wait(wait_s or LOOK_S_MAX):
        _note_trouble(
            config,
            f"{where}: its storage does not answer within {wait_s or LOOK_S_MAX:g} s "
            f"({shown(dict(config.options))}). See to it, or name another.",
            findings,
        )
        return findings, None
    try:
        running.result()
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        whose = "See to its storage" if isinstance(error, OSError) else "Tell who wrote its type"
        findings.refuse(
            f"{where}: it can't be checked ({type(error).__name__}: {error}), and an engine may "
            f"refuse it. {whose}."
        )
    at = "".join(place)
    if connect and not findings.found:
        _connect(backend, config, context, findings, is_folder=at.startswith("/"))
    if len(findings.failed) == len(findings.found):  # an engine would start with it
        findings.tiers.append(f"{config.name} at {at}" if at else config.name)
    findings.extend(doubts, where)
    return findings, at or None


def _look(
    backend: type[Backend], config: TierConfig, context: BackendContext, findings: Findings
) -> list[str]:
    """Note the backend's refusals; return its place, in a list, if it could be determined."""
    place: list[str] = []

    def look_with(options: Mapping[str, Any]) -> None:
        try:
            place.append(backend.check_options(options, context) or "")
        except ConfigError as refused:
            if not is_storage_trouble(refused.__cause__):
                raise
            _note_trouble(config, str(refused), findings)

    findings.refuse_each(config.options, look_with)
    return place


def _connect(
    backend: type[Backend],
    config: TierConfig,
    context: BackendContext,
    findings: Findings,
    *,
    is_folder: bool,
) -> None:
    """Let the backend try its storage, and note the result.

    An engine reaches servers after its start, but prepares folders before: a fault of one is
    refused, except for a full disk, whose blocks can be loaded.
    """
    at_start = partial(_note_trouble, config, findings=findings) if is_folder else findings.fail
    call = partial(backend.check_connection, config.options, context)
    running = BoundedCall(call, f"kvtier-{config.name}-connect")
    where = f"secondary tier {config.name}"
    if not running.wait(LOOK_S_MAX):
        at_start(f"{where}: no answer within {LOOK_S_MAX:g} s. See to its storage.")
        return
    try:
        done = running.result()
    except ConfigError as failed:
        is_full = isinstance(failed.__cause__, OSError) and failed.__cause__.errno in NO_ROOM
        (findings.fail if is_full else at_start)(str(failed))
    except Exception as error:  # noqa: BLE001 - a backend may raise anything
        findings.fail(f"{where}: {type(error).__name__}: {error}")
    else:
        if done is None:
            findings.not_checked.append(f"whether {config.name} works: its type has no trial of it")
        else:
            findings.noted.append(f"tier {config.name}: {done}")


def _check_policies(config: TierConfig, block_bytes: int, findings: Findings) -> None:
    findings.attempt(lambda: make_policy(config.eviction_policy, 1))
    if config.admission != ADMIT_ALL:
        context = AdmissionContext(block_bytes=max(1, block_bytes), slot_count=1)
        findings.attempt(lambda: make_admission(config, context))


def _note_trouble(config: TierConfig, text: str, findings: Findings) -> None:
    """Note that a tier's storage can't be used now; not every engine refuses that."""
    if config.on_unusable == "skip":
        findings.trouble(
            text, "An engine starts without this tier, and takes it as soon as that is over."
        )
    else:
        findings.refuse(text)
