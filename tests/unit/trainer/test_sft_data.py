"""From conversations to batches: what is read, what counts, what is held out, and in which order samples come."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow.parquet import write_table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tiny import random_samples
from tiny_pictures import picture_file
from tiny_tokenizer import CHATML, LLAMA_3, MARKED, QWEN_3, write_seeing_model, write_tokenizer
from trireme.algo.packing import Sample
from trireme.base.errors import ConfigError
from trireme.base.waiting import Waits
from trireme.config.sft import SftConfig, Source
from trireme.config.trainer import TrainerModel, Vlm
from trireme.journal.pictures import PictureFiles, size_of, to_data_uri
from trireme.messages import Picture
from trireme.orchestrator.rollout.chat import ChatTokenizer
from trireme.trainer.parallel.mesh import World
from trireme.trainer.sft.conversations import Completion, Conversation, read_conversations, to_conversation
from trireme.trainer.sft.dataset import Counts, Epochs, Portion, SampleFiles, SampleWriter
from trireme.trainer.sft.prepare_data import prepare_data, steps_of
from trireme.trainer.sft.rendering import Rendered, Renderer, Tokenized, tokenized

GREETING = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
START, END = "<|im_start|>", "<|im_end|>"


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def chat(said: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "letters.jsonl", *(chat(letter, letter * 4) for letter in 5 * "abcd"))


def build_config(folder: Path, model: Path, data: Path, **changed: object) -> SftConfig:
    sizes = {"batch_size": 16, "seq_len": 64, "device": "cpu", "threads": 1}
    config = SftConfig(output_dir=folder, data=str(data), model=TrainerModel(name=str(model)), **sizes)
    return config.model_copy(update=changed)


def write_samples(folder: Path, *samples: Tokenized, drop: bool = False) -> tuple[list[Sample], Counts]:
    writer = SampleWriter(seq_len=8, drop=drop)
    for sample in samples:
        writer.add([sample])
    writer.write(folder)
    return list(SampleFiles(folder)), writer.counts


def test_samples_come_back_from_disk_as_they_were(tmp_path):
    rng = random.Random(0)
    samples = [Tokenized([rng.randrange(9) for _ in range(n)], [0, *[1] * (n - 1)]) for n in (3, 8, 2, 5)]
    found, counts = write_samples(tmp_path / "a", *samples)
    assert [sample.tokens.ids.tolist() for sample in found] == [sample.ids for sample in samples]
    assert [sample.tokens.loss_mask.tolist() for sample in found] == [sample.mask for sample in samples]
    assert (counts.samples, counts.tokens, counts.learned) == (4, 18, 14)
    (sample,), _ = write_samples(tmp_path / "b", Tokenized([5, 6], [1, 1]))
    assert sample.tokens.loss_mask.tolist() == [0, 1]  # nothing comes before the first token to predict it from


@pytest.mark.parametrize("drop", [False, True])
def test_what_is_too_long_is_cut_or_left_out_and_counted(tmp_path, drop):
    long, exact = Tokenized(list(range(9)), [0] * 4 + [1] * 5), Tokenized(list(range(8)), [0] * 4 + [1] * 4)
    late = Tokenized(list(range(20)), [0] * 10 + [1] * 10)  # nothing to learn is left of it
    found, counts = write_samples(tmp_path / "a", long, exact, late, drop=drop)
    assert [sample.tokens.ids.tolist() for sample in found] == ([exact.ids] if drop else [long.ids[:8], exact.ids])
    assert (counts.conversations, counts.cut, counts.dropped, counts.empty) == ((3, 0, 2, 0) if drop else (3, 1, 0, 1))


def epochs(samples: list[Sample], batch_size: int, seed: int = 0) -> Epochs:
    return Epochs([Portion(samples)], batch_size, seed)


def test_every_epoch_visits_each_sample_once_in_an_order_that_follows_from_seed_and_step():
    samples = random_samples([5] * 12)
    ours = epochs(samples, 8, seed=3)  # 12 samples: every third batch ends an epoch
    batches = [ours.batch(step) for step in range(6)]
    order = [samples.index(sample) for batch in batches for sample in batch]
    visits = [order[start : start + 12] for start in range(0, 48, 12)]
    assert all(sorted(visit) == list(range(12)) for visit in visits)
    assert len(set(map(tuple, visits))) == 4
    again = epochs(samples, 8, seed=3)
    assert [again.batch(step) for step in reversed(range(6))] == batches[::-1]
    assert epochs(samples, 8, seed=4).batch(0) != batches[0]
    repeated = Counter(samples.index(sample) for sample in epochs(samples[:3], 9).batch(4))
    assert repeated == {0: 3, 1: 3, 2: 3}


def test_a_source_is_in_an_epoch_as_often_as_it_says():
    samples = random_samples([5] * 16)
    portions = [Portion(samples[:4], repeat=2.5), Portion(samples[4:12]), Portion(samples[12:], repeat=0.25)]
    ours = Epochs(portions, batch_size=19, seed=1)  # 10 + 8 + 1: a batch is an epoch
    assert ours.length == 19
    visits = [Counter(samples.index(sample) for sample in ours.batch(step)) for step in range(4)]
    for visit in visits:
        assert sorted(visit[i] for i in range(4)) == [2, 2, 3, 3]
        assert [visit[i] for i in range(4, 12)] == [1] * 8
    assert sorted(i for visit in visits for i in visit if i >= 12) == [12, 13, 14, 15]
    assert [sum(visit[i] for visit in visits) for i in range(4)] == [10] * 4  # the halves take turns


def test_what_is_held_out_is_spread_over_the_data_and_never_trained_on(tiny_model, tmp_path, world):
    data = write_lines(tmp_path / "data.jsonl", *(chat("a", "b" * number) for number in range(1, 21)))
    config = build_config(tmp_path / "run", tiny_model, data, validation_fraction=0.25)
    train, held_out = prepare_data(config, world, Waits("sft"))
    assert held_out is not None
    trained = [sample for step in range(15) for sample in train.batch(step)]
    said = [{int(sample.tokens.loss_mask.sum()) - 1 for sample in samples} for samples in (held_out, trained)]
    assert said == [{4, 8, 12, 16, 20}, set(range(1, 21)) - {4, 8, 12, 16, 20}]
    everything, none = prepare_data(build_config(tmp_path / "run", tiny_model, data, resume=True), world, Waits("sft"))
    assert (everything.length, none) == (20, None)
    few = build_config(tmp_path / "few", tiny_model, data, validation_fraction=0.01)
    with pytest.raises(ConfigError, match=r"validation_fraction = 0.01 holds out none of 20"):
        prepare_data(few, world, Waits("sft"))


def test_sources_are_trained_on_together_for_as_long_as_epochs_say(letters, tiny_model, tmp_path, world):
    source = Source(data=str(write_lines(tmp_path / "other.jsonl", chat("hi", "yo"))), repeat=40.0)
    config = build_config(tmp_path / "run", tiny_model, letters, source=(source,))
    train, _ = prepare_data(config, world, Waits("sft"))
    assert train.length == 20 + 40
    assert steps_of(config, train) == SftConfig().max_steps
    assert steps_of(config.model_copy(update={"num_epochs": 2.0}), train) == 8  # 120 samples in batches of 16
    with pytest.raises(ConfigError, match="less than a step"):
        steps_of(config.model_copy(update={"num_epochs": 0.1}), train)
    rare = (source.model_copy(update={"repeat": 0.4}),)
    with pytest.raises(ConfigError, match=r"repeat = 0.4 of .*other.jsonl, which has 1 samples"):
        prepare_data(build_config(tmp_path / "run", tiny_model, letters, source=rare), world, Waits("sft"))
    long = write_lines(tmp_path / "long.jsonl", chat("a" * 99, "b"))
    with pytest.raises(ConfigError, match=r"no sample is left \(1 conversations.*Raise `seq_len`"):
        prepare_data(build_config(tmp_path / "run", tiny_model, long), world, Waits("sft"))


def write_parquet(path: Path, *rows: dict[str, Any]) -> Path:
    write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def read(path: Path | str) -> list[Conversation | Completion]:
    return list(read_conversations(Source(data=str(path))))


def messages(found: list[Conversation | Completion]) -> list[list[Any]]:
    return [list(one.messages) for one in found if isinstance(one, Conversation)]


def test_a_folders_conversations_come_in_the_order_of_their_files(tmp_path):
    text = "line\u2028separator, next\u0085line, form\x0cfeed, é, 漢, 🙂"
    turned, strange = {"messages": GREETING[::-1]}, {"messages": [GREETING[0], {"role": "assistant", "content": text}]}
    write_lines(tmp_path / "b.jsonl", {"messages": GREETING})
    write_lines(tmp_path / "a.jsonl", turned, "", {"messages": GREETING})
    write_parquet(tmp_path / "c.parquet", strange)
    (tmp_path / "d.json").write_text(json.dumps([turned]))
    (tmp_path / "e.json").write_text(json.dumps({"data": [{"messages": GREETING}]}))
    (tmp_path / "f.jsonl").write_bytes("\r\n".join(2 * [json.dumps(strange, ensure_ascii=False)]).encode())
    (tmp_path / "README.md").write_text("# not data")
    expected = [GREETING[::-1], GREETING, GREETING, strange["messages"], GREETING[::-1], GREETING]
    assert messages(read(tmp_path)) == [*expected, *2 * [strange["messages"]]]


def test_a_program_can_make_the_conversations(tmp_path):
    program = tmp_path / "data.py"
    program.write_text(f"def conversations():\n    return 2 * [{{'messages': {GREETING}}}]\n")
    assert messages(read(program)) == [GREETING, GREETING]
    program.write_text("def conversations():\n    return [{'messages': []}]\n")
    with pytest.raises(ConfigError, match=r"data.py, conversation 0 has no assistant message"):
        read(program)
    program.write_text("")
    with pytest.raises(ConfigError, match="no function `conversations`"):
        read(program)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"text": "hi"}',
        '{"messages": []}',
        '{"messages": "hi"}',
        '{"messages": [{"role": "user", "content": "hi"}]}',
        '{"messages": [{"role": "user"}, {"role": "assistant", "content": "yo"}]}',
        '{"messages": [{"content": "hi"}, {"role": "assistant", "content": "yo"}]}',
        '{"messages": [{"role": "assistant", "content": "yo"}, "hi"]}',
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "weight": 0.5}]}',
        '{"prompt": "hi"}',
        '{"prompt": "hi", "completion": ""}',
        '{"prompt": [{"role": "user", "content": "hi"}], "completion": []}',
        '{"prompt": 3, "completion": 4}',
        '{"conversations": [{"from": "alien", "value": "hi"}]}',
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}], "tools": "{"}',
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}], "tools": {"a": 1}}',
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, line):
    path = write_lines(tmp_path / "data.jsonl", {"messages": GREETING}, "", line)
    with pytest.raises(ConfigError, match=r"data.jsonl, line 3 .*expected \{\"messages\"") as caught:
        read(path)
    assert str(caught.value).count("data.jsonl") == 1


def test_the_forms_of_one_conversation_are_one():
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    for other in (sharegpt, {"conversations": GREETING}):
        assert to_conversation(other, "") == to_conversation({"messages": GREETING}, "")
    assert to_conversation({"prompt": "a", "completion": "b"}, "x") == Completion("a", "b", "x")
    call, silent = ({"role": "assistant", "tool_calls": [CALL]} | more for more in ({"content": None}, {}))
    assert messages([to_conversation({"messages": [GREETING[0], call, silent]}, "")]) == [[GREETING[0], call, silent]]
    with pytest.raises(ConfigError, match=r"its keys are instruction, output"):
        to_conversation({"instruction": "a", "output": "b"}, "here")
    pair = to_conversation({"prompt": GREETING[:1], "completion": GREETING[1:]}, "")
    assert messages([pair]) == [GREETING]
    assert [pair.is_learned(index, ("user", "assistant")) for index in range(2)] == [False, True]  # type: ignore[union-attr]


def test_sharegpts_system_tools_and_calls_are_understood():
    entry = {
        "system": "be kind",
        "tools": json.dumps([TOOL]),
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"x": 1}})},
            {"from": "observation", "value": "2"}, {"from": "gpt", "value": "yo", "weight": 0},
        ],
    }  # fmt: skip
    found = to_conversation(entry, "")
    assert isinstance(found, Conversation)
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[2]["tool_calls"] == [CALL]
    assert found.tools == (TOOL,)
    assert [found.is_learned(index, ("assistant",)) for index in range(5)] == [False, False, True, False, False]


def test_columns_that_an_entry_never_had_are_not_in_it(tmp_path):
    """A column of parquet gives every message all keys that any message has, and every call all arguments."""
    other = {"type": "function", "function": {"name": "g", "arguments": {"y": "z"}}}
    calls = [[GREETING[0], {"role": "assistant", "content": "", "tool_calls": [call]}] for call in (CALL, other)]
    tools = [[TOOL], None, None]
    rows = [{"messages": each, "tools": given} for each, given in zip([*calls, GREETING], tools, strict=True)]
    found = read(write_parquet(tmp_path / "data.parquet", *rows))
    assert messages(found) == [row["messages"] for row in rows]
    assert [one.tools for one in found if isinstance(one, Conversation)] == [(TOOL,), None, None]


def test_data_that_cannot_be_read_is_refused_before_anything_starts(tmp_path):
    empty = tmp_path / "none"
    empty.mkdir()
    for path in [tmp_path / "nowhere.jsonl", empty, write_lines(tmp_path / "empty.jsonl", "")]:
        with pytest.raises(ConfigError, match=r"conversation.* expected"):
            read(path)
    for name, content, words in (
        ("torn.parquet", b"PAR1 and no more", " .*no parquet file"),
        ("a.json", b"3", " .*no list"),
        ("latin.json", b'["\xe9"]', " is not JSON .*utf-8"),
        ("latin.jsonl", b'\n{"prompt": "\xe9", "completion": ""}\n', ", line 2 is not JSON .*utf-8"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name}{words}"):
            read(tmp_path / name)


def test_a_data_set_of_a_hub_is_read_by_its_subset_and_split(monkeypatch):
    def load_dataset(name: str, subset: str | None, *, split: str) -> Any:
        if subset is None:
            raise ConnectionError("Couldn't reach 'owner/name' on the Hub")
        assert (name, subset, split) == ("owner/name", "en", "train[:2]")
        return datasets.Dataset.from_list([{"messages": GREETING}, {"messages": GREETING[::-1]}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = list(read_conversations(Source(data="owner/name", subset="en", split="train[:2]")))
    assert messages(found) == [GREETING, GREETING[::-1]]
    with pytest.raises(ConfigError, match=r"(?s)'owner/name' .*Couldn't reach.*download its parquet files elsewhere"):
        read("owner/name")


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(write_tokenizer(tmp_path_factory.mktemp("qwen") / "t", QWEN_3))


@pytest.fixture
def llama(tmp_path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "t", LLAMA_3))


def said(role: str, content: str, **more: object) -> dict[str, object]:
    return {"role": role, "content": content} | more


def conversation(*messages: dict[str, object], **more: object) -> Conversation | Completion:
    return to_conversation({"messages": list(messages)} | more, "here")


def samples_of(renderer: Renderer, one: Conversation | Completion) -> list[Tokenized]:
    return next(tokenized(renderer, iter([one])))


def shown(tokenizer: PreTrainedTokenizerBase, sample: Tokenized) -> list[tuple[str, int]]:
    return list(zip(tokenizer.convert_ids_to_tokens(sample.ids), sample.mask, strict=True))


def rendered(tokenizer, *messages: dict[str, object], roles=("assistant",)) -> list[tuple[str, int]]:
    (sample,) = samples_of(Renderer(tokenizer, roles), conversation(*messages))
    return shown(tokenizer, sample)


def counting(found: list[tuple[str, int]]) -> list[str]:
    return [token for token, counts in found if counts]


def learned(tokenizer: PreTrainedTokenizerBase, sample: Tokenized) -> str:
    return tokenizer.decode([token for token, counts in zip(sample.ids, sample.mask, strict=True) if counts])


def test_each_answer_counts_with_its_end_of_turn_and_nothing_between_or_after(tokenizer):
    prompt = [START, "user\n", "h", "i", END, "\n", START, "assistant\n"]
    expected = [(token, 0) for token in prompt] + [("y", 1), ("o", 1), (END, 1), ("\n", 0)]
    assert rendered(tokenizer, *GREETING) == expected
    assert rendered(tokenizer, *GREETING, said("user", "bye")) == expected
    found = rendered(tokenizer, said("system", "x"), *GREETING, said("user", "b"), said("assistant", "c"))
    assert counting(found) == ["y", "o", END, "c", END]
    between = ["\n", START, "user\n", "b", END, "\n", START, "assistant\n"]
    first = found.index(("y", 1))
    assert found[first + 3 : first + 12] == [(token, 0) for token in between] + [("c", 1)]


def test_other_roles_and_marked_messages_count_with_their_markup(tokenizer):
    found = rendered(tokenizer, *GREETING, said("user", "b"), said("assistant", "c"), roles=("user",))
    assert counting(found) == [START, "user\n", "h", "i", END, START, "user\n", "b", END]
    both = rendered(tokenizer, *GREETING, roles=("user", "assistant"))
    assert [token for token, counts in both if not counts] == ["\n", START, "assistant\n", "\n"]
    for mark in ({"train": False}, {"weight": 0}):
        found = rendered(tokenizer, GREETING[0], said("assistant", "no", **mark), *GREETING)
        assert counting(found) == ["y", "o", END]
        assert ("n", 0) in found
    found = rendered(tokenizer, said("user", "hi", train=True), said("assistant", "yo", train=False))
    assert counting(found) == [START, "user\n", "h", "i", END]


def test_a_template_that_drops_earlier_thinking_makes_a_sample_of_each_turn(thinking):
    """In each, the model sees what it will see: no earlier thinking, and its own in full."""
    turns = [said("user", "a"), said("assistant", "<think>x</think>b"), said("user", "c"), said("assistant", "d")]
    samples = samples_of(Renderer(thinking), conversation(*turns))
    assert [learned(thinking, sample) for sample in samples] == [f"<think>x</think>b{END}", f"d{END}"]
    for sample, number in zip(samples, (1, 3), strict=True):
        asked = thinking.apply_chat_template(turns[:number], tokenize=False, add_generation_prompt=True)
        prompt = [token for token, counts in zip(sample.ids, sample.mask, strict=True) if not counts][:-1]  # "\n"
        assert thinking.decode(prompt) == asked
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    calling = said("assistant", "<think>1</think>", tool_calls=[call])
    turns = [said("user", "a"), calling, said("tool", "2"), said("assistant", "<think>3</think>4")]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    (sample,) = samples_of(Renderer(thinking), conversation(*turns, tools=tools))
    written = '\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert learned(thinking, sample) == f"<think>1</think>{written}{END}<think>3</think>4{END}"
    assert '"name": "f"' in thinking.decode(sample.ids).partition("# Tools\n<tools>\n")[2].partition("</tools>")[0]


CALLED = "message.tool_calls[0].function"
AS_TEXT = f"{CALLED}.name + ': ' + {CALLED}.arguments"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"message.content + ({CALLED} | tojson if message.tool_calls else '')", '{"name": "call", "arguments": ARG}'),
        # as DeepSeek's: arguments are text, and content, if only an empty text, replaces the calls or follows them
        (f"message.content ~ ({AS_TEXT} if message.tool_calls else '')", "call: ARG"),
        (f"(message.content if message.content is not none else {AS_TEXT})", "call: ARG"),
        (f"({AS_TEXT} if message.tool_calls else '') + ('' if message.content is none else '!')", "call: ARG"),
        ("message.content", None),
    ],
)
@pytest.mark.parametrize(("empty", "arguments"), [(None, '{"x": 1}'), ("", {"x": 1})])
def test_tool_calls_are_learned_as_rollouts_serve_them_or_refused(tmp_path, content, expected, empty, arguments):
    folder = write_tokenizer(tmp_path / "t", CHATML.replace("message['content']", content))
    call = {"id": "1", "type": "function", "function": {"name": "call", "arguments": arguments}}
    turns = [said("user", "half \ud83d"), {"role": "assistant", "content": empty, "tool_calls": [call]}, GREETING[1]]
    renderer, served = Renderer(AutoTokenizer.from_pretrained(folder)), ChatTokenizer(folder)
    if expected is None:
        with pytest.raises(ConfigError, match=r"the call of `call`"):
            renderer.render(conversation(*turns))
        return
    (sample,) = samples_of(renderer, conversation(*turns))
    assert learned(renderer.tokenizer, sample).startswith(expected.replace("ARG", '{"x": 1}') + END)
    assert sample.ids == served.encode(served.render(turns, tools=None, generate=False))


def test_only_the_completion_of_a_prompt_counts(tokenizer):
    def sample_of(prompt: object, completion: object) -> Tokenized:
        entry = to_conversation({"prompt": prompt, "completion": completion}, "here")
        (sample,) = samples_of(Renderer(tokenizer), entry)
        return sample

    assert learned(tokenizer, sample_of("a\ud83d", "b\ude00")) == f"b\ufffd{END}"  # halves, as in rollouts
    texts = sample_of("ab", "cd")  # taken as they are
    assert shown(tokenizer, texts) == [("a", 0), ("b", 0), ("c", 1), ("d", 1), (END, 1)]
    for special in ("<|endoftext|>", END):  # ends no turn, for there are none
        assert learned(tokenizer, sample_of("ab", f"c{special}d")) == f"c{special}d{END}"
    assert learned(tokenizer, sample_of([*GREETING, said("user", "b")], [said("assistant", "c")])) == f"c{END}"
    mixed = sample_of("hi", [said("assistant", "yo")])
    assert shown(tokenizer, mixed) == rendered(tokenizer, *GREETING)


def test_an_end_of_turn_that_is_not_the_tokenizers_end_counts_and_nothing_behind_it(llama):
    """Llama and Gemma end turns with another token than texts."""
    llama.eos_token = "<|endoftext|>"
    llama.add_special_tokens({"additional_special_tokens": ["<|eot|>", "<|header|>"]})
    llama.chat_template = LLAMA_3.replace("| trim + '<|eot|>'", "| trim + '<|eot|>\n'")
    (sample,) = samples_of(Renderer(llama), conversation(*GREETING))
    assert learned(llama, sample) == "yo<|eot|>"
    assert sample.mask[-1] == 0


def test_all_that_is_written_for_a_message_counts_where_no_special_token_ends_it(llama):
    llama.chat_template = "{% for m in messages %}{{ bos_token }}[{{ m.content }}]\n{% endfor %}"
    (sample,) = samples_of(Renderer(llama, ("user",)), conversation(*GREETING))
    assert learned(llama, sample) == "<|begin_of_text|>[hi]\n"


def test_what_a_template_refuses_is_told_with_its_place(tiny_model, llama):
    opening = AutoTokenizer.from_pretrained(tiny_model)
    opening.chat_template = opening.chat_template.replace("assistant\n' }}", "assistant\n<think>' }}")
    with pytest.raises(ConfigError, match=r"here: before an answer .*<think>.*enable_thinking"):
        samples_of(Renderer(opening), conversation(*GREETING))
    assert samples_of(Renderer(opening), conversation(GREETING[0], said("assistant", "<think>yo")))
    with pytest.raises(ConfigError, match=r"here: the chat template cannot render .*Only one system message"):
        samples_of(Renderer(llama), conversation(said("robot", "x"), *GREETING))
    llama.chat_template = None
    with pytest.raises(ConfigError, match=r"cannot render .*set `chat_template`"):
        samples_of(Renderer(llama), conversation(*GREETING))


def test_marks_of_a_template_change_nothing_and_its_arguments_reach_it(tmp_path):
    """What `{% generation %}` encloses is what the renderer finds without it."""
    template = MARKED.replace("}}\n{% endif %}", "}}{% endif %}")
    marked = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "t", template))
    (sample,) = samples_of(Renderer(marked), conversation(*GREETING))
    encoded = marked.apply_chat_template(GREETING, return_dict=True, return_assistant_tokens_mask=True)
    assert (sample.ids, sample.mask) == (encoded["input_ids"], encoded["assistant_masks"])
    marked.chat_template = "{{ mood }}" + marked.chat_template
    (asked,) = samples_of(Renderer(marked, template_kwargs=(("mood", "m"),)), conversation(*GREETING))
    assert asked.ids == [*marked("m")["input_ids"], *sample.ids]


def test_a_token_that_reaches_over_the_border_of_an_answer_is_split_there(tmp_path):
    greedy = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "t", extra_words=("t\nyo",)))
    text = "assistant\nyo!"
    (sample,) = Renderer(greedy).tokenize([Rendered(text, ((10, 13),))])
    assert greedy.convert_ids_to_tokens(greedy(text)["input_ids"])[8] == "t\nyo"
    assert shown(greedy, sample)[8:] == [("t", 0), ("\n", 0), ("y", 1), ("o", 1), ("!", 1)]


def test_many_conversations_give_the_samples_of_each_in_order(tokenizer):
    many = [conversation(said("user", "a"), said("assistant", "b" * number)) for number in range(1, 65)]
    many.append(conversation(said("assistant", "c", train=False)))  # alone in the second block, with nothing to learn
    found = list(tokenized(Renderer(tokenizer), iter(many)))
    assert found == [samples_of(Renderer(tokenizer), one) for one in many]


def showing(*parts: object) -> dict[str, Any]:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "yo"}]}
    return {"messages": [{"role": "user", "content": list(parts)}, answer]}


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    return write_seeing_model(tmp_path / "model")


def prepared(folder: Path, model: Path, data: Path, world: World, **changed: object) -> list[Sample]:
    config = build_config(folder, model, data, **changed)
    config = config.model_copy(update={"model": TrainerModel(name=str(model), vlm=Vlm())})
    return prepare_data(config, world, Waits("sft"))[0].batch(0)


def test_pictures_become_their_tokens_which_are_not_learned(seeing, tmp_path, world):
    """Given as a data URI, a file beside the data, and by a column of the data set, with its bytes."""
    (tmp_path / "a.png").write_bytes(picture_file(16, 8))
    columns = showing({"type": "text", "text": "x"}, {"type": "image"}, {"type": "image"})
    images = picture_file(16, 8), picture_file(8, 24, shade=9)
    columns["images"] = [{"bytes": each, "path": None} for each in images]
    entries = [
        showing({"type": "image_url", "image_url": {"url": to_data_uri(picture_file(16, 8))}}),
        showing({"type": "image", "image": "a.png"}),
    ]
    lines = write_lines(tmp_path / "data.jsonl", *entries)
    table = write_parquet(tmp_path / "data.parquet", columns)
    samples = [
        sample.tokens
        for data in (lines, table)
        for sample in prepared(tmp_path / data.suffix, seeing, data, world, batch_size=2, loss_on=("user",))[:2]
    ]
    places = [[(p.place, p.rows, p.columns) for p in tokens.pictures] for tokens in samples]
    first = samples[0].pictures[0]
    start = first.place
    assert places == [[(start, 1, 2)]] * 2 + [[(start + 1, 1, 2), (start + 5, 3, 1)]] * 2
    assert samples[1].pictures == [first]
    assert samples[2].pictures[0].digest == first.digest != samples[2].pictures[1].digest
    token = samples[0].ids[start]
    for tokens in samples:
        assert sum(tokens.ids == token) == sum(picture.num_tokens for picture in tokens.pictures)
        assert not tokens.loss_mask[tokens.ids == token].any()
        assert tokens.loss_mask[1:start].all()
    files = PictureFiles(tmp_path / ".jsonl" / "data" / "pictures")
    assert size_of(files.read(first.digest)) == (16, 8)


def test_a_sample_whose_picture_would_be_cut_is_left_out(tmp_path):
    def sample(place: int) -> Tokenized:
        return Tokenized(list(range(12)), [0, 1, *[0] * 10], (Picture("a" * 64, place, 1, 2),))

    found, counts = write_samples(tmp_path / "a", sample(6), sample(7), sample(8))
    assert (counts.samples, counts.parted) == (2, 1)
    assert [[picture.place for picture in each.tokens.pictures] for each in found] == [[6], []]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url", "image_url": {"url": "http://host/a.png"}}, r"http://host/a.png.*no address"),
        ({"type": "image", "image": "../outside.png"}, r"outside.png' is no file"),
        ({"type": "image", "image": "data.jsonl"}, r"no picture"),
        ({"type": "image"}, r"None in place of a picture"),
        ({"type": "text", "text": "<|image_pad|>"}, r"1 placeholders for 0 pictures"),
    ],
)
def test_a_picture_that_cannot_be_shown_is_refused_with_its_place(seeing, tmp_path, world, part, words):
    folder = tmp_path / "inside"
    folder.mkdir()
    (tmp_path / "outside.png").write_bytes(picture_file(8, 8))
    data = write_lines(folder / "data.jsonl", {"messages": GREETING}, showing(part))
    with pytest.raises(ConfigError, match=rf"data.jsonl, line 2: .*{words}"):
        prepared(tmp_path / "run", seeing, data, world)


def test_a_picture_is_refused_where_the_model_is_to_see_none(tmp_path):
    column = {"images": [{"bytes": None, "path": "a.png"}]}
    for entry in (
        showing({"type": "image_url", "image_url": {"url": to_data_uri(picture_file(8, 8))}}),
        {"messages": [said("user", "<image>Which?"), GREETING[1]]} | column,
        {"prompt": "<image>Which?", "completion": "a"} | column,
    ):
        with pytest.raises(ConfigError, match=r"line 1 shows a picture .*`\[model.vlm\]`"):
            read(write_lines(tmp_path / "data.jsonl", entry))
