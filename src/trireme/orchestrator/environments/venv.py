"""Finds an environment by its id, and makes the interpreter that it runs with.

An environment package gets a virtual environment of its own: its pins never meet vLLM's, and two environments may pin
different versions of verifiers. It is made once, by uv, and used offline from then on.

The package itself is installed in editable mode, and the key of a virtual environment covers only what decides which
*dependencies* it holds (pyproject.toml, Python version) and the package's place. So editing an environment's code needs
no reinstall and leaves no pile of half-gigabyte folders behind, and editing its pyproject.toml makes a new one.
The same holds for packages beside it that its `[tool.uv.sources]` names by path, see `neighbours`.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from trireme.base.disk import is_full
from trireme.base.errors import ConfigError, DeadlineExceeded
from trireme.base.locks import try_lock
from trireme.base.log import get_logger
from trireme.base.paths import atomic_write
from trireme.base.processes import last_lines
from trireme.base.token import TOKEN
from trireme.orchestrator.environments.neighbours import copied_neighbours, neighbours_key

log = get_logger("environments")

COMPLETE = "trireme-complete"  # lies in a virtual environment that was built to the end
BUILD_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class EnvironmentSource:
    """Where an environment's code is.

    Example:
        EnvironmentSource(id="owner/reverse-text", kind="package", module="reverse_text",
                          folder=Path("/project/environments/reverse_text"))
    """

    id: str
    kind: Literal["file", "package", "installed"]
    module: str  # what the worker imports: a module's name, or the absolute path of a .py file
    folder: Path | None = None  # of a package: where its pyproject.toml is


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trireme"


def find_environment(id: str, *, root: Path = Path("environments")) -> EnvironmentSource:
    """Resolves an id: a .py file, a package in `root` (or a path to one), or a distribution installed beside trireme.

    Of `owner/name` only the name is looked for: there is no hub to fetch from.

    Raises: ConfigError that lists where was searched.
    """
    if id.endswith(".py"):
        return _file_source(id)
    name = id.rstrip("/").rpartition("/")[2]
    for folder in _candidates(id, name, root):
        if (folder / "pyproject.toml").is_file():
            folder = folder.resolve()
            return EnvironmentSource(id=id, kind="package", module=_module_of(folder), folder=folder)
    if _is_installed(name):
        return EnvironmentSource(id=id, kind="installed", module=_module_name(name))
    raise _unknown(id, name, root)


def environment_python(
    source: EnvironmentSource,
    *,
    cache: Path | None = None,
    uv: str | None = None,
    log_file: Path | None = None,
    again: bool = False,
) -> Path:
    """The interpreter for this environment; builds its virtual environment the first time (seconds to minutes).

    Safe to call from several processes at once: one builds, the others wait for it.

    Args:
        again: builds it anew where there is one already.

    Raises: ConfigError where uv is missing or could not install the package.
    """
    if source.folder is None:
        return Path(sys.executable)
    venv = _venv_folder(source, cache or default_cache())
    if again or not _is_complete(venv):
        with _locked(venv.with_name(f"{venv.name}.lock"), who=source.id):
            if again or not _is_complete(venv):  # another process may have built it while we waited
                _build(venv, source, uv=uv or _find_uv(), log_file=log_file or install_log(venv))
    return _python(venv)


def installed_venv(source: EnvironmentSource, *, cache: Path | None = None) -> Path | None:
    """Its virtual environment, where one was built for what its pyproject.toml says now."""
    if source.folder is None:
        return None
    venv = _venv_folder(source, cache or default_cache())
    return venv if _is_complete(venv) else None


def install_log(venv: Path) -> Path:
    """What uv said when it was built, unless its caller named another place."""
    return venv.with_name(f"{venv.name}.log")


def _file_source(id: str) -> EnvironmentSource:
    path = Path(id).resolve()
    if not path.is_file():
        raise ConfigError(
            f"Environment {id!r} names a file that does not exist ({path}) - expected a .py file with `dataset` and "
            "`reward` - correct the path; it is relative to the folder that the command is run in."
        )
    return EnvironmentSource(id=id, kind="file", module=str(path))


def _candidates(id: str, name: str, root: Path) -> list[Path]:
    spellings = dict.fromkeys([name, name.replace("-", "_"), name.replace("_", "-")])
    as_path = [Path(id)] if "/" in id else []
    return as_path + [root / spelling for spelling in spellings]


def _module_of(folder: Path) -> str:
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        return _module_name(project["project"]["name"])
    except (tomllib.TOMLDecodeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"{folder / 'pyproject.toml'} has no readable [project] name ({error!r}) - expected the environment's name "
            'there; its module has the same name with "_" for "-" - add it.'
        ) from error


def _module_name(name: str) -> str:
    return name.replace("-", "_").replace(".", "_")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
        return True
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


def _unknown(id: str, name: str, root: Path) -> ConfigError:
    here = sorted(path.parent.name for path in root.glob("*/pyproject.toml"))
    spellings = {spelling: known for known in here for spelling in (known, known.replace("_", "-"))}
    near = list(dict.fromkeys(spellings[match] for match in difflib.get_close_matches(name, spellings, n=3)))
    hub = (
        f" Fetching {id!r} from a hub is not possible here: download the package into {root}/{name} yourself."
        if "/" in id
        else ""
    )
    return ConfigError(
        f"Environment {id!r} was not found (searched: {', '.join(map(str, _candidates(id, name, root)))}, and the "
        f"installed packages) - expected a package in {root.resolve()} ({', '.join(here) or 'there is none'}), an "
        "installed package, or the path of a .py file - "
        + (f"did you mean {' or '.join(map(repr, near))}?" if near else "correct `id`.")
        + hub
    )


def _venv_folder(source: EnvironmentSource, cache: Path) -> Path:
    assert source.folder is not None
    decides = [
        (source.folder / "pyproject.toml").read_bytes(),
        sys.version.encode(),
        sys.base_prefix.encode(),
        str(source.folder).encode(),
        *neighbours_key(source.folder),
    ]
    digest = hashlib.sha256(b"\0".join(decides)).hexdigest()[:12]
    return cache / "environments" / f"{source.module}-{digest}"


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"


def _is_complete(venv: Path) -> bool:
    return (venv / COMPLETE).is_file() and _python(venv).exists()  # the second: its base Python may have been removed


@contextmanager
def _locked(lock: Path, *, who: str) -> Iterator[None]:
    """Held by one process on this machine; let go by the kernel however the holder ends."""
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    with _opened(lock) as file:
        while not try_lock(file.fileno(), lock.parent):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"Waited {BUILD_TIMEOUT_S:.0f} s for another process to install environment {who!r} - expected it "
                    f"to finish - see who holds {lock} (`fuser {lock}`), end it and start again."
                )
            time.sleep(0.2)
        yield


def _opened(lock: Path) -> IO[str]:
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        return open(lock, "w")
    except OSError as error:
        if is_full(error):
            raise
        raise ConfigError(
            f"Environments are installed in {lock.parent}, and nothing can be written there ({error}) - expected a "
            "folder that this user may write to - set XDG_CACHE_HOME to one."
        ) from error


def _build(venv: Path, source: EnvironmentSource, *, uv: str, log_file: Path) -> None:
    """It cannot be moved once built, so it is built in its place, and does not count until the marker lies in it."""
    assert source.folder is not None
    log.info("Installing environment %s into %s (once; log: %s)", source.id, venv, log_file)
    start = time.monotonic()
    shutil.rmtree(venv, ignore_errors=True)
    with tempfile.TemporaryDirectory() as aside:
        # Run beside an empty uv.toml: uv would else take the nearest [tool.uv] above it, and trireme's pins exclude
        # theirs. Not beside the virtual environment: where our cache lies inside uv's, uv refuses to run in it.
        (Path(aside) / "uv.toml").touch()
        cwd = Path(aside)
        _run_uv([uv, "venv", "--no-project", "--python", sys.executable, str(venv)], source, cwd=cwd, log_file=log_file)
        # Not `--compile-bytecode`: 12,000 files, while the run waits. Workers compile what they import.
        install = [uv, "pip", "install", "--python", str(_python(venv))]
        # uv keeps what it once built of a folder, and builds anew only when that folder's pyproject.toml changes.
        anew = [word for name in copied_neighbours(source.folder) for word in ("--reinstall-package", name)]
        _run_uv([*install, *anew, "--editable", str(source.folder)], source, cwd=cwd, log_file=log_file)
    with atomic_write(venv / COMPLETE) as file:
        file.write(f"{source.id}\n".encode())
    log.info("Installed environment %s in %.0f s", source.id, time.monotonic() - start)


def _run_uv(command: list[str], source: EnvironmentSource, *, cwd: Path, log_file: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", TOKEN)}
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with open(log_file, "ab") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        try:
            subprocess.run(
                command, cwd=cwd, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                check=True, timeout=BUILD_TIMEOUT_S,
            )  # fmt: skip
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
            raise _install_error(source, error, log_file) from error


def _install_error(source: EnvironmentSource, error: Exception, log_file: Path) -> ConfigError:
    what = f"uv ended with code {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else str(error)
    return ConfigError(
        f"Environment {source.id!r} could not be installed: {what}. Last lines:\n"
        + "\n".join(f"  {line}" for line in last_lines(log_file, 12))
        + f"\nExpected {source.folder} and its dependencies to install into an environment of their own - correct its "
        f"pyproject.toml, or see that uv reaches its package index; the whole log is {log_file}"
    )


def _find_uv() -> str:
    found = os.environ.get("UV") or shutil.which("uv")
    if not found:
        raise ConfigError(
            "uv was not found (the variable UV is not set and no `uv` is on PATH) - expected uv, which installs the "
            "environment's own dependencies - install uv (`pip install uv`), or run this command with `uv run`."
        )
    return found
