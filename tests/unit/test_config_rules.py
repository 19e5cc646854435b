"""Contradictions between tables are refused before anything starts, with the values and what to type instead."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.config.load import load_config, load_run_config
from trireme.config.readiness import looks_local
from trireme.config.resolve import resolve, resolve_sft
from trireme.config.rules import check, check_sft, launch_problems
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.config.written import Room

DATA = Path(__file__).parent.parent / "data"
ENV = ("--orchestrator.env", '[{"id": "x"}]')
CPU = Devices(cores=2)
GPUS = Devices(gpus=("0", "1", "2", "3"), cores=16)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def resolved(*argv: str, on: Devices = CPU, section: Room | None = None) -> RunConfig:
    return resolve(load_run_config(list(argv), program="rl", section=section)[0], on, section=section)


def refusal(*argv: str, on: Devices = CPU) -> str:
    with pytest.raises(ConfigError) as error:
        check(resolved(*ENV, *argv, on=on), on)
    return str(error.value)


def launch_refusal(*argv: str, on: Devices = CPU) -> str:
    return "\n".join(launch_problems(resolved(*ENV, *argv, on=on), on))


@pytest.mark.parametrize("machine", [CPU, GPUS, Devices(gpus=("0",), cores=4)])
def test_the_defaults_with_an_environment_hold(machine: Devices) -> None:
    check(resolved(*ENV, on=machine), machine)


def test_the_example_of_the_guide_holds_on_four_gpus_and_on_cpu() -> None:
    example = ("@", str(DATA / "guide_example.toml"))
    check(resolved(*example, on=GPUS), GPUS)
    check(resolved(*example, "--device", "cpu"), CPU)
    with pytest.raises(ConfigError, match=r"this machine shows none.*--device cpu"):
        check(resolved(*example), CPU)


def test_a_run_needs_an_environment_but_a_trainer_alone_does_not() -> None:
    with pytest.raises(ConfigError, match=r"no environment is configured[\s\S]*\[\[orchestrator.env\]\]"):
        check(resolved(), CPU)
    check(resolved(section="trainer"), CPU, section="trainer")


def test_a_batch_holds_whole_groups() -> None:
    message = refusal("--orchestrator.batch-size", "100")
    assert "batch_size must be divisible by rollouts_per_example: 100 % 16 = 4" in message
    assert "`orchestrator.batch_size` to 96 or 112" in message
    assert "one of 10, 20" in message


def test_whatever_the_engines_generate_fits_training() -> None:
    message = refusal("--seq-len", "64", "--inference.model.max-model-len", "128")
    assert "seq_len must match or exceed max_model_len: seq_len = 64, inference.model.max_model_len = 128" in message
    check(resolved(*ENV, "--seq-len", "64", "--inference.model.max-model-len", "64"), CPU)


def test_a_turn_is_shorter_than_the_context() -> None:
    assert "orchestrator.sampling.max_tokens = 64" in refusal(
        "--seq-len", "64", "--orchestrator.sampling.max-tokens", "64"
    )
    message = refusal("--seq-len", "64", "--orchestrator.eval.sampling.max-tokens", "64")
    assert "orchestrator.eval.sampling.max_tokens = 64" in message


def test_a_sampling_parameter_is_said_once() -> None:
    message = refusal("--orchestrator.sampling.extra-body.top-p", "0.9", "--orchestrator.sampling.top-p", "0.5")
    assert "Duplicate sampling parameters: `top_p`" in message
    check(resolved(*ENV, "--orchestrator.sampling.extra-body.ignore-eos", "true"), CPU)


def test_a_micro_batch_holds_the_longest_sample() -> None:
    assert "micro_batch_tokens = 64, seq_len = 2048" in refusal("--trainer.micro-batch-tokens", "64")


def test_the_two_bounds_on_lag_agree() -> None:
    assert "max_off_policy_steps = 1, max_async_level = 2" in refusal(
        "--orchestrator.max-off-policy-steps", "1", "--max-async-level", "2"
    )


def test_environments_of_one_list_have_names_of_their_own() -> None:
    assert '2 tables `[[orchestrator.env]]` are called "x"' in refusal(
        "--orchestrator.env", '[{"id": "x"}, {"id": "x"}]'
    )
    check(resolved("--orchestrator.env", '[{"id": "x"}, {"id": "x", "name": "y"}]'), CPU)


def test_a_runs_name_is_one_folder() -> None:
    assert "plain name of a folder" in refusal("--name", "a/b")


def test_gpus_that_are_asked_for_exist() -> None:
    message = refusal("--inference-gpus", "6", "--trainer-gpus", "2", on=GPUS)
    assert "inference_gpu_ids = [0, 1, 2, 3, 4, 5]: [4, 5] do not exist - 4 GPUs are visible" in message
    assert "trainer_gpu_ids = [6, 7]: [6, 7] do not exist" in message
    assert "this machine shows none" in refusal("--device", "cuda")
    assert "no GPU is left for trainer" in refusal("--inference-gpus", "4", on=GPUS)


def test_a_count_and_ids_that_disagree_are_refused() -> None:
    argv = ["--inference-gpu-ids", "0", "--inference-gpus", "2", "--trainer-gpu-ids", "1"]
    assert "inference_gpus = 2 and inference_gpu_ids = [0]" in refusal(*argv, on=GPUS)


def test_engines_and_trainer_share_gpus_only_over_ipc() -> None:
    ids = ["--inference-gpu-ids", "0,1", "--trainer-gpu-ids"]
    assert "overlap in [1]" in refusal(*ids, "1,2", on=GPUS)
    assert "ipc needs the trainer and its engine on one GPU" in refusal(
        *ids, "2,3", "--weight-broadcast.type", "ipc", on=GPUS
    )
    check(resolved(*ENV, *ids, "0,1", on=GPUS), GPUS)


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_gpu_transfers_are_refused_on_cpu(kind: str) -> None:
    assert f'weight_broadcast.type = "{kind}" with device = "cpu"' in refusal("--weight-broadcast.type", kind)


@pytest.mark.parametrize("kind", ["gloo", "filesystem"])
def test_transfers_that_need_no_gpu_run_on_cpu(kind: str) -> None:
    check(resolved(*ENV, "--weight-broadcast.type", kind), CPU)


def test_engines_use_exactly_their_gpus() -> None:
    message = refusal("--inference-gpus", "3", "--inference.parallel.tp", "2", on=GPUS)
    assert "tp = 2 x dp = 1 takes 2 GPUs, and inference has 3" in message
    check(resolved(*ENV, "--inference-gpus", "2", "--inference.parallel.tp", "2", on=GPUS), GPUS)


def test_each_rank_has_a_gpu() -> None:
    assert "trainer.num_ranks = 3, and the trainer has 2 GPUs" in refusal("--trainer.num-ranks", "3", on=GPUS)


def test_two_servers_do_not_get_one_port() -> None:
    assert "expected a port each" in refusal("--ports.batches", "7000", "--ports.weights", "7000")


def test_all_contradictions_are_shown_together() -> None:
    message = refusal("--orchestrator.batch-size", "100", "--seq-len", "64", "--inference.model.max-model-len", "128")
    assert message.startswith("2 problems in the configuration.\n1. batch_size must be")


# at launch only


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_that_cannot_train_on_cpu_does_not_start_there(attention: str) -> None:
    assert "its backward pass runs on GPUs only" in launch_refusal("--trainer.model.attn", attention)


def test_a_port_in_use_is_named_with_its_server_and_another_port(busy_port: int) -> None:
    message = launch_refusal("--model.name", "a/b", "--inference.server.port", str(busy_port))
    assert f"port {busy_port} on 127.0.0.1 is in use, wanted for the inference server" in message
    assert f"lsof -i :{busy_port}" in message
    assert "--inference.server.port " in message


def test_ports_of_another_machine_are_not_judged(busy_port: int) -> None:
    there = ("--hosts.orchestrator", "203.0.113.1", "--ports.batches", str(busy_port), "--device", "cpu")
    assert f"port {busy_port}" not in launch_refusal("--model.name", "a/b", *there)


def test_a_process_started_alone_answers_for_its_own_ports_only(busy_port: int) -> None:
    config = resolved("--model.name", "a/b", "--inference.server.port", str(busy_port), section="trainer")
    assert not [text for text in launch_problems(config, CPU, section="trainer") if str(busy_port) in text]


def test_a_local_model_folder_must_hold_a_model() -> None:
    assert "this folder does not exist" in launch_refusal("--model.name", "./tiny")
    Path("tiny").mkdir()
    assert "this folder has no config.json" in launch_refusal("--model.name", "./tiny")
    Path("tiny/config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    Path("tiny/model.safetensors").touch()
    assert launch_refusal("--model.name", "./tiny") == ""
    assert "Found nearby: tiny" in launch_refusal("--model.name", "./tyni")


def test_a_missing_model_is_said_once_and_for_each_process_alone() -> None:
    assert launch_refusal("--model.name", "./tiny").count("does not exist") == 1
    for room in ("trainer", "inference"):
        config = resolved("--model.name", "./tiny", section=room)
        assert len(launch_problems(config, CPU, section=room)) == 1


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("Qwen/Qwen3-0.6B", False),
        ("gpt2", False),
        ("./gpt2", True),
        ("/data/gpt2", True),
        ("~/gpt2", True),
        ("models/tiny", True),
        ("outputs/run/weights/step_3", True),
        ("here/tiny", True),
    ],
)
def test_names_on_a_hub_are_told_from_folders(name: str, local: bool) -> None:
    Path("here").mkdir()
    assert looks_local(name) is local


def test_an_environments_file_must_exist() -> None:
    assert "there is no such file" in launch_refusal(
        "--model.name", "a/b", "--orchestrator.env", '[{"id": "./mine.py"}]'
    )


def test_supervised_training_needs_data() -> None:
    def check_with(*argv: str) -> None:
        config, _ = load_config(["--model.name", "a/b", *argv], SftConfig, program="sft")
        check_sft(resolve_sft(config, CPU), CPU)

    with pytest.raises(ConfigError, match="no data is given"):
        check_with()
    with pytest.raises(ConfigError, match=r"nowhere.jsonl.*does not exist"):
        check_with("--data", "nowhere.jsonl")
    Path("here.jsonl").touch()
    check_with("--data", "here.jsonl")


def test_whoever_waits_for_a_batch_waits_longer_than_a_rollout_may_take() -> None:
    said = refusal("--orchestrator.env.0.rollout-timeout-s", "7200")
    for key in ("trainer.batch_timeout_s", "orchestrator.trainer_timeout_s"):
        assert f"`{key} = 3600` with `rollout_timeout_s = 7200`" in said
        assert f"Set `{key}` to 28800 or so" in said
    longer = ["--trainer.batch-timeout-s", "28800", "--orchestrator.trainer-timeout-s", "28800"]
    check(resolved(*ENV, "--orchestrator.env.0.rollout-timeout-s", "7200", *longer), CPU)
