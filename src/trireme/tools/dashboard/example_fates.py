"""What became of every example of a run, and of the rollouts of every batch: counted in the table of rollouts."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from trireme.tools.dashboard.rollout_table import DROPPED, MASKED, TRAINED, RolloutTable

SORTS = ("env", "example", "groups", "trained", "masked", "dropped", "first_reward", "last_reward", "mean", "last_step")
OPEN = "open"
MOST_KINDS = 8  # of reasons, shown one by one

EXAMPLES = """
SELECT env, example, count(*) AS groups, sum(trained) AS trained, sum(masked) AS masked, sum(dropped) AS dropped,
    avg(mean) AS mean, max(step) AS last_step,
    (SELECT mean FROM groups AS one WHERE one.env = groups.env AND one.example = groups.example AND mean IS NOT NULL
        ORDER BY step, grp LIMIT 1) AS first_reward,
    (SELECT mean FROM groups AS one WHERE one.env = groups.env AND one.example = groups.example AND mean IS NOT NULL
        ORDER BY step DESC, grp DESC LIMIT 1) AS last_reward,
    group_concat(DISTINCT nullif(why, '')) AS why
FROM groups WHERE (?1 = '' OR env = ?1) GROUP BY env, example
"""
NAMES = (*SORTS[:6], "mean", "last_step", "first_reward", "last_reward", "why")


class Examples(NamedTuple):
    """One page of them."""

    rows: list[dict[str, Any]]
    total: int


class Totals(NamedTuple):
    """Of rollouts, but for `examples` and `open_groups`.

    Example:
        Totals(trained=1200, masked=4, dropped={"no signal": 80}, open_groups=16, examples=310, of=1000)
    """

    trained: int
    masked: int
    dropped: dict[str, int]  # by kind of reason, most frequent first
    open_groups: int
    examples: int  # that were begun and have a fate
    of: int  # training examples of all environments


def examples(
    table: RolloutTable,
    *,
    env: str = "",
    sort: str = "example",
    backwards: bool = False,
    limit: int = 50,
    offset: int = 0,
) -> Examples:
    """What has no value comes last, either way round."""
    assert sort in SORTS, sort
    direction = "DESC" if backwards else "ASC"
    order = f"ORDER BY {sort} IS NULL, {sort} {direction}, env, example LIMIT {int(limit)} OFFSET {int(offset)}"
    rows = [dict(zip(NAMES, row, strict=True)) for row in table.ask(f"{EXAMPLES} {order}", (env,))]
    found = "SELECT count(*) FROM (SELECT DISTINCT env, example FROM groups WHERE (?1 = '' OR env = ?1))"
    waiting = {(name, example) for _, name, example in open_groups(table)}
    for row in rows:
        row[OPEN] = (row["env"], row["example"]) in waiting
    return Examples(rows, table.ask(found, (env,))[0][0])


def groups_of(table: RolloutTable, env: str, example: int) -> list[dict[str, Any]]:
    """The fates of its groups, in the order in which they were decided; those that are open last."""
    names = ("step", "grp", "fate", "trained", "masked", "dropped", "mean", "low", "high", "why")
    sql = f"SELECT {', '.join(names)} FROM groups WHERE env = ? AND example = ? ORDER BY step, grp"
    decided = [dict(zip(names, row, strict=True)) for row in table.ask(sql, (env, example))]
    still = [id for id, name, number in open_groups(table) if (name, number) == (env, example)]
    return decided + [dict.fromkeys(names) | {"grp": id, "fate": OPEN} for id in still]


def open_groups(table: RolloutTable) -> list[tuple[int, str, int]]:
    """Number, environment and example of those that the newest batch leaves open."""
    newest = table.ask("SELECT open_groups FROM batches ORDER BY step DESC LIMIT 1")
    return [(id, env, example) for id, env, example in json.loads(newest[0][0])] if newest else []


def totals(table: RolloutTable) -> Totals:
    counts = table.ask("SELECT fate, kind, count(*) FROM rollouts GROUP BY fate, kind ORDER BY count(*) DESC, kind")
    sizes = table.ask("SELECT sizes FROM batches WHERE sizes != '{}' ORDER BY step DESC LIMIT 1")
    return Totals(
        trained=sum(count for fate, _, count in counts if fate == TRAINED),
        masked=sum(count for fate, _, count in counts if fate == MASKED),
        dropped={kind: count for fate, kind, count in counts if fate == DROPPED},
        open_groups=len(open_groups(table)),
        examples=table.ask("SELECT count(*) FROM (SELECT DISTINCT env, example FROM groups)")[0][0],
        of=sum(json.loads(sizes[0][0]).values()) if sizes else 0,
    )


def by_step(table: RolloutTable) -> tuple[list[int], dict[str, list[int]]]:
    """For each batch how many rollouts came to each fate; of the dropped for which kind of reason."""
    counts = table.ask("SELECT step, fate, kind, count(*) FROM rollouts GROUP BY step, fate, kind")
    steps = table.steps()
    places = {step: place for place, step in enumerate(steps)}
    often = list(totals(table).dropped)[:MOST_KINDS]
    found: dict[str, list[int]] = {name: [0] * len(steps) for name in (TRAINED, MASKED, *often, "other reasons")}
    for step, fate, kind, count in counts:
        name = fate if fate != DROPPED else kind if kind in often else "other reasons"
        found[name][places[step]] += count
    return steps, {name: values for name, values in found.items() if name == TRAINED or any(values)}
