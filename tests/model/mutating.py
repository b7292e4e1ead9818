"""How a mistake is made in the real code, for as long as a context lasts."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Mutations(dict[str, "Callable[[], AbstractContextManager[None]]"]):
    """Mistakes by name, which is their function's."""

    def in_place_of(self, owner: Any, name: str) -> Callable[[Any], Any]:
        """Register what is to be called in the place of one function or method.

        A first parameter called ``real`` is given what stands there otherwise.
        """

        def register(mutated: Any) -> Any:
            takes_real = next(iter(inspect.signature(mutated).parameters)) == "real"

            @contextmanager
            def made() -> Iterator[None]:
                real = getattr(owner, name)

                def with_real(*given: object, **named: object) -> Any:
                    return mutated(real, *given, **named)

                with patch.object(owner, name, with_real if takes_real else mutated):
                    yield

            self[mutated.__name__] = made
            return mutated

        return register

    def add(self, make: Callable[[], Iterator[None]]) -> Callable[[], Any]:
        """Register a mistake that is more than one other function."""
        made = self[make.__name__] = contextmanager(make)
        return made
