"""Messages to token ids: what `transformers` does, without importing torch in the orchestrator."""

import json

import pytest

from support.models.tiny_tokenizer import CHATML, LLAMA_3, MARKED, QWEN_3, write_tokenizer
from trireme.base.errors import ConfigError
from trireme.orchestrator.rollout.chat import ChatTokenizer, NoRoomForToken, open_chat_tokenizer

TEMPLATES = {"chatml": CHATML, "llama-3": LLAMA_3, "qwen-3": QWEN_3, "marked": MARKED}
FUNCTION = {"name": "add", "description": "Adds <two> numbers & more: ä"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": FUNCTION | {"parameters": PARAMETERS}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None, "x"]}}}
QUESTION = {"role": "user", "content": "1 + 2?"}
CONVERSATIONS = {
    "a system message": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}],
    "several turns": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\nHello <|im_end|> you"},
        {"role": "user", "content": "Again,\n\n{{ please }} \t"},
    ],
    "tools": [
        QUESTION,
        {"role": "assistant", "content": "I add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ],
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    from transformers import PreTrainedTokenizerFast

    folders = {name: write_tokenizer(tmp_path_factory.mktemp("model") / name, text) for name, text in TEMPLATES.items()}
    return {name: (ChatTokenizer(it), PreTrainedTokenizerFast.from_pretrained(it)) for name, it in folders.items()}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_ids_and_texts_are_those_of_transformers(tokenizers, template, conversation):
    ours, theirs = tokenizers[template]
    messages = CONVERSATIONS[conversation]
    tools = [TOOL] if conversation == "tools" else None
    for flag in (True, False):
        text = ours.render(messages, tools=tools, generate=flag)
        assert text == theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=flag, tokenize=False)
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.decode(ids, keep_special=flag) == theirs.decode(ids, skip_special_tokens=not flag)


def test_tool_arguments_may_be_text_and_content_may_be_none(tokenizers):
    """So they come from environments; templates expect objects and text."""
    ours, theirs = tokenizers["qwen-3"]
    written = CALL | {"function": {"name": "add", "arguments": json.dumps(CALL["function"]["arguments"])}}
    as_text = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [written]}]
    as_object = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    expected = theirs.apply_chat_template(as_object, tools=[TOOL], tokenize=False)
    assert ours.render(as_text, tools=[TOOL], generate=False) == expected
    assert as_text[1]["content"] is None


def test_a_long_prompt_is_not_cut_whatever_the_file_says(tmp_path):
    folder = write_tokenizer(tmp_path)
    file = json.loads((folder / "tokenizer.json").read_text())
    file["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    pad = {"pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    file["padding"] = {"strategy": {"Fixed": 12}, "direction": "Right"} | pad
    (folder / "tokenizer.json").write_text(json.dumps(file))
    tokenizer = ChatTokenizer(folder)
    assert [len(tokenizer.encode("x" * length)) for length in (2, 9, 40)] == [2, 9, 40]


def test_a_tokenizer_without_a_template_or_its_fast_form_is_refused(tmp_path):
    folder = write_tokenizer(tmp_path, "")
    with pytest.raises(ConfigError, match="has no chat template"):
        open_chat_tokenizer(str(folder))
    write_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="fast form was expected"):
        open_chat_tokenizer(str(folder))


NEEDED = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
SILENT = "{{ bos_token }}{{ image_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
BOTH = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|eot|>", "lstrip": True}}
NAMED = [{"name": "default", "template": SILENT}, {"name": "tool_use", "template": "tools" + SILENT}]


@pytest.mark.parametrize(
    "files",
    {
        "special tokens in their own file": {"special_tokens_map.json": BOTH, "chat_template.jinja": NEEDED},
        "a token nobody has": {"added_tokens.json": {"<odd>": 107}, "special_tokens_map.json": {"bos_token": "<odd>"}},
        "defaults of a class": {"tokenizer_class": "LlamaTokenizer"},
        "a class that builds its own": {"tokenizer_class": "GPT2Tokenizer", "chat_template.jinja": NEEDED},
        "the class of the architecture": {"tokenizer_class": "X", "config.json": {"model_type": "qwen2"}},
        "more tokens by name": {"extra_special_tokens": {"image_token": "<image>"}, "eos_token": "<new>"},
        "more tokens as a list": {"additional_special_tokens": ["H"], "image_token": "?", "bos_token": None},
        "tokens by id win": {"added_tokens_decoder": {"0": {"content": "H"}}, "special_tokens_map.json": BOTH},
        "special tokens are text": {"split_special_tokens": True, "bos_token": "<|eot|>", "add_bos_token": True},
        "named templates": {"chat_template": NAMED, "bos_token": "<|eot|>"},
        "templates in files": {"chat_template.jinja": CHATML, "additional_chat_templates/tool_use.jinja": "tools"},
        "a template of the processor": {"chat_template": None, "chat_template.json": {"chat_template": SILENT}},
    }.items(),
    ids=lambda row: row[0].replace(" ", "-"),
)
def test_special_tokens_and_templates_are_those_transformers_finds(tmp_path, files):
    from trireme.trainer.tokenizer import open_tokenizer

    folder = write_tokenizer(tmp_path, SILENT)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["bos_token"], config["eos_token"]
    for name, content in files[1].items():
        if "." in name:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        else:
            config[name] = content
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = ChatTokenizer(folder), open_tokenizer(str(folder), False)
    messages = [QUESTION, {"role": "assistant", "content": "Hi <|eot|> <image> <odd>!"}]
    for tools in (None, [TOOL]):
        ids = theirs.apply_chat_template(messages, tools=tools, return_dict=False)
        assert ours.encode(ours.render(messages, tools=tools, generate=False)) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_token_without_a_row_in_the_embedding_is_named_with_its_place(tmp_path):
    folder = write_tokenizer(tmp_path, extra_words=("<picture>",))
    (folder / "config.json").write_text('{"text_config": {"vocab_size": 104}}')
    assert max(ChatTokenizer(folder).encode("\ufffd ~")) == 103
    with pytest.raises(NoRoomForToken, match=r"token 104 \('<picture>'\) at place 2 of 3"):
        ChatTokenizer(folder).encode("a:<picture>")


def test_a_token_that_the_template_needs_and_nothing_defines_is_named(tmp_path):
    folder = write_tokenizer(tmp_path, NEEDED.replace("eos_token", "sep_token"))
    with pytest.raises(ConfigError, match="'sep_token' is undefined"):
        open_chat_tokenizer(str(folder))
