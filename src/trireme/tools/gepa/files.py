"""The files of a search: every rollout and reflection as soon as it is over, and what has been found so far.

A search that was stopped is resumed by running it again from its beginning with these answers. The same seed asks the
same questions in the same order, so the search comes to where it stopped without asking a model anything. Only what was
under way or failed is asked again. An answer's name depends on all that it was asked with, so that a search with other
settings never reuses it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import shlex
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from gepa.core.result import GEPAResult

from trireme.base.errors import ConfigError
from trireme.base.paths import atomic_write
from trireme.monitor.lines import append_lines, read_lines
from trireme.orchestrator.environments.venv import find_environment
from trireme.orchestrator.evaluation.results import EvalResult
from trireme.orchestrator.session.wire import Split
from trireme.tools.gepa.config import GepaConfig

COMPONENT = "system_prompt"
"""Name that the library has for the text that it improves."""
ROLLOUTS = "rollouts.jsonl"
REFLECTIONS = "reflections.jsonl"
BEST_PROMPT = "best_prompt.txt"
BEST_ARGS = "best_args.json"
FRONTIER = "pareto_frontier.jsonl"
CANDIDATES = "candidates.jsonl"
METADATA = "metadata.json"
LOG = "gepa.log"
MAY_DIFFER = {
    *("max_calls", "reflection_model", "reflection_sampling", "base_url", "api_key_var", "endpoints", "output"),
    *("max_concurrent", "num_workers", "request_timeout_s", "device", "inference", "environments"),
}
"""Keys that may change when a search is resumed. All others decide what its results mean."""

Example: TypeAlias = tuple[Split, int]
"""One example, by its place in the environment's data."""


def name_of(*asked: Any) -> str:
    """Return a short name of what a model was asked: equal for equal values only."""
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


class PromptRollout(EvalResult, kw_only=True):
    """One rollout with one prompt. The keys of `EvalResult` come first, as analysis scripts expect them.

    Example:
        {"example_id": 3, "reward": 0.5, ..., "split": "train", "prompt_name": "1f3a…"}
    """

    split: Split
    prompt_name: str  # digest of the prompt and all other settings
    columns: dict[str, Any] = {}  # the fields of the environment's state that were asked for
    state_keys: list[str] = []  # all fields of that state, if one that was asked for is missing

    @property
    def score(self) -> float:
        """The reward; 0 if the rollout failed."""
        return self.reward or 0.0

    @property
    def key(self) -> tuple[str, Example, int]:
        """The name of the prompt, the example, and how often this prompt was tried on it before."""
        return self.prompt_name, (self.split, self.example), self.rollout


class Reflection(msgspec.Struct, kw_only=True):
    """One question to the reflection model, and its answer."""

    name: str  # digest of the model, its sampling and the question
    nth: int  # how often the same question was asked before
    question: str
    answer: str
    error: str | None = None  # why there is no answer

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.nth


Line = TypeVar("Line", PromptRollout, Reflection)


class Records(Generic[Line]):
    """A file of a search, and the lines that it holds."""

    def __init__(self, path: Path, kind: type[Line]) -> None:
        """Read the file. What failed is left out, and so is a line whose writer was killed."""
        self.path = path
        self.lines: dict[Hashable, Line] = {}
        self._times: Counter[Hashable] = Counter()
        for text in read_lines(path)[0]:
            with suppress(ValueError, RecursionError):
                line = msgspec.convert(json.loads(text), kind)  # `json.loads` reads NaN and infinity too
                if line.error is None:
                    self.lines[line.key] = line

    def next_time(self, asked: Hashable) -> int:
        """Return how often this process asked for the same rollout or reflection before."""
        self._times[asked] += 1
        return self._times[asked] - 1

    def add(self, line: Line) -> None:
        """Write a line, and wait until it is on disk. Raises: OSError if the disk is full."""
        append_lines(self.path, deque([json.dumps(msgspec.to_builtins(line)).encode()]), sync=True)
        self.lines[line.key] = line


# what was found


