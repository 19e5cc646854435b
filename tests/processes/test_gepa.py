"""`trireme gepa`: real workers, the real library, and an endpoint whose answers depend on the prompt alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine, open_fake_engine
from interrupts import heed_interrupts
from reflecting import ENVIRONMENT, RULES, Endpoint
from trireme.base.errors import ConfigError, DeadlineExceeded, Refused
from trireme.base.paths import RunPaths
from trireme.cli import env_policy, gepa_models
from trireme.cli.gepa import gepa
from trireme.launch.folder import hold_folder
from trireme.orchestrator.gepa.feedback import feedback_on
from trireme.orchestrator.gepa.journal import Scored

TINY, OTHER = (str(Path(__file__).parents[2] / "models" / name) for name in ("reverse-text-tiny", "wordle-tiny"))
SMALL = ("-n", "6", "-N", "4", "--minibatch-size", "2", "--perfect-score", "1")
BEST = "\n".join(["You are a parrot.", *RULES.values()])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "harbour.py").write_text(textwrap.dedent(ENVIRONMENT))
    return tmp_path


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint().running() as running:
        yield running


def search(endpoint: Endpoint, *words: str) -> int:
    asked = ["run", "harbour.py", "-m", "follower", "-M", "reflector", "-b", endpoint.url]
    return gepa([*asked, *SMALL, *words])


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "metadata.json").read_text())["summary"]
    return summary


# what comes out


def test_a_prompt_becomes_better_on_examples_that_nothing_has_seen(
    here: Path, endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: each of three rules is a third of the reward, and each reflection finds one of them."""
    assert search(endpoint, "--num-test", "3", "--max-calls", "100") == 0
    said = capsys.readouterr().out
    assert "validation  0.000 -> 1.000" in said
    assert "held out    0.000 -> 1.000 (3 examples that nothing had seen)" in said
    folder = here / "outputs" / "gepa" / "harbour"
    assert (folder / "best_prompt.txt").read_text() == f"{BEST}\n"
    assert json.loads((folder / "best_args.json").read_text()) == {"system_prompt": BEST}
    means = [line["validation"] for line in lines_of(folder / "candidates.jsonl")]
    assert means == pytest.approx([0, 1 / 3, 2 / 3, 1])
    frontier = lines_of(folder / "pareto_frontier.jsonl")
    assert [(line["best_score"], line["prompt_numbers"], line["best_prompts"]) for line in frontier] == [
        (1.0, [3], [BEST])
    ] * 4
    metadata = json.loads((folder / "metadata.json").read_text())
    assert (metadata["env_id"], metadata["model"], metadata["minibatch_size"]) == ("harbour.py", "follower", 2)
    # 4 for the first prompt; 2 + 2 + 4 for each of three new ones; 3 + 3 for the test
    assert metadata["summary"]["calls"] == {"total": 34, "train": 12, "validation": 16, "test": 6}
    assert len(endpoint.asked("follower")) == 34
    assert len(endpoint.asked("reflector")) == 3
    assert metadata["versions"]["gepa"]


def test_no_example_is_used_for_two_purposes(here: Path, endpoint: Endpoint) -> None:
    search(endpoint, "--num-test", "3")
    seen: dict[str, set[int]] = {}
    for line in lines_of(here / "outputs" / "gepa" / "harbour" / "rollouts.jsonl"):
        seen.setdefault(line["purpose"], set()).add(line["example"])
    assert not seen["train"] & seen["validation"]
    assert not seen["test"] & (seen["train"] | seen["validation"])


@pytest.mark.parametrize("max_calls", [12, 13, 19, 20, 27])
def test_the_budget_is_never_passed_and_what_is_left_is_too_little(
    here: Path, endpoint: Endpoint, max_calls: int
) -> None:
    """A new prompt costs 8 here at most, the first one 4."""
    search(endpoint, "--max-calls", str(max_calls))
    summary = summary_of(here / "outputs" / "gepa" / "harbour")
    assert summary["calls"]["total"] == len(endpoint.asked("follower")) <= max_calls
    assert max_calls - summary["calls"]["total"] < 8
    assert "one more prompt may take 8" in summary["why"]


