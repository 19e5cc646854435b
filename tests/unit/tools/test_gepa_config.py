"""What `trireme gepa` is made of: prompts, examples, feedback, the journal, and what is typed."""

import json
import tomllib
from pathlib import Path

from trireme.base.processes import free_port
from trireme.config.load import load_config
from trireme.tools.gepa.config import GepaConfig
from trireme.tools.gepa.gepa import command as gepa
from trireme.tools.gepa.gepa import to_flags

REPOSITORY = Path(__file__).parents[3]


def test_flags_mean_what_keys_of_a_file_mean(tmp_path):
    keys = {"env_id": "my-env", "model": "a/small", "reflection_model": "a/large", "max_calls": 1000}
    keys |= {"num_train": 200, "num_val": 90, "state_columns": ["parsed_answer", "tool_calls"]}
    (tmp_path / "my.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    begins, ends = "-m a/small -M a/large -B 1000", "-n 200 -N 90 --state-columns parsed_answer tool_calls"
    for typed in (
        f"run {tmp_path / 'my.toml'}",
        f"run my-env {begins} {ends}",
        f"{begins} my-env {ends}",
        f"my-env {begins.replace('-m ', '-m=')} {ends}",
    ):
        loaded, _ = load_config(to_flags(typed.split()), GepaConfig, program="trireme gepa")
        assert loaded == GepaConfig.model_validate(keys)


def test_every_shipped_file_loads(monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    for file in Path("configs/gepa").glob("*.toml"):
        assert gepa([str(file), "--dry-run", "-b", f"http://127.0.0.1:{free_port()}/v1"]) == 0
        env_id = tomllib.loads(capsys.readouterr().out)["env_id"]
        assert Path("environments", env_id.replace("-", "_")).exists()
    assert gepa([str(file), "--dry-run"]) == 0
