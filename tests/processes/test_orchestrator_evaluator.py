"""Evaluation: which versions, which examples, what is written; and what a running orchestrator tells of itself."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tiny_tokenizer import END
from trireme.config.orchestrator import Evaluation
from trireme.monitor.metrics import MetricsFile, read_metrics
from trireme.orchestrator.chat import open_chat_tokenizer
from trireme.orchestrator.environments.open_rollout import RolloutFailed
from trireme.orchestrator.environments.wire import Done
from trireme.orchestrator.eval_results import Answer, evaluation_metrics, read_answers
from trireme.orchestrator.evaluation import EvaluationRun, places
from trireme.orchestrator.rollouts import Finished
from whole_run import DEADLINE_S, build_config, run

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


def lines(config, version: int, name: str = "say") -> list[dict]:
    return [json.loads(line) for line in (config.paths.evals / f"step_{version}" / f"{name}.jsonl").open()]


def test_due_versions_are_evaluated_on_held_out_examples_only_and_stay_live_meanwhile(tmp_path):
    seen = []

    async def slow_evaluation(asked):
        is_evaluation = asked.sampling["temperature"] == 0.0
        if is_evaluation:
            await asyncio.sleep(0.02)
            seen.append((asked.version, running.orchestrator.policy.version, running.engine.version))

    async def meanwhile(now):
        nonlocal running
        running = now
        running.engine.delay = slow_evaluation

    running = None
    config = build_config(
        tmp_path,
        WITH_HELD_OUT,
        max_steps=5,
        orchestrator={"eval": {"interval": 2, "rollouts_per_example": 2, "num_examples": 4}},
    )
    outcome = run(config, meanwhile=meanwhile)
    assert outcome.error is None
    assert evaluated(config) == ["step_0", "step_2", "step_4", "step_5"]
    assert seen == [(version,) * 3 for version in (0, 2, 4, 5) for _ in range(8)]
    for version in (0, 2, 4, 5):
        rows = lines(config, version)
        assert sorted(row["example_id"] for row in rows) == [0, 0, 1, 1, 2, 2, 3, 3]
        assert all(row["prompt"][0]["content"] == f"held out {row['example_id']}" for row in rows)
        assert all(set(row) >= {"reward", "completion", "answer", "info", "metrics"} for row in rows)
    metrics = {row["step"]: row for row in read_metrics(config.paths.metrics)[0] if "eval/say/reward" in row}
    assert sorted(metrics) == [0, 2, 4, 5]
    mean = sum(row["reward"] for row in lines(config, 5)) / 8
    assert metrics[5]["eval/say/reward"] == mean
    trained = [rollout.prompt[0]["content"] for record in outcome.records for rollout in record.rollouts]
    assert all(prompt.startswith("say") for prompt in trained)


def test_what_was_evaluated_is_not_evaluated_again_after_a_resume_and_what_was_not_is(tmp_path):
    config = build_config(tmp_path, WITH_HELD_OUT, max_steps=2, orchestrator={"eval": {"interval": 1}})
    run(config, trainer={"until": 1}, meanwhile=_version_1_is_evaluated, stop_after_meanwhile=True)
    assert evaluated(config) == ["step_0", "step_1"]
    written = lines(config, 0)
    (config.paths.evals / "step_1" / "say.jsonl").unlink()  # as if it had stopped in the midst of it
    again = run(config.model_copy(update={"resume": True}), trainer={"version": 1})
    assert again.error is None
    assert evaluated(config) == ["step_0", "step_1", "step_2"]
    assert lines(config, 0) == written
    asked = [asked.version for asked in again.engine.requests if asked.sampling["temperature"] == 0.0]
    assert asked == [1] * 5 + [2] * 5


async def _version_1_is_evaluated(running):
    path = running.orchestrator.config.paths.evals / "step_1" / "say.jsonl"
    await running.until(path.exists, "version 1 evaluated")


def test_without_an_interval_the_base_model_and_the_last_version_are_evaluated(tmp_path):
    config = build_config(tmp_path, WITH_HELD_OUT, max_steps=2, orchestrator={"eval": {}})
    assert run(config).error is None
    assert evaluated(config) == ["step_0", "step_2"]


def test_the_base_model_is_left_out_when_asked_and_a_rollout_that_fails_is_counted_and_left_out_of_the_mean(tmp_path):
    code = WITH_HELD_OUT.replace("reward(completion, answer):", "reward(completion, answer):\n        completion[0]")
    config = build_config(tmp_path, code, max_steps=1, orchestrator={"eval": {"eval_base": False}})
    tokenizer = open_chat_tokenizer(config.model.name)
    question = [{"role": "user", "content": "held out 3"}]
    unlucky = tokenizer.encode(tokenizer.render(question, tools=None, generate=True))

    def answer(asked):
        return [END] if asked.ids == unlucky else [30, END]

    assert run(config, engine={"answer": answer}).error is None
    assert evaluated(config) == ["step_1"]
    rows = lines(config, 1)
    assert [row["example"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["reward"] is None for row in rows] == [False, False, False, True, False]
    assert rows[3]["error"] == "score: IndexError: string index out of range"
    measured = eval_rows(config)[1]
    assert measured["eval/say/error_rate"] == 1 - 4 / 5
    assert measured["eval/say/reward"] == np.mean([row["reward"] for row in rows if row["reward"] is not None])


def eval_rows(config) -> dict[int, dict]:
    rows = read_metrics(config.paths.metrics)[0]
    return {row["step"]: row for row in rows if any(name.startswith("eval/") for name in row)}


def test_training_groups_finish_while_an_evaluation_goes_on(tmp_path):
    """The evaluation gets no answer before two batches are full. It could have filled every place of the engine."""
    two_batches = asyncio.Event()

    async def hold_evaluations(asked):
        if asked.sampling["temperature"] == 0.0:
            await two_batches.wait()

    async def meanwhile(running):
        await running.until(lambda: running.orchestrator.scheduler.next_batch == 2, "two batches beside an evaluation")
        at_once = running.orchestrator.policy.version, running.engine.requests
        waiting = [asked for asked in at_once[1] if asked.sampling["temperature"] == 0.0]
        two_batches.set()
        return at_once[0], len(waiting)

    config = build_config(
        tmp_path,
        orchestrator={"max_concurrent": 8, "eval": {"num_examples": 20}},
    )
    outcome = run(config, engine={"delay": hold_evaluations}, meanwhile=meanwhile)
    assert outcome.error is None
    assert outcome.found == (0, 2)  # a quarter of eight places, all the while
    assert [len(lines(config, version)) for version in (0, 3)] == [20, 20]


SPLITS = """
    def dataset(split="train"):
        return [{"prompt": f"{split} {i}", "answer": str(i)} for i in range(6)]

    def reward(completion, answer):
        return len(completion) / 10