def test_the_reflection_model_is_told_what_was_asked_said_and_earned_and_the_state(
    here: Path, endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    search(endpoint, "--state-columns", "heard", "gess", "--max-calls", "12")
    question = endpoint.asked("reflector")[0]["messages"][-1]["content"]
    assert "```\nYou are a parrot.\n```" in question
    word = lines_of(here / "outputs" / "gepa" / "harbour" / "rollouts.jsonl")[4]["answer"]
    for told in (f"user: Say: {word}", f"assistant: {word}", "0 of 1", "#### capitals\n0", f"### heard\n{word}"):
        assert told in question
    assert "--state-columns gess: no rollout had one. The environment's state has: answer, heard, prompt" in (
        capsys.readouterr().err
    )


# going on


def test_a_search_that_is_stopped_anywhere_ends_as_if_it_had_not_been(here: Path, endpoint: Endpoint) -> None:
    """Stopped again and again, by an endpoint that refuses the key now and then."""
    search(endpoint, "--num-test", "2", "--output", "whole", "--max-concurrent", "1")
    whole = {name: (here / "whole" / name).read_text() for name in ("best_prompt.txt", "candidates.jsonl")}
    num_asked, num_stops = [len(endpoint.asked(model)) for model in ("follower", "reflector")], 0
    endpoint.status = lambda body: 401 if len(endpoint.requests) % 13 == 0 else 200
    while not (here / "parts" / "metadata.json").exists() or summary_of(here / "parts")["state"] != "finished":
        with suppress(ConfigError):  # the key was refused
            search(endpoint, "--num-test", "2", "--output", "parts", "--max-concurrent", "1")
        num_stops += 1
    assert num_stops > 2
    assert {name: (here / "parts" / name).read_text() for name in whole} == whole
    parts, once = summary_of(here / "parts"), summary_of(here / "whole")
    assert {key: parts[key] for key in ("calls", "validation", "held_out", "num_reflections", "best")} == {
        key: once[key] for key in ("calls", "validation", "held_out", "num_reflections", "best")
    }
    assert [len(endpoint.asked(model)) for model in ("follower", "reflector")] == [2 * num for num in num_asked]


def test_a_finished_search_is_shown_again_and_a_larger_budget_goes_on(
    here: Path, endpoint: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    search(endpoint, "--max-calls", "12")
    num_asked = len(endpoint.requests)
    search(endpoint, "--max-calls", "12")
    assert len(endpoint.requests) == num_asked
    assert "it was finished before" in capsys.readouterr().out
    search(endpoint, "--max-calls", "100")
    assert len(endpoint.asked("follower")) == 28
    assert summary_of(here / "outputs" / "gepa" / "harbour")["validation"]["after"] == 1
    with pytest.raises(ConfigError, match="28 rollouts were made already"):
        search(endpoint, "--max-calls", "20")


def test_a_search_that_found_nothing_new_any_more_asks_again_with_a_larger_budget(
    here: Path, endpoint: Endpoint
) -> None:
    helpful = endpoint.minds["reflector"]
    endpoint.minds["reflector"] = lambda messages: "```\nUse capitals.\n```"
    search(endpoint)
    folder = here / "outputs" / "gepa" / "harbour"
    assert "5 reflections in a row gave no new prompt" in summary_of(folder)["why"]
    assert summary_of(folder)["num_prompts"] == 2
    endpoint.minds["reflector"] = helpful
    search(endpoint, "--max-calls", "501")
    summary = summary_of(folder)
    assert summary["validation"]["after"] == 1
    assert summary["calls"]["total"] == len(endpoint.asked("follower"))


def test_other_settings_are_not_mixed_with_what_lies_there(here: Path, endpoint: Endpoint) -> None:
    search(endpoint, "--max-calls", "12")
    with pytest.raises(ConfigError, match=r"other settings: seed was 0, is 1 - .*--fresh"):
        search(endpoint, "--max-calls", "12", "--seed", "1")
    (here / "harbour.py").write_text((here / "harbour.py").read_text().replace("a parrot", "a crow"))
    with pytest.raises(ConfigError, match=r"first_prompt was .*a parrot.*, is .*a crow"):
        search(endpoint, "--max-calls", "40")
    search(endpoint, "--max-calls", "12", "--fresh")
    assert (here / "outputs" / "gepa" / "harbour.earlier-1" / "best_prompt.txt").exists()


def test_ctrl_c_ends_it_with_what_was_found_and_the_same_command_goes_on(here: Path, endpoint: Endpoint) -> None:
    slow = [0.0]
    endpoint.before = lambda body: time.sleep(slow[0])
    words = ["harbour.py", "-m", "follower", "-M", "reflector", "-b", endpoint.url, *SMALL]
    command = [sys.executable, "-m", "trireme.cli.trireme", "gepa", "run", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=heed_interrupts)
    folder = here / "outputs" / "gepa" / "harbour"
    try:
        give_up = time.monotonic() + 60
        while not endpoint.asked("reflector"):
            assert time.monotonic() < give_up
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        slow[0] = 0.3
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert b"the same command goes on" in said
    assert summary_of(folder)["state"] == "stopped"
    slow[0] = 0.0
    num_before = len(lines_of(folder / "rollouts.jsonl"))
    assert search(endpoint) == 0
    assert (folder / "best_prompt.txt").read_text() == f"{BEST}\n"
    assert len(lines_of(folder / "rollouts.jsonl")) == 28 > num_before


# what goes wrong


def test_rollouts_that_fail_count_as_nothing_and_the_error_is_told(here: Path, endpoint: Endpoint) -> None:
    code = (here / "harbour.py").read_text()
    (here / "harbour.py").write_text(
        code + "\nscore = reward\n\n\ndef reward(completion, answer, example):\n"
        "    if completion.islower() and len(answer) == 3:\n        raise ValueError('too quiet')\n"
        "    return score(completion, answer, example)\n"
    )
    search(endpoint, "--max-calls", "60", "-n", "24")
    lines = lines_of(here / "outputs" / "gepa" / "harbour" / "rollouts.jsonl")
    failed = [line for line in lines if line["error"]]
    assert failed
    assert all(line["reward"] is None and "too quiet" in line["error"] for line in failed)
    assert summary_of(here / "outputs" / "gepa" / "harbour")["num_failed"] == len(failed)
    record = feedback_on(Scored(**failed[0]), columns=(), perfect_score=1, longest=4000)
    assert record["Feedback"]["Reward"] == "0, because the rollout failed"
    assert "too quiet" in record["Feedback"]["Error"]
    assert record["Inputs"].startswith("user: Say: ")


def test_a_first_evaluation_of_errors_alone_ends_the_search_and_leaves_no_score_behind(
    here: Path, endpoint: Endpoint
) -> None:
    code = (here / "harbour.py").read_text()
    (here / "harbour.py").write_text(code + "\ndef reward(completion):\n    return 1 / 0\n")
    with pytest.raises(Refused, match=r"all 4 rollouts of the first evaluation failed.*division by zero"):
        search(endpoint)
    (here / "harbour.py").write_text(code)
    assert search(endpoint) == 0


@pytest.mark.parametrize("answer", ["", "```\n```", "```\nYou are a parrot.\n```"])
def test_reflections_that_give_no_new_prompt_cost_no_rollouts_of_it_and_end_the_search(
    here: Path, endpoint: Endpoint, answer: str
) -> None:
    endpoint.minds["reflector"] = lambda messages: answer
    with pytest.raises(Refused, match="gave no new prompt 5 times in a row"):
        search(endpoint)
    assert len(endpoint.asked("follower")) == 4 + 5 * 2
    folder = here / "outputs" / "gepa" / "harbour"
    assert (folder / "best_prompt.txt").read_text() == "You are a parrot.\n"
    assert lines_of(folder / "reflections.jsonl") == []


def test_a_wrong_key_of_the_reflection_model_is_found_before_any_rollout(here: Path, endpoint: Endpoint) -> None:
    endpoint.status = lambda body: 401 if body["model"] == "reflector" else 200
    with pytest.raises(ConfigError, match="401 to a question for 'reflector'"):
        search(endpoint)
    assert endpoint.asked("follower") == []


def test_a_reflection_model_that_is_gone_ends_the_search_at_once_with_what_was_found(
    here: Path, endpoint: Endpoint
) -> None:
    """After its second answer; it is not asked again."""
    endpoint.status = lambda body: (
        403 if body["model"] == "reflector" and len(endpoint.asked("reflector")) == 2 else 200
    )
    with pytest.raises(ConfigError, match="403 to a question for 'reflector'"):
        search(endpoint)
    assert sum(body["model"] == "reflector" for body in endpoint.requests) == 1 + 2 + 1
    summary = summary_of(here / "outputs" / "gepa" / "harbour")
    assert (summary["state"], summary["num_prompts"]) == ("stopped", 3)


def test_a_model_that_never_answers_is_named_when_its_time_is_over(here: Path, endpoint: Endpoint) -> None:
    endpoint.before = lambda body: time.sleep(1.0)
    with pytest.raises(DeadlineExceeded, match=f"the search waits .* for an answer from {endpoint.url}"):
        search(endpoint, "--request-timeout-s", "0.2")


def test_a_question_that_is_too_long_is_asked_again_with_shorter_texts(here: Path, endpoint: Endpoint) -> None:
    code = (here / "harbour.py").read_text().replace('f"Say: {word}"', "f\"{'la ' * 900}Say: {word}\"")
    (here / "harbour.py").write_text(code)
    endpoint.minds["follower"] = lambda messages: str(messages[-1]["content"])[-4:]
    refused: list[int] = []

    def status(body: dict[str, Any]) -> int:
        length = len(body["messages"][-1]["content"])
        if body["model"] == "follower" or length < 4000:
            return 200
        refused.append(length)
        return 400

    endpoint.status, endpoint.refusal = status, "this is longer than the maximum context"
    search(endpoint, "--max-calls", "12")
    lines = lines_of(here / "outputs" / "gepa" / "harbour" / "reflections.jsonl")
    assert refused == sorted(refused, reverse=True)
    assert len(refused) == 2
    assert [line["error"] is None for line in lines] == [False, False, True]
    assert "characters left out" in lines[-1]["question"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["gone.py", "-m", "follower", "-b", "URL"], "names a file that does not exist"),
        (["harbour.py", "-b", "URL"], "model"),
        (["harbour.py", "-m", "follower"], "nothing says where 'follower' is asked"),
        (["harbour.py", "-m", "follower", "-b", "http://127.0.0.1:9/v1"], "nobody answers at"),
        (["harbour.py", "-m", "follower", "-b", "URL", "-k", "NO_SUCH_KEY"], "NO_SUCH_KEY: this variable is not set"),
        (["harbour.py", "-m", "follower", "-b", "URL", "--max-cals", "9"], "max_calls|max-calls"),
        (["harbour.py", "-m", "follower", "-b", "URL", "-B", "none"], "max-calls"),
        (["gone.toml"], "gone.toml does not exist"),
        (["harbour.py", "-m", "follower", "-b", "URL", "-n", "40", "-N", "9"], "48 to train on and 0 held out"),
        (["harbour.py", "-m", "follower", "-b", "URL", "-B", "30"], "too few for a single new prompt.*expected 38"),
        (["harbour.py", "-m", "follower", "-b", "URL", "--initial-prompt", "gone.txt"], "gone.txt cannot be read"),
        (["harbour.py", "-m", "follower", "-b", "URL", "-n", "2"], "minibatch-size 3 is more than the 2"),
    ],
)
def test_what_cannot_work_is_refused_before_any_model_is_asked(
    here: Path, endpoint: Endpoint, words: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){problem}"):
        gepa([endpoint.url if word == "URL" else word for word in words])
    assert endpoint.requests == []


