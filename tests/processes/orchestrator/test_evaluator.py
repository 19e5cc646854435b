"""Evaluation: which versions, which examples, what is written; and what a running orchestrator tells of itself."""

import asyncio
import json
import threading
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.runs.whole_run import DEADLINE_S, build_config, run
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Evaluation
from trireme.journal.records import Rollout
from trireme.monitor.metrics import MetricsFile, read_metrics
from trireme.orchestrator.evaluation import results
from trireme.orchestrator.evaluation.evaluator import Evaluator, max_concurrent_rollouts
from trireme.orchestrator.evaluation.results import (
    EvalResult,
    evaluation_metrics,
    read_eval_results,
    results_path,
    write_eval_results,
)
from trireme.orchestrator.loop import restore_metrics

WITH_HELD_OUT = """
    def dataset():
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(40)]

    def eval_dataset():
        return [{"prompt": f"held out {i}", "answer": str(i)} for i in range(5)]

    def reward(completion, answer):
        return {"reward": (len(completion) * 7 + ord(completion[0])) % 10 / 10, "length": len(completion)}
"""


def evaluated(config) -> list[str]:
    return sorted(path.name for path in config.paths.evals.iterdir())


def lines(config, version: int, name: str = "say.jsonl") -> list[dict]:
    return [json.loads(line) for path in (config.paths.evals / f"step_{version}").glob(name) for line in path.open()]


def eval_rows(config) -> dict[int, dict]:
    rows = read_metrics(config.paths.metrics)[0]
    return {row["step"]: row for row in rows if any(name.startswith("eval/") for name in row)}


def is_evaluation(asked) -> bool:
    return asked.sampling["temperature"] == 0.0


def test_evaluation_asks_only_held_out_examples_at_due_versions(tmp_path):
    """An evaluation, which could fill every place of the engine, gets no answer before two batches are full."""
    seen, two_batches = [], asyncio.Event()

    async def meanwhile(running):
        async def slow_evaluation(asked):
            if is_evaluation(asked):
                await two_batches.wait()
                await asyncio.sleep(0.02)
                seen.append((asked.version, running.orchestrator.policy.version, running.engine.version))

        running.engine.delay = slow_evaluation
        await running.until(lambda: running.orchestrator.scheduler.next_batch == 2, "two batches beside an evaluation")
        waiting = running.orchestrator.policy.version, sum(map(is_evaluation, running.engine.requests))
        two_batches.set()
        return waiting

    every_other = {"eval": {"interval": 2, "rollouts_per_example": 2, "num_examples": 2}, "max_concurrent": 8}
    config = build_config(tmp_path, WITH_HELD_OUT, orchestrator=every_other)
    outcome = run(config, meanwhile=meanwhile)
    assert outcome.found == (0, 2)  # a quarter of eight places, all the while
    assert outcome.error is None
    assert evaluated(config) == ["step_0", "step_2", "step_3"]
    assert seen == [(version,) * 3 for version in (0, 2, 3) for _ in range(4)]
    rows = eval_rows(config)
    assert sorted(rows) == [0, 2, 3]
    for version in rows:
        answers = lines(config, version)
        assert [(answer["example_id"], answer["prompt"][0]["content"]) for answer in answers] == [
            (example, f"held out {example}") for example in (0, 0, 1, 1)
        ]
        assert rows[version]["eval/say/reward"] == np.mean([answer["reward"] for answer in answers])
    trained = [rollout.prompt[0]["content"] for record in outcome.records for rollout in record.rollouts]
    assert all(prompt.startswith("say") for prompt in trained)


DUE = [({}, [0, 6]), ({"interval": 3}, [0, 3, 6]), ({"interval": 4, "eval_base": False}, [4, 6]), (None, [])]


@pytest.mark.parametrize(("evaluation", "due"), DUE)
def test_so_many_versions_are_due(tmp_path, evaluation, due):
    """Where nothing is evaluated, results of a version are those of the command `eval`."""
    expected = []
    policy = SimpleNamespace(expect_evaluations=expected.extend)
    config = build_config(tmp_path, max_steps=6, orchestrator={} if evaluation is None else {"eval": evaluation})
    path = results_path(config.paths, 1, "say")
    path.parent.mkdir(parents=True)
    path.touch()
    evaluator = Evaluator(config, {"say": None}, policy, None, None, None)
    assert evaluator.due() == expected == due
    assert evaluator.is_done(1) is (evaluation is not None)


