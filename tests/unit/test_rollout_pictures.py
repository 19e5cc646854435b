"""Pictures from an environment's message to the engine, the journal and the trainer."""

import asyncio
import base64
import hashlib
import io
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tiny_tokenizer import write_seeing_model
from trireme.algo.pictures import MOST_PICTURES, collapse
from trireme.journal.pictures import PREFIX, PictureFiles, rules_of_model, size_of
from trireme.journal.turns import TurnRecord, compare_turns, prompt_digest
from trireme.messages import Picture
from trireme.orchestrator.engines.pool import Generation, with_placeholders
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.pictures import ConversationPictures, read_messages
from trireme.orchestrator.rollout.trajectory import Trajectory
from trireme.orchestrator.rollout.turns import ModelMessage


def png(color: int, width: int = 16, height: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (color, 9, 9)).save(file, "PNG")
    return file.getvalue()


def part(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(file).decode()}}


def says(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    return {"role": "user", "content": content}


class Seeing:
    """A model that sees, and the pictures that its conversations have shown."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = ChatTokenizer(write_seeing_model(folder / "model"))
        self.files = PictureFiles(folder / "pictures")
        self.pictures = ConversationPictures(rules_of_model(str(folder / "model")), self.files)

    def read(self, *messages: dict[str, Any]) -> list[dict[str, Any]]:
        return asyncio.run(read_messages(list(messages), self.pictures))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)


@pytest.fixture
def seeing(tmp_path: Path) -> Seeing:
    return Seeing(tmp_path)


OK = {"role": "assistant", "content": "ok"}


def answer(talk: Trajectory, messages: list[dict[str, Any]]) -> tuple[list[int], tuple[Picture, ...]]:
    """Answer with OK. Returns the prompt."""
    question, ids = talk.ask(messages, None), talk._tokenizer.encode("ok<|im_end|>")
    talk.record(question, Generation(ids, [-1.0] * 3, [0] * 3, "stop"), ModelMessage("ok"))
    return question.ids, question.pictures


def test_messages_name_digests_of_files_and_text_parts_become_text(seeing: Seeing) -> None:
    jpeg = io.BytesIO()
    Image.open(io.BytesIO(png(7))).save(jpeg, "JPEG")
    read = seeing.read(says("a", "b"), says(part(png(1)), "c", part(jpeg.getvalue())), says(part(png(1))))
    names = [each["image_url"]["url"] for message in read[1:] for each in message["content"] if each["type"] != "text"]
    assert read[0] == {"role": "user", "content": "ab"}
    assert names[0] == names[2] != names[1]
    assert [size_of(seeing.files.read(name.removeprefix(PREFIX))) for name in names] == [(16, 8)] * 3


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (says({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}), "no address is looked up"),
        (says({"type": "image_url", "image_url": {"url": PREFIX + "a" * 64}}), "no address is looked up"),
        (says({"type": "image_url", "image_url": {"url": "data:image/png;base64,\ud800"}}), "surrogates"),
        (says(part(b"<svg/>")), "no picture"),
        (says(part(png(1)[:45])), "picture"),
        (says(part(png(1, 900, 4))), "900 x 4"),
        (says(*[part(png(1))] * (MOST_PICTURES + 1)), f"{MOST_PICTURES + 1} pictures"),
    ],
)
def test_what_is_no_picture_or_too_many_is_an_error_of_the_rollout(seeing: Seeing, message: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        seeing.read(message)
    with pytest.raises(ValueError, match=r"Set `\[model.vlm\]`"):
        asyncio.run(read_messages([message], None))
    assert seeing.read(says(part(png(1))))


def test_a_picture_of_many_rollouts_is_decoded_once_and_threads_may_write_the_same(seeing: Seeing) -> None:
    decoded = []
    seeing.pictures._write = lambda add: decoded.append(1) or add()  # type: ignore[func-returns-value]

    async def all_at_once() -> None:
        await asyncio.gather(*(read_messages([says(part(png(3)))], seeing.pictures) for _ in range(20)))

    asyncio.run(all_at_once())
    assert len(decoded) == 1
    with ThreadPoolExecutor(8) as threads:
        digests = list(threads.map(seeing.files.add, [png(4)] * 40))
    assert {hashlib.sha256(seeing.files.read(digest)).hexdigest() for digest in digests} == {*digests}


def test_a_disk_that_was_full_is_tried_again_and_a_bad_picture_is_not(seeing: Seeing) -> None:
    full = itertools.chain([OSError(28, "full")], itertools.repeat(None))

    def write(add: Any) -> str:
        if error := next(full):
            raise error
        return add()

    seeing.pictures._write = write
    with pytest.raises(OSError, match="full"):
        seeing.read(says(part(png(1))))
    assert seeing.read(says(part(png(1))))


def test_a_conversation_that_shows_more_pictures_stays_one_sample_with_each_at_its_place(seeing: Seeing) -> None:
    talk = Trajectory(seeing.tokenizer, "interleaved", seeing.pictures)
    see = seeing.pictures.rules.token
    first = seeing.read(says("a", part(png(1)), "b"))
    prompt, (one,) = answer(talk, first)
    assert collapse(prompt, [one]) == seeing.encode(
        "<|im_start|>user\na<|vision_start|><|image_pad|><|vision_end|>b<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (one.rows, one.columns, prompt[one.place : one.place + 2]) == (1, 2, [see, see])
    assert talk.prompt_ids(first, None, "") == prompt
    more = [*first, OK, *seeing.read(says(part(png(2, 16, 16)), part(png(1))))]
    prompt, pictures = answer(talk, more)
    (sample,) = talk.samples()
    assert sample.pictures == list(pictures)
    assert [each.num_tokens for each in pictures] == [2, 4, 2]
    assert pictures[0] == one
    assert pictures[2].digest == one.digest
    for each in pictures:
        assert sample.ids[each.place : each.place + each.num_tokens].tolist() == [see] * each.num_tokens
    assert sample.ids.tolist()[: len(prompt)] == prompt
    assert sample.loss_mask[[each.place for each in pictures]].tolist() == [0, 0, 0]


def test_a_conversation_that_leaves_another_has_the_pictures_before_its_place(seeing: Seeing) -> None:
    talk = Trajectory(seeing.tokenizer, "tolerant", seeing.pictures)
    first = seeing.read(says("a", part(png(1))))
    answer(talk, first)
    for color in (2, 3):
        answer(talk, [*first, OK, *seeing.read(says(part(png(color))))])
    one, other = talk.samples()
    assert [len(sample.pictures) for sample in (one, other)] == [2, 2]
    assert one.pictures[0] == other.pictures[0]
    assert one.ids.tolist() == other.ids.tolist()
    assert one.pictures[1].digest != other.pictures[1].digest
    turn = {"ids": seeing.encode("ok<|im_end|>"), "logprobs": [], "versions": [], "finish_reason": "stop"}
    records = [TurnRecord(prompt=digest, message={}, **turn) for digest in talk.prompts()[True]]
    assert len({record.prompt for record in records}) == 3
    compared, left = compare_turns(talk.samples(), records, ("ids",))
    assert [turn.difference for turn in compared].count("") == 3
    assert left == []


def test_pictures_are_a_part_of_a_prompts_digest_only_where_there_are_some() -> None:
    one, other = (Picture(letter * 64, 1, 1, 2) for letter in "ab")
    digests = [prompt_digest([1, 9, 9], pictures) for pictures in ((), (one,), (other,), (one, other))]
    assert len({*digests, prompt_digest([1, 9, 9, 9, 9])}) == 5
    assert digests[0] == prompt_digest([1, 9, 9])


def test_a_placeholder_that_is_no_pictures_never_reaches_an_engine(seeing: Seeing) -> None:
    see = seeing.pictures.rules.token
    pictures = [Picture("a" * 64, 1, 1, 2)]
    assert with_placeholders([1, see, see, 2], pictures) == [1, see, 2]
    with pytest.raises(ValueError, match="1 pictures and 2 placeholders"):
        with_placeholders([1, see, see, 2, see], pictures)
    talk = Trajectory(seeing.tokenizer, "interleaved", seeing.pictures)
    with pytest.raises(ValueError, match="2 placeholders for 1 pictures"):
        talk.ask(seeing.read(says(part(png(1)), "<|image_pad|>")), None)
