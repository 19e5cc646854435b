"""A table of rows decides what becomes of each key of another system."""

import tomllib
from typing import Any

import pytest

from trireme.base.errors import ConfigError
from trireme.config.run import RunConfig
from trireme.config.translation import (
    Refused,
    Row,
    nested,
    refused,
    renamed,
    spread,
    their_keys_named,
    translate,
    translate_over,
    value_at,
    with_comments,
)


def half(value: Any, table: dict[str, Any]) -> dict[str, Any] | str:
    if value < 0:
        raise Refused("expected a number of at least 0.")
    return {"seed": value // 2, "name": table.get("title", "untitled")} if value else "nothing to halve"


ROWS = (
    Row("steps", "max_steps"),
    Row("double", half),
    Row("title", None, "in `double`"),
    Row("idle", None, "there is no such thing"),
    Row("idle.but", "seq_len"),
    Row("tasks", "orchestrator.env"),
    Row("orchestrator.env[].share", "orchestrator.env[].weight"),
    Row("orchestrator.env[].more", "orchestrator.env[].args"),
    Row("orchestrator.env[].more.*.limit", "orchestrator.env[].args.*.most"),
    refused("bad", "do without"),
    Row("*.anywhere", None, "known in every table"),
)


MADE = 'seed = 4, name = "untitled"'


@pytest.mark.parametrize(
    ("table", "ours"),
    [
        ({"steps": 3}, {"max_steps": 3}),
        ({"double": 4, "title": "x"}, {"seed": 2, "name": "x"}),
        ({"idle": {"a": 1, "but": 2}}, {"seq_len": 2}),
        ({"tasks": [{"share": 1}, {"id": "b"}]}, {"orchestrator": {"env": [{"weight": 1}, {"id": "b"}]}}),
        ({"tasks": {"id": "one"}}, {"orchestrator": {"env": [{"id": "one"}]}}),
        (
            {"tasks": [{"more": {"a": {"limit": 1, "0": {"x": 2}}}}]},
            {"orchestrator": {"env": [{"args": {"a": {"most": 1, "0": {"x": 2}}}}]}},
        ),
        ({"trainer": {"anywhere": 1}, "seed": 5}, {"seed": 5}),
        ({"inference": {"args": {"0": 1, "1": 2}}}, {"inference": {"args": {"0": 1, "1": 2}}}),
    ],
)
def test_keys_are_moved_by_rows_and_pass_where_they_are_ours(table, ours):
    found = translate(table, ROWS, root=RunConfig)
    assert (found.table, found.problems) == (ours, [])


def test_without_a_configuration_only_keys_with_a_row_are_taken():
    found = translate({"steps": 3, "seed": 1, "deep": {"other": 2}}, ROWS)
    assert found.table == {"max_steps": 3}
    assert found.unknown == [("seed",), ("deep",)]


def test_each_key_has_a_line_that_says_what_became_of_it():
    table = {"steps": 3, "double": 0, "idle": 1, "seed": 7, "token": "s3cret"}
    lines = [str(line) for line in translate(table, (*ROWS, Row("token", "name")), root=RunConfig).lines]
    assert lines[:3] == [
        "steps = 3 -> max_steps = 3",
        "double = 0 -> no effect: nothing to halve",
        "idle = 1 -> no effect: there is no such thing",
    ]
    assert lines[3] == "seed = 7"
    assert "s3cret" not in lines[4].partition(" -> ")[0]


def test_all_refusals_of_a_table_are_found_together():
    found = translate({"bad": 1, "double": -2}, ROWS, where="a.toml", root=RunConfig)
    assert found.problems == [
        "a.toml: `bad = 1` - do without",
        "a.toml: `double = -2` - expected a number of at least 0.",
    ]


def test_value_of_a_wrong_type_is_refused_under_its_key():
    (problem,) = translate({"double": "x"}, ROWS, where="a.toml").problems
    assert problem.startswith('a.toml: `double = "x"` - it, or a key that it is computed with, has a wrong value')


def test_row_of_several_keys_holds_for_each():
    rows = spread(Row("a.{b c} d", "x.{}", "why"), [Row("e", None)])
    assert [(row.theirs, row.ours) for row in rows] == [("a.b", "x.b"), ("a.c", "x.c"), ("d", "x.d"), ("e", None)]


def test_given_key_counts_more_than_a_default_under_another_name():
    found = translate_over({"steps": 3, "double": 8}, {"max_steps": 4}, ROWS, where="f", system="S", root=RunConfig)
    assert (found.table, found.problems) == ({"max_steps": 4, "seed": 4, "name": "untitled"}, [])
    assert [str(line) for line in found.lines] == ["max_steps = 4", f"double = 8 -> {MADE}: the default of S"]


@pytest.mark.parametrize(("second", "count"), [(4, 1), (3, 0)])
def test_two_names_of_one_key_must_agree(second, count):
    found = translate({"steps": 3, "max_steps": second}, ROWS, root=RunConfig)
    assert len(found.problems) == count


def test_error_about_a_key_names_the_one_that_gave_it_last():
    lines = [
        *translate({"steps": 3}, ROWS, where="a.toml").lines,
        *translate({"steps": 4}, ROWS, where="--steps").lines,
    ]
    with pytest.raises(ConfigError, match=r"too many\n`max_steps` is `--steps` here\.$"), their_keys_named(lines):
        raise ConfigError("`max_steps` = 4 are too many")
    with pytest.raises(ConfigError, match=r"^other\.max_steps$"), their_keys_named(lines):
        raise ConfigError("other.max_steps")


def test_name_here_of_a_key_is_found_without_its_value():
    assert renamed(("tasks", "1", "share"), ROWS, RunConfig) == ("orchestrator", "env", "1", "weight")
    assert renamed(("seed",), ROWS, RunConfig) == ("seed",)
    assert renamed(("double",), ROWS, RunConfig) is None


def test_nested_tables_are_the_inverse_of_paths():
    settings = {("a", "b"): 1, ("c", "0", "d"): 2, ("c", "2", "d"): {"0": 3}}
    assert nested(settings) == {"a": {"b": 1}, "c": [{"d": 2}, {}, {"d": {"0": 3}}]}
    assert value_at(nested(settings), ("c", "2", "d", "0")) == 3


def test_what_is_printed_is_read_back_as_the_same():
    found = translate({"steps": 3, "idle": 1}, ROWS, root=RunConfig)
    config = RunConfig.model_validate(found.table)
    text = with_comments(config, found.lines)
    assert tomllib.loads(text) == {"max_steps": 3}
    assert text.startswith("# steps = 3 -> max_steps = 3\n# idle = 1 -> no effect: there is no such thing\n")
