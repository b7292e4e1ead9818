"""Installs the script by which the user's shell completes commands, options and files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from cyclopts import App

Shell = Literal["bash", "zsh", "fish"]


def add_completion(app: App) -> None:
    """Add the two commands to all others."""

    def install(shell: Shell | None = None) -> int:
        """Make your shell complete commands, options and files, by a script.

        The script goes where the shell looks for it, below the home folder; bash and zsh get a line
        in .bashrc or .zshrc, once. Run it again after an upgrade.

        Parameters
        ----------
        shell
            bash, zsh or fish; by default the one that runs the command
        """
        shell = shell or _running()
        try:
            path = app.install_completion(shell=shell)
            path.write_text(_script(app, shell))
        except OSError as problem:
            raise ConfigError(
                f"{problem.filename} cannot be written ({problem.strerror}). Write the script "
                f"elsewhere: kvtier --show-completion {shell} > FILE"
            ) from problem
        print(f"{path}: written. Start {shell} again, and press the tab key.")
        return 0

    def show(shell: Shell | None = None) -> int:
        """Print the script that completes commands, for a package or another place.

        Parameters
        ----------
        shell
            bash, zsh or fish; by default the one that runs the command
        """
        print(_script(app, shell or _running()))
        return 0

    app.command(install, name="--install-completion")
    app.command(show, name="--show-completion")


def _script(app: App, shell: Shell) -> str:
    script = app.generate_completion(shell=shell)
    # Otherwise bash treats a folder as a whole word, and adds a space.
    return script.replace("\ncomplete -F ", "\ncomplete -o filenames -F ")


def _running() -> Shell:
    """Return the shell that runs the command. Raises ``ConfigError``."""
    from cyclopts.completion import detect  # noqa: PLC0415 - no other command needs it

    try:
        found = detect.detect_shell()
    except detect.ShellDetectionError:
        found = None
    if found is None or found == "powershell":
        raise ConfigError("The shell is not known. Name it: bash, zsh or fish.")
    return found
