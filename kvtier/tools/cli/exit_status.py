"""Exit statuses of commands."""

from __future__ import annotations

from typing import Final

BAD_INPUT: Final = 2
"""For refused input, as with argparse."""

INTERRUPTED: Final = 130
"""After Ctrl-C, as in shells."""

UNREAD: Final = 141
"""After the reader of its output has ended, such as ``head``; as in shells for SIGPIPE."""

TERMINATED: Final = 143
"""After SIGTERM, which a command handles like Ctrl-C; as in shells."""
