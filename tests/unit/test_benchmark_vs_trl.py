"""The comparison with TRL measures what it says: lengths, rewards reached, and no run twice."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "trl"))
from cells import Cell, Results, cells_of
from models import Spread, num_parameters, write_countdown
from summary import rate, reached
from task import dataset


def test_a_countdown_model_answers_with_the_lengths_of_its_prompt(tmp_path):
    fixed, spread = Spread(0.0, mean=7, longest=24), Spread(0.8, mean=6, longest=24)
    folder = write_countdown(tmp_path / "model", [fixed, spread], hidden=64, layers=2, heads=2)
    assert lengths_of(folder, fixed, count=16) == [8] * 16  # the end is a token too
    found = lengths_of(folder, spread, count=300)
    lengths = np.arange(1, 25)
    deviation = spread.true_variation() * 6
    assert np.mean(found) - 1 == pytest.approx((spread.shares() * lengths).sum(), abs=4 * deviation / 300**0.5)


def lengths_of(folder: Path, spread: Spread, *, count: int) -> list[int]:
    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert num_parameters(folder) == sum(parameter.numel() for parameter in model.parameters())
    prompt = dataset("countdown", spread=spread.word)[0]["prompt"]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    given = ids["input_ids"].repeat(count, 1)
    out = model.generate(given, do_sample=True, top_k=0, max_new_tokens=spread.longest + 1)
    return (out[:, given.shape[1] :] != tokenizer.pad_token_id).sum(1).tolist()


def test_a_measurement_goes_on_where_it_stopped_unless_the_cell_is_another(tmp_path):
    cells = cells_of([0, 1], tmp_path, quick=True, rows="bcde")
    assert len({cell.key for cell in cells}) == len(cells)
    assert [cell.side for cell in cells[:2]] != [cell.side for cell in cells if cell.seed == 1][:2]  # by turns
    Results(tmp_path / "results.json").put(cells[0], {"steps": []})
    again = Results(tmp_path / "results.json")
    assert again.get(cells[0]) == {"steps": []}
    assert again.get(cells[1]) is None
    assert again.get(replace(cells[0], lr=1e-4)) is None


def test_both_sides_run_the_same_settings(tmp_path):
    by_key: dict[str, list[Cell]] = {}
    for cell in cells_of([3], tmp_path, quick=False, rows="bcde"):
        by_key.setdefault(f"{cell.row}/{cell.name}", []).append(replace(cell, side=""))
    assert all(len(pair) == 2 and pair[0] == pair[1] for pair in by_key.values())


def test_a_reward_is_reached_when_five_steps_have_it_in_the_mean_and_rates_count_from_the_first_request():
    rewards = [0.9, 0.2, 0.6, 0.7, 0.6, 0.7, 0.9, 0.9]
    steps = [
        {"step": step, "ended_s": 1000.0 + 2 * step, "reward": reward, "tokens": 100, "cpu_s": 3.0 * step}
        for step, reward in enumerate(rewards, 1)
    ]
    times = {"began_s": 990.0, "first_s": 997.0, "first_cpu_s": 5.0, "ended_s": 2000.0}
    result = times | {"steps": steps, "prompts": [[1]]}
    assert reached(result, 0.7)["step"] == 7  # (0.6 + 0.7 + 0.6 + 0.7 + 0.9) / 5
    assert reached(result, 0.8) is None
    assert rate(result) == pytest.approx(8 * 100 / 19)
