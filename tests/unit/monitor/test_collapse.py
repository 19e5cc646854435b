"""Signs of a collapse: seen where they are, not seen in a healthy run, said once, and never in the way."""

import json
import math
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from trireme.config.run import RunConfig
from trireme.monitor.collapse import CALM, SIGNS, Sign, Warned, Watch
from trireme.monitor.metrics import MetricsFile, read_metrics
from trireme.monitor.progress import Progress
from trireme.monitor.run_text import summary
from trireme.orchestrator.watcher import Watcher

Row = dict[str, Any]


def healthy(steps: int, seed: int = 0) -> Iterator[Row]:
    """Both rows of each step of a run that learns: rewards rise, entropy falls by half, all of it noisy."""
    rng = random.Random(seed)
    for step in range(steps):
        learned = step / max(1, steps - 1)
        when = {"step": step, "time_s": 1.7e9 + step}
        yield when | {
            "process": "orchestrator", "reward/mean": 0.2 + 0.6 * learned + rng.gauss(0, 0.05),
            "reward/std": 0.3 + rng.gauss(0, 0.03), "groups/signal_frac": 0.8 - 0.4 * learned,
            "rollouts/error_rate": abs(rng.gauss(0, 0.02)), "truncated_frac": abs(rng.gauss(0.05, 0.05)),
            "filters/repetition_frac": 0.01, "filters/gibberish_frac": 0.0,
        }  # fmt: skip
        yield when | {
            "process": "trainer", "loss": rng.gauss(0, 0.05), "grad_norm": math.exp(rng.gauss(0, 0.5)),
            "skipped_update": 0.0, "policy/entropy": 1.0 - 0.5 * learned + rng.gauss(0, 0.05), "policy/kl": 0.001,
            "importance_ratio": 1 + rng.gauss(0, 0.01), "mismatch_kl": 1e-4,
        }  # fmt: skip


def run_that_turns(process: str, *later: Row) -> Iterator[Row]:
    """Healthy for 50 steps; then one process's rows are changed by the given ones, one after another."""
    for row in healthy(50 + len(later)):
        is_later = row["process"] == process and row["step"] >= 50
        yield row | later[row["step"] - 50] if is_later else row


def warned(rows: Iterable[Row], watch: Watch | None = None) -> list[Warned]:
    watch = watch or Watch()
    return [one for row in rows for one in watch.take(row)]


def test_a_healthy_run_and_one_odd_batch_give_no_warning():
    for seed in range(2):
        assert warned(healthy(300, seed)) == []
    assert warned(run_that_turns("orchestrator", {"reward/std": 0.0}, {})) == []
    assert warned(run_that_turns("trainer", {"policy/entropy": 0.0, "importance_ratio": 1.3}, {})) == []


TURNS = [
    ("reward_std_zero", "orchestrator", [{"reward/std": 0.0, "reward/mean": 0.75}] * 3, "reward/std is 0"),
    ("few_groups_with_signal", "orchestrator", [{"groups/signal_frac": 0.05}] * 3, "groups/signal_frac is 0.05"),
    ("nothing_trained", "trainer", [{"loss": 0.0, "grad_norm": 0.0}] * 2, "loss and grad_norm are 0"),
    ("nothing_trained", "trainer", [{"policy/entropy": None}], "policy/entropy is NaN"),
    ("rollouts_failing", "orchestrator", [{"env/x/error_rate": 0.75}], "env/x/error_rate is 0.75"),
    ("entropy_collapse", "trainer", [{"policy/entropy": 0.02}] * 3, "policy/entropy is 0.02; it began at"),
    ("entropy_explosion", "trainer", [{"policy/entropy": 6.0}] * 3, "policy/entropy is 6; it began at"),
    ("grad_norm_spike", "trainer", [{"grad_norm": 60.0}], "grad_norm is 60; the median of the 20 steps before"),
    ("reward_drop", "orchestrator", [{"reward/mean": 0.1}] * 3, "reward/mean fell to 0.1; the 10 batches before"),
    ("not_finite", "trainer", [{"loss": math.nan}], "loss is not finite"),
    ("not_finite", "trainer", [{"grad_norm": None}], "grad_norm is not finite"),
    ("not_finite", "trainer", [{"skipped_update": 1.0}], "skipped_update is 1"),
    ("mismatch", "trainer", [{"mismatch_kl": 0.05}] * 3, "mismatch_kl is 0.05 over 3 steps; at most 0.01"),
    ("importance_ratio", "trainer", [{"importance_ratio": 1.6}] * 3, "importance_ratio is 1.6"),
    ("policy_kl", "trainer", [{"policy/kl": 0.5}] * 3, "policy/kl is 0.5"),
    ("all_truncated", "orchestrator", [{"truncated_frac": 1.0}] * 3, "truncated_frac is 1.00"),
    ("degenerate_outputs", "orchestrator", [{"filters/repetition_frac": 0.4}] * 3, "filters/repetition_frac is 0.40"),
]


