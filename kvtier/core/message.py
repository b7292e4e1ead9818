"""Defines the base of every message, and a value that several of them carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from kvtier.plugin_api.keys import Key


class RequestOrder(NamedTuple):
    """A request's keys by token position, from number ``first`` on; earlier ones are known."""

    first: int
    keys: tuple[Key, ...]


class Message(msgspec.Struct, frozen=True, gc=False, tag=True, array_like=True):
    """Base of all messages. The class name is sent along when one goes to another process."""