def test_rewards_that_compare_a_group_are_refused(here: Path, endpoint: Endpoint) -> None:
    code = (here / "harbour.py").read_text()
    (here / "harbour.py").write_text(code + "\ndef reward(completions):\n    return [0.0 for each in completions]\n")
    with pytest.raises(ConfigError, match="compare the rollouts of a group"):
        search(endpoint)


def test_one_search_at_a_time_in_a_folder(here: Path, endpoint: Endpoint) -> None:
    with hold_folder(RunPaths(Path("outputs/gepa/harbour"))):
        with pytest.raises(ConfigError, match="another search is at work in outputs/gepa/harbour"):
            search(endpoint)
    assert endpoint.requests == []


def test_examples_with_prompts_of_their_own_need_one_to_begin_with(here: Path, endpoint: Endpoint) -> None:
    code = (here / "harbour.py").read_text().replace("[*said, {", '[{"role": "system", "content": word}, {')
    (here / "harbour.py").write_text(code)
    with pytest.raises(ConfigError, match=r"different system prompts, such as .*--initial-prompt FILE"):
        search(endpoint)
    (here / "first.txt").write_text("You are a parrot.\n")
    search(endpoint, "--initial-prompt", "first.txt")
    assert (here / "outputs" / "gepa" / "harbour" / "best_prompt.txt").read_text() == f"{BEST}\n"


