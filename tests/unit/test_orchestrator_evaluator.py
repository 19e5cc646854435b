"""Evaluation: which versions, which examples, what is written; and what a running orchestrator tells of itself."""

from __future__ import annotations

import asyncio
import json
import threading

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tiny_tokenizer import END
from trireme.monitor.metrics import read_metrics
from trireme.orchestrator.chat import open_chat_tokenizer
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


def test_the_base_model_is_left_out_when_asked_and_a_rollout_that_fails_is_left_out_of_the_mean(tmp_path):
    code = WITH_HELD_OUT.replace("reward(completion, answer):", "reward(completion, answer):\n        completion[0]")
    config = build_config(tmp_path, code, max_steps=1, orchestrator={"eval": {"eval_base": False}})
    tokenizer = open_chat_tokenizer(config.model.name)
    question = [{"role": "user", "content": "held out 3"}]
    unlucky = tokenizer.encode(tokenizer.render(question, tools=None, generate=True))

    def answer(asked):
        return [END] if asked.ids == unlucky else [30, END]

    assert run(config, engine={"answer": answer}).error is None
    assert evaluated(config) == ["step_1"]
    assert [row["example_id"] for row in lines(config, 1)] == [0, 1, 2, 4]


def test_a_running_orchestrator_tells_its_health_its_state_and_what_each_process_waits_for(tmp_path):
    released = threading.Event()

    async def meanwhile(running):
        await running.until(lambda: running.orchestrator.scheduler.next_batch == 2, "two batches ahead")
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
