"""`trireme gepa` with a real engine: the tiny model is told what to do by what was read in feedback."""

import json
import re
from typing import Any

import pytest

from real_run import run_command
from reflecting import Endpoint

pytestmark = pytest.mark.slow


def find_out(messages: list[dict[str, Any]]) -> str:
    """From feedback alone: is the right answer what was said, backwards?"""
    question = str(messages[-1]["content"])
    asked, right = re.findall(r"^user: (.+)$", question, re.M), re.findall(r"### Right answer\n(.+)", question)
    if not asked:
        return "ready"
    assert [text[::-1] for text in asked] == right
    tags = "Put your answer in <reversed_text> tags." if "<reversed_text>" in question else ""
    return f"```\nReverse the text character-by-character. {tags}\n```"


def test_a_prompt_becomes_better_for_a_real_model_on_examples_that_nothing_has_seen(engine, tmp_path):
    arguments = '{"system_prompt": "Say it.", "min_length": 3, "max_length": 8}'
    words = ["gepa", "run", "reverse-text", "-m", "models/reverse-text-tiny", "-M", "reflector", "-a", arguments]
    words += ["--base-url", f"http://127.0.0.1:{engine.port}", "--output", str(tmp_path / "gepa")]
    words += ["-n", "12", "-N", "16", "--num-test", "24", "--minibatch-size", "6", "-B", "130"]
    words += ["--sampling.temperature", "0", "--sampling.max-tokens", "40", "--perfect-score", "1"]
    with Endpoint().running() as endpoint:
        endpoint.minds["reflector"] = find_out
        told = run_command("trireme", *words, "--reflection-base-url", endpoint.url)
    summary = json.loads((tmp_path / "gepa" / "metadata.json").read_text())["summary"]
    assert summary["held_out"]["after"] > summary["held_out"]["before"] + 0.1, told
    assert summary["calls"]["total"] <= 130
    assert "Reverse the text character-by-character." in (tmp_path / "gepa" / "best_prompt.txt").read_text()
