"""What an evaluation takes from the run of its checkpoints, and from what was typed."""

import pytest
import torch

from support.engines.weighed_engine import LETTER
from support.runs.evaluating import engine, lines, run_eval
from trireme.algo.digest import tensor_digest
from trireme.base.errors import ConfigError
from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.journal.versions import Versions
from trireme.tools.evaluate.config import EvalConfig, inherit_from_run, with_environments


def test_eval_inherits_unset_options_from_the_run_of_the_checkpoints(here):
    env, evaluation = {"id": "toy.py", "name": "of-the-run"}, {"num_examples": 3, "sampling": {"temperature": 0.5}}
    evaluation["pass_threshold"] = 0.25
    orchestrator = {"env": [env], "sampling": {"max_tokens": 7}, "eval": evaluation}
    config = RunConfig.model_validate({"output_dir": "run", "device": "cpu", "orchestrator": orchestrator})
    write_run(config, config.paths.run_config)
    assert inherit_from_run(EvalConfig(num_examples=2), config).pass_threshold == 0.25
    for step, letter, offset in ((10, "b", 0), (20, "c", 1)):
        tensors = {LETTER: torch.full((2, 3), float(ord(letter))), "norm.weight": torch.arange(4.0) + offset}
        digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        Versions(config.paths.journal).record(step, ["http://x"], digests, 0.0)
    with engine() as found:
        assert run_eval(found, "--steps", 10, env=()) == 0
        assert run_eval(found, "--steps", 100, "--no-eval-base", "--sampling.max-tokens", 5, env=()) == 0
        sampled = [(asked.sampling["temperature"], asked.sampling["max_tokens"]) for asked in found.requests]
        assert sampled == [(0.5, 7)] * 6 + [(0.5, 5)] * 3
        with pytest.raises(ConfigError, match=r"step_20 is not what the run's engines confirmed .*norm\.weight"):
            run_eval(found, "--steps", 20, env=())
        assert found.label == "default"
        assert "".join(letter for _, letter in found.answered) == "aaabbbddd"
    assert len(lines(10, "of-the-run")) == 3


def test_environments_may_be_given_as_tables():
    assert with_environments(["--env", "[{id='a'}]"]) == ["--env", "[{id='a'}]"]
