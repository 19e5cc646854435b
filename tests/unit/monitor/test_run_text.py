"""What a run says of itself at its end."""

import pytest

from support.runs.view_stage import Stage
from trireme.monitor.run_text import summary


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_a_resumed_run_does_not_tell_its_history_again(stage):
    for step in range(5):
        stage.train(step)
    view = stage.open()
    assert "step" not in stage.look()
    stage.train(3)  # from the checkpoint of step 3 on
    assert "step     4/200" in stage.look()
    assert "(1 in this session)" in summary(view.progress, stage.config, 1.0)


def test_the_summary_tells_what_was_learned_and_where_it_lies(stage):
    for step in range(200):
        stage.train(step, reward=step / 200)
    for version, reward in ((0, 0.412), (200, 0.893)):
        stage.report(version, "orchestrator", **{"eval/reverse-text/reward": reward})
    for folder in ("weights/step_100", "weights/step_200", "checkpoints"):
        (stage.config.paths.root / folder).mkdir(parents=True)
    progress = stage.open().progress
    text = summary(progress, stage.config, 312, {"inference": 1, "orchestrator": 0, "trainer": 2})
    for part in (
        "200 of 200 steps (0 in this session) in 5:12",
        "reward 0.010 -> 0.985",
        "held-out reverse-text: 0.412 -> 0.893",
        f"weights      {stage.config.paths.weights / 'step_200'}",
        f"none in {stage.config.paths.checkpoints}",
        str(stage.config.paths.logs),
        "\n3 restarts: inference 1, trainer 2\n",
    ):
        assert part in text
    assert " restart" not in summary(progress, stage.config, 1.0, {"trainer": 0})
