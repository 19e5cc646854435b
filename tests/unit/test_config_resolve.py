"""A resolved run leaves nothing open, and says what it would have said without being asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trireme.base.devices import Devices, detect_devices
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve, resolve_sft
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.config.written import ROOMS, read_run, room_table, to_toml, write_rooms, write_run

CPU = Devices(cores=8)
DATA = Path(__file__).parent.parent / "data"


def gpus(count: int) -> Devices:
    return Devices(gpus=tuple(map(str, range(count))), cores=16)


def resolved(*argv: str, on: Devices = CPU, **options: Any) -> RunConfig:
    return resolve(load_run_config(list(argv), program="rl", **options)[0], on, **options)


def test_a_machine_without_gpus_runs_on_cpu_in_full_precision() -> None:
    config = resolved()
    assert config.device == "cpu"
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ((), ())
    assert config.weight_broadcast.type == "gloo"
    assert config.weight_broadcast.probe_tolerance == 1e-3
    assert config.inference.model.dtype == "float32"
    assert (config.trainer.num_ranks, config.trainer.threads, config.inference.cpu.threads) == (1, 4, 4)


def test_half_precision_anywhere_loosens_the_probe() -> None:
    assert resolved("--trainer.model.optimization-dtype", "bfloat16").weight_broadcast.probe_tolerance == 0.5
    assert resolved("--inference.model.dtype", "bfloat16").weight_broadcast.probe_tolerance == 0.5
    assert resolved(on=gpus(2)).weight_broadcast.probe_tolerance == 0.5
    assert resolved("--weight-broadcast.probe-tolerance", "0.1").weight_broadcast.probe_tolerance == 0.1


@pytest.mark.parametrize(
    ("argv", "count", "engines", "trainer"),
    [
        (["--inference-gpus", "6", "--trainer-gpus", "2"], 8, (0, 1, 2, 3, 4, 5), (6, 7)),
        ([], 8, (0, 1, 2, 3), (4, 5, 6, 7)),
        ([], 3, (0, 1), (2,)),
        ([], 1, (0,), (0,)),
        (["--trainer-gpus", "2"], 8, (0, 1, 2, 3, 4, 5), (6, 7)),
        (["--inference-gpus", "1"], 4, (0,), (1, 2, 3)),
        (["--trainer-gpu-ids", "0"], 4, (1, 2, 3), (0,)),
        (["--inference-gpu-ids", "3", "--trainer-gpus", "2"], 4, (3,), (0, 1)),
        (["--inference-gpus", "6", "--trainer-gpus", "2"], 4, (0, 1, 2, 3, 4, 5), (6, 7)),  # for the rules to refuse
    ],
)
def test_gpus_are_contiguous_engines_first(
    argv: list[str], count: int, engines: tuple[int, ...], trainer: tuple[int, ...]
) -> None:
    config = resolved(*argv, on=gpus(count))
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == (engines, trainer)
    assert config.trainer.num_ranks == len(trainer)
    assert config.inference.parallel.dp == len(engines)


def test_a_process_started_alone_takes_all_it_sees() -> None:
    assert resolved(on=gpus(4), section="trainer").trainer_gpu_ids == (0, 1, 2, 3)
    assert resolved(on=gpus(4), section="inference").inference_gpu_ids == (0, 1, 2, 3)
    assert {resolved(on=gpus(1), section=room).weight_broadcast.type for room in ROOMS} == {"nccl"}


def test_one_gpu_is_shared_and_leaves_room_for_the_trainer() -> None:
    config = resolved(on=gpus(1))
    assert config.weight_broadcast.type == "ipc"
    assert config.inference.gpu_memory_utilization == 0.4
    assert resolved("--inference.gpu-memory-utilization", "0.7", on=gpus(1)).inference.gpu_memory_utilization == 0.7
    assert resolved(on=gpus(2)).weight_broadcast.type == "nccl"


def test_asking_for_gpus_is_never_quietly_answered_with_cpu() -> None:
    assert resolved("--trainer-gpus", "1").device == "cuda"
    assert resolved("--trainer-gpus", "1", "--device", "cpu").device == "cpu"


def test_one_models_name_reaches_everyone() -> None:
    config = resolved("--model.name", "a/b")
    names = (config.trainer.model.name, config.trainer.tokenizer.name, config.inference.model.name)
    assert names == ("a/b", "a/b", "a/b")
    assert resolved("--trainer.model.name", "a/b").inference.model.name == "a/b"
    assert resolved("--model.name", "a/b", "--trainer.tokenizer.name", "c/d").trainer.tokenizer.name == "c/d"


def test_lengths_and_names_follow_from_each_other(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(
        'seq_len = 64\n[orchestrator.sampling]\nmax_tokens = 8\n[[orchestrator.env]]\nid = "x"\n'
        '[orchestrator.eval]\n[[orchestrator.eval.env]]\nid = "y"\nname = "why"'
    )
    config = resolved("@", str(file))
    assert (config.inference.model.max_model_len, config.trainer.micro_batch_tokens) == (64, 64)
    assert config.orchestrator.eval is not None
    assert config.orchestrator.eval.sampling.max_tokens == 8
    assert config.orchestrator.eval.sampling.temperature == 0
    assert [env.name for env in config.orchestrator.env + config.orchestrator.eval.env] == ["x", "why"]


def test_engine_and_trainer_share_the_cores_unless_they_take_turns() -> None:
    at_once, in_turns = resolved(), resolved("--max-async-level", "0")
    assert (at_once.trainer.threads, at_once.inference.cpu.threads) == (4, 4)
    assert (in_turns.trainer.threads, in_turns.inference.cpu.threads) == (8, 8)


def test_a_step_is_tried_where_no_engine_is_disturbed_by_it() -> None:
    assert [resolved(on=on).trainer.try_step for on in (CPU, gpus(1), gpus(2))] == [False, False, True]
    assert resolved("--trainer.try-step", "true").trainer.try_step
    assert not resolved("--trainer.try-step", "false", on=gpus(2)).trainer.try_step


def test_threads_are_shared_among_ranks() -> None:
    assert resolved("--trainer.num-ranks", "2").trainer.threads == 2
    assert resolved("--trainer.num-ranks", "3", "--max-async-level", "0").trainer.threads == 2
    assert resolved("--trainer.num-ranks", "99").trainer.threads == 1
    assert resolved("--trainer.threads", "5").trainer.threads == 5


def test_rl_finds_free_ports_and_commands_alone_take_the_known_ones() -> None:
    config = resolved("--ports.batches", "7777", "--ports.weights", "0")
    ports = [config.inference.server.port, config.orchestrator.server.port, config.ports.weights]
    assert all(ports)
    assert len(set(ports)) == 3
    assert config.ports.batches == 7777
    alone = resolved(section="trainer")
    known = (alone.inference.server.port, alone.orchestrator.server.port, alone.ports.batches, alone.ports.weights)
    assert known == (8000, 8001, 5555, 5556)


def test_resolving_twice_changes_nothing() -> None:
    for machine in (CPU, gpus(1), gpus(4)):
        config = resolved("--orchestrator.env", '[{"id": "x"}]', on=machine)
        assert resolve(config, machine) == config


# on disk


def test_a_written_run_reads_back_the_same(tmp_path: Path) -> None:
    write_run(config := resolved("--trainer.loss.ratio-high", "inf", on=gpus(4)), tmp_path / "run.json")
    assert read_run(RunConfig, tmp_path / "run.json") == config
    assert load_run_config(["--run", str(tmp_path / "run.json")], program="rl")[0] == config
    assert json.loads((tmp_path / "run.json").read_text())["trainer"]["micro_batch_tokens"] == 2048


def test_each_process_can_be_started_alone_from_what_a_run_wrote(tmp_path: Path) -> None:
    argv = ["@", str(DATA / "guide_example.toml"), "--orchestrator.eval.num-examples", "none"]
    config = resolved(*argv, on=gpus(4))
    write_rooms(config, tmp_path)
    for room in ROOMS:
        alone = resolved("@", str(tmp_path / f"{room}.toml"), on=gpus(4), section=room)
        assert getattr(alone, room) == getattr(config, room)
        assert (alone.max_steps, alone.weight_broadcast, alone.ports) == (
            config.max_steps,
            config.weight_broadcast,
            config.ports,
        )


def test_toml_is_written_as_it_is_read() -> None:
    import tomllib

    table = {
        "a": 1,
        "b c": 'quote " and \\ and ü',
        "small": 1e-06,
        "on": True,
        "list": [1, 2],
        "empty": [],
        "t": {"x": {"y": "z"}, "none": {}},
        "many": [{"id": "a", "args": {"k": [{"deep": 1}]}}, {"id": "b"}],
    }
    assert tomllib.loads(to_toml(table)) == table
    assert tomllib.loads(to_toml(room_table(RunConfig(), "trainer")))["optim"]["lr"] == 1e-6


# the machine


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ("0", "1")),
        ("", ()),
        ("-1", ()),
        ("1", ("1",)),
        ("1,0", ("1", "0")),
        ("0,7,1", ("0",)),  # CUDA stops at the first entry that names no GPU
        ("GPU-1234", ("GPU-1234",)),
    ],
)
def test_visible_gpus_are_what_cuda_would_see(tmp_path: Path, visible: str | None, found: tuple[str, ...]) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert detect_devices(environ, tmp_path).gpus == found


def test_a_variable_does_not_make_gpus(tmp_path: Path) -> None:
    devices = detect_devices({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path)
    assert devices.gpus == ()
    assert devices.cores >= 1


def test_supervised_runs_resolve_too() -> None:
    on_gpus = resolve_sft(SftConfig(), gpus(4))
    assert (on_gpus.device, on_gpus.num_ranks, on_gpus.threads) == ("cuda", 4, 4)
    on_cpu = resolve_sft(SftConfig(seq_len=64), CPU)
    assert (on_cpu.device, on_cpu.num_ranks, on_cpu.micro_batch_tokens) == ("cpu", 1, 64)
    assert on_cpu.model.name == on_cpu.tokenizer.name == RunConfig().model.name


def test_an_evaluation_stays_greedy_where_only_other_things_are_said_of_its_sampling() -> None:
    assert evaluated_at("--orchestrator.eval.sampling.max-tokens", "16") == 0
    assert evaluated_at("--orchestrator.eval.sampling.temperature", "0.5") == 0.5


def evaluated_at(*flags: str) -> float:
    evaluation = resolved(*flags).orchestrator.eval
    assert evaluation is not None
    return evaluation.sampling.temperature
