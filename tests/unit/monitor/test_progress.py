"""The progress of a run, from its rows of metrics."""

from trireme.monitor import progress
from trireme.monitor.progress import Ends, Evaluation, Progress


def test_steps_that_a_run_has_left_by_going_back_are_not_shown():
    progress = Progress(9)

    def report(step: int, process: str, **row: float) -> None:
        progress.add([{"step": step, "process": process, "time_s": 0} | row])

    def train(step: int) -> None:
        report(step, "orchestrator", **{"reward/mean": step / 10})
        report(step, "orchestrator", **{"eval/words/reward": step / 10})
        report(step, "trainer", loss=0.1)

    for step in range(5):
        train(step)
    progress.begin_session()
    train(2)
    report(3, "orchestrator", **{"reward/mean": 0.3})
    assert (progress.num_done, progress.recent(9), progress.take_completed()) == (3, [0, 1, 2], [2])
    assert progress.rewards() == [0.0, 0.1, 0.2, 0.3], "a batch of the new course is there already"
    assert [each.version for each in progress.evaluations()] == [0, 1, 2]


def test_long_run_progress_keeps_bounded_rows_but_all_evaluations(monkeypatch):
    limit = 400
    monkeypatch.setattr(progress, "MOST_STEPS", limit)
    known = Progress(5 * limit)
    known.begin_session()
    evaluated = range(0, 5 * limit, 100)
    for step in range(5 * limit):
        row = {"step": step, "process": "orchestrator", "reward/mean": float(step), "time_s": 2.0 * step}
        known.add([row, {"step": step, "process": "trainer", "loss": 0.5, "time_s": 2.0 * step}])
        if step in evaluated:
            known.add([{"step": step, "process": "orchestrator", "eval/a/reward": 1.0 * step, "eval/a-b/reward": None}])
        assert known.take_completed() == [step]
        assert known.merged(step)["loss"] == 0.5
        assert len(known.steps) <= limit
    assert known.recent(2) == [5 * limit - 2, 5 * limit - 1]
    assert known.reward_ends() == Ends(first=2.0, last=5 * limit - 3.0, steps=5)
    assert known.evaluations() == [Evaluation("a", version, float(version)) for version in evaluated]
    assert known.num_session_steps == 5 * limit
