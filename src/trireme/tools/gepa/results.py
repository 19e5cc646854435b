"""The files of a search: the best prompt, the Pareto frontier, all prompts, and the settings with a summary."""

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
from trireme.tools.gepa.records import REFLECTIONS, ROLLOUTS, Drawn

BEST_PROMPT = "best_prompt.txt"
BEST_ARGS = "best_args.json"
FRONTIER = "pareto_frontier.jsonl"
CANDIDATES = "candidates.jsonl"
METADATA = "metadata.json"
LOG = "gepa.log"
FILES = (BEST_PROMPT, BEST_ARGS, FRONTIER, CANDIDATES, METADATA, LOG, ROLLOUTS, REFLECTIONS, REFLECTION_ENGINE)
"""Everything that a search writes into its folder."""

MAY_DIFFER = frozenset(
    {"max_calls", "base_url", "api_key_var", "endpoints", "output", "fresh", "max_concurrent"}
    | {"num_workers", "request_timeout_s", "device", "inference", "environments", "initial_prompt"}
    | {"reflection_model", "reflection_base_url", "reflection_api_key_var", "reflection_sampling"}
)
"""Keys that may change when a search is resumed. All others decide what its rollouts mean."""

SHOWN = 80


@dataclass(frozen=True)
class Candidate:
    """A prompt that was scored on all validation examples."""

    prompt: str
    parent: int | None  # number of the prompt that it was made from; None of the first
    scores: tuple[float, ...]  # by validation example

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)


def best_of(candidates: Sequence[Candidate]) -> int:
    """Return the number of the prompt with the highest validation score; the first of several."""
    return max(range(len(candidates)), key=lambda number: candidates[number].mean)


def write_candidates(folder: Path, config: GepaConfig, candidates: Sequence[Candidate], drawn: Drawn) -> None:
    prompt = candidates[best_of(candidates)].prompt
    _write(folder / BEST_PROMPT, f"{prompt}\n")
    args = config.model_dump(mode="json")["env_args"] | {"system_prompt": prompt}  # TOML has dates, JSON has not
    _write(folder / BEST_ARGS, json.dumps(args, ensure_ascii=False) + "\n")
    rows = [
        {
            "prompt_number": number,
            "parent": candidate.parent,
            "validation": candidate.mean,
            "prompt": candidate.prompt,
            "scores": list(candidate.scores),
        }
        for number, candidate in enumerate(candidates)
    ]
    _write_lines(folder / CANDIDATES, rows)
    frontier = []
    for place, example in enumerate(drawn.validation):
        scores = [candidate.scores[place] for candidate in candidates]
        numbers = [number for number, score in enumerate(scores) if score == max(scores)]
        frontier.append(
            {
                "validation_example": place,
                "split": example.split,
                "example": example.index,
                "best_score": max(scores),
                "prompt_numbers": numbers,
                "best_prompts": [candidates[number].prompt for number in numbers],
            }
        )
    _write_lines(folder / FRONTIER, frontier)


def write_metadata(folder: Path, config: GepaConfig, facts: dict[str, Any], summary: dict[str, Any]) -> None:
    """Write the settings under their own keys, with facts of the environment and the summary."""
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("trireme", "gepa")}
    whole = config.model_dump(mode="json") | {"environment": facts, "versions": versions, "summary": summary}
    _write(folder / METADATA, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def read_metadata(folder: Path) -> dict[str, Any] | None:
    """Return the settings and the summary of the search in `folder`, or None where there is none."""
    try:
        read = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{folder / METADATA} cannot be read ({error}) - expected what an earlier search wrote. Start a new search "
            "with `--fresh`, which moves it aside, or give another `--output`."
        ) from error
    return read if isinstance(read, dict) else {}


def check_same(folder: Path, config: GepaConfig, facts: dict[str, Any] | None = None) -> None:
    """Check that the search in `folder` has the same settings: results of different ones cannot be compared.

    Args:
        facts: of the environment, once it is loaded.

    Raises: ConfigError.
    """
    before = read_metadata(folder)
    if before is None:
        return
    pairs = [
        (key, before.get(key), value) for key, value in config.model_dump(mode="json").items() if key not in MAY_DIFFER
    ]
    pairs.append(("the version of gepa", before.get("versions", {}).get("gepa"), importlib.metadata.version("gepa")))
    known = before.get("environment", {})
    pairs += [(f"the environment's {key}", known[key], value) for key, value in (facts or {}).items() if key in known]
    changed = [f"{what} was {_short(old)}, is {_short(new)}" for what, old, new in pairs if old != new]
    if changed:
        raise ConfigError(
            f"{folder} holds a search with other settings: {'; '.join(changed)} - expected the same, to resume it. "
            "`--fresh` starts a new search and moves it aside; `--output FOLDER` leaves it where it is."
        )


def describe(summary: dict[str, Any], folder: Path, config: GepaConfig) -> str:
    """Return the summary in words, with the command that verifies the best prompt."""
    validation, held_out, calls = summary["validation"], summary["held_out"], summary["calls"]
    lines = [
        f"{summary['num_prompts']} prompts in {calls['total']} of {config.max_calls} calls ({summary['why']})",
        f"validation  {validation['before']:.3f} -> {validation['after']:.3f} "
        f"({validation['num_examples']} examples, by which the best prompt was chosen)",
    ]
    if held_out is not None:
        lines.append(
            f"held out    {held_out['before']:.3f} -> {held_out['after']:.3f} "
            f"({held_out['num_examples']} examples that nothing had seen)"
        )
    else:
        lines.append("held out    not measured: `--num-test 50` keeps examples that nothing sees until the end")
    if summary["best"] == 0:
        lines.append("no prompt was better than the one to begin with, which best_prompt.txt holds")
    lines.append(f"best prompt {folder / BEST_PROMPT}")
    at = f" -b {config.base_url}" if config.base_url else ""
    arguments = f'-a "$(cat {folder / BEST_ARGS})"'
    lines.append(f"verify      trireme eval run {config.env_id} -m {config.model}{at} {arguments}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    _write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
