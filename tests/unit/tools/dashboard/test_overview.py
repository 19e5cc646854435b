"""The figures of a run, and what differs between runs."""

from support.runs.shown_runs import opened, write
from trireme.tools.dashboard.overview import differences, figures


def test_figures_are_what_one_works_out_by_hand(tmp_path):
    run = write(tmp_path / "run", range(10), config={"max_steps": 10})
    said = {name: value for name, value, _ in figures(opened(run))}
    reward = f"{0.5 + (5 + 6 + 7 + 8 + 9) / 5:.3f}"
    assert said | {"Steps trained": "10 of 10", "Reward": reward, "Seconds a step": "2"} == said


def test_what_differs_between_runs_is_listed_by_key(tmp_path):
    for name, lr in (("a", 1e-5), ("b", 1e-5), ("c", 1e-4)):
        write(tmp_path / name, range(1), config={"name": name, "trainer": {"optim": {"lr": lr}}})
    rows = differences([opened(tmp_path / name) for name in "abc"])
    assert rows == [{"key": "trainer.optim.lr", "a": "1e-05", "b": "1e-05", "c": "0.0001"}]
