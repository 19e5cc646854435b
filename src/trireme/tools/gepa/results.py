"""What a search leaves behind: `best_prompt.txt`, `pareto_frontier.jsonl`, `metadata.json`, and how it came to them."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.base.paths import atomic_write
from trireme.tools.gepa.config import REFLECTION_ENGINE, GepaConfig
from trireme.tools.gepa.examples import Drawn, Example
from trireme.tools.gepa.journal import REFLECTIONS, ROLLOUTS
from trireme.tools.gepa.search import Found

MAY_DIFFER = frozenset(
    {"max_calls", "base_url", "api_key_var", "endpoints", "output", "fresh", "max_concurrent"}
    | {"num_workers", "request_timeout_s", "device", "inference", "environments", "initial_prompt"}
    | {"reflection_model", "reflection_base_url", "reflection_api_key_var", "reflection_sampling"}
)
"""Keys that may be others when a search is gone on with: all the rest decides what its rollouts mean."""

SHOWN = 80


@dataclass(frozen=True)
class Files:
    """The folder of a search."""

    folder: Path

    @property
    def names(self) -> list[str]:
        """Everything that a search writes into its folder."""
        paths = (self.best_prompt, self.best_args, self.frontier, self.candidates, self.metadata, self.log)
        return [*(path.name for path in paths), ROLLOUTS, REFLECTIONS, REFLECTION_ENGINE]

    @property
    def best_prompt(self) -> Path:
        return self.folder / "best_prompt.txt"

    @property
    def best_args(self) -> Path:
        return self.folder / "best_args.json"

    @property
    def frontier(self) -> Path:
        return self.folder / "pareto_frontier.jsonl"

    @property
    def candidates(self) -> Path:
        return self.folder / "candidates.jsonl"

    @property
    def metadata(self) -> Path:
        return self.folder / "metadata.json"

    @property
    def log(self) -> Path:
        return self.folder / "gepa.log"


def write_found(files: Files, config: GepaConfig, found: Found, drawn: Drawn) -> None:
    best = found.candidates[found.best].prompt
    _write(files.best_prompt, f"{best}\n")
    _write(files.best_args, json.dumps(config.env_args | {"system_prompt": best}, ensure_ascii=False) + "\n")
    _write_lines(files.candidates, _candidates(found))
    _write_lines(files.frontier, _frontier(found, drawn.validation))


def _candidates(found: Found) -> Iterable[dict[str, Any]]:
    for number, candidate in enumerate(found.candidates):
        mean = {"prompt_number": number, "parent": candidate.parent, "validation": candidate.mean}
        yield mean | {"prompt": candidate.prompt, "scores": list(candidate.scores)}


def _frontier(found: Found, validation: Sequence[Example]) -> Iterable[dict[str, Any]]:
    """Per validation example: what it scored at best, and with which prompts."""
    for place, example in enumerate(validation):
        scores = [candidate.scores[place] for candidate in found.candidates]
        best = [number for number, score in enumerate(scores) if score == max(scores)]
        yield {
            "validation_example": place,
            "split": example.split,
            "example": example.index,
            "best_score": max(scores),
            "prompt_numbers": best,
            "best_prompts": [found.candidates[number].prompt for number in best],
        }


def write_metadata(files: Files, config: GepaConfig, facts: dict[str, Any], summary: dict[str, Any]) -> None:
    """The configuration as typed, under its own keys; what the environment was; what came out."""
    whole = config.model_dump(mode="json") | {"environment": facts, "versions": versions(), "summary": summary}
    _write(files.metadata, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def versions() -> dict[str, str]:
    own = {name: importlib.metadata.version(name) for name in ("trireme", "gepa")}
    return {"python": platform.python_version()} | own


def read_metadata(files: Files) -> dict[str, Any] | None:
    """Of the search that lies there; None where there is none."""
    try:
        said = json.loads(files.metadata.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{files.metadata} cannot be read ({error}) - expected what an earlier search wrote. Begin anew with "
            "`--fresh`, which moves it aside, or give another `--output`."
        ) from error
    return said if isinstance(said, dict) else {}


def check_same(files: Files, config: GepaConfig, facts: dict[str, Any] | None = None) -> None:
    """Before anything is asked: going on with other settings would mix what cannot be compared.

    Args:
        facts: of the environment, where it is loaded already.

    Raises: ConfigError.
    """
    said = read_metadata(files)
    if said is None:
        return
    now = config.model_dump(mode="json")
    pairs = [(key, said.get(key), value) for key, value in now.items() if key not in MAY_DIFFER]
    pairs.append(("the version of gepa", said.get("versions", {}).get("gepa"), versions()["gepa"]))
    before = said.get("environment", {})
    pairs += [(f"the environment's {key}", before[key], value) for key, value in (facts or {}).items() if key in before]
    changed = [f"{what} was {_short(old)}, is {_short(new)}" for what, old, new in pairs if old != new]
    if changed:
        raise ConfigError(
            f"{files.folder} holds a search with other settings: {'; '.join(changed)} - expected the same, to go on "
            "with it. `--fresh` begins anew and moves it aside; `--output FOLDER` leaves it where it is."
        )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())


def _write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    _write(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
