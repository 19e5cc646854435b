"""The plan of a run, the commands that show it, and the folder that it starts in."""

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

from support.processes.stage import write_checkpoint
from support.runs.resolved_runs import run_in
from trireme.base.devices import Devices
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.cli.command import open_process
from trireme.config.files import write_process_files, write_run
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve, resuming
from trireme.config.run import RunConfig
from trireme.launch.folder import prepare_folder
from trireme.launch.plan import Plan, describe, env_vars_of, plan

DATA = Path(__file__).parents[2] / "data"
RUN = Path("outputs/configs/run.json")
GPUS = Devices(gpus=("4", "5", "6", "7"), cores=16)


def planned(*argv: str, on: Devices) -> tuple[Plan, RunConfig]:
    config = resolve(load_run_config(list(argv), program="rl")[0], on)
    return plan(config, RUN, on), config


def test_each_process_of_a_plan_sees_only_its_own_gpus():
    the_plan, config = planned("@", str(DATA / "guide_example.toml"), on=GPUS)
    assert [process.name for process in the_plan.values()] == ["inference", "orchestrator", "trainer"]
    for process in the_plan.values():
        assert process.argv == (sys.executable, "-m", f"trireme.cli.{process.name}", "--run", str(RUN))
        assert process.log == Path(f"outputs/logs/{process.name}.stdout")
        assert process.env["PYTHONUNBUFFERED"] == "1"
    visible = {process.name: process.env["CUDA_VISIBLE_DEVICES"] for process in the_plan.values()}
    assert visible == {"inference": "4,5,6", "orchestrator": "", "trainer": "7"}
    assert the_plan["inference"].gpus == (0, 1, 2)
    assert "32 rollouts = 2 groups x 16" in describe(the_plan, config)


def test_on_cpu_no_gpu_is_visible_and_the_engine_is_told_its_memory():
    the_plan, config = planned("--inference.cpu.kv-cache-gib", "3", on=Devices(cores=2))
    assert {process.env["CUDA_VISIBLE_DEVICES"] for process in the_plan.values()} == {""}
    expected = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1"}
    expected |= {"VLLM_PLUGINS": "trireme", "OMP_NUM_THREADS": "1"}
    assert the_plan["inference"].env.items() >= expected.items()
    assert the_plan["trainer"].ports == {"weights": config.ports.weights}


def test_variables_of_a_process_take_precedence_over_those_of_the_run():
    flags = ["--env-vars.A", "run", "--env-vars.B", "run", "--trainer.env-vars.A", "own", "--env-vars.MY_KEY", "hush"]
    the_plan, config = planned(*flags, on=Devices(cores=2))
    assert {name: (each.env["A"], each.env["B"]) for name, each in the_plan.items()} == {
        "inference": ("run", "run"),
        "orchestrator": ("run", "run"),
        "trainer": ("own", "run"),
    }
    assert "A=own B=run" in (text := describe(the_plan, config))
    assert the_plan["trainer"].env["MY_KEY"] == "hush", "the process gets the secret"
    assert "hush" not in text, "what is printed does not show it"


def test_file_of_a_lone_process_has_the_runs_variables_too(tmp_path):
    _, config = planned("--env-vars.A", "run", "--env-vars.B", "run", "--trainer.env-vars.A", "own", on=GPUS)
    for file in write_process_files(config, tmp_path):
        alone, _ = load_run_config(["@", str(file)], section=file.stem, program=file.stem)
        assert env_vars_of(alone, file.stem) == {"A": "own" if file.stem == "trainer" else "run", "B": "run"}


def test_health_checks_use_an_address_that_this_machine_reaches():
    the_plan, config = planned("--inference.server.host", "0.0.0.0", "--orchestrator.server.host", "::1", on=GPUS)
    assert the_plan["inference"].health == f"http://127.0.0.1:{config.inference.server.port}/health"
    assert the_plan["orchestrator"].health == f"http://[::1]:{config.orchestrator.server.port}/health"
    assert the_plan["trainer"].health is None


def command(monkeypatch: pytest.MonkeyPatch, program: str, *argv: str) -> int | str | None:
    """Run a command in this process. Returns its exit code."""
    monkeypatch.setattr(sys, "argv", [program, *argv])
    monkeypatch.setattr(os, "_exit", sys.exit)  # as the trainer ends
    with pytest.raises(SystemExit) as ended:
        import_module(f"trireme.cli.{program}").main()
    return ended.value.code