def check_same(folder: Path, config: GepaConfig, first_prompt: str | None = None) -> None:
    """Check that the folder has no results of another search, which would be lost.

    Args:
        first_prompt: the prompt to begin with; None if it is not known yet.

    Raises: ConfigError for such results, and for those that cannot be read.
    """
    path, other = folder / METADATA, ""
    if not path.exists():
        return
    try:
        before = dict(json.loads(path.read_bytes()).items())
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error!r}) - expected what an earlier search wrote. Move the folder, or give "
            "another `--output`."
        ) from error

    # As they are written, since TOML has values that JSON has not.
    settings = config.model_dump(mode="json", exclude=MAY_DIFFER)
    if changed := [key for key, value in settings.items() if _to_line(before.get(key)) != _to_line(value)]:
        other = f"with other settings ({', '.join(changed)})"
    began = before.get("summary", {}).get("first_prompt")
    if first_prompt is not None and began not in (None, first_prompt):
        other = f"that began with another prompt ({_begin(began)} before, {_begin(first_prompt)} now)"
    if other:
        raise ConfigError(
            f"{folder} has the results of a search {other} - expected the same, to resume it. `--output FOLDER` starts "
            "another search and keeps these."
        )


def _begin(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


def write_results(
    folder: Path,
    config: GepaConfig,
    found: GEPAResult[Any, Any],
    validation: Sequence[Example],
    summary: dict[str, Any],
) -> None:
    """Write what a search has found so far. Prompts are numbered in the order in which they were found."""
    prompts = [candidate[COMPONENT] for candidate in found.candidates]
    _write(folder / BEST_PROMPT, f"{prompts[found.best_idx]}\n")

    # These arguments load an environment whose `load_environment` takes a `system_prompt` with the best one.
    args = config.model_dump(mode="json")["env_args"]  # TOML has dates, JSON has not
    _write(folder / BEST_ARGS, _to_line(args | {"system_prompt": prompts[found.best_idx]}))

    # Scores are in the order of the validation examples.
    rows = [
        {
            "prompt_number": number,
            "parent": found.parents[number][0],
            "validation": found.val_aggregate_scores[number],
            "prompt": prompt,
            "scores": [found.val_subscores[number][place] for place in range(len(validation))],
        }
        for number, prompt in enumerate(prompts)
    ]
    _write(folder / CANDIDATES, "".join(map(_to_line, rows)))

    # A prompt is on the frontier if none scores higher on at least one example.
    frontier = []
    for place, (split, index) in enumerate(validation):
        numbers = sorted(found.per_val_instance_best_candidates[place])
        frontier.append(
            {
                "validation_example": place,
                "split": split,
                "example": index,
                "best_score": found.val_subscores[numbers[0]][place],
                "prompt_numbers": numbers,
                "best_prompts": [prompts[number] for number in numbers],
            }
        )
    _write(folder / FRONTIER, "".join(map(_to_line, frontier)))

    # `check_same` compares these settings with those of a resumed search.
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("trireme", "gepa")}
    whole = config.model_dump(mode="json") | {"versions": versions, "summary": summary}
    _write(folder / METADATA, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def describe(summary: dict[str, Any], folder: Path, config: GepaConfig) -> str:
    """Return the summary in words, with the command that verifies the best prompt."""
    validation = summary["validation"]
    lines = [
        f"{summary['num_prompts']} prompts in {summary['calls']} of {config.max_calls} calls ({summary['why']})",
        f"validation  {validation['before']:.3f} -> {validation['after']:.3f} "
        f"({validation['num_examples']} examples, by which the best prompt was chosen)",
    ]

    # Prompt 0 is the one that the search began with.
    if summary["best"] == 0:
        lines.append("no prompt was better than the one to begin with, which best_prompt.txt holds")
    lines.append(f"best prompt {folder / BEST_PROMPT}")
    lines.append(f"verify      {verify_command(folder, config)}")
    if config.max_turns is not None:
        lines.append(
            f"            (it takes the environment's own limit of turns, not `max_turns` = {config.max_turns})"
        )
    return "\n".join(lines)


def verify_command(folder: Path, config: GepaConfig) -> str:
    """Return the command that evaluates the best prompt as the search did: it replaces the system message on the way to
    the model, so that the environment's `load_environment` need not take a prompt.
    """
    env = config.env_id

    # A bare name would be looked for in the default folder.
    if config.environments != GepaConfig.model_fields["environments"].default:
        env = str(find_environment(env, root=config.environments).folder or env)

    words = ["trireme", "eval", "run", env, "-m", config.model]
    for flag, value in (("-b", config.base_url), ("-k", config.api_key_var), ("-e", config.endpoints)):
        words += [flag, str(value)] if value is not None else []
    words += ["-n", "100", "--system-prompt-file", str(folder / BEST_PROMPT)]

    settings = config.model_dump(mode="json")  # TOML has dates, JSON has not
    sampling = config.sampling.model_dump(mode="json", exclude_defaults=True)
    for flag, table in (("-a", settings["env_args"]), ("-S", sampling)):
        words += [flag, _to_line(table).strip()] if table else []
    return shlex.join(words)


def _to_line(row: Any) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())
