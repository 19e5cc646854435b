"""`trireme VERB`: one command for what can be done with a run on disk."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trireme.base.errors import ConfigError
from trireme.cli.trireme import VERBS, Verb, trireme

DEADLINE_S = 60


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_names_every_verb_with_a_line(word, capsys):
    assert trireme([word]) == 0
    said = capsys.readouterr().out
    assert set(VERBS) >= {"audit"}
    for name, verb in VERBS.items():
        assert any(line.split(None, 1) == [name, verb.line] for line in said.splitlines())


def test_no_verb_at_all_shows_the_same_and_is_not_a_success(capsys):
    assert trireme([]) == 2
    assert "usage: trireme VERB" in capsys.readouterr().out


def test_an_unknown_verb_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ConfigError, match=r"no `trireme audti` - expected one of .*Did you mean `trireme audit`\?"):
        trireme(["audti", "outputs/run"])
    with pytest.raises(ConfigError, match="See `trireme --help`"):
        trireme(["xyzzy"])


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_a_door_and_help_of_its_own(name, capsys):
    assert callable(Verb.door(name))
    with pytest.raises(SystemExit) as ended:
        trireme([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: trireme {name}" in capsys.readouterr().out


def test_the_command_ends_with_2_and_one_line_where_the_folder_is_no_run(tmp_path):
    command = [sys.executable, "-m", "trireme.cli.trireme", "audit", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert done.stderr.startswith(f"trireme: {tmp_path} is not a run's folder")
    assert "Traceback" not in done.stderr
