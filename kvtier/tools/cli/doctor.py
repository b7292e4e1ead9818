"""``kvtier doctor``: finds faults of a configuration, its machine, and running engines."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from kvtier.errors import ConfigError
from kvtier.plugin_api.sizes import read_bytes
from kvtier.tools.cli.check import mapping_in, read_config
from kvtier.tools.cli.options import HYPHEN, File, Json, refuse_unused
from kvtier.tools.doctor.subject import DoctorArguments

if TYPE_CHECKING:
    from kvtier.tools.checking.findings import Findings

ERRORS: Final = 1
"""The exit status if an engine would not start, or a tier or an engine is not working."""

WARNINGS: Final = 3
"""The exit status for only warnings."""

_ADDRESS: Final = re.compile(r"https?://.+|[^/\s{}]+:\d+(/\S*)?")


def doctor(
    *targets: Annotated[File, HYPHEN, Parameter(metavar="TARGET")],
    block_bytes: Annotated[str | None, Parameter(metavar="SIZE")] = None,
    probe: bool = False,
    engine: DoctorArguments = DoctorArguments(),
    json: Json = None,
) -> int:
    """Find faults of a configuration, the machine that it is for, and running engines.

    It applies all rules of kvtier check, and many more, in less than five seconds. Nothing is
    claimed or changed: an empty file, with which it tries O_DIRECT, and the blocks of --probe are
    removed again. Run it as the user and on the host that the engine is to run on. The exit status
    is 0 if nothing was found, or notes only; 3 for warnings; 1 for errors, when an engine would not
    start, or a tier or an engine does not work; and 2 if a target cannot be read.

    Parameters
    ----------
    targets
        one configuration at most: a file with JSON, JSON itself, or - for stdin; and running
        engines: host:port, or http://host:port/metrics
    block_bytes
        bytes of one block of all workers, if the model's config does not show it
    probe
        also measure each tier: store and load 512 MiB in a separate folder, or under separate names
    """
    from kvtier.tools.doctor.examination import examine  # noqa: PLC0415 - heavy imports
    from kvtier.tools.terminal import check_can_report, report  # noqa: PLC0415 - as above
    from kvtier.tools.watching.page import page_url  # noqa: PLC0415 - as above

    check_can_report(json, *targets)
    urls = [each for each in targets if _is_address(each)]
    configurations = [each for each in targets if each not in urls]
    if len(configurations) > 1 or not targets:
        raise ConfigError(
            "Name one configuration, as a file or JSON, or running engines, as host:port, or both."
        )
    if not configurations:
        why = "without a configuration. Name it too, as a file or JSON."
        refuse_unused(why, engine, block_bytes=block_bytes, probe=probe)
    found = examine(
        _read(configurations[0]) if configurations else None,
        [page_url(each) for each in urls],
        engine,
        block_bytes=0 if block_bytes is None else read_bytes(block_bytes, "--block-bytes"),
        with_probe=probe,
    )
    counts = Counter(each.rule.severity.value for each in found.found)
    figures: dict[str, Any] = {
        "report": "kvtier doctor",
        "findings": [each.figures() for each in found.found],
        "counts": dict(counts),
        "noted": found.noted,
        "not_checked": found.not_checked,
    }
    report(json, figures, lambda: _show(found, counts))
    return ERRORS if counts["error"] else WARNINGS if counts["warning"] else 0


def _is_address(target: str) -> bool:
    return _ADDRESS.fullmatch(target) is not None and not Path(target).exists()


def _read(target: str) -> dict[str, Any]:
    if target.lstrip().startswith("{"):
        return mapping_in(target.encode(), "the configuration")
    return read_config(target)


def _show(found: Findings, counts: Counter[str]) -> None:
    for each in found.found:
        figures = each.figures()
        print(f"{figures['severity']}: {figures['what']} [{figures['rule']}]")
        print(f"  why: {figures['why']}")
        print(f"  do:  {figures['remedy']}")
        print(f"  see: docs/{figures['docs']}", end="\n\n")
    for text in found.noted:
        print(text)
    for text in found.not_checked:
        print(f"not checked: {text}")
    totals = (f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items())
    print(", ".join(totals) + "." if counts else "Nothing was found.")
