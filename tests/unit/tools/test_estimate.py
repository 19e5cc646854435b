"""`trireme plan`: from a configuration and a `config.json` to memory, time and advice, without starting anything."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from support.models.families import HYBRIDS, MROPE, build_config
from support.models.model_configs import MODELS, cache_models
from support.runs.resolved_runs import refusals, resolved
from trireme.algo.model.activations import Pass
from trireme.algo.model.architecture import architecture_of, is_known
from trireme.algo.model.chips import CHIPS, GIB
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.cli.inference import inference
from trireme.config.files import write_run
from trireme.config.rules import launch_problems
from trireme.config.run import RunConfig
from trireme.config.trainer import ActivationCheckpointing, TrainerModel, Vlm
from trireme.tools.plan.advice import engine_advice, first_that_fits, fit_warnings, savings_of, size_kv_cache
from trireme.tools.plan.engine_memory import Serving
from trireme.tools.plan.estimate import CUDA_BYTES, GPU_SCATTERED, Estimate, estimate_run, scattered_bytes
from trireme.tools.plan.machine import describe_machine, find_chip
from trireme.tools.plan.plan import command as plan
from trireme.tools.plan.sizes import count_sizes, read_sizes
from trireme.tools.plan.step_time import lengths_of
from trireme.tools.plan.trainer_memory import Training

TWO_GPUS = Devices(gpus=("0", "1"), cores=8)


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
    config = resolved(shlex.join(["@", str(file), *flags]), on=machine.devices)
    return estimate_run(config, read_sizes(str(config.trainer.model.name)), machine, lengths_of(config, **lengths))


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
        "--model.name Qwen/Qwen3-8B --trainer.model.compile true --trainer.model.attn eager",
        "--model.name Qwen/Qwen3-Next-80B-A3B",
    ],
)
def test_a_run_accepts_each_line_of_the_advice(config_file, monkeypatch, flags):
    before = estimated(config_file, *flags.split())
    savings = savings_of(before)
    model = before.training.model  # it does not change
    monkeypatch.setattr("trireme.tools.plan.plan.read_sizes", lambda *_, **__: model)
    lines = [saving.words for saving in savings if "_gpus" not in saving.words]
    assert len(lines) > 5
    for line in lines:
        argv = ["@", str(config_file), *flags.split(), *followed(line, config_file)]
        assert plan([*argv, "--gpu", "h100", "--gpus", "8"]) in (0, 1)


@pytest.mark.parametrize(("more", "num_lines"), [("", 11), ('[trainer.model.ac]\nmode = "selective"', 9)])
def test_following_one_line_of_the_advice_saves_what_it_said(config_file, more, num_lines):
    config_file.write_text(config_file.read_text() + more)
    flags = ["--model.name", "Qwen/Qwen2.5-7B", "--trainer.model.optimization-dtype", "bfloat16"]
    before = estimated(config_file, *flags, gpus=2, prompt=1000.0, sampled=3000.0)
    savings = {saving.words: saving.saved for saving in savings_of(before)}
    assert list(savings.values()) == sorted(savings.values(), reverse=True)
    assert len(savings) == num_lines, "each that is possible, but for those that would save less than 0.5 %"
    for line, saved in savings.items():
        if "_gpus" not in line:
            typed = followed(line, config_file)
            after = estimated(config_file, *flags, *typed, gpus=2, prompt=1000.0, sampled=3000.0)
            assert before.trainer.total - after.trainer.total == pytest.approx(saved, rel=1e-6), line


def followed(line: str, config_file: Path) -> list[str]:
    """Return the arguments of a run that follows a line of the advice."""
    file = config_file.with_name("advice.toml")
    file.write_text(line.replace(", trainer", "\ntrainer"))
    return ["@", str(file)]


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


def write_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_run_on_a_machine_that_is_too_small_is_warned(config_file, tmp_path, monkeypatch):
    write_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA H100 80GB HBM3, 81559, 550'")

    def warned(model: str, *flags: str, devices: Devices) -> list[str]:
        typed = shlex.join(["@", str(config_file), "--model.name", model, *flags])
        return fit_warnings(resolved(typed, on=devices), devices)

    (warning,) = warned("Qwen/Qwen2.5-7B", devices=TWO_GPUS)
    assert "this may not fit: the trainer needs" in warning
    assert "First that fits: " in warning
    assert warned("Qwen/Qwen3-0.6B", "--seq-len", "2048", devices=TWO_GPUS) == []
    assert warned("somebody/unknown", devices=TWO_GPUS) == []
    monkeypatch.setattr("trireme.tools.plan.machine.host_memory", lambda: 24.0 * 2**30)
    (warning,) = warned("Qwen/Qwen2.5-7B", "--seq-len", "2048", devices=Devices(cores=2))
    assert "0.0 GiB are there; the engine needs 3" in warning


ONE_GPU = Devices(gpus=("0",), cores=8)


def sized(file: Path, *flags: str, devices: Devices = ONE_GPU) -> dict[str, Any]:
    """Return the arguments of vLLM that an engine of Qwen3-0.6B gets when it starts."""
    typed = shlex.join(["@", str(file), "--model.name", "Qwen/Qwen3-0.6B", *flags])
    return size_kv_cache(resolved(typed, on=devices), devices).inference.args


def test_an_engine_on_the_trainers_gpu_is_told_the_planned_kv_cache(config_file, tmp_path, monkeypatch):
    write_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA GeForce RTX 4090, 24564, 500'")
    planned = estimated(config_file, "--model.name", "Qwen/Qwen3-0.6B", gpu="4090", gpus=1).serving
    assert planned.room > 5 * GIB
    told = sized(config_file)
    assert told.pop("kv-cache-memory-bytes") == pytest.approx(planned.room, abs=2**20)
    assert told == {"gpu-memory-utilization": pytest.approx(0.4 - 0.9 / 23.5, abs=1e-4)}  # once it has CUDA
    own = ["--inference.args.kv_cache_memory_bytes", "1000"]
    assert sized(config_file, *own) == {"kv_cache_memory_bytes": 1000}


@pytest.mark.parametrize(("devices", "is_told"), [(ONE_GPU, True), (TWO_GPUS, False)])
def test_only_an_engine_that_shares_a_gpu_starts_with_a_given_kv_cache(devices, is_told, config_file, monkeypatch):
    write_nvidia_smi(config_file.parent, monkeypatch, "echo 'NVIDIA GeForce RTX 4090, 24564, 500'")
    served: list[RunConfig] = []
    monkeypatch.setattr("trireme.inference.server.serve", served.append)
    monkeypatch.setattr("trireme.cli.inference.detect_devices", lambda: devices)
    config = resolved(f"@ {config_file} --model.name Qwen/Qwen3-0.6B", on=devices)
    write_run(config, config_file.with_name("run.json"))
    inference(["--run", str(config_file.with_name("run.json"))])
    assert ("kv-cache-memory-bytes" in served[0].inference.args) is is_told


@pytest.mark.parametrize(
    ("found", "flags", "words"),
    [
        (
            "echo 'RTX 4090, 24564, 500'",
            "--inference.gpu-memory-utilization 0.1",
            "leaves 0.00 GiB .* at least 1.75 GiB",
        ),
        ("exit 9", "", "KV cache cannot be planned: .* Or set its bytes: `kv-cache-memory-bytes`"),
    ],
)
def test_an_engine_without_room_on_the_trainers_gpu_says_so(found, flags, words, config_file, tmp_path, monkeypatch):
    write_nvidia_smi(tmp_path, monkeypatch, found)
    with pytest.raises(ConfigError, match=words):
        sized(config_file, *flags.split())


QWEN = architecture_of(MODELS["Qwen/Qwen2.5-7B"])
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_the_guides_table_comes_out_within_15_percent():
    """Of a 7-8B model with LoRA on 80 GB: "AC freq=1, seq_len=16384: ~65 GB; seq_len=8192: ~45 GB", and "No AC,
    seq_len=16384: >80 GB (OOM)". The guide has rank 32 on every linear layer, base weights in float32, a forward pass
    in bfloat16, flash attention, and logits of a whole row at once.
    """

    def needs(tokens: int, ac_freq: int | None) -> float:
        row = Pass(tokens, 2, "flash_attention_2", targets=LINEAR, rank=32, dropout=True)
        ac = None if ac_freq is None else ActivationCheckpointing(freq=ac_freq)
        training = Training(QWEN, row, TrainerModel(ac=ac, head_chunk=tokens), frozen_bytes=4)
        return (sum(training.parts.values()) + scattered_bytes(training.parts, GPU_SCATTERED) + CUDA_BYTES) / 1e9

    assert needs(16384, 1) == pytest.approx(65, rel=0.15)
    assert needs(8192, 1) == pytest.approx(45, rel=0.15)
    assert needs(16384, None) > 80


def test_the_state_of_each_optimizer_by_hand_and_what_halves_a_row_saves():
    training = Training(QWEN, Pass(8192, 4, "sdpa"))
    matrices = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    others = QWEN.num_parameters - matrices  # muon leaves them to AdamW
    sizes = {"adamw": 8, "adamw_8bit": 2 + 12 / 128, "sgd": 4}
    expected = {name: size * QWEN.num_parameters for name, size in sizes.items()} | {"muon": 4 * matrices + 8 * others}
    for optimizer, size in expected.items():
        assert 2 * replace(training, optimizer=optimizer, shards=2).optimizer_bytes == pytest.approx(size)
    assert replace(training, optimizer="muon").moments["update"]["update"] == 4 * 4 * 3584 * 18944  # its largest matrix
    for change in ({"cp": 2}, {"value_bytes": 2}):
        assert sum(replace(training, row=replace(training.row, **change)).parts.values()) < sum(training.parts.values())


def test_the_kv_cache_of_an_engine_by_hand():
    serving = Serving(QWEN, memory=80 * GIB, utilization=0.5, max_model_len=8192)
    per_token = 2 * 4 * 128 * 2 * 28  # keys and values, 4 heads of 128, bfloat16, 28 layers
    assert serving.kv_bytes(1) == per_token
    assert serving.room == 40 * GIB - sum(serving.parts.values()) + serving.parts["transfers"]
    assert serving.num_tokens == pytest.approx(serving.room / per_token, abs=1)
    assert serving.num_requests == pytest.approx(serving.num_tokens / 8192, rel=1e-3)
    assert Serving(QWEN, memory=80 * GIB, tp=2).parts["weights"] == serving.parts["weights"] / 2
    eight_bit = Serving(QWEN, memory=80 * GIB, matrix_bytes=1.0)  # all but norms, biases and the embedding
    matrices = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert eight_bit.parts["weights"] == serving.parts["weights"] - matrices
    for tp, share in ((2, 2), (8, 4)):  # it has 4 heads of keys: more GPUs hold copies
        assert Serving(QWEN, memory=80 * GIB, tp=tp).kv_bytes(100) == 100 * per_token / share
    deepseek = count_sizes(AutoConfig.for_model("deepseek_v3").to_dict())
    assert deepseek.num_parameters == 671_026_404_352
    assert Serving(deepseek, memory=80 * GIB).kv_bytes(100) == 100 * (512 + 64) * 2 * 61  # one latent for all heads
    windowed = Serving(architecture_of(MODELS["google/gemma-3-1b"]), memory=80 * GIB)
    # every sixth of 26 layers looks at all tokens, the others at 512
    assert windowed.kv_bytes(10_000) == 2 * 1 * 256 * 2 * (22 * 512 + 4 * 10_000)


def test_the_first_update_of_an_engine_by_hand():
    embedding = 2 * 152064 * 3584  # as a bucket, as a copy, and in vLLM's new layer; and the next bucket
    apart = Serving(QWEN, memory=24 * GIB, utilization=0.5)
    assert apart.update_bytes == 3 * embedding + (64 << 20)
    shared = replace(apart, bucket_bytes=None, is_shared=True)
    assert shared.update_bytes == 2 * embedding
    assert apart.parts["activations"] + apart.parts["transfers"] == apart.update_bytes  # it is paused meanwhile
    beside = [sum(each.parts.values()) + each.room - 12 * GIB for each in (apart, shared)]
    assert beside == [apart.parts["transfers"], pytest.approx(0.0, abs=1.0)]  # vLLM measures before it
    mixture = Serving(architecture_of(MODELS["Qwen/Qwen3-30B-A3B"]), memory=80 * GIB, tp=4, bucket_bytes=None)
    assert mixture.update_bytes == 2 * 128 * 3 * 2048 * 768 * (1 + 1 / 4)  # experts of a layer, and a rank's part


@pytest.mark.parametrize(
    "settings",
    [
        {"ac": "full"},
        {"dtype": "bfloat16", "rows": 1},
        pytest.param({"rank": 8, "samples": 1}, marks=pytest.mark.slow),
        pytest.param({"vocabulary": 8192}, marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_a_real_step_takes_the_tensors_that_were_planned(settings, world, tmp_path):
    """To 10 %; `benchmarks/trainer/memory.py` has more sizes, and is closer."""
    from benchmarks.trainer import memory  # it sets the number of threads

    case = memory.Case(**{"hidden": 128, "layers": 3, "tokens": 256, "vocabulary": 512} | settings)
    config = memory.run_config(case, tmp_path)
    measured, _ = memory.measured_bytes(case, config, world)
    assert memory.planned_bytes(case, config)[0] == pytest.approx(measured, rel=0.10)


PUBLISHED = {
    "Qwen/Qwen3-8B": 8_190_735_360, "Qwen/Qwen3-30B-A3B": 30_532_122_624, "Qwen/Qwen2.5-VL-7B": 8_292_166_656,
    "google/gemma-3-1b": 999_885_952, "google/gemma-3-4b": 4_300_079_472, "openai/gpt-oss-120b": 116_829_156_672,
    "microsoft/phi-4": 14_659_507_200, "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
}  # fmt: skip
"""What their makers' files hold."""

