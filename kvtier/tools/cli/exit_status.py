"""What a command tells the shell that has run it."""

from __future__ import annotations

from typing import Final

BAD_INPUT: Final = 2
"""For input that was refused, as argparse has it."""

INTERRUPTED: Final = 130
"""After Ctrl-C, as shells have it."""

UNREAD: Final = 141
"""After whoever read its output has ended, such as ``head``; as shells have it for SIGPIPE."""

TERMINATED: Final = 143
"""After SIGTERM, which a command handles as Ctrl-C; as shells have it."""
