"""A new environment package that works at once: `trireme env init my-env`. Its texts are in `template_texts`."""

from __future__ import annotations

import keyword
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Literal, get_args

from trireme.base.errors import ConfigError
from trireme.tools.environments.template_texts import MODULES, PROJECT, README, REWARDS, VERIFIERS

TemplateKind = Literal["verifiers", "plain", "tool", "multi-turn"]
KINDS: tuple[TemplateKind, ...] = get_args(TemplateKind)

_TAKEN = {"verifiers", "datasets", "openai", "numpy", "torch", "pip", "uv", "hatchling", "test", "tests", "trireme"}
"""Modules that an environment of the same name would hide from itself."""


def write_environment(name: str, *, kind: TemplateKind, root: Path) -> Path:
    """Writes the package and returns its folder; a crash on the way leaves none.

    Raises: ConfigError where the name will not do, or there is something of that name.
    """
    name = checked_name(name)
    folder = root / name.replace("-", "_")
    if (there := _already_there(folder, name, root)) is not None:
        raise ConfigError(
            f"{there} exists already - expected no environment {name!r} there: nothing is overwritten. "
            f"Take another name (`trireme env init {name}-2`), or move that folder away."
        )
    root.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=root))
    try:
        for file, text in template_files(name, kind=kind).items():
            (partial / file).write_text(text, encoding="utf-8")
        partial.chmod(0o777 & ~_umask())
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def template_files(name: str, *, kind: TemplateKind) -> dict[str, str]:
    """By file name."""
    module = name.replace("-", "_")
    words = {"@NAME@": name, "@MODULE@": module, "@REWARD@": REWARDS[kind]}
    words["@DEPENDENCIES@"] = "" if kind == "plain" else f'"{VERIFIERS}"'
    texts = {"pyproject.toml": PROJECT, f"{module}.py": MODULES[kind], "README.md": README}
    return {file: _filled(text, words) for file, text in texts.items()}


def checked_name(name: str) -> str:
    """The name as packages write it, with dashes.

    Raises: ConfigError with one that would do.
    """
    with_dashes = name.replace("_", "-")
    if (why := _trouble(with_dashes)) is None:
        return with_dashes
    raise ConfigError(
        f"{name!r} cannot be the name of an environment: {why} - expected lower-case letters and digits in words "
        f"joined by dashes, such as `my-env`. Try `trireme env init {suggested_name(name)}`."
    )


def suggested_name(name: str) -> str:
    """The nearest one that would do.

    Example:
        suggested_name("My Env!"), suggested_name("2048"), suggested_name("json")  # my-env, env-2048, json-env
    """
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name)  # MyEnv
    plain = re.sub(r"[^a-z0-9]+", "-", split.lower()).strip("-") or "my-env"
    plain = plain if plain[0].isalpha() else f"env-{plain}"
    return next(name for name in (plain, f"{plain[:50]}-env", f"my-{plain[:50].strip('-')}") if _trouble(name) is None)


def _trouble(name: str) -> str | None:
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        return "it is no package's name"
    if len(name) > 60:
        return f"it has {len(name)} letters, 60 are enough"
    if keyword.iskeyword(module):
        return f"`{module}` is a word of Python"
    if module in sys.stdlib_module_names or module in _TAKEN or module.startswith("trireme_"):
        return f"a module `{module}` exists already, which it would hide"
    return None


def _already_there(folder: Path, name: str, root: Path) -> Path | None:
    places = (folder, root / name, root / f"{folder.name}.py")
    return next((place for place in places if os.path.lexists(place)), None)


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def _umask() -> int:
    """It can only be read by setting it."""
    umask = os.umask(0o022)
    os.umask(umask)
    return umask
