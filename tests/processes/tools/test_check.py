"""`trireme env check`, by a script, a fake engine or a fake chat endpoint; and `env init`, `install` and `list`."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from support.engines.fake_chat import FakeChat, served
from support.engines.fake_engine import Asked, open_fake_engine
from support.models.tiny_tokenizer import END, write_tokenizer
from support.runs.local_packages import write_package
from support.runs.toy_environments import ECHO, write
from trireme.base.errors import ConfigError
from trireme.base.token import TOKEN
from trireme.orchestrator.environments.venv import find_environment
from trireme.orchestrator.rollout.runner import RolloutSpec
from trireme.orchestrator.session.wire import Ask
from trireme.tools.environments.catalog import KINDS, checked_name, list_environments
from trireme.tools.environments.env import command as env
from trireme.tools.policies.script import answer

REPOSITORY = Path(__file__).parents[3]
HELD_OUT = """
    def eval_dataset():
        return [{"prompt": "held out", "answer": "yes"}] * 3
"""
PLAIN = "def dataset():\n    return [{'prompt': 'p'}]\n\n\ndef reward(completion):\n    return 1.0\n"


@pytest.fixture
def here(here, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    return here


def checked(capsys, *words: str | int | Path) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = env(["check", *map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_an_environment_that_works_is_said_to_and_no_baseline_is_claimed(here, capsys):
    assert env(["check", write(here, ECHO + HELD_OUT), "-n", "5", "-r", "6"]) == 0
    said = capsys.readouterr().out
    assert "5 train examples x 6: 30 scored, none failed" in said
    assert "20 to train on, 3 held out" in said
    assert "no baseline was measured" in said
    written = (here / "outputs" / "env-check" / "toy" / "rollouts.jsonl").read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    expected = [(example, place) for example in (0, 4, 8, 12, 16) for place in range(6)]
    assert [(line["example"], line["rollout"]) for line in lines] == expected
    assert any(line["completion"][0]["content"] == "" for line in lines)


def test_env_check_reports_each_failure_with_its_examples(here, capsys):
    code = """
    def reward(completion, answer):
        import asyncio
        return {"1": float("nan"), "2": asyncio.sleep(60)}.get(answer) or 1 / (int(answer) % 4)
    """
    write(here, ECHO.replace("size=20", "size=20, word='say'") + code)
    table = 'id = "toy.py"\nname = "toy"\nargs = { size = 6, word = "tell" }\nrollout_timeout_s = 0.5\n'
    (here / "run.toml").write_text(f'name = "demo"\n[[orchestrator.env]]\n{table}')
    status, report = checked(capsys, "toy", "-n", 8, "-r", 2, "-a", '{"size": 8}', "@", "run.toml")
    assert (status, report["holds"], report["num_done"]) == (1, False, 8)
    assert (report["loaded"]["num_train"], report["num_examples"]) == (8, 8)  # the flag wins
    assert (here / "outputs" / "env-check" / "demo" / "rollouts.jsonl").exists()
    assert not report["is_baseline"]  # the file names no model
    assert report["troubles"][0]["count"] == 4  # the most frequent first
    troubles = {trouble.pop("stage") + str(trouble["count"]): trouble for trouble in report["troubles"]}
    found = {name: (trouble["examples"], trouble["error"].split(" - ")[0]) for name, trouble in troubles.items()}
    assert found == {
        "score4": ([0, 4], "ZeroDivisionError: division by zero"),
        "score2": ([1], "RewardError: Reward function `reward` returned nan"),
        "timeout2": ([2], "not finished after 0.5 s (`rollout_timeout_s`)"),
    }
    assert "1 / (int(answer) % 4)" in troubles["score4"]["traceback"]


COMPARING = """
    def dataset():
        return [{"prompt": f"say {i}"} for i in range(4)]

    def reward(completions):
        longest = max(map(len, completions))
        return [len(completion) / longest for completion in completions]
