"""The entry point of the ``kvtier`` command: finds the subcommand and runs it.

A subcommand is a module of this package with two functions:
``add_arguments(parser)``, and ``run(arguments)``, which returns the exit
status. Only the one that was asked for does its heavy imports.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

from kvtier.errors import Misuse

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: Final = {
    "bench": "measure kvtier beside vLLM's own tiering",
    "fsck": "verify a disk tier's folder, and drop what is unsound",
    "ls": "show what a disk tier's folder holds",
    "purge": "remove blocks from a disk tier's folder",
    "replay": "play a trace of requests through the runtime, or through policies only",
    "size": "recommend how large each tier should be",
}

BAD_INPUT: Final = 2
"""The exit status for input that was refused, as argparse has it."""

INTERRUPTED: Final = 130
"""The exit status after Ctrl-C, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="kvtier", description="Multi-tier KV-cache offloading.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        module = import_module(f"kvtier.cli.{name}")
        module.add_arguments(subparsers.add_parser(name, help=purpose, description=module.__doc__))
    arguments = parser.parse_args(argv)
    try:
        status: int = import_module(f"kvtier.cli.{arguments.command}").run(arguments)
    except Misuse as error:
        print(f"kvtier {arguments.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"kvtier {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
