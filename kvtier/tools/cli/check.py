"""Tell in a second what an engine would refuse after minutes in a configuration.

FILE is JSON: what --kv-transfer-config gets, or its kv_connector_extra_config alone. Nothing is
made, claimed or changed, but for what --connect tries, which is removed again. Run it as the user
and on the host that the engine is to run on. The exit status is 0 if nothing was found, or
warnings only; 1 if an engine would refuse something, or if --connect finds storage that does not
work; and 2 if FILE cannot be read.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.sizes import read_bytes

if TYPE_CHECKING:
    import argparse

REFUSED: Final = 1
"""The exit status if an engine would not start."""

FILE_BYTES_MAX: Final = 1 << 24

_YAML: Final = re.compile(rb"(?:\s|#.*|---)*[\w-]+:\s")
_AS_VLLM: Final = "as vLLM gets it (default: %(default)s)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("file", metavar="FILE", help="the configuration as JSON; - reads stdin")
    parser.add_argument(
        "--block-bytes",
        metavar="SIZE",
        help="bytes of one block of all workers, if the model's config does not tell",
    )
    parser.add_argument(
        "--connect",
        action="store_true",
        help="try each tier's storage: reach it, log in, and store, load and remove something",
    )
    vllm = parser.add_argument_group("what vLLM is given")
    vllm.add_argument(
        "--model",
        help="finds weights that nothing tells from others; a folder with its config.json also "
        "says how large a block is",
    )
    vllm.add_argument("--load-format", metavar="FORMAT", default="auto", help=_AS_VLLM)
    vllm.add_argument(
        "--block-size", metavar="TOKENS", type=int, help="tokens in vLLM's blocks (default: 16)"
    )
    vllm.add_argument("--tensor-parallel-size", metavar="N", type=int, default=1, help=_AS_VLLM)
    vllm.add_argument("--kv-cache-dtype", metavar="NAME", default="auto", help=_AS_VLLM)
    vllm.add_argument(
        "--kv-offloading-size", metavar="GIB", type=float, help="in place of cpu_bytes_to_use"
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
    from kvtier.tools.checking.configuration import check  # noqa: PLC0415 - heavy imports
    from kvtier.tools.checking.engine_arguments import EngineArguments  # noqa: PLC0415 - as above
    from kvtier.tools.cli.terminal import check_can_write, write_json  # noqa: PLC0415 - as above

    if arguments.json and arguments.json != "-":
        check_can_write(arguments.json)
    block_bytes = 0
    if arguments.block_bytes is not None:
        block_bytes = read_bytes(arguments.block_bytes, "--block-bytes")
    names = [field.name for field in fields(EngineArguments)]
    found = check(
        read_config(arguments.file),
        EngineArguments(**{name: getattr(arguments, name) for name in names}),
        block_bytes=block_bytes,
        connect=arguments.connect,
    )
    if arguments.json == "-":
        print(json.dumps(vars(found), indent=2))
        return REFUSED if found.refused or found.failed else 0
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
    print(f"{arguments.file}: {_verdict(len(found.refused), len(found.failed))}")
    if arguments.json:
        write_json(arguments.json, vars(found))
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
    values = _mapping_in(raw, path)
    for name in ("kv_transfer_config", "kv-transfer-config"):  # a configuration file's part
        part = values.get(name)
        if isinstance(part, str):
            return _mapping_in(part.encode(), f"{name} in {path}")
        if isinstance(part, dict):
            return part
    return values


def _mapping_in(raw: bytes, where: str) -> dict[str, Any]:
    """Return the mapping that JSON holds. Raises ``ConfigError``."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{where} cannot be read as JSON ({problem}). {_advice(raw)}") from None
    if isinstance(values, dict):
        return values
    raise ConfigError(
        f"{where} holds a {type(values).__name__}: write what --kv-transfer-config gets, in braces."
    )


def _advice(raw: bytes) -> str:
    if b"--kv-transfer-config" in raw:
        return "Keep only what stands behind --kv-transfer-config, without the quotes around it."
    if _YAML.match(raw):
        return "Write it as JSON, not YAML: what --kv-transfer-config gets."
    return "Name a file with what --kv-transfer-config gets."


def _verdict(refused: int, failed: int) -> str:
    if not refused + failed:
        return "nothing that an engine on this host would refuse was found."
    if not refused:
        return f"an engine would start, and {failed} of its tiers would not work."
    return f"an engine on this host would refuse {refused} {'thing' if refused == 1 else 'things'}."
