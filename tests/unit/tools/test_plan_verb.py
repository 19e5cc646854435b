"""`trireme plan`: from a configuration and a `config.json` to memory, time and advice, without starting anything."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from model_configs import cache_models
from trireme.algo.model.chips import CHIPS, GIB
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.cli.runs.plan import plan
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules import launch_problems
from trireme.tools.plan.advice import engine_advice, first_that_fits, fit_warnings, savings_of
from trireme.tools.plan.estimate import Estimate, estimate_run
from trireme.tools.plan.lengths import lengths_of
from trireme.tools.plan.machine import describe_machine, find_chip
from trireme.tools.plan.sizes import read_sizes


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_models(tmp_path / "hub", monkeypatch)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text('seq_len = 16384\n[[orchestrator.env]]\nid = "reverse-text"\n')
    return file


def estimated(file: Path, *flags: str, gpu: str | None = "h100", gpus: int = 8, **lengths: Any) -> Estimate:
    machine = describe_machine(Devices(cores=16), gpu=gpu, gpus=gpus)
    config = resolve(load_run_config(["@", str(file), *flags], program="rl")[0], machine.devices)
    return estimate_run(config, read_sizes(str(config.trainer.model.name)), machine, lengths_of(config, **lengths))


def test_a_laptop_plans_for_a_cluster_by_the_name_of_a_model(config_file, capsys):
    flags = ["--model.name", "Qwen/Qwen3-8B"]
    estimate = estimated(config_file, *flags)
    model = estimate.training.model
    assert (model.num_parameters, model.active_parameters) == (8_190_735_360, 7_568_097_280)
    assert estimate.trainer.room == 79 * GIB
    code = plan(["@", str(config_file), *flags, "--gpu", "h100", "--gpus", "8"])
    assert code == (0 if estimate.fits else 1)
    shown = capsys.readouterr().out
    assert f"{estimate.trainer.total / GIB:,.2f} / {estimate.trainer.room / GIB:,.2f}" in shown
    assert f"{estimate.serving.num_tokens:,} tokens" in shown


def test_the_advice_fits_when_it_is_followed(config_file, capsys):
    before = estimated(config_file, "--model.name", "Qwen/Qwen2.5-7B", gpus=2)
    assert not before.trainer.fits
    _, then = first_that_fits(before)
    assert then.trainer.total <= then.trainer.room
    assert plan(["@", str(config_file), "--model.name", "Qwen/Qwen2.5-7B", "--gpu", "h100", "--gpus", "2"]) == 1
    shown = capsys.readouterr().out
    assert "ac.freq = 1 saves" in shown
    assert "First that fits: " in shown
    flags = ["--model.name", "meta-llama/Llama-3.1-70B", "--inference-gpus", "4"]
    large = estimated(config_file, *flags)
    assert not large.engine_fits
    assert any("inference.parallel.tp = 4" in line for line in engine_advice(large))


@pytest.mark.parametrize(
    "flags",
    [
        "--model.name Qwen/Qwen3-8B --trainer.model.compile true",
        "--model.name Qwen/Qwen3-8B --trainer.model.attn eager",
        "--model.name Qwen/Qwen3-Next-80B-A3B",
    ],
)
def test_a_run_accepts_each_line_of_the_advice(config_file, tmp_path, monkeypatch, flags):
    before = estimated(config_file, *flags.split())
    savings = savings_of(before)
    monkeypatch.setattr("trireme.cli.runs.plan.read_sizes", lambda *_, **__: before.sized)  # they do not change
    lines = [saving.words for saving in savings if "_gpus" not in saving.words]
    assert len(lines) > 5
    for line in lines:
        (tmp_path / "advice.toml").write_text(line.replace(", trainer", "\ntrainer"))
        argv = ["@", str(config_file), *flags.split(), "@", str(tmp_path / "advice.toml")]
        assert plan([*argv, "--gpu", "h100", "--gpus", "8"]) in (0, 1)


def test_following_one_line_of_the_advice_saves_what_it_said(config_file):
    flags = ["--model.name", "Qwen/Qwen2.5-7B", "--trainer.model.optimization-dtype", "bfloat16"]
    before = estimated(config_file, *flags, gpus=2, prompt=1000.0, sampled=3000.0)
    savings = {saving.words: saving.saved for saving in savings_of(before)}
    assert list(savings.values()) == sorted(savings.values(), reverse=True)
    assert min(savings.values()) > 0
    for key, value in {
        "trainer.model.ac.freq": "1",
        "trainer.optim.type": '"adamw_8bit"',
        "trainer.model.attn": '"flash_attention_2"',
        "trainer.model.fsdp_cpu_offload": "true",
    }.items():
        typed = [f"--{key.replace('_', '-')}", value.strip('"')]
        after = estimated(config_file, *flags, *typed, gpus=2, prompt=1000.0, sampled=3000.0)
        assert before.trainer.total - after.trainer.total == pytest.approx(savings[f"{key} = {value}"], rel=1e-6)


def test_a_supervised_configuration_is_seen_by_its_keys(tmp_path, capsys):
    file = tmp_path / "sft.toml"
    (tmp_path / "chat.jsonl").write_text("{}")
    lines = [f'data = "{tmp_path}/chat.jsonl"', "seq_len = 4096", "batch_size = 32", '[model]\nname = "Qwen/Qwen3-4B"']
    file.write_text("\n".join(lines))
    plan(["@", str(file), "--gpu", "h100", "--gpus", "4"])
    shown = capsys.readouterr().out
    assert "engine" not in shown
    assert re.search(r"^rows +8 of 4,096 tokens", shown, re.MULTILINE)


def test_the_better_split_is_of_whole_engines_and_teams_and_fits(config_file, capsys):
    model = ["--model.name", "Qwen/Qwen3-0.6B"]

    def divided(engines: int) -> Estimate:
        return estimated(config_file, *model, "--inference-gpus", str(engines), "--trainer-gpus", str(8 - engines))

    best = divided(7).best_split
    fitting = [each.configured_split.step_s for engines in range(1, 8) if (each := divided(engines)).fits]
    assert best.step_s == min(fitting)
    plan(["@", str(config_file), *model, "--gpu", "h100", "--gpus", "8", "--inference-gpus", "7"])
    better = f"Better: inference_gpus = {best.engine_gpus}, trainer_gpus = {best.trainer_gpus}"
    assert better in capsys.readouterr().out
    paired = estimated(config_file, *model, "--inference.parallel.tp", "2", "--trainer.model.cp", "2").best_split
    assert (paired.engine_gpus % 2, paired.trainer_gpus % 2) == (0, 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.name", "some/model", "--gpu", "h100"], r"'some/model' is no folder .* is not in the hub's cache"),
        (["--gpu", "mi300"], r"--gpu mi300 is not in the table - expected one of .*h100.*--memory-gib"),
        (["--orchestrator.batch-size", "10", "--gpu", "h100"], "batch_size must be divisible by rollouts_per_example"),
    ],
)
def test_a_plan_of_something_unknown_or_wrong_is_refused(config_file, flags, words):
    with pytest.raises(ConfigError, match=words):
        plan(["@", str(config_file), *flags])


@pytest.mark.parametrize(
    ("described", "words"),
    [
        ({"model_type": "jamba"}, "in layers that Trireme does not know"),
        ({"model_type": "qwen3_0"}, 'transformers has no architecture "qwen3_0"'),
        ({"model_type": "falcon_h1", "mamba_rms_norm": True}, "mamba_norm_before_gate = true, which vLLM ignores"),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "moe"]}, "no kernel on a CPU for the experts"),
        (["qwen3"], "config.json cannot be read: it is a list"),
        ("\0 not JSON", "config.json cannot be read: "),
    ],
)
def test_a_model_that_a_run_would_refuse_is_refused_by_its_plan(config_file, described, words):
    (config_file.parent / "model").mkdir()
    text = described if isinstance(described, str) else json.dumps(described)
    (config_file.parent / "model/config.json").write_text(text)
    argv = ["@", str(config_file), "--model.name", str(config_file.parent / "model")]
    with pytest.raises(ConfigError, match=words):
        plan([*argv, "--gpus", "0"])
    here = Devices(cores=2)
    refused = launch_problems(resolve(load_run_config(argv, program="rl")[0], here), here)
    assert any(words in problem for problem in refused)


def test_a_model_in_the_hubs_cache_is_refused_as_one_in_a_folder():
    gpus = Devices(gpus=("0", "1"), cores=8)
    argv = ["--model.name", "mistralai/Mistral-Small-3.2-24B-2506", "--orchestrator.env", '[{id = "a"}]']
    (problem,) = launch_problems(resolve(load_run_config(argv, program="rl")[0], gpus), gpus)
    assert "no causal language model for mistral3" in problem


def test_the_chip_of_this_machine_is_that_of_the_drivers_name(tmp_path, monkeypatch):
    write_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA H200, 143771'")
    chip = find_chip()
    assert (chip.name, chip.memory, chip.flops) == ("NVIDIA H200", 143771 * 2**20, CHIPS["h200"].flops)
    write_nvidia_smi(tmp_path, monkeypatch, "exit 9")
    assert find_chip() is None


def write_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_run_on_a_machine_that_is_too_small_is_warned(config_file, tmp_path, monkeypatch):
    write_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA H100 80GB HBM3, 81559'")

    def warned(model: str, *flags: str, devices: Devices) -> list[str]:
        typed = ["@", str(config_file), "--model.name", model, *flags]
        return fit_warnings(resolve(load_run_config(typed, program="rl")[0], devices), devices)

    gpus = Devices(gpus=("0", "1"), cores=8)
    (warning,) = warned("Qwen/Qwen2.5-7B", devices=gpus)
    assert "this may not fit: the trainer needs" in warning
    assert "First that fits: " in warning
    assert warned("Qwen/Qwen3-0.6B", "--seq-len", "2048", devices=gpus) == []
    assert warned("somebody/unknown", devices=gpus) == []
    monkeypatch.setattr("trireme.tools.plan.machine.host_memory", lambda: 24.0 * 2**30)
    (warning,) = warned("Qwen/Qwen2.5-7B", "--seq-len", "2048", devices=Devices(cores=2))
    assert "0.0 GiB are there; the engine needs 3" in warning