def test_each_environment_is_evaluated_at_its_own_interval(tmp_path):
    held = {"id": str(tmp_path / "toy.py"), "name": "held", "interval": 2, "eval_base": False, "num_examples": 1}
    other = {"id": str(tmp_path / "toy.py"), "name": "other", "rollouts_per_example": 2}
    other |= {"sampling": {"temperature": 0.25}}
    evaluation = {"env": [held, other], "interval": 3, "num_examples": 3}
    config = build_config(tmp_path, WITH_HELD_OUT, max_steps=4, orchestrator={"eval": evaluation})
    outcome = run(config)
    assert outcome.error is None
    found = {path.parent.name: set() for path in config.paths.evals.glob("*/*.jsonl")}
    for path in config.paths.evals.glob("*/*.jsonl"):
        found[path.parent.name].add(path.stem)
    assert found == {"step_0": {"other"}, "step_2": {"held"}, "step_3": {"other"}, "step_4": {"held", "other"}}
    assert [(row["example"], row["rollout"]) for row in lines(config, 4, "held.jsonl")] == [(0, 0)]
    expected = [(example, rollout) for example in range(3) for rollout in range(2)]
    assert [(row["example"], row["rollout"]) for row in lines(config, 4, "other.jsonl")] == expected
    rows = eval_rows(config)
    assert sorted(rows) == [0, 2, 3, 4]
    assert "eval/other/pass@2" in rows[3]
    assert not [name for name in rows[3] if name.startswith("eval/held/")]
    assert {asked.sampling["temperature"] for asked in outcome.engine.requests} == {0.0, 0.25, 1.0}


def test_training_keeps_three_quarters_of_an_environments_slots(tmp_path):
    def slots(num_environments: int, *, is_trained_on: bool, group_rewards: bool = False, **sizes: int) -> int:
        env = [{"id": "say.py", "name": f"say-{number}"} for number in range(num_environments)]
        evaluation = {"rollouts_per_example": 3} | ({} if is_trained_on else {"env": env})
        config = build_config(tmp_path, orchestrator={"eval": evaluation, "env": env} | sizes)
        own = SimpleNamespace(config=SimpleNamespace(max_concurrent=8), name="say-0", group_rewards=group_rewards)
        return max_concurrent_rollouts(config, own)

    assert slots(1, is_trained_on=True) == 2
    assert slots(4, is_trained_on=False) == 1024 // 4 // 4
    assert slots(1, is_trained_on=True, group_rewards=True) == 3  # a group waits for all its members
    assert slots(3, is_trained_on=True, max_concurrent=2) == 1


SPLITS = """
    def dataset(split="train"):
        return [{"prompt": f"{split} {i}", "answer": str(i)} for i in range(6)]

    def reward(completion, messages):
        if messages[0]["content"] == "validation 3":
            raise IndexError("out of range")
        return {"reward": (len(completion) * 7 + ord(completion[0])) % 10 / 10, "length": len(completion)}
"""


def test_evaluation_environment_is_never_trained_on(tmp_path):
    own = {"id": str(tmp_path / "toy.py"), "name": "held", "args": {"split": "validation"}}
    how = {"env": [own], "eval_base": False, "num_examples": 4, "rollouts_per_example": 4, "pass_threshold": 0.5}
    how |= {"sampling": {"temperature": 1.0}}
    config = build_config(tmp_path, SPLITS, max_steps=1, orchestrator={"eval": how})
    outcome = run(config)
    assert outcome.error is None
    assert evaluated(config) == ["step_1"]
    trained = {rollout.prompt[0]["content"] for record in outcome.records for rollout in record.rollouts}
    assert all(prompt.startswith("train ") for prompt in trained)
    assert (config.paths.logs / "environment-eval-held-0.stdout").exists()  # also if both had the same name

    rows = lines(config, 1, "held.jsonl")
    expected = [(example, rollout, 1) for example in range(4) for rollout in range(4)]
    assert [(row["example"], row["rollout"], row["version"]) for row in rows] == expected
    assert {row["prompt"][0]["content"] for row in rows[:12]} == {f"validation {example}" for example in range(3)}
    assert [(row["reward"], row["error"]) for row in rows[12:]] == [(None, "score: IndexError: out of range")] * 4
    row = eval_rows(config)[1]
    assert row["time/eval"] > 0
    measured = evaluation_metrics("held", read_eval_results(results_path(config.paths, 1, "held")), Evaluation(**how))
    assert {name: value for name, value in row.items() if name.startswith("eval/")} == measured
    assert measured["eval/held/length"] == np.mean([len(row["completion"][0]["content"]) for row in rows[:12]])


