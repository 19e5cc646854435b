"""Tokenizers of single characters with chat templates in the styles of well-known models, written without torch."""

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|header|>", "<|eot|>"]
END = SPECIAL.index("<|im_end|>")

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

SEEING = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content %}{{- PICTURE if part.type == 'image' else part.text }}{%- endfor %}
{%- endif %}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
""".replace("PICTURE", "'<|vision_start|><|image_pad|><|vision_end|>'")
SEEING_WORDS = {
    "vision_start_token_id": "<|vision_start|>", "image_token_id": "<|image_pad|>",
    "vision_end_token_id": "<|vision_end|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip

LLAMA_3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if system_message or tools is not none %}
{{- "<|header|>system<|header|>\n\n" + system_message }}
{%- if tools is not none %}{% for tool in tools %}{{ "\n" + tool | tojson(indent=2) }}{% endfor %}{% endif %}
{{- "<|eot|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception("Only one system message, and it comes first") }}
    {%- endif %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|header|>assistant<|header|>\n\n{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson }}
        {{- '}<|eot|>' }}
    {%- else %}
        {{- '<|header|>' + message['role'] + '<|header|>\n\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|header|>\n\n' }}
{%- endif %}
"""

# Tools in a system message; thinking only in turns after the last question of the user.
QWEN_3 = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" %}{%- set ns.last = index %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- if loop.index0 < ns.last and '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function else call %}
            {{- '\n' if content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

# As templates for SFT mark the assistant's words; and what trips a careless renderer: macros, dates, unusual letters.
MARKED = """{%- macro header(role) %}{{ '<|im_start|>' ~ role ~ '\n' }}{%- endmacro %}
{%- if documents is not none %}{{ 'documents' }}{% endif %}
{%- set year = strftime_now('%Y') %}
{%- for message in messages %}
    {{- header(message.role) }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message.content }}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + ('é' | tojson) + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- header('assistant') }}
{% endif %}
"""


def write_seeing_model(folder: Path) -> Path:
    """Write the tokenizer and the files of a model that sees, without weights. A block of a picture is 8 x 8 pixels."""
    config = {"model_type": "qwen2_5_vl", "vision_config": {}} | write_seeing_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 64 * 64}}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    return folder


def write_seeing_tokenizer(folder: Path) -> dict[str, int]:
    """Write the tokenizer of a model that sees. Returns the ids of its special tokens, as `config.json` has them."""
    write_tokenizer(folder, SEEING, extra_words=tuple(SEEING_WORDS.values()))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {name: tokenizer.token_to_id(word) for name, word in SEEING_WORDS.items()}


def write_tokenizer(folder: Path, template: str = CHATML, *, extra_words: tuple[str, ...] = ()) -> Path:
    """`tokenizer.json` and `tokenizer_config.json`. Characters that it does not know become U+FFFD."""
    characters = sorted(set(string.printable) - set("\r\x0b\x0c"))
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters, "\ufffd", *extra_words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="\ufffd"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in extra_words])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True}, "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False, "chat_template": template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
