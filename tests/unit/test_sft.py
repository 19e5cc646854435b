"""Supervised fine-tuning: what counts in a conversation, the order of the data, and that it learns."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tiny import random_samples
from trireme.base.errors import ConfigError
from trireme.config.sft import SftConfig
from trireme.config.trainer import Checkpoints, Optimizer, TrainerModel
from trireme.ledger.manifest import complete_steps
from trireme.monitor.metrics import read_metrics
from trireme.trainer.data import Conversation, Epochs, open_tokenizer, read_conversations, to_sample
from trireme.trainer.sft_loop import train_sft

START, END = "<|im_start|>", "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rendered(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, seq_len: int = 99
) -> list[tuple[str, int]]:
    """Each token as text, and whether it counts."""
    tokens = to_sample(tokenizer, conversation, seq_len).tokens
    return list(zip(tokenizer.convert_ids_to_tokens(tokens.ids.tolist()), tokens.loss_mask.tolist(), strict=True))


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


GREETING = [said("user", "hi"), said("assistant", "yo")]


def test_what_the_assistant_says_counts_and_so_does_its_end_of_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = [START, "user\n", "h", "i", END, "\n", START, "assistant\n"]
    assert rendered(tokenizer, GREETING) == [(token, 0) for token in prompt] + [("y", 1), ("o", 1), (END, 1), ("\n", 0)]


def test_each_turn_of_the_assistant_counts_and_nothing_between(tokenizer: PreTrainedTokenizerBase) -> None:
    system, again = said("system", "x"), [said("user", "b"), said("assistant", "c")]
    found = rendered(tokenizer, [system, *GREETING, *again])
    assert [token for token, counts in found if counts] == ["y", "o", END, "c", END]
    between = [START, "user\n", "b", END, "\n", START, "assistant\n"]
    first = found.index(("y", 1))
    assert found[first + 3 : first + 12] == [(token, 0) for token in ["\n", *between]] + [("c", 1)]


def test_what_comes_after_the_assistants_last_word_is_left_out(tokenizer: PreTrainedTokenizerBase) -> None:
    assert rendered(tokenizer, [*GREETING, said("user", "bye")]) == rendered(tokenizer, GREETING)


def test_a_long_conversation_is_cut_at_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    assert rendered(tokenizer, GREETING, seq_len=9) == rendered(tokenizer, GREETING)[:9]


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny_model: Path) -> None:
    forgetful = AutoTokenizer.from_pretrained(tiny_model)
    forgetful.chat_template = "{{ messages[-1]['content'] }}{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(ConfigError, match="does not only append"):
        to_sample(forgetful, [*GREETING, *GREETING], seq_len=99)


def test_conversations_of_a_folder_come_in_the_order_of_their_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", {"messages": GREETING})
    write_lines(tmp_path / "a.jsonl", {"messages": GREETING[::-1]}, "", {"messages": GREETING})
    assert read_conversations(tmp_path) == [GREETING[::-1], GREETING, GREETING]


def test_every_character_that_json_allows_in_a_text_stays_in_it(tmp_path: Path) -> None:
    text = "line\u2028separator, next\u0085line, form\x0cfeed, é, 漢, 🙂"
    line = json.dumps({"messages": [said("user", text), said("assistant", text)]}, ensure_ascii=False)
    (tmp_path / "data.jsonl").write_bytes((line + "\r\n" + line).encode())
    assert [messages[1]["content"] for messages in read_conversations(tmp_path / "data.jsonl")] == [text, text]


def test_a_program_can_make_the_conversations(tmp_path: Path) -> None:
    program = tmp_path / "data.py"
    program.write_text(f"def conversations():\n    return 2 * [{{'messages': {GREETING}}}]\n")
    assert read_conversations(program) == [GREETING, GREETING]
    program.write_text("def conversations():\n    return [{'messages': []}]\n")
    with pytest.raises(ConfigError, match=r"data.py, conversation 0 has no assistant message"):
        read_conversations(program)
    program.write_text("")
    with pytest.raises(ConfigError, match="no function `conversations`"):
        read_conversations(program)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "3",
        '{"text": "hi"}',
        '{"messages": null}',
        '{"messages": []}',
        '{"messages": "hi"}',
        '{"messages": [{"role": "user", "content": "hi"}]}',
        '{"messages": [{"role": "user"}, {"role": "assistant", "content": "yo"}]}',
        '{"messages": [{"content": "hi"}, {"role": "assistant", "content": "yo"}]}',
        '{"messages": [{"role": "assistant", "content": "yo"}, "hi"]}',
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, line: str) -> None:
    path = write_lines(tmp_path / "data.jsonl", {"messages": GREETING}, "", line)
    with pytest.raises(ConfigError, match=r"data.jsonl, line 3 .*expected \{\"messages\""):
        read_conversations(path)


def test_a_turn_that_only_calls_tools_is_a_turn(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    silent = {"role": "assistant", "tool_calls": call["tool_calls"]}
    path = write_lines(tmp_path / "data.jsonl", {"messages": [GREETING[0], call, silent]})
    assert read_conversations(path) == [[GREETING[0], call, silent]]


def test_no_data_is_said_before_anything_starts(tmp_path: Path) -> None:
    for path in [tmp_path / "nowhere.jsonl", tmp_path, write_lines(tmp_path / "empty.jsonl", "")]:
        with pytest.raises(ConfigError, match=r"conversation.* expected"):
            read_conversations(path)


def test_a_tokenizer_that_is_not_there_is_a_question_of_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        open_tokenizer(str(tmp_path / "nowhere"), False)


def test_every_epoch_visits_each_sample_once_in_an_order_of_its_own() -> None:
    samples = random_samples([5] * 12)
    epochs = Epochs(samples, batch_size=8, seed=3)  # 12 samples: every third batch ends an epoch
    order = [samples.index(sample) for step in range(6) for sample in epochs.batch(step)]
    visits = [order[start : start + 12] for start in range(0, 48, 12)]
    assert all(sorted(visit) == list(range(12)) for visit in visits)
    assert len(set(map(tuple, visits))) == 4


def test_the_order_follows_from_seed_and_step_alone() -> None:
    samples = random_samples([5] * 12)
    straight = [Epochs(samples, 8, seed=3).batch(step) for step in range(5)]
    one = Epochs(samples, 8, seed=3)
    assert [one.batch(step) for step in reversed(range(5))] == straight[::-1]
    assert [Epochs(samples, 8, seed=4).batch(step) for step in range(5)] != straight


def test_a_batch_larger_than_the_data_repeats_it_evenly() -> None:
    samples = random_samples([5] * 3)
    visits = Counter(samples.index(sample) for sample in Epochs(samples, 9, seed=0).batch(4))
    assert visits == {0: 3, 1: 3, 2: 3}


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task that is learned in a few steps: say the letter again."""
    rng = random.Random(0)
    lines = []
    for _ in range(200):
        letter = rng.choice("abc")
        lines.append({"messages": [said("user", letter), said("assistant", letter * 4)]})
    return write_lines(tmp_path_factory.mktemp("data") / "letters.jsonl", *lines)