def test_failed_rollout_counts_as_not_passed_but_not_in_the_mean(tmp_path):
    path = tmp_path / "say.jsonl"
    old = {"prompt": [], "completion": [], "answer": None, "info": {}, "metrics": {"length": 2.0}}
    rows = [
        {"example_id": 7, "reward": 1.0, "tokens": 9, "turns": 2},
        {"example_id": 7, "reward": None, "error": "no"},
        {"example_id": "x", "reward": 0.25, "tokens": 1, "turns": 1, "truncated": True},
        {"example_id": "x", "reward": 0.0},
        {"example_id": "y", "reward": 0.2},
        {"example_id": "y", "reward": 0.0},
    ]
    path.write_text("".join(json.dumps(old | row) + "\n" for row in rows))
    answers = read_eval_results(path)
    expected = {
        "error_rate": 1 / 6, "reward": 1.45 / 5, "avg@2": (1.0 + 0.125 + 0.1) / 3, "pass@1": 1 / 3, "pass@2": 2 / 3,
        "std": np.std([1, 0.25, 0, 0.2, 0]), "length": 2.0, "tokens_mean": 2, "turns_mean": 0.6, "truncated_frac": 0.2,
    }  # fmt: skip
    measured = evaluation_metrics("say", answers, Evaluation(pass_at=(2, 1), pass_threshold=0.25))
    assert measured == pytest.approx({f"eval/say/{name}": value for name, value in expected.items()})
    all_failed = {"eval/say/error_rate": 1, "eval/say/pass@1": 0}
    assert evaluation_metrics("say", answers[1:2], Evaluation()) == all_failed


SILENT = SimpleNamespace(append=lambda version, row: None)


def evaluator_of(config, answer, metrics, *names: str) -> Evaluator:
    """`answer(environment, spec)` returns the newest version that a rollout's tokens are of."""

    async def run_rollout(environment, spec, **how):
        sample = SimpleNamespace(versions=np.array([-1, 4, await answer(environment, spec)]))
        return Rollout(env="say", example=spec.example, temperature=1.0, reward=1.0, num_turns=1, samples=[sample])

    shape = {"config": SimpleNamespace(max_concurrent=8), "num_eval": 5, "num_train": 9, "group_rewards": False}
    shape["check_group_size"] = lambda size: None
    held_out = {name: SimpleNamespace(name=name, **shape) for name in names}
    policy = SimpleNamespace(expect_evaluations=lambda due: None)
    runner = SimpleNamespace(run=run_rollout, wait_for_room=lambda what, folder, write: write())
    return Evaluator(config, held_out, policy, runner, metrics, Waits("orchestrator"))


def test_an_evaluation_that_a_later_version_had_a_part_in_is_discarded(tmp_path):
    config = build_config(tmp_path, orchestrator={"eval": {"num_examples": 2}})
    partial = []

    async def answer(environment, spec) -> int:
        await asyncio.sleep(0.1 * spec.example)
        partial.extend(lines(config, 4, ".say.*.partial"))
        return 4 + spec.example

    assert not asyncio.run(evaluator_of(config, answer, SILENT, "say").evaluate(4))
    assert [answer["example"] for answer in partial] == [0]
    assert list((config.paths.evals / "step_4").iterdir()) == []


def test_interrupted_evaluation_repeats_no_answered_rollout(tmp_path, monkeypatch):
    config = build_config(tmp_path, orchestrator={"eval": {"num_examples": 2}})
    asked = []

    async def answer(environment, spec) -> int:
        asked.append(environment.name)
        return 4

    def write_one(path, answers):
        if path.stem == "second":
            raise InterruptedError
        write_eval_results(path, answers)

    def evaluate():
        return asyncio.run(evaluator_of(config, answer, SILENT, "first", "second").evaluate(4))

    monkeypatch.setattr(results, "write_eval_results", write_one)
    with pytest.raises(InterruptedError):
        evaluate()
    monkeypatch.undo()
    assert evaluate()
    assert sorted(asked) == ["first"] * 2 + ["second"] * 2
    assert sorted(path.name for path in (config.paths.evals / "step_4").iterdir()) == ["first.jsonl", "second.jsonl"]


def test_restart_reports_evaluations_missing_from_the_metrics(tmp_path):
    config = build_config(tmp_path, orchestrator={"eval": {}})
    metrics = MetricsFile(config.paths.metrics, "orchestrator")
    evaluator = evaluator_of(config, None, metrics, "say")
    for version in (20, 60, 100):
        path = results_path(config.paths, version, "say")
        path.parent.mkdir(parents=True)
        write_eval_results(path, [EvalResult(example_id=0, reward=version / 100)])
    metrics.append(20, evaluator.figures(20))
    metrics.append(100, {"eval/say/reward": 0.25})  # before the run went back
    for _ in range(2):
        restore_metrics(config, SimpleNamespace(steps=list), evaluator, metrics)
        rows = read_metrics(config.paths.metrics)[0]
        reported = [(row["step"], row["eval/say/reward"]) for row in rows]
        assert reported == [(20, 0.2), (100, 0.25), (60, 0.6), (100, 1.0)]


