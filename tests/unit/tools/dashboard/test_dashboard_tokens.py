"""One rollout token by token: the trainer's logprobs are at their tokens, and text of a model is never markup."""

import dataclasses
import html
import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from support.models.tiny_tokenizer import write_tokenizer
from support.processes.limits import file_size_limit
from support.runs.viewing import Reader
from support.runs.written_run import rewrite_batch, write_whole_run
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.logprobs import counting, identity, logprobs_of, path_of, read_logprobs, write_logprobs
from trireme.journal.rank_shares import Shares, samples_of
from trireme.journal.records import BatchRecord, Branch, Rollout
from trireme.messages import MicroBatch, Tokens, build_tokens
from trireme.tools.dashboard.rollouts import conversation_html
from trireme.tools.dashboard.tokens import (
    TokenColumns,
    colours_of,
    columns_of,
    facts_of,
    load_rollout,
    summary,
    token_html,
)
from trireme.tools.rollouts import Record, Row
from trireme.tools.run_reader import RunReader

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\x1b[31m"


@pytest.fixture
def run(tmp_path):
    return write_whole_run(tmp_path / "run", batches=3)


def what_it_says(sample: Tokens) -> np.ndarray:
    """A stand-in for a trainer: the logprob of each token that counts, out of what the token is."""
    return (-(sample.ids[counting(sample)] + 1) / 100 - np.abs(sample.logprobs[counting(sample)])).astype(np.float32)


def train(run: RunConfig, step: int, *, world: int) -> None:
    for rank in range(world):
        rows = share(run, step, rank=rank, world=world)
        said = [what_it_says(sample) for sample in apart(rows)]
        write_logprobs(run.paths.logprobs, step, rank, rows, np.concatenate(said))


def share(run: RunConfig, step: int, *, rank: int, world: int) -> list[MicroBatch]:
    return Shares(Journal(run.paths.journal), run).of(step, rank=rank, world=world).micro_batches


def apart(rows: list[MicroBatch]) -> Iterator[Tokens]:
    names = ("ids", "loss_mask", "logprobs", "advantages", "versions")
    for row in rows:
        ends = np.cumsum(row.lengths)
        for begin, end in zip([0, *ends], ends, strict=False):
            yield Tokens(**{name: getattr(row.tokens, name)[begin:end] for name in names})


def samples_in(run: RunConfig, step: int) -> list[Tokens]:
    return [sample.tokens for sample in samples_of(Journal(run.paths.journal).read(step).rollouts)]


def test_trainer_logprobs_are_found_for_every_token_of_their_batch(run):
    """Three ranks pack the batch. A file that is torn, and a batch that was sampled again, are as if not there."""
    train(run, 1, world=3)
    known = read_logprobs(run.paths.logprobs, 1)
    assert len(samples_in(run, 1)) > 6
    for sample in samples_in(run, 1):
        found = logprobs_of(sample, known)
        assert found is not None
        assert found[counting(sample)].tolist() == what_it_says(sample).tolist()
        assert np.isnan(found[~counting(sample)]).all()

    file = path_of(run.paths.logprobs, 1, 0)
    whole = file.read_bytes()
    others = [sample for rank in (1, 2) for sample in apart(share(run, 1, rank=rank, world=3))]
    for content in (b"", b"\xc1", whole[: len(whole) // 2]):
        file.write_bytes(content)
        assert read_logprobs(run.paths.logprobs, 1).keys() == {identity(sample) for sample in others}

    with file_size_limit(9), pytest.raises(OSError, match="File too large"):
        train(run, 1, world=1)
    assert [path.name for path in run.paths.logprobs.iterdir() if path.name.startswith(".")] == []

    def sample_again(record: BatchRecord) -> None:
        for rollout in record.rollouts:
            rollout.samples = [msgspec.structs.replace(one, logprobs=one.logprobs / 2) for one in rollout.samples]

    rewrite_batch(run, 1, sample_again)
    assert all(logprobs_of(sample, known) is None for sample in samples_in(run, 1))


def columns(**changes: Any) -> TokenColumns:
    engine, trainer = ([math.log(p) for p in each] for each in ((0.5, 0.25, 1.0), (0.25, 0.25, 0.5)))
    known = {"ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1], "logprobs": [0, 0, *engine]}
    sample = build_tokens(**known, advantages=[0, 0, 1.5, 1.5, -3.0], versions=[-1, -1, 3, 4, 4])
    said = {identity(sample): np.array(trainer, np.float32)}
    return columns_of(played(samples=[sample], **changes), 0, ["a", "b", "c", "d", "e"], said)


def played(**changes: Any) -> Rollout:
    return Rollout(env="a", example=0, reward=1.0, temperature=1.0, **changes)


def test_figures_of_a_sample_by_hand_and_all_that_is_known_of_a_token():
    shown = columns()
    assert shown.ratios[2:].tolist() == pytest.approx([0.5, 1.0, 0.5])
    assert np.isnan(shown.ratios[:2]).all()
    assert summary(shown) == (
        "5 tokens, 3 sampled by versions 3, 4 · mean p 0.500 · ratio 0.6667 on average, 0.5000 farthest from 1"
    )
    assert dict(facts_of(shown, 2, step=5)) == {
        "token": "3 of 5: 'c', id 7",
        "engine": "p 0.5000 (logprob -0.6931)",
        "trainer": "p 0.2500 (logprob -1.3863)",
        "ratio": "0.5000",
        "advantage": "+1.5000",
        "version": "3, lag 2",
        "loss": "trained on",
    }
    assert list(facts_of(shown, 0, step=5))[1:] == [("given", "to the model, not sampled")]
    masked = columns(masked="truncated")
    assert not masked.trained.any()
    assert ("loss", "masked: not trained on") in list(facts_of(masked, 2, step=5))
    assert "trainer" not in colours_of([masked])


def test_one_span_of_each_token_and_its_text_is_the_tokens(run):
    write_tokenizer(run.paths.weights / "step_2")
    train(run, 2, world=1)
    loaded = load_rollout(RunReader(run.paths.root), 2, 1)
    assert loaded.has_texts
    for sample, shown in zip(loaded.record.rollout.samples, loaded.samples, strict=True):
        page = token_html(shown, "ratio", range(shown.length), step=2)
        texts = re.findall(r"<span [^>]*>(.*?)</span>", page, re.DOTALL)
        assert len(texts) == sample.length
        assert [html.unescape(text.replace("⏎<br>", "\n")) for text in texts] == [text or "▯" for text in shown.texts]
        assert shown.has_trainer
    assert [row.group for row in loaded.group] == [loaded.record.row.group] * 3


def test_what_a_model_wrote_is_never_markup():
    said = [
        {"role": "user", "content": EVIL},
        {"role": EVIL, "content": EVIL, "tool_calls": [{"function": {"name": EVIL, "arguments": {EVIL: EVIL}}}]},
        {"role": "tool", "name": EVIL, "content": EVIL},
    ]
    record = Record(row=Row(0, "1", 0, 1.0), prompt=said, completion=said, answer=EVIL, info={EVIL: EVIL})
    evil = dataclasses.replace(columns(), texts=[EVIL] * 5)
    left = {"exit_code": EVIL, "seconds": EVIL, "output": EVIL, "files": {EVIL: EVIL}}
    branches = [Branch(why=EVIL), Branch(why=EVIL, parent=0, place=2, messages=said), Branch(why=EVIL, parent=9)]
    agents = Record(row=record.row, prompt=said, completion=said, info=left, rollout=played(branches=branches))
    page = conversation_html(record, "run") + conversation_html(agents, EVIL)
    page += token_html(evil, "engine", range(5), step=5)
    seen = Reader(page)
    assert seen.tags <= {"div", "span", "b", "h3", "i", "br", "details", "summary"}
    assert {name for _, attributes in seen.elements for name in attributes} <= {"class", "style", "data-t", "open"}
    assert "".join(seen.texts).count("<script>alert(1)</script>") >= 15
    assert "\x1b" not in page


def test_session_is_drawn_as_a_tree_of_branching_conversations():
    def say(*words: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": word} for word in words]

    branches = [
        Branch(why="first request", num_turns=2, sample=0),  # the longest: the prompt and the completion
        Branch(why="turn dropped", parent=0, place=2, num_turns=1, sample=1, messages=say("left", "so")),
        Branch(why="history edited", parent=1, place=3, messages=say("deeper")),
        Branch(why="new conversation", messages=say("title")),
    ]
    info = {"exit_code": 3, "seconds": 1.5, "output": "bye", "files": {"a/b.txt": 7}}
    record = Record(Row(0, "1", 0, 1.0), say("one"), say("two", "three"), info=info, rollout=played(branches=branches))
    assert record.facts[2] == "4 branches"
    texts = [text for text in Reader(conversation_html(record, "run")).texts if text.strip() not in ("", "user")]
    assert [text.split(":")[0] for text in texts] == [
        *("Conversation 0", "one", "two", "Conversation 1", "left", "Conversation 2", "deeper", "so", "three"),
        *("Conversation 3", "title", "files written", "a/b.txt  (7 bytes)", "program", "bye"),
    ]
    assert "turn dropped, 1 turn, 0 tools, sample 1" in texts[3]
    assert "history edited, 0 turns, 0 tools, not trained on" in texts[5]
    assert "exit code 3, after 1.5 s" in texts[-2]
