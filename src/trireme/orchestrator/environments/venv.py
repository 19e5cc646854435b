"""Find an environment by its id, and build the virtual environment that its worker runs in.

Each environment package gets a virtual environment of its own: its pins never meet vLLM's, and two environments may pin
different versions of verifiers. uv builds it once; it is used offline from then on.

The package is installed in editable mode, and the key of a virtual environment covers only what decides which
*dependencies* it holds (pyproject.toml, Python version) and the package's path. So a change of an environment's code
needs no reinstall and leaves no pile of half-gigabyte folders behind; a change of its pyproject.toml builds a new one.
The same holds for the local packages that it depends on (`[tool.uv.sources]`). One that is not editable is copied, so
all of its content counts.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from trireme.base.disk import is_full
from trireme.base.errors import ConfigError, DeadlineExceeded
from trireme.base.log import get_logger
from trireme.base.paths import atomic_write
from trireme.base.processes import last_lines, try_lock
from trireme.base.token import TOKEN
from trireme.orchestrator.environments.verifiers_version import (
    PYTHON,
    RUNS,
    VERIFIERS,
    VersionChoice,
    choose_version,
    declarations,
    table,
)
from trireme.orchestrator.session.wire import SourceKind

log = get_logger("environments")

COMPLETE = "trireme-complete"  # marker file of a virtual environment that was built to the end
BUILD_TIMEOUT_S = 1800.0
NO_SOLUTION = "No solution found"  # uv's words for versions that exclude each other
DEPENDS_ON_VERIFIERS = re.compile(r"\S+ depends on (verifiers[^ ]*[^ ,])")
RESOLVED_VERIFIERS = re.compile(r"^ ?\+ verifiers(?:==| @ )(\S+)", re.MULTILINE)
_NO_CONTENT = ("__pycache__", "build", "dist")  # folders of a copied package that do not decide what is installed


@dataclass(frozen=True)
class EnvironmentSource:
    """The place of an environment's code.

    Example:
        EnvironmentSource(id="owner/reverse-text", kind="package", module="reverse_text",
                          folder=Path("/project/environments/reverse_text"))
    """

    id: str
    kind: SourceKind
    module: str  # name of the module to import, or absolute path of a .py file or a folder of tasks
    folder: Path | None = None  # a package's folder, with its pyproject.toml; None for the other kinds


def find_environment(id: str, *, root: Path = Path("environments")) -> EnvironmentSource:
    """Resolve an id: a .py file, a package in `root` (or a path to one), task folders, or an installed distribution.

    Of `owner/name` only the name is looked up: there is no hub to fetch from.

    Raises: ConfigError that lists what was searched.
    """
    if id.endswith(".py"):
        path = Path(id).resolve()
        if not path.is_file():
            raise ConfigError(
                f"Environment {id!r} names a file that does not exist ({path}) - expected a .py file with `dataset` "
                "and `reward` - correct the path; it is relative to the folder that the command is run in."
            )
        return EnvironmentSource(id=id, kind="file", module=str(path))

    # folders and ids differ in hyphens and underscores, so a name is looked up in all spellings
    is_path = "/" in id or id in (".", "..")
    name = Path(id).resolve().name if id.startswith(".") else id.rstrip("/").rpartition("/")[2]
    spellings = dict.fromkeys([name, name.replace("-", "_"), name.replace("_", "-")])
    candidates = [*([Path(id)] if is_path else []), *(root / spelling for spelling in spellings)]
    for folder in candidates:
        if (folder / "pyproject.toml").is_file():
            folder = folder.resolve()
            return EnvironmentSource(id=id, kind="package", module=_module_of(folder), folder=folder)

    # a folder without pyproject.toml may hold tasks in Harbor's format, up to three levels down
    if is_path and any(any(Path(id).glob("*/" * depth + "task.toml")) for depth in range(4)):
        return EnvironmentSource(id=id, kind="tasks", module=str(Path(id).resolve()))

    # last, so that a local package hides an installed one of the same name
    with suppress(importlib.metadata.PackageNotFoundError, ValueError):
        importlib.metadata.distribution(name)
        return EnvironmentSource(id=id, kind="installed", module=_module_name(name))
    raise _not_found(id, name, root, candidates)


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


def _not_found(id: str, name: str, root: Path, candidates: list[Path]) -> ConfigError:
    here = sorted(path.parent.name for path in root.glob("*/pyproject.toml"))
    # a misspelt id is compared with both spellings of each folder's name
    spellings = {spelling: known for known in here for spelling in (known, known.replace("_", "-"))}
    near = list(dict.fromkeys(spellings[match] for match in difflib.get_close_matches(name, spellings, n=3)))
    hub = (
        f" Fetching {id!r} from a hub is not possible here: download the package into {root}/{name} yourself."
        if "/" in id
        else ""
    )
    return ConfigError(
        f"Environment {id!r} was not found (searched: {', '.join(map(str, candidates))}, and the "
        f"installed packages) - expected a package in {root.resolve()} ({', '.join(here) or 'there is none'}), an "
        "installed package, or the path of a .py file or of a folder of tasks - "
        + (f"did you mean {' or '.join(map(repr, near))}?" if near else "correct `id`.")
        + hub
    )


def environment_python(
    source: EnvironmentSource,
    *,
    cache: Path | None = None,
    log_file: Path | None = None,
    again: bool = False,
) -> Path:
    """Return the interpreter for this environment. The first call builds its virtual environment (seconds to minutes).

    Several processes may call it at once: one builds, the others wait.

    Args:
        log_file: for the output of uv; by default next to the virtual environment.
        again: rebuild an existing virtual environment.

    Raises: ConfigError if uv is missing or could not install the package.
    """
    if source.folder is None:
        return Path(sys.executable)
    venv = _venv_folder(source, cache)
    if again or not _is_complete(venv):
        with _locked(venv.with_name(f"{venv.name}.lock"), source):
            if again or not _is_complete(venv):  # another process may have built it while we waited
                _build(venv, source, log_file=log_file or venv.with_name(f"{venv.name}.log"))
    return _python(venv)


def installed_venv(source: EnvironmentSource, *, cache: Path | None = None) -> Path | None:
    """Return its virtual environment, if one was built for the present pyproject.toml."""
    if source.folder is None:
        return None
    venv = _venv_folder(source, cache)
    return venv if _is_complete(venv) else None


def _venv_folder(source: EnvironmentSource, cache: Path | None) -> Path:
    assert source.folder is not None
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trireme"
    choice = verifiers_of(source.folder)
    # code is not among these: the package is editable, so a change of it needs no new installation
    decides = [
        (source.folder / "pyproject.toml").read_bytes(),
        sys.version.encode(),
        sys.base_prefix.encode(),
        str(source.folder).encode(),
        *(part for package in local_packages(source.folder) for part in package.key()),
        repr((choice.constraints, choice.requirements, choice.left_out)).encode(),
    ]
    digest = hashlib.sha256(b"\0".join(decides)).hexdigest()[:12]
    return cache / "environments" / f"{source.module}-{digest}"


def verifiers_of(folder: Path) -> VersionChoice:
    """Return which versions of verifiers the code of a package asks for."""
    others = (package.path for package in local_packages(folder) if package.path.is_dir())
    return choose_version(folder, _read_project(folder), others)


def _base_python(folder: Path) -> str:
    """Return our own Python, or which one uv has to find, if a package does not support ours."""
    from packaging.specifiers import SpecifierSet  # 0.1 s that no import of this module should take

    required = str(table(_read_project(folder), "project").get("requires-python", ""))
    with suppress(ValueError):  # the text may be no range of versions
        if platform.python_version() not in SpecifierSet(required):
            api = verifiers_of(folder).api
            return f"{required},{PYTHON[api]}" if api else required
    return sys.executable


def _read_project(folder: Path) -> dict[str, Any]:
    """Return a package's pyproject.toml; nothing of a broken file, which uv reports."""
    with suppress(OSError, ValueError):
        return tomllib.loads((folder / "pyproject.toml").read_text())
    return {}


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"


