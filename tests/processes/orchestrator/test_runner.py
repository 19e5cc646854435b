"""A whole run: pictures, and what a cut sampler chose from, reach engine, journal and trainer."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from support.models.tiny_pictures import picture_file
from support.models.tiny_tokenizer import write_seeing_model
from support.runs.whole_run import WholeRun, build_config, run
from trireme.algo.pictures import PictureRules
from trireme.config.run import RunConfig
from trireme.journal.message_text import PREFIX
from trireme.journal.pictures import PictureFiles, pictures_folder, rules_of_model
from trireme.messages import Picture, Tokens

LOOK = """
    def part(number):
        return {"type": "image_url", "image_url": {"url": f"{number}.png"}}

    def dataset(size=40):
        content = [[part(number % 8), {"type": "text", "text": "what?"}] for number in range(size)]
        return [{"prompt": [{"role": "user", "content": each}]} for each in content]

    def respond(messages, example):
        return [{"role": "user", "content": [part(8)]}] if len(messages) < 3 else None

    def reward(completion):
        return {"reward": len(str(completion)) % 10 / 10, "turn_rewards": [0.25, 0.5]}
"""


def seeing_run(folder: Path) -> tuple[RunConfig, PictureRules]:
    """A run whose environment shows files of its own folder, a second one after the model's first turn."""
    model = write_seeing_model(folder / "seeing")
    for shade in range(9):
        (folder / f"{shade}.png").write_bytes(picture_file(16, 8, shade))
    config = build_config(folder, LOOK, model={"name": str(model), "vlm": {}}, trainer={"model": {"vlm": {}}})
    return config, rules_of_model(str(model))


def prompt_of(sample: Tokens, pictures: list[Picture]) -> tuple[Any, ...]:
    end = int(np.flatnonzero(sample.loss_mask[pictures[-1].place :])[0]) + pictures[-1].place
    return (*sample.ids[:end].tolist(), *(each.digest for each in pictures))


def test_pictures_reach_engine_journal_and_trainer_despite_a_crash(tmp_path):
    config, rules = seeing_run(tmp_path)

    async def kill(whole: WholeRun) -> None:
        await whole.until(lambda: whole.trainer.version == 1, "a batch")
        await whole.kill_orchestrator()
        whole.config = whole.config.model_copy(update={"resume": True})
        whole.start_orchestrator()

    outcome = run(config, engine={"rules": rules}, meanwhile=kill)
    assert outcome.error is None
    asked = {(*request.ids, *(each.digest for each in request.pictures)) for request in outcome.engine.requests}
    files = PictureFiles(pictures_folder(outcome.config.paths.journal))
    for record, batch in zip(outcome.records, outcome.trainer.batches, strict=True):
        samples = [sample for rollout in record.rollouts for sample in rollout.samples]
        for sample in samples:
            first, second = sample.pictures
            assert prompt_of(sample, [first]) in asked
            assert prompt_of(sample, [first, second]) in asked
        shown = {each.digest for sample in samples for each in sample.pictures}
        assert {digest: files.read(digest) for digest in shown} == batch.pictures
        assert sum(len(row.tokens.pictures) for row in batch.micro_batches) == 2 * len(samples)
        for rollout in record.rollouts:
            text, (rewards,) = str(rollout.prompt + rollout.completion), rollout.token_rewards
            assert text.count(PREFIX) == 2
            assert "data:" not in text
            assert rewards[~np.isnan(rewards)].tolist() == [0.25, 0.5]


def test_picture_token_mismatch_is_an_error_with_both_counts(tmp_path):
    config, rules = seeing_run(tmp_path)
    other = PictureRules(rules.token, rules.block // 2, rules.min_pixels, rules.max_pixels)
    outcome = run(config, engine={"rules": other})
    assert "The engine made 34 tokens of a prompt with pictures, and the orchestrator 28" in str(outcome.error)


def test_journal_keeps_the_tokens_that_a_cut_sampler_chose_from(tmp_path):
    def with_candidates(response: dict) -> dict:
        (choice,) = response["choices"]
        if int(response["request_id"]) % 5 == 0:
            choice["token_ids"][0] = 200
        for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
            logprobs = {token: float(np.log(0.75)), token + 1: float(np.log(0.25)), 9: -9999.0}
            entry |= {"token_id": token, "logprob": logprobs[token]}
            entry["top_logprobs"] = [{"token_id": one, "logprob": logprob} for one, logprob in logprobs.items()]
        return response

    config = build_config(tmp_path, max_steps=1, orchestrator={"sampling": {"max_tokens": 3, "top_p": 0.9}})
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": 200}))
    answers = {"answer": lambda asked: [20] * (1 + 4 * (asked.number % 2)) + [asked.end]}
    outcome = run(config, engine=answers | {"mangle": with_candidates})
    assert outcome.error is None
    dropped = [drop.reason for drop in outcome.records[0].dropped]
    assert any("The engine gave token 200 - ids from 0 to 199" in reason for reason in dropped)
    assert {asked.sampling["logprobs"] for asked in outcome.engine.requests} == {88}
    ends = {(rollout.truncated, rollout.stop) for rollout in outcome.records[0].rollouts}
    assert ends == {(True, "max_tokens"), (False, "stop")}
    for rollout in outcome.records[0].rollouts:
        (sample,) = rollout.samples
        sampled = sample.ids[sample.loss_mask == 1]
        assert sample.kept.counts.tolist() == (sample.loss_mask * 2).tolist()
        assert sample.kept.ids.reshape(-1, 2).tolist() == [[token, token + 1] for token in sampled]
