"""Pictures in messages: checked and written once, and where their tokens are in a rollout's samples."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.models.tiny_pictures import picture_file
from support.models.tiny_tokenizer import write_seeing_model
from trireme.algo.pictures import collapse
from trireme.config.model.vision import MOST_PICTURES
from trireme.journal.message_text import PREFIX
from trireme.journal.model_turn import Turn, assistant_message
from trireme.journal.pictures import PictureFiles, rules_of_model, to_data_uri
from trireme.journal.turns import compare_turns, prompt_digest
from trireme.messages import Picture
from trireme.orchestrator.engines.pool import with_placeholders
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.orchestrator.rollout.pictures import ConversationPictures, read_messages
from trireme.orchestrator.rollout.trajectory import Trajectory

Messages = list[dict[str, Any]]
OK = {"role": "assistant", "content": "ok"}
PNG = picture_file(16, 8, 1)  # two tokens


def at(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def says(*parts: Any) -> dict[str, Any]:
    """A message of texts, PNG files and parts."""
    kinds = {str: lambda text: {"type": "text", "text": text}, bytes: lambda png: at(to_data_uri(png)), dict: dict}
    return {"role": "user", "content": [kinds[type(each)](each) for each in parts]}


class Talk(Trajectory):
    def __init__(self, folder: Path, strategy: Any = "interleaved") -> None:
        self.tokenizer, self.files = ChatTokenizer(write_seeing_model(folder)), PictureFiles(folder / "pictures")
        self.shown = ConversationPictures(rules_of_model(str(folder)), self.files)
        self.see = self.shown.rules.token
        super().__init__(self.tokenizer, strategy, self.shown)

    def read(self, *messages: dict[str, Any]) -> Messages:
        return asyncio.run(read_messages(list(messages), self.shown))

    def answer(self, messages: Messages) -> tuple[list[int], tuple[Picture, ...]]:
        """Answer with OK. Returns the prompt."""
        question, ids = self.ask(messages, None), self.tokenizer.encode("ok<|im_end|>")
        self.record(question, Turn(ids, [-1.0] * 3, [0] * 3, "stop", message=assistant_message("ok")))
        return question.ids, question.pictures


@pytest.fixture
def talk(tmp_path: Path) -> Talk:
    return Talk(tmp_path)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (says(at("http://127.0.0.1/a.png")), "no address is looked up"),
        (says(at(PREFIX + "a" * 64)), "no address is looked up"),
        (says(at("data:text/html;base64,AAAA")), "no address is looked up"),
        (says(at("data:image/png;base64,?")), "base64"),
        (says(at("data:image/png;base64,\ud800")), "surrogates"),
        (says(b"<svg/>"), "no picture"),
        (says(b"GIF89a, but not really"), "no picture"),
        (says(PNG[:45]), "picture"),
        (says(picture_file(900, 4)), "900 x 4"),
        (says(*[PNG] * (MOST_PICTURES + 1)), f"{MOST_PICTURES + 1} pictures"),
        (says(PNG), r"Set `\[model.vlm\]`"),
    ],
)
def test_what_is_no_picture_or_too_many_is_an_error_of_the_rollout(talk: Talk, message: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        asyncio.run(read_messages([message], None if "model.vlm" in words else talk.shown))


def test_picture_of_many_rollouts_is_decoded_once(talk: Talk) -> None:
    decoded: list[int] = []

    def write(add: Callable[[], str]) -> str:
        decoded.append(1)
        if len(decoded) == 1:
            raise OSError(28, "full")
        return add()

    async def read(times: int) -> list[Messages]:
        return await asyncio.gather(*(read_messages([says(PNG)], shown) for _ in range(times)))

    shown = ConversationPictures(talk.shown.rules, talk.files, write=write)
    with pytest.raises(OSError, match="full"):
        asyncio.run(read(1))
    (first, *others) = asyncio.run(read(20))
    assert len(decoded) == 2
    assert all(each == first for each in others)
    with ThreadPoolExecutor(8) as threads:
        (digest,) = set(threads.map(talk.files.add, [picture_file(9, 9)] * 40))
    assert talk.files.read(digest) == picture_file(9, 9)


def test_conversation_with_more_pictures_stays_one_sample(talk: Talk) -> None:
    first = talk.read(says("a", PNG, "b"))
    prompt, (one,) = talk.answer(first)
    text = "<|im_start|>user\na<|vision_start|><|image_pad|><|vision_end|>b<|im_end|>\n<|im_start|>assistant\n"
    assert collapse(prompt, [one]) == talk.tokenizer.encode(text)
    assert talk.prompt_ids(first, None, "") == prompt
    prompt, pictures = talk.answer([*first, OK, *talk.read(says(picture_file(16, 16), PNG), says("c", "d"))])
    (sample,) = talk.samples()
    assert sample.ids.tolist()[: len(prompt)] == prompt
    assert sample.pictures == list(pictures)
    assert [(each.rows, each.columns) for each in pictures] == [(1, 2), (2, 2), (1, 2)]
    assert [each.digest == one.digest for each in pictures] == [True, False, True]
    for each in pictures:
        tokens = slice(each.place, each.place + each.num_tokens)
        assert set(zip(sample.ids[tokens], sample.loss_mask[tokens], strict=True)) == {(talk.see, 0)}


def test_conversations_that_differ_only_in_a_picture_stay_separate(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "tolerant")
    first = talk.read(says("a", PNG))
    talk.answer(first)
    for shade in (2, 3):
        talk.answer([*first, OK, *talk.read(says(picture_file(16, 8, shade)))])
    one, other = talk.samples()
    assert one.ids.tolist() == other.ids.tolist()
    assert one.pictures[0] == other.pictures[0]
    assert one.pictures[1].digest != other.pictures[1].digest
    turn = {"ids": talk.tokenizer.encode("ok<|im_end|>"), "logprobs": [], "versions": [], "finish_reason": "stop"}
    records = [Turn(prompt=digest, message={}, **turn) for digest in talk.prompts()[True]]
    compared, left = compare_turns(talk.samples(), records, ("ids",))
    assert len({record.prompt for record in records}) == [turn.difference for turn in compared].count("") == 3
    assert left == []
    assert prompt_digest([1], ()) == prompt_digest([1])


def test_a_placeholder_that_is_no_pictures_never_reaches_an_engine(talk: Talk) -> None:
    pictures = [Picture("a" * 64, 1, 1, 2)]
    assert with_placeholders([1, talk.see, talk.see, 2], pictures) == [1, talk.see, 2]
    with pytest.raises(ValueError, match="1 pictures and 2 placeholders"):
        with_placeholders([1, talk.see, talk.see, 2, talk.see], pictures)
    with pytest.raises(ValueError, match="2 placeholders for 1 pictures"):
        talk.ask(talk.read(says(PNG, "<|image_pad|>")), None)