def _is_complete(venv: Path) -> bool:
    return (venv / COMPLETE).is_file() and _python(venv).exists()  # the second: its base Python may have been removed


@contextmanager
def _locked(lock: Path, source: EnvironmentSource) -> Iterator[None]:
    """Hold a lock that one process on this machine can hold. The kernel releases it however the holder ends."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        # a full disk has a message of its own
        if is_full(error):
            raise
        raise ConfigError(
            f"Environments are installed in {lock.parent}, and nothing can be written there ({error}) - expected a "
            "folder that this user may write to - set XDG_CACHE_HOME to one."
        ) from error

    # polled, as waiting in the kernel would have no deadline
    with open(lock, "w") as file:
        deadline = time.monotonic() + BUILD_TIMEOUT_S
        while not try_lock(file.fileno(), lock.parent):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"Waited {BUILD_TIMEOUT_S:.0f} s for another process to install environment {source.id!r} - "
                    f"expected it to finish - see who holds {lock} (`fuser {lock}`), end it and start again."
                )
            time.sleep(0.2)
        yield


def _build(venv: Path, source: EnvironmentSource, *, log_file: Path) -> None:
    """Build in place, as a virtual environment cannot be moved. It counts once the marker file is in it."""
    assert source.folder is not None
    uv = os.environ.get("UV") or shutil.which("uv")
    if not uv:
        raise ConfigError(
            "uv was not found (the variable UV is not set and no `uv` is on PATH) - expected uv, which installs the "
            "environment's own dependencies - install uv (`pip install uv`), or run this command with `uv run`."
        )

    log.info("Installing environment %s into %s (once; log: %s)", source.id, venv, log_file)
    start = time.monotonic()
    # an interrupted build may have left half of one
    shutil.rmtree(venv, ignore_errors=True)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, open(log_file, "ab") as output:
        # An empty uv.toml in the working directory: uv would else read the nearest [tool.uv] above it, and trireme's
        # pins exclude theirs. Not next to the virtual environment: uv refuses to run inside its own cache.
        (Path(folder) / "uv.toml").touch()
        run = partial(_run_uv, uv, folder=Path(folder), log_file=log_file, output=output)
        try:
            run("venv", "--no-project", "--python", _base_python(source.folder), str(venv))
            _install(run, venv, source)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
            raise _install_error(source, error, log_file) from error

    # the marker comes last: without it, the next start builds from scratch
    with atomic_write(venv / COMPLETE) as file:
        file.write(f"{source.id}\n".encode())
    log.info("Installed environment %s in %.0f s", source.id, time.monotonic() - start)


def _install(run: Callable[..., str], venv: Path, source: EnvironmentSource) -> None:
    """Install the package under the first constraint of verifiers that its dependencies can be resolved under.

    Raises: ConfigError if they can be resolved, but under none of them.
    """
    assert source.folder is not None
    choice = verifiers_of(source.folder)
    # Not `--compile-bytecode`: 12,000 files, while the run waits. Workers compile what they import.
    install = ["pip", "install", "--python", str(_python(venv)), "--editable", str(source.folder), *choice.requirements]
    # uv caches what it built of a folder, and rebuilds it only when that folder's pyproject.toml changes.
    for package in local_packages(source.folder):
        install += [] if package.editable else ["--reinstall-package", package.name]

    if choice.left_out:
        log.info("Environment %s: %s of verifiers[rl] are not installed", source.id, ", ".join(choice.left_out))
        run = partial(run, left_out=choice.left_out)

    # A dry run resolves and installs nothing, so what cannot be fetched or built is tried once.
    conflict = ""
    for constraints in choice.constraints:
        try:
            run(*install, "--dry-run", constraints=constraints)
        except subprocess.CalledProcessError as error:
            conflict = error.output
            if NO_SOLUTION not in conflict:
                raise
        else:
            run(*install, constraints=constraints)
            return

    # Without constraints, uv says itself what is wrong with all other dependencies.
    found = run(*install, "--dry-run") if choice.is_certain and conflict else ""
    if resolved := RESOLVED_VERIFIERS.search(found):
        raise _version_error(source, choice, resolved[1], conflict)
    run(*install)


def _run_uv(
    uv: str,
    *arguments: str,
    folder: Path,
    log_file: Path,
    output: IO[bytes],
    constraints: Sequence[str] = (),
    left_out: Sequence[str] = (),
) -> str:
    """Run uv in a folder, with its output in the log, and return that output."""
    command = [uv, *arguments]
    if constraints:
        (folder / "constraints.txt").write_text("\n".join(constraints))
        command += ["--constraints", "constraints.txt"]
    if left_out:
        # a requirement for no platform: the package is resolved as a dependency, and not installed
        (folder / "overrides.txt").write_text("\n".join(f"{name}; sys_platform == 'never'" for name in left_out))
        command += ["--overrides", "overrides.txt"]
    output.write(f"$ {' '.join(command)}  # {', '.join(constraints) or 'without constraints'}\n".encode())
    output.flush()
    began = output.tell()
    # uv must not install into this process's environment, and code that builds packages must not see the token
    variables = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH", TOKEN)}
    ended = subprocess.run(
        command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=output,
        stderr=subprocess.STDOUT, timeout=BUILD_TIMEOUT_S,
    )  # fmt: skip
    said = "\n".join(last_lines(log_file, start=began))
    if ended.returncode:
        raise subprocess.CalledProcessError(ended.returncode, command, said)
    return said


def _version_error(source: EnvironmentSource, choice: VersionChoice, version: str, conflict: str) -> ConfigError:
    """Name the version, the range that asks for it, and the pin that would help.

    Args:
        conflict: uv's explanation, which names the range if it is that of a dependency.
    """
    assert source.folder is not None
    assert choice.api is not None
    packages = [source.folder, *(package.path for package in local_packages(source.folder) if package.path.is_dir())]
    files = [(folder / "pyproject.toml", declarations(_read_project(folder))) for folder in packages]
    declared = [f"{' and '.join(texts)} in {file}" for file, texts in files if texts]
    if not declared:
        # no file declares it, so a dependency does: uv's explanation names that, among the constraints that were tried
        ours = {text for constraints in choice.constraints for text in constraints}
        said = DEPENDS_ON_VERIFIERS.finditer(" ".join(conflict.split()))
        declared = [each[0] for each in said if each[1] not in ours] or ["by one of its dependencies"]
    return ConfigError(
        f"Environment {source.id!r} gets verifiers {version} from the declared range ({'; '.join(declared)}), and its "
        f"code uses {choice.api} of verifiers, which needs {RUNS[choice.api]} here - expected a range that admits such "
        f"a version - pin {VERIFIERS[choice.api]} there."
    )


def _install_error(source: EnvironmentSource, error: Exception, log_file: Path) -> ConfigError:
    what = f"uv ended with code {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else str(error)
    return ConfigError(
        f"Environment {source.id!r} could not be installed: {what}. Last lines:\n"
        + "\n".join(f"  {line}" for line in last_lines(log_file, 12))
        + f"\nExpected {source.folder} and its dependencies to install into an environment of their own - correct its "
        f"pyproject.toml, or see that uv reaches its package index; the whole log is {log_file}"
    )


@dataclass(frozen=True)
class LocalPackage:
    """A `path` entry of a pyproject.toml's `[tool.uv.sources]`. uv installs it with the package that names it.

    Example:
        [tool.uv.sources]
        python-sandbox = { path = "../python_sandbox", editable = true }
    """

    name: str
    path: Path  # a folder, or a wheel
    editable: bool

    def key(self) -> Iterator[bytes]:
        """Yield what decides which of its files a virtual environment holds."""
        yield f"{self.name} {self.path} {self.editable}".encode()
        if self.editable:
            # its code is used in place, so only its dependencies count
            files = [self.path / "pyproject.toml"]
        elif self.path.is_dir():
            # it is copied, so each of its files counts
            inside = sorted(path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file())
            ignored = [any(part in _NO_CONTENT or part.startswith(".") for part in path.parts) for path in inside]
            files = [self.path / path for path, is_ignored in zip(inside, ignored, strict=True) if not is_ignored]
        else:
            files = [self.path]
        for file in files:
            if file.is_file():
                yield str(file).encode()
                yield file.read_bytes()


def local_packages(folder: Path) -> list[LocalPackage]:
    """Return the local packages that a package depends on, directly or through others; each once.

    Raises: ConfigError if one does not exist.
    """
    found: dict[Path, LocalPackage] = {}
    pending = [folder]
    while pending:
        for package in _local_packages_of(pending.pop()):
            # packages may depend on each other in a circle
            if package.path not in found and package.path != folder:
                found[package.path] = package
                pending += [package.path] if package.path.is_dir() else []
    return sorted(found.values(), key=lambda package: package.path)


def _local_packages_of(folder: Path) -> Iterator[LocalPackage]:
    project = folder / "pyproject.toml"
    for name, entries in table(_read_project(folder), "tool", "uv", "sources").items():
        for entry in entries if isinstance(entries, list) else [entries]:
            if isinstance(entry, dict) and "path" in entry:
                path = (folder / str(entry["path"])).resolve()
                if not path.exists():
                    raise ConfigError(
                        f"{project} takes {name!r} from {entry['path']!r}, and there is nothing at {path} - expected "
                        "the package there - correct `path` in its [tool.uv.sources]; it is relative to that file."
                    )
                yield LocalPackage(name, path, bool(entry.get("editable")) and path.is_dir())
