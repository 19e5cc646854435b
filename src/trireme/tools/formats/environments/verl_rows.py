"""An environment of verl's rows: Parquet or JSON files, and a reward function `compute_score` in a file of the user's.

Example:
    {"prompt": [{"role": "user", "content": "1 + 1?"}], "data_source": "openai/gsm8k",
     "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 0}}
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANSWER = re.compile(r"#### (-?[0-9.,]+)")
LAST = 300  # characters of an answer that are searched for the result


def load_environment(
    train_files: list[str],
    val_files: list[str],
    *,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
    max_rows: int = -1,
    reward_path: str | None = None,
    reward_name: str = "compute_score",
    reward_kwargs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return examples and reward. The reward function is called as verl does: with keywords, and in a thread unless it
    is async."""
    score: Callable[..., Any] = load_function(Path(reward_path), reward_name) if reward_path else compute_score

    async def reward(completion: str, example: dict[str, Any]) -> dict[str, Any]:
        call = {
            "data_source": example["source"],
            "solution_str": completion,
            "ground_truth": example["answer"],
            "extra_info": dict(example["row"].get("extra_info") or {}),
        } | (reward_kwargs or {})
        value = await score(**call) if inspect.iscoroutinefunction(score) else await asyncio.to_thread(score, **call)
        if isinstance(value, dict):
            return {"reward": value["score"], **{key: each for key, each in value.items() if key != "score"}}
        return {"reward": float(value)}

    rows = read_files(train_files)[: max_rows if max_rows > 0 else None]
    return {
        "dataset": [example_of(row, prompt_key, source_key) for row in rows],
        "eval_dataset": [example_of(row, prompt_key, source_key) for row in read_files(val_files)],
        "reward": reward,
    }


def example_of(row: dict[str, Any], prompt_key: str, source_key: str) -> dict[str, Any]:
    if prompt_key not in row:
        raise ValueError(
            f"a row has {', '.join(row)} - expected the column {prompt_key!r} with messages - set `data.prompt_key`."
        )
    truth = (row.get("reward_model") or {}).get("ground_truth")
    return {"prompt": row[prompt_key], "answer": truth, "source": row.get(source_key), "row": row}


def read_files(files: list[str]) -> list[dict[str, Any]]:
    """Return the rows of .parquet, .json and .jsonl files. Raises: ValueError for another kind."""
    rows: list[dict[str, Any]] = []
    for file in map(Path, files):
        if file.suffix == ".parquet":
            from pyarrow.parquet import read_table

            rows += read_table(file).to_pylist()
        elif file.suffix in (".json", ".jsonl"):
            text = file.read_text(encoding="utf-8")
            is_lines = file.suffix == ".jsonl" or not text.lstrip().startswith("[")
            rows += [json.loads(line) for line in text.splitlines() if line.strip()] if is_lines else json.loads(text)
        else:
            raise ValueError(f"{file} is no .parquet, .json or .jsonl file - expected one of these - convert it.")
    return rows


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """Return a function of a file. Raises: ValueError if it is not there."""
    spec = importlib.util.spec_from_file_location(f"reward_of_{path.stem}", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"custom_reward_function.path = {path} is no Python file - expected one - correct the path.")
    sys.path.insert(0, str(path.parent))  # its neighbours can be imported
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(function := getattr(module, name, None)):
        raise ValueError(f"{path} has no function {name} - expected it there - set custom_reward_function.name.")
    return function


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 if the last number behind `#### ` near the end of an answer is the right one, as verl has it for GSM8K."""
    if data_source != "openai/gsm8k":
        raise ValueError(
            f"data_source is {data_source!r}, and no reward for it is built in - expected openai/gsm8k - name a "
            "function of yours: `custom_reward_function.path=FILE.py`."
        )
    found = ANSWER.findall(solution_str[-LAST:])
    return float(bool(found) and found[-1].replace(",", "") == ground_truth)
