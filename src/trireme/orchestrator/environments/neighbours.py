"""Packages beside an environment that it is installed with: `path` entries of its pyproject.toml's `[tool.uv.sources]`.

uv honours them by itself. Here is what they mean for the key of a virtual environment: the pyproject.toml of each
decides which dependencies it holds. One that is not editable is copied in, so its whole content counts.

Example:
    [tool.uv.sources]
    python-sandbox = { path = "../python_sandbox", editable = true }
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError

_NO_CONTENT = ("__pycache__", "build", "dist")


@dataclass(frozen=True)
class Neighbour:
    name: str
    place: Path  # a folder, or a wheel
    editable: bool


def neighbours_of(folder: Path) -> list[Neighbour]:
    """Of this package, theirs, and so on; each once.

    Raises: ConfigError where one is not there.
    """
    found: dict[Path, Neighbour] = {}
    pending = [folder]
    while pending:
        for neighbour in _named_by(pending.pop()):
            if neighbour.place not in found and neighbour.place != folder:
                found[neighbour.place] = neighbour
                pending += [neighbour.place] if neighbour.place.is_dir() else []
    return sorted(found.values(), key=lambda neighbour: neighbour.place)


def neighbours_key(folder: Path) -> list[bytes]:
    """What of them decides what a virtual environment holds."""
    return [part for neighbour in neighbours_of(folder) for part in _key(neighbour)]


def copied_neighbours(folder: Path) -> list[str]:
    """Names of those that are copied in as they are now."""
    return [neighbour.name for neighbour in neighbours_of(folder) if not neighbour.editable]


def _named_by(folder: Path) -> Iterator[Neighbour]:
    project = folder / "pyproject.toml"
    for name, entries in _sources(project).items():
        for entry in entries if isinstance(entries, list) else [entries]:
            if isinstance(entry, dict) and "path" in entry:
                place = (folder / str(entry["path"])).resolve()
                if not place.exists():
                    raise ConfigError(
                        f"{project} takes {name!r} from {entry['path']!r}, and there is nothing at {place} - expected "
                        "the package there - correct `path` in its [tool.uv.sources]; it is relative to that file."
                    )
                yield Neighbour(name, place, bool(entry.get("editable")) and place.is_dir())


def _sources(project: Path) -> dict[str, Any]:
    """Nothing where the file cannot be read as TOML: uv will say so, and better."""
    try:
        sources = tomllib.loads(project.read_text()).get("tool", {}).get("uv", {}).get("sources", {})
    except (OSError, ValueError, AttributeError):
        return {}
    return sources if isinstance(sources, dict) else {}


def _key(neighbour: Neighbour) -> Iterator[bytes]:
    yield f"{neighbour.name} {neighbour.place} {neighbour.editable}".encode()
    files = [neighbour.place / "pyproject.toml"] if neighbour.editable else _content(neighbour.place)
    for file in files:
        if file.is_file():
            yield str(file).encode()
            yield file.read_bytes()


def _content(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    files = (path.relative_to(place) for path in place.rglob("*") if path.is_file())
    kept = [path for path in files if not any(part in _NO_CONTENT or part.startswith(".") for part in path.parts)]
    return [place / path for path in sorted(kept)]
