"""Folders of commands that roll out environments outside a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.launch.folder import hold_folder


@contextmanager
def hold_output(folder: Path, *, flag: str) -> Iterator[None]:
    """Lock a folder against other commands for as long as this process lives.

    Args:
        flag: of the command, with which another folder is named.

    Raises: ConfigError where another command writes into the folder.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(hold_folder(RunPaths(folder)))
        except ConfigError as error:
            raise ConfigError(
                f"another command writes into {folder} ({str(error).partition(' - ')[0]}) - expected one at a time. "
                f"Wait for it, stop it, or name another folder: `{flag} FOLDER`."
            ) from None
        yield
