"""The doctor's rehearsals: environments that fail, runs that do, and what a small run keeps of the large one."""

import json

from doctoring import build_case, diagnosed
from planted_faults import change_column
from toy_environments import ECHO, write
from trireme.base.devices import Devices
from trireme.tools.doctor.rehearsal import Ended, check_environments, judge_environment, judge_run, shrink
from written_run import write_whole_run

GPUS = Devices(gpus=("0", "1"), cores=4)


def test_each_environment_is_tried_in_a_process_of_its_own_and_fails_in_its_own_words(tmp_path):
    toys = [
        write(tmp_path, text, name=f"{name}.py")
        for name, text in (
            ("works", ECHO),
            (
                "cannot_score",
                ECHO.replace("return float", 'raise ValueError("the judge has no key")\n        return float'),
            ),
        )
    ]
    case = build_case(tmp_path, "--orchestrator.env", json.dumps([{"id": str(toy)} for toy in toys]))
    works, cannot_score = check_environments(case)
    assert works.verdict == "ok", works.found
    assert "20 examples to train on" in works.found
    assert "4 rollouts" in works.found
    assert (cannot_score.verdict, "the judge has no key" in cannot_score.found) == ("problem", True)
    assert "trireme env check" in cannot_score.fix
    (environment, _) = case.config.orchestrator.env
    does_not_load = judge_environment(Ended(2, "", "trireme env: the word list is not here\n"), environment)
    assert (does_not_load.verdict, "the word list is not here" in does_not_load.found) == ("problem", True)


def test_the_small_run_is_the_large_one_in_all_but_its_size(tmp_path):
    words = "--trainer.optim.lr 0.5 --orchestrator.batch-size 512 --max-steps 1000 --wandb.project x "
    words += "--orchestrator.sampling.max-tokens 1024 --trainer.ckpt.interval 5 --orchestrator.eval.interval 5 "
    case = build_case(tmp_path, *words.split(), "--orchestrator.buffer.online-difficulty-filtering")
    config = shrink(case)
    assert (config.max_steps, config.orchestrator.batch_size, config.orchestrator.sampling.max_tokens) == (3, 32, 64)
    assert (config.wandb, config.orchestrator.eval, config.trainer.ckpt.interval) == (None, None, None)
    assert not config.orchestrator.buffer.online_difficulty_filtering
    assert (config.trainer.optim, config.model) == (case.config.trainer.optim, case.config.model)
    assert config.paths.root == case.folder / "run"


def test_a_run_of_shared_gpus_or_of_several_machines_is_rehearsed_on_this_one(tmp_path):
    case = build_case(tmp_path, "--device", "cuda", devices=Devices(gpus=("0",), cores=4))
    assert shrink(case).inference.gpu_memory_utilization == case.config.inference.gpu_memory_utilization == 0.4
    words = "--device cuda --hosts.inference 10.0.0.2 --hosts.orchestrator 10.0.0.3 --hosts.trainer 10.0.0.4 10.0.0.5"
    config = shrink(build_case(tmp_path, *words.split(), devices=GPUS))
    assert (config.hosts.are_loopback, config.trainer.num_ranks) == (True, 1)
    assert (config.inference_gpu_ids, config.trainer_gpu_ids) == ((0,), (1,))


def test_a_run_that_refuses_to_start_is_a_problem_and_its_files_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, answers = diagnosed(capsys, "--model.name", str(tmp_path / "no-such-model"), "--only", "run")
    (answer,) = answers["run"]
    assert (code, answer["verdict"]) == (1, "problem")
    assert "ended with code 2 after 0 of 3 steps" in answer["found"]
    assert "no-such-model" in answer["found"]
    (kept,) = (tmp_path / "outputs").glob("doctor-*")
    assert (kept / "run.json").is_file()
    assert str(kept.relative_to(tmp_path)) in answer["fix"]


def test_of_three_steps_the_audit_and_each_log_are_told(tmp_path):
    done = Ended(0, "", "")
    config = write_whole_run(tmp_path / "run", batches=3)
    finding = judge_run(done, config, began=0.0)
    assert finding.verdict == "ok", finding.found
    assert finding.figures["versions_confirmed"] > 0
    assert "the audit finds no fault" in finding.found
    change_column("advantages", 0.375, step=1)(config)
    finding = judge_run(done, config, began=0.0)
    assert (finding.verdict, "contradict each other" in finding.found) == ("problem", True)
    assert "trireme audit" in finding.fix
    assert "was ended: it took too long" in judge_run(Ended(None, "", ""), config, began=0.0).found
    config.paths.logs.mkdir()
    config.paths.log("inference").write_text("INFO all is well\nRuntimeError: no kernel image\n")
    finding = judge_run(Ended(1, "", "inference died"), config, began=0.0)
    assert (finding.verdict, "inference died" in finding.found) == ("problem", True)
    assert "inference.stdout:\n  INFO all is well\n  RuntimeError: no kernel image" in finding.found
    assert str(config.paths.logs) in finding.fix
