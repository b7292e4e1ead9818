"""Examines configurations and running engines: ``kvtier check`` first, then the doctor's rules.

It takes less than five seconds: it waits for ``WAIT_S`` at most for anything that may hang, and
checks as much as possible at once. ``kvtier check`` waits longer, for slow storage.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.checking import configuration
from kvtier.tools.checking.findings import Findings
from kvtier.tools.checking.rules import Severity
from kvtier.tools.doctor.folders import look_at_folder
from kvtier.tools.doctor.running import look_at_all, look_at_engine, read_running
from kvtier.tools.doctor.servers import look_at_servers
from kvtier.tools.doctor.settings import look_at_settings
from kvtier.tools.doctor.sizes import look_at_sizes
from kvtier.tools.doctor.subject import NO_ARGUMENTS, DoctorArguments, Machine, Subject
from kvtier.tools.sizing.context_length import read_context_length
from kvtier.tools.sizing.model_config import config_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.tools.doctor.running import RunningEngine

WAIT_S: Final = 1.0


def examine(
    values: Mapping[str, Any] | None,
    urls: Sequence[str] = (),
    engine: DoctorArguments = NO_ARGUMENTS,
    *,
    block_bytes: int = 0,
    machine: Machine | None = None,
    with_probe: bool = False,
) -> Findings:
    """Return the findings about a configuration, if there is one, and the engines at addresses.

    ``values``: as ``kvtier check`` reads them. ``with_probe``: also measure each tier, which takes
    longer.
    """
    machine = machine or Machine()
    findings = Findings()
    engines = read_running(urls, WAIT_S, findings) if urls else []
    if values is not None:
        _examine_configuration(
            values, engines, engine, block_bytes, machine, findings, with_probe=with_probe
        )
    for each in engines:
        look_at_engine(each, findings)
    look_at_all(engines, findings)
    worst_first = list(Severity)
    findings.found.sort(key=lambda finding: worst_first.index(finding.rule.severity))
    return findings


def _examine_configuration(
    values: Mapping[str, Any],
    engines: Sequence[RunningEngine],
    engine: DoctorArguments,
    block_bytes: int,
    machine: Machine,
    findings: Findings,
    *,
    with_probe: bool,
) -> None:
    checked = configuration.check(
        values,
        engine,
        block_bytes=block_bytes,
        wait_s=WAIT_S,
        root=machine.root,
        look_at_place=partial(look_at_folder, machine=machine),
    )
    findings.merge(checked.findings)
    if not checked.extra:
        return
    subject = Subject(
        checked.extra,
        tuple(checked.tiers),
        engine,
        machine,
        checked.block.certain,
        is_latent=checked.block.is_latent,
        model_tokens=_longest_prompt(engine, machine) if checked.model_answers else 0,
    )
    if engines:
        subject = subject.beside(engines[0].cache_config)
    look_at_servers(subject.tiers, WAIT_S, findings)
    look_at_sizes(subject, findings, runs=bool(engines))
    look_at_settings(subject, findings)
    if with_probe:
        from kvtier.tools.doctor.probe import probe  # noqa: PLC0415 - imports clients of servers

        given = checked.extra.get("prefill_tokens_per_s")
        known = [each.prefill_tokens_per_s for each in engines if each.prefill_tokens_per_s]
        is_sound = isinstance(given, int | float) and not findings.refused
        probe(subject, given if is_sound else max(known, default=None), findings)


def _longest_prompt(engine: DoctorArguments, machine: Machine) -> int:
    """Return the tokens of the model's longest prompt, by its ``config.json``; 0: not known."""
    config = None if engine.model is None else config_of(engine.model, machine.environment)
    return 0 if config is None else read_context_length(config) or 0