"""


def test_an_evaluation_environment_of_its_own_gives_its_own_split_and_is_never_trained_on(tmp_path):
    config = build_config(tmp_path, SPLITS, max_steps=1)
    entry = config.orchestrator.env[0].model_copy(update={"name": "held", "args": {"split": "validation"}})
    evaluation = Evaluation(env=(entry,), num_examples=4)
    orchestrator = config.orchestrator.model_copy(update={"eval": evaluation})
    outcome = run(config.model_copy(update={"orchestrator": orchestrator}))
    assert outcome.error is None
    prompts = [row["prompt"][0]["content"] for row in lines(config, 1, "held")]
    assert prompts == [f"validation {example}" for example in range(4)]
    trained = {rollout.prompt[0]["content"] for record in outcome.records for rollout in record.rollouts}
    assert all(prompt.startswith("train ") for prompt in trained)
    assert "eval/held/avg@1" in eval_rows(config)[1]


def test_an_environment_that_is_trained_on_keeps_three_quarters_of_its_own_places_for_training(tmp_path):
    config = build_config(tmp_path, orchestrator={"eval": {"rollouts_per_example": 3}})
    own = SimpleNamespace(config=SimpleNamespace(max_concurrent=8), group_rewards=False)
    assert places(config, own, num_environments=1, is_trained_on=True) == 2
    assert places(config, own, num_environments=4, is_trained_on=False) == 1024 // 4 // 4
    compared = SimpleNamespace(config=SimpleNamespace(max_concurrent=8), group_rewards=True)
    assert places(config, compared, num_environments=1, is_trained_on=True) == 3  # a group waits for all its members
    tight = build_config(tmp_path, orchestrator={"max_concurrent": 2, "eval": {}})
    assert places(tight, own, num_environments=3, is_trained_on=True) == 1


def test_what_the_row_of_an_evaluation_says_is_what_its_file_says(tmp_path):
    sampled = {"rollouts_per_example": 4, "num_examples": 3, "pass_threshold": 0.5, "sampling": {"temperature": 1.0}}
    config = build_config(tmp_path, WITH_HELD_OUT, max_steps=1, orchestrator={"eval": sampled})
    assert run(config).error is None
    (row,) = [row for step, row in eval_rows(config).items() if step == 1]
    rows = lines(config, 1)
    assert [(row["example"], row["rollout"], row["version"]) for row in rows] == [
        (example, rollout, 1) for example in range(3) for rollout in range(4)
    ]
    rewards = np.array([row["reward"] for row in rows]).reshape(3, 4)
    assert row["eval/say/reward"] == row["eval/say/avg@4"] == pytest.approx(rewards.mean())
    assert row["eval/say/std"] == pytest.approx(rewards.std())
    assert row["eval/say/pass@1"] == pytest.approx((rewards >= 0.5).mean())
    assert row["eval/say/pass@4"] == pytest.approx((rewards >= 0.5).any(axis=1).mean())
    assert row["eval/say/length"] == pytest.approx(np.mean([len(row["completion"][0]["content"]) for row in rows]))
    assert row["eval/say/tokens_mean"] == pytest.approx(np.mean([row["tokens"] for row in rows]))
    assert row["eval/say/turns_mean"] == 1
    assert row["eval/say/error_rate"] == row["eval/say/truncated_frac"] == 0
    assert row["time/eval"] > 0
    path = config.paths.evals / "step_1" / "say.jsonl"
    again = evaluation_metrics("say", read_answers(path), config.orchestrator.eval)
    assert again == {name: value for name, value in row.items() if name.startswith("eval/")}


def test_a_file_of_an_earlier_version_is_still_read(tmp_path):
    path = tmp_path / "say.jsonl"
    old = {"prompt": [], "completion": [], "answer": None, "info": {}, "metrics": {"length": 2.0}}
    rewards = {7: (0.0, 1.0), "x": (0.5, 0.5)}
    path.write_text(
        "".join(json.dumps({"example_id": e, "reward": r} | old) + "\n" for e in rewards for r in rewards[e])
    )
    measured = evaluation_metrics("say", read_answers(path), Evaluation())
    assert measured["eval/say/avg@2"] == 0.5
    assert (measured["eval/say/pass@1"], measured["eval/say/pass@2"]) == (0.25, 0.5)
    assert measured["eval/say/length"] == 2.0


def test_a_rollout_that_failed_has_not_passed_and_has_no_part_in_the_mean():
    def answer(example, reward):
        return Answer(example_id=example, example=example, reward=reward, error=None if reward is not None else "x: y")

    answers = [answer(0, 1.0), answer(0, None), answer(1, 0.0), answer(1, 0.25)]
    measured = evaluation_metrics("say", answers, Evaluation(pass_at=(2, 1)))
    assert measured["eval/say/error_rate"] == 0.25
    assert measured["eval/say/avg@2"] == (1.0 + 0.125) / 2
    assert measured["eval/say/reward"] == pytest.approx(1.25 / 3)
    assert (measured["eval/say/pass@1"], measured["eval/say/pass@2"]) == (0.25, 0.5)
    assert evaluation_metrics("say", [answer(0, None)], Evaluation()) == {
        "eval/say/error_rate": 1,
        "eval/say/pass@1": 0,
    }


class Runner:
    """Stands where rollouts are run; what each is asked for is kept."""

    def __init__(self, fails=lambda asked: False):
        self.asked = []
        self._fails = fails

    async def run(self, environment, **asked):
        self.asked.append(asked)
        await asyncio.sleep(0)
        if self._fails(asked):
            raise RolloutFailed("score", "no number")
        done = Done(task="", reward=1.0, metrics={}, prompt=[], completion=[], example_id=asked["example"])
        return Finished(done, samples=[], token_rewards=[], num_turns=1, truncated=False, stop=None)


def run_examples(tmp_path, runner, *, group_rewards, before=None):
    """Its answers, and those that were handed on as they came."""
    kept = []

    async def keep(answer):
        kept.append(answer)

    config = build_config(tmp_path, orchestrator={"eval": {"rollouts_per_example": 3, "num_examples": 2}})
    environment = SimpleNamespace(name="say", num_eval=5, num_train=9, group_rewards=group_rewards)
    how = {"version": 4, "places": 3, "serial": 1, "before": before or {}, "keep": keep}
    return asyncio.run(EvaluationRun(config, environment, runner, **how).run()).answers, kept


def test_a_group_comes_under_one_name_of_its_own(tmp_path):
    runner = Runner(lambda asked: asked["example"] == 1 and asked["attempt"] == 0)
    answers, _ = run_examples(tmp_path, runner, group_rewards=True)
    assert [answer.reward for answer in answers] == [1.0] * 6
    assert {asked["group_size"] for asked in runner.asked} == {3}
    names = {example: {asked["group"] for asked in runner.asked if asked["example"] == example} for example in (0, 1)}
    assert all(len(group) == 1 for group in names.values())
    assert names[0] != names[1]
    assert {asked["split"] for asked in runner.asked} == {"eval"}


@pytest.mark.parametrize(("group_rewards", "errors"), [(True, 3), (False, 1)])
def test_a_rollout_that_always_fails_costs_its_group_only_where_that_is_scored_as_one(tmp_path, group_rewards, errors):
    runner = Runner(lambda asked: asked["key"] == "eval-say-1-2")
    answers, _ = run_examples(tmp_path, runner, group_rewards=group_rewards)
    assert [answer.error for answer in answers] == [None] * (6 - errors) + ["score: no number"] * errors


@pytest.mark.parametrize(("group_rewards", "asked_again"), [(True, [0, 1, 2]), (False, [1])])
def test_what_has_come_before_is_asked_again_only_for_rollouts_that_are_scored_with_it(
    tmp_path, group_rewards, asked_again
):
    answers, _ = run_examples(tmp_path, Runner(), group_rewards=group_rewards)
    before = {
        (answer.example, answer.rollout): answer for answer in answers if (answer.example, answer.rollout) != (0, 1)
    }
    runner = Runner()
    again, kept = run_examples(tmp_path, runner, group_rewards=group_rewards, before=before)
    assert [asked["key"] for asked in runner.asked] == [f"eval-say-0-{place}" for place in asked_again]
    assert [answer.rollout for answer in kept] == asked_again
    assert again == answers


def test_an_answer_that_another_version_had_a_part_in_is_not_kept(tmp_path):
    sampled = [
        SimpleNamespace(versions=np.array(versions), loss_mask=np.ones(3)) for versions in ([-1, 4, 4], [-1, 4, 5])
    ]

    class Changing(Runner):
        async def run(self, environment, **asked):
            finished = await super().run(environment, **asked)
            return dataclasses.replace(finished, samples=[sampled[asked["example"]]])

    answers, kept = run_examples(tmp_path, Changing(), group_rewards=False)
    assert [answer.example for answer in answers] == [0, 0, 0, 1, 1, 1]
    assert [answer.example for answer in kept] == [0, 0, 0]


def test_an_evaluation_may_take_longer_than_the_trainer_is_waited_for(tmp_path):
    """Each of its three answers takes a large part of the patience that others have with each other."""

    async def slow(asked):
        if asked.sampling["temperature"] == 0.0:
            await asyncio.sleep(0.9)

    config = build_config(
        tmp_path,
        WITH_HELD_OUT,
        max_steps=1,
        orchestrator={"trainer_timeout_s": 1.5, "max_concurrent": 4, "eval": {"num_examples": 3}},
    )
    outcome = run(config, engine={"delay": slow}, trainer={"patience_s": 1.5})
    assert (outcome.error, outcome.trainer_error) == (None, [])
    assert evaluated(config) == ["step_0", "step_1"]


def test_an_evaluation_that_was_cut_short_goes_on_with_the_answers_that_had_come(tmp_path):
    config = build_config(
        tmp_path, WITH_HELD_OUT, max_steps=1, orchestrator={"max_concurrent": 4, "eval": {"eval_base": False}}
    )

    async def until_three(running):
        running.engine.delay = one_at_a_time
        await running.until(lambda: len(come(config)) == 3, "three answers on disk")

    first = run(config, meanwhile=until_three, stop_after_meanwhile=True)
    before = come(config)
    assert first.engine.version == 1
    again = run(config.model_copy(update={"resume": True}), trainer={"version": 1})
    assert again.error is None
    assert len([asked for asked in again.engine.requests if asked.sampling["temperature"] == 0.0]) == 2
    assert [line for line in lines(config, 1) if line["example"] < 3] == before
    assert [line["example"] for line in lines(config, 1)] == [0, 1, 2, 3, 4]
    assert come(config) == []


async def one_at_a_time(asked):
    if asked.sampling["temperature"] == 0.0:
        await asyncio.sleep(0.3)


def come(config) -> list[dict]:
    files = (config.paths.evals / "step_1").glob(".say.*.partial")
    return [json.loads(line) for file in files for line in file.open()]


def test_results_of_the_command_eval_are_not_taken_for_the_runs_own_and_stay(tmp_path):
    config = build_config(tmp_path, WITH_HELD_OUT, max_steps=1, orchestrator={"eval": {"eval_base": False}})
    folder = config.paths.evals / "step_1"
    folder.mkdir(parents=True)
    (folder / "say.jsonl").write_text('{"example_id": 0, "reward": 1.0}\n')
    (folder / "say.json").write_text("{}")
    assert run(config).error is None
    assert len(lines(config, 1)) == 5
    assert sorted(path.name for path in folder.iterdir()) == ["say.command.json", "say.command.jsonl", "say.jsonl"]
    assert lines(config, 1, "say.command") == [{"example_id": 0, "reward": 1.0}]


def test_a_running_orchestrator_tells_its_health_its_state_and_what_each_process_waits_for(tmp_path):
    released = threading.Event()

    async def meanwhile(running):
        await running.until(lambda: running.orchestrator.scheduler.next_batch == 2, "two batches ahead")
        MetricsFile(running.orchestrator.metrics.path, "trainer").append(0, {"skipped_update": 1.0})
        running.orchestrator.watcher.look()
        await running.ask(lambda asker: asker.beat("running", ["trainer waits 3 s for batch 7 from orchestrator"]))
        base = f"http://127.0.0.1:{running.orchestrator.config.orchestrator.server.port}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as session:
            answers = []
            for route in ("health", "status", "metrics"):
                async with session.get(f"{base}/{route}") as response:
                    assert response.status == 200
                    answers.append(await (response.text() if route == "metrics" else response.json()))
        released.set()
        return answers

    config = build_config(tmp_path)
    held = {"before_step": lambda version: released.wait(DEADLINE_S)}
    outcome = run(config, trainer=held, meanwhile=meanwhile)
    assert outcome.error is None
    health, status, metrics = outcome.found
    assert health == {"status": "ok", "state": "running"}
    assert (status["version"], status["batch"], status["max_steps"]) == (0, 2, 3)
    assert status["engines"] == [{"url": outcome.engine.url, "state": "live", "version": 0, "in_flight": 0}]
    ours, trainers = status["waits"]
    assert (ours["who"], ours["peer"], ours["what"]) == ("orchestrator", "trainer", "rollouts of batch 2")
    assert "2 of 2 groups missing, none may begin before version 1 is live" in ours["text"]
    assert trainers == {"who": "trainer", "text": "trainer waits 3 s for batch 7 from orchestrator"}
    assert status["processes"]["trainer"]["state"] == "running"
    samples = {
        (sample.name, sample.labels.get("peer")): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    }
    assert samples["trireme_version", None] == 0
    assert samples["trireme_batch", None] == 2
    assert samples["trireme_failures", None] == 0
    assert ("trireme_waiting_seconds", "trainer") in samples
    (warning,) = status["warnings"]
    assert (warning["name"], warning["step"]) == ("not_finite", 0)
    assert 'trireme_warning{name="not_finite"} 1.0' in metrics
