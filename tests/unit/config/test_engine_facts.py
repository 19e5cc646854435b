"""An engine that joins a run takes over all that decides what the run's own engines compute."""

import json

import pytest

from trireme.base.devices import Devices
from trireme.config.engine_facts import conflict_of, engine_facts, terms_of
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.run import RunConfig
from trireme.inference.server import environment, server_arguments

MACHINE = Devices(cores=4)
TEXT, SEES = "configs/reverse-text/rl.toml", "configs/color-squares/rl.toml"
ROUNDED = '{"quantization": "fp8_per_tensor", "hf-token": "hf_secret"}'
RUNS = {
    "text": [TEXT],
    "pictures": [SEES],
    "adapters": [TEXT, "--trainer.model.lora.sync", "adapter", "--trainer.model.lora.rank", "4"],
    "rounded weights": [TEXT, "--inference.args", ROUNDED, "--inference.max-num-seqs", "7"],
    "a cut sampler": [TEXT, "--orchestrator.sampling.top-k", "50", "--inference.model.tool-call-parser", "hermes"],
    "a synchronous run": [TEXT, "--max-async-level", "0", "--seed", "5"],
}


def joining(run: RunConfig, *typed: str) -> RunConfig:
    terms = json.loads(terms_of(run))
    config, _ = load_run_config([*typed], section="inference", program="inference", beneath=terms)
    return resolve(config, MACHINE, section="inference")


def started(config: RunConfig) -> tuple[list[str], dict[str, str]]:
    words = server_arguments(config)
    placed = [word for before, word in zip(["", *words], words, strict=False) if before not in ("--host", "--port")]
    return placed, environment(config)


@pytest.mark.parametrize("typed", RUNS.values(), ids=RUNS)
def test_engine_that_joins_is_started_with_the_command_of_the_runs_own(typed):
    run = resolve(load_run_config(["@", *typed], program="rl")[0], MACHINE)
    joined = joining(run)
    assert started(joined) == started(run)
    assert conflict_of(engine_facts(run), engine_facts(joined)) is None
    assert "hf_secret" not in str(engine_facts(joined))

    # What is typed goes over it, and what decides about tokens is refused.
    assert joining(run, "--cpu.threads", "1", "--log-level", "debug").inference.cpu.threads == 1
    other = joining(run, "--model.max-model-len", "33")
    assert "max_model_len 33 - expected" in str(conflict_of(engine_facts(run), engine_facts(other)))


def test_files_that_one_side_lacks_are_left_to_the_digests_of_weights():
    ours = {"vllm": "0.32.0", "the model's weights": "ab", "device": '"cpu"'}
    assert conflict_of(ours, {"vllm": "0.32.0", "device": '"cpu"'}) is None
    assert "device" in str(conflict_of(ours, {"vllm": "0.32.0"}))