"""


def test_rewards_that_compare_a_group_are_given_whole_groups(here, capsys):
    status, report = checked(capsys, write(here, COMPARING), "-r", 6, "--split", "eval")
    assert (status, report["num_done"], report["rewards"]["most"], report["split"]) == (0, 24, 1.0, "train")


def test_an_environment_that_cannot_be_loaded_is_the_checks_result(here, capsys):
    status, report = checked(capsys, write(here, "def load_environment():\n    raise RuntimeError('no data')\n"))
    assert (status, report["holds"]) == (1, False)
    assert "RuntimeError: no data" in report["error"]


def test_the_script_calls_tools_with_right_wrong_and_unreadable_arguments():
    parameters = {"properties": {"a": {"type": "integer"}, "b": True}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    question = Ask(task="t", call="c", messages=[{"role": "user", "content": "q"}], sampling={}, tools=tools)
    specs = [RolloutSpec("train", 0, place, name=f"0-{place}") for place in range(10)]
    replies = [answer(question, spec, turn=1) for spec in specs]
    called = [[(call.name, call.arguments) for call in reply.tool_calls] for reply in replies if reply.tool_calls]
    right = ("add", '{"a": 7, "b": "sea"}')
    assert called == [[right], [("add", "{}")], [("add", '{"unfinished": ')], [right, ("no_such_tool", "{}")]]
    assert {"", "q"} < {reply.content for reply in replies}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["tyo.py"], "names a file that does not exist"),
        (["toy.py", "--model", "models/gone"], "models/gone"),
        (["toy.py", "--base-url", "http://127.0.0.1:9/v1"], "nothing answers at http://127.0.0.1:9/v1"),
        (["toy.py", "--output", "run"], "run is a run's folder"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(here, words, problem):
    write(here, "raise SystemExit('it was loaded')\n")
    (here / "run" / "journal").mkdir(parents=True)
    with pytest.raises(ConfigError, match=problem):
        env(["check", *words])
    assert not (here / "outputs").exists()


def test_an_engine_that_serves_no_version_answers_as_in_training(here, capsys):
    """Rewards by hand: the engine answers `a` on every second request, and only that is rewarded."""
    model = write_tokenizer(here / "model")
    letter = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id
    toy = write(here, ECHO + "\n    def reward(completion, answer): return float('a' in completion)\n")

    def every_second(asked: Asked) -> list[int]:
        return [letter("a" if asked.number % 2 else "b"), letter("c"), END]

    with served(lambda: open_fake_engine(end=END, answer=every_second)) as engine:
        words = ["-n", 10, "-r", 4, "--base-url", engine.url, "--model", str(model), "--seq-len", "64"]
        status, report = checked(capsys, toy, *words, "--temperature", "0.5", "--max-tokens", "7")
    sampled = {(asked.sampling["temperature"], asked.sampling["max_tokens"]) for asked in engine.requests}
    assert (sampled, any("seed" in asked.sampling for asked in engine.requests)) == ({(0.5, 7)}, False)
    assert (status, report["num_done"], len(engine.requests)) == (0, 40, 40)
    assert report["is_baseline"]
    assert report["rewards"]["mean"] == pytest.approx(0.5)
    assert report["lengths"]["tokens in all"] > report["lengths"]["tokens sampled"] == 3.0
    assert "temperature 0.5" in report["policy"]


def test_a_foreign_endpoint_is_asked_with_its_key_and_its_only_model(here, capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret-words")
    with FakeChat().running() as chat:
        words = ["--base-url", chat.url, "--api-key-var", "MY_KEY", "--split", "eval", "--temperature", "0.25"]
        status, report = checked(capsys, write(here, ECHO + HELD_OUT), "-r", 3, *words)
    assert (status, report["split"], report["num_done"], report["rewards"]["mean"]) == (0, "eval", 9, 1.0)
    assert chat.keys == {"Bearer secret-words"}
    assert {(body["model"], body["temperature"]) for body in chat.requests} == {("grand-model", 0.25)}
    assert report["lengths"] == {"turns": 1.0, "tokens sampled": 2.0, "tokens in all": 12.0}
    assert "secret-words" not in json.dumps(report)
    monkeypatch.setenv(TOKEN, "the token of this machine")
    with FakeChat().running() as chat:
        assert checked(capsys, "toy.py", "-n", 1, "-r", 1, "--base-url", chat.url)[0] == 0
    assert chat.keys == {"Bearer the token of this machine"}


@pytest.mark.parametrize("name", ["My Env!", "2048", "json", "class", "", "x" * 61])
def test_a_name_that_will_not_do_is_refused(name):
    with pytest.raises(ConfigError, match="cannot be the name of an environment"):
        checked_name(name)
    assert checked_name("x" * 60) == "x" * 60


@pytest.mark.parametrize("kind", KINDS)
def test_env_init_package_has_the_pins_of_shipped_packages(here, capsys, kind):
    name = f"try-{kind}"
    assert env(["init", f"try_{kind}", "--kind", kind]) == 0
    source = find_environment(name)
    assert (source.kind, source.module) == ("package", name.replace("-", "_"))
    written = tomllib.loads((source.folder / "pyproject.toml").read_text())
    shipped = tomllib.loads((REPOSITORY / "environments/reverse_text/pyproject.toml").read_text())
    for project in (written, shipped) if kind == "plain" else ():
        project["project"]["dependencies"] = []
    assert written["build-system"] == shipped["build-system"]
    assert all(written["project"][key] == shipped["project"][key] for key in ("dependencies", "requires-python"))
    texts = {file.name: file.read_text() for file in source.folder.iterdir()}
    assert sorted(texts) == ["README.md", "pyproject.toml", f"{source.module}.py"]
    [entry] = list_environments(here / "environments")
    assert (entry.id, entry.state) == (name, "not yet")
    if kind == "plain":
        status, report = checked(capsys, source.folder / f"{source.module}.py", "-r", 2)
        assert (status, report["num_done"], report["loaded"]["num_train"]) == (0, 40, 200)


@pytest.mark.parametrize("there", ["my_env", "my-env", "my_env.py"])
def test_nothing_is_overwritten(here, there):
    (here / "environments" / there).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"exists already - .*my-env-2"):
        env(["init", "my-env"])
    assert list((here / "environments").rglob("*")) == [here / "environments" / there]


def test_an_environment_is_installed_once_and_found_offline_from_then_on(here, monkeypatch, capsys):
    root = here / "environments"
    write_package(root, "verifiers", "__version__ = '0'\n")
    needs_verifiers = {"verifiers": '{ path = "../verifiers" }'}
    write_package(root, "toy", PLAIN + "raise SystemExit('imported')\n", sources=needs_verifiers)
    assert env(["install", "owner/toy"]) == 0
    said, place = capsys.readouterr().out.strip().split(", in ")
    assert said.startswith("owner/toy installed in ")
    assert place.startswith(str(here / "cache" / "trireme" / "environments" / "toy-"))
    monkeypatch.setenv("PATH", "/nowhere")  # no uv any more
    monkeypatch.delenv("UV", raising=False)
    assert env(["install", "toy", "--path", "environments"]) == 0
    assert f"installed already, in {place}" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="uv was not found"):
        env(["install", "toy", "--again"])
    assert {entry.id: entry.state for entry in list_environments(root)} == {"toy": "installed", "verifiers": "not yet"}
    (here / "file.py").write_text(PLAIN)
    assert env(["install", "file.py"]) == 0
    assert "needs no virtual environment of its own" in capsys.readouterr().out


def test_the_list_shows_packages_and_files_and_imports_none(here, capsys):
    root = here / "environments"
    (root / "examples").mkdir(parents=True)
    write_package(root, "toy", PLAIN + "raise SystemExit('imported')\n")
    (root / "examples" / "shout.py").write_text('"""Sh\x1b[2Jout.\n\nMore."""\n' + PLAIN)
    (root / "examples" / ".#shout.py").symlink_to("owner@host.42")  # of an editor that has it open
    (root / "examples" / "program.py").write_text("raise SystemExit('imported')\n")
    (root / "broken").mkdir()
    (root / "broken" / "pyproject.toml").write_text("[project\n")
    assert env(["list"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    found = {Path(line.split()[0]).name: line.split(None, 1)[1] for line in lines}
    assert found.keys() == {"toy", "shout.py", "broken"}
    assert found["toy"].startswith("not yet")
    assert found["shout.py"].endswith("Sh␛[2Jout.")
    assert "no readable [project] name" in found["broken"]
