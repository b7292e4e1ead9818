"""Tell in a second what an engine would refuse after minutes in a configuration.

FILE is JSON: what --kv-transfer-config gets, or its kv_connector_extra_config alone. Nothing is
made, claimed or changed. Run it as the user and on the host that the engine is to run on. The
exit status is 0 if nothing was found, 1 if an engine would refuse something, and 2 if FILE cannot
be read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.sizes import read_bytes

if TYPE_CHECKING:
    import argparse

REFUSED: Final = 1
"""The exit status if an engine would not start."""

FILE_BYTES_MAX: Final = 1 << 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", metavar="FILE", help="the configuration as JSON; - reads stdin")
    parser.add_argument(
        "--block-bytes",
        metavar="SIZE",
        help="bytes of one block of all workers, as kvtier size says: finds a size that holds none",
    )
    parser.add_argument(
        "--kv-offloading-size",
        metavar="GIB",
        type=float,
        help="what vLLM is given, in place of cpu_bytes_to_use",
    )
    parser.add_argument(
        "--model",
        help="what vLLM is given: finds weights that nothing tells from others",
    )
    parser.add_argument(
        "--load-format",
        metavar="FORMAT",
        default="auto",
        help="what vLLM is given (default: %(default)s)",
    )
    parser.add_argument(
        "--dp-rank",
        metavar="N",
        type=int,
        default=0,
        help="number of the engine that {dp_rank} stands for (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write what was found to FILE, as JSON; - writes it to stdout, and no text",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the file and say what was found. Returns the exit status."""
    from kvtier.tools.checking import check  # noqa: PLC0415 - heavy imports stay out of other runs
    from kvtier.tools.cli.terminal import check_can_write, write_json  # noqa: PLC0415 - as above

    if arguments.json and arguments.json != "-":
        check_can_write(arguments.json)
    block_bytes = 0
    if arguments.block_bytes is not None:
        block_bytes = read_bytes(arguments.block_bytes, "--block-bytes")
    found = check(
        read_config(arguments.file),
        block_bytes=block_bytes,
        offloading_gib=arguments.kv_offloading_size,
        dp_rank=arguments.dp_rank,
        model=arguments.model,
        load_format=arguments.load_format,
    )
    if arguments.json == "-":
        print(json.dumps(vars(found), indent=2))
    else:
        for text in found.refused:
            print(f"refused: {text}")
        for text in found.warned:
            print(f"warning: {text}")
        for text in found.tiers:
            print(f"tier {text}: nothing to refuse")
        for text in found.not_checked:
            print(f"not checked: {text}")
        print(f"{arguments.file}: " + _verdict(len(found.refused)))
        if arguments.json:
            write_json(arguments.json, vars(found))
    return REFUSED if found.refused else 0


def read_config(path: str) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises ``ConfigError``."""
    try:
        if path == "-":
            raw = sys.stdin.buffer.read(FILE_BYTES_MAX)
        else:
            with Path(path).open("rb") as file:
                raw = file.read(FILE_BYTES_MAX)
        values = json.loads(raw)
    except (OSError, ValueError, RecursionError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise ConfigError(
            f"{path} cannot be read as JSON ({reason}). Name a file with what --kv-transfer-config "
            "gets."
        ) from problem
    if isinstance(values, dict):
        for name in ("kv_transfer_config", "kv-transfer-config"):  # a configuration file's part
            if isinstance(values.get(name), dict):
                return dict(values[name])
        return values
    raise ConfigError(f"{path} holds no mapping. Name a file with what --kv-transfer-config gets.")


def _verdict(count: int) -> str:
    if not count:
        return "nothing that an engine would refuse was found."
    return f"an engine would refuse {count} {'thing' if count == 1 else 'things'}."
