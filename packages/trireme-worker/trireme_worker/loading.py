"""Load an environment from a module's name or a file's path, and detect its kind unless that is given."""

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from trireme_worker.plain import ClientAdapter, PlainAdapter
from trireme_worker.rollout import Adapter

IMPORTS_V0 = re.compile(r"^\s*(?:import|from)\s+verifiers\b(?!\.v1)", re.MULTILINE)


def load_adapter(kind: str, module: str, *, args: dict, agent: dict | None = None) -> Adapter:
    """Import an environment's code and return the adapter that runs it.

    Args:
        kind: the kind of its source, as `Load` has it: a folder of the working directory may have the name of a module.
        agent: the program that plays the rollouts, as the table `[orchestrator.env.agent]` describes it.
    """
    if kind == "tasks":
        if agent is None or agent["external"]:
            raise TypeError(
                f"{module} holds tasks for agent programs - expected a program that solves them - add "
                "`[orchestrator.env.agent]` with its `command`."
            )
        from trireme_worker.agents.harbor import HarborAdapter

        return HarborAdapter(module, versions=_versions(), agent=agent, **args)

    try:
        with quick_imports():
            imported = _import_file(module) if kind == "file" else importlib.import_module(module)
        # decided by its exports; with `load_environment` too it is treated as v0, if the installed verifiers has that
        is_v1 = _exports(imported, "Taskset", "Env")
        makes_one = hasattr(imported, "load_environment") and not (is_v1 and _verifiers_version() >= (0, 4))
        source, left = (imported.load_environment(**args), {}) if makes_one else (imported, args)
    except (ImportError, AttributeError) as error:
        # an import that fails may only show that another version of verifiers is installed
        if words := _wrong_version(kind, module, error):
            raise TypeError(words) from error
        raise

    is_v1 = is_v1 and not makes_one
    if agent is None and not is_v1 and _exports(imported, "Harness"):
        raise TypeError(
            f"{module} is a harness of verifiers v1: it drives an agent and has no tasks - expected an environment - "
            "give the name of one as `id`, and the harness in its `args`: "
            f'{{ agent = {{ harness = {{ id = "{module}" }} }} }}.'
        )

    # verifiers environments play their rollouts themselves, so no agent program can take their place
    base = getattr(sys.modules.get("verifiers"), "Environment", None)  # gone since 0.4
    is_v0 = base is not None and isinstance(source, base)
    if agent is not None and (is_v0 or is_v1):
        raise TypeError(
            f"{module} is a verifiers environment, which plays its rollouts itself - expected a plain one, with "
            "`dataset` and `reward` - remove `agent`, or write the reward as a function."
        )
    # each adapter is imported only when it is needed: verifiers alone costs seconds
    if agent is not None and agent["external"]:
        return ClientAdapter(source, args=left, versions=_versions(module))
    if agent is not None:
        from trireme_worker.agents.agent import AgentAdapter

        return AgentAdapter(source, args=left, versions=_versions(module), agent=agent)

    versions = _versions(module, "verifiers")
    if is_v0:
        if words := _wrong_version(kind, module):
            raise TypeError(words)
        from trireme_worker.verifiers_v0 import VerifiersAdapter

        return VerifiersAdapter(source, versions=versions)
    if not is_v1:
        return PlainAdapter(source, args=left, versions=_versions(module))

    if () < _verifiers_version() < (0, 4):
        raise TypeError(
            f"{module} exports a verifiers v1 environment, and verifiers {versions['verifiers']} is installed - "
            "expected 0.4 or newer, where v1 is settled - pin verifiers==0.4.0 in its pyproject.toml, or export "
            "`load_environment` with a v0 environment."
        )
    from trireme_worker.verifiers_v1 import VerifiersV1Adapter

    return VerifiersV1Adapter(module, args=args, versions=versions)


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Disable garbage collection during large imports: a sixth of the time that verifiers' import takes."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _wrong_version(kind: str, module: str, error: Exception | None = None) -> str:
    """Return in a sentence that the code needs another version of verifiers; nothing if it has the right one.

    uv chooses the version for a package. A file, or an installed package, finds that of Trireme's own environment.
    """
    version, code = _versions("verifiers").get("verifiers", ""), _code_of(kind, module)
    is_missing = isinstance(error, ModuleNotFoundError) and error.name == "verifiers"
    is_v0 = IMPORTS_V0.search(code) and "verifiers.v1" not in code
    if not is_missing and not (is_v0 and version and not (0, 1, 14) <= _verifiers_version() <= (0, 3, 1)):
        return ""
    found = f"verifiers {version} is installed" if version else "no verifiers is installed"
    return (
        f"{module} imports {'v0 of ' if is_v0 else ''}verifiers, and {found} in {sys.prefix} - expected 0.1.14 "
        "to 0.3.1 for v0, and 0.4 or newer for v1 - "
        + (
            "pin verifiers==0.2.0 (v0) or 0.4.0 (v1) in its pyproject.toml"
            if kind == "package"
            else "use it as a package in environments/, which gets verifiers and a virtual environment of its own"
        )
        + "."
    )


def _code_of(kind: str, module: str) -> str:
    spec = None if kind == "file" else importlib.util.find_spec(module)
    path = module if kind == "file" else spec.origin if spec else None
    return Path(path).read_text(errors="replace") if path and path.endswith(".py") else ""


def _verifiers_version() -> tuple[int, ...]:
    """Return the numbers of the installed version, such as (0, 2, 0); none if verifiers is not installed."""
    return tuple(map(int, re.findall(r"\d+", _versions("verifiers").get("verifiers", ""))[:3]))


def _exports(module: ModuleType, *names: str) -> bool:
    """Return whether the module exports one of these kinds of verifiers v1."""
    v1 = sys.modules.get("verifiers.v1")
    kinds = tuple(kind for name in names if (kind := getattr(v1, name, None)) is not None)
    exported = [getattr(module, name, None) for name in getattr(module, "__all__", [])]
    return any(isinstance(each, type) and issubclass(each, kinds) for each in exported)


def _import_file(module: str) -> ModuleType:
    path = Path(module)
    sys.path.insert(0, str(path.parent))  # its neighbours can be imported
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    loaded = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def folder_of(kind: str, module: str) -> Path:
    """Return the folder of a loaded environment: of its package or file, or its tasks."""
    if kind == "tasks":
        return Path(module)
    if kind == "file":
        return Path(module).parent
    loaded = sys.modules[module]
    return Path(loaded.__file__).parent if loaded.__file__ else Path(next(iter(loaded.__path__)))


def _versions(*packages: str) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in packages:
        # a file, or a module inside a package, has no version
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            versions[package] = importlib.metadata.version(package)
    return versions