# an engine of ours


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Those that a search opens: one that needs no model instead of a real one, in its own event loop."""
    opened: list[FakeEngine] = []

    @asynccontextmanager
    async def open_engine(*_: Any) -> AsyncIterator[str]:
        async with open_fake_engine() as engine:
            opened.append(engine)
            yield engine.url

    for module in (gepa_models, env_policy):
        monkeypatch.setattr(module, "open_engine", open_engine)
    return opened


def test_a_model_in_a_folder_answers_and_reflects_by_one_engine_each_with_its_own_sampling(
    here: Path, engines: list[FakeEngine]
) -> None:
    words = ["harbour.py", "-m", TINY, *SMALL, "-B", "12", "--device", "cpu", "--seq-len", "4096"]
    words += ["--sampling.temperature", "0.25", "--reflection-sampling.max-tokens", "9"]
    assert gepa(words) == 0
    [engine] = engines
    asked = [(one.sampling["temperature"], one.sampling.get("max_tokens")) for one in engine.requests]
    rollouts, reflections = [one for one in asked if one[0] == 0.25], [one for one in asked if one == (1.0, 9)]
    assert (len(rollouts), len(reflections), len(asked)) == (8, 1, 9)
    summary = summary_of(here / "outputs" / "gepa" / "harbour")
    assert summary["calls"]["total"] == 8
    assert "by an engine of this search" in summary["teacher"]


def test_two_models_in_folders_have_an_engine_each(here: Path, engines: list[FakeEngine]) -> None:
    words = ["harbour.py", "-m", TINY, "-M", OTHER, *SMALL, "-B", "12", "--device", "cpu", "--seq-len", "4096"]
    assert gepa(words) == 0
    assert [len(engine.requests) for engine in engines] == [8 + 1, 1 + 1]  # each was greeted


def test_a_reflection_model_whose_context_is_too_short_is_told_so(here: Path, engines: list[FakeEngine]) -> None:
    words = ["harbour.py", "-m", TINY, *SMALL, "--device", "cpu", "--seq-len", "512"]
    with pytest.raises(Refused, match="does not fit into its context, even with texts of 250 characters"):
        gepa(words)
