"""Load an environment from a module's name or a file's path, and detect its kind unless that is given."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType

from trireme_plain import PlainAdapter
from trireme_rollout import Adapter


def load_adapter(module: str, *, args: dict, agent: dict | None = None) -> Adapter:
    """
    Args:
        agent: the program that plays the rollouts, as the table `[orchestrator.env.agent]` describes it.
    """
    if Path(module).is_dir():
        if agent is None or agent["external"]:
            raise TypeError(
                f"{module} holds tasks for agent programs - expected a program that solves them - add "
                "`[orchestrator.env.agent]` with its `command`."
            )
        from trireme_harbor import HarborAdapter

        return HarborAdapter(module, versions=_versions(), agent=agent, **args)
    imported = _import(module)
    # by what it exports; one that has `load_environment` too is treated as v0
    makes_one = hasattr(imported, "load_environment")
    is_v1 = not makes_one and _exports(imported, "Taskset", "Env")
    if agent is None and not is_v1 and _exports(imported, "Harness"):
        raise TypeError(
            f"{module} is a harness of verifiers v1: it drives an agent and has no tasks - expected an environment - "
            "give the name of one as `id`, and the harness in its `args`: "
            f'{{ agent = {{ harness = {{ id = "{module}" }} }} }}.'
        )
    source, left = (imported.load_environment(**args), {}) if makes_one else (imported, args)
    base = getattr(sys.modules.get("verifiers"), "Environment", None)  # gone since 0.4
    is_v0 = base is not None and isinstance(source, base)
    if agent is not None and (is_v0 or is_v1):
        raise TypeError(
            f"{module} is a verifiers environment, which plays its rollouts itself - expected a plain one, with "
            "`dataset` and `reward` - remove `agent`, or write the reward as a function."
        )
    # each is imported where it is used: verifiers alone costs seconds
    if agent is not None and agent["external"]:
        from trireme_client import ClientAdapter

        return ClientAdapter(source, args=left, versions=_versions(module))
    if agent is not None:
        from trireme_agent import AgentAdapter

        return AgentAdapter(source, args=left, versions=_versions(module), agent=agent)
    versions = _versions(module, "verifiers")
    if is_v0:
        from trireme_verifiers import VerifiersAdapter

        return VerifiersAdapter(source, versions=versions)
    if not is_v1:
        return PlainAdapter(source, args=left, versions=_versions(module))
    if versions.get("verifiers", "0").startswith(("0.0.", "0.1.", "0.2.", "0.3.")):
        raise TypeError(
            f"{module} exports a verifiers v1 environment, and verifiers {versions['verifiers']} is installed - "
            "expected 0.4 or newer, where v1 is settled - pin verifiers==0.4.0 in its pyproject.toml, or export "
            "`load_environment` with a v0 environment."
        )
    from trireme_verifiers_v1 import VerifiersV1Adapter

    return VerifiersV1Adapter(module, args=args, versions=versions)


def _exports(module: ModuleType, *names: str) -> bool:
    """Return whether the module exports one of these kinds of verifiers v1."""
    v1 = sys.modules.get("verifiers.v1")
    kinds = tuple(kind for name in names if (kind := getattr(v1, name, None)) is not None)
    exported = [getattr(module, name, None) for name in getattr(module, "__all__", [])]
    return any(isinstance(each, type) and issubclass(each, kinds) for each in exported)


def _import(module: str) -> ModuleType:
    if not module.endswith(".py"):
        return importlib.import_module(module)
    path = Path(module)
    sys.path.insert(1, str(path.parent))  # its neighbours can be imported, but hide none of our files
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    loaded = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def folder_of(module: str) -> Path:
    """Return the folder of a loaded environment: of its package or file, or its tasks."""
    path = Path(module)
    if path.is_dir():
        return path
    if module.endswith(".py"):
        return path.parent
    loaded = sys.modules[module]
    return Path(loaded.__file__).parent if loaded.__file__ else Path(next(iter(loaded.__path__)))


def _versions(*packages: str) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in packages:
        # of a file, or a module inside a package, there is none
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            versions[package] = importlib.metadata.version(package)
    return versions