def build_config(folder: Path, model: Path, data: Path, **changed: object) -> SftConfig:
    return SftConfig(
        output_dir=folder,
        data=data,
        validation_fraction=0.1,
        max_steps=20,
        batch_size=16,
        seq_len=64,
        device="cpu",
        threads=1,
        model=TrainerModel(name=str(model)),
        optim=Optimizer(lr=5e-3),
        ckpt=Checkpoints(interval=10),
    ).model_copy(update=changed)


@pytest.fixture(scope="module")
def trained(letters: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    train_sft(build_config(folder, tiny_model, letters))
    return folder


def metrics_of(folder: Path) -> list[dict]:
    return read_metrics(folder / "metrics.jsonl")[0]


def test_twenty_steps_learn_a_simple_task(trained: Path) -> None:
    rows = metrics_of(trained)
    assert [row["step"] for row in rows] == list(range(20))
    assert rows[0]["loss"] > 4.0  # log 128 = 4.85: it knows nothing
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert rows[-1]["validation/loss"] == pytest.approx(rows[-1]["loss"], abs=0.5)


def test_a_resumed_run_goes_on_to_the_same_weights_to_the_bit(
    trained: Path, letters: Path, tiny_model: Path, tmp_path: Path
) -> None:
    train_sft(build_config(tmp_path, tiny_model, letters, max_steps=10))
    assert complete_steps(tmp_path / "checkpoints") == [10]
    train_sft(build_config(tmp_path, tiny_model, letters, resume=True))
    weights = "weights/step_20/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (trained / weights).read_bytes()
    assert [row["loss"] for row in metrics_of(tmp_path)] == [row["loss"] for row in metrics_of(trained)]