def test_an_evaluation_may_take_longer_than_the_trainer_is_waited_for(tmp_path):
    """Each of its two answers takes a large part of the patience that others have with each other."""

    async def slow(asked):
        if is_evaluation(asked):
            await asyncio.sleep(4.5)

    how = {"trainer_timeout_s": 8.0, "max_concurrent": 4, "eval": {"num_examples": 2, "eval_base": False}}
    config = build_config(tmp_path, WITH_HELD_OUT, max_steps=1, orchestrator=how)
    outcome = run(config, engine={"delay": slow}, trainer={"patience_s": 8.0})
    assert (outcome.error, outcome.trainer_error) == (None, [])
    assert evaluated(config) == ["step_1"]


def test_resumed_run_asks_only_for_missing_evaluation_answers(tmp_path):
    how = {"max_concurrent": 4, "eval": {"interval": 1}}  # one place for evaluations
    config = build_config(tmp_path, WITH_HELD_OUT, max_steps=2, orchestrator=how)

    async def hang_after_three_of_version_1(asked):
        if is_evaluation(asked) and len(lines(config, 1, ".say.*.partial")) == 3:
            await asyncio.Event().wait()

    async def until_then(running):
        await running.until(lambda: len(lines(config, 1, ".say.*.partial")) == 3, "three answers on disk")

    held = {"delay": hang_after_three_of_version_1}
    run(config, engine=held, trainer={"until": 1}, meanwhile=until_then, stop_after_meanwhile=True)
    before, answers = lines(config, 0), lines(config, 1, ".say.*.partial")
    folder = config.paths.evals / "step_2"
    folder.mkdir(parents=True)
    (folder / "say.jsonl").write_text('{"example_id": 0, "reward": 1.0}\n')
    (folder / "say.json").write_text("{}")

    again = run(config.model_copy(update={"resume": True}), trainer={"version": 1})
    assert again.error is None
    assert [asked.version for asked in filter(is_evaluation, again.engine.requests)] == [1] * 2 + [2] * 5
    assert (len(before), lines(config, 0)) == (5, before)
    assert (len(answers), lines(config, 1)[:3]) == (3, answers)
    assert [[line["example"] for line in lines(config, version)] for version in (1, 2)] == [[0, 1, 2, 3, 4]] * 2
    assert [path.name for path in (config.paths.evals / "step_1").iterdir()] == ["say.jsonl"]
    assert sorted(path.name for path in folder.iterdir()) == ["say.command.json", "say.command.jsonl", "say.jsonl"]
    assert lines(config, 2, "say.command.jsonl") == [{"example_id": 0, "reward": 1.0}]


def test_orchestrator_reports_its_health_state_and_waits_over_http(tmp_path):
    released = threading.Event()

    async def meanwhile(running):
        await running.until(lambda: running.orchestrator.scheduler.next_batch == 2, "two batches ahead")
        MetricsFile(running.orchestrator.metrics.path, "trainer").append(0, {"skipped_update": 1.0})
        running.orchestrator.watcher.look()
        await running.ask(lambda asker: asker.beat("running", ["trainer waits 3 s for batch 7 from orchestrator"]))
        base = f"http://127.0.0.1:{running.orchestrator.config.orchestrator.server.port}"
        routes = [f"{base}/{route}" for route in ("health", "status", "metrics")]
        answers = await asyncio.to_thread(lambda: [httpx.get(url, trust_env=False) for url in routes])
        released.set()
        return answers

    config = build_config(tmp_path)
    held = {"before_step": lambda version: released.wait(DEADLINE_S)}
    outcome = run(config, trainer=held, meanwhile=meanwhile)
    assert outcome.error is None
    health, status = (answer.json() for answer in outcome.found[:2])
    assert health == {"status": "ok", "state": "running"}
    assert (status["version"], status["batch"], status["max_steps"]) == (0, 2, 3)
    (engine,) = status["engines"]
    assert engine.items() >= {"url": outcome.engine.url, "state": "live", "version": 0, "in_flight": 0}.items()
    ours, trainers = status["waits"]
    assert (ours["who"], ours["peer"], ours["what"]) == ("orchestrator", "trainer", "rollouts of batch 2")
    assert "8 of 8 rollouts missing, none may start before version 1 is live" in ours["text"]
    assert trainers == {"who": "trainer", "text": "trainer waits 3 s for batch 7 from orchestrator"}
    assert status["processes"]["trainer"]["state"] == "running"
    (warning,) = status["warnings"]
    assert (warning["name"], warning["step"]) == ("not_finite", 0)
    families = text_string_to_metric_families(outcome.found[2].text)
    samples = {(sample.name, *sample.labels.values()): sample.value for each in families for sample in each.samples}
    told = [("version",), ("batch",), ("failures",), ("warning", "not_finite")]
    assert [samples[f"trireme_{name}", *labels] for name, *labels in told] == [0, 2, 0, 1]
    assert any(name == "trireme_waiting_seconds" and "trainer" in labels for name, *labels in samples)