@pytest.mark.parametrize("program", ["rl", "trainer", "orchestrator", "inference", "sft"])
def test_help_shows_every_key_and_a_configuration_error_is_one_message(program, here, monkeypatch, capsys):
    assert command(monkeypatch, program, "--help") == 0
    printed = capsys.readouterr().out
    meaning = "Optimizer steps." if program == "sft" else "Training steps: batches, each of which makes one version."
    assert f"<integer > 0>  (default: 100)\n        {meaning}" in printed
    lr = "--trainer.optim.lr" if program == "rl" else "--optim.lr"
    assert (f"{lr}  <number >= 0>" in printed) is (program in ("rl", "trainer", "sft"))
    assert command(monkeypatch, program, "--max-stepz", "3") == 2
    expected = f"{program}: unknown flag `--max-stepz` - no such key exists. Did you mean `--max-steps`?\n"
    assert capsys.readouterr().err == expected
    assert list(here.iterdir()) == []


def test_a_dry_run_writes_the_resolved_run_beside_a_run(here, monkeypatch, capsys):
    Path("say.py").touch()
    Path("outputs/configs").mkdir(parents=True)
    Path("outputs/metrics.jsonl").touch()
    RUN.write_text("precious")
    argv = ["@", str(DATA / "guide_example.toml"), "--orchestrator.env.0.id", "say.py", "--dry-run", "--device", "cpu"]
    assert command(monkeypatch, "rl", *argv) == 0
    assert "lora" not in capsys.readouterr().out
    written = {str(file.relative_to("outputs")) for file in Path("outputs").rglob("*") if file.is_file()}
    files = ("run.json", "trainer.toml", "orchestrator.toml", "inference.toml")
    assert written == {"metrics.jsonl", "configs/run.json", *(f"configs/dry-run/{name}" for name in files)}
    assert RUN.read_text() == "precious"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--orchestrator.rollouts-per-example", "7"], "batch_size must be divisible by rollouts_per_example: 32 % 7"),
        (["--resume"], "not ready: `--resume` was given, and there is no run in outputs"),
        (["--orchestrator.env.0.id", "nowhere"], "not ready: Environment 'nowhere'"),
        (["--model.name", "models/none"], 'not ready: trainer.model.name = "models/none"'),
    ],
)
def test_run_that_cannot_start_exits_with_2_before_starting_anything(argv, words, here, monkeypatch, capsys):
    example = str(DATA / "guide_example.toml")
    assert command(monkeypatch, "rl", "@", example, "--device", "cpu", *argv) == 2
    assert words.removeprefix("not ready: ") in capsys.readouterr().err
    assert list(here.iterdir()) == [], "nothing was started"
    for _ in range(2):  # the first dry run leaves nothing that the second one would take for a run
        assert command(monkeypatch, "rl", "@", example, "--dry-run", "--device", "cpu", *argv) == 2
        said = capsys.readouterr()
        assert words in (said.out if words.startswith("not ready") else said.err)


@pytest.fixture
def earlier(tmp_path):
    paths = RunPaths(tmp_path / "outputs")
    (paths.journal / "batch_0").mkdir(parents=True)
    paths.metrics.write_text("{}")
    write_checkpoint(paths, 20)
    (paths.checkpoints / "step_30").mkdir()  # half of one
    return paths


def test_resuming_needs_a_run_and_the_checkpoint(earlier, tmp_path):
    with pytest.raises(ConfigError, match=r"no complete checkpoint of that step - it has \[20\]"):
        prepare_folder(run_in(earlier.root, resume_step=30))
    for resume, step in ((True, None), (False, 20), (False, -1), (False, 0)):
        assert prepare_folder(run_in(earlier.root, resume=resume, resume_step=step)) is None
    assert earlier.metrics.exists()
    begun = RunPaths(tmp_path / "begun")
    begun.run_config.parent.mkdir(parents=True)
    begun.run_config.touch()
    assert prepare_folder(run_in(begun.root, resume=True)) is None
    with pytest.raises(ConfigError, match="there is no run in"):
        prepare_folder(run_in(begun.root, resume_step=20))
    with pytest.raises(ConfigError, match=r"there is no run in .*nothing-here.*Runs nearby: .*outputs"):
        prepare_folder(run_in(earlier.root.with_name("nothing-here"), resume=True))


@pytest.mark.parametrize("parent", ["TRIREME_PARENT", "TRIREME_RANKS_PARENT"])
def test_launched_process_resumes_from_the_run_folder(here, monkeypatch, parent):
    config = resolve(load_run_config(["--trainer.ckpt.resume-step", "20"], program="rl")[0], Devices(cores=2))
    write_run(config, here / "run.json")
    monkeypatch.delenv("TRIREME_PARENT", raising=False)
    monkeypatch.setenv(parent, str(os.getppid()))
    opened, _ = open_process("trainer", ["--run", str(here / "run.json")])
    assert opened == (resuming(config) if parent == "TRIREME_PARENT" else config)
    assert (resuming(config).resume, resuming(config).trainer.ckpt.resume_step) == (True, None)
