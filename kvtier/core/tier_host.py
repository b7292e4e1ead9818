"""What runs a tier's cell, as the engine's side sees it: ``kvtier/hosts`` has two kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from kvtier.core.messages import Message
    from kvtier.plugin_api.backend import BackendTraits

ABANDON_S: Final = 0.5
"""Of the time that ``close`` is given: what is left when what still runs is given up."""


class TierHost(Protocol):
    """What runs a tier's cell, as the engine's side sees it. It is the cell's mailbox too.

    All methods belong to the thread that calls the facade, but ``post``, which
    a host may allow to others.
    """

    name: str

    @property
    def traits(self) -> BackendTraits | None:
        """The backend's; None while there is none yet."""

    @property
    def place(self) -> str | None:
        """The backend's."""

    def start(self) -> None:
        """Have the backend opened and messages delivered. Nothing here waits for that.

        Without a backend: tell the link so, and try to make one until that works.
        """

    def post(self, message: Message) -> bool:
        """Take a message for the tier's actor; it is delivered after the next ``wake``.

        False: too many wait, or the cell is ending or disabled.
        """

    def wake(self) -> None:
        """Have what was posted delivered. Never waits; done once a step."""

    def poll(self) -> None:
        """Hand the link what the tier has sent, if that doesn't come by itself. Never waits."""

    def ask_to_end(self) -> None:
        """Take nothing more, end what was begun, then end. Returns at once."""

    def close(self, timeout_s: float) -> bool:
        """Ask the cell to end and wait up to ``timeout_s``. False: something still runs.

        False means that a thread of the tier may still touch the slots: the
        memory must stay mapped. What was begun may take all of the time but
        the last ``ABANDON_S``; then it is given up.
        """
