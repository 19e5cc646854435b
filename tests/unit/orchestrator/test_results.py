"""Answers of an evaluation on disk, whatever kills their writer, and pass@k against counting every choice."""

import asyncio
import datetime
import json
import os
from fractions import Fraction
from itertools import combinations, product
from math import comb
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.processes.limits import file_size_limit
from trireme.algo.pass_at_k import mean_pass_at_k, pass_at_k, powers_of_two
from trireme.base.errors import ConfigError
from trireme.config.orchestrator import Environment
from trireme.orchestrator.evaluation import results
from trireme.tools.evaluate.config import EvalConfig
from trireme.tools.evaluate.session import EvalSession


def answered(example: int) -> results.EvalResult:
    found = {"metrics": {"length": 3.0}, "info": {"a": {"b": 1}}}
    return results.EvalResult(example_id=example, reward=0.5, example=example, rollout=0, **found)


@given(cut=st.integers(min_value=0, max_value=400))
def test_evaluation_answers_survive_a_torn_last_line(cut: int) -> None:
    """Also where what is left of it ends like a whole one."""
    with TemporaryDirectory() as folder:
        file = results.EvalResultsFile(Path(folder) / "say.jsonl")
        file.append(answered(0))
        whole = file.partial.stat().st_size
        file.append(answered(1))
        os.truncate(file.partial, min(file.partial.stat().st_size, whole + cut))
        survives = file.partial.read_bytes()[whole:].rstrip(b"\n").endswith(b'"error": null}')
        next_one = results.EvalResultsFile(file.path)
        next_one.append(answered(2))
        assert next_one.read_partial().keys() == {(0, 0), (2, 0)} | ({(1, 0)} if survives else set())


def test_evaluation_line_cut_short_by_a_full_disk_does_not_count(tmp_path: Path) -> None:
    file = results.EvalResultsFile(tmp_path / "say.jsonl")
    file.append(answered(0))
    with file_size_limit(file.partial.stat().st_size + 40), pytest.raises(OSError, match="bytes were written"):
        file.append(answered(1))
    assert file.read_partial().keys() == {(0, 0)}
    file.append(answered(1))
    assert file.read_partial().keys() == {(0, 0), (1, 0)}
    with open(file.partial, "ab") as more:
        more.write(b'{"loss": 1}\n')
    with pytest.raises(ConfigError, match=r"line 4 is no result of an evaluation"):
        file.read_all()


def test_what_the_command_left_is_not_the_runs_own_and_makes_way_whole(tmp_path: Path) -> None:
    path = tmp_path / "say.v1.jsonl"
    file = results.EvalResultsFile(path)
    file.finish([answered(0)])
    assert results.is_runs_own(path)
    results.move_aside(path)  # of its own results a run makes others in their place
    assert results.is_runs_own(path)
    results.description_path(path).write_text("{}")
    assert not results.is_runs_own(path)
    results.move_aside(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["say.v1.command.json", "say.v1.command.jsonl"]


def test_pass_at_k_equals_the_share_of_choices_with_a_passed_answer() -> None:
    for n in range(1, 9):
        for c, k in product(range(n + 1), range(1, n + 1)):
            choices = list(combinations(range(n), k))
            share = Fraction(sum(min(choice) < c for choice in choices), len(choices))
            assert pass_at_k(n, c, k) == pytest.approx(float(share), abs=1e-14)
    # it neither overflows nor loses digits where the binomials are huge
    for n, c, k in ((200, 1, 100), (1000, 3, 64), (100_000, 7, 5000)):
        assert pass_at_k(n, c, k) == pytest.approx(float(1 - Fraction(comb(n - c, k), comb(n, k))), rel=1e-11)
    assert mean_pass_at_k(4, [0, 1, 4], 2) == pytest.approx(np.mean([0.0, 0.5, 1.0]))
    assert [powers_of_two(most) for most in (1, 2, 3, 8, 9)] == [(1,), (1, 2), (1, 2), (1, 2, 4, 8), (1, 2, 4, 8)]


def test_date_among_environment_arguments_is_written_as_text(tmp_path: Path) -> None:
    config = Environment(id="e", args={"since": datetime.date(2026, 1, 2)})
    sizes: dict[str, Any] = {"num_train": 0, "num_eval": 1, "check_group_size": lambda size: None}
    environment: Any = SimpleNamespace(name="e", config=config, group_rewards=False, **sizes)
    policy: Any = SimpleNamespace(rollout=print)
    for _ in range(2):  # the second time with the description of the first
        session = EvalSession(environment, policy, EvalConfig(), settings={})
        session.resume(tmp_path / "e.jsonl", tmp_path / "e.json")
        session.results = {spec.key: answered(0) for spec in session.missing}
        asyncio.run(session.run(print))
    assert json.loads((tmp_path / "e.json").read_text())["env_args"] == {"since": "2026-01-02"}
