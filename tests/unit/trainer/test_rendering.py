"""From conversations to batches: what is read, what counts, what is held out, and in which order samples come."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow.parquet import write_table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from support.models.tiny import random_samples
from support.models.tiny_pictures import picture_file
from support.models.tiny_tokenizer import CHATML, LLAMA_3, MARKED, QWEN_3, write_seeing_model, write_tokenizer
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

START, END = "<|im_start|>", "<|im_end|>"


def user(content: Any, **more: object) -> dict[str, Any]:
    return {"role": "user", "content": content} | more


def answer(content: Any, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


GREETING = [user("hi"), answer("yo")]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def call_of(name: str, arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CALL = call_of("f", {"x": 1})


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def write_parquet(path: Path, *rows: dict[str, Any]) -> Path:
    write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def chat(asked: str, answered: str) -> dict[str, Any]:
    return {"messages": [user(asked), answer(answered)]}


def write_samples(folder: Path, *samples: Tokenized, drop: bool = False) -> tuple[list[Sample], Counts]:
    writer = SampleWriter(seq_len=8, drop=drop)
    for sample in samples:
        writer.add([sample])
    writer.write(folder)
    files = SampleFiles(folder)
    return [files[index] for index in range(len(files))], writer.counts


@pytest.mark.parametrize("drop", [False, True])
def test_samples_come_back_from_disk_as_they_were_but_for_what_is_too_long(tmp_path, drop):
    """No token before the first one predicts it. A sample whose picture would be cut is left out."""
    short = [Tokenized(list(range(n, 2 * n)), [1, 1, *[0] * (n - 2)]) for n in (3, 8, 2)]
    long = Tokenized(list(range(9)), [0] * 4 + [1] * 5)
    late = Tokenized(list(range(20)), [0] * 10 + [1] * 10)  # nothing to learn is left of it
    found, counts = write_samples(tmp_path / "a", *short, long, late, drop=drop)
    kept = short if drop else [*short, Tokenized(long.ids[:8], long.mask[:8])]
    assert [sample.tokens.ids.tolist() for sample in found] == [sample.ids for sample in kept]
    assert [sample.tokens.loss_mask.tolist() for sample in found] == [[0, *sample.mask[1:]] for sample in kept]
    assert counts == (Counts(5, 3, 13, 3, dropped=2) if drop else Counts(5, 4, 21, 7, cut=1, empty=1))
    pictures = [Picture("a" * 64, place, 1, 2) for place in (6, 7, 8)]
    shown = [Tokenized(list(range(12)), [0, 1, *[0] * 10], (picture,)) for picture in pictures]
    found, counts = write_samples(tmp_path / "b", *shown)
    assert [list(each.tokens.pictures) for each in found] == [pictures[:1], []]
    assert counts.parted == 1


def test_every_sft_epoch_visits_each_sample_once():
    samples = random_samples([5] * 12)
    ours, again, other = (Epochs([Portion(samples)], 8, seed) for seed in (3, 3, 4))
    batches = [ours.batch(step) for step in range(6)]  # every third batch ends an epoch
    order = [samples.index(sample) for batch in batches for sample in batch]
    visits = [order[start : start + 12] for start in range(0, 48, 12)]
    assert all(sorted(visit) == list(range(12)) for visit in visits)
    assert len(set(map(tuple, visits))) == 4
    assert [again.batch(step) for step in reversed(range(6))] == batches[::-1]
    assert other.batch(0) != batches[0]
    repeated = Counter(samples.index(sample) for sample in Epochs([Portion(samples[:3])], 9, 0).batch(4))
    assert repeated == {0: 3, 1: 3, 2: 3}


def test_batches_of_another_size_continue_with_the_next_sample():
    samples = random_samples([5] * 12)
    ours, whole = Epochs([Portion(samples)], 8, 3, [(2, 2), (3, 5)]), Epochs([Portion(samples)], 1, 3)
    sizes = [len(ours.batch(step)) for step in range(5)]
    assert (sizes, ours.passed(3), ours.taken(5)) == ([2, 2, 5, 8, 8], 9 / 12, 25)
    order = [sample for step in range(5) for sample in ours.batch(step)]
    assert order == [whole.batch(place)[0] for place in range(25)]
    by_epochs = SftConfig(data="x", num_epochs=2.0, batch_size=8)
    assert steps_of(by_epochs, ours, 3) == 3 + 2  # 15 samples are left
    assert steps_of(by_epochs.model_copy(update={"num_epochs": 0.5}), ours, 3) == 3


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


def prepare(folder: Path, name: Path, data: Path, world: World, **changed: object) -> tuple[Epochs, Any, SftConfig]:
    sizes = {"batch_size": 16, "seq_len": 64, "device": "cpu", "threads": 1}
    config = SftConfig(output_dir=folder, data=str(data), model=TrainerModel(name=str(name)), **sizes)
    config = config.model_copy(update=changed)
    return *prepare_data(config, world, Waits("sft")), config


def test_what_is_held_out_is_spread_over_the_data_and_never_trained_on(tiny_model, tmp_path, world):
    data = write_lines(tmp_path / "data.jsonl", *(chat("a", "b" * number) for number in range(1, 21)))
    train, held_out, _ = prepare(tmp_path / "run", tiny_model, data, world, validation_fraction=0.25)
    trained = [sample for step in range(15) for sample in train.batch(step)]
    lengths = [{int(sample.tokens.loss_mask.sum()) - 1 for sample in samples} for samples in (held_out, trained)]
    assert lengths == [{4, 8, 12, 16, 20}, set(range(1, 21)) - {4, 8, 12, 16, 20}]
    everything, none, _ = prepare(tmp_path / "run", tiny_model, data, world, resume=True)
    assert (everything.length, none) == (20, None)
    with pytest.raises(ConfigError, match=r"validation_fraction = 0.01 holds out none of 20"):
        prepare(tmp_path / "few", tiny_model, data, world, validation_fraction=0.01)


def test_sources_are_trained_on_together_for_as_long_as_epochs_say(tiny_model, tmp_path, world):
    letters = write_lines(tmp_path / "letters.jsonl", *(chat(letter, letter * 4) for letter in 5 * "abcd"))
    source = Source(data=str(write_lines(tmp_path / "other.jsonl", chat("hi", "yo"))), repeat=40.0)
    train, _, config = prepare(tmp_path / "run", tiny_model, letters, world, source=(source,))
    assert train.length == 20 + 40
    assert steps_of(config, train) == SftConfig().max_steps
    assert steps_of(config.model_copy(update={"num_epochs": 2.0}), train) == 8  # 120 samples in batches of 16
    with pytest.raises(ConfigError, match="less than a step"):
        steps_of(config.model_copy(update={"num_epochs": 0.1}), train)
    rare = source.model_copy(update={"repeat": 0.4})
    with pytest.raises(ConfigError, match=r"repeat = 0.4 of .*other.jsonl, which has 1 samples"):
        prepare(tmp_path / "run", tiny_model, letters, world, source=(rare,))
    long = write_lines(tmp_path / "long.jsonl", chat("a" * 99, "b"))
    with pytest.raises(ConfigError, match=r"no sample is left \(1 conversations.*Raise `seq_len`"):
        prepare(tmp_path / "run", tiny_model, long, world)


def read(path: Path | str, **more: Any) -> list[Conversation | Completion]:
    return list(read_conversations(Source(data=str(path), **more)))


def messages(found: list[Conversation | Completion]) -> list[list[Any]]:
    return [list(one.messages) for one in found if isinstance(one, Conversation)]


def test_a_folders_conversations_come_in_the_order_of_their_files(tmp_path):
    strange = chat("hi", "line\u2028separator, next\u0085line, form\x0cfeed, é, 漢, 🙂")
    first, second, third, fourth = (chat("hi", name) for name in "abcd")
    write_lines(tmp_path / "b.jsonl", third)
    write_lines(tmp_path / "a.jsonl", first, "", second)
    write_parquet(tmp_path / "c.parquet", strange)
    (tmp_path / "d.json").write_text(json.dumps([first]))
    (tmp_path / "e.json").write_text(json.dumps({"data": [fourth]}))
    (tmp_path / "f.jsonl").write_bytes("\r\n".join(2 * [json.dumps(strange, ensure_ascii=False)]).encode())
    (tmp_path / "README.md").write_text("# not data")
    expected = [first, second, third, strange, first, fourth, strange, strange]
    assert messages(read(tmp_path)) == [each["messages"] for each in expected]


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


def test_a_data_set_of_a_hub_is_read_by_its_subset_and_split(monkeypatch):
    def load_dataset(name: str, subset: str | None, *, split: str) -> Any:
        if subset is None:
            raise ConnectionError("Couldn't reach 'owner/name' on the Hub")
        assert (name, subset, split) == ("owner/name", "en", "train[:2]")
        return datasets.Dataset.from_list([{"messages": GREETING}, {"messages": GREETING[::-1]}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert messages(read("owner/name", subset="en", split="train[:2]")) == [GREETING, GREETING[::-1]]
    with pytest.raises(ConfigError, match=r"(?s)'owner/name' .*Couldn't reach.*download its parquet files elsewhere"):
        read("owner/name")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        {"instruction": "hi", "output": "yo"},
        {"messages": "hi"},
        {"messages": GREETING[:1]},
        {"messages": [{"role": "user"}, GREETING[1]]},
        {"messages": [{"content": "hi"}, GREETING[1]]},
        {"messages": [GREETING[0], answer("yo", weight=0.5)]},
        {"prompt": "hi", "completion": ""},
        {"prompt": GREETING, "completion": []},
        {"prompt": 3, "completion": 4},
        {"conversations": [{"from": "alien", "value": "hi"}]},
        {"messages": GREETING, "tools": "{"},
        {"messages": GREETING, "tools": {"a": 1}},
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, line):
    path = write_lines(tmp_path / "data.jsonl", {"messages": GREETING}, "", line)
    with pytest.raises(ConfigError, match=r"data.jsonl, line 3 .*expected \{\"messages\"") as caught:
        read(path)
    assert str(caught.value).count("data.jsonl") == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nowhere.jsonl", None, r".* conversations were expected"),
        ("empty.jsonl", b"\n", ".* at least one was expected"),
        ("torn.parquet", b"PAR1 and no more", " .*no parquet file"),
        ("a.json", b"3", " .*no list"),
        ("latin.json", b'["\xe9"]', " is not JSON .*utf-8"),
        ("latin.jsonl", b'\n{"prompt": "\xe9", "completion": ""}\n', ", line 2 is not JSON .*utf-8"),
    ],
)
def test_data_that_cannot_be_read_is_refused_before_anything_starts(tmp_path, name, content, words):
    if content:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}{words}"):
        read(tmp_path / name)


def test_the_forms_of_one_conversation_are_one():
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    for other in (sharegpt, {"conversations": GREETING}):
        assert to_conversation(other, "") == to_conversation({"messages": GREETING}, "")
    assert to_conversation({"prompt": "a", "completion": "b"}, "x") == Completion("a", "b", "x")
    calls = [GREETING[0], answer(None, tool_calls=[CALL]), {"role": "assistant", "tool_calls": [CALL]}]
    assert messages([to_conversation({"messages": calls}, "")]) == [calls]
    pair = to_conversation({"prompt": GREETING[:1], "completion": GREETING[1:]}, "")
    assert messages([pair]) == [GREETING]
    assert isinstance(pair, Conversation)
    assert [pair.is_learned(index, ("user", "assistant")) for index in range(2)] == [False, True]


def test_sharegpts_system_tools_and_calls_are_understood():
    said = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": json.dumps({"name": "f", "arguments": {"x": 1}})},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "yo", "weight": 0},
    ]
    found = to_conversation({"system": "be kind", "tools": json.dumps([TOOL]), "conversations": said}, "")
    assert isinstance(found, Conversation)
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert (found.messages[2]["tool_calls"], found.tools) == ([CALL], (TOOL,))
    assert [found.is_learned(index, ("assistant",)) for index in range(5)] == [False, False, True, False, False]


def test_columns_that_an_entry_never_had_are_not_in_it(tmp_path):
    """A column of parquet gives every message all keys that any message has, and every call all arguments."""
    calls = [[GREETING[0], answer("", tool_calls=[call])] for call in (CALL, call_of("g", {"y": "z"}))]
    rows = [
        {"messages": calls[0], "tools": [TOOL]},
        *({"messages": each, "tools": None} for each in (calls[1], GREETING)),
    ]
    found = read(write_parquet(tmp_path / "data.parquet", *rows))
    assert messages(found) == [*calls, GREETING]
    assert [one.tools for one in found if isinstance(one, Conversation)] == [(TOOL,), None, None]


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def open_tokenizer(folder: Path, template: str = CHATML, **more: Any) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(write_tokenizer(folder / "tokenizer", template, **more))


def conversation(*messages: dict[str, object], **more: object) -> Conversation | Completion:
    return to_conversation({"messages": list(messages)} | more, "here")


def samples_of(renderer: Renderer, one: Conversation | Completion) -> list[Tokenized]:
    return next(tokenized(renderer, iter([one])))


def sample_of(renderer: Renderer, *messages: dict[str, object], **more: object) -> Tokenized:
    (sample,) = samples_of(renderer, conversation(*messages, **more))
    return sample


def shown(tokenizer: PreTrainedTokenizerBase, sample: Tokenized) -> list[tuple[str, int]]:
    return list(zip(tokenizer.convert_ids_to_tokens(sample.ids), sample.mask, strict=True))


def learned(tokenizer: PreTrainedTokenizerBase, sample: Tokenized, counts: int = 1) -> str:
    return "".join(token for token, mask in shown(tokenizer, sample) if mask == counts)


def test_sft_trains_on_each_answer_including_its_end_of_turn(tokenizer):
    renderer = Renderer(tokenizer)
    prompt = [START, "user\n", "h", "i", END, "\n", START, "assistant\n"]
    expected = [(token, 0) for token in prompt] + [("y", 1), ("o", 1), (END, 1), ("\n", 0)]
    assert shown(tokenizer, sample_of(renderer, *GREETING)) == expected
    assert shown(tokenizer, sample_of(renderer, *GREETING, user("bye"))) == expected
    system = {"role": "system", "content": "x"}
    found = shown(tokenizer, sample_of(renderer, system, *GREETING, user("b"), answer("c")))
    between = [(token, 0) for token in ["\n", START, "user\n", "b", END, "\n", START, "assistant\n"]]
    assert found[5:] == [*expected[:-1], *between, ("c", 1), (END, 1), ("\n", 0)]
    assert not any(counts for _, counts in found[:5])


def test_a_token_without_a_row_in_the_embedding_is_named_with_its_place(tokenizer):
    rows = max(sample_of(Renderer(tokenizer), *GREETING).ids)
    with pytest.raises(ConfigError, match=rf"token {rows} \(.*\) at place \d+ of \d+, .* has {rows} rows"):
        sample_of(Renderer(tokenizer, rows=rows), *GREETING)
    sample_of(Renderer(tokenizer, rows=rows + 1), *GREETING)


def test_other_roles_and_marked_messages_count_with_their_markup(tokenizer):
    def learned_of(*messages: dict[str, object], roles: tuple[str, ...] = ("assistant",)) -> str:
        return learned(tokenizer, sample_of(Renderer(tokenizer, roles), *messages))

    hi, yo = f"{START}user\nhi{END}", f"yo{END}"
    assert learned_of(*GREETING, user("b"), answer("c"), roles=("user",)) == f"{hi}{START}user\nb{END}"
    assert learned_of(*GREETING, roles=("user", "assistant")) == hi + yo
    for mark in ({"train": False}, {"weight": 0}):
        assert learned_of(user("a"), answer("no", **mark), *GREETING) == yo
    assert learned_of(user("hi", train=True), answer("yo", train=False)) == hi


def test_template_that_drops_thinking_makes_a_sample_per_turn(tmp_path):
    """In each, the model sees what it will see: no earlier thinking, and its own in full."""
    thinking = open_tokenizer(tmp_path, QWEN_3)
    turns = [user("a"), answer("<think>x</think>b"), user("c"), answer("d")]
    samples = samples_of(Renderer(thinking), conversation(*turns))
    assert [learned(thinking, sample) for sample in samples] == [f"<think>x</think>b{END}", f"d{END}"]
    for sample, number in zip(samples, (1, 3), strict=True):
        asked = thinking.apply_chat_template(turns[:number], tokenize=False, add_generation_prompt=True)
        assert learned(thinking, sample, counts=0) == asked + "\n"
    result = {"role": "tool", "content": "2"}
    turns = [user("a"), answer("<think>1</think>", tool_calls=[CALL]), result, answer("<think>3</think>4")]
    sample = sample_of(Renderer(thinking), *turns, tools=[TOOL])
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
    ],
)
@pytest.mark.parametrize(("empty", "arguments"), [(None, '{"x": 1}'), ("", {"x": 1})])
def test_tool_calls_are_learned_as_rollouts_serve_them(tmp_path, content, expected, empty, arguments):
    folder = write_tokenizer(tmp_path / "t", CHATML.replace("message['content']", content))
    turns = [user("half \ud83d"), answer(empty, tool_calls=[call_of("call", arguments)]), GREETING[1]]
    renderer, served = Renderer(AutoTokenizer.from_pretrained(folder)), ChatTokenizer(folder)
    sample = sample_of(renderer, *turns)
    assert learned(renderer.tokenizer, sample).startswith(expected.replace("ARG", '{"x": 1}') + END)
    assert sample.ids == served.encode(served.render(turns, tools=None, generate=False))


def test_only_the_completion_of_a_prompt_counts(tokenizer):
    def pair(prompt: object, completion: object) -> Tokenized:
        entry = to_conversation({"prompt": prompt, "completion": completion}, "here")
        (sample,) = samples_of(Renderer(tokenizer), entry)
        return sample

    assert learned(tokenizer, pair("a\ud83d", "b\ude00")) == f"b\ufffd{END}"  # halves, as in rollouts
    texts = pair("ab", "cd")  # taken as they are
    assert shown(tokenizer, texts) == [("a", 0), ("b", 0), ("c", 1), ("d", 1), (END, 1)]
    for special in ("<|endoftext|>", END):  # ends no turn, for there are none
        assert learned(tokenizer, pair("ab", f"c{special}d")) == f"c{special}d{END}"
    assert learned(tokenizer, pair([*GREETING, user("b")], [answer("c")])) == f"c{END}"
    assert pair("hi", GREETING[1:]) == sample_of(Renderer(tokenizer), *GREETING)


def test_end_of_turn_other_than_the_tokenizers_end_is_trained_on(tmp_path):
    """Llama and Gemma end turns with another token than texts. Where none ends them, all that is written counts."""
    llama = open_tokenizer(tmp_path, LLAMA_3.replace("| trim + '<|eot|>'", "| trim + '<|eot|>\n'"))
    llama.eos_token = "<|endoftext|>"
    llama.add_special_tokens({"additional_special_tokens": ["<|eot|>", "<|header|>"]})
    sample = sample_of(Renderer(llama), *GREETING)
    assert learned(llama, sample) == "yo<|eot|>"
    assert sample.mask[-1] == 0
    llama.chat_template = "{% for m in messages %}{{ bos_token }}[{{ m.content }}]\n{% endfor %}"
    assert learned(llama, sample_of(Renderer(llama, ("user",)), *GREETING)) == "<|begin_of_text|>[hi]\n"


def test_what_a_template_refuses_is_told_with_its_place(tmp_path):
    llama = open_tokenizer(tmp_path, LLAMA_3)
    with pytest.raises(ConfigError, match=r"here: the chat template cannot render .*Only one system message"):
        sample_of(Renderer(llama), {"role": "robot", "content": "x"}, *GREETING)
    llama.chat_template = None
    with pytest.raises(ConfigError, match=r"cannot render .*set `chat_template`"):
        sample_of(Renderer(llama), *GREETING)
    llama.chat_template = CHATML.replace("assistant\n' }}", "assistant\n<think>' }}")
    with pytest.raises(ConfigError, match=r"here: before an answer .*<think>.*enable_thinking"):
        sample_of(Renderer(llama), *GREETING)
    assert sample_of(Renderer(llama), GREETING[0], answer("<think>yo"))
    llama.chat_template = CHATML
    with pytest.raises(ConfigError, match=r"here: .* the call of `f`"):
        sample_of(Renderer(llama), GREETING[0], answer("", tool_calls=[CALL]))


def test_marks_of_a_template_change_nothing_and_its_arguments_reach_it(tmp_path):
    """What `{% generation %}` encloses is what the renderer finds without it."""
    marked = open_tokenizer(tmp_path, MARKED.replace("}}\n{% endif %}", "}}{% endif %}"))
    sample = sample_of(Renderer(marked), *GREETING)
    encoded = marked.apply_chat_template(GREETING, return_dict=True, return_assistant_tokens_mask=True)
    assert (sample.ids, sample.mask) == (encoded["input_ids"], encoded["assistant_masks"])
    marked.chat_template = "{{ mood }}" + marked.chat_template
    asked = sample_of(Renderer(marked, template_kwargs=(("mood", "m"),)), *GREETING)
    assert asked.ids == [*marked("m")["input_ids"], *sample.ids]


def test_a_token_that_reaches_over_the_border_of_an_answer_is_split_there(tmp_path):
    greedy, text = open_tokenizer(tmp_path, extra_words=("t\nyo",)), "assistant\nyo!"
    (sample,) = Renderer(greedy).tokenize([Rendered(text, ((10, 13),))])
    assert greedy.convert_ids_to_tokens(greedy(text)["input_ids"])[8] == "t\nyo"
    assert shown(greedy, sample)[8:] == [("t", 0), ("\n", 0), ("y", 1), ("o", 1), ("!", 1)]


def test_many_conversations_give_the_samples_of_each_in_order(tokenizer):
    many = [conversation(user("a"), answer("b" * number)) for number in range(1, 65)]
    many.append(conversation(answer("c", train=False)))  # alone in the second block, with nothing to learn
    found = list(tokenized(Renderer(tokenizer), iter(many)))
    assert found == [samples_of(Renderer(tokenizer), one) for one in many]


def showing(*parts: object) -> dict[str, Any]:
    return {"messages": [user(list(parts)), answer([{"type": "text", "text": "yo"}])]}


@pytest.fixture
def seeing(tmp_path):
    return write_seeing_model(tmp_path / "model")


def prepare_seeing(folder: Path, model: Path, data: Path, world: World) -> list[Sample]:
    sees = {"model": TrainerModel(name=str(model), vlm=Vlm()), "loss_on": ("user",), "batch_size": 2}
    return prepare(folder, model, data, world, **sees)[0].batch(0)


def test_pictures_become_their_tokens_which_are_not_learned(seeing, tmp_path, world):
    """Given as a data URI, a file beside the data, and by a column of the data set, with its bytes."""
    small, tall = picture_file(16, 8), picture_file(8, 24, shade=9)
    (tmp_path / "a.png").write_bytes(small)
    lines = write_lines(
        tmp_path / "data.jsonl",
        showing({"type": "image_url", "image_url": {"url": to_data_uri(small)}}),
        showing({"type": "image", "image": "a.png"}),
    )
    columns = showing({"type": "text", "text": "x"}, {"type": "image"}, {"type": "image"})
    columns["images"] = [{"bytes": each, "path": None} for each in (small, tall)]
    table = write_parquet(tmp_path / "data.parquet", columns)
    of_lines, of_table = (prepare_seeing(tmp_path / data.suffix, seeing, data, world) for data in (lines, table))
    samples = [sample.tokens for sample in [*of_lines, of_table[0]]]
    first = samples[0].pictures[0]
    start = first.place
    places = [[(p.place, p.rows, p.columns) for p in tokens.pictures] for tokens in samples]
    assert places == [[(start, 1, 2)]] * 2 + [[(start + 1, 1, 2), (start + 5, 3, 1)]]
    assert samples[1].pictures == [first]
    assert samples[2].pictures[0].digest == first.digest != samples[2].pictures[1].digest
    token = samples[0].ids[start]
    for tokens in samples:
        assert sum(tokens.ids == token) == sum(picture.num_tokens for picture in tokens.pictures)
        assert not tokens.loss_mask[tokens.ids == token].any()
        assert tokens.loss_mask[1:start].all()
    files = PictureFiles(tmp_path / ".jsonl" / "data" / "pictures")
    assert size_of(files.read(first.digest)) == (16, 8)


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
        prepare_seeing(tmp_path / "run", seeing, data, world)


@pytest.mark.parametrize(
    "entry",
    [
        showing({"type": "image_url", "image_url": {"url": to_data_uri(picture_file(8, 8))}}),
        chat("<image>Which?", "yo") | {"images": [{"bytes": None, "path": "a.png"}]},
        {"prompt": "<image>Which?", "completion": "a", "images": [{"bytes": None, "path": "a.png"}]},
    ],
)
def test_a_picture_is_refused_where_the_model_is_to_see_none(tmp_path, entry):
    with pytest.raises(ConfigError, match=r"line 1 shows a picture .*`\[model.vlm\]`"):
        read(write_lines(tmp_path / "data.jsonl", entry))
