"""Makes a small random model, of Qwen3's or Qwen2.5-VL's architecture, whose tokens are characters and a few words.

    uv run python scripts/make_tiny_model.py FOLDER [--words FILE] [--template plain] [--hidden 128] [--layers 3]
                                                    [--seed 0] [--no-weights]

Characters keep the vocabulary (and so the head) tiny. The words are those of chat and of an environment's tags and
instructions, so that a prompt is short: one token each, however long. FILE is a JSON list of them; those of
reverse-text are built in. The template `tools` also shows tools, tool calls and what tools answered, as Hermes does.
The template `calls` shows calls and answers alone, for agent programs whose instructions and tools would take more
tokens than such a model can read: no instructions, no tools, and of what a tool of Codex answered the output only.
The template `pictures` makes a model that sees, Qwen2.5-VL's, with a vision encoder of two layers.
"""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURN = (
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set function = call['function'] or call %}{% set arguments = function['arguments'] %}"
    "{{ '\n' if message['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\n{\"name\": \"' + function['name'] + '\", \"arguments\": ' }}"
    "{{ arguments if arguments is string else arguments | tojson }}"
    "{{ '}\n</tool_call>' }}"
    "{% endfor %}"
)
BEGIN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TOOL_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{{ '# Tools\n\nYou may call one or more of these functions:\n<tools>\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ '</tools>\n\nEach call is a JSON object in tags:\n<tool_call>\n' }}"
    '{{ \'{"name": <function name>, "arguments": <JSON object>}\n</tool_call><|im_end|>\n\' }}'
    "{% endif %}"
    "{% for message in messages %}"
    "{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{% else %}" + TURN + "{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% endfor %}" + BEGIN
)
CALL_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'developer') %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<tool_response>\n' + (message['content'].split('Output:\n') | last | trim) + '\n</tool_response>' }}"
    "{% else %}" + TURN + "{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endif %}"
    "{% endfor %}" + BEGIN
)
VISION = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
PICTURE_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}" + BEGIN
)
TEMPLATES = {"plain": CHAT_TEMPLATE, "tools": TOOL_TEMPLATE, "calls": CALL_TEMPLATE, "pictures": PICTURE_TEMPLATE}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ROLES = ["system\n", "user\n", "assistant\n", "tool\n"]
REVERSE_TEXT_WORDS = (
    "<reversed_text>",
    "</reversed_text>",
    "Reverse the text character-by-character. Put your answer in <reversed_text> tags.",
)


def build_tokenizer(words: Sequence[str] = REVERSE_TEXT_WORDS, template: str = "plain") -> PreTrainedTokenizerFast:
    characters = sorted(set(string.printable) - set("\r\x0b\x0c"))
    words = [*ROLES, *words]
    special = SPECIAL + (VISION if template == "pictures" else [])
    vocabulary = {token: index for index, token in enumerate([*special, *words, *characters, "\ufffd"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="\ufffd"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATES[template],
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int) -> PreTrainedModel:
    shape = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if "<|image_pad|>" in tokenizer.get_vocab():
        return build_seeing_model(tokenizer, shape)
    architectures = ["Qwen3ForCausalLM"]
    return Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=32, initializer_range=0.05, architectures=architectures))


def build_seeing_model(tokenizer: PreTrainedTokenizerFast, shape: dict[str, Any]) -> PreTrainedModel:
    """Build a model whose vision encoder is left at random: what it says of two pictures differs, and is not trained.

    Args:
        shape: of its text model.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "fullatt_block_indexes": [1]}
    start, image, end, video = tokenizer.convert_tokens_to_ids(VISION)
    config = Qwen2_5_VLConfig(
        text_config=shape | {"rope_parameters": rope, "initializer_range": 0.1},
        vision_config=vision | {"out_hidden_size": shape["hidden_size"]},
        vision_start_token_id=start,
        image_token_id=image,
        vision_end_token_id=end,
        video_token_id=video,
        tie_word_embeddings=True,
        eos_token_id=shape["eos_token_id"],
        pad_token_id=shape["pad_token_id"],
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    for parameter in model.model.visual.parameters():
        if parameter.dim() > 1:  # so that features are as large as what they are made of
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--words", type=Path, help="JSON list of texts that are one token each")
    parser.add_argument("--template", choices=TEMPLATES, default="plain", help="how messages become text")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-weights", action="store_true", help="only the configuration and the tokenizer")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    words = json.loads(args.words.read_text(encoding="utf-8")) if args.words else REVERSE_TEXT_WORDS
    tokenizer = build_tokenizer(words, args.template)
    model = build_model(tokenizer, args.hidden, args.layers)
    if args.no_weights:
        model.config.save_pretrained(args.folder)
        model.generation_config.save_pretrained(args.folder)
    else:
        model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    if args.template == "pictures":
        sizes = {"shortest_edge": 56 * 56, "longest_edge": 56 * 56 * 16}
        Qwen2VLImageProcessor(size=sizes).save_pretrained(args.folder)
    print(f"{args.folder}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
