"""Agent programs as their authors publish them play rollouts, and every token that is trained on was sampled."""

import json
import shutil
import subprocess

import pytest

from support.runs.agent_play import ENDS, assert_exact, calls, player
from trireme.orchestrator.rollout.driver import RolloutOutcome
from trireme.orchestrator.rollout.runner import RolloutSpec

pytestmark = pytest.mark.slow

PYTHON_CLIENTS = ("mini-swe-agent==2.4.6", "mcp==2.3.0", "openai-agents==0.24.0")
NODE_CLIENTS = ("@openai/codex@0.169.0", "@anthropic-ai/claude-code@2.1.197", "opencode-ai@1.18.33")
COMMANDS = ("pwd", "echo 'a  b'; seq 3", "echo 5 > sum.txt", "cat sum.txt")


@pytest.fixture(scope="module")
def python_clients(tmp_path_factory):
    folder = tmp_path_factory.mktemp("python clients")
    subprocess.run(["uv", "venv", "--quiet", folder], check=True)
    command = ["uv", "pip", "install", "--quiet", "--python", folder / "bin" / "python", *PYTHON_CLIENTS]
    if subprocess.run(command, check=False, cwd=folder).returncode:  # not here, where our own pins would count
        pytest.skip(f"cannot be installed here: {', '.join(PYTHON_CLIENTS)}")
    return folder / "bin"


@pytest.fixture(scope="module")
def node_clients(tmp_path_factory):
    if shutil.which("npm") is None:
        pytest.skip("there is no npm to install them with")
    folder = tmp_path_factory.mktemp("node clients")
    if subprocess.run(["npm", "install", "--silent", "--prefix", folder, *NODE_CLIENTS], check=False).returncode:
        pytest.skip(f"cannot be installed here: {', '.join(NODE_CLIENTS)}")
    return folder / "node_modules" / ".bin"


@pytest.fixture
def play(tmp_path):
    """Return what plays a rollout, and checks that each scripted turn is trained on as it was sampled."""

    def play(program, *texts, **agent):
        watches = []
        (rollout,), policy = player(tmp_path)(program, *texts, watches=watches, **agent)
        assert rollout.reward == 1.0, rollout.info
        assert_exact(rollout, policy, num_turns=len(texts))
        spec = RolloutSpec("train", 0, 0, name="0-0")
        found = watches[0].report([RolloutOutcome(spec, 1.0, rollout)])  # as `trireme env check` does
        assert (found.drift, found.continuing) == (0, len(texts) - 1)

    return play


def runs(tool, argument, *last, **more):
    """Return turns that run each of COMMANDS by a tool of the client."""
    return [*(calls(tool, **{argument: command}, **more) for command in COMMANDS), *(last or (ENDS,))]


def test_mini_swe_agent(play, python_clients):
    play(
        "",
        *runs("bash", "command", calls("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")),
        command=(str(python_clients / "mini"), "-m", "openai/policy", "-t", "{prompt}", "-y", "--exit-immediately",
                 "-o", "t.json"),
        env={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors",
             "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )  # fmt: skip


OPENAI_AGENTS = """
    import subprocess, sys
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_tracing_disabled(True)
    set_default_openai_api(sys.argv[1])

    @function_tool
    def bash(cmd: str) -> str:
        return subprocess.run(cmd, shell=True, capture_output=True, text=True).stdout

    print(Runner.run_sync(Agent("writer", instructions="Use bash.", tools=[bash], model="policy"), sys.argv[2]))
"""


@pytest.mark.parametrize("api", ["chat_completions", "responses"])
def test_openai_agents(play, python_clients, tmp_path, api):
    command = (str(python_clients / "python"), str(tmp_path / "agent.py"), api, "{prompt}")
    thinks = "<think>\nI use bash.\n</think>\n\n"
    play(OPENAI_AGENTS, *(thinks + turn for turn in runs("bash", "cmd")[:-1]), ENDS, command=command)


def test_codex(play, node_clients):
    provider = '{name = "trireme", base_url = "{base_url}", env_key = "OPENAI_API_KEY", wire_api = "responses"}'
    play(
        "",
        *runs("exec_command", "cmd"),
        command=(str(node_clients / "codex"), "exec", "--skip-git-repo-check",
                 "--dangerously-bypass-approvals-and-sandbox", "-c", "model=policy", "-c", "model_provider=trireme",
                 "-c", f"model_providers.trireme={provider}", "{prompt}"),
        env={"CODEX_HOME": "{folder}"},
    )  # fmt: skip


def test_claude_code(play, node_clients):
    play(
        "",
        *runs("Bash", "command", description="Write the sum"),
        command=(str(node_clients / "claude"), "--bare", "-p", "{prompt}", "--model", "policy", "--tools", "Bash",
                 "--dangerously-skip-permissions", "--no-session-persistence"),
        env={"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"},
    )  # fmt: skip


def test_opencode(play, node_clients, tmp_path):
    model = {"policy": {"name": "policy", "limit": {"context": 200_000, "output": 4096}}}
    options = {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "t", "options": options, "models": model}
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "opencode.json").write_text(json.dumps({"provider": {"t": provider}, "model": "t/policy"}))
    play(
        "", *runs("bash", "command", description="Write the sum"),
        command=(str(node_clients / "opencode"), "run", "--title", "t", "{prompt}"),
        env={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        workdir=str(tmp_path / "start"),
    )  # fmt: skip
