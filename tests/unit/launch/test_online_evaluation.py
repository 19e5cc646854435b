"""Evaluation during `sft`: what the end of the training waits for, and how long."""

from types import SimpleNamespace
from typing import Any

from trireme.base.devices import Devices
from trireme.config.resolve import resolve_evaluating_run
from trireme.config.sft import SftConfig
from trireme.launch import online_evaluation
from trireme.launch.online_evaluation import OnlineEvaluation


def test_wait_for_evaluations_at_the_end_is_bounded(tiny_model, tmp_path, capsys, monkeypatch):
    """The engine never answers, and may take far longer to start."""
    evaluation = {"env": [{"id": "reverse-text"}], "interval": 2}
    config = SftConfig.model_validate(
        {
            "output_dir": tmp_path,
            "data": "d.jsonl",
            "max_steps": 2,
            "model": {"name": str(tiny_model)},
            "eval": evaluation,
        }
    )
    (config.paths.weights / "step_2").mkdir(parents=True)
    spec = SimpleNamespace(health="http://127.0.0.1:9/health", log=tmp_path / "engine.log")
    children: Any = SimpleNamespace(children=[SimpleNamespace(exit=None, spec=spec)], look=lambda: None)
    run = resolve_evaluating_run(config, Devices(cores=1))
    monkeypatch.setattr(online_evaluation, "FINISH_S", 0.0)
    assert OnlineEvaluation(config, run, SimpleNamespace(), children).finish() == 0
    said = capsys.readouterr().out
    assert "not done 0 s after the last step" in said
    assert "not evaluated: step 0 on reverse-text, step 2 on reverse-text" in said
