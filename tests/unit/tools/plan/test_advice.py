"""The advice of a plan fits when it is followed, and saves what it says."""

import shlex

import pytest

from support.runs.planning import estimated, write_nvidia_smi
from support.runs.resolved_runs import resolved
from trireme.algo.model.chips import GIB
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.cli.inference import inference
from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.tools.plan.advice import engine_advice, first_that_fits, fit_warnings, savings_of, size_kv_cache
from trireme.tools.plan.plan import command as plan

TWO_GPUS = Devices(gpus=("0", "1"), cores=8)


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


@pytest.mark.parametrize(
    ("more", "num_lines"),
    [("", 12), ('[trainer.model.ac]\nmode = "selective"', 10), ("[trainer.optim]\ncpu_offload = true", 10)],
)
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


def followed(line, config_file):
    """Return the arguments of a run that follows a line of the advice."""
    file = config_file.with_name("advice.toml")
    file.write_text(line.replace(", trainer", "\ntrainer"))
    return ["@", str(file)]


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


def sized(file, *flags: str, devices=ONE_GPU):
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
