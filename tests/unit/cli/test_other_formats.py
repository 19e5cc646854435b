"""`vf-rl`, `prime-rl` and the `vf-` names: what is typed there, and what is started for it."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
import tomllib
from pathlib import Path

import pytest

from support.processes.stage import until
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.base.processes import free_port
from trireme.cli import other_formats, vf_commands
from trireme.cli.other_formats import run_translated, set_variables
from trireme.config.load import load_run_config, read_as
from trireme.config.run import RunConfig
from trireme.launch.plan import Plan
from trireme.tools.formats.run_file import read_run_file, resolve_run

REPOSITORY = Path(__file__).resolve().parents[3]
CPU = Devices((), 4)

ENV = 'env = { id = "reverse-text" }\n'
VF = f'model = "models/reverse-text-tiny"\n{ENV}inference = {{ gpus = 1 }}\n'
VF += "trainer = { gpus = 1, args = { batch_size = 64, max_tokens = 16, max_seq_len = 128 } }\n"
FLAT = f'model_name = "models/reverse-text-tiny"\nnum_gpus = 2\n{ENV}sampling = {{ max_tokens = 16 }}\n'


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def vf_file(tmp_path):
    (file := tmp_path / "vf.toml").write_text(VF)
    return str(file)


@pytest.fixture
def flat_file(tmp_path):
    (file := tmp_path / "flat.toml").write_text(FLAT)
    return str(file)


def test_printed_vf_rl_translation_loads_as_a_run_configuration(vf_file, capsys):
    flags = ["--print-config", "--max-steps", "3", "--trainer.args.temperature", "0.9", "--no-restart"]
    flags += ["--orchestrator.eval.num-examples", "none"]  # not the default, which is 100
    assert run_translated("vf-rl", ["@", vf_file, *flags]) == 0
    printed = capsys.readouterr().out
    config = read_as(RunConfig, tomllib.loads(printed), where="printed")
    assert (config.orchestrator.batch_size, config.max_steps, config.supervisor.restart) == (64, 3, False)
    assert config.orchestrator.sampling.temperature == 0.9
    assert config.orchestrator.eval is not None
    assert config.orchestrator.eval.num_examples is None
    assert "# trainer.args.batch_size = 64 -> orchestrator.batch_size = 64" in printed
    assert "# --max-steps 3 was typed" in printed


def test_prime_rl_flags_apply_to_a_flat_file_with_or_without_at_sign(flat_file, capsys):
    flags = ["--max-steps", "3", "--model-name", "other/model", "--sampling.top-p", "0.9"]
    for argv in ([flat_file], ["@", flat_file]):
        assert run_translated("prime-rl", [*argv, "--print-config", *flags]) == 0
        table = tomllib.loads(capsys.readouterr().out)
        assert (table["max_steps"], table["model"]["name"]) == (3, "other/model")
        assert table["orchestrator"]["sampling"]["top_p"] == 0.9


def test_what_is_wrong_is_said_in_the_words_of_the_file(vf_file):
    for flags, words in (
        ("--trainer.args.temprature 0.9", "--trainer.args.temperature"),
        ("--trainer.args.batch-size 100", f"`orchestrator.batch_size` is `trainer.args.batch_size` in {vf_file}"),
        ("--inference.args.dtype fp3", "`inference.model.dtype` is `inference.args.dtype`"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            resolve_run(read_run_file(["@", vf_file, *flags.split()], CPU, program="vf-rl", kinds=("vf-rl",)), CPU)


@pytest.mark.parametrize("typed", [["q_proj", "v_proj"], ["q_proj,v_proj"], ['["q_proj", "v_proj"]']])
def test_list_may_be_typed_in_each_way(vf_file, typed):
    argv = ["@", vf_file, "--trainer.args.lora-target-modules", *typed]
    lora = read_run_file(argv, CPU, program="vf-rl", kinds=("vf-rl",)).config.trainer.model.lora
    assert lora is not None
    assert lora.target_modules == ("q_proj", "v_proj")


def test_flag_into_an_array_needs_the_number_of_its_item(flat_file):
    def read(*flags: str) -> RunConfig:
        return read_run_file(["@", flat_file, *flags], CPU, program="prime-rl", kinds=("flat",)).config

    assert read("--env.0.weight", "2", "--name", "7").orchestrator.env[0].weight == 2
    Path(flat_file).write_text(f"{FLAT.replace(ENV, '')}[[env]]\nid = 'reverse-text'\n")
    with pytest.raises(ConfigError, match=r"--env\.0\."):
        read("--env.weight", "2")


def test_each_command_sends_other_formats_on(flat_file, vf_file):
    with pytest.raises(ConfigError, match=f"Type `prime-rl {flat_file}`"):
        run_translated("vf-rl", ["@", flat_file])
    with pytest.raises(ConfigError, match=f"Type `vf-rl @ {vf_file}`"):
        run_translated("prime-rl", [vf_file])
    with pytest.raises(ConfigError, match="takes one"):
        run_translated("vf-rl", [])


def test_keys_of_an_env_file_reach_the_run_and_the_shell_counts_more(flat_file, tmp_path, monkeypatch):
    Path(flat_file).write_text(f"env_file = ['nowhere.env']\n{FLAT}")
    with pytest.raises(ConfigError, match=r"nowhere\.env.* cannot be read"):
        run_translated("prime-rl", [flat_file, "--dry-run"])
    (tmp_path / "secrets.env").write_text("# keys\nMY_TEST_KEY=abc\nMY_OTHER_KEY='d e'\n")
    environ = {"MY_OTHER_KEY": "mine"}
    monkeypatch.setattr(os, "environ", environ)
    set_variables([tmp_path / "secrets.env"])
    assert environ == {"MY_TEST_KEY": "abc", "MY_OTHER_KEY": "mine"}


def test_flags_of_vllm_become_flags_of_inference():
    argv = ["--model", "m", "--port", "8007", "--max-model-len", "1024", "--enforce-eager", "--disable-log-requests"]
    flags = list(vf_commands.engine_flags([*argv, "--max-num-batched-tokens", "4096", "--dry-run"]))
    assert flags == [
        *("--model.name", "m", "--inference.server.port", "8007"),
        *("--inference.model.max-model-len", "1024", "--seq-len", "1024", "--inference.model.enforce-eager"),
        *("--inference.args.max-num-batched-tokens", "4096", "--dry-run"),
    ]


def test_environments_of_the_repository_need_no_fetching(monkeypatch, capsys):
    asked: list[list[str]] = []
    monkeypatch.setattr(vf_commands, "trireme", lambda argv: asked.append(argv) or 0)
    assert vf_commands.known_name("vf-nowhere") == "vf-nowhere"
    assert vf_commands.install(["vf-math-python", "--from-repo", "-p", "environments"]) == 0
    assert asked == [["env", "install", "math-python", "-p", "environments"]]
    assert "already" in capsys.readouterr().out


def test_a_file_can_be_served_by_one_command_and_trained_by_another(vf_file, tmp_path, monkeypatch):
    served: list[list[str]] = []
    started: list[tuple[list[str], RunConfig]] = []

    def supervise(plan: Plan, config: RunConfig, **_: object) -> int:
        started.append((list(plan), config))
        return 0

    monkeypatch.setattr("trireme.cli.inference.inference", served.append)
    monkeypatch.setattr("trireme.launch.supervise.supervise", supervise)
    argv = ["@", vf_file, "--trainer.args.vllm-server-port", str(free_port()), "--output-dir", str(tmp_path)]
    vf_commands.serve(argv)
    engine, _ = load_run_config(served[0], section="inference", program="inference")
    with socket.create_server(("127.0.0.1", int(argv[3]))):  # as the first would hold it
        assert run_translated("vf-train", argv) == 0
    names, config = started[0]
    assert names == ["orchestrator", "trainer"]
    assert engine.inference.server.port == config.inference.server.port == int(argv[3])
    assert engine.model.name == config.model.name


@pytest.fixture
def tmux(tmp_path, monkeypatch):
    """A server that knows nothing of this process's environment."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.delenv("TMUX", raising=False)
    subprocess.run(["tmux", "new-session", "-d", "-s", "another"], check=True)
    yield
    subprocess.run(["tmux", "kill-server"], check=False, capture_output=True)


