"""Files that a run writes of its configuration."""

import pytest

from support.runs.resolved_runs import resolved
from trireme.config.files import command_without_secrets, read_run, write_process_files, write_run
from trireme.tools.run_reader import RunReader


def test_secrets_among_arguments_are_for_the_owner_and_for_no_page(tmp_path):
    words = f"""--output-dir {tmp_path} --orchestrator.env '[{{id="a", args = {{judge_api_key="sk-1", size = 3}}}}]'"""
    for flags, mode in ((f"--output-dir {tmp_path}", 0o644), (words, 0o600)):
        config = resolved(flags)
        write_run(config, config.paths.run_config)
        files = [config.paths.run_config, *write_process_files(config, tmp_path, ("orchestrator",))]
        assert {file.stat().st_mode & 0o777 for file in files} == {mode}
        assert read_run(type(config), config.paths.run_config) == config
    text = str(RunReader(tmp_path).read_raw_config())
    assert "sk-1" not in text
    assert "judge_api_key" in text
    assert "size" in text


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--inference.args.hf-token", "s", "--name", "a"], ["--inference.args.hf-token", "…", "--name", "a"]),
        (["--dtype", "auto", "--hf-token", "s"], ["--dtype", "auto", "--hf-token", "…"]),
        (["--orchestrator.env.0.args.api_key=s"], ['--orchestrator.env.0.args.api_key="…"']),
        (['[{args = {judge_api_key = "s\\"s", size = 3}}]'], ['[{args = {judge_api_key = "…", size = 3}}]']),
        (["--model.name", "token", "{key='s'}"], ["--model.name", "token", '{key="…"}']),
    ],
)
def test_a_noted_command_line_shows_no_secret(words, shown):
    assert command_without_secrets(words) == shown
