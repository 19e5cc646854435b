"""`trireme VERB` and `rl`: what ends a command, what is typed after a flag, and what is written before a start."""

import errno
import io
import json
import os
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from trireme.base.errors import ConfigError
from trireme.cli.command import run_command
from trireme.cli.rl import rl, write_configs
from trireme.cli.trireme import VERBS, trireme
from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig

ROOT = Path(__file__).parents[3]
LIST = [sys.executable, "-m", "trireme.cli.trireme", "env", "list"]


def test_help_names_every_verb_with_a_line_and_so_does_no_verb_at_all(capsys):
    for argv, code in ((["--help"], 0), ([], 2)):
        with pytest.raises(SystemExit, match=str(code)):
            trireme(argv)
    lines = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    assert all(lines.count([name, verb.line]) == 2 for name, verb in VERBS.items())
    with pytest.raises(ConfigError, match=r"no `trireme audti` - expected one of .*Did you mean `trireme audit`\?"):
        trireme(["audti", "outputs/run"])


def test_the_version_is_that_of_the_project_file(capsys):
    assert trireme(["--version"]) == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"trireme {project['version']}\n"


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_help_of_its_own(name, capsys):
    with suppress(SystemExit):
        assert trireme([name, "--help"]) == 0
    assert f"usage: trireme {name}" in capsys.readouterr().out


def test_user_error_is_one_line_without_a_traceback(monkeypatch, capsys, tmp_path):
    (file := tmp_path / "file").touch()
    example = str(ROOT / "configs" / "reverse-text" / "rl.toml")
    monkeypatch.setattr("sys.argv", ["rl", "@", example, "--output-dir", str(file), "--dry-run"])

    def fail(error: Exception) -> int:
        raise error

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")
    odd = ConfigError("a name that a run's folder has: \x1b[2J")
    for main, words in (
        (rl, f"rl: {file}"),
        (lambda _: fail(full), "rl: model.safetensors: No space left on device - expected free space"),
        (lambda _: fail(odd), "rl: a name that a run's folder has: ␛[2J\n"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run_command("rl", main)
        shown = capsys.readouterr().err
        assert (shown.startswith(words), shown.count("\n")) == (True, 1)
    with pytest.raises(OSError, match="of an unknown cause"):
        run_command("rl", lambda _: fail(OSError("of an unknown cause")))


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (b"lat\xe9in", {}, "rl: b'lat\\xe9in' is not UTF-8 - expected UTF-8"),
        ("latéin".encode(), {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, "Set LC_ALL=C.UTF-8"),
    ],
    ids=["Latin-1", "another locale"],
)
@pytest.mark.parametrize("where", ["argument", "TRIREME_NAME", "folder"])
def test_a_name_that_is_not_utf_8_is_refused_in_one_line(tmp_path, name, settings, words, where):
    os.mkdir(folder := os.path.join(os.fsencode(tmp_path), name))
    argument = [name] if where == "argument" else []
    variables = os.environb | {key.encode(): value.encode() for key, value in settings.items()}
    variables |= {where.encode(): name} if where == "TRIREME_NAME" else {}
    here = folder if where == "folder" else tmp_path
    command = [sys.executable, "-m", "trireme.cli.rl", *argument]
    ended = subprocess.run(command, cwd=here, env=variables, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert words.removeprefix("rl: b'" if where == "folder" else "") in ended.stderr


def test_broken_standard_output_gets_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    no_room = "trireme: its output cannot be written: No space left on device"
    for output, code, words in ((os.open("/dev/full", os.O_WRONLY), 2, no_room), (writing, 141, "")):
        done = subprocess.run(LIST, stdout=output, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60)
        os.close(output)
        assert (done.returncode, done.stderr[: len(no_room)], done.stderr.count("\n")) == (code, words, int(code == 2))


def test_a_character_that_the_terminal_cannot_show_ends_no_command(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    with pytest.raises(SystemExit, match="0"):
        run_command("rl", lambda _: print("trainer died: \u201cquoted\u201d \udc80"))
    assert shown.getvalue() == b"trainer died: \\u201cquoted\\u201d \\udc80\n"


def test_a_verb_for_rl_runs_says_of_an_sft_run_what_it_is(tmp_path):
    (tmp_path / "configs").mkdir()
    write_run(SftConfig.model_validate({"output_dir": str(tmp_path)}), tmp_path / "configs" / "run.json")
    for verb in ("status", "audit", "replay"):
        with pytest.raises(ConfigError, match=r"run\.json is that of an `sft` run - expected one of `rl`"):
            trireme([verb, str(tmp_path)])


def test_changed_settings_of_a_resumed_run_are_reported(tmp_path, capsys):
    def write(**values: Any) -> str:
        write_configs(RunConfig.model_validate({"output_dir": str(tmp_path)} | values), tmp_path)
        return capsys.readouterr().out

    assert [write(seed=1), write(seed=1)] == ["", ""]
    shown = write(seed=2, ports={"batches": 4000})
    assert shown.startswith(f"other settings than before (those are in {tmp_path}/run.earlier-1.json):")
    assert ("seed: 1 -> 2" in shown, "ports" in shown) == (True, False)  # where it runs is no matter
    seeds = {path.name: json.loads(path.read_text())["seed"] for path in tmp_path.glob("run*.json")}
    assert seeds == {"run.json": 2, "run.earlier-1.json": 1}
    write(seed=2, orchestrator={"eval": {"interval": 5}})
    lines = [line for line in write(seed=2).splitlines() if "orchestrator.eval" in line]
    assert lines == ["  orchestrator.eval: a table -> none, from step 0 on"]
    write(orchestrator={"env": [{"id": "e", "args": {"judge_api_key": "sk-secret"}}]})
    write(seed=2)
    (secret,) = (path for path in tmp_path.glob("run.earlier-*.json") if "sk-secret" in path.read_text())
    assert secret.stat().st_mode & 0o777 == 0o600
