"""Load an environment from a module's name or a file's path, and detect its kind unless that is given."""

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType

from trireme_plain import PlainAdapter
from trireme_rollout import Adapter


def load_adapter(module: str, *, kind: str, args: dict, agent: dict | None = None) -> Adapter:
    """
    Args:
        agent: the program that plays the rollouts, as the table `[orchestrator.env.agent]` describes it.
    """
    if Path(module).is_dir():
        return _harbor_adapter(module, args=args, agent=agent)
    imported = _import(module)
    # by what it exports; one that has `load_environment` too is treated as v0
    is_v1 = not hasattr(imported, "load_environment") and _exports(imported, "Taskset", "Env")
    if agent is not None:
        return _agent_adapter(imported, module=module, args=args, agent=agent, is_v1=is_v1)
    if not is_v1 and _exports(imported, "Harness"):
        raise TypeError(
            f"{module} is a harness of verifiers v1: it drives an agent and has no tasks - expected an environment - "
            "give the name of one as `id`, and the harness in its `args`: "
            f'{{ agent = {{ harness = {{ id = "{module}" }} }} }}.'
        )
    if not is_v1 and not hasattr(imported, "load_environment"):
        return PlainAdapter(imported, args=args, versions=_versions(module))
    environment = None if is_v1 else imported.load_environment(**args)
    base = getattr(sys.modules.get("verifiers"), "Environment", None)  # gone since 0.4
    is_v0 = base is not None and isinstance(environment, base)
    if not is_v0 and not is_v1:
        if kind == "verifiers":
            raise TypeError(
                f"`load_environment` of {module} returned a {type(environment).__qualname__} - expected a verifiers v0 "
                "Environment (SingleTurnEnv, MultiTurnEnv, ToolEnv, EnvGroup, ...) - install verifiers 0.2.0, or set "
                'its kind to "plain" if it is a data set with a reward function.'
            )
        return PlainAdapter(environment, args={}, versions=_versions(module))
    if kind == "plain":
        what = "exports a verifiers v1 environment" if is_v1 else "returns a verifiers environment"
        raise TypeError(
            f'{module} {what} - expected a plain data set with a reward function - set its kind to "verifiers".'
        )
    versions = _versions(module, "verifiers")
    if is_v0:
        from trireme_verifiers import VerifiersAdapter  # only here: importing verifiers costs seconds

        return VerifiersAdapter(environment, name=module, versions=versions)
    if versions.get("verifiers", "0").startswith(("0.0.", "0.1.", "0.2.", "0.3.")):
        raise TypeError(
            f"{module} exports a verifiers v1 environment, and verifiers {versions['verifiers']} is installed - "
            "expected 0.4 or newer, where v1 is settled - pin verifiers==0.4.0 in its pyproject.toml, or export "
            "`load_environment` with a v0 environment."
        )
    from trireme_verifiers_v1 import VerifiersV1Adapter

    return VerifiersV1Adapter(module, args=args, versions=versions)


def _agent_adapter(imported: ModuleType, *, module: str, args: dict, agent: dict, is_v1: bool) -> Adapter:
    makes = hasattr(imported, "load_environment")
    source = imported.load_environment(**args) if makes else imported
    base = getattr(sys.modules.get("verifiers"), "Environment", None)
    if is_v1 or (base is not None and isinstance(source, base)):
        raise TypeError(
            f"{module} is a verifiers environment, which plays its rollouts itself - expected a plain one, with "
            "`dataset` and `reward` - remove `agent`, or write the reward as a function."
        )
    if agent["external"]:
        from trireme_client import ClientAdapter

        return ClientAdapter(source, args={} if makes else args, versions=_versions(module))
    from trireme_agent import AgentAdapter

    return AgentAdapter(source, args={} if makes else args, versions=_versions(module), agent=agent)


def _harbor_adapter(folder: str, *, args: dict, agent: dict | None) -> Adapter:
    if agent is None or agent["external"]:
        raise TypeError(
            f"{folder} holds tasks for agent programs - expected a program that solves them - add "
            "`[orchestrator.env.agent]` with its `command`."
        )
    from trireme_harbor import HarborAdapter

    return HarborAdapter(folder, versions=_versions(), agent=agent, **args)


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
        try:
            versions[package] = importlib.metadata.version(package)
        except (importlib.metadata.PackageNotFoundError, ValueError):  # a file, or a module inside a package
            continue
    return versions
