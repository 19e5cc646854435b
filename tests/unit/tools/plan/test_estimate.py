"""`trireme plan`: from a configuration and a `config.json` to memory, time and advice, without starting anything."""

import json
import re
import shlex

import pytest

from support.runs.planning import estimated, write_nvidia_smi
from support.runs.resolved_runs import refusals, resolved
from trireme.algo.model.chips import CHIPS, GIB
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.rules.check import launch_problems
from trireme.tools.plan.estimate import Estimate
from trireme.tools.plan.machine import describe_machine, find_chip
from trireme.tools.plan.plan import command as plan

TWO_GPUS = Devices(gpus=("0", "1"), cores=8)


def test_a_laptop_plans_for_a_cluster_by_the_name_of_a_model(config_file, capsys):
    flags = ["--model.name", "Qwen/Qwen3-8B"]
    estimate = estimated(config_file, *flags)
    model = estimate.training.model
    assert (model.num_parameters, model.active_parameters) == (8_190_735_360, 7_568_097_280)
    assert (estimate.trainer.room, estimate.fits) == (79 * GIB, False)
    assert plan(["@", str(config_file), *flags, "--gpu", "h100", "--gpus", "8"]) == 1
    shown = capsys.readouterr().out
    assert f"{estimate.trainer.total / GIB:,.2f} / {estimate.trainer.room / GIB:,.2f}" in shown
    assert f"{estimate.serving.num_tokens:,} tokens" in shown


def test_a_supervised_configuration_is_seen_by_its_keys(tmp_path, capsys):
    (data := tmp_path / "chat.jsonl").write_text("{}")
    (file := tmp_path / "sft.toml").write_text(f'data = "{data}"\nseq_len = 4096\nbatch_size = 32\n')
    plan(["@", str(file), "--model.name", "Qwen/Qwen3-4B", "--gpu", "h100", "--gpus", "4"])
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
    plan(["@", str(config_file), *model, "--gpu", "h100", "--gpus", "8", "--inference-gpus", "4"])
    better = f"Better: inference_gpus = {best.engine_gpus}, trainer_gpus = {best.trainer_gpus}"
    assert better in capsys.readouterr().out
    paired = estimated(config_file, *model, "--inference.parallel.tp", "2", "--trainer.model.cp", "2").best_split
    assert (paired.engine_gpus % 2, paired.trainer_gpus % 2) == (0, 0)


def test_gpus_of_all_machines_share_the_work(config_file):
    """Two machines with 4 GPUs for the trainer are as 8 of one; engines on machines of their own take none of them."""
    counts = shlex.split("--model.name Qwen/Qwen3-8B --inference-gpus 4 --trainer-gpus")
    hosts = shlex.split("--device cuda --hosts.trainer 10.0.0.1 10.0.0.2 --hosts.inference 10.0.0.3 10.0.0.4")
    one = estimated(config_file, *counts, "8", gpus=12)
    two = estimated(config_file, *counts, "4", *hosts, "--hosts.orchestrator", "10.0.0.1", gpus=8)
    assert (two.ranks, two.trainer_gpus, two.engine_gpus, two.best_split) == (8, 8, 8, None)
    assert two.configured_split.training_s == one.configured_split.training_s
    assert two.configured_split.sampling_s < one.configured_split.sampling_s


def test_a_plan_of_something_unknown_or_wrong_is_refused(config_file):
    for words, refusal in (
        ("--model.name some/model --gpu h100", r"'some/model' is no folder .* is not in the hub's cache"),
        ("--gpu mi300", r"--gpu mi300 is not in the table - expected one of .*h100.*--memory-gib"),
        ("--orchestrator.batch-size 10 --gpu h100", "batch_size must be divisible by rollouts_per_example"),
    ):
        with pytest.raises(ConfigError, match=refusal):
            plan(["@", str(config_file), *words.split()])


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
    refused = launch_problems(resolved(shlex.join(argv), on=here), here)
    assert any(words in problem for problem in refused)


def test_a_model_in_the_hubs_cache_is_refused_as_one_in_a_folder():
    (problem,) = refusals("--model.name mistralai/Mistral-Small-3.2-24B-2506", on=TWO_GPUS, at_launch=True)
    assert "no causal language model for mistral3" in problem


def test_the_chip_of_this_machine_is_that_of_the_drivers_name(tmp_path, monkeypatch):
    write_nvidia_smi(tmp_path, monkeypatch, "[ $1$2 = -iGPU-7 ] && echo 'NVIDIA H200, 143771, 600'")
    chip = find_chip("GPU-7")
    assert (chip.name, chip.memory, chip.flops) == ("NVIDIA H200", 143171 * 2**20, CHIPS["h200"].flops)
    write_nvidia_smi(tmp_path, monkeypatch, "exit 9")
    assert find_chip("0") is None


def test_gpus_without_a_name_are_like_those_of_this_machine(tmp_path, monkeypatch):
    write_nvidia_smi(tmp_path, monkeypatch, "[ $2 = 0 ] && echo 'NVIDIA H200, 143771, 600'")
    monkeypatch.setattr("trireme.tools.plan.machine.host_memory", lambda: 300.0 * GIB)
    some, more = (describe_machine(TWO_GPUS, gpus=count) for count in (1, 16))
    assert some.chip == more.chip == find_chip("0")
    assert (some.host_memory, more.host_memory) == (300 * GIB, 8 * 128 * GIB)  # one node of those that are not here
    with pytest.raises(ConfigError, match="No GPU was named, and none was found"):
        describe_machine(Devices(cores=8), gpus=2)
