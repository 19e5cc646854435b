"""`trireme env check`: real workers, with a script, a fake engine or a fake chat endpoint as the policy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from fake_chat import FakeChat, completion, served
from fake_engine import Asked, FakeEngine, open_fake_engine
from interrupts import heed_interrupts
from tiny_tokenizer import END, write_tokenizer
from trireme.base.errors import ConfigError, DeadlineExceeded, PeerDied
from trireme.base.processes import free_port
from trireme.base.waiting import Waits
from trireme.cli.env import env
from trireme.config.orchestrator import Sampling
from trireme.config.run import RunConfig
from trireme.orchestrator.chat import open_chat_tokenizer
from trireme.orchestrator.environments.check_endpoint import ChatEndpoint, look_at, open_chat_endpoint
from trireme.orchestrator.environments.check_engine import open_engine_policy
from trireme.orchestrator.environments.check_rollouts import Which
from trireme.orchestrator.environments.check_script import MOST_TURNS, answer
from trireme.orchestrator.environments.template import template_files
from trireme.orchestrator.environments.wire import Ask, Reply

REPOSITORY = Path(__file__).parents[2]
ECHO = """
    def dataset(size=40):
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(size)]

    def eval_dataset():
        return [{"prompt": "held out", "answer": "yes"}] * 3

    def reward(completion, answer):
        return {"reward": float(completion == answer), "length": len(completion)}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return tmp_path


def write(folder: Path, code: str, name: str = "toy.py") -> str:
    (folder / name).write_text(textwrap.dedent(code))
    return name