@pytest.mark.parametrize(("name", "process", "turn", "seen"), TURNS)
def test_each_collapse_sign_is_reported_once_with_values_and_advice(name, process, turn, seen):
    (sign,) = (sign for sign in SIGNS if sign.name == name)
    (warning,) = warned(run_that_turns(process, *turn))
    assert (warning.name, warning.step) == (name, 50 + len(turn) - 1)
    assert warning.text.startswith(seen)
    assert warning.text.endswith(f" {sign.meaning} {sign.advice}")


def keys_of(section: dict[str, Any], sections: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, field in section.get("properties", {}).items():
        yield prefix + name
        for inner in re.findall(r"#/\$defs/(\w+)", json.dumps(field)):
            yield from keys_of(sections[inner], sections, f"{prefix}{name}.")


def test_every_sign_has_its_test_and_advises_keys_that_exist():
    assert {sign.name for sign in SIGNS} == {name for name, *_ in TURNS}
    schema = RunConfig.model_json_schema()
    advice = " ".join(sign.advice for sign in SIGNS)
    named = re.findall(r"`\[?\[?((?:orchestrator|trainer|inference)[\w.]*|seq_len|max_async_level)", advice)
    assert {*named} <= {*keys_of(schema, schema["$defs"])}


def test_collapse_warning_is_repeated_only_after_calm():
    spike, calm = {"grad_norm": 60.0}, [{}] * CALM
    steps = [one.step for one in warned(run_that_turns("trainer", spike, *[spike] * 3, *calm, spike))]
    assert steps == [50, 50 + 4 + CALM]
    assert [one.step for one in warned(run_that_turns("trainer", spike, *calm[1:], spike))] == [50]
    watch = Watch()
    others = [{"step": version, "process": "trainer", "eval/x/reward": 0.5} for version in range(2 * CALM)]
    warned([*run_that_turns("trainer", spike), *others], watch)
    assert list(watch.lasting) == ["grad_norm_spike"]
    warned(healthy(CALM), watch)
    assert watch.lasting == {}


def test_no_row_and_no_broken_sign_stops_the_watch():
    def broken(history: object) -> str:
        raise ZeroDivisionError

    watch = Watch([Sign("broken", ("loss",), broken, "", ""), *SIGNS])
    odd: list[Row] = [
        {},
        {"step": 1, "process": "trainer", "loss": [], "grad_norm": {}, "policy/entropy": True, "ess": 10**400},
        {"step": 1, "process": "orchestrator", "reward/mean": math.inf, "env//error_rate": math.nan},
    ]
    warned([*odd, *healthy(CALM)], watch)
    assert [one.name for one in warned(run_that_turns("trainer", {"loss": None}), watch)] == ["not_finite"]


def test_the_orchestrator_logs_a_warning_and_writes_it_down_once(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    watcher = Watcher(MetricsFile(path, "orchestrator"))
    for row in run_that_turns("trainer", {"loss": None}):
        numbers = {name: math.nan if value is None else value for name, value in row.items()}
        MetricsFile(path, numbers.pop("process")).append(numbers.pop("step"), numbers)
    for _ in range(3):
        watcher.look()
    restarted = Watcher(MetricsFile(path, "orchestrator"))  # does not say it again, but still shows it
    restarted.look()
    (record,) = (record for record in caplog.records if record.name.endswith("warnings"))
    assert "step 50, not_finite: loss is not finite" in record.getMessage()
    assert [one.name for one in watcher.lasting] == [one.name for one in restarted.lasting] == ["not_finite"]
    (row,) = (row for row in read_metrics(path)[0] if "warnings/not_finite" in row)
    assert (row["step"], row["process"], row["warnings/not_finite"]) == (50, "orchestrator", 1.0)


def test_the_summary_tells_each_kind_once_and_of_this_session_only(tmp_path):
    config = RunConfig.model_validate({"output_dir": str(tmp_path)})
    progress = Progress(100)
    progress.add(run_that_turns("trainer", {"loss": None}))
    progress.begin_session()
    assert "warning" not in summary(progress, config, 1.0)
    progress.add(run_that_turns("trainer", {"grad_norm": 60.0}, *[{}] * CALM, {"grad_norm": 70.0}))
    text = summary(progress, config, 1.0)
    (line,) = (line for line in text.splitlines() if "grad_norm_spike" in line)
    assert "not_finite" not in text
    assert line.startswith(f"warning at step {50 + CALM + 2}, grad_norm_spike: grad_norm is 70; ")
    assert line.endswith("(the last of 2)")
