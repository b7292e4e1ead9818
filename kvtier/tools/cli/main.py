"""The entry point of the ``kvtier`` command: its subcommands, and exit statuses of failures.

A subcommand is the function with its module's name. Modules are light: a command imports the rest
when it runs.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import contextmanager, redirect_stdout, suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from cyclopts import App, CycloptsError, UnknownCommandError, UnknownOptionError

from kvtier import __version__
from kvtier.errors import Misuse
from kvtier.plugin_api.log import default_processors
from kvtier.plugin_api.options import did_you_mean
from kvtier.tools.cli.completion import add_completion
from kvtier.tools.cli.exit_status import BAD_INPUT, INTERRUPTED, TERMINATED, UNREAD
from kvtier.tools.cli.options import DEFAULTS
from kvtier.tools.held_signals import terminable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COMMANDS: Final = (
    "alerts",
    "bench",
    "check",
    "dashboard",
    "doctor",
    "evict",
    "fsck",
    "ls",
    "purge",
    "replay",
    "report",
    "size",
    "status",
    "top",
)
OPTIONS: Final = ("--help", "--version", "--install-completion", "--show-completion")
"""Options that may stand in a command's place."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; without ``argv``, the process ends with it."""
    stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - if the caller has closed it
    if isinstance(stdout, TextIOWrapper):  # a file's name may have what its encoding has not
        stdout.reconfigure(errors="backslashreplace")
    with redirect_stdout(stdout), terminable() as was_terminated:
        status = _run(argv)
    if status == INTERRUPTED and was_terminated():
        status = TERMINATED
    if argv is None and threading.active_count() > 1:
        _end(status)
    return status


def _end(status: int) -> NoReturn:
    """End the process without its threads: Python would wait for one that hangs with a server."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def _run(argv: Sequence[str] | None) -> int:
    app = make_app()
    given = list(sys.argv[1:] if argv is None else argv)
    name = " ".join(("kvtier", *app.parse_commands(given)[0]))
    try:
        with _log_on_stderr():
            status: int | None = app(given)
        sys.stdout.flush()
    except (CycloptsError, Misuse) as error:
        print(f"{name}: {_text_of(error, given)}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output not flushed yet
        return UNREAD
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if not _stdout_fails():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # as above
        print(f"{name}: stdout cannot be written: {error.strerror or error}.", file=sys.stderr)
        return BAD_INPUT
    return status or 0


def _stdout_fails() -> bool:
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _text_of(error: Exception, given: Sequence[str]) -> str:
    """Return it with the option that was meant, or the reason why none may stand there.

    In a command's place cyclopts suggests only commands, and behind ``--`` the option itself.
    """
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        (word, *_) = error.unused_tokens
        return f"{error}{did_you_mean(word, OPTIONS) if word.startswith('-') else ''}"
    if isinstance(error, UnknownOptionError) and "--" in given:
        word = error.token.keyword or error.token.value
        if word in given[given.index("--") :]:
            return f"Unknown option: {word}. No option may stand after --."
    return str(error)


def make_app() -> App:
    """Return all commands; the reference page is made from them too."""
    app = App(
        name="kvtier",
        help="Multi-tier KV-cache offloading.",
        group_parameters="Options",
        version=version,
        default_parameter=DEFAULTS,
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for name in COMMANDS:
        app.command(getattr(import_module(f"kvtier.tools.cli.{name}"), name), name=name)
    add_completion(app)
    return app


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Send the log to stderr, since stdout is the command's result; warnings and errors only."""
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


def version() -> str:
    """Return the versions of kvtier, Python and vLLM, in one line."""
    from kvtier.settings.vllm_releases import installed  # noqa: PLC0415 - only if it is asked for

    vllm = " ".join(installed() or ("no", "vLLM"))
    python = ".".join(str(part) for part in sys.version_info[:3])
    return f"kvtier {__version__} (Python {python}, {vllm})"


if __name__ == "__main__":
    sys.exit(main())
