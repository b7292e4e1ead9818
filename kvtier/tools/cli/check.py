"""``kvtier check``: finds an engine's refusals of a configuration."""

from __future__ import annotations

import json as json_module
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from kvtier.errors import ConfigError
from kvtier.plugin_api.sizes import read_bytes
from kvtier.tools.checking.engine_arguments import EngineArguments
from kvtier.tools.cli.options import HYPHEN, File, Json

REFUSED: Final = 1
"""The exit status if an engine would not start."""

FILE_BYTES_MAX: Final = 1 << 24

_YAML: Final = re.compile(rb"(?:\s|#.*|---)*[\w-]+:\s")


def check(
    file: Annotated[File, HYPHEN],
    /,
    *,
    block_bytes: Annotated[str | None, Parameter(metavar="SIZE")] = None,
    connect: bool = False,
    engine: EngineArguments = EngineArguments(),
    json: Json = None,
) -> int:
    """Find in a second what an engine would refuse in a configuration after minutes.

    FILE is JSON: the value of --kv-transfer-config, or its kv_connector_extra_config alone. Nothing
    is made, claimed or changed, except by --connect, which removes its object again. Run it as the
    user and on the host that the engine is to run on. The exit status is 0 if nothing was found, or
    warnings only; 1 if an engine would refuse something, or if --connect finds storage that does
    not work; and 2 if FILE cannot be read.

    Parameters
    ----------
    file
        the configuration as JSON; - reads stdin
    block_bytes
        bytes of one block of all workers, if the model's config does not show it
    connect
        try each tier's storage: reach it, log in, and store, load and remove a small object
    """
    from kvtier.tools.checking import configuration  # noqa: PLC0415 - heavy imports
    from kvtier.tools.terminal import check_can_report, report  # noqa: PLC0415 - as above

    check_can_report(json, file)
    found = configuration.check(
        read_config(file),
        engine,
        block_bytes=0 if block_bytes is None else read_bytes(block_bytes, "--block-bytes"),
        connect=connect,
    ).findings

    def show() -> None:
        for about, texts in (
            ("refused: ", found.refused),
            ("failed: ", found.failed),
            ("warning: ", found.warned),
            ("", [f"tier {text}: nothing to refuse" for text in found.tiers]),
            ("", found.noted),
            ("not checked: ", found.not_checked),
        ):
            for text in texts:
                print(f"{about}{text}")
        print(f"{file}: {_verdict(len(found.refused), len(found.failed))}")

    report(json, found.figures(), show)
    return REFUSED if found.refused or found.failed else 0


def read_config(path: str) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises ``ConfigError``."""
    try:
        if path == "-":
            raw = sys.stdin.buffer.read(FILE_BYTES_MAX)
        else:
            with Path(path).open("rb") as file:
                raw = file.read(FILE_BYTES_MAX)
    except OSError as problem:
        raise ConfigError(
            f"{path} cannot be read ({problem.strerror}). Name a file with what "
            "--kv-transfer-config gets."
        ) from problem
    values = mapping_in(raw, path)
    for name in ("kv_transfer_config", "kv-transfer-config"):  # a configuration file's part
        part = values.get(name)
        if isinstance(part, str):
            return mapping_in(part.encode(), f"{name} in {path}")
        if isinstance(part, dict):
            return part
    return values


def mapping_in(raw: bytes, where: str) -> dict[str, Any]:
    """Return the mapping that JSON holds. Raises ``ConfigError``."""
    try:
        values = json_module.loads(raw)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{where} cannot be read as JSON ({problem}). {_advice(raw)}") from None
    if isinstance(values, dict):
        return values
    raise ConfigError(
        f"{where} holds a {type(values).__name__}: write the value of --kv-transfer-config, in "
        "braces."
    )


def _advice(raw: bytes) -> str:
    if b"--kv-transfer-config" in raw:
        return "Keep only the value of --kv-transfer-config, without the quotes around it."
    if _YAML.match(raw):
        return "Write the value of --kv-transfer-config as JSON, not YAML."
    return "Name a file with what --kv-transfer-config gets."


def _verdict(refused: int, failed: int) -> str:
    if not refused + failed:
        return "nothing that an engine on this host would refuse was found."
    if not refused:
        return f"an engine would start, and {failed} of its tiers would not work."
    return f"an engine on this host would refuse {refused} {'thing' if refused == 1 else 'things'}."
