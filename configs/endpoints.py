"""Endpoints of models, for `trireme eval run ENV -m NAME`, `trireme gepa run ENV -m NAME`.

An entry has an address (`url` or `base_url`), and may have the model's name there (`model`) and a `key` (`api_key`).
The entry "default" is used for every model without an entry. This file is read, not run: literals and os.getenv only.
"""

import os

ENDPOINTS = {
    # `vllm serve Qwen/Qwen2.5-7B-Instruct --port 8007`, or an engine of ours (`uv run inference @ …`, port 8000).
    "Qwen/Qwen2.5-7B-Instruct": {
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "url": "http://127.0.0.1:8007/v1",
        "key": "local",
    },
    # What `configs/gepa/` asks: `vllm serve Qwen/Qwen3-4B-Instruct-2507 --port 8008`.
    "Qwen/Qwen3-4B-Instruct-2507": {
        "model": "Qwen/Qwen3-4B-Instruct-2507",
        "url": "http://127.0.0.1:8008/v1",
        "key": "local",
    },
    # What rewrites prompts there: any model that is good at it.
    "teacher": {
        "model": "gpt-4.1-mini",
        "url": "https://api.openai.com/v1",
        "key": os.getenv("OPENAI_API_KEY"),
    },
    "gpt-4.1-mini": {
        "url": "https://api.openai.com/v1",
        "key": os.getenv("OPENAI_API_KEY"),
    },
    "gpt-5-nano": {
        "url": "https://api.openai.com/v1",
        "key": os.getenv("OPENAI_API_KEY"),
    },
}