SMALL = {"hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 160, "vocab_size": 200}
VARIANTS: list[dict[str, Any]] = [
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", "tie_word_embeddings": True, "head_dim": 20},
    {"model_type": "mistral", "sliding_window": 64},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
    {"model_type": "qwen3", "attention_bias": True},
    {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    {"model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24}
    | {"decoder_sparse_step": 2, "num_experts_per_tok": 2},
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "gemma", "head_dim": 16},
    {"model_type": "gemma2", "head_dim": 16, "sliding_window": 64},
    {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 64},
    {"model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
]


def built(config: dict[str, Any]) -> torch.nn.Module:
    values = dict(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


@pytest.mark.slow  # families are counted exactly below
def test_page_of_published_models_agrees_with_the_dry_run():
    """`scripts/published_models.py` writes it. Parameters that are not worked out are counted in such a model."""
    published = SimpleNamespace(**run_path(str(Path(__file__).parents[3] / "scripts/published_models.py")))
    rows = {name: published.describe(name) for name in MODELS}
    shown = published.PAGE.read_text().partition(f"{published.BEGIN}\n")[2].partition(published.END)[0]
    assert shown == published.page_of(rows.values())
    for name, row in rows.items():
        assert bool(row.parameters) != ("cuda" in row.refusals)
        assert row.parameters == PUBLISHED.get(name, row.parameters)
        if is_known(MODELS[name]):
            parameters = built(MODELS[name]).parameters()
            assert (name, sum(each.numel() for each in parameters)) == (name, row.parameters)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values()))[:40])
def test_every_family_is_counted_exactly_whatever_its_settings(variant):
    config = SMALL | variant
    model, ours = built(config), architecture_of(config)
    assert is_known(config)
    assert ours.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert architecture_of(model.config.to_dict()).num_parameters == ours.num_parameters, "a file written whole"
    windowed = [kind == "sliding_attention" for kind in getattr(model.config, "layer_types", None) or []]
    if windowed:
        assert [layer.window is not None for layer in ours.layers] == windowed


STATES = {
    **dict.fromkeys(["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"], (1, 64 * 3, 4 * 8 * 8)),
    **dict.fromkeys(["granitemoehybrid", "nemotron_h"], (1, 80 * 3, 4 * 16 * 8)),
    **dict.fromkeys(["lfm2", "lfm2_moe"], (1, 32 * 2, 0)), "falcon_h1": (2, 2 * 80 * 3, 2 * 4 * 16 * 8),
    "mamba2": (0, 2 * 80 * 3, 2 * 4 * 16 * 8),
}  # fmt: skip
"""By hand: layers that attend, and the values that a request carries in convolutions (the channels of the inputs before
the current one) and in matrices (heads, value size, key or state size)."""


@pytest.mark.parametrize("kind", HYBRIDS)
def test_layers_with_a_state_are_counted_and_hold_no_keys_and_values(kind):
    config = build_config(kind, **{"mamba_ssm_dtype": "float32"} if kind == "qwen3_5_text" else {})
    sizes = count_sizes(config.to_dict())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sizes.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sizes.active_parameters <= sizes.num_parameters
    attending, convolutions, matrices = STATES[kind]
    serving = Serving(sizes, memory=80 * GIB, value_bytes=2)
    recurrent_bytes = 4 if kind in ("qwen3_5_text", "nemotron_h") else 2  # the latter is vLLM's default
    assert serving.state_bytes == 2 * convolutions + recurrent_bytes * matrices
    assert serving.kv_bytes(100) - serving.state_bytes == 100 * 2 * 2 * 8 * 2 * attending
    assert sum(Training(sizes, Pass(256, 4)).parts.values()) > 16 * sizes.num_parameters


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5"])
def test_a_vision_encoder_is_counted_and_held_but_trained_only_if_asked(kind):
    config = build_config(kind, rope_parameters=MROPE)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    sizes = count_sizes(config.to_dict(), Vlm())
    assert (sizes.num_parameters, sizes.tower) == (sum(each.numel() for each in model.parameters()), tower)
    training, blind = (Training(each, Pass(256, 4)) for each in (sizes, replace(sizes, tower=0)))
    assert training.trained == blind.trained == sizes.num_parameters - tower
    assert training.weight_bytes - blind.weight_bytes == 4 * tower
    whole = replace(training, settings=TrainerModel(vlm=Vlm(freeze_vision_encoder=False)))
    assert (whole.trained, whole.weight_bytes) == (sizes.num_parameters, training.weight_bytes)
    held = [each.optimizer_bytes + each.gradient_bytes for each in (training, whole)]
    assert held[1] - held[0] == 12 * tower
    adapters = replace(training, row=replace(training.row, targets=("q_proj",), rank=8))
    assert adapters.frozen == sizes.num_parameters


def test_of_a_mixture_of_experts_a_token_meets_those_it_is_sent_to():
    # 30.5B in all; embedding 0.31B, and of 48 layers' 128 experts of 3 * 2048 * 768 each, 8
    model = architecture_of(MODELS["Qwen/Qwen3-30B-A3B"])
    experts = 48 * 8 * 3 * 2048 * 768
    attention = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512)
    routers, head = 48 * 2048 * 128, 151936 * 2048
    assert model.active_parameters == experts + attention + routers + head
    assert 3.0e9 < model.active_parameters < 3.4e9
