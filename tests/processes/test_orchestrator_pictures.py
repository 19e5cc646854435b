"""Pictures in a whole run: from an environment's messages to the engine, the journal and the trainer."""

from pathlib import Path
from typing import Any

from tiny_tokenizer import write_seeing_model
from trireme.algo.pictures import PictureRules
from trireme.config.run import RunConfig
from trireme.journal.pictures import PREFIX, PictureFiles, pictures_folder, rules_of_model
from trireme.messages import Picture, Tokens
from whole_run import WholeRun, build_config, run

LOOK = """
    import base64, zlib

    def png(number):  # of 16 x 8 pixels: two blocks
        def chunk(kind, data):
            return len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)
        lines = (bytes([0]) + bytes([number, 9, 9]) * 16) * 8
        head = (16).to_bytes(4) + (8).to_bytes(4) + bytes([8, 2, 0, 0, 0])
        chunks = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b"")
        return b"\\x89PNG\\r\\n\\x1a\\n" + b"".join(chunks)

    def part(number):
        url = "data:image/png;base64," + base64.b64encode(png(number)).decode()
        return {"type": "image_url", "image_url": {"url": url}}

    def dataset(size=40):
        text = {"type": "text", "text": "what?"}
        return [{"prompt": [{"role": "user", "content": [part(i), text]}], "i": i} for i in range(size)]

    def respond(messages, example):
        return [{"role": "user", "content": [part(100 + example["i"])]}] if len(messages) < 3 else None

    def reward(completion):
        return len(str(completion)) % 10 / 10
"""


def seeing_run(folder: Path, **more: Any) -> tuple[RunConfig, PictureRules]:
    model = write_seeing_model(folder / "seeing")
    table = {"name": str(model), "vlm": {}}
    config = build_config(folder, LOOK, model=table, trainer={"model": {"vlm": {}}}, **more)
    return config, rules_of_model(str(model))


def check(outcome: WholeRun) -> None:
    assert outcome.error is None
    asked = {(*request.ids, *(each.digest for each in request.pictures)) for request in outcome.engine.requests}
    files = PictureFiles(pictures_folder(outcome.config.paths.journal))
    for record, batch in zip(outcome.records, outcome.trainer.batches, strict=True):
        samples = [sample for rollout in record.rollouts for sample in rollout.samples]
        for sample in samples:
            first, second = sample.pictures
            assert _prompt(sample, [first]) in asked
            assert _prompt(sample, [first, second]) in asked
        shown = {each.digest for sample in samples for each in sample.pictures}
        assert {digest: files.read(digest) for digest in shown} == batch.pictures
        assert sum(len(row.tokens.pictures) for row in batch.micro_batches) == 2 * len(samples)
        texts = [str(rollout.prompt + rollout.completion) for rollout in record.rollouts]
        assert all(text.count(PREFIX) == 2 and "data:" not in text for text in texts)


def _prompt(sample: Tokens, pictures: list[Picture]) -> tuple[Any, ...]:
    begin = int(next(place for place in range(pictures[-1].place, sample.length) if sample.loss_mask[place]))
    return (*sample.ids[:begin].tolist(), *(each.digest for each in pictures))


def test_pictures_of_every_turn_reach_the_engine_the_journal_and_the_trainer(tmp_path: Path) -> None:
    config, rules = seeing_run(tmp_path)
    check(run(config, engine={"rules": rules}))


def test_an_orchestrator_that_was_killed_resumes_with_its_pictures(tmp_path: Path) -> None:
    config, rules = seeing_run(tmp_path)

    async def kill(whole: WholeRun) -> None:
        await whole.until(lambda: whole.trainer.version == 1, "a batch")
        await whole.kill_orchestrator()
        whole.config = whole.config.model_copy(update={"resume": True})
        whole.start_orchestrator()

    check(run(config, engine={"rules": rules}, meanwhile=kill))


def test_an_engine_that_expands_a_picture_otherwise_is_named_with_both_counts(tmp_path: Path) -> None:
    config, rules = seeing_run(tmp_path)
    other = PictureRules(rules.token, rules.block // 2, rules.min_pixels, rules.max_pixels)
    outcome = run(config, engine={"rules": other})
    assert "The engine made 34 tokens of a prompt with pictures, and the orchestrator 28" in str(outcome.error)


def test_without_the_table_of_the_model_a_picture_is_refused_by_its_name(tmp_path: Path) -> None:
    outcome = run(build_config(tmp_path, LOOK))
    assert "Set `[model.vlm]`" in str(outcome.error)
