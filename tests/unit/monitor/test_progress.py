"""The progress of a run, from its rows of metrics."""

from trireme.monitor.progress import Progress


def test_steps_that_a_run_has_left_by_going_back_are_not_shown() -> None:
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
