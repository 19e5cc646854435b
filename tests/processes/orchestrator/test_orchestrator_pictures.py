"""Pictures in a whole run: from an environment's messages to the engine, the journal and the trainer."""

from pathlib import Path
from typing import Any

import numpy as np

from tiny_pictures import picture_file
from tiny_tokenizer import write_seeing_model
from trireme.algo.pictures import PictureRules
from trireme.config.run import RunConfig
from trireme.journal.message_text import PREFIX
from trireme.journal.pictures import PictureFiles, pictures_folder, rules_of_model
from trireme.messages import Picture, Tokens
from whole_run import WholeRun, build_config, run

LOOK = """
    def part(number):
        return {"type": "image_url", "image_url": {"url": f"{number}.png"}}

    def dataset(size=40):
        content = [[part(number % 8), {"type": "text", "text": "what?"}] for number in range(size)]
        return [{"prompt": [{"role": "user", "content": each}]} for each in content]

    def respond(messages, example):
        return [{"role": "user", "content": [part(8)]}] if len(messages) < 3 else None

    def reward(completion):
        return len(str(completion)) % 10 / 10
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


def test_pictures_of_every_turn_reach_the_engine_the_journal_and_the_trainer_also_after_a_crash(tmp_path: Path) -> None:
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
        texts = [str(rollout.prompt + rollout.completion) for rollout in record.rollouts]
        assert all(text.count(PREFIX) == 2 and "data:" not in text for text in texts)


def test_an_engine_that_expands_a_picture_otherwise_is_named_with_both_counts(tmp_path: Path) -> None:
    config, rules = seeing_run(tmp_path)
    other = PictureRules(rules.token, rules.block // 2, rules.min_pixels, rules.max_pixels)
    outcome = run(config, engine={"rules": other})
    assert "The engine made 34 tokens of a prompt with pictures, and the orchestrator 28" in str(outcome.error)