def test_logs_are_above_the_run_and_the_run_has_this_shells_environment(tmux, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_TEST_KEY", "a 'b' c")
    wrote = tmp_path / "wrote"
    command = ["sh", "-c", f'echo "$MY_TEST_KEY" > {wrote}']
    assert other_formats.open_panes("mine.v1:2", RunPaths(tmp_path), ["inference"], command) == 0
    assert "tmux attach -t mine_v1_2" in capsys.readouterr().out
    shown = ["tmux", "list-panes", "-t", "=mine_v1_2", "-F", "#{pane_title}"]
    assert subprocess.check_output(shown, text=True).split() == ["inference", "run"]
    until(lambda: wrote.exists() and wrote.read_text() == "a 'b' c\n")


def test_tmux_panes_without_room_leave_no_session_behind(tmux, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="--one-terminal"):
        other_formats.open_panes("mine", RunPaths(tmp_path), list(map(str, range(50))), ["true"])
    assert list(tmp_path.glob("trireme-*")) == []
    assert subprocess.run(["tmux", "has-session", "-t", "=mine"], check=False, capture_output=True).returncode == 1


def test_without_tmux_or_a_terminal_there_is_one_terminal(monkeypatch):
    assert not other_formats.wants_panes(None)  # tests have no terminal
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert not other_formats.wants_panes("named")
