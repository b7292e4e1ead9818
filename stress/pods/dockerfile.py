"""Reads ``docs/deploy/Dockerfile``: what its lines do, as commands for a machine without Docker."""

from __future__ import annotations

import shlex
from typing import Final, NamedTuple

from stress.pods.manifests import DEPLOY

FILE: Final = DEPLOY / "Dockerfile"


class Image(NamedTuple):
    """The lines of a Dockerfile. It knows ``ARG``, ``FROM``, ``COPY`` and ``RUN``."""

    base: str  #: with the default of its argument
    arguments: dict[str, str]  #: by name, with their defaults
    copied: list[tuple[list[str], str]]  #: paths of the clone, and where they go
    commands: list[str]  #: of ``RUN``

    def script(self) -> str:
        """Return a shell's commands that do in a clone what building the image does."""
        lines = ["set -e"]
        lines += [f"{name}={shlex.quote(value)}" for name, value in self.arguments.items()]
        for sources, target in self.copied:
            where = target if target.endswith("/") else target.rpartition("/")[0]
            lines.append(f"mkdir -p {shlex.quote(where)}")
            lines.append(f"cp -r {shlex.join(sources)} {shlex.quote(target)}")
        return "\n".join([*lines, *self.commands])


def read() -> Image:
    """Return the image. Raises ``ValueError`` at a line that it does not know."""
    image = Image("", {}, [], [])
    for line in FILE.read_text().splitlines():
        word, _, rest = line.partition(" ")
        if word in ("", "#"):
            continue
        if word == "ARG":
            name, _, value = rest.partition("=")
            image.arguments[name] = value
        elif word == "FROM":
            base = rest
            for name, value in image.arguments.items():
                base = base.replace(f"${{{name}}}", value)
            image = image._replace(base=base)
        elif word == "COPY":
            *sources, target = shlex.split(rest)
            image.copied.append((sources, target))
        elif word == "RUN":
            image.commands.append(rest)
        else:
            raise ValueError(f"{FILE.name}: {word!r} is not known here")
    return image
