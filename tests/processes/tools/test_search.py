"""`trireme gepa`: real workers, the real library, and an endpoint whose answers depend on the prompt alone."""

import json
import os
import shlex
import signal
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.engines.fake_engine import FakeEngine, open_fake_engine
from support.engines.reflecting import ENVIRONMENT, RULES, Endpoint
from support.processes.interrupts import heeding_interrupts
from trireme.base.errors import ConfigError, PeerRefused
from trireme.base.paths import RunPaths
from trireme.launch.folder import hold_folder
from trireme.tools.evaluate.run import eval_run
from trireme.tools.gepa.gepa import command as gepa
from trireme.tools.policies import engine as policy_engine

TINY = str(Path(__file__).parents[3] / "models" / "reverse-text-tiny")
SMALL = ("-n", "6", "-N", "4", "--minibatch-size", "2", "--perfect-score", "1")
BEST = "\n".join(["You are a parrot.", *RULES.values()])
OUTPUT = Path("outputs", "gepa", "harbour")
CODE = textwrap.dedent(ENVIRONMENT)


@pytest.fixture(autouse=True)
def harbour(here, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    Path("harbour.py").write_text(CODE)


@pytest.fixture
def endpoint():
    with Endpoint().running() as running:
        yield running


def search(endpoint: Endpoint, *words: str) -> int:
    return gepa(["run", "harbour.py", "-m", "follower", "-M", "reflector", "-b", endpoint.url, *SMALL, *words])


def lines_of(name: str, folder: Path = OUTPUT) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def summary(folder: Path = OUTPUT) -> dict[str, Any]:
    return json.loads((folder / "metadata.json").read_text())["summary"]


def test_a_prompt_becomes_better_on_the_validation_examples(endpoint, capsys):
    """By hand: each of three rules is a third of the reward, and each reflection finds one of them.

    Then the same search, stopped by an endpoint that refuses the key every 13th time, ends as if it had not been.
    """
    more = ["--max-concurrent", "1", "--max-calls", "100"]
    assert search(endpoint, *more) == 0
    assert "validation  0.000 -> 1.000 (4 examples" in capsys.readouterr().out
    assert (OUTPUT / "best_prompt.txt").read_text() == f"{BEST}\n"
    assert json.loads((OUTPUT / "best_args.json").read_text()) == {"system_prompt": BEST}
    assert [line["validation"] for line in lines_of("candidates.jsonl")] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    frontier = lines_of("pareto_frontier.jsonl")
    found = [(line["best_score"], line["prompt_numbers"], line["best_prompts"]) for line in frontier]
    assert found == [(1.0, [3], [BEST])] * 4
    metadata = json.loads((OUTPUT / "metadata.json").read_text())
    assert (metadata["env_id"], metadata["model"], metadata["minibatch_size"]) == ("harbour.py", "follower", 2)
    # 4 for the first prompt; 2 + 2 + 4 for each of three new ones
    assert (summary()["state"], summary()["calls"]) == ("finished", 28)
    assert [len(endpoint.asked(model)) for model in ("follower", "reflector")] == [28, 3]

    parts, num_stops = Path("parts"), 0
    endpoint.status = lambda body: 401 if len(endpoint.requests) % 13 == 0 else 200
    while not (parts / "metadata.json").exists() or summary(parts)["state"] != "finished":
        with suppress(ConfigError):  # the key was refused
            search(endpoint, "--output", "parts", *more)
        num_stops += 1
    assert num_stops > 1
    for name in ("best_prompt.txt", "candidates.jsonl"):
        assert (parts / name).read_text() == (OUTPUT / name).read_text()
    assert summary(parts) == summary()
    again, reflections = len(endpoint.asked("follower")) - 28, len(endpoint.asked("reflector")) - 3
    assert reflections == 3
    assert 28 <= again <= 28 + num_stops, "only what was under way when the key was refused is asked again"


def test_the_printed_command_measures_the_prompt_that_was_found(endpoint, capsys):
    """Also where the environment takes no prompt: its system message is part of its examples."""
    taken = 'def dataset(system_prompt="You are a parrot."):'
    assert taken in CODE
    Path("harbour.py").write_text(CODE.replace(taken, 'def dataset():\n    system_prompt = "You are a parrot."'))
    assert search(endpoint, "--max-calls", "100") == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("verify"))
    assert (words := shlex.split(line))[1:4] == ["trireme", "eval", "run"]
    assert eval_run([*words[4:], "-n", "4", "-r", "1"]) == 0
    assert "avg - 1.000" in capsys.readouterr().out