def checked(capsys: pytest.CaptureFixture[str], *words: str | int) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = env(["check", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


# the script


def test_an_environment_that_works_is_said_to_and_no_baseline_is_claimed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = write(here, ECHO)
    assert env(["check", toy, "-n", "5", "-r", "6"]) == 0
    said = capsys.readouterr().out
    assert "5 train examples x 6: 30 scored, none failed" in said
    assert "40 to train on, 3 held out" in said
    assert "no baseline was measured" in said
    written = (here / "outputs" / "env-check" / "toy" / "rollouts.jsonl").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    expected = [(example, place) for example in (0, 8, 16, 24, 32) for place in range(6)]
    assert [(line["example"], line["rollout"]) for line in lines] == expected
    assert any(line["completion"][0]["content"] == "" for line in lines)


def test_what_fails_is_told_with_its_examples_and_the_end_of_its_traceback(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = ECHO + "\n    def reward(completion, answer):\n        return 1 / (int(answer) % 4)\n"
    status, report = checked(capsys, write(here, code), "-n", 8, "-r", 2, "-a", '{"size": 8}')
    assert (status, report["holds"], report["num_done"]) == (1, False, 12)
    [trouble] = report["troubles"]
    assert (trouble["stage"], trouble["count"], trouble["examples"]) == ("score", 4, [0, 4])
    assert "1 / (int(answer) % 4)" in trouble["traceback"]
    assert env(["check", "toy.py", "-n", "8", "-r", "2"]) == 1
    said = capsys.readouterr().out
    assert "4 rollouts failed, score: ZeroDivisionError: division by zero\n  train examples 0, 20\n" in said


@pytest.mark.parametrize(
    ("body", "stage", "words"),
    [("return float('nan')", "score", "expected a finite number"),
     ("import asyncio; return asyncio.sleep(60)", "timeout", "not finished after 0.3 s")],
)  # fmt: skip
def test_rewards_that_are_no_numbers_and_rollouts_that_hang_are_found(
    here: Path, capsys: pytest.CaptureFixture[str], body: str, stage: str, words: str
) -> None:
    toy = write(here, ECHO + f"\n    def reward(completion, answer):\n        {body}\n")
    status, report = checked(capsys, toy, "-n", 1, "-r", 2, "--timeout", 0.3)
    assert (status, report["num_done"], report["rewards"]) == (1, 0, None)
    assert [(trouble["stage"], trouble["count"]) for trouble in report["troubles"]] == [(stage, 2)]
    assert words in report["troubles"][0]["error"]


COMPARING = """
    def dataset():
        return [{"prompt": f"say {i}"} for i in range(4)]

    def reward(completions):
        longest = max(map(len, completions))
        return [len(completion) / longest for completion in completions]
"""


def test_rewards_that_compare_a_group_are_given_whole_groups(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = checked(capsys, write(here, COMPARING), "-r", 6)
    assert (status, report["num_done"], report["rewards"]["most"]) == (0, 24, 1.0)


def test_a_failure_in_a_group_that_is_compared_is_told_and_nobody_waits_for_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script says nothing at all once in each group of six."""
    code = (
        COMPARING
        + """
    def respond(completion):
        if not completion:
            raise ValueError("nothing was said")
    """
    )
    status, report = checked(capsys, write(here, code), "-r", 6, "--timeout", 300)
    assert (status, report["num_done"]) == (1, 0)
    told = {trouble["error"].split(",")[0]: trouble["count"] for trouble in report["troubles"]}
    assert told["ValueError: nothing was said"] == 4
    assert sum(told.values()) == 24


@pytest.mark.parametrize(
    ("code", "words"),
    [("def load_environment():\n    raise RuntimeError('no data')\n", "RuntimeError: no data"),
     ("def dataset(): return []\ndef reward(completion): return 0.0\n", "has no examples"),
     ("import nothing_of_that_name\n", "No module named 'nothing_of_that_name'")],
)  # fmt: skip
def test_an_environment_that_cannot_be_loaded_is_the_checks_result(
    here: Path, capsys: pytest.CaptureFixture[str], code: str, words: str
) -> None:
    status, report = checked(capsys, write(here, code))
    assert (status, report["holds"]) == (1, False)
    assert words in report["error"]


def test_the_script_gives_each_group_every_kind_of_answer_the_same_each_time() -> None:
    function = {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}
    tools = [{"type": "function", "function": function}]
    question = Ask(task="t", call="c", messages=[{"role": "user", "content": "q"}], tools=tools, sampling={})

    def said(place: int, turn: int = 1) -> Reply:
        return answer(question, Which("train", 7, place, 10), turn=turn)

    group = [said(place) for place in range(10)]
    assert group == [said(place) for place in range(10)]
    calls = [call for reply in group for call in reply.tool_calls or []]
    assert {call.name for call in calls} == {"add", "no_such_tool"}
    assert {type(json.loads(call.arguments).get("a")) for call in calls if call.arguments.endswith("}")} >= {int}
    assert any(not call.arguments.endswith("}") for call in calls)
    assert "" in [reply.content for reply in group]
    assert said(0, turn=MOST_TURNS + 1).error_kind == "overlong_prompt"
    question.tools = None
    assert not any(said(place).tool_calls for place in range(10))


def test_a_written_plain_environment_works_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toy = write(here, template_files("my-env", kind="plain")["my_env.py"], "my_env.py")
    status, report = checked(capsys, toy, "-r", 2)
    assert (status, report["num_done"]) == (0, 40)
    assert (report["loaded"]["num_train"], report["loaded"]["num_eval"]) == (200, 50)


def test_the_shipped_example_of_ten_lines_works(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = REPOSITORY / "environments" / "examples" / "shout.py"
    code = [line for line in example.read_text().splitlines() if line and not line.startswith('"""')]
    assert len(code) <= 10
    shown = [line for line in (REPOSITORY / "docs" / "environments.md").read_text().splitlines() if line]
    assert "\n".join(code) in "\n".join(shown)
    assert checked(capsys, example)[0] == 0


def test_ctrl_c_leaves_no_process(here: Path) -> None:
    touch = f"pathlib.Path({str(here)!r}, f'pid_{{os.getpid()}}').touch()"
    code = (
        ECHO
        + f"""
    def reward(completion, answer):
        import asyncio, os, pathlib
        {touch}
        return asyncio.sleep(600)
    """
    )
    toy = write(here, code)
    command = [sys.executable, "-m", "trireme.cli.trireme", "env", "check", toy]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=heed_interrupts)
    try:
        give_up = time.monotonic() + 60
        while not (pids := [int(path.name[4:]) for path in here.glob("pid_*")]):
            assert time.monotonic() < give_up, "the worker never came"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# what was typed


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["tyo.py"], "names a file that does not exist"),
        (["toy.py", "--model", "models/gone"], "models/gone"),
        (["toy.py", "--scripted", "--base-url", "http://127.0.0.1:1"], "--scripted came with"),
        (["toy.py", "--base-url", "localhost"], "is no address"),
        (["toy.py", "--base-url", "http://127.0.0.1:9/v1"], "nobody answers at http://127.0.0.1:9/v1"),
        (["toy.py", "--api-key-var", "NO_SUCH_KEY"], "this variable is not set"),
        (["toy.py", "@", "gone.toml"], "gone.toml does not exist"),
        (["toy.py", "--orchestrator.samplign.top-p", "0.5"], "orchestrator.sampling"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(here: Path, words: list[str], problem: str) -> None:
    write(here, "raise SystemExit('it was loaded')\n")
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
        env(["check", *words])
    assert not (here / "outputs").exists()


def test_the_folder_of_a_run_is_never_written_into(here: Path) -> None:
    write(here, ECHO)
    (here / "run" / "journal").mkdir(parents=True)
    with pytest.raises(ConfigError, match="run is a run's folder"):
        env(["check", "toy.py", "--output", "run"])


def test_a_configuration_gives_arguments_and_flags_win(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here, ECHO.replace("size=40", "size=40, word='say'"))
    (here / "run.toml").write_text(
        'name = "demo"\n[[orchestrator.env]]\nid = "toy.py"\nname = "toy"\nargs = { size = 6, word = "tell" }\n'
        "num_workers = 2\n"
    )
    status, report = checked(capsys, "toy", "-r", 1, "-a", '{"size": 7}', "@", "run.toml")
    assert status == 0
    assert (report["loaded"]["num_train"], report["loaded"]["num_workers"], report["num_examples"]) == (7, 2, 7)
    assert (here / "outputs" / "env-check" / "demo" / "rollouts.jsonl").exists()
    assert not report["is_baseline"]  # the file names no model


def test_held_out_examples_are_checked_where_asked_and_training_ones_where_there_are_no_others(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here, ECHO)
    _, report = checked(capsys, "toy.py", "-r", 1, "--split", "eval")
    assert (report["split"], report["num_examples"]) == ("eval", 3)
    write(here, ECHO.replace("eval_dataset", "other"))
    _, report = checked(capsys, "toy.py", "-r", 1, "--split", "eval")
    assert (report["split"], report["num_examples"]) == ("train", 20)


# an engine of ours


def test_an_engine_that_serves_no_version_answers_as_in_training(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rewards by hand: the engine answers `a` on every second request, and only that is rewarded."""
    model = write_tokenizer(here / "model")
    letter = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id
    toy = write(here, ECHO + "\n    def reward(completion, answer):\n        return float('a' in completion)\n")

    def every_second(asked: Asked) -> list[int]:
        return [letter("a" if asked.number % 2 else "b"), letter("c"), END]

    with served(lambda: open_fake_engine(end=END, answer=every_second)) as engine:
        assert isinstance(engine, FakeEngine)
        words = ["-n", 10, "-r", 4, "--base-url", engine.url, "--model", str(model), "--seq-len", "64"]
        status, report = checked(capsys, toy, *words, "--temperature", "0.5", "--max-tokens", "7")
        assert {(asked.sampling["temperature"], asked.sampling["max_tokens"]) for asked in engine.requests} == {
            (0.5, 7)
        }
        assert not any("seed" in asked.sampling for asked in engine.requests)
    assert (status, report["num_done"], len(engine.requests)) == (0, 40, 40)
    assert report["is_baseline"]
    assert report["rewards"]["mean"] == pytest.approx(0.5)
    assert report["sampled"] == {"mean": 3.0, "least": 3.0, "most": 3.0}
    assert report["tokens"]["least"] > report["sampled"]["most"]
    assert "temperature 0.5" in report["policy"]


def test_an_engine_that_goes_away_ends_the_check_at_once(tmp_path: Path) -> None:
    tokenizer = open_chat_tokenizer(str(write_tokenizer(tmp_path / "model")))
    waits, url = Waits("the check"), f"http://127.0.0.1:{free_port()}"

    async def main() -> None:
        async with open_engine_policy(RunConfig(), tokenizer, url, name="gone", waits=waits) as policy:
            await policy.rollout(OneTurn(), Which("train", 0, 0, 1))  # type: ignore[arg-type]

    with pytest.raises(PeerDied, match=f"{url} is gone in the middle of the check"):
        asyncio.run(main())


# a chat endpoint


def test_a_foreign_endpoint_is_asked_with_its_key_and_its_only_model(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = write(here, ECHO)
    monkeypatch.setenv("MY_KEY", "secret-words")
    with FakeChat().running() as chat:
        words = ["--base-url", chat.url, "--api-key-var", "MY_KEY", "--split", "eval", "--temperature", "0.25"]
        status, report = checked(capsys, toy, "-r", 3, *words)
    assert (status, report["num_done"], report["rewards"]["mean"]) == (0, 9, 1.0)
    assert chat.keys == {"Bearer secret-words"}
    assert {(body["model"], body["temperature"]) for body in chat.requests} == {("grand-model", 0.25)}
    assert report["sampled"]["mean"] == 2.0
    assert report["tokens"]["mean"] == 12.0
    assert "secret-words" not in json.dumps(report)


def test_a_refused_key_ends_the_check_with_what_to_correct(here: Path) -> None:
    toy = write(here, ECHO)
    with FakeChat().running() as chat:
        chat.answers = lambda number: (401, {"error": "who are you?"})
        with pytest.raises(ConfigError, match=r"answered 401 .*the key was refused.*who are you.*--api-key-var"):
            env(["check", toy, "--base-url", chat.url])


def ask_endpoint(chat: FakeChat, use: Callable[[ChatEndpoint], Awaitable[Any]], timeout_s: float = 20) -> Any:
    async def main() -> Any:
        server = await look_at(chat.url)
        opening = open_chat_endpoint(
            server, model=None, key=None, sampling=Sampling(), timeout_s=timeout_s, waits=Waits("the check")
        )
        async with opening as endpoint:
            endpoint.pause_s = 0.01
            return await use(endpoint)

    with chat.running():
        return asyncio.run(main())


class OneTurn:
    """An environment that asks once, and keeps the reply."""

    def __init__(self, **question: Any) -> None:
        self.config = type("Config", (), {"max_turns": None})
        messages = [{"role": "user", "content": "q"}]
        self.question = Ask(task="t", call="c", messages=messages, **{"sampling": {}} | question)
        self.reply: Reply | None = None

    async def run(self, task: Any, ask: Callable[[Ask], Awaitable[Reply]], **_: Any) -> Any:
        self.reply = await ask(self.question)
        return type("Done", (), {"completion": [], "truncated": False, "stop": None})


def reply_of(chat: FakeChat, timeout_s: float = 20, **question: Any) -> Reply:
    environment = OneTurn(**question)
    ask_endpoint(chat, lambda endpoint: endpoint.rollout(environment, Which("train", 0, 0, 1)), timeout_s)  # type: ignore[arg-type]
    assert environment.reply is not None
    return environment.reply


def test_tool_calls_and_thinking_of_an_endpoint_reach_the_environment() -> None:
    chat = FakeChat()
    call = {"id": "x7", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat.answers = lambda number: (200, completion(None, tool_calls=[call], reasoning_content="hm"))
    reply = reply_of(chat, tools=[{"type": "function"}], sampling={"n": 3, "max_tokens": 5, "top_k": 2})
    [made] = reply.tool_calls or []
    assert (made.id, made.name, made.arguments) == ("x7", "add", '{"a": 1}')
    assert (reply.content, reply.reasoning, reply.finish_reason) == (None, "hm", "tool_calls")
    [asked] = chat.requests
    assert (asked["tools"], asked["max_tokens"]) == ([{"type": "function"}], 5)
    assert not {"n", "top_k"} & asked.keys()


def test_an_endpoint_that_is_busy_is_asked_again() -> None:
    chat = FakeChat()
    chat.answers = lambda number: [(429, {}), (503, {}), (200, completion("", reason="length"))][number]
    reply = reply_of(chat)
    assert (reply.content, reply.finish_reason, len(chat.requests)) == ("", "length", 3)


def test_an_endpoint_that_stays_busy_is_named_when_the_time_is_up() -> None:
    chat = FakeChat()
    chat.answers = lambda number: (503, {"error": "come back later"})
    with pytest.raises(DeadlineExceeded, match=r"waits .* for an answer from http.*503 .*come back later"):
        reply_of(chat, timeout_s=0.05)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [(400, {"error": "This model's maximum context length is 8 tokens"}, "overlong_prompt"),
     (422, {"error": "bad schema"}, "engine"), (200, {"choices": []}, "engine"), (200, {"surprise": 1}, "engine")],
)  # fmt: skip
def test_a_question_that_an_endpoint_cannot_answer_costs_only_its_rollout(status: int, body: Any, kind: str) -> None:
    chat = FakeChat()
    chat.answers = lambda number: (status, body)
    reply = reply_of(chat)
    assert (reply.error_kind, reply.content) == (kind, None)
