"""Load an environment from a module's name or a file's path, and detect its kind unless that is given."""

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from trireme_plain import PlainAdapter
from trireme_rollout import Ask


class Adapter(Protocol):
    """One loaded environment, whatever it was written for."""

    group_rewards: bool
    """Its rewards compare rollouts of one example: `score` wants a whole group."""

    def facts(self) -> dict:
        """The fields of the `ready` message."""
        ...

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """Keep open what all its rollouts share."""
        ...

    async def play(self, request: dict, ask: Ask) -> Any:
        """Runs the example of a `run` message, up to its last turn."""
        ...

    async def score(self, played: list[Any]) -> list[dict]:
        """The fields of the `done` message for each of a group, or of the one rollout where rewards compare nothing.

        Raises: RewardError, for all of them.
        """
        ...

    async def dispose(self, played: Any) -> None:
        """After the scoring, or where there was none."""
        ...


def load_adapter(module: str, *, kind: str, args: dict) -> Adapter:
    imported = _import(module)
    if _is_verifiers_v1(imported):
        return _verifiers_v1_adapter(imported, args=args, kind=kind)
    if _exports(imported, "Harness"):
        raise TypeError(
            f"{module} is a harness of verifiers v1: it drives an agent and has no tasks - expected an environment - "
            "give the name of one as `id`, and the harness in its `args`: "
            f'{{ agent = {{ harness = {{ id = "{module}" }} }} }}.'
        )
    if not hasattr(imported, "load_environment"):
        return PlainAdapter(imported, args=args, versions=_versions(module))
    environment = imported.load_environment(**args)
    if _is_verifiers(environment):
        return _verifiers_adapter(environment, module=module, kind=kind)
    if kind == "verifiers":
        raise TypeError(
            f"`load_environment` of {module} returned a {type(environment).__qualname__} - expected a verifiers v0 "
            "Environment (SingleTurnEnv, MultiTurnEnv, ToolEnv, EnvGroup, ...) - install verifiers 0.2.0, or set its "
            'kind to "plain" if it is a data set with a reward function.'
        )
    return PlainAdapter(environment, args={}, versions=_versions(module))


def _verifiers_adapter(environment: object, *, module: str, kind: str) -> Adapter:
    if kind == "plain":
        raise TypeError(
            f"`load_environment` of {module} returned a verifiers environment - expected a plain data set with a "
            'reward function - set its kind to "verifiers".'
        )
    from trireme_verifiers import VerifiersAdapter  # only here: importing verifiers costs seconds

    return VerifiersAdapter(environment, name=module, versions=_versions(module, "verifiers"))


def _verifiers_v1_adapter(module: ModuleType, *, args: dict, kind: str) -> Adapter:
    if kind == "plain":
        raise TypeError(
            f"{module.__name__} exports a verifiers v1 environment - expected a plain data set with a reward function "
            '- set its kind to "verifiers".'
        )
    versions = _versions(module.__name__, "verifiers")
    if versions.get("verifiers", "0").startswith(("0.0.", "0.1.", "0.2.", "0.3.")):
        raise TypeError(
            f"{module.__name__} exports a verifiers v1 environment, and verifiers {versions['verifiers']} is installed "
            "- expected 0.4 or newer, where v1 is settled - pin verifiers==0.4.0 in its pyproject.toml, or export "
            "`load_environment` with a v0 environment."
        )
    from trireme_verifiers_v1 import VerifiersV1Adapter

    return VerifiersV1Adapter(module.__name__, args=args, versions=versions)


def _is_verifiers_v1(module: ModuleType) -> bool:
    """Detect a v1 package by what it exports. One that has `load_environment` too is treated as v0."""
    return not hasattr(module, "load_environment") and _exports(module, "Taskset", "Env")


def _exports(module: ModuleType, *names: str) -> bool:
    """Return whether the module exports one of these kinds of verifiers v1."""
    v1 = sys.modules.get("verifiers.v1")
    kinds = tuple(kind for name in names if (kind := getattr(v1, name, None)) is not None)
    exported = [getattr(module, name, None) for name in getattr(module, "__all__", [])]
    return any(isinstance(each, type) and issubclass(each, kinds) for each in exported)


def _is_verifiers(environment: object) -> bool:
    verifiers = sys.modules.get("verifiers")
    base = getattr(verifiers, "Environment", None)  # gone since 0.4
    return base is not None and isinstance(environment, base)


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


def _versions(*packages: str) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except (importlib.metadata.PackageNotFoundError, ValueError):  # a file, or a module inside a package
            continue
    return versions