def test_gepa_search_keeps_its_budget_across_resumes(endpoint):
    """A new prompt costs 8 here, the first one 4."""
    for max_calls, total in ((12, 12), (19, 12), (20, 20)):
        num_before = len(endpoint.asked("follower"))
        search(endpoint, "--max-calls", str(max_calls))
        assert summary()["calls"] == total
        assert len(endpoint.asked("follower")) == max(num_before, total)
        assert "one more prompt may take 8" in summary()["why"]
    (OUTPUT / "metadata.json").write_text("[[")
    with pytest.raises(ConfigError, match="cannot be read"):
        search(endpoint)


def test_ctrl_c_ends_it_with_what_was_found_and_the_same_command_goes_on(endpoint, capsys):
    def interrupt_a_reflection(body: dict[str, Any]) -> int:
        if body["model"] == "reflector":
            os.kill(os.getpid(), signal.SIGINT)
        return 200

    endpoint.status = interrupt_a_reflection
    with heeding_interrupts(), pytest.raises(KeyboardInterrupt):
        search(endpoint)
    assert "the same command resumes the search" in capsys.readouterr().err
    assert (summary()["state"], summary()["num_prompts"]) == ("under way", 1)
    assert (OUTPUT / "best_prompt.txt").read_text() == "You are a parrot.\n"
    endpoint.status = lambda body: 200
    assert search(endpoint) == 0
    assert len(lines_of("rollouts.jsonl")) == 28


def test_gepa_refuses_rewards_that_always_fail_or_compare_a_group(endpoint):
    rewards = CODE + "\ndef reward(completion):\n    return 1 / 0\n"
    Path("harbour.py").write_text(rewards)
    with pytest.raises(PeerRefused, match=r"all 4 rollouts of the first evaluation failed.*division by zero"):
        search(endpoint)
    Path("harbour.py").write_text(rewards.replace("(completion)", "(completions)"))
    with pytest.raises(ConfigError, match="compare the rollouts of a group"):
        search(endpoint)
    Path("harbour.py").write_text(CODE)
    with hold_folder(RunPaths(OUTPUT)), pytest.raises(ConfigError, match="another launcher"):
        search(endpoint)
    assert search(endpoint) == 0, "what failed is made again"


def test_a_reflection_model_that_has_nothing_new_leaves_what_was_found(endpoint, capsys):
    endpoint.minds["reflector"] = lambda messages: "```\nYou are a parrot.\n```"
    for words, num_asked in (([], 3), ([], 0), (["--reflection-sampling.max-tokens", "400"], 3)):
        num_before = len(endpoint.asked("reflector"))
        assert search(endpoint, "--max-calls", "16", *words) == 0
        assert "no prompt was better than the one to begin with" in capsys.readouterr().out
        assert len(endpoint.asked("reflector")) - num_before == num_asked, "a known prompt costs no rollout"


def test_what_cannot_work_is_refused_before_any_model_is_asked(endpoint):
    for words, problem in (
        (["-k", "NO_SUCH_KEY"], "NO_SUCH_KEY: this variable is not set"),
        (["-n", "2"], "2 to reflect on and 16 to choose by - expected at least 3"),
        (["-B", "30"], "(?s)too few for a single new prompt.*expected 38"),
    ):
        with pytest.raises(ConfigError, match=problem):
            gepa(["harbour.py", "-m", "follower", "-b", endpoint.url, *words])
    assert endpoint.requests == []


def test_gepa_answers_and_reflections_of_one_model_share_an_engine(monkeypatch):
    engines: list[FakeEngine] = []

    @asynccontextmanager
    async def open_engine(*_: Any) -> AsyncIterator[str]:
        async with open_fake_engine() as engine:
            engines.append(engine)
            yield engine.url

    monkeypatch.setattr(policy_engine, "open_engine", open_engine)
    words = ["harbour.py", "-m", TINY, *SMALL, "-B", "12", "--device", "cpu", "--seq-len", "4096"]
    sampling = ["--sampling.temperature", "0.25", "--sampling.top-p", "0.5", "--reflection-sampling.max-tokens", "9"]
    assert gepa([*words, *sampling]) == 0
    [engine] = engines
    asked = [(one.sampling["temperature"], one.sampling.get("max_tokens")) for one in engine.requests]
    assert (sum(one[0] == 0.25 for one in asked), asked.count((1.0, 9)), len(asked)) == (8, 1, 9)
    assert "by an engine of this command" in summary()["teacher"]
    assert not any("top_k" in one.sampling for one in engine.requests), "nothing is trained on"
