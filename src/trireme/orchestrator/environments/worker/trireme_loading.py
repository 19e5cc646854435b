"""From a module's name or a file's path to an adapter. What kind of environment it is can be left to us ("auto")."""

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Protocol

from trireme_plain import PlainAdapter
from trireme_rollout import Ask


class Adapter(Protocol):
    """One loaded environment, whatever it was written for."""

    def facts(self) -> dict:
        """The fields of the `ready` message."""
        ...

    async def rollout(self, request: dict, ask: Ask) -> dict:
        """Runs and scores the example of a `run` message; returns the fields of the `done` message.

        Raises: RewardError where scoring failed; anything else is a failed rollout.
        """
        ...


def load_adapter(module: str, *, kind: str, args: dict) -> Adapter:
    imported = _import(module)
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


def _is_verifiers(environment: object) -> bool:
    verifiers = sys.modules.get("verifiers")
    return verifiers is not None and isinstance(environment, verifiers.Environment)


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
