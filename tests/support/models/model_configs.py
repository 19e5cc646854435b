"""The `config.json` of well-known models, as far as a plan reads it, in a cache of the hub."""

import json
from pathlib import Path
from typing import Any

import pytest

SUFFIXES = ("-Instruct", "-Instruct-2507", "-Thinking-2507")

MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "data/published_models.json").read_text())
"""Facts of published config.json files, in their shape, without the keys that play no part in sizes or verdicts."""


def cache_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put them into a cache of the hub, with their fine-tuned siblings."""
    siblings = {f"{name}{suffix}": config for name, config in MODELS.items() for suffix in ("", *SUFFIXES)}
    for name, config in siblings.items():
        model = folder / f"models--{name.replace('/', '--')}"
        for file, text in (("refs/main", "0"), ("snapshots/0/config.json", json.dumps(config))):
            (model / file).parent.mkdir(parents=True)
            (model / file).write_text(text)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
