"""From measured cells to the tables. Every figure is a median over seeds, with the least and the most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import mean, median
from typing import Any

from benchmarks.measuring import markdown_row, spread
from benchmarks.trl.cells import SIDES, Cell

WINDOW = 5  # steps whose mean reward counts as reached
GOALS = (0.9,)
BEGIN, END = "<!-- vs_trl -->", "<!-- /vs_trl -->"

Result = dict[str, Any]
Found = dict[str, dict[str, list[Result]]]  # {name: {side: results}}


def by_row(cells: list[Cell], results: list[Result]) -> dict[str, Found]:
    found: dict[str, Found] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for cell, result in zip(cells, results, strict=True):
        found[cell.row][cell.name][cell.side].append(result)
    return found


def smooth(result: Result) -> list[float]:
    """Return the mean reward of the last `WINDOW` steps; shorter at the beginning."""
    rewards = [step["reward"] for step in result["steps"]]
    return [mean(rewards[max(0, place - WINDOW + 1) : place + 1]) for place in range(len(rewards))]


def reached(result: Result, goal: float) -> Result | None:
    """Return the step after which the reward was there."""
    pairs = zip(result["steps"][WINDOW - 1 :], smooth(result)[WINDOW - 1 :], strict=True)
    return next((step for step, reward in pairs if reward >= goal), None)


def rate(result: Result) -> float:
    """Return the tokens of answers per second that were trained on."""
    return sum(step["tokens"] for step in result["steps"]) / (len(result["steps"]) * seconds_per_step(result))


def seconds_per_step(result: Result) -> float:
    """Return them from the first request on: what is generated ahead of the first step is paid for."""
    return (result["steps"][-1]["ended_s"] - result["first_s"]) / len(result["steps"])


def cpu_per_step(result: Result) -> float:
    return (result["steps"][-1]["cpu_s"] - result["first_cpu_s"]) / len(result["steps"])


# tables


def tables(found: dict[str, Found]) -> str:
    parts = {"b": _learning, "c": _spreads, "d": _delays, "e": _large}
    return "\n\n".join(part(found[row], found) for row, part in parts.items() if row in found)


def _learning(of_row: Found, _: Any) -> str:
    sides = of_row["reverse-text"]
    rows = [["", "Trireme", "TRL", "TRL / Trireme"]]
    for goal in GOALS:
        for name, measure in _until(goal).items():
            rows.append(_line(f"reward {goal:g}: {name}", sides, measure))
    rows.append(_line("start-up, seconds", sides, lambda r: r["first_s"] - r["began_s"]))
    rows.append(_line("seconds per step", sides, seconds_per_step))
    rows.append(_line("CPU seconds per step", sides, cpu_per_step))
    return f"(a) Reward against rollouts\n\n{_parity(sides)}\n\n(b) To a reward\n\n{_markdown(rows)}"


def _until(goal: float) -> dict[str, Callable[[Result], float | None]]:
    def after(key: str, since: str | None) -> Callable[[Result], float | None]:
        def measure(result: Result) -> float | None:
            step = reached(result, goal)
            return step[key] - (result[since] if since else 0.0) if step else None

        return measure

    return {
        "steps": after("step", None),
        "seconds": after("ended_s", "first_s"),
        "seconds, start-up too": after("ended_s", "began_s"),
        "CPU seconds, start-up too": after("cpu_s", None),
    }


def _parity(sides: dict[str, list[Result]]) -> str:
    """Return the table of the tenth and every 20th step: median and range over seeds, and whether the ranges meet."""
    curves = {side: [smooth(result) for result in results] for side, results in sides.items()}
    length = min(len(curve) for each in curves.values() for curve in each)
    rows = [["rollouts", "Trireme", "TRL", "ranges overlap"]]
    for place in sorted({9, *range(19, length, 20), length - 1}):
        ranges = {side: [curve[place] for curve in each] for side, each in curves.items()}
        low, high = max(map(min, ranges.values())), min(map(max, ranges.values()))
        cells = [_spread(ranges[side], ".3f") for side in SIDES]
        rows.append([f"{128 * (place + 1):,}", *cells, "yes" if low <= high else "no"])
    return f"{_markdown(rows)}\n\n{_prompts(sides)}"


def _prompts(sides: dict[str, list[Result]]) -> str:
    ours, theirs = ({tuple(ids) for result in sides[side] for ids in result["prompts"]} for side in SIDES)
    return f"Of {len(ours)} prompts that we trained on, {len(ours & theirs)} are, token by token, among theirs."


def _spreads(of_row: Found, _: Any) -> str:
    rows = [["standard deviation of lengths / mean", "Trireme, tokens/s", "TRL, tokens/s", "Trireme / TRL"]]
    rows += [_line(name, sides, rate, more_is_better=True) for name, sides in of_row.items()]
    said = "Ours has `max_async_level = 3`: others go on while the longest answers of a batch are made."
    return f"(c) As the spread of response lengths grows\n\n{_markdown(rows)}\n\n{said}"


def _delays(of_row: Found, found: dict[str, Found]) -> str:
    rows = [["an environment takes, per turn", "Trireme, seconds per step", "TRL, seconds per step", "TRL / Trireme"]]
    fast = {"0 s": found["b"]["reverse-text"]} if "b" in found else {}
    rows += [_line(name, sides, seconds_per_step) for name, sides in (fast | of_row).items()]
    said = "We generate on meanwhile: `max_async_level` is 1 at 0 s, 2 at 0.1 s, 4 at 1 s."
    return f"(d) Slow environments\n\n{_markdown(rows)}\n\n{said}"


def _large(of_row: Found, _: Any) -> str:
    rows = [["", "Trireme, tokens/s", "TRL, tokens/s", "Trireme / TRL"]]
    rows += [_line("20M parameters, 128 tokens", sides, rate, more_is_better=True) for sides in of_row.values()]
    return f"(e) A larger model, longer responses\n\n{_markdown(rows)}"


def _line(
    name: str,
    sides: dict[str, list[Result]],
    measure: Callable[[Result], float | None],
    *,
    more_is_better: bool = False,
) -> list[str]:
    """Return a row. Its ratio is above 1 if we are ahead: the median, the least and the most of each seed's pair."""
    values = {side: [measure(result) for result in sides[side]] for side in SIDES}
    pairs = [pair for pair in zip(*values.values(), strict=False) if None not in pair]
    ratios = [(a / b if more_is_better else b / a) for a, b in pairs]
    return [name, *map(_reached, values.values()), f"**{_spread(ratios, '.2f')}**" if ratios else "-"]


def _reached(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return _spread(known) if len(known) == len(values) else f"{len(values) - len(known)} of {len(values)} never"


def _spread(values: list[float], style: str = "") -> str:
    return spread(values, style or (".0f" if median(values) >= 100 else ".1f" if median(values) >= 5 else ".2f"))


def _markdown(rows: list[list[str]]) -> str:
    first, *others = map(markdown_row, rows)
    return "\n".join([first, "|" + "---|" * len(rows[0]), *others])


def written_into(document: str, text: str) -> str:
    """Return the document with this text between the marks of this benchmark."""
    before, _, rest = document.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"{BEGIN} ... {END} is not in the document"
    return f"{before}{BEGIN}\n{text}\n{END}{after}"
