"""YAML files and Hydra's overrides are read as plain values, or refused by name."""

from pathlib import Path

import pytest

from trireme.base.errors import ConfigError
from trireme.config.arguments import OVERRIDE
from trireme.tools.formats.yaml_file import MOST_BYTES, read_overrides, read_yaml, resolve_interpolations


def test_numbers_that_yaml_takes_for_text_are_numbers(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("lr: 1e-6\nbig: 2E+3\nname: 1e\nversion: '1e-6'\n")
    assert read_yaml(file) == {"lr": 1e-6, "big": 2000.0, "name": "1e", "version": "1e-6"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: !!python/object/apply:os.system ['touch was_run']", "python/object"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("a: 1\na: 2", "`a` is there twice"),
        ("- 1\n- 2", "holds list"),
        ("a: [", "not YAML"),
        ("x" * (MOST_BYTES + 1), f"at most {MOST_BYTES}"),
    ],
)
def test_file_that_is_no_plain_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words.replace("`", ".")):
        read_yaml(tmp_path / "a.yaml")
    assert not (tmp_path / "was_run").exists()


def test_overrides_set_add_or_remove_keys_in_order():
    words = ["a.b=1e-3", "+a.c.d=[x, y]", "++a.e='1'", "~f.g", 'a.h=["console","wandb"]', "a.i=null", "a.j=", "a.b=2"]
    assert all(OVERRIDE.fullmatch(word) for word in words)
    assert read_overrides(words, {"f": {"g": 1, "h": 2}}) == {
        "f": {"h": 2},
        "a": {"b": 2, "c": {"d": ["x", "y"]}, "e": "1", "h": ["console", "wandb"], "i": None, "j": ""},
    }


def test_removing_a_key_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"~a\.b"):
        read_overrides(["~a.b"], {"a": {}})


@pytest.mark.parametrize("word", ["--max-steps", "20", "@", "file.yaml", "name=value", "x y.z=1"])
def test_other_words_are_no_overrides(word: str):
    assert not OVERRIDE.fullmatch(word)


def test_interpolations_are_resolved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DATA", "/data")
    table = {
        "a": {"n": 4, "same": "${a.n}", "beside": "${.n}", "path": "${oc.env:DATA}/x/${b}", "twice": "${a.same}"},
        "b": "${oc.select:missing.key,7}",
        "c": "${from_defaults}",
        "d": ["${oc.env:NOT_SET,none at all}"],
    }
    assert resolve_interpolations(table, {"from_defaults": True}, "f") == {
        "a": {"n": 4, "same": 4, "beside": 4, "path": "/data/x/7", "twice": 4},
        "b": 7,
        "c": True,
        "d": ["none at all"],
    }


@pytest.mark.parametrize(
    ("value", "words"),
    [("${missing}", "not in the file"), ("${now:%Y}", "now:%Y"), ("${a}", "circle"), ("x${a}", "circle")],
)
def test_interpolation_that_leads_nowhere_is_refused_by_name(value: str, words: str):
    with pytest.raises(ConfigError, match=f"`a`.*{words}|{words}"):
        resolve_interpolations({"a": value}, {}, "f.yaml")
